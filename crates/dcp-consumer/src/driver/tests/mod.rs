//! A connection's task against a server written here, over an in-memory pipe and a paused clock.

mod bulk;
mod rig;

use std::future::poll_fn;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dcp_proto::Position;
use dcp_proto::consumer::{Delivery, EndKind};
use dcp_wire::message::{StreamEndReason, encode_vb_seqnos};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Status};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use self::rig::*;
use super::*;
use crate::connection::MAX_UNWRITTEN;
use crate::{Chain, ErrorKind};

fn patient() -> BatchPolicy {
    BatchPolicy { linger: Duration::from_secs(3600), ..BatchPolicy::default() }
}

fn impatient() -> BatchPolicy {
    BatchPolicy { linger: Duration::ZERO, ..BatchPolicy::default() }
}

#[tokio::test(start_paused = true)]
async fn batch_is_cut_by_rows() {
    let mut server = Server::start(BatchPolicy { max_rows: 3, ..patient() }).await;
    server.marker().await;
    server.rows(1..=7).await;
    assert_eq!(server.batch().await.batch, [1, 2, 3]);
    assert_eq!(server.batch().await.batch, [4, 5, 6]);
    server.settle().await;
    assert!(server.queue.is_empty(), "the third is open");
}

#[tokio::test(start_paused = true)]
async fn batch_is_cut_once_nothing_comes_but_not_while_another_waits() {
    let linger = Duration::from_millis(100);
    let mut server = Server::start_endless(BatchPolicy { linger, ..BatchPolicy::default() }).await;
    server.marker().await;
    tokio::time::sleep(linger).await;
    let began = now();
    server.rows([1]).await;
    let first = server.batch().await;
    // It fills a tenth of the window.
    assert_eq!((first.batch, now() - began), (vec![1], pace::LULL), "nothing else comes");
    server.rows([2]).await;
    tokio::time::sleep(linger * 2).await;
    server.rows([3]).await;
    tokio::time::sleep(linger * 5).await;
    server.rows([4]).await;
    server.settle().await;
    let taken = now();
    assert_eq!(server.batch().await.batch, [2], "waits to be taken");
    assert_eq!(server.batch().await.batch, [3, 4], "grew meanwhile");
    assert_eq!(now() - taken, Duration::ZERO, "nothing comes");
}

#[tokio::test(start_paused = true)]
async fn batch_of_a_read_with_an_end_may_linger_for_ever() {
    let policy = BatchPolicy { max_rows: 3, linger: Duration::MAX, ..BatchPolicy::default() };
    let mut server = Server::start(policy).await;
    server.marker().await;
    server.rows(1..=4).await;
    assert_eq!(server.batch().await.batch, [1, 2, 3]);
    tokio::time::sleep(Duration::from_secs(10)).await;
    assert!(server.queue.is_empty(), "the second is open");
    server.rows(5..=6).await;
    assert_eq!(server.batch().await.batch, [4, 5, 6]);
}

#[tokio::test(start_paused = true)]
async fn batch_that_fills_waits_for_its_linger_and_any_other_does_not() {
    // A row each 2 ms fills it after nine, half of the window.
    for (linger, waits) in [(12, 12), (2, 0)] {
        let linger = Duration::from_millis(linger);
        let mut server =
            Server::start_endless(BatchPolicy { linger, ..BatchPolicy::default() }).await;
        server.marker().await;
        tokio::time::sleep(linger).await;
        let began = now();
        for row in 1.. {
            server.rows([row]).await;
            let batch = poll_fn(|context| server.queue.poll_pop(context));
            if timeout(Duration::from_millis(2), batch).await.is_ok() {
                break;
            }
        }
        let waited = (now() - began).as_millis();
        assert!(waits <= waited && waited <= waits + 1, "{linger:?}: {waited} ms");
    }
}

