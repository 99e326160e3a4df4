//! Streams that are complete before the server has ended them.

use std::time::Duration;

use dcp_proto::Position;
use dcp_proto::consumer::{
    ConnectionConfig, ConnectionError, Delivery, EndCause, Event, StreamPosition,
};
use dcp_proto::flow_control::counted_bytes;
use dcp_test::bucket::{BRANCH, VBucket, docs};
use dcp_test::harness::{Harness, Sent, VB, config, is_complete, position};
use dcp_test::packet::packets;
use dcp_test::pair::Pair;
use dcp_wire::message::StreamEndReason;
use dcp_wire::{CollectionId, Frame, Opcode, Seqno, Status, Vbuuid};

const END: Seqno = Seqno(5);

fn clamped() -> ConnectionConfig {
    let delivery = Delivery { clamp: true, ..Delivery::default() };
    ConnectionConfig { window: 1 << 20, delivery, ..config() }
}

/// A server that sends STREAM_END only where it ends a stream by itself.
fn clamped_without_ends() -> ConnectionConfig {
    ConnectionConfig { stream_end_on_close: false, ..clamped() }
}

fn bounded(config: ConnectionConfig) -> Harness {
    let mut server = Harness::new(config);
    server.open_until(StreamPosition::new(Position::EARLIEST), END);
    server.accept(&[(1, 0)]);
    server
}

/// A stream that is complete inside a snapshot, and closed.
fn closed(config: ConnectionConfig) -> Harness {
    let mut server = bounded(config);
    server.marker(0, 9).mutations([2, 6]).play();
    assert!(matches!(server.events()[..], [Event::StreamEnded { cause: EndCause::Complete, .. }]));
    assert_eq!(server.sent(), [Sent::Close(server.opaque)]);
    server
}

fn answer(server: &mut Harness, status: Status) {
    let answer = Frame::response(Opcode::DCP_CLOSE_STREAM, status);
    answer.with_opaque(server.opaque).encode(&mut server.wire).unwrap();
}

/// Queues what the server sends: a message, or its answer to the close.
fn say(server: &mut Harness, words: &str) {
    match words {
        "SUCCESS" => answer(server, Status::SUCCESS),
        "KEY_ENOENT" => answer(server, Status::KEY_ENOENT),
        message => _ = server.say(message),
    }
}

#[test]
fn rule_10_a_stream_that_is_complete_inside_a_snapshot_is_closed() {
    for ends in [
        // At its end, past it, and in a snapshot that begins past it.
        |server: &mut Harness| _ = server.marker(0, 9).mutation(5),
        |server: &mut Harness| _ = server.marker(0, 9).mutation(7),
        |server: &mut Harness| _ = server.marker(0, 9).advanced(5),
        |server: &mut Harness| _ = server.marker(0, 3).mutation(3).marker(4, 9).mutation(6),
    ] {
        let mut server = bounded(clamped());
        ends(&mut server);
        server.play();
        assert!(server.events().iter().any(is_complete));
        assert_eq!(server.sent(), [Sent::Close(server.opaque)]);
    }
}

#[test]
fn rule_10_a_stream_that_the_server_ends_is_not_closed() {
    let mut server = bounded(clamped());
    server.marker(0, 5).mutation(5).play();
    assert!(server.events().iter().any(is_complete), "its end is the snapshot's");
    assert_eq!(server.sent(), []);

    let mut server = bounded(clamped());
    server.marker(0, 9).mutation(4).end(StreamEndReason::OK).play();
    assert!(server.events().iter().any(is_complete));
    assert_eq!(server.sent(), []);

    let mut server = bounded(config());
    server.marker(0, 9).mutations([5, 9]).play();
    assert!(server.events().iter().any(is_complete), "without a clamp");
    assert_eq!(server.sent(), []);
}

