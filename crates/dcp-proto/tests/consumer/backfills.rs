//! What a server knows beyond the newest versions: loads in the order of keys, purges, and when a
//! vBucket is caught up.

use dcp_proto::consumer::{
    ConnectionConfig, Delivery, EndCause, Event, OpenStreamError, StreamFilter, StreamPosition,
};
use dcp_proto::{OnRollback, Position};
use dcp_test::harness::{Harness, Item, Sent, VB, config, is_complete, position};
use dcp_wire::message::{OsoSnapshot, StreamEndReason, StreamRequestFlags};
use dcp_wire::{CollectionId, Seqno, Status};

const LOG: &[(u64, u64)] = &[(1, 0)];

fn catching_up(from: Position, target: u64) -> StreamPosition {
    StreamPosition::new(from).with_catch_up(Seqno(target))
}

/// A stream from the beginning of a vBucket that has so much.
fn streaming(target: u64, end: Seqno) -> Harness {
    let mut server = Harness::new(config());
    server.open_until(catching_up(Position::EARLIEST, target), end);
    server.accept(LOG);
    server
}

/// What was told in place of documents, with the number of documents before it.
fn told(server: &Harness) -> Vec<(usize, Item)> {
    let mut documents = 0;
    let mut told = Vec::new();
    for item in &server.sink.items {
        match item {
            Item::Change { .. } => documents += 1,
            _ => told.push((documents, *item)),
        }
    }
    told
}

#[test]
fn finite_stream_resumed_past_its_end_in_a_snapshot_is_not_caught_up() {
    let mut server = streaming(5, Seqno(5));
    // A key at 2 was left out: its newer version is at 10.
    server.marker(0, 10).mutation(7).play();
    let request = server.reconnect_until(config(), Seqno(5));
    assert_eq!((request.start, request.end), (7, 10));
    server.accept(LOG);
    assert_eq!(told(&server), []);
    server.marker(0, 10).mutation(10).play();
    assert_eq!(told(&server), [(2, Item::CaughtUp(10))]);
}

#[test]
fn vbucket_is_caught_up_with_the_snapshot_that_holds_what_it_had() {
    let mut server = streaming(40, Seqno::MAX);
    server.marker(0, 20).mutations([10, 20]);
    // A key that was last written at 30 may be the one at 60 by now.
    server.marker(21, 60).mutations([35, 45]).play();
    assert_eq!(told(&server), []);
    server.mutation(60).marker(61, 70).mutation(70).play();
    assert_eq!(told(&server), [(5, Item::CaughtUp(60))], "once, and between the documents");
    let events = server.events();
    assert!(matches!(events[..], [Event::CaughtUp(told)] if told.vbid == VB), "{events:?}");
    server.reconnect(config());
    server.accept(LOG);
    server.marker(71, 80).mutation(80).play();
    assert_eq!(told(&server).len(), 1, "not again on another connection");
}

#[test]
fn vbucket_that_has_nothing_new_is_caught_up_at_once() {
    for (from, told_at) in [(Position::EARLIEST, 0), (position(40, (40, 40), LOG), 40)] {
        let mut server = Harness::new(config());
        server.open(catching_up(from, told_at));
        let events = server.accept_with(LOG);
        assert!(matches!(events[..], [Event::CaughtUp(_)]), "{events:?}");
        assert_eq!(server.sink.items, [Item::CaughtUp(told_at)]);
    }
    // Inside a snapshot what it had may still be missing.
    let mut server = Harness::new(config());
    server.open(catching_up(position(40, (20, 50), LOG), 40));
    server.accept(LOG);
    server.marker(20, 50).mutation(45).play();
    assert_eq!(told(&server), []);
    server.mutation(50).play();
    assert_eq!(told(&server), [(2, Item::CaughtUp(50))]);
}

#[test]
fn seqnos_that_are_passed_over_catch_up_too() {
    let mut server = streaming(40, Seqno::MAX);
    server.marker(0, 40).mutation(10).advanced(40).play();
    assert_eq!(told(&server), [(1, Item::CaughtUp(40))]);
}

/// A stream of two collections that had so much when it was opened.
fn streaming_collections(end: Seqno) -> Harness {
    let filter = StreamFilter::Collections(vec![CollectionId(8), CollectionId(9)]);
    let mut server = Harness::new(ConnectionConfig { collections: true, filter, ..config() });
    server.open_until(catching_up(Position::EARLIEST, 4), end);
    server.accept(LOG);
    server
}

