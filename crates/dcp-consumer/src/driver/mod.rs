//! The task of one connection: reads, decodes, cuts batches, writes.

mod over;
mod pace;

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;

use bytes::{Buf, BytesMut};
use dcp_proto::consumer::{
    CollectionSeqnos, Connection, ConnectionError, EndCause, Event, Hidden, Limit, StreamFilter,
    StreamPosition, Unpersisted,
};
use dcp_proto::topology::Address;
use dcp_proto::{BatchSink, CaughtUp, Rollback, SinkError};
use dcp_wire::{CollectionId, Seqno, Vbid, Vbuuid};
use tokio::io::{AsyncWriteExt, ReadBuf};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use self::over::Over;
use self::pace::{PAUSE, Pace};
use crate::connect::ConnectionId;
use crate::persistence::PersistedTo;
use crate::queue::{Credit, Entry, Link, Queue, Queued};
use crate::read_buffer::{MIN_READ, ReadBuffer, SIZE};
use crate::socket::Gather;
use crate::{BatchPolicy, Error};

/// Commands for a connection's task.
#[derive(Debug)]
pub(crate) enum Command {
    /// Use this filter for future streams.
    Filter(StreamFilter),
    /// Leave out these documents as well.
    Hide(Hidden),
    /// Open a stream.
    Open { vbid: Vbid, end_seqno: Seqno, from: Box<StreamPosition> },
    /// Close a stream; it is reported as ended.
    Close(Vbid),
    /// Persisted seqnos of vBuckets.
    Persisted(Vec<PersistedTo>),
    /// Fetch the cluster map.
    FetchMap,
    /// Fetch the node's high seqnos.
    FetchHighSeqnos,
    /// Fetch those of collections.
    FetchCollectionSeqnos(Arc<[CollectionId]>),
}

/// Reports of a connection's task. All changes of a vBucket are in the queue before the report of
/// its end, so that another connection can resume it.
#[derive(Debug)]
pub(crate) enum Report {
    /// A stream was opened.
    Opened { vbid: Vbid, persists_on: Option<Vbuuid> },
    /// A stream ended.
    Ended { vbid: Vbid, cause: EndCause, from: Box<StreamPosition> },
    /// A vBucket was rolled back.
    RolledBack(Rollback),
    /// Everything that a vBucket had when the stream was opened has been delivered.
    CaughtUp(CaughtUp),
    /// Changes of a vBucket on this branch wait to be persisted on all copies; `None`: none are
    /// waiting.
    Unpersisted(Vbid, Option<Vbuuid>),
    /// Progress of the vBuckets that stream here.
    Progress(Vec<Progress>),
    /// Seqnos of collections, and the progress of the vBuckets that stream here, without high
    /// seqnos.
    Collections(Vec<CollectionSeqnos>, Vec<Progress>),
    /// Documents that are left out, some of them newly.
    Hidden(Hidden),
    /// The connection has a new cluster map to take.
    Map(Arc<Link>),
    /// The connection ended, with these streams, including those still to be opened.
    Lost { streams: Vec<(Vbid, StreamPosition)>, error: Error },
    /// The sink failed.
    SinkFailed(SinkError),
}

/// Progress of a vBucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) vbid: Vbid,
    /// Last seqno received.
    pub(crate) seqno: Seqno,
    /// Highest seqno of the server.
    pub(crate) high_seqno: Seqno,
    /// Whether the vBucket waits for the application.
    pub(crate) is_held_up: bool,
    /// Whether it waits for an end that the server no longer has.
    pub(crate) has_lost_end: bool,
}

/// The parts of a connection's task.
pub(crate) struct Driver<S: BatchSink> {
    pub(crate) id: ConnectionId,
    /// The node.
    pub(crate) peer: Address,
    pub(crate) machine: Connection,
    pub(crate) sink: S,
    pub(crate) policy: BatchPolicy,
    /// Flow-control window in bytes.
    pub(crate) window: u64,
    pub(crate) max_body_len: usize,
    pub(crate) queue: Arc<Queue<S::Batch>>,
    pub(crate) link: Arc<Link>,
    pub(crate) commands: mpsc::UnboundedReceiver<Command>,
    pub(crate) reports: mpsc::UnboundedSender<(ConnectionId, Report)>,
    pub(crate) cancel: CancellationToken,
}

