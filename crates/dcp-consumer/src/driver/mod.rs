//! The task of one connection: reads, decodes, cuts batches, writes.

mod exit;
mod pace;

use std::sync::Arc;
use std::time::Instant;

use dcp_proto::consumer::{
    CollectionSeqnos, EndCause, Event, Exclusions, Limit, StreamFilter, StreamPosition, Unpersisted,
};
use dcp_proto::{BatchSink, CaughtUp, Rollback, SinkError};
use dcp_wire::{CollectionId, Seqno, Vbid, Vbuuid};
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use self::exit::Exit;
pub(crate) use self::pace::Load;
use self::pace::{PAUSE, Pace};
use crate::connect::ConnectionId;
use crate::connection::{Io, Lost, NodeConnection, Reading, now, sleep_until};
use crate::queue::{Credit, Entry, Queue, Queued, SharedState};
use crate::read_buffer::{MIN_READ, SIZE, SMALL};
use crate::socket::Gather;
use crate::{BatchPolicy, Error};

/// Commands for a connection's task.
#[derive(Debug)]
pub(crate) enum Command {
    /// Use this filter for future streams.
    Filter(StreamFilter),
    /// Leave out these documents as well.
    Exclude(Exclusions),
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
    HighSeqnos(Vec<VbucketProgress>),
    /// Seqnos of collections, and the progress of the vBuckets that stream here, without high
    /// seqnos.
    CollectionSeqnos(Vec<CollectionSeqnos>, Vec<VbucketProgress>),
    /// Documents that are left out, some of them newly.
    Exclusions(Exclusions),
    /// The connection has a new cluster map to take.
    Map(Arc<SharedState>),
    /// The connection ended, with these streams, including those still to be opened.
    Lost { streams: Vec<(Vbid, StreamPosition)>, error: Error },
    /// The sink failed.
    SinkFailed(SinkError),
}

/// New persisted seqno of a connection's vBucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PersistedTo {
    pub(crate) on: ConnectionId,
    pub(crate) vbid: Vbid,
    pub(crate) vbuuid: Vbuuid,
    /// Persisted seqno of all copies; 0 while one has another branch, or does not answer.
    pub(crate) seqno: Seqno,
}

/// Progress of a vBucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct VbucketProgress {
    pub(crate) vbid: Vbid,
    /// Last seqno received.
    pub(crate) seqno: Seqno,
    /// Highest seqno of the server.
    pub(crate) high_seqno: Seqno,
    /// Whether the vBucket waits for the application.
    pub(crate) is_held_up: bool,
    /// Whether it waits for an end that the server no longer has.
    pub(crate) has_lost_end: bool,
    /// Whether it waits for the rest of a snapshot that the server sends at once.
    pub(crate) awaits_snapshot_end: bool,
}

/// The parts of a connection's task.
pub(crate) struct Driver<S: BatchSink, IO> {
    pub(crate) id: ConnectionId,
    pub(crate) connection: NodeConnection<IO>,
    pub(crate) sink: S,
    pub(crate) policy: BatchPolicy,
    pub(crate) queue: Arc<Queue<S::Batch>>,
    pub(crate) shared: Arc<SharedState>,
    /// Of all connections of the stream.
    pub(crate) load: Arc<Load>,
    pub(crate) commands: mpsc::UnboundedReceiver<Command>,
    pub(crate) reports: mpsc::UnboundedSender<(ConnectionId, Report)>,
    pub(crate) cancel: CancellationToken,
}

impl<S: BatchSink, IO: Gather> Driver<S, IO> {
    /// Drives the connection until it is lost or no longer needed.
    ///
    /// Returns it if all of its streams were complete when it was no longer needed: then others may
    /// be opened on it.
    pub(crate) async fn run(mut self) -> Option<NodeConnection<IO>> {
        self.connection.buffer.resize(SIZE);
        let task = Task {
            pace: Pace::new(self.policy.linger, now()),
            driver: self,
            is_marked: false,
            commands: Vec::new(),
            open_streams: 0,
            is_endless: false,
            opened_at: None,
            deferred: Vec::new(),
            is_clean: true,
        };
        task.run().await
    }
}

