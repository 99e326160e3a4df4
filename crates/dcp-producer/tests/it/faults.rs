//! What a client sees of each fault.

use std::time::{Duration, Instant};

use bytes::Bytes;
use dcp_producer::{Producer, WriteOptions, parse_rules};
use dcp_wire::message::{OpenFlags, StreamRequestFlags, rollback_seqno};
use dcp_wire::{Feature, Frame, MAX_BODY_LEN, Opcode, Seqno, Status, Vbid, Vbuuid};

use super::raw_client::{Packet, RawClient};
use super::{start, start_one};

const VB: Vbid = Vbid(0);
const MARKER: Opcode = Opcode::DCP_SNAPSHOT_MARKER;
const MUTATION: Opcode = Opcode::DCP_MUTATION;
const END: Opcode = Opcode::DCP_STREAM_END;

/// A cluster with `count` documents in vBucket 0 and these rules.
async fn cluster(count: usize, rules: &str) -> Producer {
    let producer = start_one().await;
    write(&producer, VB, count);
    set(&producer, rules);
    producer
}

fn set(producer: &Producer, rules: &str) {
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
}

/// Writes documents of a vBucket.
fn write(producer: &Producer, vbid: Vbid, count: usize) {
    let keys = (0..).map(|n| format!("key-{n}"));
    for key in keys.filter(|key| producer.vbid_of(key.as_bytes()) == vbid).take(count) {
        let value = Bytes::from_static(b"{}");
        producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap();
    }
}

async fn reader(producer: &Producer, name: &[u8]) -> RawClient {
    let mut client = RawClient::ready(producer, 0, &[Feature::XERROR, Feature::JSON]).await;
    client.open_dcp(name, OpenFlags::empty()).await;
    client
}

/// Asks for a stream from the beginning; gives the answer.
async fn ask_for(client: &mut RawClient, vbid: Vbid, end: u64) -> Packet {
    let none = StreamRequestFlags::empty();
    client.request_stream(vbid, Seqno::ZERO, Seqno(end), Vbuuid(0), none).await
}

/// A client that reads all of vBucket 0.
async fn streaming(producer: &Producer) -> RawClient {
    let mut client = reader(producer, b"reader").await;
    assert_eq!(ask_for(&mut client, VB, u64::MAX).await.status(), Status::SUCCESS);
    client
}

/// Seqno of a message that begins with one.
fn seqno(packet: &Packet) -> u64 {
    u64::from_be_bytes(packet.frame().extras[..8].try_into().unwrap())
}

/// Opcode and, of messages that begin with one, seqno.
async fn next(client: &mut RawClient) -> (Opcode, u64) {
    let packet = client.receive().await;
    (packet.opcode(), if packet.opcode() == END { 0 } else { seqno(&packet) })
}

/// The packets' opcodes, as far as the bytes are packets.
fn opcodes(mut bytes: &[u8]) -> (Vec<Opcode>, usize) {
    let mut seen = Vec::new();
    while let Ok(Some((frame, len))) = Frame::parse(bytes, MAX_BODY_LEN) {
        seen.push(frame.header.opcode);
        bytes = &bytes[len..];
    }
    (seen, bytes.len())
}

#[tokio::test]
async fn fault_rules_for_others_do_nothing() {
    let others = r#"[
        {"condition": {"opcode": "DCP_DELETION"}, "reaction": "drop"},
        {"condition": {"vbucket": 1}, "reaction": "drop"},
        {"condition": {"connection": "other"}, "reaction": "drop"},
        {"condition": {"connection": 2}, "reaction": "drop"},
        {"condition": {"node": 1}, "reaction": "drop"},
        {"condition": {"not": {"any": [{"vbucket": 0}, {"opcode": "NOOP"}]},
                       "opcode": "DCP_MUTATION"}, "reaction": "drop"},
        {"condition": {"opcode": "DCP_MUTATION", "probability": 0}, "reaction": "drop"}
    ]"#;
    for rules in ["[]", others] {
        let producer = cluster(3, rules).await;
        let mut client = streaming(&producer).await;
        assert_eq!(next(&mut client).await, (MARKER, 0));
        for n in 1..=3 {
            assert_eq!(next(&mut client).await, (MUTATION, n));
        }
        assert!(producer.fault_counts().iter().all(|&count| count == 0));
    }
}

