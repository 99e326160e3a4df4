//! A consumer's machine against a producer's: what both must agree on.

use std::time::Duration;

use dcp_proto::Position;
use dcp_proto::consumer::{ConnectionConfig, StreamPosition};
use dcp_test::bucket::{VBucket, docs};
use dcp_test::harness::{Harness, Item, VB, config};
use dcp_test::pair::Pair;
use dcp_test::words::message;
use dcp_wire::message::{FailoverEntry, StreamAddress, encode_failover_log};
use dcp_wire::{Seqno, Status, Vbid, Vbuuid};

const SECOND: Duration = Duration::from_secs(1);

fn from_the_beginning() -> StreamPosition {
    StreamPosition::new(Position::EARLIEST)
}

#[test]
fn fc_36_both_ends_count_the_same_bytes() {
    let narrow = ConnectionConfig { window: 1000, ..config() };
    let mut pair = Pair::open(VBucket::new().on_disk(docs(1..=100)), narrow);
    pair.stream(from_the_beginning(), Seqno::MAX);
    let mut rounds = 0;
    while pair.reader.seqnos().len() < 100 {
        assert!(pair.node.unacked_bytes() >= 1000, "it waits for the consumer");
        pair.assert_accounts_agree();
        pair.release();
        pair.assert_accounts_agree();
        rounds += 1;
        assert!(rounds < 100, "it stands still");
    }
    // Noops count at neither end.
    pair.pass(21 * SECOND);
    pair.assert_accounts_agree();
    pair.release();
    pair.pass(SECOND);
    assert_eq!(pair.node.unacked_bytes(), 0, "all is acknowledged");
    pair.assert_accounts_agree();
    assert!(rounds >= 5, "{rounds}");
}

#[test]
fn consumer_that_is_cut_off_anywhere_resumes_without_a_gap() {
    for seen in 0..=20 {
        // A window that lets through about so many changes. The producer would refuse a request
        // whose start lies outside of its snapshot.
        let narrow = ConnectionConfig { window: 44 + seen * 70, ..config() };
        let mut pair = Pair::open(VBucket::new().on_disk(docs(1..=20)), narrow);
        pair.stream(from_the_beginning(), Seqno::MAX);
        let before = pair.reader.seqnos().len();
        pair.reconnect(config(), Seqno::MAX);
        assert_eq!(pair.reader.seqnos(), (1..=20).collect::<Vec<_>>(), "cut after {before}");
    }
}

/// The machine takes the streams of vBuckets 7 and 8, whose changes come in this order.
fn taken_in(order: impl IntoIterator<Item = (Vbid, u64)>) -> [Vec<u64>; 2] {
    let mut server = Harness::streaming(config());
    let mut streams = vec![server.to()];
    let other = Vbid(VB.0 + 1);
    server.machine.open_stream(other, Seqno::MAX, from_the_beginning()).unwrap();
    let first = server.opaque;
    server.requested();
    streams.push(StreamAddress { vbid: other, ..server.to() });
    let mut log = Vec::new();
    encode_failover_log([FailoverEntry { vbuuid: Vbuuid(1), seqno: Seqno(0) }], &mut log);
    server.answer(Status::SUCCESS, &log).play();
    server.opaque = first;
    for &to in &streams {
        server.wire.extend(message("MARK [0-9] 0x1", to));
    }
    for (vbid, seqno) in order {
        let to = streams.iter().find(|to| to.vbid == vbid).expect("one of both");
        server.wire.extend(message(&format!("MUT {seqno}"), *to));
    }
    server.play();
    [VB, other].map(|of| {
        let seqno = |item: &Item| match item {
            Item::Change { vbid, seqno, .. } if *vbid == of => Some(*seqno),
            _ => None,
        };
        server.sink.items.iter().filter_map(seqno).collect()
    })
}

#[test]
fn vbuckets_may_take_turns_with_each_change_or_follow_each_other() {
    let other = Vbid(VB.0 + 1);
    let wanted = [(1..=9).collect::<Vec<_>>(), (1..=9).collect()];
    assert_eq!(taken_in((1..=9).flat_map(|seqno| [(VB, seqno), (other, seqno)])), wanted);
    let in_turn = (1..=9).map(|seqno| (VB, seqno)).chain((1..=9).map(|seqno| (other, seqno)));
    assert_eq!(taken_in(in_turn), wanted);
}
