use bytes::BytesMut;
use dcp_producer::User;
use dcp_wire::message::OpenFlags;
use dcp_wire::sasl::{self, Mechanism, ScramClient};
use dcp_wire::{Feature, Frame, Opaque, Opcode, Status, Vbid};

use super::raw_client::RawClient;
use super::{start, start_one};

fn auth<'a>(mechanism: Mechanism, message: &'a [u8]) -> Frame<'a> {
    Frame::request(Opcode::SASL_AUTH).with_key(mechanism.name().as_bytes()).with_value(message)
}

#[tokio::test]
async fn scram_proves_both_sides_with_every_mechanism() {
    let producer = start_one().await;
    for mechanism in
        Mechanism::PASSWORD.into_iter().filter(|mechanism| !mechanism.reveals_password())
    {
        let mut client = RawClient::connect(&producer, 0).await;
        client.log_in_with_scram(mechanism).await;
        client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
    }
}

#[tokio::test]
async fn password_that_is_wrong_is_refused_like_an_unknown_user() {
    let producer = start_one().await;
    for (username, password) in [("Administrator", "wrong"), ("nobody", "password")] {
        let mut client = RawClient::connect(&producer, 0).await;
        client.hello(&[Feature::XERROR]).await;
        let message = sasl::encode_plain(username, password).unwrap();
        client.fail(auth(Mechanism::Plain, &message), Status::AUTH_ERROR).await;
        let mut scram =
            ScramClient::new(Mechanism::ScramSha256, username, password, "nonce").unwrap();
        let first = scram.first_message();
        let challenge = client.ask(auth(Mechanism::ScramSha256, &first)).await;
        assert_eq!(challenge.status(), Status::AUTH_CONTINUE);
        let last = scram.respond(challenge.frame().value).unwrap();
        let step = Frame::request(Opcode::SASL_STEP).with_key(b"SCRAM-SHA256").with_value(&last);
        client.fail(step, Status::AUTH_ERROR).await;
        client.fail(Frame::request(Opcode::GET_CLUSTER_CONFIG), Status::EACCESS).await;
    }
}

#[tokio::test]
async fn connection_only_allows_set_up_before_authentication() {
    let producer = start_one().await;
    let mut client = RawClient::connect(&producer, 0).await;
    client.hello(&[Feature::XERROR]).await;
    client.succeed(Frame::request(Opcode::GET_ERROR_MAP).with_value(&[0, 2])).await;
    client.succeed(Frame::request(Opcode::SASL_LIST_MECHS)).await;
    for opcode in [
        Opcode::GET,
        Opcode::NOOP,
        Opcode::GET_CLUSTER_CONFIG,
        Opcode::STAT,
        Opcode::DCP_OPEN,
        Opcode::DCP_STREAM_REQ,
    ] {
        client.fail(Frame::request(opcode).with_key(b"key"), Status::EACCESS).await;
    }
    client.fail(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default"), Status::EACCESS).await;
}

#[tokio::test]
async fn client_without_xerror_is_disconnected_instead_of_sent_a_new_status() {
    let producer = start_one().await;
    let mut client = RawClient::connect(&producer, 0).await;
    // The lack of a login is no news to any client.
    client.fail(Frame::request(Opcode::GET).with_key(b"key"), Status::EACCESS).await;
    let message = sasl::encode_plain("Administrator", "password").unwrap();
    client.succeed(auth(Mechanism::Plain, &message)).await;
    let mut out = BytesMut::new();
    Frame::request(Opcode::GET).with_key(b"key").encode(&mut out).unwrap();
    client.send(&out).await;
    client.expect_end().await;
}

#[tokio::test]
async fn connection_set_up_may_be_pipelined() {
    let producer = start_one().await;
    let mut client = RawClient::connect(&producer, 0).await;
    let message = sasl::encode_plain("Administrator", "password").unwrap();
    let requests = [
        Frame::request(Opcode::HELLO).with_value(&[0, 7, 0, 0x0b]),
        Frame::request(Opcode::SASL_LIST_MECHS),
        auth(Mechanism::Plain, &message),
        Frame::request(Opcode::GET_ERROR_MAP).with_value(&[0, 2]),
        Frame::request(Opcode::SELECT_BUCKET).with_key(b"default"),
        Frame::request(Opcode::GET_CLUSTER_CONFIG),
    ];
    let mut out = BytesMut::new();
    for (request, opaque) in requests.iter().zip(1..) {
        request.with_opaque(Opaque(opaque)).encode(&mut out).unwrap();
    }
    client.send(&out).await;
    for (request, opaque) in requests.iter().zip(1..) {
        let answer = client.receive().await;
        assert_eq!((answer.opcode(), answer.opaque()), (request.header.opcode, Opaque(opaque)));
        assert_eq!(answer.status(), Status::SUCCESS);
    }
}

#[tokio::test]
async fn dcp_connection_cannot_authenticate_again() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    let message = sasl::encode_plain("Administrator", "password").unwrap();
    client.fail(auth(Mechanism::Plain, &message), Status::NOT_SUPPORTED).await;
    let select = Frame::request(Opcode::SELECT_BUCKET).with_key(b"default");
    client.fail(select, Status::NOT_SUPPORTED).await;
}

