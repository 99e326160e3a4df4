//! Requests outside of streams that deliver changes, and the answers to them.

use std::collections::BTreeMap;
use std::time::Duration;

use dcp_proto::consumer::{
    Connection, ConnectionConfig, ConnectionError, Delivery, EndCause, Event, OpenStreamError,
    ProtocolErrorKind, Reaction, Step, StreamFilter, StreamPosition,
};
use dcp_proto::{FailoverLog, OnRollback, Position, Snapshot};
use dcp_test::bucket::{BRANCH, VBucket, docs};
use dcp_test::harness::{Harness, Request, Sent, VB, config, log, position};
use dcp_test::packet::Packet;
use dcp_test::pair::Pair;
use dcp_wire::message::{FailoverEntry, ObservedSeqno, StreamEndReason, encode_failover_log};
use dcp_wire::{
    CollectionId, Datatype, Frame, ManifestUid, Opcode, Seqno, Status, Vbid, Vbuuid, snappy,
};

const OTHER: Vbid = Vbid(8);

/// The answer to a request.
fn answer(server: &mut Harness, request: &Packet, status: Status, value: &[u8]) {
    let answer = Frame::response(request.opcode(), status).with_opaque(request.opaque());
    answer.with_value(value).encode(&mut server.wire).unwrap();
}

/// A server that was sent requests.
fn asked(request: impl FnOnce(&mut Connection)) -> (Harness, Vec<Packet>) {
    let mut server = Harness::new(ConnectionConfig { collections: true, ..config() });
    request(&mut server.machine);
    let packets = server.packets();
    assert!(!server.machine.is_unused(), "answers are outstanding");
    (server, packets)
}

fn entries(entries: &[(u64, u64)]) -> Vec<u8> {
    let mut value = Vec::new();
    encode_failover_log(log(entries).entries().iter().copied(), &mut value);
    value
}

#[test]
fn high_seqnos_come_in_entries_of_ten_bytes() {
    for cut in [false, true] {
        let (mut server, requests) = asked(|machine| machine.request_high_seqnos());
        assert_eq!(requests[0].frame().extras, [0, 0, 0, 1], "active vBuckets");
        let value = [0, 1, 0, 0, 0, 0, 0, 0, 0, 9, 0, 3, 0, 0, 0, 0, 0, 0, 1, 0];
        answer(&mut server, &requests[0], Status::SUCCESS, &value[..20 - usize::from(cut)]);
        if cut {
            let Err(ConnectionError::Protocol(error)) = server.try_play() else { panic!() };
            assert!(matches!(error.kind, ProtocolErrorKind::InvalidMessage(_)));
            assert_eq!(error.opcode, Opcode::GET_ALL_VB_SEQNOS);
        } else {
            server.play();
            let seqnos = vec![(Vbid(1), Seqno(9)), (Vbid(3), Seqno(256))];
            assert_eq!(server.events(), [Event::HighSeqnos(seqnos)]);
            assert!(server.machine.is_unused());
        }
    }
}

#[test]
fn ax_07_and_ax_10_a_log_comes_from_those_who_have_the_vbucket() {
    let (mut server, requests) = asked(|machine| machine.request_failover_logs(&[VB, OTHER]));
    for (request, vbid) in requests.iter().zip([VB, OTHER]) {
        let frame = request.frame();
        assert_eq!((request.opcode(), frame.header.vbid()), (Opcode::DCP_GET_FAILOVER_LOG, vbid));
        assert_eq!(frame.header.body_len, 0, "without extras, key or value");
    }
    // In another order, and the node that the vBucket has left names the one that has it.
    answer(&mut server, &requests[1], Status::NOT_MY_VBUCKET, b"{\"rev\":7}");
    answer(&mut server, &requests[0], Status::SUCCESS, &entries(&[(0x57, 0)]));
    server.play();
    let map = Event::ClusterMap("{\"rev\":7}".into());
    assert_eq!(server.events(), [map, Event::FailoverLog(VB, log(&[(0x57, 0)]))]);
    assert!(server.machine.is_unused());
}

