//! Whatever arrives is answered or ends the connection; nothing panics.

use dcp_producer_proto::{Connection, ConnectionConfig, Disconnect, Features, ServerVersion};
use dcp_wire::message::{Open, OpenFlags};
use dcp_wire::{Datatype, Frame, MAX_BODY_LEN, Magic, Opaque, Opcode, Status};
use proptest::prelude::*;

use crate::client::{COLLECTIONS, Client, LEGACY, from_scratch};
use dcp_test::bucket::{Bucket, VBucket, docs};

fn client(features: Features) -> Client {
    let bucket = Bucket::with(VBucket::new().on_disk(docs(1..=3)).checkpoint(4, docs(4..=6)));
    Client::open(bucket, features)
}

/// Version 6.0 closes the connection after an invalid packet, such as one with too long a name, but
/// only refuses a control that it cannot apply.
#[test]
fn server_of_an_older_release_closes_for_a_packet_but_not_for_a_control() {
    let plain = Features { snappy: false, ..LEGACY };
    let server_version = ServerVersion { major: 6, minor: 0, patch: 5 };
    let older = ConnectionConfig { server_version, ..ConnectionConfig::default() };

    let mut client = Client::new(Bucket::with(VBucket::new()), plain);
    client.connection = Connection::new(older.clone());
    assert_eq!(client.send_open(OpenFlags::PRODUCER), Status::SUCCESS);
    assert_eq!(client.control("force_value_compression", "true"), Status::EINVAL);
    assert_eq!(client.control("enable_noop", "true"), Status::SUCCESS, "it is still open");

    for (config, closes) in [(older, true), (ConnectionConfig::default(), false)] {
        let mut client = Client::new(Bucket::with(VBucket::new()), plain);
        client.connection = Connection::new(config);
        let mut packet = bytes::BytesMut::new();
        let open = Open {
            flags: OpenFlags::PRODUCER,
            name: &[b'n'; 251],
            value: &[],
            datatype: Datatype::RAW,
        };
        open.encode(Opaque(1), &mut packet).unwrap();
        match client.exchange(&packet) {
            Err(Disconnect::InvalidRequest(Opcode::DCP_OPEN)) => assert!(closes),
            answer => {
                assert_eq!(answer.unwrap().unwrap().status, Status::EINVAL);
                assert!(!closes);
            }
        }
    }
}

#[test]
fn server_of_an_older_release_answers_a_malformed_packet_then_closes() {
    let server_version = ServerVersion { major: 6, minor: 0, patch: 5 };
    let older = ConnectionConfig { server_version, ..ConnectionConfig::default() };
    let cut = Frame::request(Opcode::DCP_OPEN).with_extras(&[0; 7]).with_key(b"name");
    let unknown = Frame::request(Opcode::DCP_OPEN).with_extras(&[0xff; 8]).with_key(b"name");
    let refused = Frame::response(Opcode::DCP_OPEN, Status::EINVAL);
    for (what, frame) in [("cut", cut), ("unknown flags", unknown)] {
        let (mut packet, mut answer) = (Vec::new(), Vec::new());
        frame.encode(&mut packet).unwrap();
        refused.encode(&mut answer).unwrap();
        let mut client = Client::new(Bucket::with(VBucket::new()), LEGACY);
        assert_eq!(client.status(&packet), Status::EINVAL, "{what}: a newer one goes on");
        client.connection = Connection::new(older.clone());
        let reason = Disconnect::InvalidRequest(Opcode::DCP_OPEN);
        assert_eq!(client.last_words(&packet), (answer, reason), "{what}: without an explanation");
    }
}

/// Feeds bytes as a connection would: as long as they are packets and it stays open.
fn feed(client: &mut Client, mut bytes: &[u8]) {
    while let Ok(Some((frame, used))) = Frame::parse(bytes, MAX_BODY_LEN) {
        let mut out = bytes::BytesMut::new();
        let (now, features) = (client.now, client.features);
        let source = Some(&client.bucket);
        if client.connection.handle_frame(now, &frame, source, features, &mut out).is_err() {
            return;
        }
        assert!(out.len() < 4096, "an answer is small");
        client.connection.poll_transmit(now, &client.bucket, &mut out, 1000);
        bytes = &bytes[used..];
    }
}