#[tokio::test]
async fn packet_that_is_dropped_does_not_come_and_is_counted() {
    let rules = r#"[{"condition": {"opcode": "DCP_MUTATION", "nth": 2}, "reaction": "drop"}]"#;
    let producer = cluster(3, rules).await;
    let mut client = streaming(&producer).await;
    assert_eq!(next(&mut client).await, (MARKER, 0));
    assert_eq!(next(&mut client).await, (MUTATION, 1));
    assert_eq!(next(&mut client).await, (MUTATION, 3));
    client.expect_silence().await;
    assert_eq!(producer.fault_counts(), [1]);
}

#[tokio::test]
async fn packets_of_one_connection_and_vbucket_are_dropped_every_nth() {
    let rules = r#"[{"condition": {"opcode": ["DCP_MUTATION", "DCP_DELETION"], "vbucket": 0,
        "connection": "read*", "every": 2}, "reaction": "drop"}]"#;
    let producer = cluster(5, rules).await;
    let mut client = streaming(&producer).await;
    next(&mut client).await;
    for n in [1, 3, 5] {
        assert_eq!(next(&mut client).await, (MUTATION, n));
    }
    client.expect_silence().await;
    assert_eq!(producer.fault_counts(), [2]);
}

#[tokio::test]
async fn fault_probability_is_reproducible_by_its_seed() {
    let mut seen: Vec<Vec<u64>> = Vec::new();
    for seed in [7, 7, 8] {
        let rules = format!(
            r#"[{{"condition": {{"opcode": "DCP_MUTATION", "probability": 0.5, "seed": {seed}}},
                 "reaction": "drop"}}]"#
        );
        let producer = cluster(64, &rules).await;
        let mut client = reader(&producer, b"reader").await;
        ask_for(&mut client, VB, 64).await;
        let mut seqnos = Vec::new();
        loop {
            match next(&mut client).await {
                (MUTATION, seqno) => seqnos.push(seqno),
                (END, _) => break,
                (opcode, _) => assert_eq!(opcode, MARKER),
            }
        }
        assert!((10..54).contains(&seqnos.len()), "{} of 64 came", seqnos.len());
        assert_eq!(producer.fault_counts(), [64 - seqnos.len() as u64]);
        seen.push(seqnos);
    }
    assert_eq!(seen[0], seen[1]);
    assert_ne!(seen[0], seen[2]);
}

#[tokio::test]
async fn fault_rules_change_while_a_stream_runs() {
    let producer = cluster(1, "[]").await;
    let mut client = streaming(&producer).await;
    assert_eq!(next(&mut client).await, (MARKER, 0));
    assert_eq!(next(&mut client).await, (MUTATION, 1));
    set(&producer, r#"[{"condition": {"opcode": "DCP_MUTATION"}, "reaction": "drop"}]"#);
    write(&producer, VB, 1);
    assert_eq!(next(&mut client).await, (MARKER, 2));
    client.expect_silence().await;
    assert_eq!(producer.fault_counts(), [1]);
    set(&producer, "[]");
    write(&producer, VB, 1);
    assert_eq!(next(&mut client).await, (MARKER, 3));
    assert_eq!(next(&mut client).await, (MUTATION, 3));
    assert!(producer.fault_counts().is_empty());
}

#[tokio::test]
async fn request_that_is_lost_is_never_answered() {
    let rules = r#"[{"condition": {"opcode": "NOOP", "direction": "to_server", "nth": 1},
        "reaction": "drop"}]"#;
    let producer = cluster(0, rules).await;
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    let mut noop = bytes::BytesMut::new();
    Frame::request(Opcode::NOOP).encode(&mut noop).unwrap();
    client.send(&noop).await;
    client.expect_silence().await;
    client.succeed(Frame::request(Opcode::NOOP)).await;
}

#[tokio::test]
async fn packet_that_is_delayed_delays_what_follows() {
    let rules = r#"[{"condition": {"opcode": "DCP_MUTATION", "nth": 2},
        "reaction": {"delay": {"seconds": 0.4}}}]"#;
    let producer = cluster(3, rules).await;
    let mut client = reader(&producer, b"reader").await;
    let asked = Instant::now();
    ask_for(&mut client, VB, u64::MAX).await;
    assert_eq!(next(&mut client).await, (MARKER, 0));
    assert_eq!(next(&mut client).await, (MUTATION, 1));
    assert_eq!(next(&mut client).await, (MUTATION, 2));
    assert!(asked.elapsed() >= Duration::from_millis(400));
    assert_eq!(next(&mut client).await, (MUTATION, 3));
}