#[test]
fn co_63_snapshot_from_memory_that_is_left_open_shows_until_the_stream_is_asked_for_again() {
    let mut server = streaming_collections(Seqno::MAX);
    assert!(!server.machine.awaits_snapshot_end(VB));
    // Announced up to a prepare that is never sent.
    server.say("MARK [0-4] 0x5").play();
    assert!(!server.machine.awaits_snapshot_end(VB), "it may be one without items");
    server.mutation(3).play();
    assert!(server.machine.awaits_snapshot_end(VB));
    assert_eq!(told(&server), []);
    let config = server.machine.config().clone();
    let request = server.reconnect(config);
    assert_eq!((request.start, request.snapshot), (3, (0, 4)));
    server.accept(LOG);
    assert!(!server.machine.awaits_snapshot_end(VB));
    // Asked again, the server says that nothing is left.
    server.say("MARK [0-5] 0x5").advanced(5).play();
    assert!(!server.machine.awaits_snapshot_end(VB));
    assert_eq!(told(&server), [(1, Item::CaughtUp(5))]);
    // A disk may take its time.
    server.say("MARK [6-9] 0x2").mutation(7).play();
    assert!(!server.machine.awaits_snapshot_end(VB));
}

#[test]
fn co_63_finite_stream_ends_inside_a_snapshot_that_is_left_open() {
    let mut server = streaming_collections(Seqno(4));
    server.marker(0, 4).mutation(3).play();
    assert_eq!(server.events(), [], "a newer version may follow");
    server.end(StreamEndReason::OK).play();
    let events = server.events();
    assert!(matches!(&events[..], [Event::CaughtUp(_), end] if is_complete(end)), "{events:?}");
}

/// Interrupts a load at 5, which the server rolls back to 0.
fn interrupt(server: &mut Harness) {
    server.marker(0, 100).mutation(5).play();
    assert_eq!(server.reconnect(config()).start, 5);
    server.answer(Status::ROLLBACK, &0u64.to_be_bytes()).play();
}

#[test]
fn co_64_load_that_purges_overtake_again_and_again_says_why_it_ends() {
    // A branch that began above the position, before the load, is no failover.
    for log in [LOG, &[(2, 30), (1, 0)]] {
        let mut server = Harness::new(config());
        server.open(catching_up(Position::EARLIEST, 100));
        server.accept(log);
        for _ in 0..3 {
            interrupt(&mut server);
            assert_eq!(server.requested().start, 0);
            server.accept(log);
        }
        interrupt(&mut server);
        let events = server.events();
        let [Event::StreamEnded { cause, from, .. }] = &events[..] else { panic!("{events:?}") };
        assert_eq!(*cause, EndCause::Overtaken(3));
        assert_eq!(from.position.seqno, Seqno(5), "nothing is rolled back");
    }
}

#[test]
fn co_64_loads_that_failovers_interrupt_or_that_are_complete_do_not_count() {
    // Each time the server is on another branch: it has lost the client's.
    let mut server = streaming(100, Seqno::MAX);
    for branch in 2..12 {
        interrupt(&mut server);
        assert_eq!(server.requested().start, 0);
        server.accept(&[(branch, 0)]);
    }
    // The same if the new branch begins beyond the client's position, inside of its snapshot.
    let mut server = streaming(100, Seqno::MAX);
    for branch in 2..12 {
        interrupt(&mut server);
        assert_eq!(server.requested().start, 0);
        server.accept(&[(branch, 50), (branch - 1, 0)]);
    }
    // A load that was completed begins a new count.
    let mut server = streaming(100, Seqno::MAX);
    for _ in 0..4 {
        for _ in 0..3 {
            interrupt(&mut server);
            assert_eq!(server.requested().start, 0);
            server.accept(LOG);
        }
        server.marker(0, 100).mutation(100).play();
        server.reconnect(config());
        server.answer(Status::ROLLBACK, &0u64.to_be_bytes()).play();
        assert_eq!(server.requested().start, 0);
        server.accept(LOG);
    }
}

#[test]
fn finite_stream_is_caught_up_before_it_ends() {
    let mut server = streaming(40, Seqno(40));
    server.marker(0, 40).mutations([10, 40]).play();
    assert_eq!(told(&server), [(2, Item::CaughtUp(40))]);
    let events = server.events();
    assert!(matches!(&events[..], [Event::CaughtUp(_), end] if is_complete(end)), "{events:?}");
    // The first change past the end of a clamped stream shows that nothing is missing.
    let delivery = Delivery { clamp: true, ..Delivery::default() };
    let mut server = Harness::new(ConnectionConfig { delivery, ..config() });
    server.open_until(catching_up(Position::EARLIEST, 40), Seqno(40));
    server.accept(LOG);
    server.marker(0, 60).mutations([10, 50]).play();
    assert_eq!(told(&server), [(1, Item::CaughtUp(40))]);
    // The server says itself that a filter lets nothing more pass.
    let mut server = streaming(40, Seqno(40));
    server.marker(0, 30).mutations([10, 30]).end(StreamEndReason::OK).play();
    assert_eq!(told(&server), [(2, Item::CaughtUp(30))]);
    // One that ends before what the vBucket had is not.
    let mut server = streaming(40, Seqno(20));
    server.marker(0, 20).mutation(20).end(StreamEndReason::OK).play();
    assert_eq!(told(&server), []);
    let mut server = streaming(40, Seqno(39));
    server.marker(0, 20).mutation(20).end(StreamEndReason::OK).play();
    assert_eq!(told(&server), [], "not even if the server says that nothing more comes");
}

