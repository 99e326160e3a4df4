//! A connection's task against a server written here, over an in-memory pipe and a paused clock.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Context;
use std::time::Duration;

use dcp_proto::consumer::{ConnectionConfig, Delivery, RollbackPolicy, StreamFilter};
use dcp_proto::{Change, ChangeSink, Position, Rollback};
use dcp_wire::message::{
    FailoverEntry, Mutation, SnapshotFlags, SnapshotMarker, StreamAddress, StreamEnd,
    StreamEndReason, encode_failover_log, encode_vb_seqnos,
};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Status, Vbuuid};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};
use tokio::time::timeout;

use super::*;

const WINDOW: u32 = 2000;
/// Bytes of one mutation on the wire.
const ROW: u64 = 55 + 3 + 42;
/// Simulated time after which nothing comes any more.
const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
/// Seqno of a row that no batch can be made with.
const UNFIT: u64 = 666;

#[derive(Default)]
struct Seqnos(Vec<u64>);

impl ChangeSink for Seqnos {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        self.0.push(change.seqno.0);
        Ok(())
    }

    fn rollback(&mut self, _: &Rollback) -> Result<(), SinkError> {
        Ok(())
    }
}

impl BatchSink for Seqnos {
    type Batch = Vec<u64>;

    fn rows(&self) -> usize {
        self.0.len()
    }

    fn size_bytes(&self) -> usize {
        self.0.len() * 8
    }

    fn take_batch(&mut self) -> Result<Vec<u64>, SinkError> {
        if self.0.contains(&UNFIT) {
            let (vbid, seqno, what) = (Vbid(0), Seqno(UNFIT), "unfit".to_owned());
            return Err(SinkError::Unrepresentable { vbid, seqno, what });
        }
        Ok(std::mem::take(&mut self.0))
    }
}

/// The server's end of the pipe, and the ends of the task's channels.
struct Server {
    io: DuplexStream,
    input: BytesMut,
    opaque: Opaque,
    queue: Arc<Queue<Vec<u64>>>,
    commands: mpsc::UnboundedSender<Command>,
    reports: mpsc::UnboundedReceiver<(ConnectionId, Report)>,
    cancel: CancellationToken,
}

/// The task's end of the pipe, which takes nothing any more once that is said. Reading from it does
/// not tell.
struct Deaf {
    io: DuplexStream,
    is_deaf: Arc<AtomicBool>,
}

impl AsyncRead for Deaf {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Deaf {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if self.is_deaf.load(Ordering::Relaxed) {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl Server {
    /// With vBucket 0 streaming.
    async fn start(policy: BatchPolicy) -> Self {
        Self::start_over(policy, Delivery::default(), |io| io).await
    }

    /// The same, over another kind of pipe and with another delivery.
    async fn start_over<IO>(
        policy: BatchPolicy,
        delivery: Delivery,
        over: impl FnOnce(DuplexStream) -> IO,
    ) -> Self
    where
        IO: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (io, far) = duplex(1 << 20);
        let queue = Arc::new(Queue::new());
        let (commands, receiver) = mpsc::unbounded_channel();
        let (sender, reports) = mpsc::unbounded_channel();
        let cancel = CancellationToken::new();
        let config = ConnectionConfig {
            num_vbuckets: 4,
            collections: false,
            window: WINDOW,
            noop_interval: Some(Duration::from_secs(20)),
            filter: StreamFilter::All,
            purge_seqno: false,
            on_rollback: RollbackPolicy::Resume,
            delivery,
            max_body_len: MAX_BODY_LEN,
        };
        let driver = Driver {
            id: ConnectionId(1),
            machine: Connection::new(config, now()),
            sink: Seqnos::default(),
            policy,
            window: WINDOW.into(),
            max_body_len: MAX_BODY_LEN,
            queue: Arc::clone(&queue),
            link: Arc::default(),
            commands: receiver,
            reports: sender,
            cancel: cancel.clone(),
        };
        tokio::spawn(driver.run(over(far), BytesMut::new()));
        let input = BytesMut::new();
        let mut server = Self { io, input, opaque: Opaque(0), queue, commands, reports, cancel };
        server.open(Vbid(0)).await;
        server
    }

