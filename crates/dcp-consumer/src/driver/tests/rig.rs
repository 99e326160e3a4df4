//! A server for one connection, as a script plays it.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use dcp_proto::OnRollback;
use dcp_proto::consumer::{ConnectionConfig, Delivery, StreamFilter};
use dcp_proto::topology::Address;
use dcp_proto::{Change, ChangeSink, Position, Rollback};
use dcp_test::peer::Peer;
use dcp_test::words::message;
use dcp_wire::message::{FailoverEntry, StreamAddress, encode_failover_log};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Status, Vbuuid};
use tokio::io::{AsyncRead, AsyncWrite, DuplexStream, ReadBuf, duplex};
use tokio::time::timeout;

use super::super::*;

pub(super) const WINDOW: u32 = 2000;
/// Bytes of one mutation on the wire.
pub(super) const ROW: u64 = 55 + 3 + 42;
/// Simulated time after which nothing comes any more.
pub(super) const WEEK: Duration = Duration::from_secs(7 * 24 * 3600);
/// Seqno of a row that no batch can be made with.
pub(super) const UNFIT: u64 = 666;

#[derive(Default)]
pub(super) struct Seqnos(Vec<u64>);

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
pub(super) struct Server {
    pub(super) peer: Peer<DuplexStream>,
    pub(super) opaque: Opaque,
    pub(super) queue: Arc<Queue<Vec<u64>>>,
    pub(super) commands: mpsc::UnboundedSender<Command>,
    pub(super) reports: mpsc::UnboundedReceiver<(ConnectionId, Report)>,
    pub(super) cancel: CancellationToken,
}

/// What a pipe does otherwise than others.
pub(super) trait Hook: Send + Unpin {
    fn poll_read(
        &mut self,
        io: &mut DuplexStream,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(io).poll_read(cx, buffer)
    }

    /// Whether anything may be written.
    fn write(&mut self) -> io::Result<()> {
        Ok(())
    }

    /// As [`Gather::ready_from`].
    fn ready_from(&self, _: usize) -> bool {
        false
    }
}

/// The task's end of the pipe.
pub(super) struct Pipe<H> {
    io: DuplexStream,
    hook: H,
}

/// Nothing is otherwise.
impl Hook for () {}

/// Takes nothing any more once that is said. Reading from it does not tell.
pub(super) struct Deaf(pub(super) Arc<AtomicBool>);

impl Hook for Deaf {
    fn write(&mut self) -> io::Result<()> {
        match self.0.load(Ordering::Relaxed) {
            true => Err(io::ErrorKind::BrokenPipe.into()),
            false => Ok(()),
        }
    }
}

/// Asks for vBucket 1 the moment it next reads something, and then breaks if it is to.
pub(super) struct Late {
    pub(super) breaks: bool,
    pub(super) commands: Arc<Mutex<Option<mpsc::UnboundedSender<Command>>>>,
}

impl Hook for Late {
    fn poll_read(
        &mut self,
        io: &mut DuplexStream,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        std::task::ready!(Pin::new(io).poll_read(cx, buffer))?;
        let Some(commands) = self.commands.lock().unwrap().take() else {
            return Poll::Ready(Ok(()));
        };
        let from = Box::new(StreamPosition::new(Position::EARLIEST));
        let open = Command::Open { vbid: Vbid(1), end_seqno: Seqno::MAX, from };
        commands.send(Command::FetchMap).unwrap();
        commands.send(open).unwrap();
        Poll::Ready(match self.breaks {
            true => Err(io::ErrorKind::ConnectionReset.into()),
            false => Ok(()),
        })
    }
}

impl<H: Hook> AsyncRead for Pipe<H> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Self { io, hook } = &mut *self;
        hook.poll_read(io, cx, buffer)
    }
}

impl<H: Hook> AsyncWrite for Pipe<H> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.hook.write()?;
        Pin::new(&mut self.io).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

impl<H: Hook> Gather for Pipe<H> {
    fn ready_from(&self, bytes: usize) -> bool {
        self.hook.ready_from(bytes)
    }
}

impl Server {
    /// With vBucket 0 streaming, up to a far end.
    pub(super) async fn start(policy: BatchPolicy) -> Self {
        Self::start_over(policy, Delivery::default(), ()).await
    }

    /// The same, with vBucket 1 streaming without an end.
    pub(super) async fn start_endless(policy: BatchPolicy) -> Self {
        let mut server = Self::start(policy).await;
        let opaque = server.opaque;
        server.open_until(Vbid(1), Seqno::MAX).await;
        server.opaque = opaque;
        server
    }

