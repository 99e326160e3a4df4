//! Tokens, as Server 8.1 accepts them: over TLS, and nothing but SASL once they have expired.

use std::time::Duration;

use bytes::BytesMut;
use dcp_producer::{Error, Producer, ProducerOptions, TlsOptions, User};
use dcp_test::packet::Packet;
use dcp_test::tokens::{KEY, at, issue, signed};
use dcp_test::with;
use dcp_wire::message::OpenFlags;
use dcp_wire::sasl::encode_bearer;
use dcp_wire::{Feature, Frame, Opaque, Opcode, Status, Vbid};
use tokio::time::sleep;

use super::raw_client::RawClient;
use super::tls::connect;

async fn start() -> Producer {
    super::start(|options| {
        options.tls = Some(TlsOptions::default());
        options.token_key = Some(KEY.to_vec());
        let (username, password) = ("reader".to_owned(), "reads".to_owned());
        options.users = vec![User { username, password, reads: None }];
    })
    .await
}

/// A client over TLS that has not authenticated.
async fn fresh(producer: &Producer) -> RawClient {
    let mut client = connect(producer).await;
    client.hello(&[Feature::XERROR, Feature::JSON]).await;
    client
}

async fn offer(client: &mut RawClient, token: &str) -> Packet {
    let message = encode_bearer(token).unwrap();
    let request = Frame::request(Opcode::SASL_AUTH).with_key(b"OAUTHBEARER");
    client.ask(request.with_value(&message)).await
}

/// A client whose token is valid for two to three seconds.
async fn short_lived(producer: &Producer) -> RawClient {
    let mut client = fresh(producer).await;
    assert_eq!(offer(&mut client, &issue("reader", 4)).await.status(), Status::SUCCESS);
    client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
    client
}

const EXPIRED: Duration = Duration::from_millis(4100);

#[tokio::test]
async fn tk_01_to_tk_03_token_is_offered_and_accepted_over_tls_only() {
    let producer = start().await;
    let mut client = fresh(&producer).await;
    let offered = client.succeed(Frame::request(Opcode::SASL_LIST_MECHS)).await;
    let names = "SCRAM-SHA512 SCRAM-SHA256 SCRAM-SHA1 PLAIN OAUTHBEARER";
    assert_eq!(offered.frame().value, names.as_bytes());
    assert_eq!(offer(&mut client, &issue("reader", 60)).await.status(), Status::SUCCESS);
    client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
    // It has the user's rights.
    client
        .fail(Frame::request(Opcode::SET).with_key(b"k").with_extras(&[0; 8]), Status::EACCESS)
        .await;

    let mut plain = RawClient::connect(&producer, 0).await;
    plain.hello(&[Feature::XERROR]).await;
    let offered = plain.succeed(Frame::request(Opcode::SASL_LIST_MECHS)).await;
    assert!(!String::from_utf8_lossy(offered.frame().value).contains("OAUTHBEARER"));
    assert_eq!(offer(&mut plain, &issue("reader", 60)).await.status(), Status::AUTH_ERROR);
}