impl<S: BatchSink> Driver<S> {
    /// Drives the connection until it is lost or no longer needed. `leftover` arrived after the
    /// last answer of its set-up.
    ///
    /// Returns the connection and the bytes read ahead, if all of its streams were complete when it
    /// was no longer needed: then others may be opened on it.
    pub(crate) async fn run<IO>(self, io: IO, leftover: BytesMut) -> Option<(IO, BytesMut)>
    where
        IO: Gather,
    {
        let pace = Pace::new(self.policy.linger, now());
        let buffer = ReadBuffer::new(&leftover, self.max_body_len);
        let task = Task {
            driver: self,
            io,
            buffer,
            pace,
            is_marked: false,
            commands: Vec::new(),
            out: BytesMut::new(),
            flush: false,
            open_streams: 0,
            opened_at: None,
            deferred: Vec::new(),
            is_clean: true,
        };
        task.run().await
    }
}

/// State of the running task.
struct Task<S: BatchSink, IO> {
    driver: Driver<S>,
    io: IO,
    buffer: ReadBuffer,
    pace: Pace,
    /// Whether the transport is ready only from more than one byte on.
    is_marked: bool,
    /// Commands that were received together.
    commands: Vec<Command>,
    /// Bytes to write.
    out: BytesMut,
    /// Whether written bytes may still be in the encryption layer.
    flush: bool,
    /// Streams that have not ended.
    open_streams: usize,
    /// When the open batch got its first row, or a position moved without one.
    opened_at: Option<Instant>,
    /// Reports that wait until the sink's rows are in the queue.
    deferred: Vec<Report>,
    /// Whether every stream so far has ended at its end, so that no late messages can arrive.
    is_clean: bool,
}

/// What the socket was ready for.
enum Io {
    Read(usize),
    /// All available data was read.
    Dry,
    Wrote,
}

/// How a socket is read.
#[derive(Clone, Copy)]
enum Reading {
    /// Not now.
    Not,
    /// Until no data is available.
    UntilDry,
    /// Whenever data is available.
    Ever,
}

impl<S: BatchSink, IO: Gather> Task<S, IO> {
    async fn run(mut self) -> Option<(IO, BytesMut)> {
        let over = loop {
            if let Err(over) = self.turn().await {
                break over;
            }
        };
        if matches!(over, Over::Dismissed) {
            return self.wind_down().await;
        }
        self.finish(over);
        None
    }

    /// Restores a connection whose streams are complete to its initial state: the server has ended
    /// each stream and has its full window again.
    async fn wind_down(mut self) -> Option<(IO, BytesMut)> {
        self.mark(false);
        while self.is_clean && self.driver.machine.is_complete() {
            self.driver.machine.acknowledge_all();
            self.driver.machine.poll_transmit(&mut self.out);
            if self.out.is_empty() && self.driver.machine.is_unused() {
                self.io.flush().await.ok()?;
                return Some((self.io, BytesMut::from(self.buffer.filled())));
            }
            let space = self.buffer.space().ok()?;
            let (io, out, flush) = (&mut self.io, &mut self.out, &mut self.flush);
            if let Io::Read(len) = ready(io, space, out, flush, Reading::Ever).await.ok()? {
                self.buffer.filled_by(len);
            }
            let Driver { machine, sink, .. } = &mut self.driver;
            let walk = machine.handle_input(now(), self.buffer.filled(), Limit::NONE, sink).ok()?;
            self.buffer.consume(walk.consumed);
            while machine.poll_event().is_some() {}
        }
        None
    }

