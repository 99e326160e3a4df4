//! The task of one stream: places its vBuckets on connections and keeps them there.

mod dropped;
mod hidden;
mod mitigation;
mod nodes;
mod polls;
mod shared;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use dcp_proto::BatchSink;
use dcp_proto::consumer::{Delivery, StreamFilter};
use dcp_proto::topology::{Address, BucketConfig};
use dcp_wire::Vbid;
use rand::rngs::StdRng;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::nodes::{Node, Slot};
use self::polls::{POLL_MAP, POLL_PROGRESS};
pub(crate) use self::shared::{KnownVbucket, SharedStats};
use crate::bucket::{Bucket, Opening};
use crate::connect::Connected;
use crate::driver::{Command, ConnectionId, Report};
use crate::events::StreamEvent;
use crate::persistence::observer::Observed;
use crate::persistence::{Persistence, Question};
use crate::queue::{Entry, Queue};
use crate::reconciler::{Reconciler, Verdict};
use crate::{BatchPolicy, Error, ErrorKind, OnRollback};

/// Longest time in which connections are made ready for the next stream.
const LEAVE_WITHIN: Duration = Duration::from_secs(1);

/// What every connection of a stream is made with.
#[derive(Clone, Debug)]
pub(crate) struct StreamConfig {
    pub(crate) opening: Opening,
    pub(crate) filter: StreamFilter,
    pub(crate) on_rollback: OnRollback,
    pub(crate) delivery: Delivery,
    pub(crate) batch: BatchPolicy,
    /// Whether a vBucket that has less than its end was rolled back.
    pub(crate) end_exists: bool,
}

/// What the task hears.
enum Event {
    Driver(ConnectionId, Report),
    Connected(Address, ConnectionId, Box<Result<Connected, Error>>),
    /// A map fetched from some node while no connection is up.
    Fetched(Result<(), Error>),
    /// What a node said that it has on disk.
    Observed(Address, Observed),
}

/// Both ends of a channel of reports. Not bounded: each vBucket reports once per request it made,
/// and each connection once until its newest cluster map is taken.
struct Channel<T> {
    sender: mpsc::UnboundedSender<T>,
    receiver: mpsc::UnboundedReceiver<T>,
}

impl<T> Channel<T> {
    fn new() -> Self {
        let (sender, receiver) = mpsc::unbounded_channel();
        Self { sender, receiver }
    }
}

/// The task of one stream.
pub(crate) struct Cluster<S: BatchSink> {
    bucket: Arc<Bucket>,
    config: StreamConfig,
    reconciler: Reconciler,
    make_sink: Box<dyn Fn() -> S + Send + Sync>,
    queue: Arc<Queue<S::Batch>>,
    stats: Arc<SharedStats>,
    nodes: BTreeMap<Address, Node>,
    next_id: u64,
    /// How far copies are on disk, where changes wait for that.
    persistence: Persistence,
    /// By node, whom to ask for that.
    observers: BTreeMap<Address, mpsc::UnboundedSender<Question>>,
    /// The map every stream was last compared with.
    followed: Option<Arc<BucketConfig>>,
    reports: Channel<(ConnectionId, Report)>,
    outcomes: Channel<Event>,
    /// When the map is asked for next, while that is of use.
    poll_map_at: Instant,
    fetching_map: bool,
    /// When nodes are asked for their high seqnos next.
    poll_progress_at: Instant,
    last_error: Option<Error>,
    randomness: StdRng,
    cancel: CancellationToken,
    /// The tasks of connections, which may leave them to the next stream.
    tasks: JoinSet<()>,
}

impl<S: BatchSink> Cluster<S> {
    pub(crate) fn new(
        bucket: Arc<Bucket>,
        config: StreamConfig,
        reconciler: Reconciler,
        make_sink: Box<dyn Fn() -> S + Send + Sync>,
        queue: Arc<Queue<S::Batch>>,
        stats: Arc<SharedStats>,
        cancel: CancellationToken,
    ) -> Self {
        let randomness = bucket.randomness();
        Self {
            bucket,
            config,
            reconciler,
            make_sink,
            queue,
            stats,
            nodes: BTreeMap::new(),
            next_id: 0,
            persistence: Persistence::default(),
            observers: BTreeMap::new(),
            followed: None,
            reports: Channel::new(),
            outcomes: Channel::new(),
            poll_map_at: now(),
            fetching_map: false,
            poll_progress_at: now() + POLL_PROGRESS,
            last_error: None,
            randomness,
            cancel,
            tasks: JoinSet::new(),
        }
    }