#[test]
fn ax_08_a_log_that_is_refused_is_told() {
    let (mut server, requests) = asked(|machine| machine.request_failover_logs(&[VB]));
    answer(&mut server, &requests[0], Status::EINVAL, b"");
    server.play();
    let (opcode, status) = (Opcode::DCP_GET_FAILOVER_LOG, Status::EINVAL);
    assert_eq!(server.events(), [Event::Refused { opcode, status }]);
}

#[test]
fn failover_log_without_entries_ends_the_connection() {
    let (mut server, requests) = asked(|machine| machine.request_failover_logs(&[VB]));
    answer(&mut server, &requests[0], Status::SUCCESS, b"");
    let Err(ConnectionError::Protocol(error)) = server.try_play() else { panic!() };
    assert_eq!((error.opcode, error.vbid), (Opcode::DCP_GET_FAILOVER_LOG, VB));
}

#[test]
fn ax_19_who_does_not_know_the_branch_has_persisted_nothing_on_it() {
    let branches = [(VB, Vbuuid(0x57)), (OTHER, Vbuuid(0x58)), (Vbid(9), Vbuuid(0x59))];
    let (mut server, requests) = asked(|machine| machine.request_observed_seqnos(&branches));
    for (request, (vbid, vbuuid)) in requests.iter().zip(branches) {
        let frame = request.frame();
        assert_eq!((frame.header.vbid(), frame.value), (vbid, &vbuuid.0.to_be_bytes()[..]));
    }
    let observed = ObservedSeqno {
        vbid: OTHER,
        vbuuid: Vbuuid(0x58),
        persisted_seqno: Seqno(4),
        current_seqno: Seqno(6),
        failover: None,
    };
    let mut value = Vec::new();
    observed.encode(&mut value);
    answer(&mut server, &requests[0], Status::KEY_ENOENT, b"");
    answer(&mut server, &requests[1], Status::SUCCESS, &value);
    answer(&mut server, &requests[2], Status::NOT_MY_VBUCKET, b"");
    server.play();
    let nothing = ObservedSeqno {
        vbid: VB,
        vbuuid: Vbuuid(0),
        persisted_seqno: Seqno::ZERO,
        current_seqno: Seqno::ZERO,
        failover: None,
    };
    let told = [Event::ObservedSeqno(nothing), Event::ObservedSeqno(observed)];
    assert_eq!(server.events(), told, "who has no copy has no seqnos");
}

#[test]
fn purge_seqnos_come_one_at_a_time_and_end_without_a_name() {
    let statistics: &[(&str, &str)] = &[
        ("vb_7:high_seqno", "9"),
        ("vb_7:purge_seqno", "5"),
        ("vb_8:purge_seqno", "6"),
        ("vb_8:purge_seqno:x", "1"),
        ("vb_60000:purge_seqno", "1"),
        ("vb_9:purge_seqno", "-1"),
        ("", ""),
    ];
    let (mut server, requests) = asked(|machine| machine.request_purge_seqnos());
    assert_eq!(requests[0].frame().key, b"vbucket-seqno");
    for (name, value) in statistics {
        assert_eq!(server.events(), []);
        let answer = Frame::response(Opcode::STAT, Status::SUCCESS);
        let answer = answer.with_opaque(requests[0].opaque());
        let answer = answer.with_key(name.as_bytes()).with_value(value.as_bytes());
        answer.encode(&mut server.wire).unwrap();
        server.play();
    }
    let seqnos = BTreeMap::from([(VB, Seqno(5)), (OTHER, Seqno(6))]);
    assert_eq!(server.events(), [Event::PurgeSeqnos(Some(seqnos))]);

    // Not every user may read them; a server that is busy says so.
    let (opcode, busy) = (Opcode::STAT, Status::EBUSY);
    for (status, told) in [
        (Status::EACCESS, Event::PurgeSeqnos(None)),
        (busy, Event::Refused { opcode, status: busy }),
    ] {
        let (mut server, requests) = asked(|machine| machine.request_purge_seqnos());
        answer(&mut server, &requests[0], status, b"");
        server.play();
        assert_eq!(server.events(), [told]);
    }
}