#[tokio::test]
async fn fault_delay_ends_with_its_rule() {
    let rules = r#"[{"condition": {"opcode": "DCP_MUTATION"},
        "reaction": {"delay": {"seconds": 3600}}}]"#;
    let producer = cluster(2, rules).await;
    let mut client = streaming(&producer).await;
    assert_eq!(next(&mut client).await, (MARKER, 0));
    client.expect_silence().await;
    set(&producer, "[]");
    assert_eq!(next(&mut client).await, (MUTATION, 1));
    assert_eq!(next(&mut client).await, (MUTATION, 2));
}

#[tokio::test]
async fn request_that_is_delayed_is_carried_out_later() {
    let rules = r#"[{"condition": {"opcode": "NOOP", "direction": "to_server"},
        "reaction": {"delay": {"seconds": 0.3}}}]"#;
    let producer = cluster(0, rules).await;
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    let asked = Instant::now();
    client.succeed(Frame::request(Opcode::NOOP)).await;
    assert!(asked.elapsed() >= Duration::from_millis(300));
    assert_eq!(producer.fault_counts(), [1]);
}

#[tokio::test]
async fn connection_that_is_half_open_says_nothing_and_is_not_closed() {
    let rules = r#"[{"condition": {"opcode": "DCP_MUTATION", "nth": 2}, "reaction": "half_open"}]"#;
    let producer = cluster(3, rules).await;
    let mut client = streaming(&producer).await;
    assert_eq!(next(&mut client).await, (MARKER, 0));
    assert_eq!(next(&mut client).await, (MUTATION, 1));
    let mut noop = bytes::BytesMut::new();
    Frame::request(Opcode::NOOP).encode(&mut noop).unwrap();
    client.send(&noop).await;
    client.expect_silence().await;
    // Nothing gives it back, but others are served, and it does not outlive the cluster.
    set(&producer, "[]");
    client.expect_silence().await;
    RawClient::ready(&producer, 0, &[]).await;
    producer.shutdown().await;
}

#[tokio::test]
async fn connection_is_closed_in_place_of_a_packet() {
    let rules =
        r#"[{"condition": {"opcode": "DCP_MUTATION", "nth": 2}, "reaction": "disconnect"}]"#;
    let producer = cluster(3, rules).await;
    let (seen, left) = opcodes(&streaming(&producer).await.rest().await);
    assert_eq!((seen, left), (vec![MARKER, MUTATION], 0));
}

#[tokio::test]
async fn connection_is_closed_in_place_of_handling_a_request() {
    let rules = r#"[{"condition": {"opcode": "NOOP", "direction": "to_server"},
        "reaction": "disconnect"}]"#;
    let producer = cluster(0, rules).await;
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    let mut requests = bytes::BytesMut::new();
    Frame::request(Opcode::VERSION).encode(&mut requests).unwrap();
    Frame::request(Opcode::NOOP).encode(&mut requests).unwrap();
    client.send(&requests).await;
    // What came before is still answered.
    assert_eq!(opcodes(&client.rest().await), (vec![Opcode::VERSION], 0));
}

#[tokio::test]
async fn connection_is_closed_after_so_many_bytes() {
    let rules = r#"[{"condition": {"opcode": "DCP_MUTATION"},
        "reaction": {"disconnect_after": {"bytes": 100}}}]"#;
    let producer = cluster(9, rules).await;
    let bytes = streaming(&producer).await.rest().await;
    let (frame, marker) = Frame::parse(&bytes, MAX_BODY_LEN).unwrap().unwrap();
    assert_eq!(frame.header.opcode, MARKER);
    assert_eq!(bytes.len() - marker, 100);
}