prop_compose! {
    /// A packet with lengths that add up and anything else in its parts.
    fn packet()(
        magic in prop_oneof![Just(0x80u8), Just(0x08), Just(0x81), Just(0x82)],
        opcode in 0x50u8..=0x68,
        framing in prop::collection::vec(any::<u8>(), 0..5),
        extras in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..60),
            prop::collection::vec(0u8..3, 48),
            prop::collection::vec(0u8..2, 8),
        ],
        key in prop::collection::vec(any::<u8>(), 0..20),
        value in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..40),
            r#"\{"(sid|collections|scope|uid|purge_seqno)":[\[\]"0-9a-f{}]{0,8}\}"#
                .prop_map(String::into_bytes),
        ],
        datatype in 0u8..8,
        vbid in 0u16..3,
    ) -> Vec<u8> {
        let framing = if magic == 0x08 { framing } else { Vec::new() };
        let mut frame = Frame::request(Opcode(opcode));
        frame.header.magic = Magic(magic);
        frame.header.datatype = Datatype(datatype);
        frame.header.vbid_or_status = vbid;
        frame.framing_extras = &framing;
        frame.extras = &extras;
        frame.key = &key;
        frame.value = &value;
        let mut packet = Vec::new();
        frame.encode(&mut packet).expect("the parts are short");
        packet
    }
}

proptest! {
    #[test]
    fn producer_survives_any_sequence_of_packets(
        packets in prop::collection::vec(packet(), 1..20),
        collections: bool,
        stream_ids: bool,
    ) {
        let mut client = client(if collections { COLLECTIONS } else { LEGACY });
        if stream_ids {
            client.control("enable_stream_id", "true");
        } else {
            client.request(&from_scratch());
        }
        feed(&mut client, &packets.concat());
    }

    #[test]
    fn producer_survives_any_packet_before_the_connection_is_opened(packet in packet()) {
        let mut client = Client::new(Bucket::with(VBucket::new()), LEGACY);
        feed(&mut client, &packet);
    }

    #[test]
    fn stream_request_value_of_any_bytes_is_answered(
        value in prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            "[\\[{\"a-z:,0-9]{0,200}".prop_map(String::into_bytes),
        ],
    ) {
        let mut client = client(COLLECTIONS);
        let request = dcp_wire::message::StreamRequest { value: &value, ..from_scratch() };
        let status = client.request(&request);
        prop_assert!(status == Status::EINVAL || value.is_empty(), "{status}");
    }
}

#[test]
fn json_that_is_deeply_nested_is_refused() {
    let mut client = client(COLLECTIONS);
    let value = [br#"{"uid":"#.to_vec(), b"[".repeat(100_000)].concat();
    let request = dcp_wire::message::StreamRequest { value: &value, ..from_scratch() };
    assert_eq!(client.request(&request), Status::EINVAL);
}

#[test]
fn value_too_long_to_be_a_filter_is_refused_unread() {
    let mut client = client(COLLECTIONS);
    let ids = vec![r#""0""#; 100_000].join(",");
    let value = format!(r#"{{"collections":[{ids}]}}"#);
    let request = dcp_wire::message::StreamRequest { value: value.as_bytes(), ..from_scratch() };
    assert_eq!(client.request(&request), Status::EINVAL);
}

#[test]
fn dcp_excludes_unordered_execution() {
    let features = Features { unordered_execution: true, ..LEGACY };
    let mut client = Client::new(Bucket::with(VBucket::new()), features);
    assert_eq!(client.send_open(OpenFlags::PRODUCER), Status::NOT_SUPPORTED);
}

#[test]
fn ax_06_an_unknown_framing_extra_is_refused() {
    let mut client = client(LEGACY);
    let mut packet = Vec::new();
    Frame::request(Opcode::DCP_CLOSE_STREAM)
        .with_framing_extras(&[0x90])
        .encode(&mut packet)
        .unwrap();
    assert_eq!(client.status(&packet), Status::UNKNOWN_FRAME_INFO);
    // The last one that servers know, which says nothing to DCP.
    packet.clear();
    Frame::request(Opcode::DCP_CLOSE_STREAM)
        .with_framing_extras(&[0x70])
        .encode(&mut packet)
        .unwrap();
    assert_eq!(client.status(&packet), Status::KEY_ENOENT);
}

#[test]
fn stream_id_error_closes_the_connection_of_a_client_without_xerror() {
    let mut client = client(Features { xerror: false, ..COLLECTIONS });
    let request = dcp_wire::message::StreamRequest { value: br#"{"sid":1}"#, ..from_scratch() };
    let mut packet = Vec::new();
    request.encode(&mut packet).unwrap();
    assert!(client.exchange(&packet).is_err());
}

#[test]
fn error_body_is_marked_as_json_once_the_connection_is_open() {
    let features = Features { json: false, ..LEGACY };
    let mut malformed = Vec::new();
    Frame::request(Opcode::DCP_CLOSE_STREAM).with_extras(&[0]).encode(&mut malformed).unwrap();
    let bucket = || Bucket::with(VBucket::new());
    let before = Client::new(bucket(), features).exchange(&malformed).unwrap().unwrap();
    assert_eq!(before.datatype, Datatype::RAW);
    let after = Client::open(bucket(), features).exchange(&malformed).unwrap().unwrap();
    assert_eq!((after.status, after.datatype), (Status::EINVAL, Datatype::JSON));
    let body: serde_json::Value = serde_json::from_slice(&after.value).unwrap();
    assert!(body["error"]["context"].is_string());
}
