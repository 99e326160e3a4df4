//! Servers that send anything at all.

use dcp_wire::message::{SnapshotFlags, SnapshotMarker};
use dcp_wire::{Datatype, Frame, Magic, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};
use proptest::collection::vec;
use proptest::prelude::*;

use dcp_proto::consumer::{
    Connection, ConnectionConfig, ConnectionError, Delivery, Limit, PositionUpdate, StreamPosition,
};
use dcp_proto::{CompletePoint, Position};
use dcp_test::harness::{Harness, VB, config};

/// A packet with plausible parts: mostly of our stream, mostly of the size its opcode wants.
#[derive(Clone, Debug)]
struct Packet {
    magic: u8,
    opcode: u8,
    vbid: u16,
    ours: bool,
    opaque: u32,
    datatype: u8,
    extras: Vec<u8>,
    key: Vec<u8>,
    value: Vec<u8>,
}

impl Packet {
    fn encode(&self, opaque: Opaque, out: &mut Vec<u8>) {
        let mut frame = Frame::request(Opcode(self.opcode))
            .with_vbid(Vbid(self.vbid))
            .with_opaque(if self.ours { opaque } else { Opaque(self.opaque) })
            .with_datatype(Datatype(self.datatype))
            .with_extras(&self.extras)
            .with_key(&self.key)
            .with_value(&self.value);
        frame.header.magic = Magic(self.magic);
        let _ = frame.encode(out);
    }
}

/// Numbers near each other, so that seqnos and ranges meet.
fn field() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        4 => (0_u64..20).prop_map(|number| number.to_be_bytes().to_vec()),
        1 => any::<u64>().prop_map(|number| number.to_be_bytes().to_vec()),
    ]
}

fn extras() -> impl Strategy<Value = Vec<u8>> {
    let sizes = prop_oneof![
        Just(0),
        Just(1),
        Just(4),
        Just(8),
        Just(13),
        Just(18),
        Just(20),
        Just(21),
        Just(31),
        Just(48)
    ];
    (vec(field(), 6), sizes, any::<u8>()).prop_map(|(fields, size, filler)| {
        let mut bytes: Vec<u8> = fields.concat();
        // The rest of an item's extras is zero on real servers.
        for (i, byte) in bytes.iter_mut().enumerate().skip(16) {
            *byte = if i % 5 == 0 { filler & 1 } else { 0 };
        }
        bytes.truncate(size);
        bytes
    })
}

fn packet() -> impl Strategy<Value = Packet> {
    let magic = prop_oneof![6 => Just(0x80_u8), 3 => Just(0x81), 1 => Just(0x82), 1 => Just(0x08)];
    let opcode = prop_oneof![8 => 0x50_u8..0x68, 1 => any::<u8>()];
    let vbid = prop_oneof![8 => Just(VB.0), 1 => Just(0), 1 => any::<u16>()];
    let value = prop_oneof![
        Just(vec![]),
        field(),
        vec(field(), 2).prop_map(|fields| fields.concat()),
        vec(any::<u8>(), 0..60),
    ];
    let rest = (any::<u32>(), 0_u8..8, vec(any::<u8>(), 0..8));
    (magic, opcode, vbid, prop::bool::weighted(0.9), extras(), value, rest).prop_map(
        |(magic, opcode, vbid, ours, extras, value, (opaque, datatype, key))| Packet {
            magic,
            opcode,
            vbid: if magic == 0x81 { vbid % 0x30 } else { vbid },
            ours,
            opaque,
            datatype,
            extras,
            key,
            value,
        },
    )
}

fn connection() -> impl Strategy<Value = ConnectionConfig> {
    (any::<bool>(), prop_oneof![Just(0_u32), Just(500)])
        .prop_map(|(collections, window)| ConnectionConfig { collections, window, ..config() })
}

