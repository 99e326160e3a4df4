//! What reaches the sink, and when: rollback mitigation, ends that cut, the fields of a change.

use dcp_wire::message::{
    Deletion, Expiration, Mutation, OsoSnapshot, StreamAddress, StreamEnd, StreamEndReason,
    encode_failover_log,
};
use dcp_wire::{
    Cas, CollectionId, Datatype, EncodeError, Frame, Opcode, RevSeqno, Seqno, Status, Vbid, Vbuuid,
};

use dcp_proto::consumer::{
    ConnectionConfig, Delivery, EndCause, Event, Limit, Misbehaviour, StreamPosition, Unpersisted,
};
use dcp_proto::flow_control::counted_bytes;
use dcp_proto::{Change, ChangeSink, Op, Position, Rollback, SinkError, Snapshot};
use dcp_test::harness::{Harness, Sent, VB, config, is_complete, log, position};

const BRANCH: Option<Vbuuid> = Some(Vbuuid(1));
const WAITS: Event = Event::Unpersisted { vbid: VB, vbuuid: BRANCH };
const WAITS_NO_MORE: Event = Event::Unpersisted { vbid: VB, vbuuid: None };

fn persisted_only(window: u32) -> ConnectionConfig {
    let delivery = Delivery { persisted_only: true, ..Delivery::default() };
    ConnectionConfig { window, delivery, ..config() }
}

fn clamped() -> ConnectionConfig {
    ConnectionConfig { delivery: Delivery { clamp: true, ..Delivery::default() }, ..config() }
}

fn settling() -> ConnectionConfig {
    let delivery =
        Delivery { clamp: true, persisted_only: true, end_persisted: true, ..Delivery::default() };
    ConnectionConfig { delivery, ..config() }
}

fn persisted(server: &mut Harness, vbuuid: u64, seqno: u64) {
    server.machine.persisted(VB, Vbuuid(vbuuid), Seqno(seqno));
    server.play();
}

#[test]
fn rule_11_a_change_waits_until_it_is_persisted_everywhere() {
    let mut server = Harness::streaming(persisted_only(0));
    server.marker(0, 5).mutations([1, 2]).advanced(3).mutation(4).marker(5, 9).mutation(7).play();
    assert_eq!((server.seqnos(), server.moved()), (vec![], None));
    assert_eq!(server.events(), [WAITS]);
    assert_eq!(server.machine.unpersisted().rows, 4);
    persisted(&mut server, 1, 2);
    assert_eq!(server.seqnos(), [1, 2]);
    assert_eq!(server.moved().unwrap().seqno, Seqno(2));
    persisted(&mut server, 1, 3);
    assert_eq!((server.seqnos(), server.moved().unwrap().seqno), (vec![1, 2], Seqno(3)));
    assert_eq!(server.events(), []);
    server.mutation(8).play();
    persisted(&mut server, 1, 8);
    assert_eq!(server.seqnos(), [1, 2, 4, 7, 8]);
    let position = server.moved().unwrap();
    assert_eq!(position.snapshot, Snapshot { start: Seqno(5), end: Seqno(9) });
    assert_eq!(
        (server.events(), server.machine.unpersisted()),
        (vec![WAITS_NO_MORE], Unpersisted::default())
    );
    server.mutation(9).play();
    assert_eq!(server.events(), [WAITS], "the next waits again");
}

#[test]
fn rule_11_what_is_persisted_on_another_branch_sets_nothing_free() {
    let mut server = Harness::streaming(persisted_only(0));
    server.marker(0, 5).mutation(1).play();
    persisted(&mut server, 2, 5);
    assert!(server.seqnos().is_empty());
    persisted(&mut server, 1, 5);
    server.marker(5, 9).mutation(6).play();
    persisted(&mut server, 1, 9);
    persisted(&mut server, 1, 6);
    server.mutation(7).play();
    assert_eq!(server.seqnos(), [1, 6], "a copy that joins may have less");
}

#[test]
fn rule_11_a_vbucket_that_waited_is_reported_once_when_it_waits_no_more() {
    let mut server = Harness::streaming(persisted_only(0));
    persisted(&mut server, 1, 5);
    assert_eq!(server.events(), [], "nothing waited");
    server.marker(0, 9).mutation(6).play();
    assert_eq!(server.events(), [WAITS]);
    server.machine.persisted(VB, Vbuuid(1), Seqno(6));
    persisted(&mut server, 1, 7);
    assert_eq!(server.events(), [WAITS_NO_MORE]);
}