#[test]
fn rule_10_packets_crossing_a_close_count_once_and_free_the_vbucket() {
    let with_ends = [
        &["SUCCESS", "END 1"][..],
        &["MUT 7", "MUT 9", "SUCCESS", "END 1"],
        &["MUT 7", "SUCCESS", "MUT 8", "END 1"],
        // The server has ended it before it reads the close.
        &["MUT 7", "MUT 9", "END 0", "KEY_ENOENT"],
        &["END 2", "KEY_ENOENT"],
        // The same while the window is full: answers do not wait for acknowledgements.
        &["KEY_ENOENT", "MUT 7", "END 0"],
    ];
    let without_ends = [
        &["SUCCESS"][..],
        &["MUT 7", "MARK [9-12] 0x1", "MUT 10", "SUCCESS"],
        &["MUT 7", "END 0", "KEY_ENOENT"],
        &["KEY_ENOENT", "END 2"],
    ];
    let with = with_ends.map(|crossing| (clamped(), crossing));
    let without = without_ends.map(|crossing| (clamped_without_ends(), crossing));
    for (config, crossing) in with.into_iter().chain(without) {
        let mut server = closed(config);
        let (delivered, _) = (server.seqnos(), server.machine.take_held());
        let before = server.machine.unacknowledged();
        let mut counted = 0;
        for words in crossing {
            assert!(!server.machine.is_unused(), "{words} of {crossing:?} is still to come");
            say(&mut server, words);
            let sent: u64 = packets(&server.wire)
                .iter()
                .map(|packet| counted_bytes(&packet.frame().header))
                .sum();
            counted += sent;
            server.play();
        }
        assert!(server.machine.is_unused(), "{crossing:?}");
        assert_eq!((server.seqnos(), server.events()), (delivered, vec![]), "{crossing:?}");
        assert_eq!(server.machine.take_held(), counted, "{crossing:?}");
        assert_eq!(server.machine.unacknowledged(), before + counted, "{crossing:?}");
        assert_eq!(server.machine.stats().stale_responses, 0, "{crossing:?}");
        server.machine.acknowledge_all();
        let all = u32::try_from(before + counted).unwrap();
        assert_eq!(server.sent(), [Sent::Ack(all)], "{crossing:?}");
        assert_eq!(server.machine.unacknowledged(), 0);
    }
}

#[test]
fn rule_10_only_the_answer_to_its_own_close_counts() {
    let mut server = closed(clamped_without_ends());
    server.opaque.0 += 1 << 16;
    answer(&mut server, Status::SUCCESS);
    server.play();
    assert!(!server.machine.is_unused());
    assert_eq!(server.machine.stats().stale_responses, 1);
}

#[test]
fn rule_10_a_complete_stream_is_not_closed_again() {
    let mut server = closed(clamped());
    server.machine.close_stream(server.now, VB);
    assert_eq!((server.sent(), server.events()), (vec![], vec![]));
    assert!(server.machine.is_complete() && !server.machine.is_unused());
    say(&mut server, "SUCCESS");
    say(&mut server, "END 1");
    server.play();
    assert_eq!(server.events(), [], "its end was reported when it was reached");
    assert!(server.machine.is_unused());
}

/// A server that answers noops but never a close: the vBucket would wait for it for ever.
#[test]
fn sv_11_close_that_is_never_answered_ends_the_connection_after_two_noop_intervals() {
    const INTERVAL: Duration = Duration::from_secs(20);
    let config = ConnectionConfig { noop_interval: Some(INTERVAL), ..config() };
    for again in [false, true] {
        let mut server = Harness::streaming(config.clone());
        server.now += INTERVAL / 2;
        if again {
            // A stream that the server still has is closed in order to be requested again.
            server.end(StreamEndReason::SLOW).play();
            server.open(StreamPosition::new(Position::EARLIEST));
            server.answer(Status::KEY_EEXISTS, &[]).play();
        } else {
            server.machine.close_stream(server.now, VB);
        }
        assert_eq!(server.sent().len(), 1, "the close");
        let closed_at = server.now;
        for _ in 0..3 {
            server.now += INTERVAL / 2;
            Frame::request(Opcode::DCP_NOOP).encode(&mut server.wire).unwrap();
            server.play();
            assert_eq!(server.machine.handle_timeout(server.now), Ok(()));
        }
        assert_eq!(server.machine.poll_timeout(), Some(closed_at + 2 * INTERVAL));
        server.now = closed_at + 2 * INTERVAL;
        let lost = server.machine.handle_timeout(server.now);
        assert_eq!(lost, Err(ConnectionError::CloseUnanswered(VB)));
        let left = server.machine.into_streams();
        assert!(matches!(left[..], [(VB, _)]), "it goes on elsewhere");
    }
}