#[tokio::test(start_paused = true)]
async fn acknowledgement_is_sent_when_the_next_batch_is_requested() {
    let mut server = Server::start(impatient()).await;
    server.marker().await;
    server.rows(1..=12).await;
    let mut taken = 0;
    let mut batches = Vec::new();
    while taken < 12 {
        let batch = server.batch().await;
        taken += batch.rows;
        batches.push(batch);
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(server.peer.input.is_empty() && server.nothing_sent().await, "nobody has asked");
    let bytes: u64 = batches.iter().map(|batch| batch.credit.bytes()).sum();
    // The marker came before any row: nothing the application takes brings its 44 bytes back.
    assert!(bytes == 12 * ROW || bytes == 12 * ROW + 44, "{bytes}");
    for batch in batches {
        batch.credit.give_back();
    }
    assert!(server.ack().await >= WINDOW / 2, "more than half of the window at once");
}

#[tokio::test(start_paused = true)]
async fn window_that_is_half_full_hands_the_open_batch_over() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.settle().await;
    let half = u64::from(WINDOW) / ROW / 2;
    server.rows(1..half).await;
    server.settle().await;
    assert!(server.queue.is_empty(), "it is open");
    let began = now();
    server.rows([half]).await;
    assert_eq!(server.batch().await.batch, (1..=half).collect::<Vec<_>>());
    assert_eq!(now() - began, Duration::ZERO, "it has not lingered");
}

#[tokio::test(start_paused = true)]
async fn window_that_is_full_hands_over_whatever_is_open() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.settle().await;
    let all = u64::from(WINDOW) / ROW;
    server.rows(1..=15).await;
    let kept = server.batch().await;
    assert_eq!(kept.rows, 15);
    server.rows(16..all).await;
    server.settle().await;
    assert!(server.queue.is_empty(), "the server may go on");
    // Nothing else would ever end the batch, and the server may not continue.
    let began = now();
    server.rows([all]).await;
    assert_eq!(server.batch().await.batch, (16..=all).collect::<Vec<_>>());
    assert_eq!(now() - began, Duration::ZERO, "it has not lingered");
}

#[tokio::test(start_paused = true)]
async fn noops_are_answered_while_the_application_takes_nothing() {
    let mut server = Server::start(impatient()).await;
    server.marker().await;
    server.rows(1..=19).await;
    for opaque in 0..100 {
        tokio::time::sleep(Duration::from_secs(20)).await;
        server.send_frame(&Frame::request(Opcode::DCP_NOOP).with_opaque(Opaque(opaque))).await;
        let answer = loop {
            match server.receive().await {
                // The marker's bytes, which nobody takes.
                (Opcode::DCP_BUFFER_ACK, ..) => {}
                answer => break answer,
            }
        };
        assert_eq!(answer, (Opcode::DCP_NOOP, Opaque(opaque), vec![]));
    }
}

#[tokio::test(start_paused = true)]
async fn server_that_is_silent_is_closed_with_its_changes_delivered() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.rows(1..=5).await;
    let began = now();
    let Report::Lost { streams, error } = server.report().await else { panic!("not lost") };
    assert_eq!(now() - began, Duration::from_secs(40));
    assert_eq!(error.kind(), ErrorKind::ConnectionLost);
    let text = Chain(&error).to_string();
    assert!(text.contains("node:11210") && text.contains("noop interval"), "{text}");
    assert_eq!(streams[0].1.position.seqno, Seqno(5), "the next connection goes on behind it");
    let batch = server.batch().await;
    assert_eq!(batch.batch, [1, 2, 3, 4, 5]);
    assert_eq!(batch.positions[0].position.seqno, Seqno(5));
}

#[tokio::test(start_paused = true)]
async fn changes_before_a_closed_socket_are_delivered() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.rows(1..=5).await;
    server.peer.io.shutdown().await.unwrap();
    let Report::Lost { streams, .. } = server.report().await else { panic!("not lost") };
    assert_eq!(streams[0].1.position.seqno, Seqno(5));
    assert_eq!(server.batch().await.batch, [1, 2, 3, 4, 5]);
}

