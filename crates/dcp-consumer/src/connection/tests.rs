//! A connection without streams against a server written here, under a paused clock.

use std::time::Duration;

use dcp_proto::consumer::{Delivery, EndCause, StreamFilter, StreamPosition};
use dcp_proto::{OnRollback, Position};
use dcp_test::peer::Peer;
use dcp_test::words::message;
use dcp_wire::message::StreamAddress;
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Seqno, Vbid};
use tokio::io::{DuplexStream, duplex};

use super::*;
use crate::{Chain, Error};

const NOOPS: Duration = Duration::from_secs(20);
const VB: Vbid = Vbid(3);

/// Both ends of a connection.
fn pair() -> (NodeConnection, Peer<DuplexStream>) {
    let (near, far) = duplex(1 << 20);
    let config = ConnectionConfig {
        num_vbuckets: 4,
        collections: true,
        window: 1 << 20,
        noop_interval: Some(NOOPS),
        filter: StreamFilter::All,
        purge_seqno: false,
        stream_end_on_close: true,
        ignore_purged_tombstones: false,
        on_rollback: OnRollback::Fail,
        delivery: Delivery { clamp: true, ..Delivery::default() },
        max_body_len: MAX_BODY_LEN,
    };
    let (address, socket) = (Address::new("node", 11210), Socket::Dialed(Box::new(near)));
    (NodeConnection::new(address, socket, &[], config), Peer::new(far))
}

fn push(map: &str) -> Frame<'_> {
    Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_key(b"b").with_value(map.as_bytes())
}

/// The server answers a noop.
async fn noop(server: &mut Peer<DuplexStream>) {
    let noop = Frame::request(Opcode::DCP_NOOP).with_opaque(Opaque(9));
    server.send_frame(&noop).await;
    let answer = server.receive().await;
    assert_eq!((answer.opcode(), answer.opaque()), (Opcode::DCP_NOOP, Opaque(9)));
}

#[tokio::test(start_paused = true)]
async fn requests_are_answered_together_and_noops_meanwhile() {
    let (mut connection, mut server) = pair();
    let serve = async {
        let requests = [server.receive().await, server.receive().await];
        noop(&mut server).await;
        server.send_frame(&push("{}")).await;
        for request in requests {
            let answer = Frame::response(request.opcode(), Status::SUCCESS);
            tokio::time::sleep(Duration::from_secs(30)).await;
            server.send_frame(&answer.with_opaque(request.opaque())).await;
        }
    };
    let ask = connection.ask(|machine| {
        machine.request_high_seqnos();
        machine.request_manifest();
    });
    let (answers, ()) = tokio::join!(ask, serve);
    let wanted = [Event::HighSeqnos(vec![]), Event::Manifest(Some(Bytes::new()))];
    assert_eq!(answers.unwrap(), wanted);
    assert_eq!(connection.take_map().as_deref(), Some(&b"{}"[..]));
    assert!(connection.is_idle() && connection.take_map().is_none());
    assert_eq!(connection.ask(|_| {}).await.unwrap(), []);
}