    async fn open(&mut self, vbid: Vbid) {
        let resume = Box::new(Resume::new(Position::EARLIEST));
        self.commands.send(Command::Open { vbid, end_seqno: Seqno::MAX, resume }).unwrap();
        let (opcode, opaque, _) = self.receive().await;
        assert_eq!(opcode, Opcode::DCP_STREAM_REQ);
        self.opaque = opaque;
        let mut log = Vec::new();
        encode_failover_log([FailoverEntry { vbuuid: Vbuuid(1), seqno: Seqno(0) }], &mut log);
        let answer = Frame::response(Opcode::DCP_STREAM_REQ, Status::SUCCESS);
        self.send_frame(&answer.with_opaque(opaque).with_value(&log)).await;
        assert!(matches!(self.report().await, Report::Opened(_)));
    }

    /// The next packet the task sends: opcode, opaque, extras.
    async fn receive(&mut self) -> (Opcode, Opaque, Vec<u8>) {
        loop {
            if let Some((frame, used)) = Frame::parse(&self.input, MAX_BODY_LEN).unwrap() {
                let header = frame.header;
                let packet = (header.opcode, header.opaque, frame.extras.to_vec());
                self.input.advance(used);
                return packet;
            }
            let read = timeout(WEEK, self.io.read_buf(&mut self.input)).await;
            assert_ne!(read.expect("no packet comes").unwrap(), 0, "closed");
        }
    }

    /// Bytes of the next acknowledgement.
    async fn ack(&mut self) -> u32 {
        let (opcode, _, extras) = self.receive().await;
        assert_eq!(opcode, Opcode::DCP_BUFFER_ACK);
        u32::from_be_bytes(extras.try_into().unwrap())
    }

    async fn send_frame(&mut self, frame: &Frame<'_>) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes).unwrap();
        self.io.write_all(&bytes).await.unwrap();
    }

    fn to(&self, vbid: Vbid) -> StreamAddress {
        StreamAddress { vbid, opaque: self.opaque, stream_id: None }
    }

    async fn marker(&mut self) {
        let mut bytes = Vec::new();
        let marker = SnapshotMarker::new(Seqno(0), Seqno(1000), SnapshotFlags::MEMORY);
        marker.encode(self.to(Vbid(0)), &mut bytes).unwrap();
        self.io.write_all(&bytes).await.unwrap();
    }

    async fn rows(&mut self, seqnos: impl IntoIterator<Item = u64>) {
        let mut bytes = Vec::new();
        for seqno in seqnos {
            let mutation = Mutation {
                seqno: Seqno(seqno),
                key: b"key",
                value: &[7; 42],
                ..Mutation::default()
            };
            mutation.encode(self.to(Vbid(0)), &mut bytes).unwrap();
        }
        self.io.write_all(&bytes).await.unwrap();
    }

    /// The stream ends, to go on elsewhere.
    async fn end(&mut self) {
        let mut bytes = Vec::new();
        let end = StreamEnd { reason: StreamEndReason::STATE_CHANGED };
        end.encode(self.to(Vbid(0)), &mut bytes).unwrap();
        self.io.write_all(&bytes).await.unwrap();
    }

    async fn report(&mut self) -> Report {
        let report = timeout(WEEK, self.reports.recv()).await;
        report.expect("no report comes").unwrap().1
    }

    async fn batch(&mut self) -> Queued<Vec<u64>> {
        match timeout(WEEK, self.queue.pop()).await.expect("no batch comes") {
            Entry::Batch(batch) => batch,
            other => panic!("{other:?}"),
        }
    }

