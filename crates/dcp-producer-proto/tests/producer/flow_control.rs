//! The flow-control window, to the byte.

use bytes::Bytes;
use dcp_producer_proto::{Item, ItemKind, Transmit};
use dcp_test::conformance::{Outcome, note};
use dcp_wire::message::{OpenFlags, StreamRequest};
use dcp_wire::{Datatype, Frame, Opcode, Seqno, Status, Vbid};

use crate::client::{COLLECTIONS, Client, LEGACY, from_scratch};
use dcp_test::bucket::{Bucket, VBucket, begin, doc, docs};

/// A document whose message has 64 bytes: 55, a key of 4 and a value of 5.
fn of_64_bytes(seqno: u64) -> Item {
    Item {
        key: Bytes::from(format!("key{seqno}")),
        value: Bytes::from_static(b"value"),
        datatype: Datatype::RAW,
        ..doc(seqno, 0)
    }
}

fn streaming(window: u32, vbucket: VBucket) -> Client {
    let window = window.to_string();
    let controls = [("connection_buffer_size", window.as_str())];
    let bucket = Bucket::with(vbucket);
    let mut client = Client::open_with(bucket, LEGACY, OpenFlags::PRODUCER, &controls);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    client
}

#[test]
fn fc_30_and_fc_31_window_is_overshot_once_and_reopened_by_an_ack() {
    let items = (1..=3).map(of_64_bytes);
    let mut client = streaming(100, VBucket::new().checkpoint(1, items));
    assert_eq!(client.receive(), ["MARK [0-3] 0x5", "MUT 1"]);
    assert_eq!(client.connection.unacked_bytes(), 108);
    client.ack(100);
    assert_eq!(client.connection.unacked_bytes(), 8);
    assert_eq!(client.receive(), ["MUT 2", "MUT 3"], "8 and 72 bytes are less than 100");
    assert_eq!(client.connection.unacked_bytes(), 136);
}

#[test]
fn fc_39_a_window_with_exactly_its_size_outstanding_is_closed() {
    let items = || VBucket::new().checkpoint(1, (1..=2).map(of_64_bytes));
    // The marker and one document are 108 bytes.
    let mut client = streaming(108, items());
    assert_eq!(client.receive(), ["MARK [0-2] 0x5", "MUT 1"]);
    let mut client = streaming(109, items());
    assert_eq!(client.receive(), ["MARK [0-2] 0x5", "MUT 1", "MUT 2"]);
    let mut client = streaming(108, items());
    client.receive();
    client.ack(1);
    assert_eq!(client.receive(), ["MUT 2"]);
}

#[test]
fn fc_37_a_message_larger_than_the_window_passes_an_empty_one() {
    let large = Item { value: Bytes::from(vec![b'x'; 20 << 20]), ..of_64_bytes(1) };
    let mut client = streaming(1, VBucket::new().checkpoint(1, [large]));
    assert_eq!(client.receive(), ["MARK [0-1] 0x5"]);
    client.ack(44);
    assert_eq!(client.receive(), ["MUT 1"]);
}

#[test]
fn fc_40_too_large_an_acknowledgement_earns_no_credit() {
    let items = (1..=4).map(of_64_bytes);
    let mut client = streaming(100, VBucket::new().checkpoint(1, items));
    client.receive();
    client.ack(u32::MAX);
    assert_eq!(client.connection.unacked_bytes(), 0);
    assert_eq!(client.receive(), ["MUT 2", "MUT 3"]);
    assert_eq!(client.connection.unacked_bytes(), 128);
}

#[test]
fn fc_01_and_fc_02_the_window_can_be_resized_and_switched_off() {
    let mut client = streaming(512, VBucket::new().checkpoint(1, (1..=20).map(of_64_bytes)));
    assert_eq!(client.receive().len(), 1 + 8, "44 and 8 times 64 bytes");
    assert_eq!(client.connection.unacked_bytes(), 556);
    assert_eq!(client.control("connection_buffer_size", "1024"), Status::SUCCESS);
    assert_eq!(client.receive().len(), 8);
    assert_eq!(client.control("connection_buffer_size", "x"), Status::EINVAL);
    assert!(client.receive().is_empty(), "a refused size changes nothing");
    assert_eq!(client.control("connection_buffer_size", "0"), Status::SUCCESS);
    assert_eq!(client.receive().len(), 4);
    assert_eq!(client.connection.unacked_bytes(), 0, "nothing is counted without a window");
}