#[test]
fn rule_11_what_waits_is_not_acknowledged_and_stops_the_server() {
    let mut server = Harness::streaming(persisted_only(1000));
    server.marker(0, 99).play();
    let _ = server.machine.take_held();
    server.mutation(1);
    let one = counted_bytes(&Frame::parse(&server.wire, 1 << 20).unwrap().unwrap().0.header);
    server.play();
    let mut seqno = 1;
    while !server.machine.is_window_full() {
        seqno += 1;
        server.mutation(seqno).play();
    }
    assert_eq!(server.machine.unpersisted(), Unpersisted { rows: seqno, bytes: seqno * one });
    assert_eq!(server.machine.take_held(), 0, "nothing the driver could give back");
    persisted(&mut server, 1, 2);
    assert_eq!(server.machine.take_held(), 2 * one);
    assert_eq!(server.machine.unpersisted().rows, seqno - 2);
}

#[test]
fn rule_11_what_has_passed_comes_in_portions() {
    let in_one_snapshot = |server: &mut Harness| _ = server.marker(0, 9).mutations(1..=9);
    let in_one_each = |server: &mut Harness| {
        (1..=9).for_each(|seqno| _ = server.marker(seqno, seqno).mutation(seqno));
    };
    // 63 bytes each, one may overshoot; a marker is no row.
    for limit in [Limit { rows: 2, ..Limit::NONE }, Limit { bytes: 100, ..Limit::NONE }] {
        for send in [in_one_snapshot, in_one_each] {
            let mut server = Harness::streaming(persisted_only(0));
            send(&mut server);
            server.play();
            server.machine.persisted(VB, Vbuuid(1), Seqno(7));
            let (now, mut taken) = (server.now, Vec::new());
            loop {
                let walk = server.machine.handle_input(now, &[], limit, &mut server.sink).unwrap();
                taken.push(walk.rows);
                if !walk.limited {
                    break;
                }
            }
            assert_eq!((taken, server.seqnos()), (vec![2, 2, 2, 1], (1..=7).collect()));
            assert_eq!(server.machine.stats().changes, 7);
        }
    }
}

#[test]
fn rule_11_an_end_comes_after_what_waits_and_a_broken_stream_drops_it() {
    let mut server = Harness::new(persisted_only(0));
    server.open_until(StreamPosition::new(Position::EARLIEST), Seqno(9));
    server.accept(&[(1, 0)]);
    server.marker(0, 9).mutation(8).end(StreamEndReason::OK).play();
    assert_eq!(server.events(), [WAITS]);
    persisted(&mut server, 1, 8);
    assert_eq!(server.seqnos(), [8]);
    assert!(server.events().iter().any(is_complete));

    let mut server = Harness::streaming(persisted_only(1 << 20));
    server.marker(0, 9).mutations(1..=4).play();
    persisted(&mut server, 1, 3);
    let _ = (server.machine.take_held(), server.events());
    let waits = server.machine.unpersisted().bytes;
    server.end(StreamEndReason::STATE_CHANGED).play();
    let events = server.events();
    let [Event::StreamEnded { from, .. }] = &events[..] else { panic!("{events:?}") };
    assert_eq!(from.position.seqno, Seqno(3), "goes on behind what was delivered");
    assert_eq!(server.seqnos(), [1, 2, 3]);
    assert_eq!((waits, server.machine.take_held()), (63, 63 + 28), "dropped bytes go back");
    assert_eq!(server.machine.unpersisted(), Unpersisted::default());
}

#[test]
fn rule_11_a_lost_connection_takes_what_waits_with_it() {
    let mut server = Harness::streaming(persisted_only(0));
    server.marker(0, 9).mutations([1, 2]).play();
    persisted(&mut server, 1, 1);
    let request = server.reconnect(persisted_only(0));
    assert_eq!((request.start, request.snapshot), (1, (0, 9)));
}

#[test]
fn rule_11_nothing_waits_unless_asked_for() {
    let mut server = Harness::streaming(config());
    server.marker(0, 9).mutation(1).play();
    assert_eq!((server.seqnos(), server.events()), (vec![1], vec![]));
}

fn bounded(config: ConnectionConfig, end: u64) -> Harness {
    let mut server = Harness::new(config);
    server.open_until(StreamPosition::new(Position::EARLIEST), Seqno(end));
    server.accept(&[(1, 0)]);
    server
}