#[tokio::test]
async fn password_that_was_changed_is_needed_by_later_connections() {
    let producer = start_one().await;
    let mut before = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    producer.set_password("another").unwrap();
    before.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await;
    for (password, status) in [("password", Status::AUTH_ERROR), ("another", Status::SUCCESS)] {
        let mut client = RawClient::connect(&producer, 0).await;
        let message = sasl::encode_plain("Administrator", password).unwrap();
        assert_eq!(client.ask(auth(Mechanism::Plain, &message)).await.status(), status);
        let mut scram =
            ScramClient::new(Mechanism::ScramSha256, "Administrator", password, "nonce").unwrap();
        let challenge = client.ask(auth(Mechanism::ScramSha256, &scram.first_message())).await;
        let last = scram.respond(challenge.frame().value).unwrap();
        let step = Frame::request(Opcode::SASL_STEP).with_key(b"SCRAM-SHA256").with_value(&last);
        assert_eq!(client.ask(step).await.status(), status, "{password}");
    }
    for refused in ["", "a\0b"] {
        let error = producer.set_password(refused).unwrap_err();
        assert!(error.to_string().contains("password"), "{error}");
    }
    RawClient::connect(&producer, 0).await.log_in("Administrator", "another").await;
}

#[tokio::test]
async fn reader_may_do_what_its_role_allows_and_no_more() {
    let reads = |username: &str, reads| User {
        username: username.to_owned(),
        password: "word".to_owned(),
        reads,
    };
    let producer = start(|options| {
        options.users = vec![
            reads("reader", None),
            reads("elsewhere", Some(vec!["inventory".to_owned()])),
            reads("nobody", Some(Vec::new())),
        ];
    })
    .await;
    let log_in = async |username| {
        let mut client = RawClient::connect(&producer, 0).await;
        client.hello(&[Feature::XERROR, Feature::JSON]).await;
        client.log_in(username, "word").await;
        client
    };
    let select = Frame::request(Opcode::SELECT_BUCKET).with_key(b"default");
    let mut reader = log_in("reader").await;
    reader.succeed(select).await;
    for opcode in [
        Opcode::GET_CLUSTER_CONFIG,
        Opcode::GET_COLLECTIONS_MANIFEST,
        Opcode::GET_ALL_VB_SEQNOS,
        Opcode::GET_FAILOVER_LOG,
    ] {
        reader.succeed(Frame::request(opcode)).await;
    }
    let branch = producer.failover_logs()[&Vbid(0)][0].vbuuid.0.to_be_bytes();
    reader.succeed(Frame::request(Opcode::OBSERVE_SEQNO).with_value(&branch)).await;
    reader.fail(Frame::request(Opcode::GET).with_key(b"key"), Status::KEY_ENOENT).await;
    for (opcode, privilege) in [
        (Opcode::STAT, "SimpleStats"),
        (Opcode::SET, "Upsert"),
        (Opcode::ADD, "Insert"),
        (Opcode::DELETE, "Delete"),
        (Opcode::SUBDOC_MULTI_MUTATION, "Upsert"),
        (Opcode::GET_LOCKED, "Upsert"),
        (Opcode::UNLOCK, "Upsert"),
        (Opcode::SET_WITH_META, "MetaWrite"),
    ] {
        let refused = reader.fail(Frame::request(opcode).with_key(b"key"), Status::EACCESS).await;
        let body = String::from_utf8_lossy(refused.frame().value).into_owned();
        assert!(body.contains("context") && body.contains(privilege), "{opcode}: {body}");
    }
    reader.open_dcp(b"reader", OpenFlags::PRODUCER).await;

    let mut elsewhere = log_in("elsewhere").await;
    elsewhere.succeed(select).await;
    elsewhere.fail(Frame::request(Opcode::GET).with_key(b"key"), Status::EACCESS).await;
    let mut nobody = log_in("nobody").await;
    nobody.fail(select, Status::EACCESS).await;
}