#[test]
fn fc_36_what_is_counted_is_what_was_sent() {
    let vbucket = VBucket::new()
        .on_disk([begin(1, 8), doc(2, 8), doc(3, 0)])
        .checkpoint(4, [begin(4, 9), doc(5, 9)]);
    let controls = [
        ("enable_noop", "true"),
        ("connection_buffer_size", "100000"),
        ("enable_stream_id", "true"),
        ("max_marker_version", "2.2"),
    ];
    let mut client =
        Client::open_with(Bucket::with(vbucket), COLLECTIONS, OpenFlags::PRODUCER, &controls);
    let value = br#"{"sid":5,"collections":["8"]}"#;
    let request = StreamRequest { end_seqno: Seqno(3), value, ..from_scratch() };
    assert_eq!(client.request(&request), Status::SUCCESS);
    let packets = client.receive_packets();
    assert_eq!(packets.len(), 5, "a marker, an event, a document, an advance, the end");
    let bytes: usize = packets.iter().map(Vec::len).sum();
    assert_eq!(client.connection.unacked_bytes(), bytes as u64);
    assert_eq!(packets[0].len(), 77 + 3);
    assert_eq!(packets[4].len(), 31, "FC-23: an end with a stream id");
}

#[test]
fn stream_end_waits_for_credit() {
    // As recorded from a real server: window 1024, four documents, an end.
    let item = |seqno| Item { value: Bytes::from(vec![b'x'; 216]), ..of_64_bytes(seqno) };
    let bucket = Bucket::with(VBucket::new().checkpoint(1, (1..=4).map(item)));
    let controls = [("connection_buffer_size", "1024")];
    let mut client = Client::open_with(bucket, LEGACY, OpenFlags::PRODUCER, &controls);
    let request = StreamRequest { end_seqno: Seqno(4), ..from_scratch() };
    assert_eq!(client.request(&request), Status::SUCCESS);
    assert_eq!(client.receive().len(), 5, "everything but the end");
    client.ack(500);
    assert_eq!(client.receive(), ["END 0"]);
}

#[test]
fn fc_28_noops_pass_a_closed_window_uncounted() {
    let items = (1..=3).map(of_64_bytes);
    let mut client = streaming(100, VBucket::new().checkpoint(1, items));
    client.receive();
    assert_eq!(client.control("enable_noop", "true"), Status::SUCCESS);
    client.pass(std::time::Duration::from_secs(20));
    assert_eq!(client.receive(), ["NOOP 10000001"]);
    assert_eq!(client.connection.unacked_bytes(), 108);
}

#[test]
fn fc_42_a_malformed_acknowledgement_is_answered() {
    let mut client = streaming(100, VBucket::new());
    for extras in [&[0; 3][..], &[0; 8][..]] {
        let mut packet = Vec::new();
        Frame::request(Opcode::DCP_BUFFER_ACK).with_extras(extras).encode(&mut packet).unwrap();
        assert_eq!(client.status(&packet), Status::EINVAL);
    }
}

#[test]
fn budget_is_overshot_by_one_message_at_most() {
    let bucket = Bucket::with(VBucket::new().checkpoint(1, (1..=100).map(of_64_bytes)));
    let mut client = Client::open(bucket, LEGACY);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    let (now, mut out) = (client.now, bytes::BytesMut::new());
    let mut calls = 0;
    loop {
        out.clear();
        let transmit = client.connection.poll_transmit(now, &client.bucket, &mut out, 200);
        assert_eq!(transmit.written, out.len());
        assert!(transmit.written < 200 + 65, "{}", transmit.written);
        calls += 1;
        if !transmit.more {
            break;
        }
    }
    assert!(calls > 6_444 / 264, "{calls} calls for 6 KiB");
}

#[test]
fn budget_that_is_used_to_the_byte_is_used_up() {
    let bucket = Bucket::with(VBucket::new().checkpoint(1, (1..=2).map(of_64_bytes)));
    let mut client = Client::open(bucket, LEGACY);
    assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
    let (now, mut out) = (client.now, bytes::BytesMut::from(&b"an answer"[..]));
    // The marker and one document.
    for (budget, written, more) in [(108, 108, true), (64, 64, true), (64, 0, false)] {
        let transmit = client.connection.poll_transmit(now, &client.bucket, &mut out, budget);
        assert_eq!(transmit, Transmit { written, more });
    }
}

#[test]
fn streams_take_turns_however_small_the_budget_is() {
    let mut bucket = Bucket::with(VBucket::new());
    for vbid in 0..2 {
        bucket.vbuckets.insert(vbid, VBucket::new().checkpoint(1, (1..=2).map(of_64_bytes)));
    }
    let mut client = Client::open(bucket, LEGACY);
    for vbid in 0..2 {
        let request = StreamRequest { vbid: Vbid(vbid), ..from_scratch() };
        assert_eq!(client.request(&request), Status::SUCCESS);
    }
    let now = client.now;
    let order: Vec<_> = (0..6)
        .map(|_| {
            let mut out = bytes::BytesMut::new();
            client.connection.poll_transmit(now, &client.bucket, &mut out, 1);
            crate::client::frame(&out).header.vbid().0
        })
        .collect();
    assert_eq!(order, [0, 1, 0, 1, 0, 1]);
}