#[test]
fn rule_10_a_clamped_stream_ends_at_its_end_inside_a_snapshot() {
    let snapshot = Snapshot { start: Seqno(0), end: Seqno(9) };
    for (seqnos, last) in [(&[2, 5][..], 5), (&[2, 4, 6], 5), (&[2, 6], 5)] {
        let mut server = bounded(clamped(), 5);
        server.marker(0, 9).mutations(seqnos.iter().copied()).play();
        let wanted: Vec<u64> = seqnos.iter().copied().filter(|&seqno| seqno <= 5).collect();
        assert_eq!(server.seqnos(), wanted, "{seqnos:?}");
        let events = server.events();
        assert!(events.iter().any(is_complete), "{seqnos:?}: {events:?}");
        let position = server.moved().unwrap();
        assert_eq!((position.seqno, position.snapshot), (Seqno(last), snapshot), "{seqnos:?}");
        server.mutation(8).end(StreamEndReason::OK).play();
        assert_eq!((server.seqnos(), server.events()), (wanted, vec![]), "nothing more comes");
    }
}

#[test]
fn rule_10_a_clamped_stream_takes_no_snapshot_that_lies_past_its_end() {
    let mut server = bounded(clamped(), 5);
    server.marker(0, 3).mutation(3).marker(4, 9).mutation(8).play();
    assert!(server.events().iter().any(is_complete));
    let position = server.moved().unwrap();
    let snapshot = Snapshot { start: Seqno(0), end: Seqno(3) };
    assert_eq!((position.seqno, position.snapshot), (Seqno(3), snapshot));
}

#[test]
fn rule_10_a_clamped_stream_ends_with_anything_past_its_end() {
    for ends in [
        |server: &mut Harness| _ = server.advanced(7),
        |server: &mut Harness| _ = server.system_event(7, 3),
        |server: &mut Harness| _ = server.deletion(7, None),
        |server: &mut Harness| _ = server.expiration(7),
    ] {
        let mut server = bounded(clamped(), 5);
        ends(server.marker(0, 9).mutation(4));
        assert_eq!((server.play().rows, server.seqnos()), (1, vec![4]));
        assert!(server.events().iter().any(is_complete));
        assert_eq!(server.moved().unwrap().manifest_uid.0, 0);
    }
}

#[test]
fn rule_10_a_clamped_out_of_order_snapshot_delivers_what_lies_below() {
    let mut server = bounded(clamped(), 5);
    server.oso(OsoSnapshot::Start).mutations([8, 3, 7, 5, 1]).play();
    assert_eq!((server.seqnos(), server.moved().unwrap().seqno), (vec![3, 5, 1], Seqno(0)));
    server.oso(OsoSnapshot::End).play();
    assert!(server.events().iter().any(is_complete));
    let position = server.moved().unwrap();
    let snapshot = Snapshot { start: Seqno(0), end: Seqno(8) };
    assert_eq!((position.seqno, position.snapshot), (Seqno(5), snapshot));
}

#[test]
fn change_out_of_order_names_the_branch_it_was_written_on() {
    let mut server = Harness::new(config());
    server.open(StreamPosition::new(Position::EARLIEST));
    server.accept(&[(2, 5), (1, 0)]);
    server.oso(OsoSnapshot::Start).mutations([8, 3, 6, 5]).play();
    let documents = server.sink.documents.iter();
    let branches: Vec<_> = documents.map(|each| (each.seqno, each.vbuuid)).collect();
    assert_eq!(branches, [(8, 2), (3, 1), (6, 2), (5, 1)]);
}

#[test]
fn rule_10_a_clamped_stream_takes_what_is_right_at_its_end() {
    for (at, delivered, manifest) in [
        (Harness::system_event as fn(&mut Harness, u64, u64) -> &mut Harness, vec![4, 5], 3),
        (|server, seqno, _| server.advanced(seqno), vec![4], 0),
        (|server, seqno, _| server.deletion(seqno, None), vec![4, 5], 0),
        (|server, seqno, _| server.mutation(seqno), vec![4, 5], 0),
    ] {
        let mut server = bounded(clamped(), 5);
        at(server.marker(0, 9).mutation(4), 5, 3).play();
        assert_eq!(server.seqnos(), delivered);
        assert!(server.events().iter().any(is_complete));
        let position = server.moved().unwrap();
        assert_eq!((position.seqno, position.manifest_uid.0), (Seqno(5), manifest));
    }
}

