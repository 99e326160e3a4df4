//! The rules of positions, each by its number.

use dcp_wire::message::{
    OsoSnapshot, SnapshotFlags, SnapshotMarker, StreamEndReason, StreamRequestFlags,
    encode_vb_seqnos,
};
use dcp_wire::{CollectionId, Frame, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};

use dcp_proto::consumer::{
    CollectionSeqnos, ConnectionConfig, EndCause, EndKind, Event, Limit, Misbehaviour,
    OpenStreamError, StreamFilter, StreamPosition,
};
use dcp_proto::{OnRollback, Position, Rollback, Snapshot};
use dcp_test::harness::{Harness, Item, Sent, VB, config, is_complete, log, position};

const LOG: &[(u64, u64)] = &[(1, 0)];

fn snapshot(start: u64, end: u64) -> Snapshot {
    Snapshot { start: Seqno(start), end: Seqno(end) }
}

/// A stream that has delivered complete snapshots up to 20 and 40 and is at 60 of [40, 80].
fn inside_the_third_snapshot(config: ConnectionConfig) -> Harness {
    let mut server = Harness::streaming(config);
    server.marker(0, 20).mutation(20);
    server.marker(20, 40).mutation(40);
    server.marker(40, 80).mutation(60).play();
    server.sink.items.clear();
    server
}

#[test]
fn rule_01_a_pending_marker_is_no_part_of_a_position() {
    let mut server = Harness::streaming(config());
    server.marker(0, 19).mutation(19).marker(20, 30).play();
    let position = server.moved().unwrap();
    assert_eq!((position.seqno, position.snapshot), (Seqno(19), snapshot(0, 19)));
    let request = server.reconnect(config());
    assert_eq!((request.start, request.snapshot), (19, (19, 19)));
}

#[test]
fn rule_01_a_marker_counts_with_its_first_item() {
    let mut server = Harness::streaming(config());
    server.marker(0, 19).mutation(19).marker(20, 30).mutation(25).play();
    let request = server.reconnect(config());
    assert_eq!((request.start, request.snapshot), (25, (20, 30)));
}

#[test]
fn rule_02_a_complete_snapshot_collapses_to_its_end() {
    let mut server = Harness::streaming(config());
    server.marker(20, 30).mutation(30).play();
    let request = server.reconnect(config());
    assert_eq!((request.start, request.snapshot), (30, (30, 30)));
}

#[test]
fn rule_03_the_vbuuid_is_chosen_by_the_end_of_the_snapshot() {
    let entries = &[(0xb, 100), (0xa, 0)];
    let mut server = Harness::new(config());
    server.open(StreamPosition::new(Position::EARLIEST));
    server.accept(entries);
    server.marker(0, 150).mutations([50, 100, 101]).play();
    let vbuuid = |item: &Item| match item {
        Item::Change { vbuuid, .. } => *vbuuid,
        other => panic!("{other:?}"),
    };
    let rows: Vec<u64> = server.sink.items.iter().map(vbuuid).collect();
    assert_eq!(rows, [0xa, 0xa, 0xb], "a row names the branch that holds its own seqno");
    let request = server.reconnect(config());
    assert_eq!((request.start, request.vbuuid), (101, 0xb));

    let mut server = Harness::new(config());
    let request = server.open(StreamPosition::new(position(50, (0, 150), entries)));
    assert_eq!(request.vbuuid, 0xb, "seqno 50 of a snapshot that ends at 150");
}

#[test]
fn rule_03_a_log_that_came_with_no_item_is_not_the_positions() {
    let mut server = Harness::new(config());
    server.open(StreamPosition::new(position(50, (50, 50), &[(0xa, 0)])));
    server.accept(&[(0xb, 40), (0xa, 0)]);
    assert_eq!(server.moved(), None);
    let request = server.reconnect(config());
    assert_eq!(request.vbuuid, 0xa);
    server.accept(&[(0xb, 40), (0xa, 0)]);
    server.marker(50, 51).mutation(51).play();
    assert_eq!(server.moved().unwrap().failover_log, Some(log(&[(0xb, 40), (0xa, 0)])));
}

#[test]
fn rule_04_everything_moves_the_position_in_order() {
    let mut server = Harness::streaming(config());
    server.marker(0, 5).mutation(1).system_event(2, 3).mutation(4).advanced(5);
    let wire = std::mem::take(&mut server.wire);
    let one = Limit { rows: 1, ..Limit::NONE };
    let (now, sink) = (server.now, &mut server.sink);
    let walk = server.machine.handle_input(now, &wire, one, sink).unwrap();
    assert!(walk.limited);
    let first = server.machine.take_positions().pop().unwrap().position;
    assert_eq!(first.seqno, Seqno(1), "what was not walked yet has not moved it");
    let rest = &wire[walk.consumed..];
    let walk = server.machine.handle_input(now, rest, one, sink).unwrap();
    let second = server.machine.take_positions().pop().unwrap().position;
    assert_eq!((second.seqno, second.manifest_uid.0), (Seqno(4), 3));
    server.machine.handle_input(now, &rest[walk.consumed..], one, sink).unwrap();
    let last = server.machine.take_positions().pop().unwrap().position;
    assert_eq!((last.seqno, last.is_snapshot_complete()), (Seqno(5), true));
    assert_eq!(server.seqnos(), [1, 2, 4]);
}