#[tokio::test(start_paused = true)]
async fn stream_end_right_before_a_lost_connection_is_reported() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.settle().await;
    // In one piece, so that the end and the broken frame are met in one walk.
    let mut bytes = server.said(["END 2"]);
    bytes.extend_from_slice(b"HTTP/1.1 400 Bad Request");
    server.peer.send(&bytes).await;
    let Report::Ended { vbid, .. } = server.report().await else { panic!("not ended") };
    assert_eq!(vbid, Vbid(0));
    let Report::Lost { streams, .. } = server.report().await else { panic!("not lost") };
    assert!(streams.is_empty(), "{streams:?}");
}

#[tokio::test(start_paused = true)]
async fn socket_that_closed_and_a_protocol_violation_are_distinguished() {
    let mut server = Server::start(patient()).await;
    server.peer.io.shutdown().await.unwrap();
    let Report::Lost { error, .. } = server.report().await else { panic!("not lost") };
    assert_eq!(error.kind(), ErrorKind::ConnectionLost);
    assert_eq!(Chain(&error).to_string(), "node:11210 closed the connection");

    let mut server = Server::start(patient()).await;
    server.rows([1]).await;
    let Report::Lost { error, .. } = server.report().await else { panic!("not lost") };
    assert_eq!(error.kind(), ErrorKind::Protocol, "an item before any marker");
    assert_eq!(
        Chain(&error).to_string(),
        "the connection to node:11210 was closed: the server broke the protocol: vb:0 \
         DCP_MUTATION with seqno 1: message outside a snapshot"
    );

    let mut server = Server::start(patient()).await;
    server.peer.send(b"HTTP/1.1 400 Bad Request").await;
    let Report::Lost { error, .. } = server.report().await else { panic!("not lost") };
    assert_eq!(error.kind(), ErrorKind::Protocol);
}

#[tokio::test(start_paused = true)]
async fn stream_that_a_dying_task_has_yet_to_open_is_handed_back() {
    for breaks in [true, false] {
        let armed = Arc::new(Mutex::new(None));
        let late = Late { breaks, commands: Arc::clone(&armed) };
        let mut server = Server::start_over(patient(), Delivery::default(), late).await;
        *armed.lock().unwrap() = Some(server.commands.clone());
        // A packet that ends the connection in the next turn, if the socket does not.
        server.rows([1]).await;
        let Report::Lost { streams, .. } = server.report().await else { panic!("not lost") };
        let vbids: Vec<Vbid> = streams.iter().map(|(vbid, _)| *vbid).collect();
        assert_eq!(vbids, [Vbid(0), Vbid(1)], "{breaks}");
        assert!(server.commands.send(Command::FetchMap).is_err(), "nobody takes what comes later");
    }
}

#[tokio::test(start_paused = true)]
async fn write_that_fails_ends_the_connection() {
    let is_deaf = Arc::new(AtomicBool::new(false));
    let deaf = Deaf(Arc::clone(&is_deaf));
    let mut server = Server::start_over(patient(), Delivery::default(), deaf).await;
    is_deaf.store(true, Ordering::Relaxed);
    // Its bytes are acknowledged after a second.
    server.marker().await;
    let began = now();
    let Report::Lost { error, .. } = server.report().await else { panic!("not lost") };
    assert_eq!(error.kind(), ErrorKind::ConnectionLost);
    assert_eq!(now() - began, Duration::from_secs(1), "and not when the silence was noticed");
}

/// The header of a mutation with a key and a body of these lengths, and nothing behind it.
fn announced(key_len: u16, body_len: u32) -> Vec<u8> {
    let mut packet = Vec::new();
    Frame::request(Opcode::DCP_MUTATION).encode(&mut packet).unwrap();
    packet[2..4].copy_from_slice(&key_len.to_be_bytes());
    packet[8..12].copy_from_slice(&body_len.to_be_bytes());
    packet
}

