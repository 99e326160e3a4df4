use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use bytes::BytesMut;
use dcp_producer::{Error, Producer, ProducerOptions, TlsOptions, WriteOptions};
use dcp_wire::message::{OpenFlags, StreamRequestFlags};
use dcp_wire::{Feature, Frame, Opcode, Seqno, Status, Vbid, Vbuuid};

use super::raw_client::RawClient;
use super::{start, start_one};

/// Longest wait for something that must come.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

async fn refusal(set: impl FnOnce(&mut ProducerOptions)) -> Error {
    let mut options = ProducerOptions::default();
    set(&mut options);
    Producer::start(options).await.expect_err("the option is impossible")
}

#[tokio::test]
async fn producer_options_that_are_impossible_are_refused_by_name() {
    let everywhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let error = refusal(|options| options.host = everywhere).await;
    assert!(matches!(error, Error::DefaultPassword { host } if host == everywhere));
    assert!(error.to_string().contains("set another"), "{error}");
    for (set, name) in [
        ((|options| options.replicas = 4) as fn(&mut ProducerOptions), "replicas"),
        (|options| options.nodes = 0, "nodes"),
        (|options| options.vbuckets = 1025, "vbuckets"),
        (|options| options.bucket = "a/b".to_owned(), "bucket"),
        (|options| options.username = String::new(), "username"),
        (|options| options.password = String::new(), "password"),
        (|options| options.max_connections = 0, "max_connections"),
        (|options| options.max_streams = 0, "max_streams"),
        (|options| options.authentication_timeout = Duration::ZERO, "authentication_timeout"),
        (|options| options.idle_timeout = Duration::ZERO, "idle_timeout"),
        (|options| (options.port, options.nodes) = (65535, 2), "port"),
    ] {
        let error = refusal(set).await;
        assert!(
            matches!(error, Error::InvalidOption { option, .. } if option == name),
            "{name}: {error}"
        );
    }
}

#[tokio::test]
async fn cluster_with_a_password_of_its_own_listens_everywhere() {
    let producer = start(|options| {
        options.host = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        options.password = "a secret".to_owned();
        options.tls = Some(TlsOptions::default());
    })
    .await;
    assert!(producer.connection_string().starts_with("couchbase://127.0.0.1:"));
    assert!(producer.management_urls()[0].starts_with("http://127.0.0.1:"));
    let mut client = RawClient::connect(&producer, 0).await;
    client.hello(&[Feature::XERROR]).await;
    client.log_in("Administrator", "a secret").await;
    client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
    let map = client.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await;
    let map: serde_json::Value = serde_json::from_slice(map.frame().value).unwrap();
    // Clients put the name there that they know the node by.
    let server = map["vBucketServerMap"]["serverList"][0].as_str().unwrap();
    assert!(server.starts_with("$HOST:"), "{server}");
    assert!(map["nodesExt"][0]["services"]["kv"].is_u64());
    assert!(map["nodesExt"][0].get("hostname").is_none());
}

#[tokio::test]
async fn client_that_does_not_authenticate_is_cut_off_however_busy_it_is() {
    let producer = start(|options| {
        options.authentication_timeout = Duration::from_millis(300);
    })
    .await;
    let mut silent = RawClient::connect(&producer, 0).await;
    let mut busy = RawClient::connect(&producer, 0).await;
    let talk = async { while busy.try_hello().await {} };
    tokio::time::timeout(ANSWER_TIMEOUT, talk).await.expect("it may talk for ever");
    silent.expect_end().await;
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    tokio::time::sleep(Duration::from_millis(600)).await;
    client.succeed(Frame::request(Opcode::NOOP)).await;
}

#[tokio::test]
async fn connection_that_stands_still_is_closed_unless_it_is_for_dcp() {
    let producer = start(|options| options.idle_timeout = Duration::from_millis(300)).await;
    let mut reader = RawClient::ready(&producer, 0, &[]).await;
    reader.open_dcp(b"reader", OpenFlags::empty()).await;
    let mut idle = RawClient::ready(&producer, 0, &[]).await;
    idle.expect_end().await;
    // One that takes nothing of its answers stands still as well.
    let mut deaf = RawClient::ready(&producer, 0, &[]).await;
    let key = write_large(&producer);
    flood(&mut deaf, &key).await;
    reader.expect_silence().await;
    reader.succeed(Frame::request(Opcode::NOOP)).await;
}

/// A document of 1 MiB in vBucket 0.
fn write_large(producer: &Producer) -> String {
    let keys = (0..).map(|n| format!("large-{n}"));
    let key = keys.into_iter().find(|key| producer.vbid_of(key.as_bytes()).0 == 0).unwrap();
    let value = bytes::Bytes::from(vec![b'v'; 1 << 20]);
    producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap();
    key
}