#[test]
fn rule_10_an_advance_right_to_the_end_enters_its_snapshot() {
    let mut server = bounded(clamped(), 5);
    server.marker(0, 9).advanced(5).play();
    assert!(server.events().iter().any(is_complete));
    let position = server.moved().unwrap();
    let snapshot = Snapshot { start: Seqno(0), end: Seqno(9) };
    assert_eq!((position.seqno, position.snapshot), (Seqno(5), snapshot));
}

/// Some servers advance to the seqno of a mutation that they send next.
#[test]
fn rule_10_an_advance_to_the_end_of_a_snapshot_waits_for_what_follows() {
    for config in [config(), clamped()] {
        let mut server = bounded(config.clone(), 5);
        server.marker(4, 5).advanced(5).play();
        assert!(!server.events().iter().any(is_complete));
        server.mutation(5).play();
        assert_eq!(server.seqnos(), [5]);
        assert!(server.events().iter().any(is_complete));

        let mut server = bounded(config, 5);
        server.marker(4, 5).advanced(5).end(StreamEndReason::OK).play();
        assert!(server.events().iter().any(is_complete));
        assert_eq!(server.moved().unwrap().seqno, Seqno(5));
    }
}

#[test]
fn rule_10_an_out_of_order_snapshot_up_to_the_end_is_complete() {
    let mut server = bounded(clamped(), 5);
    server.oso(OsoSnapshot::Start).mutations([3, 5, 1]).oso(OsoSnapshot::End).play();
    let position = server.moved().unwrap();
    let snapshot = Snapshot { start: Seqno(5), end: Seqno(5) };
    assert_eq!((position.seqno, position.snapshot), (Seqno(5), snapshot));
}

#[test]
fn key_without_its_collection_has_1_to_250_bytes() {
    for (len, is_taken) in [(0, false), (1, true), (250, true), (251, false)] {
        for message in ["MUT", "DEL", "DEL2", "EXP"] {
            let mut server = Harness::streaming(config());
            server.marker(0, 9).say(&format!("{message} 5 {}", "k".repeat(len)));
            assert_eq!(server.try_play().is_ok(), is_taken, "{message} with {len} bytes");
            assert_eq!(server.seqnos().len(), usize::from(is_taken));
        }
    }
}

#[test]
fn rule_11_a_stream_may_end_only_once_its_last_snapshot_is_persisted() {
    let mut server = bounded(settling(), 5);
    server.marker(0, 9).mutations([3, 5, 7]).play();
    persisted(&mut server, 1, 6);
    assert_eq!(server.seqnos(), [3, 5]);
    assert_eq!(server.events(), [WAITS, WAITS], "for its end now");
    assert_eq!(server.machine.unpersisted(), Unpersisted::default(), "7 is not wanted");
    server.mutation(9).end(StreamEndReason::OK).play();
    persisted(&mut server, 1, 8);
    assert_eq!(server.events(), []);
    persisted(&mut server, 1, 9);
    let events = server.events();
    assert!(events.iter().any(is_complete), "{events:?}");
    assert_eq!(server.seqnos(), [3, 5]);
}

#[test]
fn rule_11_a_stream_that_waits_for_its_end_is_opened_again_elsewhere() {
    let mut server = bounded(settling(), 5);
    server.marker(0, 9).mutation(5).play();
    persisted(&mut server, 1, 5);
    let _ = server.events();
    server.end(StreamEndReason::STATE_CHANGED).play();
    let [Event::StreamEnded { from, cause: EndCause::Ended(_), .. }] = &server.events()[..] else {
        panic!("it is not complete")
    };
    let from = (**from).clone();
    let request = server.open_until(from, Seqno(5));
    assert_eq!((request.start, request.end, request.snapshot), (5, 5, (0, 9)));
    server.accept(&[(2, 9), (1, 0)]);
    server.end(StreamEndReason::OK).play();
    assert_eq!(server.events(), [Event::Unpersisted { vbid: VB, vbuuid: Some(Vbuuid(2)) }]);
    persisted(&mut server, 1, 9);
    assert_eq!(server.events(), []);
    persisted(&mut server, 2, 9);
    assert!(server.events().iter().any(is_complete));
}

#[test]
fn rule_11_snapshot_past_the_end_that_replaced_changes_is_waited_for() {
    // Everything up to 5 that is missing was written again in the snapshot that follows.
    for first in [6, 9] {
        let mut server = bounded(settling(), 5);
        server.marker(0, 3).mutation(3).marker(4, 9).mutation(first).play();
        persisted(&mut server, 1, 8);
        let events = server.events();
        assert!(!events.iter().any(is_complete), "{first}: {events:?}");
        persisted(&mut server, 1, 9);
        assert_eq!(server.seqnos(), [3]);
        assert!(server.events().iter().any(is_complete), "{first}");
    }
}

