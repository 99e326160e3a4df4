//! Rows of the conformance tables that concern a consumer, by their numbers.

use dcp_wire::message::{SnapshotFlags, SnapshotMarker, StreamEndReason};
use dcp_wire::{DecodeError, Frame, Opcode, Seqno, Status};

use super::harness::{Harness, config, position};
use crate::Position;
use crate::consumer::{ConnectionError, Misbehaviour, ProtocolErrorKind, StreamPosition};

/// What the server sends.
#[derive(Clone, Copy, Debug)]
enum Step {
    Mark(u64, u64),
    Mut(u64),
    Adv(u64),
}

/// What comes of the last step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Accepted,
    NotAscending,
    Outside,
    InvalidMarker,
    NoSnapshot,
    Malformed,
}

use Outcome::{Accepted, InvalidMarker, Malformed, NoSnapshot, NotAscending, Outside};
use Step::{Adv, Mark, Mut};

/// Number, steps that are accepted, the step in question, what comes of it.
const ITEMS: &[(&str, &[Step], Step, Outcome)] = &[
    ("CM-01", &[Mark(5, 10)], Mut(2), Outside),
    ("CM-01", &[Mark(5, 10)], Mut(3), Outside),
    ("CM-01", &[Mark(5, 10)], Mut(20), Outside),
    ("CM-02", &[Mark(5, 10), Mut(5), Mut(6), Mut(7), Mut(8), Mut(9)], Mut(10), Accepted),
    ("CM-03", &[Mark(0, 10)], Mut(0), Malformed),
    ("CM-04", &[Mark(5, 10), Mut(6)], Mut(6), NotAscending),
    ("CM-05", &[], Mark(11, 8), InvalidMarker),
    ("CM-06", &[Mark(0, 10), Mut(10)], Mark(5, 10), InvalidMarker),
    ("CM-07", &[Mark(0, 10), Mut(10)], Mark(5, 15), Accepted),
    ("CM-07", &[Mark(0, 10), Mut(10), Mark(5, 15)], Mut(5), NotAscending),
    ("CM-07", &[Mark(0, 10), Mut(10), Mark(5, 15)], Mut(10), NotAscending),
    ("CM-08", &[Mark(0, 10), Mut(10), Mark(5, 15), Mut(11), Mut(14)], Mut(15), Accepted),
    ("CM-28", &[Mark(30, 40)], Adv(40), Accepted),
    ("20.4", &[], Mut(1), NoSnapshot),
    ("20.4", &[], Adv(1), NoSnapshot),
    ("20.4", &[Mark(0, 10), Mut(5)], Adv(4), NotAscending),
    ("20.4", &[Mark(0, 10), Mut(5)], Adv(11), Outside),
];