#[tokio::test]
async fn request_is_answered_with_another_status() {
    let rules = r#"[{"condition": {"opcode": "DCP_STREAM_REQ", "vbucket": 0, "nth": 1},
        "reaction": {"answer": {"status": "ETMPFAIL"}}}]"#;
    let producer = cluster(1, rules).await;
    let mut client = reader(&producer, b"reader").await;
    let refused = ask_for(&mut client, VB, u64::MAX).await;
    assert_eq!((refused.status(), refused.opaque().0), (Status::ETMPFAIL, 1));
    assert!(refused.frame().value.is_empty());
    // It was not carried out.
    client.expect_silence().await;
    assert_eq!(ask_for(&mut client, VB, u64::MAX).await.status(), Status::SUCCESS);
}

#[tokio::test]
async fn not_my_vbucket_comes_with_the_map_or_without() {
    for (map, rules) in [
        (true, r#"[{"condition": {"opcode": "DCP_STREAM_REQ"}, "reaction": "not_my_vbucket"}]"#),
        (
            false,
            r#"[{"condition": {"opcode": "DCP_STREAM_REQ"},
                 "reaction": {"not_my_vbucket": {"map": false}}}]"#,
        ),
    ] {
        let producer = cluster(1, rules).await;
        let mut client = reader(&producer, b"reader").await;
        let refused = ask_for(&mut client, VB, u64::MAX).await;
        assert_eq!(refused.status(), Status::NOT_MY_VBUCKET);
        let body = String::from_utf8(refused.frame().value.to_vec()).unwrap();
        assert_eq!(body.contains("vBucketServerMap"), map, "{body}");
    }
}

#[tokio::test]
async fn stream_request_is_rolled_back() {
    let rules = r#"[{"condition": {"vbucket": 0}, "reaction": {"rollback": {"seqno": 5}}}]"#;
    let producer = cluster(1, rules).await;
    let mut client = reader(&producer, b"reader").await;
    let refused = ask_for(&mut client, VB, u64::MAX).await;
    assert_eq!(refused.status(), Status::ROLLBACK);
    assert_eq!(rollback_seqno(&refused.frame()).unwrap(), Seqno(5));
}