#[test]
fn rule_11_stream_end_among_unpersisted_changes_completes_the_stream() {
    let delivery = Delivery { clamp: true, persisted_only: true, ..Delivery::default() };
    for is_ended in [true, false] {
        let mut server = bounded(ConnectionConfig { delivery: delivery.clone(), ..config() }, 5);
        server.marker(0, 9).mutations([3, 5, 7]);
        if is_ended {
            server.end(StreamEndReason::OK);
        }
        server.play();
        persisted(&mut server, 1, 3);
        persisted(&mut server, 1, 5);
        assert!(server.events().iter().any(is_complete));
        let is_closed = server.sent() == [Sent::Close(server.opaque)];
        assert_eq!((is_closed, server.machine.is_unused()), (!is_ended, is_ended));
    }
}

/// The numbers of the requests for high seqnos that the machine has sent.
fn asked_for_high_seqnos(server: &mut Harness) -> Vec<u32> {
    let number = |sent| match sent {
        Sent::HighSeqnos(number) => Some(number),
        _ => None,
    };
    server.sent().into_iter().filter_map(number).collect()
}

#[test]
fn rule_11_an_end_with_nothing_before_it_is_settled_by_the_high_seqno() {
    let mut server = bounded(settling(), 5);
    server.machine.request_high_seqnos();
    let [earlier] = asked_for_high_seqnos(&mut server)[..] else { panic!("one request") };
    // No marker says where what was written again lies.
    server.marker(0, 3).mutation(3).end(StreamEndReason::OK).play();
    persisted(&mut server, 1, 3);
    let [request] = asked_for_high_seqnos(&mut server)[..] else { panic!("one request") };
    persisted(&mut server, 1, 9);
    server.high_seqno(earlier, 7);
    let events = server.events();
    assert!(!events.iter().any(is_complete), "an older answer says nothing: {events:?}");
    server.high_seqno(request, 12);
    persisted(&mut server, 1, 11);
    let events = server.events();
    assert!(!events.iter().any(is_complete), "{events:?}");
    persisted(&mut server, 1, 12);
    assert!(server.events().iter().any(is_complete));
    assert_eq!(server.seqnos(), [3]);
}

#[test]
fn rule_11_an_end_with_nothing_before_it_may_be_settled_already() {
    let mut server = bounded(settling(), 5);
    server.end(StreamEndReason::OK).play();
    persisted(&mut server, 1, 12);
    let [request] = asked_for_high_seqnos(&mut server)[..] else { panic!("one request") };
    assert!(!server.events().iter().any(is_complete));
    server.high_seqno(request, 12);
    assert!(server.events().iter().any(is_complete));
}

#[test]
fn streams_that_end_at_once_request_high_seqnos_once() {
    let mut server = Harness::new(settling());
    for vbid in 0..8 {
        server
            .machine
            .open_stream(Vbid(vbid), Seqno(5), StreamPosition::new(Position::EARLIEST))
            .unwrap();
    }
    let mut opaques = Vec::new();
    for sent in server.sent() {
        if let Sent::StreamRequest(request) = sent {
            opaques.push(request.opaque);
        }
    }
    let mut log_value = Vec::new();
    encode_failover_log(log(&[(1, 0)]).entries().iter().copied(), &mut log_value);
    for (vbid, opaque) in (0..8).zip(opaques) {
        let accepted = Frame::response(Opcode::DCP_STREAM_REQ, Status::SUCCESS);
        accepted.with_opaque(opaque).with_value(&log_value).encode(&mut server.wire).unwrap();
        let to = StreamAddress { vbid: Vbid(vbid), opaque, stream_id: None };
        StreamEnd { reason: StreamEndReason::OK }.encode(to, &mut server.wire).unwrap();
    }
    server.play();
    assert_eq!(asked_for_high_seqnos(&mut server).len(), 1);
}

#[test]
fn rule_10_an_item_past_a_clamped_end_must_lie_in_a_snapshot() {
    let mut server = bounded(clamped(), 5);
    assert_eq!(server.mutation(7).misbehaves(), Misbehaviour::NoSnapshot);
    let mut server = bounded(clamped(), 5);
    let snapshot = Snapshot { start: Seqno(0), end: Seqno(9) };
    let outside = Misbehaviour::OutsideSnapshot { seqno: Seqno(10), snapshot };
    assert_eq!(server.marker(0, 9).mutation(10).misbehaves(), outside);
}