fn step(server: &mut Harness, step: Step) -> Outcome {
    match step {
        Mark(start, end) => server.marker(start, end),
        Mut(seqno) => server.mutation(seqno),
        Adv(seqno) => server.advanced(seqno),
    };
    match server.try_play() {
        Ok(_) => Accepted,
        Err(ConnectionError::Protocol(error)) => match error.kind {
            ProtocolErrorKind::PeerMisbehaved(Misbehaviour::SeqnoNotAscending { .. }) => {
                NotAscending
            }
            ProtocolErrorKind::PeerMisbehaved(Misbehaviour::OutsideSnapshot { .. }) => Outside,
            ProtocolErrorKind::PeerMisbehaved(Misbehaviour::InvalidMarker { .. }) => InvalidMarker,
            ProtocolErrorKind::PeerMisbehaved(Misbehaviour::NoSnapshot) => NoSnapshot,
            ProtocolErrorKind::InvalidMessage(DecodeError::InvalidField("seqno 0")) => Malformed,
            kind => panic!("{kind}"),
        },
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn seqnos_and_markers_are_checked_against_each_other() {
    for &(number, before, last, outcome) in ITEMS {
        let mut server = Harness::streaming(config());
        for &accepted in before {
            assert_eq!(step(&mut server, accepted), Accepted, "{number}: {accepted:?}");
        }
        assert_eq!(step(&mut server, last), outcome, "{number}: {last:?} after {before:?}");
    }
}

#[test]
fn markers_whose_fields_exceed_their_end_are_refused() {
    let marker = SnapshotMarker::new(Seqno(0), Seqno(10), SnapshotFlags::DISK);
    let above = Some(Seqno(11));
    let rows = [
        ("CM-20", SnapshotMarker { max_visible_seqno: above, ..marker }),
        ("CM-21", SnapshotMarker { purge_seqno: above, ..marker }),
        ("CM-21", SnapshotMarker { high_prepared_seqno: above, ..marker }),
    ];
    for (number, marker) in rows {
        let mut server = Harness::streaming(config());
        server.marker_of(&marker);
        assert!(matches!(server.misbehaves(), Misbehaviour::InvalidMarker { .. }), "{number}");
    }
}

#[test]
fn messages_of_no_stream_or_another_are_dropped() {
    // CM-09, CM-10, CM-11: nobody's, with a stale opaque, an end with a stale opaque.
    let mut server = Harness::streaming(config());
    let ours = std::mem::replace(&mut server.opaque, dcp_wire::Opaque(0xdead));
    server.marker(0, 5).mutation(5).end(StreamEndReason::OK).play();
    assert_eq!((server.seqnos().len(), server.events().len()), (0, 0));
    assert_eq!(server.machine.stats().stale_packets, 3);
    server.opaque = ours;
    assert_eq!(step(&mut server, Mark(0, 5)), Accepted);
    assert_eq!(step(&mut server, Mut(5)), Accepted);
}

#[test]
fn answers_of_the_wrong_length_close_the_connection() {
    let rows: [(&str, Status, &[u8]); 4] = [
        ("CM-13", Status::SUCCESS, &[]),
        ("CM-13", Status::SUCCESS, &[0; 20]),
        ("CM-14", Status::ROLLBACK, &[0; 7]),
        ("CM-14", Status::ROLLBACK, &[0; 16]),
    ];
    for (number, status, value) in rows {
        let mut server = Harness::new(config());
        server.open(StreamPosition::new(position(5, (5, 5), &[(1, 0)])));
        server.answer(status, value);
        let error = server.try_play().unwrap_err();
        assert!(matches!(error, ConnectionError::Protocol(_)), "{number}: {error}");
    }
}

#[test]
fn a_branch_nothing_was_written_on_is_not_named() {
    // CM-15: log (Y, 50)(W, 0) and seqno 50: the change lies on W, so that there is nothing to
    // roll back in the first place.
    let mut server = Harness::new(config());
    let request =
        server.open(StreamPosition::new(position(50, (50, 50), &[(0x59, 50), (0x57, 0)])));
    assert_eq!(request.vbuuid, 0x57);
}

#[test]
fn the_log_is_replaced_before_any_item() {
    // CM-18.
    let mut server = Harness::new(config());
    server.open(StreamPosition::new(position(950, (950, 950), &[(0x57, 0)])));
    server.accept(&[(0x59, 900), (0x57, 0)]);
    server.marker(950, 951).mutation(951).play();
    assert_eq!(server.moved().unwrap().vbuuid().0, 0x59);
}

#[test]
fn the_first_request_starts_at_0() {
    // CM-27.
    let mut server = Harness::new(config());
    let request = server.open(StreamPosition::new(Position::EARLIEST));
    assert_eq!(
        (request.start, request.end, request.vbuuid, request.snapshot, request.value.as_str()),
        (0, u64::MAX, 0, (0, 0), "")
    );
}

#[test]
fn a_stream_that_was_not_accepted_may_not_send() {
    let mut server = Harness::new(config());
    server.open(StreamPosition::new(Position::EARLIEST));
    server.marker(0, 5);
    assert_eq!(server.misbehaves(), Misbehaviour::UnexpectedPacket);
}

#[test]
fn packets_nobody_asked_for_close_the_connection() {
    let unexpected = [
        Frame::response(Opcode::GET, Status::SUCCESS),
        Frame::request(Opcode::SET),
        Frame::request(Opcode::DCP_OPEN).with_vbid(super::harness::VB),
    ];
    for packet in unexpected {
        let mut server = Harness::streaming(config());
        packet.with_opaque(server.opaque).encode(&mut server.wire).unwrap();
        assert_eq!(server.misbehaves(), Misbehaviour::UnexpectedPacket, "{packet:?}");
    }
}