#[test]
fn rule_05_the_position_waits_for_the_end_of_an_out_of_order_snapshot() {
    let mut server = Harness::streaming(config());
    server.oso(OsoSnapshot::Start).mutations([9, 3, 17]).advanced(18).play();
    assert_eq!(server.seqnos(), [9, 3, 17]);
    assert_eq!(server.moved().unwrap().seqno, Seqno(0));
    let request = server.reconnect(config());
    assert_eq!((request.start, request.snapshot, request.vbuuid), (0, (0, 0), 0));
}

#[test]
fn rule_05_after_an_out_of_order_snapshot_the_highest_seqno_counts() {
    let mut server = Harness::streaming(config());
    server.oso(OsoSnapshot::Start).mutations([9, 17, 3]).oso(OsoSnapshot::End).play();
    let position = server.moved().unwrap();
    assert_eq!((position.seqno, position.snapshot), (Seqno(17), snapshot(17, 17)));
    server.marker(17, 18).mutation(18).play();
    let request = server.reconnect(config());
    assert_eq!((request.start, request.snapshot), (18, (18, 18)));
}

#[test]
fn rule_05_an_out_of_order_snapshot_begins_at_0_and_outside_any_other() {
    let mut server = Harness::streaming(config());
    server.oso(OsoSnapshot::Start).oso(OsoSnapshot::End).oso(OsoSnapshot::Start).play();
    assert_eq!(server.oso(OsoSnapshot::Start).misbehaves(), Misbehaviour::MisplacedOso);

    let mut server = Harness::streaming(config());
    assert_eq!(server.oso(OsoSnapshot::End).misbehaves(), Misbehaviour::MisplacedOso);

    let mut server = Harness::streaming(config());
    server.marker(0, 5).mutation(5).play();
    assert_eq!(server.oso(OsoSnapshot::Start).misbehaves(), Misbehaviour::MisplacedOso);

    let mut server = Harness::new(config());
    server.open(StreamPosition::new(position(5, (5, 5), LOG)));
    server.accept(LOG);
    assert_eq!(server.oso(OsoSnapshot::Start).misbehaves(), Misbehaviour::MisplacedOso);
}

#[test]
fn rule_06_a_rollback_restarts_at_the_newest_complete_snapshot() {
    let mut server = inside_the_third_snapshot(config());
    server.reconnect(config());
    server.answer(Status::ROLLBACK, &30_u64.to_be_bytes()).play();
    let request = server.requested();
    assert_eq!((request.start, request.snapshot, request.vbuuid), (20, (20, 20), 1));
    let rollback = Rollback {
        vbid: VB,
        seqno: Seqno(20),
        from_seqno: Seqno(60),
        old_vbuuid: Vbuuid(1),
        new_vbuuid: Vbuuid(1),
        epoch: 1,
    };
    assert_eq!(server.sink.items, [Item::Rollback(rollback)]);
    let position = server.moved().unwrap();
    assert_eq!((position.seqno, position.epoch), (Seqno(20), 1));
    let told = [Event::RolledBack(rollback)];
    assert_eq!(server.events(), told, "the stream is not over");
}

#[test]
fn rule_06_a_rollback_into_a_snapshot_is_not_a_restart_point() {
    let mut server = inside_the_third_snapshot(config());
    server.reconnect(config());
    server.answer(Status::ROLLBACK, &55_u64.to_be_bytes()).play();
    assert_eq!(server.requested().start, 40, "55 lies inside [40, 80]");
}

#[test]
fn rule_06_nothing_complete_means_the_beginning() {
    let mut server = Harness::streaming(config());
    server.marker(0, 80).mutation(60).play();
    server.reconnect(config());
    server.answer(Status::ROLLBACK, &50_u64.to_be_bytes()).play();
    let request = server.requested();
    assert_eq!((request.start, request.snapshot, request.vbuuid), (0, (0, 0), 0));
}