    /// Runs the stream until it is complete, fails, or is closed. `connections` are there
    /// already.
    pub(crate) async fn run(mut self, connections: Vec<Connected>) {
        for connected in connections {
            let id = self.new_id();
            let address = connected.address.clone();
            self.nodes.insert(address.clone(), Node { slot: Slot::Connecting(id), failures: 0 });
            self.connected(&address, id, Ok(connected));
        }
        let cancel = self.cancel.clone();
        let last = loop {
            match self.turn(&cancel).await {
                Ok(Some(())) => {}
                // By the client; a stream that closes itself looks at its queue no more.
                Ok(None) => {
                    let error = Error::new(ErrorKind::Closed, "the client was closed");
                    break Entry::Error(error);
                }
                Err(last) => break last,
            }
        };
        self.publish();
        if matches!(last, Entry::Finished) && self.bucket.kept().is_on() {
            self.leave_connections().await;
        }
        self.queue.push(last);
        self.cancel.cancel();
    }

    /// Lets the tasks of a stream that is complete hand their connections back, so that the next
    /// stream finds them.
    async fn leave_connections(&mut self) {
        // They end when nobody can send them anything any more.
        self.nodes.clear();
        self.observers.clear();
        let tasks = &mut self.tasks;
        let all = async { while tasks.join_next().await.is_some() {} };
        if timeout(LEAVE_WITHIN, all).await.is_err() {
            tracing::debug!("a connection is not kept: its server leaves a stream unended");
        }
    }

    /// One turn: act on what is due, then wait for whatever comes first. Ends with the last entry
    /// of the stream.
    async fn turn(&mut self, cancel: &CancellationToken) -> Result<Option<()>, Entry<S::Batch>> {
        self.act().map_err(Entry::Error)?;
        if self.reconciler.is_complete() {
            return Err(self.last_entry());
        }
        self.publish();
        let deadline = self.deadline();
        let sleep = async {
            match deadline {
                Some(at) => tokio::time::sleep_until(at.into()).await,
                None => std::future::pending().await,
            }
        };
        let event = tokio::select! {
            biased;
            () = cancel.cancelled() => return Ok(None),
            Some(outcome) = self.outcomes.receiver.recv() => outcome,
            Some((id, report)) = self.reports.receiver.recv() => Event::Driver(id, report),
            () = sleep => return Ok(Some(())),
        };
        self.handle(event).map_err(Entry::Error)?;
        // A thousand streams end in one moment: they are acted on together.
        while let Ok((id, report)) = self.reports.receiver.try_recv() {
            self.handle(Event::Driver(id, report)).map_err(Entry::Error)?;
        }
        Ok(Some(()))
    }

    fn handle(&mut self, event: Event) -> Result<(), Error> {
        match event {
            Event::Driver(id, report) => self.reported(id, report),
            Event::Connected(address, id, result) => {
                self.connected(&address, id, *result);
                self.refused(&address)
            }
            Event::Fetched(result) => {
                self.fetching_map = false;
                if let Err(error) = result {
                    tracing::debug!(%error, "no cluster map could be fetched");
                    self.last_error = Some(error);
                }
                self.bucket.check_identity()?;
                self.drop_from_filter().map(drop)
            }
            Event::Observed(address, observed) => self.observed(&address, observed),
        }
    }