/// State of the running task.
struct Task<S: BatchSink, IO> {
    driver: Driver<S, IO>,
    pace: Pace,
    /// Whether the transport is ready only from more than one byte on.
    is_marked: bool,
    /// Commands that were received together.
    commands: Vec<Command>,
    /// Streams that have not ended.
    open_streams: usize,
    /// Whether a stream without an end was opened.
    is_endless: bool,
    /// When the open batch got its first row, or a position moved without one.
    opened_at: Option<Instant>,
    /// Reports that wait until the sink's rows are in the queue.
    deferred: Vec<Report>,
    /// Whether every stream so far has ended at its end, so that no late messages can arrive.
    is_clean: bool,
}

impl<S: BatchSink, IO: Gather> Task<S, IO> {
    async fn run(mut self) -> Option<NodeConnection<IO>> {
        let exit = loop {
            if let Err(exit) = self.turn().await {
                break exit;
            }
        };
        if matches!(exit, Exit::Dismissed) {
            return self.wind_down().await;
        }
        self.finish(exit);
        None
    }

    /// Restores a connection whose streams are complete to its initial state: the server has ended
    /// each stream and has its full window again.
    async fn wind_down(mut self) -> Option<NodeConnection<IO>> {
        self.mark(false);
        let mut connection = self.driver.connection;
        while self.is_clean && connection.machine.is_complete() {
            connection.machine.acknowledge_all();
            if connection.is_idle() {
                connection.io.flush().await.ok()?;
                connection.buffer.resize(SMALL);
                return Some(connection);
            }
            connection.wait().await.ok()?;
            connection.handle_input().ok()?;
            while connection.poll_event().is_some() {}
        }
        None
    }

    /// One turn: handles what has arrived, then waits for the next event. The work of a turn is
    /// bounded by the read buffer.
    async fn turn(&mut self) -> Result<(), Exit> {
        self.process()?;
        let deadline = self.deadline();
        let reading = match self.pace.gathers_until() {
            Some(_) if !self.is_marked => Reading::Not,
            _ if self.pace.asks() => Reading::UntilDry,
            _ => Reading::Ever,
        };
        let driver = &mut self.driver;
        tokio::select! {
            biased;
            () = driver.cancel.cancelled() => return Err(Exit::Dismissed),
            // Together, so that streams which ask where they end share one request.
            received = driver.commands.recv_many(&mut self.commands, MAX_COMMANDS) => {
                if received == 0 {
                    return Err(Exit::Dismissed);
                }
                for command in std::mem::take(&mut self.commands) {
                    self.command(command);
                }
            }
            () = driver.shared.wake.notified() => {}
            ready = driver.connection.ready(reading) => match ready {
                Ok(Io::Read(len)) => self.pace.took(len),
                Ok(Io::Dry) => self.run_dry(),
                Ok(Io::Wrote) => {}
                Err(lost) => return Err(self.lost(lost)),
            },
            () = sleep_until(deadline) => {
                let now = now();
                if self.pace.is_due(now) {
                    self.mark(false);
                }
                let timeout = self.driver.connection.machine.handle_timeout(now);
                timeout.map_err(|error| self.lost(error.into()))?;
            }
        }
        Ok(())
    }

    fn lost(&self, lost: Lost) -> Exit {
        Exit::of(&self.driver.connection.address, lost)
    }

    /// All available data was read: new data may gather, unless the window has no room for it,
    /// which would stall the server, or something else is due soon.
    fn run_dry(&mut self) {
        let now = now();
        let (machine, window) = (&self.driver.connection.machine, self.window());
        let has_room = window == 0
            || window.saturating_sub(machine.unacknowledged()) >= low_mark(window) as u64;
        let has_time = machine.poll_timeout().is_none_or(|at| at > now + 2 * PAUSE);
        let Driver { id, load, .. } = &self.driver;
        let gathers = self.pace.ran_dry(now, has_room && has_time, load.is_on_others(*id, now));
        if self.pace.is_loaded() {
            load.note(*id, now);
        }
        self.mark(gathers);
    }

    /// Makes the transport ready only from the low-water mark on, or from the first byte.
    fn mark(&mut self, is_wanted: bool) {
        if is_wanted != self.is_marked {
            let bytes = if is_wanted { low_mark(self.window()) } else { 1 };
            self.is_marked = self.driver.connection.io.ready_from(bytes) && is_wanted;
        }
    }