#[tokio::test]
async fn tk_04_token_that_is_not_acceptable_is_refused() {
    let producer = start().await;
    let mut client = fresh(&producer).await;
    let claims = format!(r#"{{"sub":"reader","exp":{}}}"#, at(60));
    for wrong in [
        issue("reader", -1),
        issue("nobody", 60),
        signed(b"the key of another issuer, never-shown", &claims),
        "x".to_owned(),
    ] {
        let answer = offer(&mut client, &wrong).await;
        assert_eq!(answer.status(), Status::AUTH_ERROR, "{wrong}");
        assert!(String::from_utf8_lossy(answer.frame().value).contains("ref"));
    }
    for malformed in [&b"n,,\x01\x01"[..], b"n,,\x01auth=Basic x\x01\x01", b""] {
        let request = Frame::request(Opcode::SASL_AUTH).with_key(b"OAUTHBEARER");
        client.fail(request.with_value(malformed), Status::EINVAL).await;
    }
    client.fail(Frame::request(Opcode::NOOP), Status::EACCESS).await;
}

#[tokio::test]
async fn tk_05_and_tk_06_everything_but_sasl_is_refused_once_a_token_has_expired() {
    let producer = start().await;
    let mut client = short_lived(&producer).await;
    client.open_dcp(b"name", OpenFlags::PRODUCER).await;
    client.succeed(Frame::request(Opcode::DCP_GET_FAILOVER_LOG)).await;
    sleep(EXPIRED).await;
    for opcode in [
        Opcode::NOOP,
        Opcode::HELLO,
        Opcode::SASL_LIST_MECHS,
        Opcode::GET_CLUSTER_CONFIG,
        Opcode::DCP_GET_FAILOVER_LOG,
        Opcode::DCP_STREAM_REQ,
        Opcode::DCP_CLOSE_STREAM,
    ] {
        client.fail(Frame::request(opcode), Status::AUTH_STALE).await;
    }
    // An acknowledgement has no other answer.
    let ack = Frame::request(Opcode::DCP_BUFFER_ACK).with_opaque(Opaque(99));
    let mut packet = BytesMut::new();
    ack.with_extras(&99u32.to_be_bytes()).encode(&mut packet).unwrap();
    client.send(&packet).await;
    let refused = client.receive().await;
    assert_eq!((refused.opcode(), refused.status()), (Opcode::DCP_BUFFER_ACK, Status::AUTH_STALE));
    assert_eq!(refused.frame().header.opaque, Opaque(99));
}

#[tokio::test]
async fn tk_07_answer_to_a_noop_ends_the_connection_once_a_token_has_expired() {
    let producer = start().await;
    // One that a server ignores as long as the token is valid, and that to a noop.
    for opcode in [Opcode::GET_CLUSTER_CONFIG, Opcode::DCP_NOOP] {
        let mut client = short_lived(&producer).await;
        client.open_dcp(b"name", OpenFlags::PRODUCER).await;
        let mut answer = BytesMut::new();
        Frame::response(opcode, Status::SUCCESS).encode(&mut answer).unwrap();
        if !opcode.is_dcp() {
            client.send(&answer).await;
            client.succeed(Frame::request(Opcode::DCP_GET_FAILOVER_LOG)).await;
        }
        sleep(EXPIRED).await;
        client.send(&answer).await;
        client.expect_end().await;
    }
}

#[tokio::test]
async fn tk_08_newer_token_is_accepted_on_a_dcp_connection_and_streams_go_on() {
    let producer = start().await;
    let mut client = short_lived(&producer).await;
    client.open_dcp(b"name", OpenFlags::PRODUCER).await;
    for token in [issue("reader", 3), issue("reader", 60)] {
        sleep(Duration::from_secs(1)).await;
        assert_eq!(offer(&mut client, &token).await.status(), Status::SUCCESS);
        client.succeed(Frame::request(Opcode::DCP_GET_FAILOVER_LOG).with_vbid(Vbid(1))).await;
    }
    sleep(EXPIRED).await;
    client.succeed(Frame::request(Opcode::DCP_GET_FAILOVER_LOG).with_vbid(Vbid(1))).await;
    // A connection that began with a password can go on with a token, and the other way round.
    let mut client = fresh(&producer).await;
    client.log_in("reader", "reads").await;
    assert_eq!(offer(&mut client, &issue("reader", 2)).await.status(), Status::SUCCESS);
    sleep(EXPIRED).await;
    client.fail(Frame::request(Opcode::NOOP), Status::AUTH_STALE).await;
    client.log_in("reader", "reads").await;
    client.succeed(Frame::request(Opcode::NOOP)).await;
}

#[tokio::test]
async fn tk_09_newer_token_that_is_refused_ends_the_login() {
    let producer = start().await;
    let mut client = short_lived(&producer).await;
    assert_eq!(offer(&mut client, "x").await.status(), Status::AUTH_ERROR);
    client.fail(Frame::request(Opcode::GET_CLUSTER_CONFIG), Status::EACCESS).await;
}

#[tokio::test]
async fn tk_10_token_that_is_not_valid_yet_is_accepted_for_later() {
    let producer = start().await;
    let mut client = fresh(&producer).await;
    let claims = format!(r#"{{"sub":"reader","nbf":{},"exp":{}}}"#, at(2), at(60));
    assert_eq!(offer(&mut client, &signed(KEY, &claims)).await.status(), Status::SUCCESS);
    client.fail(Frame::request(Opcode::NOOP), Status::AUTH_STALE).await;
    sleep(Duration::from_millis(2100)).await;
    client.succeed(Frame::request(Opcode::NOOP)).await;
}

#[tokio::test]
async fn token_key_that_is_short_or_without_tls_is_refused() {
    for (key, tls) in [(vec![7; 31], Some(TlsOptions::default())), (vec![7; 32], None)] {
        let options = with(ProducerOptions::default(), |options| {
            (options.token_key, options.tls) = (Some(key), tls);
        });
        assert!(!format!("{options:?}").contains("[7, 7"));
        let error = Producer::start(options).await.unwrap_err();
        assert!(matches!(error, Error::InvalidOption { option: "token_key", .. }), "{error}");
    }
}