#[tokio::test(start_paused = true)]
async fn packet_of_impossible_length_ends_the_connection_before_its_body_comes() {
    let max = u32::try_from(MAX_BODY_LEN).unwrap();
    for (packet, message) in [
        (announced(0, max + 1), "exceeds the limit of 31457280 bytes"),
        (announced(0, u32::MAX), "body of 4294967295 bytes exceeds"),
        (announced(200, 199), "invalid length 199 of body"),
    ] {
        let mut server = Server::start(patient()).await;
        server.marker().await;
        server.rows([1]).await;
        server.peer.send(&packet).await;
        let Report::Lost { error, .. } = server.report().await else { panic!("not lost") };
        assert_eq!(error.kind(), ErrorKind::Protocol);
        let text = Chain(&error).to_string();
        assert!(text.contains(message), "{text}");
        assert_eq!(server.batch().await.batch, [1], "what came before is delivered");
    }
}

#[tokio::test(start_paused = true)]
async fn stream_end_hands_its_rows_over_at_once_and_is_reported() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.rows(1..=3).await;
    let began = now();
    server.end().await;
    let Report::Ended { cause, from, .. } = server.report().await else { panic!("not ended") };
    assert_eq!(cause, EndCause::Ended(StreamEndReason::STATE_CHANGED));
    assert_eq!(from.position.seqno, Seqno(3));
    assert_eq!(now() - began, Duration::ZERO, "nothing lingers");
    assert_eq!(server.batch().await.batch, [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn stream_end_is_never_reported_before_its_rows_are_delivered() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.rows([UNFIT]).await;
    server.end().await;
    let report = server.report().await;
    assert!(matches!(report, Report::SinkFailed(_)), "{report:?}: another would go on behind them");
}

#[tokio::test(start_paused = true)]
async fn streams_that_end_at_the_latest_change_request_it_together() {
    let mut server = Server::start(patient()).await;
    for vbid in 1..4 {
        let from = Position::EARLIEST;
        let from = Box::new(StreamPosition { end: EndKind::Latest, ..StreamPosition::new(from) });
        let open = Command::Open { vbid: Vbid(vbid), end_seqno: Seqno(9), from };
        server.commands.send(open).unwrap();
    }
    let (opcode, opaque, _) = server.receive().await;
    assert_eq!(opcode, Opcode::GET_ALL_VB_SEQNOS);
    assert!(server.nothing_sent().await, "the answer has the seqnos of all vBuckets");
    let answer = Frame::response(Opcode::GET_ALL_VB_SEQNOS, Status::SUCCESS);
    server.send_frame(&answer.with_opaque(opaque)).await;
    for _ in 1..4 {
        assert_eq!(server.receive().await.0, Opcode::DCP_STREAM_REQ);
    }
}

#[tokio::test(start_paused = true)]
async fn progress_is_reported_for_vbuckets_that_stream() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.rows(1..=3).await;
    server.settle().await;
    let (vbid, seqno, high_seqno) = (Vbid(0), Seqno(3), Seqno(9));
    let progress = VbucketProgress {
        vbid,
        seqno,
        high_seqno,
        is_held_up: false,
        has_lost_end: false,
        awaits_snapshot_end: true,
    };
    assert_eq!(server.progress(9).await, [progress]);
}

#[tokio::test(start_paused = true)]
async fn vbucket_whose_window_the_application_has_filled_does_not_lag() {
    let rows = u64::from(WINDOW) / ROW;
    let mut server = Server::start(impatient()).await;
    server.marker().await;
    server.rows(1..=rows).await;
    let mut taken = Vec::new();
    while taken.iter().map(|batch: &Queued<_>| batch.rows as u64).sum::<u64>() < rows {
        taken.push(server.batch().await);
    }
    assert!(server.progress(1000).await[0].is_held_up, "it has taken all and done with none");
    taken.into_iter().for_each(|batch| batch.credit.give_back());
    server.settle().await;
    assert!(!server.progress(1000).await[0].is_held_up, "now it is the server's turn");
}

#[tokio::test(start_paused = true)]
async fn vbucket_whose_window_is_full_of_unpersisted_changes_lags() {
    let delivery = Delivery { persisted_only: true, ..Delivery::default() };
    let mut server = Server::start_over(impatient(), delivery, ()).await;
    server.marker().await;
    server.rows(1..=u64::from(WINDOW) / ROW).await;
    server.settle().await;
    assert!(matches!(server.report().await, Report::Unpersisted(Vbid(0), Some(_))));
    let (vbid, seqno, high_seqno) = (Vbid(0), Seqno(0), Seqno(1000));
    let lags = VbucketProgress {
        vbid,
        seqno,
        high_seqno,
        is_held_up: false,
        has_lost_end: false,
        awaits_snapshot_end: false,
    };
    assert_eq!(server.progress(1000).await, [lags], "there is nothing the application could take");
}