    /// Flow-control window in bytes.
    fn window(&self) -> u64 {
        self.driver.connection.machine.config().window.into()
    }

    fn command(&mut self, command: Command) {
        match command {
            Command::Open { vbid, end_seqno, from } => {
                let fallback = from.clone();
                self.is_endless |= end_seqno == Seqno::MAX;
                match self.driver.connection.machine.open_stream(vbid, end_seqno, *from) {
                    Ok(()) => self.open_streams += 1,
                    Err(misuse) => {
                        // Reported as an end, so that the vBucket is reopened.
                        tracing::error!(name: "stream_not_requested", %misuse, "a stream could not be requested");
                        let (cause, from) = (EndCause::Closed, fallback);
                        self.report(Report::Ended { vbid, cause, from });
                    }
                }
            }
            Command::Close(vbid) => {
                self.is_clean = false;
                self.driver.connection.machine.close_stream(now(), vbid);
            }
            Command::Persisted(advanced) => {
                for PersistedTo { vbid, vbuuid, seqno, .. } in advanced {
                    self.driver.connection.machine.persisted(vbid, vbuuid, seqno);
                }
            }
            Command::Filter(filter) => self.driver.connection.machine.set_filter(filter),
            Command::Exclude(exclusions) => self.driver.connection.machine.exclude(&exclusions),
            Command::FetchMap => self.driver.connection.machine.request_cluster_map(),
            Command::FetchHighSeqnos => self.driver.connection.machine.request_high_seqnos(),
            Command::FetchCollectionSeqnos(ids) => {
                self.driver.connection.machine.request_collection_seqnos(&ids);
            }
        }
    }

    /// Handles what has arrived and cuts batches.
    fn process(&mut self) -> Result<(), Exit> {
        let now = now();
        let returned = self.driver.shared.take_returned();
        if returned > 0 {
            self.driver.connection.machine.release(now, returned);
        }
        loop {
            let limit = self.limit();
            let Driver { connection, sink, .. } = &mut self.driver;
            let NodeConnection { machine, buffer, .. } = connection;
            let walk = machine.handle_input(now, buffer.filled(), limit, sink);
            let walk = walk.map_err(|error| Exit::of(&connection.address, error.into()))?;
            buffer.consume(walk.consumed);
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
            let held = driver.connection.machine.take_held();
            if held > 0 {
                driver.connection.machine.release(now, held);
            }
        }
        if self.opened_at.is_none() && self.has_open_batch() {
            self.opened_at = Some(now);
        }
        if self.has_lingered(now) {
            self.cut(now)?;
        }
        let driver = &self.driver;
        let machine = &driver.connection.machine;
        driver.shared.publish(*machine.stats(), machine.unacknowledged(), machine.unpersisted());
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
        let Driver { connection, sink, policy, shared, .. } = &self.driver;
        if sink.rows() == 0 {
            return false;
        }
        let (machine, window) = (&connection.machine, self.window());
        sink.rows() >= policy.max_rows
            || sink.size_bytes() >= policy.max_bytes
            || (window > 0 && machine.held() * 2 >= window)
            || (machine.is_window_full() && !shared.awaits_taking())
    }

    fn has_open_batch(&self) -> bool {
        let Driver { connection, sink, .. } = &self.driver;
        sink.rows() > 0 || connection.machine.has_moved() || !self.deferred.is_empty()
    }

    /// When the open batch is delivered even if it is small: never while the application has
    /// another batch of this connection to take.
    fn linger_until(&self) -> Option<Instant> {
        let opened_at = self.opened_at?;
        if self.driver.shared.awaits_taking() {
            return None;
        }
        // Nobody waits for positions alone, nor for the first rows of a read that ends.
        if !self.is_endless || (self.driver.sink.rows() == 0 && self.deferred.is_empty()) {
            return opened_at.checked_add(self.driver.policy.linger);
        }
        self.pace.hand_over_at(opened_at, self.filled())
    }

    /// How full the open batch is, from 0 to 1.
    #[allow(clippy::cast_precision_loss, reason = "an estimate")]
    fn filled(&self) -> f64 {
        let Driver { connection, sink, policy, .. } = &self.driver;
        let share = |part: u64, whole: u64| part as f64 / whole.max(1) as f64;
        let held = match self.window() {
            0 => 0.0,
            window => share(connection.machine.held() * 2, window),
        };
        share(sink.rows() as u64, policy.max_rows as u64)
            .max(share(sink.size_bytes() as u64, policy.max_bytes as u64))
            .max(held)
    }