#[test]
fn close_that_is_answered_is_not_waited_for() {
    const INTERVAL: Duration = Duration::from_secs(20);
    let config = ConnectionConfig { noop_interval: Some(INTERVAL), ..config() };
    let mut server = Harness::streaming(config);
    server.machine.close_stream(server.now, VB);
    answer(&mut server, Status::SUCCESS);
    server.now += INTERVAL;
    server.play();
    assert_eq!(server.machine.poll_timeout(), Some(server.now + 2 * INTERVAL), "silence");
    server.now += INTERVAL;
    assert_eq!(server.machine.handle_timeout(server.now), Ok(()));
}

#[test]
fn connection_is_in_use_until_its_requests_are_answered() {
    let mut server = Harness::new(ConnectionConfig { collections: true, ..config() });
    assert!(server.machine.is_unused());
    server.machine.request_high_seqnos();
    let sent = server.sent();
    let [Sent::HighSeqnos(number)] = sent[..] else { panic!("{sent:?}") };
    assert!(!server.machine.is_unused());
    server.high_seqno(number, 9);
    assert!(server.machine.is_unused());

    server.machine.request_collection_seqnos(&[CollectionId(8), CollectionId(9)]);
    let sent = server.sent();
    let [Sent::HighSeqnos(first), Sent::HighSeqnos(second)] = sent[..] else { panic!("{sent:?}") };
    for number in [second, first] {
        assert!(!server.machine.is_unused());
        server.high_seqno(number, 9);
    }
    assert!(server.machine.is_unused());
}

#[test]
fn rule_11_stream_that_waits_for_its_end_is_closed_once_it_is_persisted() {
    let mut delivery = Delivery { clamp: true, persisted_only: true, ..Delivery::default() };
    delivery.end_persisted = true;
    let mut server = bounded(ConnectionConfig { delivery, ..config() });
    server.marker(0, 9).mutations([3, 5]).play();
    server.machine.persisted(VB, Vbuuid(1), END);
    server.play();
    let _ = server.events();
    assert_eq!(server.sent(), [], "a failover would show as the end of the stream");
    server.machine.persisted(VB, Vbuuid(1), Seqno(9));
    assert!(server.events().iter().any(is_complete));
    assert_eq!(server.sent(), [Sent::Close(server.opaque)]);
}

#[test]
fn snapshot_read_in_small_part_costs_about_a_window() {
    const WINDOW: u32 = 2000;
    for stream_end_on_close in [true, false] {
        let narrow = ConnectionConfig { window: WINDOW, stream_end_on_close, ..clamped() };
        let mut pair = Pair::open(VBucket::new().on_disk(docs(1..=2000)), narrow);
        pair.stream(StreamPosition::new(Position::EARLIEST), END);
        pair.assert_accounts_agree();
        // STREAM_END waits until the window has room.
        for _ in 0..2 {
            pair.reader.machine.acknowledge_all();
            pair.run();
        }
        assert_eq!(pair.reader.seqnos(), (1..=5).collect::<Vec<_>>());
        assert!(pair.reader.machine.is_unused());
        let received = pair.reader.machine.stats().bytes;
        assert!(received < 2 * u64::from(WINDOW), "{received} bytes for 5 of 2,000 changes");
        assert_eq!((pair.node.unacked_bytes(), pair.reader.machine.unacknowledged()), (0, 0));

        // The connection takes the next part at once.
        let from = position(5, (0, 2000), &[(BRANCH.0, 0)]);
        pair.stream(StreamPosition::new(from), Seqno(9));
        pair.assert_accounts_agree();
        assert_eq!(pair.reader.seqnos(), (1..=9).collect::<Vec<_>>());
    }
}