proptest! {
    #[test]
    fn consumer_survives_any_bytes(config in connection(), bytes in vec(any::<u8>(), 0..300)) {
        let mut server = Harness::streaming(config);
        let _ = server.machine.handle_input(server.now, &bytes, Limit::NONE, &mut server.sink);
    }

    #[test]
    fn consumer_survives_any_packets_and_its_seqnos_ascend(
        config in connection(),
        packets in vec(packet(), 1..40),
        finite in any::<bool>(),
    ) {
        let mut server = Harness::new(config);
        let end = if finite { Seqno(9) } else { Seqno::MAX };
        server.open_until(StreamPosition::new(Position::EARLIEST), end);
        server.accept(&[(1, 0)]);
        let mut last = 0;
        for packet in &packets {
            packet.encode(server.opaque, &mut server.wire);
            let over = server.try_play().is_err();
            let moved = server.machine.take_positions();
            for PositionUpdate { position, history, .. } in &moved {
                // Out of order only inside an out-of-sequence-order snapshot, which moves nothing.
                prop_assert!(position.seqno.0 >= last);
                last = position.seqno.0;
                let snapshot = position.request_snapshot();
                prop_assert!(snapshot.start <= position.seqno && position.seqno <= snapshot.end);
                let above = |point: &CompletePoint| point.seqno > position.seqno;
                prop_assert!(!history.points().iter().any(above));
            }
            let held = server.machine.take_held();
            server.machine.release(server.now, held);
            let mut out = bytes::BytesMut::new();
            server.machine.poll_transmit(&mut out);
            while server.machine.poll_event().is_some() {}
            if over {
                break;
            }
        }
    }

    #[test]
    fn consumer_delivers_the_same_changes_from_any_portions(
        items in vec(0_u8..4, 1..60),
        cuts in vec(1_usize..200, 1..40),
    ) {
        let mut server = Harness::streaming(config());
        server.marker(0, 1000);
        for (seqno, item) in (1..).zip(&items) {
            match item {
                0 => { server.mutation(seqno); }
                1 => { server.deletion(seqno, Some(3)); }
                2 => { server.advanced(seqno); }
                _ => { server.expiration(seqno); }
            }
        }
        let wire = server.wire.clone();
        server.play();
        let mut other = Harness::streaming(config());
        let (mut buffer, mut rest, mut cuts) = (Vec::new(), &wire[..], cuts.iter().cycle());
        while !rest.is_empty() {
            let (portion, after) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
            buffer.extend_from_slice(portion);
            rest = after;
            let walk = other
                .machine
                .handle_input(other.now, &buffer, Limit::NONE, &mut other.sink)
                .unwrap();
            buffer.drain(..walk.consumed);
        }
        prop_assert_eq!(&other.sink.items, &server.sink.items);
        prop_assert_eq!(other.machine.take_positions(), server.machine.take_positions());
        prop_assert_eq!(other.machine.held(), server.machine.held());
    }

    #[test]
    fn stream_request_survives_any_answer(
        status in prop_oneof![Just(0_u16), Just(0x23), Just(0x02), 0_u16..0x100],
        value in vec(any::<u8>(), 0..40),
    ) {
        let mut server = Harness::new(config());
        server.open(StreamPosition::new(dcp_test::harness::position(9, (5, 12), &[(1, 0)])));
        server.answer(Status(status), &value);
        let _ = server.try_play();
        while server.machine.poll_event().is_some() {}
    }
}

#[test]
fn markers_that_are_empty_move_nothing_however_many_come() {
    let mut server = Harness::streaming(config());
    server.marker(0, 5).mutation(5).play();
    server.machine.take_positions();
    server.machine.take_held();
    for n in 0..10_000 {
        server.marker(6, 6 + n % 50);
    }
    let walk = server.play();
    assert_eq!((walk.rows, server.machine.has_moved()), (0, false));
    assert_eq!(server.machine.take_held(), 10_000 * 44, "they count towards the window");
    assert_eq!((server.sent(), server.events()), (vec![], vec![]));
    server.marker(5, 6).mutation(6).play();
    assert_eq!(server.seqnos(), [5, 6]);
}