    /// One turn: handles what has arrived, then waits for the next event. The work of a turn is
    /// bounded by the read buffer.
    async fn turn(&mut self) -> Result<(), Over> {
        self.process()?;
        self.driver.machine.poll_transmit(&mut self.out);
        let deadline = self.deadline();
        let sleep = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        let peer = &self.driver.peer;
        let space = self.buffer.space().map_err(ConnectionError::Framing);
        let space = space.map_err(|error| Over::given_up(peer, error))?;
        let reading = match self.pace.gathers_until() {
            Some(_) if !self.is_marked => Reading::Not,
            _ if self.pace.asks() => Reading::UntilDry,
            _ => Reading::Ever,
        };
        let ready = ready(&mut self.io, space, &mut self.out, &mut self.flush, reading);
        tokio::select! {
            biased;
            () = self.driver.cancel.cancelled() => return Err(Over::Dismissed),
            // Together, so that streams which ask where they end share one request.
            received = self.driver.commands.recv_many(&mut self.commands, MAX_COMMANDS) => {
                if received == 0 {
                    return Err(Over::Dismissed);
                }
                for command in std::mem::take(&mut self.commands) {
                    self.command(command);
                }
            }
            () = self.driver.link.wake.notified() => {}
            ready = ready => match ready {
                Ok(Io::Read(len)) => {
                    self.buffer.filled_by(len);
                    self.pace.took(len);
                }
                Ok(Io::Dry) => self.run_dry(),
                Ok(Io::Wrote) => {}
                Err(error) => return Err(Over::broken(peer, error)),
            },
            () = sleep => {
                let now = now();
                if self.pace.is_due(now) {
                    self.mark(false);
                }
                let timeout = self.driver.machine.handle_timeout(now);
                timeout.map_err(|error| Over::given_up(&self.driver.peer, error))?;
            }
        }
        Ok(())
    }

    /// All available data was read: new data may gather, unless the window has no room for it,
    /// which would stall the server, or something else is due soon.
    fn run_dry(&mut self) {
        let now = now();
        let Driver { machine, window, .. } = &self.driver;
        let has_room = *window == 0
            || window.saturating_sub(machine.unacknowledged()) >= low_mark(*window) as u64;
        let has_time = machine.poll_timeout().is_none_or(|at| at > now + 2 * PAUSE);
        let gathers = self.pace.ran_dry(now, has_room && has_time);
        self.mark(gathers);
    }