#[tokio::test(start_paused = true)]
async fn task_that_nobody_reads_ends() {
    let mut server = Server::start(patient()).await;
    server.cancel.cancel();
    assert!(server.reports.recv().await.is_none());
    assert_eq!(server.peer.io.read_buf(&mut server.peer.input).await.unwrap(), 0);
}

impl Server {
    /// How far vBuckets are said to have come when the node says that vBucket 0 is at `high`.
    async fn progress(&mut self, high: u64) -> Vec<VbucketProgress> {
        self.commands.send(Command::FetchHighSeqnos).unwrap();
        let (opcode, opaque, extras) = loop {
            match self.receive().await {
                (Opcode::DCP_BUFFER_ACK, ..) => {}
                packet => break packet,
            }
        };
        assert_eq!((opcode, &extras[..]), (Opcode::GET_ALL_VB_SEQNOS, &[0, 0, 0, 1][..]));
        let mut seqnos = Vec::new();
        encode_vb_seqnos([(Vbid(0), Seqno(high)), (Vbid(1), Seqno(7))], &mut seqnos);
        let answer = Frame::response(opcode, Status::SUCCESS).with_opaque(opaque);
        self.send_frame(&answer.with_value(&seqnos)).await;
        match self.report().await {
            Report::HighSeqnos(progress) => progress,
            other => panic!("{other:?}"),
        }
    }

    async fn nothing_sent(&mut self) -> bool {
        self.settle().await;
        let read = self.peer.io.read_buf(&mut self.peer.input);
        let bytes = timeout(Duration::from_millis(1), read).await;
        bytes.is_err()
    }
}

#[tokio::test(start_paused = true)]
async fn server_that_does_not_read_answers_is_not_read() {
    const PIPE: usize = 1 << 20;
    let mut server = Server::start(patient()).await;
    let mut noops = Vec::new();
    for opaque in 0..4096 {
        Frame::request(Opcode::DCP_NOOP).with_opaque(Opaque(opaque)).encode(&mut noops).unwrap();
    }
    let mut written = 0;
    while let Ok(len) = timeout(Duration::from_secs(1), server.peer.io.write(&noops)).await {
        let len = len.unwrap();
        written += len;
        assert!(written < 16 * PIPE, "answers are kept without bound");
        // A part of a packet may have been written.
        noops.rotate_left(len);
    }
    // Both ways of the pipe, what waits to be written, and what was read meanwhile.
    assert!(written <= 3 * PIPE + MAX_UNWRITTEN, "{written}");

    // Once it reads, it is read and answered again.
    let (opcode, ..) = server.receive().await;
    assert_eq!(opcode, Opcode::DCP_NOOP);
    let mut answered = server.peer.input.len();
    while answered < written / 2 {
        server.peer.input.clear();
        answered += server.peer.io.read_buf(&mut server.peer.input).await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn cluster_map_that_is_newest_is_kept_while_nobody_takes_them() {
    let mut server = Server::start(patient()).await;
    for rev in 0..50 {
        let map = format!("{{\"rev\":{rev}}}");
        let mut push = Vec::new();
        let frame = Frame::request(Opcode::CLUSTER_MAP_CHANGE);
        frame.with_key(b"default").with_value(map.as_bytes()).encode(&mut push).unwrap();
        push[0] = 0x82;
        server.peer.send(&push).await;
    }
    server.settle().await;
    let Report::Map(shared) = server.report().await else { panic!("no map") };
    assert_eq!(shared.take_map().as_deref(), Some(&b"{\"rev\":49}"[..]));
    server.settle().await;
    assert!(server.reports.try_recv().is_err(), "told once");
}