    fn reported(&mut self, id: ConnectionId, report: Report) -> Result<(), Error> {
        let now = now();
        match report {
            Report::Opened(vbid) => {
                self.reconciler.opened(vbid, id, now);
                let node = self.node_name(id);
                self.stats.events.push(StreamEvent::Opened { vbid, node });
            }
            Report::RolledBack(rollback) => {
                self.stats.events.push(StreamEvent::RolledBack(rollback));
            }
            Report::Waiting(vbid, vbuuid) => self.waiting(id, vbid, vbuuid, now),
            Report::Progress(progress) => self.progressed(&progress, now)?,
            Report::Ended { vbid, cause, resume } => {
                self.persistence.forget(vbid, id);
                let reason = cause.to_string();
                self.stats.events.push(StreamEvent::Ended { vbid, reason });
                match self.reconciler.ended(vbid, id, cause, resume, now) {
                    Verdict::Fatal(error) => return Err(error),
                    Verdict::Retry { fetch_map } => {
                        if fetch_map {
                            self.poll_map_at = now;
                        }
                        self.doubt_ends(now);
                    }
                    Verdict::FilterRefused => self.filter_refused()?,
                    Verdict::Complete => {}
                }
                if let Some(wait) = self.reconciler.wait_of(vbid, now) {
                    self.stats.events.push(StreamEvent::BackingOff { vbid, wait });
                }
            }
            Report::Hidden(hidden) => self.hide(&hidden),
            Report::Map(link) => {
                if let Some(json) = link.take_map() {
                    self.apply_map(id, &json)?;
                }
            }
            Report::Lost { streams, error } => {
                tracing::warn!(%error, streams = streams.len(), "a connection was lost");
                let node = self.node_name(id);
                let error_text = error.to_string();
                self.stats.events.push(StreamEvent::ConnectionLost { node, error: error_text });
                self.persistence.forget_all(id);
                self.reconciler.lost(id, streams, now);
                self.doubt_ends(now);
                self.drop_connection(id);
                self.last_error = Some(error);
            }
            Report::SinkFailed(error) => {
                return Err(Error::new(ErrorKind::Sink, error.to_string()).with_source(error));
            }
        }
        Ok(())
    }

    /// Takes what is due further.
    fn act(&mut self) -> Result<(), Error> {
        let now = now();
        if let Some((vbid, idle)) = self.reconciler.stalled(now) {
            return Err(self.stalled(vbid, idle));
        }
        let map = self.bucket.config();
        if !self.followed.as_ref().is_some_and(|followed| Arc::ptr_eq(followed, &map)) {
            for (vbid, on) in self.reconciler.placed() {
                self.follow_map(&map, vbid, on);
            }
            self.follow_copies(&map, now);
            self.followed = Some(Arc::clone(&map));
        }
        self.retire(&map);
        for vbid in self.reconciler.due(now) {
            match self.bucket.address_of(&map, vbid) {
                Some(address) => self.place(vbid, &address, now),
                None => {
                    self.poll_map_at = self.poll_map_at.min(now + POLL_MAP);
                    self.reconciler.postpone(vbid, now);
                }
            }
        }
        for node in self.nodes.values() {
            if let Slot::Up { id, commands, .. } = &node.slot {
                for (vbid, end_seqno, resume) in self.reconciler.take_requests(*id) {
                    // A task that is gone reports what it had, and the vBucket with it: see lost.
                    let command = Command::Open { vbid, end_seqno, resume };
                    if let Err(refused) = commands.send(command)
                        && let Command::Open { vbid, resume, .. } = refused.0
                    {
                        self.reconciler.lost(*id, vec![(vbid, *resume)], now);
                    }
                }
            }
        }
        if self.reconciler.has_idle() && now >= self.poll_map_at {
            self.poll_map(now);
        }
        if now >= self.poll_progress_at {
            self.poll_progress(now);
        }
        self.observe(now);
        let nodes = &self.nodes;
        self.reconciler.check(|id| nodes.values().any(|node| node.id() == Some(id)))
    }

    fn stalled(&mut self, vbid: Vbid, idle: Duration) -> Error {
        let seconds = idle.as_secs();
        let message = format!("{vbid} could not be streamed for {seconds} s: check the cluster");
        let error = Error::new(ErrorKind::Timeout, message).with_vbid(vbid);
        match self.last_error.take() {
            Some(source) => error.with_source(source),
            None => error,
        }
    }

    fn deadline(&self) -> Option<Instant> {
        let poll = self.reconciler.has_idle().then_some(self.poll_map_at);
        let progress = self.reconciler.has_streaming().then_some(self.poll_progress_at);
        let observe = self.persistence.deadline();
        [self.reconciler.deadline(), poll, progress, observe].into_iter().flatten().min()
    }

    fn publish(&self) {
        let up = |node: &&Node| matches!(node.slot, Slot::Up { .. });
        let connections = self.nodes.values().filter(up).count();
        self.stats.update(|stats, _| {
            self.reconciler.count(stats);
            stats.connections = connections;
        });
        let mut vbuckets = self.stats.vbuckets.lock().unwrap_or_else(PoisonError::into_inner);
        vbuckets.clear();
        let known = |(vbid, state, high_seqno)| {
            let persisted_seqno = self.persistence.persisted(vbid);
            let (held_since, is_settling) = self.persistence.waiting(vbid);
            KnownVbucket { vbid, state, high_seqno, persisted_seqno, held_since, is_settling }
        };
        vbuckets.extend(self.reconciler.states().map(known));
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
