//! Flow control to the byte, keep-alive, dead connections.

use std::time::Duration;

use dcp_wire::message::{Mutation, SnapshotFlags, SnapshotMarker, StreamAddress, StreamEndReason};
use dcp_wire::{Datatype, DecodeError, Frame, Opaque, Opcode, Seqno, Status, snappy};

use dcp_proto::consumer::{
    ConnectionConfig, ConnectionError, Event, Limit, Misbehaviour, ProtocolErrorKind,
    StreamPosition,
};
use dcp_proto::{Position, SinkError};
use dcp_test::harness::{Harness, Sent, VB, config};

fn with_window(window: u32) -> ConnectionConfig {
    ConnectionConfig { window, ..config() }
}

#[test]
fn flow_control_holds_every_counted_byte_and_nothing_else() {
    // FC-05, FC-06, FC-09, FC-12 to FC-14, FC-19, FC-23, FC-28, FC-29.
    let mut server = Harness::streaming(with_window(100_000));
    assert_eq!(server.machine.take_held(), 0, "answers do not count");
    let v2 = SnapshotMarker {
        max_visible_seqno: Some(Seqno(100)),
        ..SnapshotMarker::new(Seqno(3), Seqno(100), SnapshotFlags::MEMORY)
    };
    type Put<'a> = &'a dyn Fn(&mut Harness);
    let rows: [(&str, u64, Put<'_>); 8] = [
        ("marker V1", 44, &|server| {
            server.marker(0, 100);
        }),
        ("mutation", 55 + 3 + 5, &|server| {
            server.mutation(1);
        }),
        ("deletion V1", 42 + 3, &|server| {
            server.deletion(2, None);
        }),
        ("deletion V2", 45 + 3, &|server| {
            server.deletion(3, Some(9));
        }),
        ("marker V2.0", 61, &|server| {
            server.marker_of(&v2);
        }),
        ("expiration", 44 + 3, &|server| {
            server.expiration(4);
        }),
        ("system event", 37 + 5 + 16, &|server| {
            server.system_event(5, 1);
        }),
        ("seqno advanced", 32, &|server| {
            server.advanced(6);
        }),
    ];
    for (what, bytes, put) in rows {
        put(&mut server);
        server.play();
        assert_eq!(server.machine.take_held(), bytes, "{what}");
    }
    noop(&mut server, 17);
    server.play();
    assert_eq!(server.machine.take_held(), 0, "noop");
    server.end(StreamEndReason::OK).play();
    assert_eq!(server.machine.take_held(), 28, "stream end");
    server.mutation(7).play();
    assert_eq!(server.machine.take_held(), 63, "a mutation of a stream that is gone");
    let total: u64 = rows.iter().map(|(_, bytes, _)| bytes).sum::<u64>() + 28 + 63;
    assert_eq!(server.machine.unacknowledged(), total);
    server.machine.release(server.now, total);
    server.now += Duration::from_secs(1);
    server.machine.handle_timeout(server.now).unwrap();
    assert_eq!(server.sent()[1..], [Sent::Ack(u32::try_from(total).unwrap())]);
    assert_eq!(server.machine.unacknowledged(), 0);
}

fn noop(server: &mut Harness, opaque: u32) {
    let noop = Frame::request(Opcode::DCP_NOOP).with_opaque(Opaque(opaque));
    noop.encode(&mut server.wire).unwrap();
}

#[test]
fn window_acknowledges_a_quarter_and_the_rest_after_a_second() {
    let mut server = Harness::streaming(with_window(2000));
    server.marker(0, 100).mutations(1..=10).play();
    let held = server.machine.take_held();
    assert_eq!(held, 44 + 10 * 63);
    server.machine.release(server.now, 499);
    assert_eq!(server.sent(), []);
    server.machine.release(server.now, 1);
    assert_eq!(server.sent(), [Sent::Ack(500)]);
    server.machine.release(server.now, held - 500);
    assert_eq!(server.sent(), []);
    server.now += Duration::from_secs(1);
    assert!(server.machine.poll_timeout().unwrap() <= server.now);
    server.machine.handle_timeout(server.now).unwrap();
    assert_eq!(server.sent(), [Sent::Ack(174)]);
    assert_eq!(server.machine.stats().acks, 2);
}

#[test]
fn fc_30_server_may_send_while_the_window_has_room_and_not_beyond() {
    let mut server = Harness::streaming(with_window(100));
    server.marker(0, 9).mutation(1).play();
    assert!(server.machine.is_window_full());
    server.mutation(2);
    assert_eq!(server.misbehaves(), Misbehaviour::WindowOverrun);
}

#[test]
fn noops_are_answered_at_once_while_the_window_is_full() {
    let mut server = Harness::streaming(with_window(100));
    server.marker(0, 9).mutation(1).play();
    noop(&mut server, 0x0098_9681);
    server.play();
    let (opcode, opaque, status) = (Opcode::DCP_NOOP, Opaque(0x0098_9681), Status::SUCCESS);
    assert_eq!(server.sent(), [Sent::Response { opcode, opaque, status }]);
    assert_eq!(server.machine.stats().noops, 1);
}

#[test]
fn np_15_a_noop_with_a_body_ends_the_connection() {
    let noop = || Frame::request(Opcode::DCP_NOOP);
    for noop in [noop().with_extras(b"x"), noop().with_key(b"x"), noop().with_value(b"x")] {
        let mut server = Harness::streaming(config());
        noop.encode(&mut server.wire).unwrap();
        let Err(ConnectionError::Protocol(error)) = server.try_play() else { panic!("{noop:?}") };
        let (what, len) = ("the header of a noop", 1);
        let kind = ProtocolErrorKind::InvalidMessage(DecodeError::TrailingBytes { what, len });
        assert_eq!((error.kind, server.sent()), (kind, vec![]));
    }
}

#[test]
fn connection_that_is_silent_is_dead_after_two_intervals() {
    let mut server = Harness::streaming(config());
    server.now += Duration::from_secs(39);
    server.machine.handle_timeout(server.now).unwrap();
    noop(&mut server, 1);
    server.play();
    server.now += Duration::from_secs(39);
    server.machine.handle_timeout(server.now).unwrap();
    server.now += Duration::from_secs(1);
    assert_eq!(server.machine.handle_timeout(server.now), Err(ConnectionError::Idle));
}

#[test]
fn packet_that_never_comes_whole_is_silence() {
    let mut server = Harness::streaming(config());
    server.marker(0, 9).play();
    // A header that announces 10 MB, cut short, and noops and a map that fall into its body.
    let mut wire = Vec::new();
    Frame::request(Opcode::DCP_MUTATION).encode(&mut wire).unwrap();
    wire[8..12].copy_from_slice(&10_000_000u32.to_be_bytes());
    for second in 0..40 {
        assert_eq!(server.machine.handle_timeout(server.now), Ok(()), "after {second} s");
        if second % 20 == 0 {
            Frame::request(Opcode::DCP_NOOP).encode(&mut wire).unwrap();
        }
        if second == 10 {
            let map = Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_value(&[b' '; 10_000]);
            map.encode(&mut wire).unwrap();
        }
        let (machine, sink) = (&mut server.machine, &mut server.sink);
        let walk = machine.handle_input(server.now, &wire, Limit::NONE, sink).unwrap();
        assert_eq!(walk.consumed, 0);
        server.now += Duration::from_secs(1);
    }
    assert_eq!(server.machine.handle_timeout(server.now), Err(ConnectionError::Idle));
}

#[test]
fn packet_that_is_large_and_slow_is_no_silence() {
    let mut server = Harness::streaming(config());
    server.marker(0, 9).play();
    let mut packet = Vec::new();
    let value = vec![b'x'; 1 << 20];
    let mutation = Mutation { seqno: Seqno(1), key: b"key", value: &value, ..Mutation::default() };
    let to = StreamAddress { vbid: VB, opaque: server.opaque, stream_id: None };
    mutation.encode(to, &mut packet).unwrap();
    let rows = (100_000..=packet.len()).step_by(100_000).chain([packet.len()]).map(|len| {
        server.now += Duration::from_secs(39);
        server.machine.handle_timeout(server.now).unwrap();
        let (machine, sink) = (&mut server.machine, &mut server.sink);
        machine.handle_input(server.now, &packet[..len], Limit::NONE, sink).unwrap().rows
    });
    assert_eq!(rows.sum::<usize>(), 1);
}

#[test]
fn walk_over_packets_stops_at_its_limit_and_resumes_there() {
    let mut server = Harness::streaming(config());
    server.marker(0, 100).mutations(1..=10);
    let wire = std::mem::take(&mut server.wire);
    let limit = Limit { rows: usize::MAX, bytes: 100 };
    let (mut rest, mut walks) = (&wire[..], Vec::new());
    while !rest.is_empty() {
        let walk = server.machine.handle_input(server.now, rest, limit, &mut server.sink).unwrap();
        rest = &rest[walk.consumed..];
        walks.push((walk.rows, walk.limited));
    }
    assert_eq!(walks, [(2, true); 5], "63 bytes each, one may overshoot");
    assert_eq!(server.seqnos(), (1..=10).collect::<Vec<u64>>());
}

#[test]
fn changes_before_a_violation_stay_good() {
    let mut server = Harness::streaming(config());
    server.marker(0, 10).mutation(1).mutation(2).mutation(2);
    server.misbehaves();
    assert_eq!(server.seqnos(), [1, 2]);
    assert_eq!(server.moved().unwrap().seqno, Seqno(2));
    let request = server.reconnect(config());
    assert_eq!((request.start, request.snapshot), (2, (0, 10)));
}

#[test]
fn change_that_the_sink_refuses_is_not_passed_over() {
    let mut server = Harness::streaming(config());
    server.sink.refuse = Some(Seqno(2));
    server.marker(0, 10).mutations(1..=3);
    let error = server.try_play().unwrap_err();
    assert!(matches!(error, ConnectionError::Sink(SinkError::Unrepresentable { .. })), "{error}");
    assert_eq!(server.moved().unwrap().seqno, Seqno(1));
}

#[test]
fn stream_that_is_refused_passes_on_the_map_that_came_with_it() {
    use dcp_proto::consumer::{EndCause, OpenStreamError};
    let mut server = Harness::new(config());
    server.open(StreamPosition::new(Position::EARLIEST));
    server.answer(Status::NOT_MY_VBUCKET, b"{\"rev\":7}").play();
    let events = server.events();
    let [Event::ClusterMap(map), Event::StreamEnded { cause, .. }] = &events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(&map[..], b"{\"rev\":7}");
    let (status, manifest_uid) = (Status::NOT_MY_VBUCKET, None);
    assert_eq!(*cause, EndCause::Refused(OpenStreamError::Refused { status, manifest_uid }));
}

#[test]
fn map_may_come_compressed_whichever_way_it_comes() {
    let map = b"{\"rev\":7,\"name\":\"default\",\"of\":\"the bucket default\"}";
    let block = snappy::compress(map).unwrap();
    let damaged = &block[..block.len() - 1];
    for (value, expected) in [(&block[..], Some(&map[..])), (damaged, None)] {
        let mut server = Harness::new(config());
        server.open(StreamPosition::new(Position::EARLIEST));
        for packet in [
            Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_key(b"default"),
            Frame::response(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS),
            Frame::response(Opcode::DCP_STREAM_REQ, Status::NOT_MY_VBUCKET),
        ] {
            let datatype = Datatype::JSON.with(Datatype::SNAPPY);
            let opaque = match packet.header.opcode {
                Opcode::GET_CLUSTER_CONFIG => {
                    server.machine.request_cluster_map();
                    server.packets()[0].opaque()
                }
                _ => server.opaque,
            };
            let packet = packet.with_opaque(opaque).with_datatype(datatype);
            packet.with_value(value).encode(&mut server.wire).unwrap();
            server.play();
            let events = server.events().into_iter();
            let maps = events.filter_map(|event| match event {
                Event::ClusterMap(map) => Some(map),
                _ => None,
            });
            let expected: Vec<_> = expected.into_iter().collect();
            assert_eq!(maps.collect::<Vec<_>>(), expected, "{:?}", packet.header.opcode);
        }
    }
}