#[test]
fn server_that_rolls_back_again_and_again_comes_to_an_end() {
    let mut server = Harness::streaming(config());
    for end in 1..=100 {
        server.marker(end * 10 - 9, end * 10).mutation(end * 10);
    }
    server.play();
    server.sink.items.clear();
    let mut request = server.reconnect(config());
    let mut starts = Vec::new();
    while request.start > 0 {
        starts.push(request.start);
        assert!(starts.len() < 50, "without end: {starts:?}");
        // To where it is: the same request again would do for ever.
        server.answer(Status::ROLLBACK, &request.start.to_be_bytes()).play();
        request = server.requested();
    }
    assert!(starts.len() <= 9 && starts.is_sorted_by(|one, next| one > next), "{starts:?}");
    assert_eq!(server.sink.items.len(), starts.len(), "each is told");
    server.answer(Status::ROLLBACK, &0_u64.to_be_bytes()).play();
    let events = server.events();
    let last = events.last();
    assert!(matches!(last, Some(dcp_proto::consumer::Event::StreamEnded { .. })), "{last:?}");
    assert_eq!(server.sent(), [], "whoever opens it again waits before");
}

/// What is told of the packet that ends the connection.
fn named(server: &mut Harness) -> (Vbid, Option<Seqno>, Opcode) {
    match server.try_play() {
        Err(ConnectionError::Protocol(error)) => (error.vbid, error.seqno, error.opcode),
        other => panic!("{other:?}"),
    }
}

#[test]
fn packet_that_ends_the_connection_is_named_by_its_seqno() {
    let streaming = || Harness::streaming(config());
    let mut server = streaming();
    server.mutation(9);
    assert_eq!(named(&mut server), (VB, Some(Seqno(9)), Opcode::DCP_MUTATION));
    let mut server = streaming();
    server.deletion(8, None);
    assert_eq!(named(&mut server), (VB, Some(Seqno(8)), Opcode::DCP_DELETION));
    let mut server = streaming();
    server.marker(0, 5).mutations(1..=5).marker(9, 7);
    assert_eq!(named(&mut server), (VB, Some(Seqno(9)), Opcode::DCP_SNAPSHOT_MARKER));
    let mut server = streaming();
    let visible = Some(Seqno(8));
    let plain = SnapshotMarker::new(Seqno(9), Seqno(7), SnapshotFlags::MEMORY);
    server.marker_of(&SnapshotMarker { max_visible_seqno: visible, ..plain });
    assert_eq!(named(&mut server), (VB, Some(Seqno(9)), Opcode::DCP_SNAPSHOT_MARKER), "V2");
    let mut server = Harness::new(config());
    server.open(StreamPosition::new(Position::EARLIEST));
    server.answer(Status::SUCCESS, &[1]);
    assert_eq!(named(&mut server), (VB, None, Opcode::DCP_STREAM_REQ), "an answer has a status");

    // What waits for disks is named as it was received.
    let delivery = Delivery { persisted_only: true, ..Delivery::default() };
    let mut server = Harness::streaming(ConnectionConfig { delivery, ..config() });
    server.marker(0, 5).mutation(4).mutation(2).play();
    server.machine.persisted(VB, Vbuuid(1), Seqno(5));
    assert_eq!(named(&mut server), (VB, Some(Seqno(2)), Opcode::DCP_MUTATION));
}

#[test]
fn answer_that_voids_the_connection_ends_it_and_no_other_does() {
    let opcodes = [
        Opcode::DCP_STREAM_REQ,
        Opcode::DCP_CLOSE_STREAM,
        Opcode::GET_CLUSTER_CONFIG,
        Opcode::GET_ALL_VB_SEQNOS,
    ];
    for opcode in opcodes {
        for status in [Status::AUTH_STALE, Status::NO_BUCKET, Status::AUTH_ERROR] {
            let mut server = Harness::new(config());
            let asked = server.open(StreamPosition::new(Position::EARLIEST));
            let answer = Frame::response(opcode, status).with_opaque(asked.opaque);
            answer.encode(&mut server.wire).unwrap();
            assert_eq!(server.try_play(), Err(ConnectionError::Invalidated { opcode, status }));
            let left =
                std::mem::replace(&mut server.machine, Connection::new(config(), server.now));
            assert_eq!(left.into_streams().len(), 1, "it is requested again elsewhere");
        }
        for status in [Status::EINTERNAL, Status::ETMPFAIL, Status::EACCESS] {
            let mut server = Harness::new(config());
            let asked = server.open(StreamPosition::new(Position::EARLIEST));
            let answer = Frame::response(opcode, status).with_opaque(asked.opaque);
            answer.encode(&mut server.wire).unwrap();
            assert!(server.try_play().is_ok(), "{opcode} {status}");
        }
    }
}