#[test]
fn vbucket_that_lost_what_it_had_is_caught_up_with_what_is_left() {
    let mut server = streaming(40, Seqno::MAX);
    server.marker(0, 20).mutation(20).play();
    server.reconnect(config());
    server.accept(&[(2, 20), (1, 0)]);
    for high in [30, 20] {
        assert_eq!(told(&server), [], "it has more");
        server.machine.request_high_seqnos();
        let sent = server.sent();
        let [Sent::HighSeqnos(number)] = sent[..] else { panic!("{sent:?}") };
        server.high_seqno(number, high);
    }
    assert_eq!(told(&server), [(1, Item::CaughtUp(20))]);
}

#[test]
fn changes_that_are_unpersisted_do_not_catch_up() {
    let delivery = Delivery { persisted_only: true, ..Delivery::default() };
    let mut server = Harness::new(ConnectionConfig { delivery, ..config() });
    server.open(catching_up(Position::EARLIEST, 20));
    server.accept(LOG);
    server.marker(0, 20).mutations([10, 20]).play();
    server.machine.persisted(VB, dcp_wire::Vbuuid(1), Seqno(10));
    server.play();
    assert_eq!(told(&server), []);
    server.machine.persisted(VB, dcp_wire::Vbuuid(1), Seqno(20));
    server.play();
    assert_eq!(told(&server), [(2, Item::CaughtUp(20))]);
}

#[test]
fn snapshot_in_the_order_of_keys_that_is_cut_restarts_in_another_epoch() {
    let mut server = streaming(18, Seqno::MAX);
    server.oso(OsoSnapshot::Start).mutations([9, 3, 17]).play();
    let kept = server.moved().unwrap();
    assert_eq!((kept.seqno, kept.epoch), (Seqno(0), 1), "whoever goes on from it begins again");
    let request = server.reconnect(config());
    assert_eq!((request.start, request.vbuuid), (0, 0));
    server.accept(LOG);
    server.oso(OsoSnapshot::Start).mutations([9, 3, 17]).advanced(18);
    server.oso(OsoSnapshot::End).play();
    let told = told(&server);
    let [(3, Item::Rollback(void)), (6, Item::CaughtUp(18))] = told[..] else { panic!("{told:?}") };
    assert_eq!((void.seqno, void.epoch), (Seqno::ZERO, 1));
    let Item::Change { epoch, seqno, .. } = server.sink.items[4] else { panic!() };
    assert_eq!((epoch, seqno), (1, 9));
    let whole = server.moved().unwrap();
    assert_eq!((whole.seqno, whole.epoch), (Seqno(18), 1));
}

#[test]
fn position_that_is_out_of_range_is_rolled_back_to_the_beginning() {
    let from = || StreamPosition::new(position(40, (40, 40), LOG));
    for policy in [OnRollback::Emit, OnRollback::Resync] {
        let mut server = Harness::new(ConnectionConfig { on_rollback: policy, ..config() });
        server.open(from());
        server.answer(Status::ERANGE, &[]).play();
        let [Item::Rollback(rollback)] = server.sink.items[..] else { panic!() };
        let (seqno, from_seqno) = (rollback.seqno, rollback.from_seqno);
        assert_eq!((seqno, from_seqno, rollback.epoch), (Seqno(0), Seqno(40), 1));
        let sent = server.sent();
        let [Sent::StreamRequest(request)] = &sent[..] else { panic!("{sent:?}") };
        assert_eq!((request.start, request.vbuuid), (0, 0));
        // There is nothing before the beginning: the same answer is an error, not a loop.
        server.opaque = request.opaque;
        server.answer(Status::ERANGE, &[]).play();
        let events = server.events();
        let last = events.last().unwrap();
        let Event::StreamEnded { cause, .. } = last else { panic!("{events:?}") };
        let (status, manifest_uid) = (Status::ERANGE, None);
        assert_eq!(*cause, EndCause::Refused(OpenStreamError::Refused { status, manifest_uid }));
        assert_eq!(server.sent(), []);
    }
    let fail = ConnectionConfig { on_rollback: OnRollback::Fail, ..config() };
    let mut server = Harness::new(fail);
    server.open(from());
    server.answer(Status::ERANGE, &[]).play();
    let events = server.events();
    let [Event::StreamEnded { cause: EndCause::RolledBack { rollback: to, .. }, .. }] = &events[..]
    else {
        panic!("{events:?}")
    };
    assert_eq!((to.seqno, server.sent(), server.sink.items.len()), (Seqno(0), vec![], 0));
}

#[test]
fn purged_deletions_are_ignored_only_on_demand() {
    for ignore_purged_tombstones in [false, true] {
        let config = ConnectionConfig { ignore_purged_tombstones, ..config() };
        let request = Harness::new(config).open(StreamPosition::new(position(40, (40, 40), LOG)));
        let flag = StreamRequestFlags::IGNORE_PURGED_TOMBSTONES;
        assert_eq!(request.flags.contains(flag), ignore_purged_tombstones);
        assert!(request.flags.contains(StreamRequestFlags::ACTIVE_VB_ONLY));
    }
}