#[test]
fn manifest_may_come_compressed_or_not_be_there() {
    let json = b"{\"uid\":\"7\",\"scopes\":[],\"of\":\"of of of of of\"}";
    let block = snappy::compress(json).unwrap();
    for (status, value, told) in [
        (Status::SUCCESS, &block[..], Event::Manifest(Some(json.to_vec().into()))),
        (Status::NO_COLLECTIONS_MANIFEST, b"", Event::Manifest(None)),
        (
            Status::EACCESS,
            b"",
            Event::Refused { opcode: Opcode::GET_COLLECTIONS_MANIFEST, status: Status::EACCESS },
        ),
    ] {
        let (mut server, requests) = asked(|machine| machine.request_manifest());
        let answer = Frame::response(requests[0].opcode(), status);
        let answer = answer.with_opaque(requests[0].opaque()).with_value(value);
        let snappy = if value.is_empty() { Datatype::RAW } else { Datatype::SNAPPY };
        answer.with_datatype(snappy).encode(&mut server.wire).unwrap();
        server.play();
        assert_eq!(server.events(), [told]);
    }
}

#[test]
fn answer_belongs_to_its_request_by_opaque_and_opcode() {
    let (mut server, requests) = asked(|machine| {
        machine.request_cluster_map();
        machine.request_manifest();
    });
    let [map, manifest] = &requests[..] else { panic!("{requests:?}") };
    assert_ne!(map.opaque(), manifest.opaque());
    let swapped = Frame::response(map.opcode(), Status::SUCCESS).with_opaque(manifest.opaque());
    swapped.with_value(b"{}").encode(&mut server.wire).unwrap();
    server.play();
    assert_eq!((server.events(), server.machine.stats().stale_responses), (vec![], 1));
    for request in [manifest, map, map] {
        answer(&mut server, request, Status::SUCCESS, b"{}");
    }
    server.play();
    assert_eq!(server.events().len(), 2);
    assert_eq!(server.machine.stats().stale_responses, 2, "answered twice");
    assert!(server.machine.is_unused());
}

#[test]
fn map_that_is_announced_without_its_contents_is_requested() {
    let mut server = Harness::new(config());
    let push = Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_key(b"default");
    push.with_extras(&[0; 16]).encode(&mut server.wire).unwrap();
    server.play();
    let requests = server.packets();
    assert_eq!(requests[0].opcode(), Opcode::GET_CLUSTER_CONFIG);
    answer(&mut server, &requests[0], Status::SUCCESS, b"{\"rev\":7}");
    server.play();
    assert_eq!(server.events(), [Event::ClusterMap("{\"rev\":7}".into())]);
}

#[test]
fn connection_is_reused_with_other_settings_and_counters_from_zero() {
    let mut server = Harness::streaming(ConnectionConfig { window: 1000, ..config() });
    let later = server.now + Duration::from_secs(39);
    server.marker(0, 1).mutation(1).end(StreamEndReason::STATE_CHANGED).play();
    assert!(server.machine.is_unused() && server.machine.stats().packets > 0);
    let (first, unacknowledged) = (server.opaque, server.machine.unacknowledged());
    let filter = StreamFilter::Collections(vec![CollectionId(9)]);
    let config = ConnectionConfig { filter, collections: true, ..server.machine.config().clone() };
    assert!(server.machine.has_moved());
    server.machine = server.machine.reuse(config, later);
    assert_eq!((server.machine.stats().packets, server.machine.has_moved()), (0, false));
    assert_eq!(server.events(), []);
    assert_eq!(server.machine.unacknowledged(), unacknowledged, "the server's count goes on");
    let request = server.open(StreamPosition::new(Position::EARLIEST));
    assert_eq!(request.value, "{\"collections\":[\"9\"]}");
    assert_ne!(request.opaque, first);
    server.machine.handle_timeout(later + Duration::from_secs(39)).unwrap();
}