    /// Makes the transport ready only from the low-water mark on, or from the first byte.
    fn mark(&mut self, is_wanted: bool) {
        if is_wanted != self.is_marked {
            let bytes = if is_wanted { low_mark(self.driver.window) } else { 1 };
            self.is_marked = self.io.ready_from(bytes) && is_wanted;
        }
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Open { vbid, end_seqno, from } => {
                let fallback = from.clone();
                match self.driver.machine.open_stream(vbid, end_seqno, *from) {
                    Ok(()) => self.open_streams += 1,
                    Err(misuse) => {
                        // Reported as an end, so that the vBucket is reopened.
                        tracing::error!(%misuse, "a stream could not be requested");
                        let (cause, from) = (EndCause::Closed, fallback);
                        self.report(Report::Ended { vbid, cause, from });
                    }
                }
            }
            Command::Close(vbid) => {
                self.is_clean = false;
                self.driver.machine.close_stream(vbid);
            }
            Command::Persisted(advanced) => {
                for PersistedTo { vbid, vbuuid, seqno, .. } in advanced {
                    self.driver.machine.persisted(vbid, vbuuid, seqno);
                }
            }
            Command::Filter(filter) => self.driver.machine.set_filter(filter),
            Command::Hide(hidden) => self.driver.machine.hide(&hidden),
            Command::FetchMap => self.driver.machine.request_cluster_map(),
            Command::FetchHighSeqnos => self.driver.machine.request_high_seqnos(),
            Command::FetchCollectionSeqnos(ids) => {
                self.driver.machine.request_collection_seqnos(&ids);
            }
        }
    }

    /// Handles what has arrived and cuts batches.
    fn process(&mut self) -> Result<(), Over> {
        let now = now();
        let returned = self.driver.link.take_returned();
        if returned > 0 {
            self.driver.machine.release(now, returned);
        }
        loop {
            let limit = self.limit();
            let Driver { machine, sink, peer, .. } = &mut self.driver;
            let walk = machine.handle_input(now, self.buffer.filled(), limit, sink);
            let walk = walk.map_err(|error| Over::given_up(peer, error))?;
            self.buffer.consume(walk.consumed);
            let released = self.drain_events();
            if released || self.is_full() {
                self.cut(now)?;
            }
            if !walk.limited {
                break;
            }
        }
        let driver = &mut self.driver;
        if driver.sink.rows() == 0 {
            // The application has nothing to take that would release these bytes.
            let held = driver.machine.take_held();
            if held > 0 {
                driver.machine.release(now, held);
            }
        }
        if self.opened_at.is_none() && self.has_open_batch() {
            self.opened_at = Some(now);
        }
        if self.has_lingered(now) {
            self.cut(now)?;
        }
        let driver = &self.driver;
        let machine = &driver.machine;
        driver.link.publish(*machine.stats(), machine.unacknowledged(), machine.unpersisted());
        Ok(())
    }

    /// Remaining room of the open batch, but no more than a read gives, even of a window of persisted
    /// changes: compressed ones take many times as much in the sink, which shows only afterwards.
    fn limit(&self) -> Limit {
        let Driver { sink, policy, .. } = &self.driver;
        Limit {
            rows: policy.max_rows.saturating_sub(sink.rows()).max(1),
            bytes: policy.max_bytes.saturating_sub(sink.size_bytes()).clamp(1, SIZE),
        }
    }

    /// Whether the open batch must be delivered: it has reached its maximum size, it holds half of
    /// the window, so that the producer can fill the other half meanwhile, or the producer is
    /// stalled and the application has nothing else to take.
    fn is_full(&self) -> bool {
        let Driver { machine, sink, policy, window, link, .. } = &self.driver;
        if sink.rows() == 0 {
            return false;
        }
        sink.rows() >= policy.max_rows
            || sink.size_bytes() >= policy.max_bytes
            || (*window > 0 && machine.held() * 2 >= *window)
            || (machine.is_window_full() && !link.awaits_taking())
    }

    fn has_open_batch(&self) -> bool {
        let Driver { machine, sink, .. } = &self.driver;
        sink.rows() > 0 || machine.has_moved() || !self.deferred.is_empty()
    }

    /// When the open batch is delivered even if it is small: never while the application has
    /// another batch of this connection to take.
    fn linger_until(&self) -> Option<Instant> {
        let at = self.opened_at?.checked_add(self.driver.policy.linger)?;
        (!self.driver.link.awaits_taking()).then_some(at)
    }

    fn has_lingered(&self, now: Instant) -> bool {
        self.linger_until().is_some_and(|at| now >= at)
    }

    fn deadline(&self) -> Option<Instant> {
        let timeouts =
            [self.driver.machine.poll_timeout(), self.linger_until(), self.pace.gathers_until()];
        timeouts.into_iter().flatten().min()
    }

    /// Handles events of the machine; `true` if the open batch must be delivered first.
    fn drain_events(&mut self) -> bool {
        let mut cut = false;
        while let Some(event) = self.driver.machine.poll_event() {
            match event {
                Event::StreamOpened { vbid, persists_on } => {
                    self.report(Report::Opened { vbid, persists_on });
                }
                Event::StreamEnded { vbid, cause, from } => {
                    self.open_streams = self.open_streams.saturating_sub(1);
                    // A complete vBucket is not resumed, so its rows may wait for those of others,
                    // if there are others.
                    cut |= cause != EndCause::Complete || self.open_streams == 0;
                    self.is_clean &= cause == EndCause::Complete;
                    self.deferred.push(Report::Ended { vbid, cause, from });
                }
                Event::CaughtUp(caught_up) => self.deferred.push(Report::CaughtUp(caught_up)),
                Event::RolledBack(rollback) => self.report(Report::RolledBack(rollback)),
                Event::Unpersisted { vbid, vbuuid } => {
                    self.report(Report::Unpersisted(vbid, vbuuid));
                }
                Event::HighSeqnos(seqnos) => {
                    self.report(Report::Progress(self.progress(seqnos)));
                }
                Event::CollectionSeqnos(answers) => {
                    let vbids = (0..self.driver.machine.num_vbuckets()).map(Vbid);
                    let streaming = self.progress(vbids.map(|vbid| (vbid, Seqno::ZERO)));
                    self.report(Report::Collections(answers, streaming));
                }
                Event::Hidden(hidden) => self.report(Report::Hidden(hidden)),
                Event::ClusterMap(json) => {
                    if self.driver.link.offer_map(json) {
                        self.report(Report::Map(Arc::clone(&self.driver.link)));
                    }
                }
                Event::ClusterMapChanged => self.driver.machine.request_cluster_map(),
                event => tracing::debug!(?event, "an unexpected event"),
            }
        }
        cut
    }

    /// Progress of those of these vBuckets that stream here.
    fn progress(&self, high_seqnos: impl IntoIterator<Item = (Vbid, Seqno)>) -> Vec<Progress> {
        let Driver { machine, link, .. } = &self.driver;
        // If unpersisted changes fill the window, the application cannot empty it.
        let is_full = machine.is_window_full() && machine.unpersisted() == Unpersisted::default();
        let is_held_up = is_full || link.has_queued();
        let progress = |(vbid, high_seqno): (Vbid, Seqno)| {
            let has_lost_end = machine.has_lost_end(vbid, high_seqno);
            let seqno = machine.seqno(vbid)?;
            Some(Progress { vbid, seqno, high_seqno, is_held_up, has_lost_end })
        };
        high_seqnos.into_iter().filter_map(progress).collect()
    }

    /// Puts the sink's rows into the queue, then sends the deferred reports.
    fn cut(&mut self, now: Instant) -> Result<(), SinkError> {
        let driver = &mut self.driver;
        let positions = driver.machine.take_positions();
        let held = driver.machine.take_held();
        let rows = driver.sink.rows();
        if rows > 0 {
            let batch = driver.sink.take_batch()?;
            let credit = Credit::new(Arc::clone(&driver.link), held);
            driver.queue.push(Entry::Batch(Queued { batch, rows, positions, credit }));
        } else {
            if !positions.is_empty() {
                driver.queue.push(Entry::Positions(positions));
            }
            driver.machine.release(now, held);
        }
        self.opened_at = None;
        for report in std::mem::take(&mut self.deferred) {
            self.report(report);
        }
        Ok(())
    }

    fn report(&self, report: Report) {
        // There is no receiver only if the stream has ended, when the report is irrelevant.
        let _ = self.driver.reports.send((self.driver.id, report));
    }

    /// Delivers the sink's rows, then reports the streams to resume elsewhere, including those
    /// still to be opened. Changes before an error are valid: rows and positions belong together,
    /// and the next connection resumes after them.
    fn finish(mut self, over: Over) {
        let error = match over {
            Over::Dismissed => return,
            Over::Sink(error) => return self.report(Report::SinkFailed(error)),
            Over::Lost(error) => error,
        };
        // Streams that ended before the error are no longer in the machine.
        self.drain_events();
        if let Err(error) = self.cut(now()) {
            return self.report(Report::SinkFailed(error));
        }
        let Driver { id, machine, reports, link, mut commands, .. } = self.driver;
        link.publish(*machine.stats(), 0, Unpersisted::default());
        let mut streams = machine.into_streams();
        // From here on, sending a stream to open fails. The other commands concern only this
        // connection.
        commands.close();
        while let Ok(command) = commands.try_recv() {
            if let Command::Open { vbid, from, .. } = command {
                streams.push((vbid, *from));
            }
        }
        let _ = reports.send((id, Report::Lost { streams, error }));
    }
}