    fn has_lingered(&self, now: Instant) -> bool {
        self.linger_until().is_some_and(|at| now >= at)
    }

    fn deadline(&self) -> Option<Instant> {
        let machine = &self.driver.connection.machine;
        let timeouts = [machine.poll_timeout(), self.linger_until(), self.pace.gathers_until()];
        timeouts.into_iter().flatten().min()
    }

    /// Handles events of the machine; `true` if the open batch must be delivered first.
    fn drain_events(&mut self) -> bool {
        let mut cut = false;
        while let Some(event) = self.driver.connection.machine.poll_event() {
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
                    self.report(Report::HighSeqnos(self.progress(seqnos)));
                }
                Event::CollectionSeqnos(answers) => {
                    let config = self.driver.connection.machine.config();
                    let vbids = (0..config.num_vbuckets).map(Vbid);
                    let streaming = self.progress(vbids.map(|vbid| (vbid, Seqno::ZERO)));
                    self.report(Report::CollectionSeqnos(answers, streaming));
                }
                Event::Exclusions(exclusions) => self.report(Report::Exclusions(exclusions)),
                Event::ClusterMap(json) => {
                    if self.driver.shared.offer_map(json) {
                        self.report(Report::Map(Arc::clone(&self.driver.shared)));
                    }
                }
                Event::Refused { opcode, status } => {
                    tracing::debug!(%opcode, %status, "a request was refused");
                }
                event => tracing::debug!(?event, "an unexpected event"),
            }
        }
        cut
    }

    /// Progress of those of these vBuckets that stream here.
    fn progress(
        &self,
        high_seqnos: impl IntoIterator<Item = (Vbid, Seqno)>,
    ) -> Vec<VbucketProgress> {
        let Driver { connection: NodeConnection { machine, .. }, shared, .. } = &self.driver;
        // If unpersisted changes fill the window, the application cannot empty it.
        let is_full = machine.is_window_full() && machine.unpersisted() == Unpersisted::default();
        let is_held_up = is_full || shared.has_queued();
        let progress = |(vbid, high_seqno): (Vbid, Seqno)| {
            let has_lost_end = machine.has_lost_end(vbid, high_seqno);
            let awaits_snapshot_end = machine.awaits_snapshot_end(vbid);
            let seqno = machine.seqno(vbid)?;
            Some(VbucketProgress {
                vbid,
                seqno,
                high_seqno,
                is_held_up,
                has_lost_end,
                awaits_snapshot_end,
            })
        };
        high_seqnos.into_iter().filter_map(progress).collect()
    }

    /// Puts the sink's rows into the queue, then sends the deferred reports.
    fn cut(&mut self, now: Instant) -> Result<(), SinkError> {
        let driver = &mut self.driver;
        let machine = &mut driver.connection.machine;
        let (positions, held) = (machine.take_positions(), machine.take_held());
        let rows = driver.sink.rows();
        if rows > 0 {
            let batch = driver.sink.take_batch()?;
            let credit = Credit::new(Arc::clone(&driver.shared), held);
            driver.queue.push(Entry::Batch(Queued { batch, rows, positions, credit }));
        } else {
            if !positions.is_empty() {
                driver.queue.push(Entry::Positions(positions));
            }
            machine.release(now, held);
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
    fn finish(mut self, exit: Exit) {
        let error = match exit {
            Exit::Dismissed => return,
            Exit::Sink(error) => return self.report(Report::SinkFailed(error)),
            Exit::Lost(error) => error,
        };
        // Streams that ended before the error are no longer in the machine.
        self.drain_events();
        if let Err(error) = self.cut(now()) {
            return self.report(Report::SinkFailed(error));
        }
        let Driver { id, connection, reports, shared, mut commands, .. } = self.driver;
        let machine = connection.machine;
        shared.publish(*machine.stats(), 0, Unpersisted::default());
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

/// Bytes that are worth a read, but few enough not to stall the server.
fn low_mark(window: u64) -> usize {
    match usize::try_from(window / 8) {
        Ok(part) if window > 0 => part.min(MIN_READ),
        _ => MIN_READ,
    }
}

#[cfg(test)]
mod tests;