#[test]
fn rule_10_clamped_stream_resumed_inside_a_snapshot_stays_below_its_end() {
    for end in [5, 4] {
        let mut server = Harness::new(clamped());
        let request =
            server.open_until(StreamPosition::new(position(5, (0, 10), &[(1, 0)])), Seqno(end));
        assert_eq!((request.start, request.end, request.snapshot), (5, 5, (0, 10)));
        server.accept(&[(1, 0)]);
        server.marker(0, 10).mutations(6..=10).play();
        assert_eq!(server.seqnos(), Vec::<u64>::new(), "until {end}");
        assert!(server.events().iter().any(is_complete));
    }
}

#[test]
fn rule_10_stream_resumed_inside_the_snapshot_of_its_end_gets_the_rest() {
    // The rest may hold newer versions of keys at or below the end.
    for (end, snapshot, asked) in
        [(4, (0, 10), 10), (5, (0, 10), 10), (7, (0, 10), 10), (5, (0, 5), 5), (3, (3, 10), 10)]
    {
        let mut server = Harness::new(config());
        let request =
            server.open_until(StreamPosition::new(position(5, snapshot, &[(1, 0)])), Seqno(end));
        assert_eq!((request.start, request.end), (5, asked), "to {end} in {snapshot:?}");
    }
    let mut server = bounded(config(), 5);
    server.marker(0, 9).mutations([2, 6]).play();
    let request = server.reconnect_until(config(), Seqno(5));
    assert_eq!((request.start, request.end, request.snapshot), (6, 9, (0, 9)));
}

/// A sink that is given these changes and no others.
struct Expecting<'a>(std::vec::IntoIter<Change<'a>>);

impl ChangeSink for Expecting<'_> {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        assert_eq!(Some(*change), self.0.next());
        Ok(())
    }

    fn rollback(&mut self, rollback: &Rollback) -> Result<(), SinkError> {
        panic!("{rollback:?}")
    }
}

#[test]
fn change_has_every_field_of_its_packet() {
    let change = Change {
        op: Op::Mutation,
        vbid: VB,
        seqno: Seqno(2),
        vbuuid: Vbuuid(1),
        epoch: 0,
        snapshot: Snapshot { start: Seqno(0), end: Seqno(9) },
        history: false,
        collection_id: CollectionId(9),
        key: b"key",
        value: b"value",
        datatype: Datatype::JSON,
        cas: Cas(12),
        rev_seqno: RevSeqno(13),
        flags: 14,
        expiry: 15,
        delete_time: 0,
    };
    let deleted = Change { flags: 0, expiry: 0, value: b"", datatype: Datatype::RAW, ..change };
    let deleted = Change { op: Op::Deletion, delete_time: 16, ..deleted };
    let (seqno, rev_seqno, cas, key) = (change.seqno, change.rev_seqno, change.cas, b"\x09key");
    let mutation = Mutation {
        seqno,
        rev_seqno,
        cas,
        datatype: Datatype::JSON,
        flags: 14,
        expiry: 15,
        lock_time: 17,
        nru: 18,
        key,
        value: b"value",
    };
    let deletion = |delete_time| Deletion {
        seqno,
        rev_seqno,
        cas,
        datatype: Datatype::RAW,
        delete_time,
        key,
        value: b"",
    };
    let expiration = Expiration {
        seqno,
        rev_seqno,
        cas,
        datatype: Datatype::RAW,
        delete_time: 16,
        key,
        value: b"",
    };
    type Put<'a> = &'a dyn Fn(StreamAddress, &mut Vec<u8>) -> Result<(), EncodeError>;
    let rows: [(Change<'_>, Put<'_>); 4] = [
        (change, &|to, out| mutation.encode(to, out)),
        (deleted, &|to, out| deletion(Some(16)).encode(to, out)),
        (Change { delete_time: 0, ..deleted }, &|to, out| deletion(None).encode(to, out)),
        (Change { op: Op::Expiration, ..deleted }, &|to, out| expiration.encode(to, out)),
    ];
    for (expected, put) in rows {
        let mut server = Harness::streaming(ConnectionConfig { collections: true, ..config() });
        server.marker(0, 9);
        let to = server.to();
        put(to, &mut server.wire).unwrap();
        let mut sink = Expecting(vec![expected].into_iter());
        let wire = std::mem::take(&mut server.wire);
        server.machine.handle_input(server.now, &wire, Limit::NONE, &mut sink).unwrap();
        assert_eq!(sink.0.next(), None, "it was given");
    }
}