#[test]
fn rule_06_a_second_rollback_is_legal() {
    let mut server = inside_the_third_snapshot(config());
    server.reconnect(config());
    server.answer(Status::ROLLBACK, &45_u64.to_be_bytes()).play();
    assert_eq!(server.requested().start, 40);
    server.answer(Status::ROLLBACK, &40_u64.to_be_bytes()).play();
    assert_eq!(server.requested().start, 20, "never the same request again");
    let epoch = |item: &Item| match item {
        Item::Rollback(rollback) => rollback.epoch,
        other => panic!("{other:?}"),
    };
    assert_eq!(server.sink.items.iter().map(epoch).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(server.machine.stats().rollbacks, 2);
}

#[test]
fn rule_06_a_rollback_takes_no_more_of_the_end_than_was_lost() {
    for (high, end) in [(30, 30), (40, 40), (50, 40)] {
        let mut server = Harness::new(config());
        let from = StreamPosition::new(position(20, (20, 20), &[(1, 0)]));
        assert_eq!(server.open_until(from, Seqno(40)).end, 40);
        server.answer(Status::ROLLBACK, &10_u64.to_be_bytes()).play();
        let request = server.requested_up_to(high);
        assert_eq!((request.start, request.end), (0, end), "{high}");
    }
}

#[test]
fn rule_06_a_rollback_at_0_is_the_servers_error() {
    let mut server = Harness::new(config());
    server.open(StreamPosition::new(Position::EARLIEST));
    server.answer(Status::ROLLBACK, &0_u64.to_be_bytes()).play();
    let events = server.events();
    let [Event::StreamEnded { cause, .. }] = &events[..] else { panic!("{events:?}") };
    assert_eq!(*cause, EndCause::Refused(OpenStreamError::RollbackAtZero));
    assert_eq!((server.sent(), server.sink.items.len()), (vec![], 0));
}

#[test]
fn rule_06_a_rollback_can_go_to_the_beginning_or_stop_the_stream() {
    let from_zero = ConnectionConfig { on_rollback: OnRollback::Resync, ..config() };
    let mut server = inside_the_third_snapshot(config());
    server.reconnect(from_zero);
    server.answer(Status::ROLLBACK, &30_u64.to_be_bytes()).play();
    assert_eq!(server.requested().start, 0);
    assert_eq!(server.seqnos(), [0], "the record says that everything comes again");

    let stop = ConnectionConfig { on_rollback: OnRollback::Fail, ..config() };
    let mut server = inside_the_third_snapshot(config());
    server.reconnect(stop);
    server.answer(Status::ROLLBACK, &30_u64.to_be_bytes()).play();
    let events = server.events();
    let [Event::StreamEnded { cause: EndCause::RolledBack { rollback, .. }, .. }] = &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!(rollback.seqno, Seqno(20));
    assert_eq!((server.sent(), server.sink.items.len(), server.moved()), (vec![], 0, None));
}

#[test]
fn rule_07_changes_below_the_old_seqno_come_after_a_rollback() {
    let mut server = inside_the_third_snapshot(config());
    server.reconnect(config());
    server.answer(Status::ROLLBACK, &30_u64.to_be_bytes()).play();
    server.requested();
    server.accept(&[(2, 30), (1, 0)]);
    server.marker(20, 45).mutations([25, 35, 45]).play();
    let rows = &server.sink.items[1..];
    let row = |seqno, vbuuid| Item::Change {
        op: dcp_proto::Op::Mutation,
        vbid: VB,
        seqno,
        vbuuid,
        epoch: 1,
        snapshot: (20, 45),
    };
    assert_eq!(rows, [row(25, 1), row(35, 2), row(45, 2)]);
}

#[test]
fn rule_08_an_existing_stream_is_closed_and_opened_again() {
    let mut server = Harness::new(config());
    let first = server.open(StreamPosition::new(Position::EARLIEST));
    server.answer(Status::KEY_EEXISTS, &[]).play();
    assert_eq!(server.sent(), [Sent::Close(first.opaque)]);
    // What somebody else's stream still sends is not ours.
    server.marker(0, 5).mutation(5).play();
    assert_eq!(server.seqnos(), Vec::<u64>::new());
    closed(&mut server, first.opaque);
    let second = server.requested();
    assert_ne!(first.opaque, second.opaque);
    assert_eq!(first.start, second.start);
    // Not for ever.
    server.answer(Status::KEY_EEXISTS, &[]).play();
    let events = server.events();
    assert!(matches!(events[..], [Event::StreamEnded { .. }]), "{events:?}");
}

#[test]
fn rule_08_a_stream_that_is_closed_while_it_is_asked_for_stays_closed() {
    let mut server = Harness::new(config());
    let first = server.open(StreamPosition::new(Position::EARLIEST));
    server.machine.close_stream(server.now, VB);
    assert_eq!(server.sent(), [Sent::Close(first.opaque)]);
    closed(&mut server, first.opaque);
    let events = server.events();
    assert!(
        matches!(events[..], [Event::StreamEnded { cause: EndCause::Closed, .. }]),
        "{events:?}"
    );

    // The same while another's stream of that name is closed in order to ask again.
    let second = server.open(StreamPosition::new(Position::EARLIEST));
    server.answer(Status::KEY_EEXISTS, &[]).play();
    assert_eq!(server.sent(), [Sent::Close(second.opaque)]);
    server.machine.close_stream(server.now, VB);
    closed(&mut server, second.opaque);
    let events = server.events();
    assert!(
        matches!(events[..], [Event::StreamEnded { cause: EndCause::Closed, .. }]),
        "{events:?}"
    );
    assert_eq!(server.sent(), []);
}

/// A backfill that begins before the history is kept from: the same end twice, first deduplicated.
#[test]
fn rows_of_history_are_flagged_and_a_stream_goes_on_among_them() {
    let mut server = Harness::streaming(config());
    server.say("MARK [0-20] 0x6").mutations([3, 5]);
    server.say("MARK [6-20] 0x36").mutations([6, 7, 8, 9]).play();
    assert_eq!(server.sink.history, [6, 7, 8, 9]);
    let request = server.reconnect(config());
    assert_eq!((request.start, request.snapshot), (9, (6, 20)));
    server.accept(LOG);
    server.say("MARK [6-20] 0x36").mutations([10, 20]);
    server.say("MARK [21-22] 0x1").mutations([21, 22]).play();
    assert_eq!(server.sink.history, [6, 7, 8, 9, 10, 20], "the last snapshot keeps no versions");
}

fn closed(server: &mut Harness, opaque: Opaque) {
    let answer = Frame::response(Opcode::DCP_CLOSE_STREAM, Status::SUCCESS);
    answer.with_opaque(opaque).encode(&mut server.wire).unwrap();
    server.play();
}

#[test]
fn rule_09_what_is_dropped_counts_all_the_same() {
    let mut server = Harness::streaming(config());
    server.machine.take_held();
    server.machine.close_stream(server.now, VB);
    server.marker(0, 5).mutation(5).end(StreamEndReason::CLOSED).play();
    assert_eq!(server.machine.held(), 44 + 55 + 8 + 28);
    assert_eq!(server.seqnos(), Vec::<u64>::new());
    assert_eq!(server.machine.stats().stale_packets, 2, "its end belongs to the close");
}

#[test]
fn rule_10_finite_stream_is_complete_with_the_snapshot_that_holds_its_end() {
    let mut server = Harness::new(config());
    assert_eq!(server.open_until(StreamPosition::new(Position::EARLIEST), Seqno(4)).end, 4);
    server.accept(LOG);
    server.marker(0, 6).mutations([2, 4]).play();
    assert_eq!(server.events(), [], "the end lies inside the snapshot");
    assert!(!server.machine.is_complete());
    server.mutation(6).play();
    assert!(server.machine.is_complete());
    let events = server.events();
    let [Event::StreamEnded { cause: EndCause::Complete, from, .. }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(from.position.seqno, Seqno(6));
    server.end(StreamEndReason::OK).play();
    assert_eq!(server.events(), [], "told once");
}

#[test]
fn rule_10_a_snapshot_that_was_resumed_in_is_whole_at_its_own_end() {
    let mut server = Harness::new(config());
    server.open(StreamPosition::new(Position::EARLIEST));
    server.accept(LOG);
    // A key at 3 was left out: its newer version is at 8.
    server.marker(0, 10).mutations([1, 4]).play();
    let request = server.reconnect_until(config(), Seqno(5));
    assert_eq!((request.start, request.snapshot, request.end), (4, (0, 10), 10));
    server.accept(LOG);
    // From memory before, from disk now, which ends before 8.
    server.marker(0, 5).mutation(5).play();
    assert!(!server.machine.is_complete());
    let position = server.moved().unwrap();
    assert_eq!((position.seqno, position.snapshot), (Seqno(5), snapshot(0, 10)));
    server.marker(6, 9).mutations([8, 9]).play();
    assert!(!server.machine.is_complete(), "what is left out now may be newer still");
    server.marker(10, 12).mutation(11).play();
    assert!(!server.machine.is_complete(), "the same goes for this snapshot");
    server.mutation(12).play();
    assert!(server.machine.is_complete());
    assert_eq!(server.moved().unwrap().snapshot, snapshot(0, 12));
}

#[test]
fn snapshot_that_starts_at_its_first_item_is_resumed_in_from_below_it() {
    let mut server = Harness::new(config());
    server.open(StreamPosition::new(Position::EARLIEST));
    server.accept(LOG);
    // Keys at 4 and 5 were left out: their newer versions are above 6.
    server.marker(0, 3).mutation(3).marker(6, 10).mutation(6).play();
    let request = server.reconnect_until(config(), Seqno(5));
    // From (6, 6..10), the server would go on even if a failover had lost the newer versions.
    assert_eq!((request.start, request.snapshot, request.end), (6, (5, 10), 10));
    server.accept(LOG);
    server.marker(5, 8).mutation(8).play();
    assert!(!server.machine.is_complete());
    server.marker(9, 10).mutation(10).play();
    assert!(server.machine.is_complete());
}

#[test]
fn rule_10_the_servers_end_completes_what_a_filter_left_short() {
    let mut server = Harness::new(config());
    server.open_until(StreamPosition::new(Position::EARLIEST), Seqno(40));
    server.accept(LOG);
    server.marker(0, 6).mutation(6).end(StreamEndReason::OK).play();
    let events = server.events();
    assert!(
        matches!(events[..], [Event::StreamEnded { cause: EndCause::Complete, .. }]),
        "{events:?}"
    );
}

#[test]
fn rule_10_an_end_that_a_failover_lost_is_not_waited_for() {
    let end = Seqno(100);
    let mut server = Harness::new(config());
    let begin = StreamPosition::new(Position::EARLIEST).with_end(EndKind::Seen);
    assert_eq!(server.open_until(begin, end).end, 100);
    server.accept(LOG);
    server.marker(0, 40).mutation(40).marker(40, 80).mutation(60).play();
    server.reopen_until(config(), end);
    // It has less than was read, which it says once it is asked to go on from there.
    let request = server.requested_up_to(50);
    assert_eq!((request.start, request.end), (60, 80));
    server.answer(Status::ROLLBACK, &50_u64.to_be_bytes()).play();
    let request = server.requested_up_to(50);
    assert_eq!((request.start, request.end), (40, 50), "what there is is the end now");
    server.accept(&[(2, 50), (1, 0)]);
    server.marker(40, 50).mutation(50).end(StreamEndReason::OK).play();
    assert!(server.events().iter().any(is_complete));
}

#[test]
fn rule_10_an_end_that_must_exist_is_not_lowered_by_a_rollback() {
    let end = Seqno(100);
    let mut server = Harness::new(config());
    let begin = StreamPosition::new(Position::EARLIEST).with_end(EndKind::Required);
    assert_eq!(server.open_until(begin, end).end, 100);
    server.accept(LOG);
    server.marker(0, 40).mutation(40).marker(40, 80).mutation(60).play();
    server.reopen_until(config(), end);
    let request = server.requested();
    assert_eq!((request.start, request.end), (60, 100), "the high seqno is not asked for");
    server.answer(Status::ROLLBACK, &50_u64.to_be_bytes()).play();
    let request = server.requested();
    assert_eq!((request.start, request.end), (40, 100));
    server.accept(&[(2, 50), (1, 0)]);
    server.marker(40, 50).mutation(50).play();
    assert!(!server.events().iter().any(is_complete), "the driver ends the read");
    assert!(!server.machine.has_lost_end(VB, Seqno(50)), "there is no other end");
}

#[test]
fn rule_10_the_newest_change_is_asked_for_first() {
    for (high, end) in [(2, 2), (3, 3), (9, 3)] {
        let mut server = Harness::new(config());
        let begin = StreamPosition::new(Position::EARLIEST).with_end(EndKind::Latest);
        server.machine.open_stream(VB, Seqno(3), begin).unwrap();
        assert_eq!(server.requested_up_to(high).end, end, "it may be lost by now");
        server.accept(LOG);
        server.marker(0, 1).mutation(1).end(StreamEndReason::OK).play();
        assert!(server.events().iter().any(is_complete));
    }
}

/// Between the answer and the request the vBucket may be rolled back or flushed.
#[test]
fn rule_10_an_end_that_is_lost_once_it_was_asked_for_is_not_waited_for() {
    let mut server = Harness::new(config());
    let begin = StreamPosition::new(Position::EARLIEST).with_end(EndKind::Latest);
    server.machine.open_stream(VB, Seqno(3), begin).unwrap();
    assert_eq!(server.requested_up_to(3).end, 3);
    assert!(!server.machine.has_lost_end(VB, Seqno(1)), "the answer may be of another history");
    server.accept(&[(2, 1), (1, 0)]);
    server.marker(0, 1).mutation(1).play();
    assert!(!server.machine.has_lost_end(VB, Seqno(3)));
    assert!(server.machine.has_lost_end(VB, Seqno(1)));
    server.machine.close_stream(server.now, VB);
    assert!(!server.machine.has_lost_end(VB, Seqno(1)), "it is closed once");
    server.reopen_until(config(), Seqno(3));
    assert_eq!(server.requested_up_to(1).end, 1);
}

#[test]
fn rule_10_a_stream_that_waits_for_what_will_be_written_has_lost_nothing() {
    let mut server = Harness::new(config());
    let awaited = StreamPosition::new(Position::EARLIEST);
    server.open_until(awaited, Seqno(3));
    server.accept(LOG);
    assert!(!server.machine.has_lost_end(VB, Seqno(1)));
}

#[test]
fn rule_10_only_an_answer_to_its_own_question_says_where_a_stream_ends() {
    let mut server = Harness::new(config());
    server.machine.request_high_seqnos();
    let earlier = server.sent();
    let [Sent::HighSeqnos(earlier)] = earlier[..] else { panic!("{earlier:?}") };
    let begin = StreamPosition::new(Position::EARLIEST).with_end(EndKind::Latest);
    server.machine.open_stream(VB, Seqno(3), begin).unwrap();
    server.high_seqno(earlier, 2);
    assert_eq!(server.requested_up_to(1).end, 1);
}

#[test]
fn rule_10_a_node_that_does_not_say_what_it_has_has_refused_the_stream() {
    let mut server = Harness::new(config());
    let begin = StreamPosition::new(Position::EARLIEST).with_end(EndKind::Latest);
    server.machine.open_stream(VB, Seqno(3), begin).unwrap();
    let sent = server.sent();
    let [Sent::HighSeqnos(number)] = sent[..] else { panic!("{sent:?}") };
    let answer = Frame::response(Opcode::GET_ALL_VB_SEQNOS, Status::ETMPFAIL);
    answer.with_opaque(Opaque(number)).encode(&mut server.wire).unwrap();
    server.play();
    let refused = OpenStreamError::Refused { status: Status::ETMPFAIL, manifest_uid: None };
    let events = server.events();
    assert!(
        matches!(&events[..], [Event::StreamEnded { cause: EndCause::Refused(why), .. }, Event::Refused { .. }] if *why == refused),
        "{events:?}"
    );
    // One that is closed before it was asked for is unknown to the server.
    let begin = StreamPosition::new(Position::EARLIEST).with_end(EndKind::Latest);
    server.machine.open_stream(VB, Seqno(3), begin).unwrap();
    server.machine.close_stream(server.now, VB);
    let events = server.events();
    let [Event::StreamEnded { cause: EndCause::Closed, .. }] = &events[..] else {
        panic!("{events:?}")
    };
    assert!(!server.sent().iter().any(|sent| matches!(sent, Sent::Close(_))));
}

#[test]
fn rule_10_an_end_that_is_yet_to_be_written_is_waited_for() {
    let end = Seqno(100);
    let mut server = Harness::new(config());
    server.open_until(StreamPosition::new(Position::EARLIEST), end);
    server.accept(LOG);
    server.marker(0, 40).mutation(40).play();
    assert_eq!(server.reconnect_until(config(), end).end, 100, "nobody has seen it yet");
}

#[test]
fn rule_10_any_other_end_is_not_completion() {
    let mut server = Harness::new(config());
    server.open_until(StreamPosition::new(Position::EARLIEST), Seqno(40));
    server.accept(LOG);
    server.marker(0, 6).mutation(6).end(StreamEndReason::STATE_CHANGED).play();
    let events = server.events();
    let [Event::StreamEnded { cause, .. }] = &events[..] else { panic!("{events:?}") };
    assert_eq!(*cause, EndCause::Ended(StreamEndReason::STATE_CHANGED));
    assert_eq!(server.moved().unwrap().seqno, Seqno(6), "its last position is not lost");
}

#[test]
fn rule_12_a_marker_that_asks_is_answered_when_its_snapshot_is_complete() {
    let mut server = Harness::streaming(config());
    let flags = SnapshotFlags::MEMORY | SnapshotFlags::ACK;
    server.marker_of(&SnapshotMarker::new(Seqno(0), Seqno(2), flags)).mutation(1).play();
    assert_eq!(server.sent(), []);
    server.mutation(2).play();
    let (opcode, opaque) = (Opcode::DCP_SNAPSHOT_MARKER, server.opaque);
    assert_eq!(server.sent(), [Sent::Response { opcode, opaque, status: Status::SUCCESS }]);
}

#[test]
fn rule_12_a_snapshot_that_may_repeat_keys_may() {
    let mut server = Harness::streaming(config());
    let flags = SnapshotFlags::MEMORY | SnapshotFlags::MAY_CONTAIN_DUPLICATES;
    server.marker_of(&SnapshotMarker::new(Seqno(0), Seqno(3), flags));
    // All of the same key.
    server.mutations([1, 2, 3]).play();
    assert_eq!(server.seqnos(), [1, 2, 3]);
    assert_eq!(server.sent(), [], "nobody asked for an answer");
}

#[test]
fn seqno_repeated_after_seqno_advanced_is_taken_and_counted() {
    let mut server = Harness::streaming(config());
    server.marker(16, 17).advanced(17).mutation(17).play();
    assert_eq!(server.seqnos(), [17]);
    assert_eq!(server.machine.stats().repeated_seqnos, 1);
    server.mutation(17);
    let error = Misbehaviour::SeqnoNotAscending { seqno: Seqno(17), last: Seqno(17) };
    assert_eq!(server.misbehaves(), error, "once only");

    let mut server = Harness::streaming(config());
    server.marker(16, 18).advanced(17).system_event(17, 3).system_event(18, 4).play();
    assert_eq!(server.machine.stats().repeated_seqnos, 1);
    assert_eq!(server.sink.told.iter().map(|event| event.seqno).collect::<Vec<_>>(), [17, 18]);
}

#[test]
fn marker_and_seqno_advanced_at_the_position_change_nothing() {
    let mut server = Harness::streaming(config());
    server.marker(0, 5).mutation(5).marker(5, 5).advanced(5).play();
    let position = server.moved().unwrap();
    assert_eq!((position.seqno, position.snapshot), (Seqno(5), snapshot(5, 5)));
    server.marker(6, 9).mutation(7).play();
    assert_eq!(server.seqnos(), [5, 7]);
}

#[test]
fn purge_seqno_of_a_marker_goes_with_the_next_request() {
    let collections = ConnectionConfig { collections: true, ..config() };
    let mut server = Harness::streaming(collections.clone());
    let disk = SnapshotMarker {
        purge_seqno: Some(Seqno(15)),
        ..SnapshotMarker::new(Seqno(0), Seqno(20), SnapshotFlags::DISK)
    };
    server.marker_of(&disk).advanced(20).play();
    assert_eq!(server.moved().unwrap().purge_seqno, Seqno(15));
    assert_eq!(server.reconnect(collections.clone()).value, r#"{"purge_seqno":"15"}"#);
    let old = ConnectionConfig { purge_seqno: false, ..collections };
    assert_eq!(server.reconnect(old).value, "", "servers before 8.0 refuse it");
}

#[test]
fn stream_request_is_for_the_active_copy_and_every_deletion() {
    let mut server = Harness::streaming(config());
    server.marker(0, 20).mutation(20).play();
    assert_eq!(server.reconnect(config()).flags, StreamRequestFlags::ACTIVE_VB_ONLY);
}

#[test]
fn filter_is_sent_as_hex_ids() {
    let filter = StreamFilter::Collections(vec![CollectionId(8), CollectionId(0x8a)]);
    let mut server = Harness::new(ConnectionConfig { collections: true, filter, ..config() });
    let request = server.open(StreamPosition::new(Position::EARLIEST));
    assert_eq!(request.value, r#"{"collections":["8","8a"]}"#);
}

#[test]
fn filter_that_is_new_applies_to_later_requests() {
    let filter = StreamFilter::Collections(vec![CollectionId(8)]);
    let mut server = Harness::new(ConnectionConfig { collections: true, filter, ..config() });
    let request = server.open(StreamPosition::new(Position::EARLIEST));
    assert_eq!(request.value, r#"{"collections":["8"]}"#);
    server.machine.set_filter(StreamFilter::Collections(vec![CollectionId(9)]));
    assert_eq!(server.sent(), [], "an open stream keeps its own");
    server
        .machine
        .open_stream(Vbid(3), Seqno::MAX, StreamPosition::new(Position::EARLIEST))
        .unwrap();
    assert_eq!(server.requested().value, r#"{"collections":["9"]}"#);
}

#[test]
fn seqno_of_a_vbucket_is_known_while_it_streams() {
    let mut server = Harness::new(config());
    assert_eq!(server.machine.seqno(VB), None);
    server.open(StreamPosition::new(position(5, (5, 5), &[(1, 0)])));
    assert_eq!(server.machine.seqno(VB), None, "asked for but not accepted");
    server.accept(&[(1, 0)]);
    assert_eq!(server.machine.seqno(VB), Some(Seqno(5)));
    server.marker(6, 9).mutation(7).play();
    assert_eq!(server.machine.seqno(VB), Some(Seqno(7)));
    assert_eq!(server.machine.seqno(Vbid(3)), None, "another");
    assert_eq!(server.machine.seqno(Vbid(999)), None, "there is none");
    server.end(StreamEndReason::STATE_CHANGED).play();
    assert_eq!(server.machine.seqno(VB), None);
}

#[test]
fn position_that_moved_is_taken_once() {
    let mut server = Harness::streaming(config());
    assert!(!server.machine.has_moved());
    server.marker(0, 9).play();
    assert!(!server.machine.has_moved(), "a marker alone moves nothing");
    server.mutation(1).play();
    assert!(server.machine.has_moved());
    assert_eq!(server.moved().unwrap().seqno, Seqno(1));
    assert!(!server.machine.has_moved() && server.moved().is_none());
    server.mutation(2).end(StreamEndReason::STATE_CHANGED).play();
    assert!(server.machine.has_moved(), "also after its stream ended");
    assert_eq!(server.moved().unwrap().seqno, Seqno(2));
    assert!(!server.machine.has_moved());
}

#[test]
fn cluster_map_is_requested() {
    let mut server = Harness::new(config());
    server.machine.request_cluster_map();
    assert_eq!(server.sent(), [Sent::Other(Opcode::GET_CLUSTER_CONFIG)]);
}

#[test]
fn stats_count_what_arrives() {
    let mut server = Harness::streaming(config());
    let before = *server.machine.stats();
    assert_eq!((before.packets, before.changes), (1, 0), "the answer to the request");
    server.marker(0, 9).mutations([1, 2, 3]);
    let bytes = server.wire.len() as u64;
    server.play();
    server.deletion(4, None).advanced(5).play();
    let stats = *server.machine.stats();
    assert_eq!((stats.packets, stats.changes), (7, 4));
    assert_eq!(stats.bytes, before.bytes + bytes + 42 + 3 + 32);
    assert_eq!((stats.rollbacks, stats.noops, stats.acks), (0, 0, 0));
}

#[test]
fn answer_to_a_replaced_request_is_dropped() {
    let mut server = inside_the_third_snapshot(config());
    let refused = server.reconnect(config());
    server.answer(Status::ROLLBACK, &30_u64.to_be_bytes()).play();
    let current = server.requested();
    server.opaque = refused.opaque;
    server.answer(Status::ROLLBACK, &0_u64.to_be_bytes()).play();
    assert_eq!((server.sent(), server.machine.stats().stale_responses), (vec![], 1));
    server.opaque = current.opaque;
    server.accept(LOG);
}

#[test]
fn high_seqnos_that_were_not_requested_are_dropped() {
    let mut server = Harness::streaming(config());
    server.machine.request_high_seqnos();
    let sent = server.sent();
    let [Sent::HighSeqnos(asked)] = sent[..] else { panic!("{sent:?}") };
    for number in [asked + 1, asked, asked] {
        server.high_seqno(number, 7);
    }
    assert_eq!(server.events(), [Event::HighSeqnos(vec![(VB, Seqno(7))])]);
    assert_eq!(server.machine.stats().stale_responses, 2);
}

#[test]
fn collections_are_answered_together_and_only_for_vbuckets_that_exist() {
    let mut server = Harness::streaming(ConnectionConfig { collections: true, ..config() });
    let (one, other, gone) = (CollectionId(8), CollectionId(9), CollectionId(10));
    server.machine.request_collection_seqnos(&[one, other, gone]);
    server.machine.request_collection_seqnos(&[one]);
    let sent = server.sent();
    let [Sent::HighSeqnos(first), Sent::HighSeqnos(second), Sent::HighSeqnos(third)] = sent[..]
    else {
        panic!("{sent:?}: nothing more is asked while something is")
    };
    let beyond = Vbid(server.machine.config().num_vbuckets);
    let mut answer = |opaque, status, seqnos: &[(Vbid, Seqno)]| {
        let mut value = Vec::new();
        encode_vb_seqnos(seqnos.iter().copied(), &mut value);
        let answer = Frame::response(Opcode::GET_ALL_VB_SEQNOS, status);
        let answer = answer.with_opaque(Opaque(opaque)).with_value(&value);
        answer.encode(&mut server.wire).unwrap();
        server.play();
        server.events()
    };
    assert_eq!(answer(second, Status::EACCESS, &[]), []);
    assert_eq!(answer(second, Status::SUCCESS, &[]), [], "answered twice");
    assert_eq!(answer(third, Status::UNKNOWN_COLLECTION, &[]), []);
    let seqnos = [(beyond, Seqno(1)), (VB, Seqno(7)), (Vbid(60_000), Seqno(1))];
    let events = answer(first, Status::SUCCESS, &seqnos);
    let of = |collection, seqnos| CollectionSeqnos { collection, seqnos };
    let expected =
        [of(other, Err(Status::EACCESS)), of(gone, Ok(vec![])), of(one, Ok(vec![(VB, Seqno(7))]))];
    assert_eq!(events, [Event::CollectionSeqnos(expected.to_vec())]);
    assert_eq!(server.machine.stats().stale_responses, 1);
    server.machine.request_collection_seqnos(&[one]);
    assert_eq!(server.sent().len(), 1, "all were answered");
}

#[test]
fn opaque_is_new_each_time_a_vbucket_is_opened() {
    let mut server = Harness::streaming(config());
    let first = server.opaque;
    server.marker(0, 1).mutation(1).end(StreamEndReason::STATE_CHANGED).play();
    let events = server.events();
    let [Event::StreamEnded { from, .. }] = &events[..] else { panic!("{events:?}") };
    let request = server.open((**from).clone());
    assert_ne!(request.opaque, first);
    server.accept(LOG);
    // A late packet of the first stream.
    let second = std::mem::replace(&mut server.opaque, first);
    server.mutation(1).end(StreamEndReason::OK).play();
    assert_eq!((server.seqnos(), server.events().len()), (vec![1], 0));
    server.opaque = second;
    server.marker(1, 2).mutation(2).play();
    assert_eq!(server.seqnos(), [1, 2]);
}

#[test]
fn stream_that_was_not_accepted_may_not_send() {
    let mut server = Harness::new(config());
    server.open(StreamPosition::new(Position::EARLIEST));
    server.marker(0, 5);
    assert_eq!(server.misbehaves(), Misbehaviour::UnexpectedPacket);
}

#[test]
fn packets_that_were_not_requested_close_the_connection() {
    let unexpected = [
        Frame::response(Opcode::GET, Status::SUCCESS),
        Frame::request(Opcode::SET),
        Frame::request(Opcode::DCP_OPEN).with_vbid(VB),
    ];
    for packet in unexpected {
        let mut server = Harness::streaming(config());
        packet.with_opaque(server.opaque).encode(&mut server.wire).unwrap();
        assert_eq!(server.misbehaves(), Misbehaviour::UnexpectedPacket, "{packet:?}");
    }
}