/// Asks for a document again and again, reading nothing, until the server closes the connection.
async fn flood(client: &mut RawClient, key: &str) {
    let mut requests = BytesMut::new();
    for _ in 0..1000 {
        Frame::request(Opcode::GET).with_key(key.as_bytes()).encode(&mut requests).unwrap();
    }
    let asking = async { while client.try_send(&requests).await.is_ok() {} };
    tokio::time::timeout(ANSWER_TIMEOUT, asking).await.expect("it may flood the server for ever");
}

#[tokio::test]
async fn streams_and_windows_are_bounded_as_the_options_say() {
    let producer = start(|options| {
        options.max_streams = 2;
        options.max_unacknowledged_bytes = 1 << 20;
    })
    .await;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    let size = Frame::request(Opcode::DCP_CONTROL).with_key(b"connection_buffer_size");
    client.fail(size.with_value(b"1048577"), Status::ENOMEM).await;
    client.succeed(size.with_value(b"1048576")).await;
    for (vbid, status) in [(0, Status::SUCCESS), (1, Status::SUCCESS), (2, Status::ENOMEM)] {
        let none = StreamRequestFlags::empty();
        let answer =
            client.request_stream(Vbid(vbid), Seqno::ZERO, Seqno::MAX, Vbuuid(0), none).await;
        assert_eq!(answer.status(), status, "{vbid}");
    }
}

#[tokio::test]
async fn port_that_is_taken_is_an_error() {
    let producer = start_one().await;
    let connection_string = producer.connection_string();
    let port = connection_string.rsplit(':').next().unwrap().parse().unwrap();
    let error = refusal(|options| options.port = port).await;
    assert!(matches!(error, Error::Listen { port: refused, .. } if refused == port));
}

#[tokio::test]
async fn producer_options_do_not_show_the_password() {
    let mut options = ProducerOptions::default();
    options.password = "a secret".to_owned();
    assert!(!format!("{options:?}").contains("a secret"));
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed_and_room_is_used_again() {
    let producer = start(|options| options.max_connections = 2).await;
    let mut first = RawClient::connect(&producer, 0).await;
    let mut second = RawClient::connect(&producer, 0).await;
    first.hello(&[]).await;
    second.hello(&[]).await;
    RawClient::connect(&producer, 0).await.expect_end().await;
    drop(first);
    // The server notices in its own time.
    for _ in 0..100 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let mut third = RawClient::connect(&producer, 0).await;
        if third.try_hello().await {
            return;
        }
    }
    panic!("the closed connection still counts");
}

#[tokio::test]
async fn packet_of_a_claimed_length_over_the_limit_ends_the_connection() {
    let producer = start_one().await;
    let mut anonymous = RawClient::connect(&producer, 0).await;
    let mut packet = [0u8; 24];
    (packet[0], packet[1]) = (0x80, Opcode::HELLO.0);
    packet[8..12].copy_from_slice(&(64 * 1024 + 1u32).to_be_bytes());
    anonymous.send(&packet).await;
    anonymous.expect_end().await;
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    packet[8..12].copy_from_slice(&u32::MAX.to_be_bytes());
    client.send(&packet).await;
    client.expect_end().await;
}

#[tokio::test]
async fn packet_that_is_none_ends_the_connection() {
    let producer = start_one().await;
    for garbage in [&b"GET / HTTP/1.1\r\n"[..], b"\x16\x03\x01", &[0x80, 1, 0, 9, 9, 0, 0, 0, 0]] {
        let mut client = RawClient::connect(&producer, 0).await;
        client.send(garbage).await;
        client.send(&[0; 64]).await;
        client.expect_end().await;
    }
}

#[tokio::test]
async fn document_that_is_large_passes_and_one_too_large_is_refused() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let key = (0..)
        .map(|n| format!("key-{n}"))
        .find(|key| producer.vbid_of(key.as_bytes()).0 == 0)
        .unwrap();
    let value = vec![b'v'; 21 << 20];
    let write = Frame::request(Opcode::SET).with_key(key.as_bytes()).with_extras(&[0; 8]);
    client.succeed(write.with_value(&value)).await;
    let got = client.succeed(Frame::request(Opcode::GET).with_key(key.as_bytes())).await;
    assert_eq!(got.frame().value, value);
    let larger = vec![b'v'; (21 << 20) + 1];
    client.fail(write.with_value(&larger), Status::E2BIG).await;
}