#[tokio::test]
async fn stream_end_is_suppressed() {
    let producer = cluster(1, r#"[{"reaction": "no_stream_end"}]"#).await;
    let mut client = reader(&producer, b"reader").await;
    ask_for(&mut client, VB, 1).await;
    assert_eq!(next(&mut client).await, (MARKER, 0));
    assert_eq!(next(&mut client).await, (MUTATION, 1));
    client.expect_silence().await;
    assert_eq!(producer.fault_counts(), [1]);
}

#[tokio::test]
async fn items_come_from_past_the_end_seqno() {
    let producer = start(|options| options.persist_delay = Duration::from_secs(3600)).await;
    write(&producer, VB, 3);
    producer.persist();
    // A snapshot of its own: the one that holds the end is sent completely in any case.
    write(&producer, VB, 3);
    for (rules, last) in [
        ("[]", 3),
        (r#"[{"reaction": {"items_past_end": {"items": 2}}}]"#, 6),
        // No further than there are changes.
        (r#"[{"reaction": "items_past_end"}]"#, 6),
    ] {
        set(&producer, rules);
        let mut client = reader(&producer, b"reader").await;
        ask_for(&mut client, VB, 3).await;
        let mut seqnos = Vec::new();
        loop {
            match next(&mut client).await {
                (MUTATION, seqno) => seqnos.push(seqno),
                (END, _) => break,
                (opcode, _) => assert_eq!(opcode, MARKER),
            }
        }
        assert_eq!(seqnos, (1..=last).collect::<Vec<_>>());
    }
}

#[tokio::test]
async fn marker_comes_alone_and_the_next_snapshot_is_whole() {
    let rules = r#"[{"condition": {"nth": 1}, "reaction": "marker_without_items"}]"#;
    let producer = cluster(3, rules).await;
    let mut client = streaming(&producer).await;
    assert_eq!(next(&mut client).await, (MARKER, 0));
    client.expect_silence().await;
    write(&producer, VB, 1);
    assert_eq!(next(&mut client).await, (MARKER, 4));
    assert_eq!(next(&mut client).await, (MUTATION, 4));
}

#[tokio::test]
async fn seqno_advanced_comes_before_an_item_of_the_same_seqno() {
    let rules = r#"[{"condition": {"nth": 2}, "reaction": "seqno_advanced_before_item"}]"#;
    let producer = cluster(2, rules).await;
    let mut client = streaming(&producer).await;
    assert_eq!(next(&mut client).await, (MARKER, 0));
    assert_eq!(next(&mut client).await, (MUTATION, 1));
    let advanced = client.receive().await;
    dcp_wire::message::SeqnoAdvanced::decode(&advanced.frame()).unwrap();
    assert_eq!((seqno(&advanced), advanced.opaque().0), (2, 1));
    assert_eq!(advanced.frame().header.vbid_or_status, VB.0);
    assert_eq!(next(&mut client).await, (MUTATION, 2));
}

#[tokio::test]
async fn snapshot_in_the_order_of_the_keys_is_cut_off_after_so_many_items() {
    let producer = cluster(5, r#"[{"reaction": {"oso_cut": {"items": 2}}}]"#).await;
    let mut config = producer.dcp_config();
    config.oso_backfill = dcp_producer::OsoBackfill::Enabled;
    producer.set_dcp_config(config);
    producer.persist();
    let mut client = reader(&producer, b"reader").await;
    client.control(b"enable_out_of_order_snapshots", b"true").await;
    assert_eq!(ask_for(&mut client, VB, u64::MAX).await.status(), Status::SUCCESS);
    assert_eq!(client.receive().await.opcode(), Opcode::DCP_OSO_SNAPSHOT);
    for _ in 0..2 {
        assert_eq!(client.receive().await.opcode(), MUTATION);
    }
    client.expect_end().await;
}

#[tokio::test]
async fn packet_that_is_truncated_is_followed_by_the_next_at_once() {
    let rules = r#"[{"condition": {"opcode": "DCP_SNAPSHOT_MARKER"},
        "reaction": {"truncate": {"bytes": 30}}}]"#;
    let producer = cluster(1, rules).await;
    let mut client = streaming(&producer).await;
    let cut = client.bytes(30).await;
    assert!(Frame::wanted(&cut, MAX_BODY_LEN).unwrap() > 30);
    assert_eq!(cut[1], MARKER.0);
    assert_eq!(next(&mut client).await, (MUTATION, 1));
}

#[tokio::test]
async fn packet_that_is_corrupted_has_one_byte_inverted() {
    // Of a marker and a mutation.
    let (marker, whole) = {
        let producer = cluster(1, "[]").await;
        let mut client = streaming(&producer).await;
        let lens = [client.receive().await.bytes().len(), client.receive().await.bytes().len()];
        let mut again = streaming(&producer).await;
        (lens[0], again.bytes(lens[0] + lens[1]).await)
    };
    let rule = |reaction: &str| {
        format!(
            r#"[{{"condition": {{"opcode": "DCP_SNAPSHOT_MARKER", "seed": 3}}, "reaction": {reaction}}}]"#
        )
    };
    let mut chosen = Vec::new();
    for reaction in [r#"{"corrupt": {"offset": 26}}"#, r#""corrupt""#, r#""corrupt""#] {
        let producer = cluster(1, &rule(reaction)).await;
        let bytes = streaming(&producer).await.bytes(whole.len()).await;
        let differs: Vec<_> = (0..marker).filter(|&at| bytes[at] != whole[at]).collect();
        assert_eq!(differs.len(), 1);
        assert_eq!(bytes[differs[0]], !whole[differs[0]]);
        chosen.push(differs[0]);
    }
    assert_eq!(chosen[0], 26);
    assert_eq!(chosen[1], chosen[2], "the seed chooses");
}

#[tokio::test]
async fn noops_are_suppressed_and_none_is_missed() {
    let asking = async |producer: &Producer| {
        let mut client = reader(producer, b"reader").await;
        client.control(b"enable_noop", b"true").await;
        client.control(b"set_noop_interval", b"0.2").await;
        client
    };
    let producer = cluster(0, "[]").await;
    assert_eq!(asking(&producer).await.receive().await.opcode(), Opcode::DCP_NOOP);
    set(&producer, r#"[{"reaction": "no_noop"}]"#);
    let mut client = asking(&producer).await;
    // Each that was due counts as answered, so the next becomes due.
    let deadline = Instant::now() + Duration::from_secs(30);
    while producer.fault_counts()[0] < 2 {
        assert!(Instant::now() < deadline, "no noop was due");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    client.expect_silence().await;
}