    /// Lets the task do everything it can do without time passing.
    async fn settle(&self) {
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
    }
}

fn patient() -> BatchPolicy {
    BatchPolicy { linger: Duration::from_secs(3600), ..BatchPolicy::default() }
}

fn impatient() -> BatchPolicy {
    BatchPolicy { linger: Duration::ZERO, ..BatchPolicy::default() }
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_cut_by_rows() {
    let mut server = Server::start(BatchPolicy { max_rows: 3, ..patient() }).await;
    server.marker().await;
    server.rows(1..=7).await;
    assert_eq!(server.batch().await.batch, [1, 2, 3]);
    assert_eq!(server.batch().await.batch, [4, 5, 6]);
    server.settle().await;
    assert!(server.queue.is_empty(), "the third is open");
}

#[tokio::test(start_paused = true)]
async fn a_batch_is_cut_by_lingering_but_not_while_another_waits() {
    let linger = Duration::from_millis(100);
    let mut server = Server::start(BatchPolicy { linger, ..BatchPolicy::default() }).await;
    server.marker().await;
    let began = now();
    server.rows([1]).await;
    let first = server.batch().await;
    assert_eq!((first.batch, now() - began), (vec![1], linger));
    server.rows([2]).await;
    tokio::time::sleep(linger * 2).await;
    server.rows([3]).await;
    tokio::time::sleep(linger * 5).await;
    server.rows([4]).await;
    server.settle().await;
    assert_eq!(server.batch().await.batch, [2], "waits to be taken");
    assert_eq!(server.batch().await.batch, [3, 4], "grew meanwhile");
}

#[tokio::test(start_paused = true)]
async fn bytes_are_acknowledged_when_the_next_batch_is_asked_for_and_not_before() {
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
    assert!(server.input.is_empty() && server.nothing_sent().await, "nobody has asked");
    let bytes: u64 = batches.iter().map(|batch| batch.credit.bytes()).sum();
    // The marker came before any row: nothing the application takes brings its 44 bytes back.
    assert!(bytes == 12 * ROW || bytes == 12 * ROW + 44, "{bytes}");
    for batch in batches {
        batch.credit.give_back();
    }
    assert!(server.ack().await >= WINDOW / 2, "more than half of the window at once");
}

#[tokio::test(start_paused = true)]
async fn a_full_window_hands_the_open_batch_over() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    // Nothing else would ever cut it, and the server may not go on.
    server.rows(1..=u64::from(WINDOW) / ROW).await;
    let mut rows = server.batch().await.rows;
    while rows < usize::try_from(u64::from(WINDOW) / ROW).unwrap() / 2 {
        rows += server.batch().await.rows;
    }
}

#[tokio::test(start_paused = true)]
async fn signs_of_life_are_answered_while_the_application_takes_nothing() {
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
async fn a_silent_server_is_given_up_with_what_it_sent_delivered() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.rows(1..=5).await;
    let began = now();
    let Report::Lost { streams, error } = server.report().await else { panic!("not lost") };
    assert_eq!(now() - began, Duration::from_secs(40));
    assert_eq!(error.kind(), ErrorKind::ConnectionLost);
    assert_eq!(streams[0].1.position.seqno, Seqno(5), "the next connection goes on behind it");
    let batch = server.batch().await;
    assert_eq!(batch.batch, [1, 2, 3, 4, 5]);
    assert_eq!(batch.positions[0].position.seqno, Seqno(5));
}

#[tokio::test(start_paused = true)]
async fn what_came_before_a_socket_closed_is_delivered() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.rows(1..=5).await;
    server.io.shutdown().await.unwrap();
    let Report::Lost { streams, .. } = server.report().await else { panic!("not lost") };
    assert_eq!(streams[0].1.position.seqno, Seqno(5));
    assert_eq!(server.batch().await.batch, [1, 2, 3, 4, 5]);
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_ends_right_before_its_connection_is_lost_is_told_as_ended() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.settle().await;
    // In one piece, so that the end and the broken frame are met in one walk.
    let mut bytes = Vec::new();
    let end = StreamEnd { reason: StreamEndReason::STATE_CHANGED };
    end.encode(server.to(Vbid(0)), &mut bytes).unwrap();
    bytes.extend_from_slice(b"HTTP/1.1 400 Bad Request");
    server.io.write_all(&bytes).await.unwrap();
    let Report::Ended { vbid, .. } = server.report().await else { panic!("not ended") };
    assert_eq!(vbid, Vbid(0));
    let Report::Lost { streams, .. } = server.report().await else { panic!("not lost") };
    assert!(streams.is_empty(), "{streams:?}");
}

#[tokio::test(start_paused = true)]
async fn a_closed_socket_and_a_broken_protocol_are_told_apart() {
    let mut server = Server::start(patient()).await;
    server.io.shutdown().await.unwrap();
    let Report::Lost { error, .. } = server.report().await else { panic!("not lost") };
    assert_eq!(error.kind(), ErrorKind::ConnectionLost);

    let mut server = Server::start(patient()).await;
    server.rows([1]).await;
    let Report::Lost { error, .. } = server.report().await else { panic!("not lost") };
    assert_eq!(error.kind(), ErrorKind::Protocol, "an item before any marker");

    let mut server = Server::start(patient()).await;
    server.io.write_all(b"HTTP/1.1 400 Bad Request").await.unwrap();
    let Report::Lost { error, .. } = server.report().await else { panic!("not lost") };
    assert_eq!(error.kind(), ErrorKind::Protocol);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_written_ends_the_connection() {
    let is_deaf = Arc::new(AtomicBool::new(false));
    let deaf = |io| Deaf { io, is_deaf: Arc::clone(&is_deaf) };
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
async fn a_packet_of_impossible_length_ends_the_connection_before_its_body_comes() {
    let max = u32::try_from(MAX_BODY_LEN).unwrap();
    for (packet, message) in [
        (announced(0, max + 1), "exceeds the limit of 31457280 bytes"),
        (announced(0, u32::MAX), "body of 4294967295 bytes exceeds"),
        (announced(200, 199), "invalid length 199 of body"),
    ] {
        let mut server = Server::start(patient()).await;
        server.marker().await;
        server.rows([1]).await;
        server.io.write_all(&packet).await.unwrap();
        let Report::Lost { error, .. } = server.report().await else { panic!("not lost") };
        assert_eq!(error.kind(), ErrorKind::Protocol);
        let text = std::iter::successors(Some(&error as &dyn std::error::Error), |e| e.source())
            .map(ToString::to_string)
            .collect::<Vec<_>>()
            .join(": ");
        assert!(text.contains(message), "{text}");
        assert_eq!(server.batch().await.batch, [1], "what came before is delivered");
    }
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_ends_is_reported_after_its_rows_are_delivered() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.rows(1..=3).await;
    server.end().await;
    let Report::Ended { cause, resume, .. } = server.report().await else { panic!("not ended") };
    assert_eq!(cause, EndCause::Ended(StreamEndReason::STATE_CHANGED));
    assert_eq!(resume.position.seqno, Seqno(3));
    assert!(!server.queue.is_empty(), "before the report, not after it");
    assert_eq!(server.batch().await.batch, [1, 2, 3]);
}

#[tokio::test(start_paused = true)]
async fn a_stream_whose_rows_are_not_delivered_is_never_reported_as_ended() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.rows([UNFIT]).await;
    server.end().await;
    let report = server.report().await;
    assert!(matches!(report, Report::SinkFailed(_)), "{report:?}: another would go on behind them");
}

#[tokio::test(start_paused = true)]
async fn how_far_vbuckets_have_come_is_reported_for_those_that_stream() {
    let mut server = Server::start(patient()).await;
    server.marker().await;
    server.rows(1..=3).await;
    server.settle().await;
    let (vbid, seqno, high_seqno) = (Vbid(0), Seqno(3), Seqno(9));
    let progress = Progress { vbid, seqno, high_seqno, is_held_up: false };
    assert_eq!(server.progress(9).await, [progress]);
}

#[tokio::test(start_paused = true)]
async fn a_vbucket_whose_window_the_application_has_filled_does_not_lag() {
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
async fn a_vbucket_whose_window_is_full_of_what_waits_for_disks_lags() {
    let delivery = Delivery { persisted_only: true, ..Delivery::default() };
    let mut server = Server::start_over(impatient(), delivery, |io| io).await;
    server.marker().await;
    server.rows(1..=u64::from(WINDOW) / ROW).await;
    server.settle().await;
    assert!(matches!(server.report().await, Report::Waiting(Vbid(0), Some(_))));
    let (vbid, seqno, high_seqno) = (Vbid(0), Seqno(0), Seqno(1000));
    let lags = Progress { vbid, seqno, high_seqno, is_held_up: false };
    assert_eq!(server.progress(1000).await, [lags], "there is nothing the application could take");
}

#[tokio::test(start_paused = true)]
async fn a_task_nobody_wants_any_more_ends() {
    let mut server = Server::start(patient()).await;
    server.cancel.cancel();
    assert!(server.reports.recv().await.is_none());
    assert_eq!(server.io.read_buf(&mut server.input).await.unwrap(), 0);
}

impl Server {
    /// How far vBuckets are said to have come when the node says that vBucket 0 is at `high`.
    async fn progress(&mut self, high: u64) -> Vec<Progress> {
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
            Report::Progress(progress) => progress,
            other => panic!("{other:?}"),
        }
    }

    async fn nothing_sent(&mut self) -> bool {
        self.settle().await;
        let read = self.io.read_buf(&mut self.input);
        let bytes = timeout(Duration::from_millis(1), read).await;
        bytes.is_err()
    }
}
