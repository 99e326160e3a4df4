use std::net::{IpAddr, Ipv4Addr};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::BytesMut;
use dcp_producer::{Error, Producer, ProducerOptions};
use dcp_wire::message::OpenFlags;
use dcp_wire::{Feature, Frame, Opcode, Status};
use proptest::prelude::*;

use super::raw_client::RawClient;
use super::{start, start_one};

async fn refusal(set: impl FnOnce(&mut ProducerOptions)) -> Error {
    let mut options = ProducerOptions::default();
    set(&mut options);
    Producer::start(options).await.expect_err("the option is impossible")
}

#[tokio::test]
async fn impossible_options_are_refused_by_name() {
    let everywhere = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
    let error = refusal(|options| options.host = everywhere).await;
    assert!(matches!(error, Error::NotLoopback { host } if host == everywhere));
    for (set, name) in [
        ((|options| options.replicas = 4) as fn(&mut ProducerOptions), "replicas"),
        (|options| options.nodes = 0, "nodes"),
        (|options| options.vbuckets = 1025, "vbuckets"),
        (|options| options.bucket = "a/b".to_owned(), "bucket"),
        (|options| options.username = String::new(), "username"),
        (|options| options.password = String::new(), "password"),
        (|options| options.max_connections = 0, "max_connections"),
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
async fn a_taken_port_is_an_error() {
    let producer = start_one().await;
    let connection_string = producer.connection_string();
    let port = connection_string.rsplit(':').next().unwrap().parse().unwrap();
    let error = refusal(|options| options.port = port).await;
    assert!(matches!(error, Error::Listen { port: refused, .. } if refused == port));
}

#[tokio::test]
async fn options_keep_the_password_out_of_their_debug_form() {
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
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        let mut third = RawClient::connect(&producer, 0).await;
        if third.try_hello().await {
            return;
        }
    }
    panic!("the closed connection still counts");
}

#[tokio::test]
async fn a_claimed_length_over_the_limit_ends_the_connection() {
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
async fn something_that_is_no_packet_ends_the_connection() {
    let producer = start_one().await;
    for garbage in [&b"GET / HTTP/1.1\r\n"[..], b"\x16\x03\x01", &[0x80, 1, 0, 9, 9, 0, 0, 0, 0]] {
        let mut client = RawClient::connect(&producer, 0).await;
        client.send(garbage).await;
        client.send(&[0; 64]).await;
        client.expect_end().await;
    }
}

#[tokio::test]
async fn a_large_document_passes_and_one_too_large_is_refused() {
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

/// Bodies that may look like something.
fn packets() -> impl Strategy<Value = Vec<u8>> {
    let request = (
        any::<u8>(),
        prop::collection::vec(any::<u8>(), 0..40),
        prop::collection::vec(any::<u8>(), 0..300),
        prop::collection::vec(any::<u8>(), 0..300),
        prop_oneof![Just(0u16), any::<u16>()],
        0u8..8,
        prop::collection::vec(any::<u8>(), 0..4),
    );
    request.prop_map(|(opcode, extras, key, value, vbid, datatype, framing)| {
        let mut out = BytesMut::new();
        let key = if framing.is_empty() { &key[..] } else { &key[..key.len().min(255)] };
        Frame::request(Opcode(opcode))
            .with_vbid(dcp_wire::Vbid(vbid))
            .with_datatype(dcp_wire::Datatype(datatype))
            .with_framing_extras(&framing)
            .with_extras(&extras)
            .with_key(key)
            .with_value(&value)
            .encode(&mut out)
            .unwrap();
        out.to_vec()
    })
}

/// Panics of any thread so far: tasks that panic end silently otherwise.
fn panics() -> usize {
    static PANICS: AtomicUsize = AtomicUsize::new(0);
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let default = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::SeqCst);
            default(info);
        }));
    });
    PANICS.load(Ordering::SeqCst)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn whatever_a_client_sends_nothing_panics_and_the_next_one_is_served(
        requests in prop::collection::vec(packets(), 1..40),
        dcp in any::<bool>(),
    ) {
        let panics_before = panics();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let producer = start_one().await;
            let features = [Feature::XERROR, Feature::ALT_REQUEST_SUPPORT, Feature::XATTR,
                Feature::SNAPPY, Feature::JSON];
            let mut client = RawClient::ready(&producer, 0, &features).await;
            if dcp {
                client.open_dcp(b"reader", OpenFlags::empty()).await;
            }
            for request in requests {
                if client.try_send(&request).await.is_err() {
                    break;
                }
            }
            drop(client);
            let mut next = RawClient::ready(&producer, 0, &[]).await;
            next.succeed(Frame::request(Opcode::NOOP)).await;
            producer.shutdown().await;
        });
        prop_assert_eq!(panics(), panics_before);
    }
}