    /// The same, over another kind of pipe and with another delivery.
    pub(super) async fn start_over(
        policy: BatchPolicy,
        delivery: Delivery,
        hook: impl Hook + 'static,
    ) -> Self {
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
            stream_end_on_close: true,
            ignore_purged_tombstones: false,
            on_rollback: OnRollback::Emit,
            delivery,
            max_body_len: MAX_BODY_LEN,
        };
        let (address, pipe) = (Address::new("node", 11210), Pipe { io: far, hook });
        let driver = Driver {
            id: ConnectionId(1),
            connection: NodeConnection::new(address, pipe, &[], config),
            sink: Seqnos::default(),
            policy,
            queue: Arc::clone(&queue),
            shared: Arc::default(),
            load: Arc::default(),
            commands: receiver,
            reports: sender,
            cancel: cancel.clone(),
        };
        tokio::spawn(driver.run());
        let peer = Peer::new(io).with_limit(WEEK);
        let mut server = Self { peer, opaque: Opaque(0), queue, commands, reports, cancel };
        server.open(Vbid(0)).await;
        server
    }

    pub(super) async fn open(&mut self, vbid: Vbid) {
        self.open_until(vbid, Seqno(1 << 40)).await;
    }

    async fn open_until(&mut self, vbid: Vbid, end_seqno: Seqno) {
        let from = Box::new(StreamPosition::new(Position::EARLIEST));
        self.commands.send(Command::Open { vbid, end_seqno, from }).unwrap();
        let (opcode, opaque, _) = self.receive().await;
        assert_eq!(opcode, Opcode::DCP_STREAM_REQ);
        self.opaque = opaque;
        let mut log = Vec::new();
        encode_failover_log([FailoverEntry { vbuuid: Vbuuid(1), seqno: Seqno(0) }], &mut log);
        let answer = Frame::response(Opcode::DCP_STREAM_REQ, Status::SUCCESS);
        self.send_frame(&answer.with_opaque(opaque).with_value(&log)).await;
        assert!(matches!(self.report().await, Report::Opened { .. }));
    }

    /// The next packet the task sends: opcode, opaque, extras.
    pub(super) async fn receive(&mut self) -> (Opcode, Opaque, Vec<u8>) {
        let packet = self.peer.receive().await;
        (packet.opcode(), packet.opaque(), packet.frame().extras.to_vec())
    }

    /// Bytes of the next acknowledgement.
    pub(super) async fn ack(&mut self) -> u32 {
        let (opcode, _, extras) = self.receive().await;
        assert_eq!(opcode, Opcode::DCP_BUFFER_ACK);
        u32::from_be_bytes(extras.try_into().unwrap())
    }

    pub(super) async fn send_frame(&mut self, frame: &Frame<'_>) {
        self.peer.send_frame(frame).await;
    }

    /// Messages of the stream of vBucket 0, in one piece.
    pub(super) fn said(&self, messages: impl IntoIterator<Item = impl AsRef<str>>) -> Vec<u8> {
        let to = StreamAddress { vbid: Vbid(0), opaque: self.opaque, stream_id: None };
        messages.into_iter().flat_map(|words| message(words.as_ref(), to)).collect()
    }

    pub(super) async fn say(&mut self, words: &str) {
        let bytes = self.said([words]);
        self.peer.send(&bytes).await;
    }

    pub(super) async fn marker(&mut self) {
        self.say("MARK [0-1000] 0x1").await;
    }

    pub(super) async fn rows(&mut self, seqnos: impl IntoIterator<Item = u64>) {
        let value = "v".repeat(42);
        let rows = seqnos.into_iter().map(|seqno| format!("MUT {seqno} key {value}"));
        let bytes = self.said(rows);
        self.peer.send(&bytes).await;
    }

    /// The stream ends, to resume elsewhere.
    pub(super) async fn end(&mut self) {
        self.say("END 2").await;
    }

    pub(super) async fn report(&mut self) -> Report {
        let report = timeout(WEEK, self.reports.recv()).await;
        report.expect("no report comes").unwrap().1
    }

    pub(super) async fn batch(&mut self) -> Queued<Vec<u64>> {
        match timeout(WEEK, poll_fn(|context| self.queue.poll_pop(context)))
            .await
            .expect("no batch comes")
        {
            Entry::Batch(batch) => batch,
            other => panic!("{other:?}"),
        }
    }

    /// Lets the task do everything it can do without time passing.
    pub(super) async fn settle(&self) {
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
    }
}