/// A connection on which streams are opened to see whether the server rolls them back.
fn probing() -> ConnectionConfig {
    let delivery = Delivery { clamp: true, ..Delivery::default() };
    ConnectionConfig { delivery, on_rollback: OnRollback::Fail, window: 1 << 17, ..config() }
}

/// Opens a stream that ends where it begins.
fn probe(server: &mut Harness, position: &Position) -> Request {
    server.open_until(StreamPosition::new(position.clone()), position.seqno)
}

#[test]
fn rollback_probe_ends_where_it_begins_and_is_answered_like_a_stream() {
    let refused =
        |status| EndCause::Refused(OpenStreamError::Refused { status, manifest_uid: None });
    let rolled_back = |cause: &EndCause, seqno| {
        assert!(matches!(*cause, EndCause::RolledBack { to, .. } if to == Seqno(seqno)), "{cause}");
    };
    let seqno = 3_u64.to_be_bytes();
    for (status, value) in [
        (Status::ROLLBACK, &seqno[..]),
        (Status::ERANGE, b""),
        (Status::NOT_MY_VBUCKET, b""),
        (Status::EACCESS, b""),
    ] {
        let mut server = Harness::new(probing());
        // Inside its snapshot, whose rest is not requested.
        let request = probe(&mut server, &position(5, (2, 9), &[(1, 0)]));
        assert_eq!((request.start, request.end, request.snapshot), (5, 5, (2, 9)));
        server.answer(status, value).play();
        let events = server.events();
        let [Event::StreamEnded { cause, .. }] = &events[..] else { panic!("{events:?}") };
        match status {
            Status::ROLLBACK => rolled_back(cause, 3),
            // As for any stream: the node names no seqno to roll back to.
            Status::ERANGE => rolled_back(cause, 0),
            status => assert_eq!(*cause, refused(status)),
        }
        assert!(server.machine.is_unused() && server.sent().is_empty());
    }
}

/// Every refusal, and one that no server knows yet.
fn refusals() -> impl Iterator<Item = Status> {
    let known = Status::KNOWN.iter().copied().filter(|status| !status.is_success());
    known.chain([Status(0x5555)])
}

#[test]
fn sv_01_answers_to_requests_each_have_the_reaction_of_the_table() {
    type Request = fn(&mut Connection);
    let steps: [(Step, Request); 7] = [
        (Step::ClusterMap, |machine| machine.request_cluster_map()),
        (Step::Manifest, |machine| machine.request_manifest()),
        (Step::FailoverLog, |machine| machine.request_failover_logs(&[VB])),
        (Step::HighSeqnos, |machine| machine.request_high_seqnos()),
        (Step::CollectionSeqnos, |machine| machine.request_collection_seqnos(&[CollectionId(9)])),
        (Step::ObserveSeqno, |machine| machine.request_observed_seqnos(&[(VB, Vbuuid(1))])),
        (Step::PurgeSeqnos, |machine| machine.request_purge_seqnos()),
    ];
    for (step, request) in steps {
        for status in refusals() {
            let (mut server, requests) = asked(request);
            answer(&mut server, &requests[0], status, b"{}");
            let case = format!("{step:?} answered {status}");
            let played = server.try_play();
            if Reaction::is_to_reconnect(status) {
                let opcode = step.opcode();
                let lost = Err(ConnectionError::Invalidated { opcode, status });
                assert_eq!(played.map(drop), lost, "{case}");
                continue;
            }
            assert!(played.is_ok(), "{case}");
            assert!(server.machine.is_unused(), "{case}");
            let events = server.events();
            let [event] = &events[..] else { panic!("{case}: {events:?}") };
            match (Reaction::to(step, status), event) {
                (Reaction::Use, Event::ObservedSeqno(seen)) => assert_eq!(seen.vbuuid, Vbuuid(0)),
                (Reaction::Use, Event::CollectionSeqnos(all)) => {
                    assert_eq!(all[0].seqnos, Ok(vec![]));
                }
                (Reaction::Use, event) => panic!("{case}: {event:?}"),
                (_, Event::CollectionSeqnos(all)) => assert_eq!(all[0].seqnos, Err(status)),
                (Reaction::GoWithout, Event::Manifest(None) | Event::PurgeSeqnos(None))
                | (Reaction::FollowMap, Event::ClusterMap(_)) => {}
                (Reaction::GoWithout | Reaction::FollowMap, event) => panic!("{case}: {event:?}"),
                (_, event) => {
                    assert_eq!(*event, Event::Refused { opcode: step.opcode(), status }, "{case}");
                }
            }
        }
    }
}