#[test]
fn streams_take_turns() {
    let mut bucket = Bucket::with(VBucket::new());
    for vbid in 0..3 {
        let items = (1..=3)
            .map(|seqno| Item { value: Bytes::from(vec![b'x'; 20_000]), ..of_64_bytes(seqno) });
        bucket.vbuckets.insert(vbid, VBucket::new().checkpoint(1, items));
    }
    let mut client = Client::open(bucket, LEGACY);
    for vbid in 0..3 {
        let request = StreamRequest { vbid: Vbid(vbid), ..from_scratch() };
        assert_eq!(client.request(&request), Status::SUCCESS);
    }
    let order: Vec<_> = client
        .receive_packets()
        .iter()
        .map(|packet| crate::client::frame(packet).header.vbid().0)
        .collect();
    assert_eq!(order, [0, 0, 0, 1, 1, 1, 2, 2, 2, 0, 1, 2]);
}

#[test]
fn streams_are_all_served_by_the_thousand() {
    let mut bucket = Bucket::with(VBucket::new());
    for vbid in 0..1024 {
        bucket.vbuckets.insert(vbid, VBucket::new().checkpoint(1, docs(1..=2)));
    }
    let mut client = Client::open(bucket, LEGACY);
    for vbid in 0..1024 {
        let request = StreamRequest { vbid: Vbid(vbid), ..from_scratch() };
        assert_eq!(client.request(&request), Status::SUCCESS);
    }
    assert_eq!(client.receive().len(), 1024 * 3);
    client.bucket.vbuckets.get_mut(&700).unwrap().write(doc(3, 0));
    client.connection.notify(Vbid(700));
    assert_eq!(client.receive(), ["MARK [3-3] 0x1", "MUT 3"]);
}

#[test]
fn fc_05_to_fc_20_every_message_counts_with_its_whole_packet() {
    let tombstone = |kind| Item { kind, value: Bytes::new(), ..of_64_bytes(1) };
    let named = |name: &'static str, len: usize| Item {
        key: Bytes::from_static(name.as_bytes()),
        value: Bytes::from(vec![0; len]),
        ..begin(1, 8)
    };
    let plain = OpenFlags::PRODUCER;
    let times = plain | OpenFlags::INCLUDE_DELETE_TIMES;
    let noop = [("enable_noop", "true")];
    let expiry = [("enable_noop", "true"), ("enable_expiry_opcode", "true")];
    let replica = [("enable_noop", "true"), ("consumer_name", "n"), ("enable_sync_writes", "true")];
    let deletion = || tombstone(ItemKind::Deletion);
    for (row, item, features, flags, controls, marker, bytes) in [
        ("FC-05, FC-09", of_64_bytes(1), LEGACY, plain, &noop[..], 44, 64),
        ("FC-06", of_64_bytes(1), LEGACY, plain, &replica, 61, 64),
        ("FC-09 with a collection id", of_64_bytes(1), COLLECTIONS, plain, &noop, 44, 65),
        ("FC-12", deletion(), LEGACY, plain, &noop, 44, 46),
        ("FC-13", deletion(), LEGACY, times, &noop, 44, 49),
        ("FC-14", tombstone(ItemKind::Expiration), LEGACY, times, &expiry, 44, 48),
        ("FC-19", named("fruit", 16), COLLECTIONS, plain, &noop, 44, 58),
        ("FC-20", named("mycollection", 20), COLLECTIONS, plain, &noop, 44, 69),
    ] {
        let bucket = Bucket::with(VBucket::new().checkpoint(1, [item]));
        let mut client = Client::open_with(bucket, features, flags, controls);
        assert_eq!(client.control("connection_buffer_size", "1"), Status::SUCCESS);
        assert_eq!(client.request(&from_scratch()), Status::SUCCESS);
        assert_eq!(client.connection.unacked_bytes(), 0, "FC-29: answers do not count");
        assert_eq!(client.receive().len(), 1, "{row}: a window of one byte");
        assert_eq!(client.connection.unacked_bytes(), marker, "{row}: the marker");
        client.ack(u32::MAX);
        assert_eq!(client.receive().len(), 1, "{row}");
        assert_eq!(client.connection.unacked_bytes(), bytes, "{row}");
    }
    note("producer", "FC-29", Outcome::Held);
}