/// The error of a request for a failover log that the server responds to so.
async fn error_of(respond: impl AsyncFnOnce(Peer<DuplexStream>, Frame<'static>)) -> Error {
    let (mut connection, mut server) = pair();
    let serve = async {
        let request = server.receive().await;
        let answer = Frame::response(request.opcode(), Status::SUCCESS);
        respond(server, answer.with_opaque(request.opaque())).await;
    };
    let ask = connection.ask(|machine| machine.request_failover_logs(&[VB]));
    tokio::join!(ask, serve).0.unwrap_err()
}

#[tokio::test(start_paused = true)]
async fn request_without_a_usable_answer_fails_with_what_happened() {
    for status in [Status::EINVAL, Status::AUTH_STALE] {
        let error = error_of(async |mut server, answer| {
            let refusal = Frame::response(answer.header.opcode, status);
            server.send_frame(&refusal.with_opaque(answer.header.opaque)).await;
        });
        let error = error.await;
        assert_eq!((error.kind(), error.status()), (ErrorKind::Status, Some(status)));
        assert_eq!(error.opcode(), Some(Opcode::DCP_GET_FAILOVER_LOG));
        let text = format!("the server refused DCP_GET_FAILOVER_LOG ({status})");
        assert_eq!(error.to_string(), text);
    }
    let invalid = error_of(async |mut server, answer| {
        server.send_frame(&answer.with_value(&[1])).await;
    });
    let invalid = invalid.await;
    assert_eq!(invalid.kind(), ErrorKind::Protocol);
    let text = "the server's answer to DCP_GET_FAILOVER_LOG is invalid: invalid failover log";
    assert_eq!(Chain(&invalid).to_string(), text);
    let noise = error_of(async |mut server, _| server.send(&[0; 24]).await).await;
    assert_eq!(noise.kind(), ErrorKind::Protocol);
    let closed = error_of(async |_, _| {}).await;
    assert_eq!(closed.kind(), ErrorKind::ConnectionLost);
    assert_eq!(closed.to_string(), "the connection broke before the answer");
    let silent = error_of(async |server, _| {
        tokio::time::sleep(3 * NOOPS).await;
        drop(server);
    });
    assert_eq!(silent.await.kind(), ErrorKind::ConnectionLost);
}

#[tokio::test(start_paused = true)]
async fn connection_that_is_idle_answers_noops_and_passes_maps_on_until_lost() {
    let (mut connection, mut server) = pair();
    let mut maps = Vec::new();
    let begun = now();
    let serve = async {
        for map in ["{1}", "{2}"] {
            tokio::time::sleep(NOOPS).await;
            noop(&mut server).await;
            server.send_frame(&push(map)).await;
        }
        // A map that is only announced.
        server.send_frame(&push("")).await;
        let request = server.receive().await;
        assert_eq!(request.opcode(), Opcode::GET_CLUSTER_CONFIG);
        let answer = Frame::response(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS);
        server.send_frame(&answer.with_opaque(request.opaque()).with_value(b"{3}")).await;
        server
    };
    let keep = connection.keep_alive(|from, map| {
        maps.push(format!("{from} {}", String::from_utf8_lossy(map)));
    });
    let (lost, _server) = tokio::join!(keep, serve);
    assert!(matches!(lost, Err(Lost::Ended(ConnectionError::Idle))), "{lost:?}");
    assert_eq!(now() - begun, 4 * NOOPS, "nothing arrived for twice the interval");
    assert_eq!(maps, ["node:11210 {1}", "node:11210 {2}", "node:11210 {3}"]);

    let (mut connection, server) = pair();
    drop(server);
    let begun = now();
    assert!(matches!(connection.keep_alive(|_, _| {}).await, Err(Lost::Broken(_))));
    assert_eq!(now(), begun, "a server that closes it is noticed at once");
}

#[tokio::test(start_paused = true)]
async fn connection_is_not_idle_after_a_cancelled_request() {
    let (mut connection, mut server) = pair();
    let ask = connection.ask(|machine| machine.request_cluster_map());
    assert!(tokio::time::timeout(Duration::from_secs(1), ask).await.is_err());
    assert!(!connection.is_idle(), "the answer may still come");
    let request = server.receive().await;
    let answer = Frame::response(request.opcode(), Status::SUCCESS);
    server.send_frame(&answer.with_opaque(request.opaque()).with_value(b"late")).await;
    let seqnos = async {
        let request = server.receive().await;
        let value = [0, 3, 0, 0, 0, 0, 0, 0, 0, 9];
        let answer = Frame::response(request.opcode(), Status::SUCCESS);
        server.send_frame(&answer.with_opaque(request.opaque()).with_value(&value)).await;
    };
    let (answers, ()) =
        tokio::join!(connection.ask(|machine| machine.request_high_seqnos()), seqnos);
    assert_eq!(answers.unwrap(), [Event::HighSeqnos(vec![(VB, Seqno(9))])]);
}

#[tokio::test(start_paused = true)]
async fn stream_that_only_asks_leaves_nothing_to_acknowledge() {
    let (mut connection, mut server) = pair();
    let serve = async {
        let request = server.receive().await;
        let log: Vec<u8> = [[0, 0, 0, 0, 0, 0, 0, 1], [0; 8]].concat();
        let answer = Frame::response(request.opcode(), Status::SUCCESS);
        server.send_frame(&answer.with_opaque(request.opaque()).with_value(&log)).await;
        let to = StreamAddress { vbid: VB, opaque: request.opaque(), stream_id: None };
        server.send(&message("END 0", to)).await;
    };
    let ask = connection.ask(|machine| {
        let from = StreamPosition::new(Position::EARLIEST);
        machine.open_stream(VB, Seqno::ZERO, from).unwrap();
    });
    let (answers, ()) = tokio::join!(ask, serve);
    let ended = answers.unwrap().into_iter().find_map(|answer| match answer {
        Event::StreamEnded { cause, .. } => Some(cause),
        _ => None,
    });
    assert_eq!(ended, Some(EndCause::Complete));
    assert!(connection.is_idle());
    // The connection is not used again, so that nothing is due and nobody waits.
    let ack = server.receive().await;
    assert_eq!((ack.opcode(), ack.frame().extras), (Opcode::DCP_BUFFER_ACK, &[0, 0, 0, 28][..]));
    assert_eq!(connection.machine.unacknowledged(), 0);
}