#[test]
fn sv_01_answers_to_stream_requests_each_have_the_reaction_of_the_table() {
    let to = 3_u64.to_be_bytes();
    for status in refusals() {
        let mut server = Harness::new(probing());
        server.open(StreamPosition::new(position(5, (5, 5), &[(1, 0)])));
        server.answer(status, &to);
        let played = server.try_play();
        let (events, sent) = (server.events(), server.sent());
        let cause = match events.last() {
            Some(Event::StreamEnded { cause, .. }) => Some(cause.clone()),
            _ => None,
        };
        let rolled_back_to = match &cause {
            Some(EndCause::RolledBack { to, .. }) => Some(to.0),
            _ => None,
        };
        match Reaction::to(Step::StreamRequest, status) {
            Reaction::Reconnect => {
                let opcode = Opcode::DCP_STREAM_REQ;
                let lost = Err(ConnectionError::Invalidated { opcode, status });
                assert_eq!(played.map(drop), lost, "{status}");
            }
            Reaction::RollBack => assert_eq!(rolled_back_to, Some(3), "{status}"),
            Reaction::BeginAgain => assert_eq!(rolled_back_to, Some(0), "{status}"),
            Reaction::CloseFirst => {
                assert!(matches!(sent[..], [Sent::Close(_)]) && cause.is_none(), "{status}");
            }
            _ => {
                let refused = OpenStreamError::Refused { status, manifest_uid: None };
                assert_eq!(cause, Some(EndCause::Refused(refused)), "{status}");
            }
        }
    }
}

#[test]
fn sv_01_answers_to_closes_each_have_the_reaction_of_the_table() {
    for status in refusals() {
        let mut server = Harness::streaming(config());
        server.machine.close_stream(server.now, VB);
        let closed = Frame::response(Opcode::DCP_CLOSE_STREAM, status).with_opaque(server.opaque);
        closed.encode(&mut server.wire).unwrap();
        let played = server.try_play();
        match Reaction::to(Step::CloseStream, status) {
            Reaction::Use => {
                let events = server.events();
                let last = events.last();
                let is_closed =
                    matches!(last, Some(Event::StreamEnded { cause: EndCause::Closed, .. }));
                assert!(is_closed, "{status}: {events:?}");
            }
            _ => assert!(matches!(played, Err(ConnectionError::Invalidated { .. })), "{status}"),
        }
    }
}