/// Maximum number of commands in one turn.
const MAX_COMMANDS: usize = 1024;

/// Bytes of unsent output above which nothing is read: a peer that causes output without reading it
/// has to wait.
const MAX_UNWRITTEN: usize = 1 << 20;

/// Bytes that are worth a read, but few enough not to stall the server.
fn low_mark(window: u64) -> usize {
    match usize::try_from(window / 8) {
        Ok(part) if window > 0 => part.min(MIN_READ),
        _ => MIN_READ,
    }
}

/// Waits to read or write: a connection that is not read while it is written could deadlock with
/// the server.
async fn ready<IO: Gather>(
    io: &mut IO,
    space: &mut [u8],
    out: &mut BytesMut,
    flush: &mut bool,
    reading: Reading,
) -> io::Result<Io> {
    poll_fn(|cx| {
        if !out.is_empty() {
            if let Poll::Ready(written) = Pin::new(&mut *io).poll_write(cx, out) {
                let written = written?;
                if written == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                out.advance(written);
                *flush = true;
                return Poll::Ready(Ok(Io::Wrote));
            }
            if out.len() > MAX_UNWRITTEN {
                return Poll::Pending;
            }
        } else if *flush && let Poll::Ready(flushed) = Pin::new(&mut *io).poll_flush(cx) {
            flushed?;
            *flush = false;
        }
        if matches!(reading, Reading::Not) {
            return Poll::Pending;
        }
        let mut read = ReadBuf::new(&mut *space);
        match Pin::new(&mut *io).poll_read(cx, &mut read) {
            Poll::Pending if matches!(reading, Reading::UntilDry) => Poll::Ready(Ok(Io::Dry)),
            Poll::Pending => Poll::Pending,
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) if read.filled().is_empty() => {
                Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()))
            }
            Poll::Ready(Ok(())) => Poll::Ready(Ok(Io::Read(read.filled().len()))),
        }
    })
    .await
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

#[cfg(test)]
mod tests;