#[test]
fn rollback_probe_sends_what_a_stream_sends() {
    let from = Position {
        purge_seqno: Seqno(4),
        manifest_uid: ManifestUid(0x1f),
        ..position(5, (2, 9), &[(1, 0)])
    };
    let filter = StreamFilter::Collections(vec![CollectionId(9)]);
    let config = ConnectionConfig { collections: true, filter, ..probing() };
    let request = probe(&mut Harness::new(config.clone()), &from);
    let value = "{\"collections\":[\"9\"],\"uid\":\"1f\",\"purge_seqno\":\"4\"}";
    assert_eq!(request.value, value);
    let stream = Harness::new(config).open(StreamPosition::new(from));
    assert_eq!(request, Request { end: 5, ..stream });
}

#[test]
fn rollback_probe_drops_and_acknowledges_what_comes_and_is_closed() {
    let mut server = Harness::new(probing());
    probe(&mut server, &position(5, (5, 5), &[(1, 0)]));
    server.accept(&[(1, 0)]);
    let value = "v".repeat(40_000);
    server.marker(5, 9).say(&format!("MUT 6 key {value}"));
    server.play();
    assert_eq!((server.seqnos(), server.machine.is_complete()), (vec![], true));
    let sent = server.sent();
    assert!(matches!(sent[..], [Sent::Close(_)]), "{sent:?}");
    let held = server.machine.take_held();
    assert_eq!(held, 44 + 55 + 3 + 40_000);
    server.machine.release(server.now, held);
    let acknowledged = server.sent();
    assert_eq!(acknowledged, [Sent::Ack(u32::try_from(held).unwrap())]);
    assert!(!server.machine.is_unused(), "the server has not answered");
    let closed = Frame::response(Opcode::DCP_CLOSE_STREAM, Status::SUCCESS);
    closed.with_opaque(server.opaque).encode(&mut server.wire).unwrap();
    server.end(StreamEndReason::CLOSED).play();
    assert!(server.machine.is_unused());
}

/// The log of a producer's vBucket.
fn first_branch() -> FailoverLog {
    FailoverLog::new(vec![FailoverEntry { vbuuid: BRANCH, seqno: Seqno::ZERO }]).unwrap()
}

#[test]
fn producer_is_asked_for_failover_logs_and_rollbacks_between_streams() {
    let mut pair = Pair::open(VBucket::new().on_disk(docs(1..=20)), probing());
    pair.reader.machine.request_failover_logs(&[VB, OTHER]);
    pair.run();
    assert_eq!(pair.reader.events(), [Event::FailoverLog(VB, first_branch())]);
    let at = |seqno, vbuuid| {
        let branch = FailoverEntry { vbuuid, seqno: Seqno::ZERO };
        let failover_log = FailoverLog::new(vec![branch]).ok();
        let (seqno, snapshot) = (Seqno(seqno), Snapshot::at(Seqno(seqno)));
        Position { seqno, snapshot, failover_log, ..Position::EARLIEST }
    };
    for (position, to) in [
        (at(12, BRANCH), None),
        (at(20, BRANCH), None),
        (at(12, Vbuuid(5)), Some(Seqno::ZERO)),
        (at(30, BRANCH), Some(Seqno(20))),
    ] {
        pair.stream(StreamPosition::new(position.clone()), position.seqno);
        let events = pair.reader.events();
        let Some(Event::StreamEnded { cause, .. }) = events.last() else { panic!("{events:?}") };
        let told = match cause {
            EndCause::Complete => None,
            EndCause::RolledBack { to, .. } => Some(*to),
            cause => panic!("{cause}"),
        };
        assert_eq!(told, to, "{position:?}");
        assert!(pair.reader.machine.is_unused() && pair.reader.sink.items.is_empty());
        pair.release();
        pair.assert_accounts_agree();
    }
    // The same connection then streams.
    let config = ConnectionConfig { delivery: Delivery::default(), ..probing() };
    pair.reader.machine = pair.reader.machine.reuse(config, pair.reader.now);
    pair.stream(StreamPosition::new(Position::EARLIEST), Seqno::MAX);
    assert_eq!(pair.reader.seqnos(), (1..=20).collect::<Vec<_>>());
    pair.assert_accounts_agree();
}
