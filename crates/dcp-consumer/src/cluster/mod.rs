//! The task of one stream: places its vBuckets on connections and keeps them there.

mod backlog;
mod dropped;
mod lag;
mod lookout;
mod mitigation;
mod nodes;
mod polls;
mod shared;
mod unusable;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use dcp_proto::BatchSink;
use dcp_proto::consumer::{Delivery, Exclusions, StreamFilter};
use dcp_proto::topology::{Address, BucketConfig};
use dcp_wire::Vbid;
use rand::rngs::StdRng;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::backlog::Backlog;
use self::lookout::Lookout;
use self::nodes::{Node, Slot};
use self::polls::{POLL_MAP, POLL_PROGRESS};
pub(crate) use self::shared::{KnownVbucket, SharedStats};
use self::unusable::Unusable;
use crate::bucket::Bucket;
use crate::connect::ConnectionId;
use crate::connection::{NodeConnection, now, sleep_until};
use crate::driver::{Command, Report};
use crate::events::{StreamEvent, end_code};
use crate::opening::Opening;
use crate::persistence::observer::Observed;
use crate::persistence::{Persistence, Question};
use crate::queue::{Entry, Queue};
use crate::reconciler::{Reconciler, Verdict};
use crate::{BatchPolicy, Chain, Error, ErrorKind, OnRollback, filter};

/// Longest time to prepare connections for the next stream.
const LEAVE_WITHIN: Duration = Duration::from_secs(1);

/// Configuration of a stream's connections.
#[derive(Clone, Debug)]
pub(crate) struct StreamConfig {
    pub(crate) opening: Opening,
    pub(crate) filter: StreamFilter,
    pub(crate) on_rollback: OnRollback,
    pub(crate) ignore_purged_tombstones: bool,
    pub(crate) delivery: Delivery,
    pub(crate) batch: BatchPolicy,
    /// Whether a high seqno below the end means that the vBucket was rolled back.
    pub(crate) end_exists: bool,
}

/// Events of the task.
enum Event {
    Driver(ConnectionId, Report),
    Connected(Address, ConnectionId, Box<Result<NodeConnection, Error>>),
    /// A map fetched from some node while no connection is up.
    Fetched(Result<(), Error>),
    /// A connection to a node that the stream does not use, which has sent its map.
    LookedOut(Option<Box<NodeConnection>>),
    /// Persisted seqnos of a node.
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
    backlog: Backlog,
    /// Persisted seqnos of copies, if changes wait for them.
    persistence: Persistence,
    /// Observer tasks by node.
    observers: BTreeMap<Address, mpsc::UnboundedSender<Question>>,
    /// Whether any node has reported persisted seqnos, and since when nodes have refused to.
    has_observed: bool,
    refused_since: Option<Instant>,
    /// The map every stream was last compared with.
    followed: Option<Arc<BucketConfig>>,
    /// The nodes with active vBuckets in that map.
    named: BTreeSet<Address>,
    reports: Channel<(ConnectionId, Report)>,
    outcomes: Channel<Event>,
    /// When the map is requested next, if that is useful.
    poll_map_at: Instant,
    fetching_map: bool,
    lookout: Lookout,
    /// When high seqnos are requested next.
    poll_progress_at: Instant,
    /// Why no map could be fetched, if so.
    map_error: Option<Arc<Error>>,
    unusable: Unusable,
    randomness: StdRng,
    cancel: CancellationToken,
    /// The tasks of connections, which may return them to the pool.
    tasks: JoinSet<()>,
    /// Tasks that make connections and fetch maps.
    errands: JoinSet<()>,
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
        let cluster = Self {
            bucket,
            config,
            reconciler,
            make_sink,
            queue,
            stats,
            nodes: BTreeMap::new(),
            next_id: 0,
            backlog: Backlog::default(),
            persistence: Persistence::default(),
            observers: BTreeMap::new(),
            has_observed: false,
            refused_since: None,
            followed: None,
            named: BTreeSet::new(),
            reports: Channel::new(),
            outcomes: Channel::new(),
            poll_map_at: now(),
            fetching_map: false,
            lookout: Lookout::new(now()),
            poll_progress_at: now() + POLL_PROGRESS,
            map_error: None,
            unusable: Unusable::default(),
            randomness,
            cancel,
            tasks: JoinSet::new(),
            errands: JoinSet::new(),
        };
        // Readers before the task runs must see unknown vBuckets, not an empty list.
        cluster.publish();
        cluster
    }

    /// Runs the stream until it is complete, fails, or is closed. `connections` are already open.
    pub(crate) async fn run(mut self, connections: Vec<NodeConnection>) {
        for connection in connections {
            let id = self.new_id();
            let address = connection.address.clone();
            self.nodes.insert(address.clone(), Node::connecting(id));
            self.made(&address, id, connection);
        }
        let cancel = self.cancel.clone();
        let last = loop {
            match self.turn(&cancel).await {
                Ok(Some(())) => {}
                // Cancelled by the client; a stream that is dropped no longer reads its queue.
                Ok(None) => {
                    let error = Error::new(ErrorKind::Closed, "the client was closed");
                    break Entry::Error(error);
                }
                Err(last) => break last,
            }
        };
        // Tasks end when their senders are dropped.
        self.leave_nodes();
        self.publish();
        if matches!(last, Entry::Finished) && self.bucket.pool().is_on() {
            self.leave_connections().await;
            if let Some(connection) = self.lookout.into_connection() {
                self.bucket.put_into_pool(connection, None);
            }
        }
        self.queue.push(match last {
            Entry::Error(error) => Entry::Error(self.bucket.explain(error)),
            last => last,
        });
        self.cancel.cancel();
    }

    /// Lets the tasks of a complete stream return their connections to the pool for the next
    /// stream.
    async fn leave_connections(&mut self) {
        self.observers.clear();
        let tasks = &mut self.tasks;
        let all = async { while tasks.join_next().await.is_some() {} };
        if timeout(LEAVE_WITHIN, all).await.is_err() {
            tracing::debug!("a connection is not pooled: the server did not end a stream in time");
        }
    }

    /// One turn: handles what is due, then waits for the next event. Ends with the last entry of
    /// the stream.
    async fn turn(&mut self, cancel: &CancellationToken) -> Result<Option<()>, Entry<S::Batch>> {
        self.act().map_err(Entry::Error)?;
        if self.reconciler.is_complete() {
            return Err(self.last_entry());
        }
        self.publish();
        let deadline = self.deadline();
        let event = tokio::select! {
            biased;
            () = cancel.cancelled() => return Ok(None),
            Some(outcome) = self.outcomes.receiver.recv() => outcome,
            Some((id, report)) = self.reports.receiver.recv() => Event::Driver(id, report),
            Some(over) = self.tasks.join_next() => {
                return over.map(Some).map_err(|error| Entry::Error(panicked(error)));
            }
            Some(over) = self.errands.join_next() => {
                return over.map(Some).map_err(|error| Entry::Error(panicked(error)));
            }
            () = self.stats.looked_at() => {
                self.looked_at(now());
                return Ok(Some(()));
            }
            () = sleep_until(deadline) => return Ok(Some(())),
        };
        self.handle(event).map_err(Entry::Error)?;
        // A thousand streams may end at once: they are handled together.
        while let Ok((id, report)) = self.reports.receiver.try_recv() {
            self.handle(Event::Driver(id, report)).map_err(Entry::Error)?;
        }
        Ok(Some(()))
    }

    fn handle(&mut self, event: Event) -> Result<(), Error> {
        match event {
            Event::Driver(id, report) => self.reported(id, report),
            Event::Connected(address, id, result) => self.connected(&address, id, *result),
            Event::Fetched(result) => {
                self.fetching_map = false;
                self.map_error = result.err().map(Arc::new);
                if let Some(error) = &self.map_error {
                    let error = Chain(error);
                    tracing::debug!(%error, "no cluster map could be fetched");
                }
                self.bucket.check_identity()?;
                self.drop_from_filter().map(drop)
            }
            Event::LookedOut(connected) => self.looked_out(connected),
            Event::Observed(address, observed) => self.observed(&address, observed),
        }
    }

    fn reported(&mut self, id: ConnectionId, report: Report) -> Result<(), Error> {
        let now = now();
        match report {
            Report::Opened { vbid, persists_on } => {
                self.reconciler.opened(vbid, id, now);
                self.serves(id);
                self.ask_for_lag(now);
                if let Some(vbuuid) = persists_on {
                    self.watch(id, vbid, vbuuid, now);
                }
                let node = self.node_name(id);
                self.stats.events.push(StreamEvent::Opened { vbid, node });
            }
            Report::CaughtUp(caught_up) => {
                self.stats.events.push(StreamEvent::CaughtUp(caught_up));
            }
            Report::RolledBack(rollback) => {
                self.stats.events.push(StreamEvent::RolledBack(rollback));
            }
            Report::Unpersisted(vbid, vbuuid) => self.unpersisted(id, vbid, vbuuid, now),
            Report::Progress(progress) => self.progressed(&progress, now)?,
            Report::Collections(answers, streaming) => {
                self.collections_progressed(&answers, &streaming, now);
            }
            Report::Ended { vbid, cause, from } => {
                self.persistence.forget(vbid, id);
                let (code, reason) = (end_code(&cause), cause.to_string());
                let ended = StreamEvent::Ended { vbid, reason, cause: code.clone() };
                self.stats.events.push(ended);
                match self.reconciler.ended(vbid, id, cause, from, now) {
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
                    self.stats.events.push(StreamEvent::BackingOff { vbid, wait, cause: code });
                }
            }
            Report::Exclusions(exclusions) => self.exclude(&exclusions),
            Report::Map(link) => {
                if let Some(json) = link.take_map() {
                    self.apply_map(id, &json)?;
                }
            }
            Report::Lost { streams, error } => {
                let (node, text) = (self.node_name(id), Chain(&error).to_string());
                tracing::warn!(%node, streams = streams.len(), error = %text, "connection lost");
                let cause = error.kind();
                self.stats.events.push(StreamEvent::ConnectionLost { node, error: text, cause });
                if let Some(error) = self.unusable.lost(&error, &streams) {
                    return Err(error);
                }
                self.persistence.forget_all(id);
                let error = Arc::new(error);
                self.reconciler.lost(id, streams, &error, now);
                self.doubt_ends(now);
                self.drop_connection(id, error);
            }
            Report::SinkFailed(error) => {
                return Err(Error::new(ErrorKind::Sink, error.to_string()).with_source(error));
            }
        }
        Ok(())
    }

    /// Handles what is due.
    fn act(&mut self) -> Result<(), Error> {
        let now = now();
        self.wait_for_application(now);
        if let Some((vbid, idle, cause)) = self.reconciler.stalled(now) {
            let cause = cause.or_else(|| self.map_error.take());
            return Err(Error::out_of_reach(vbid, idle, cause));
        }
        let map = self.bucket.config();
        if !self.followed.as_ref().is_some_and(|followed| Arc::ptr_eq(followed, &map)) {
            for (vbid, on) in self.reconciler.placed() {
                self.follow_map(&map, vbid, on, now);
            }
            self.follow_copies(&map, now);
            self.named = self.bucket.data_nodes(&map);
            self.followed = Some(Arc::clone(&map));
        }
        self.retire();
        for vbid in self.reconciler.due(now) {
            match self.bucket.address_of(&map, vbid) {
                Some(address) => self.place(vbid, &address, now),
                None => {
                    self.poll_map_at = self.poll_map_at.min(now + POLL_MAP);
                    let cause = self.no_node(&map, vbid);
                    self.reconciler.postpone(vbid, Some(cause), now);
                }
            }
        }
        // Usually none: looking through the vBuckets once saves doing so for every node.
        let requesting = self.reconciler.requesting();
        for (address, node) in &self.nodes {
            if let Slot::Up { id, commands, .. } = &node.slot
                && requesting.contains(id)
            {
                for (vbid, end_seqno, from) in self.reconciler.take_requests(*id) {
                    // An ended task accepts nothing; one that is ending returns what it was sent.
                    let command = Command::Open { vbid, end_seqno, from };
                    if let Err(refused) = commands.send(command)
                        && let Command::Open { vbid, from, .. } = refused.0
                    {
                        let message = format!("the connection to {address} has ended");
                        let cause = Arc::new(Error::new(ErrorKind::ConnectionLost, message));
                        self.reconciler.lost(*id, vec![(vbid, *from)], &cause, now);
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
        if self.reconciler.has_streaming() {
            self.look_out(now);
        }
        self.observe(now);
        let alive: BTreeSet<_> = self.nodes.values().filter_map(Node::id).collect();
        self.reconciler.check(|id| alive.contains(&id))
    }

    /// Why a vBucket that the map assigns to no node is not streamed.
    fn no_node(&self, map: &BucketConfig, vbid: Vbid) -> Arc<Error> {
        if let Some(error) = self.bucket.why_no_address(map, vbid) {
            return Arc::new(error);
        }
        let error = Error::new(ErrorKind::Connect, "the cluster map assigns it to no node");
        Arc::new(match &self.map_error {
            Some(cause) => error.with_source(Arc::clone(cause)),
            None => error,
        })
    }

    fn deadline(&self) -> Option<Instant> {
        let poll = self.reconciler.has_idle().then_some(self.poll_map_at);
        let (progress, lookout) = match self.reconciler.has_streaming() {
            true => (Some(self.poll_progress_at), self.lookout.deadline()),
            false => (None, None),
        };
        let observe = self.persistence.deadline();
        let all = [self.reconciler.deadline(), poll, progress, lookout, observe];
        all.into_iter().flatten().min()
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
            let (unpersisted_since, is_diverged) = self.persistence.unpersisted_since(vbid);
            KnownVbucket {
                vbid,
                state,
                high_seqno,
                persisted_seqno,
                unpersisted_since,
                is_diverged,
            }
        };
        vbuckets.extend(self.reconciler.states().map(known));
    }
}

/// A task of the stream panicked: its work will not be done.
fn panicked(error: JoinError) -> Error {
    let message = "a task of the stream panicked: please report this";
    Error::new(ErrorKind::StreamEnded, message).with_source(error)
}

/// Every connection leaves out the same collections: one learns of a new collection
/// from the event in its own streams, and another may take over a vBucket that is past that event.
impl<S: BatchSink> Cluster<S> {
    /// A connection has learned of documents to leave out.
    pub(super) fn exclude(&mut self, learned: &Exclusions) {
        self.config.delivery.exclusions.merge(learned);
        for node in self.nodes.values() {
            if let Slot::Up { commands, .. } = &node.slot {
                // An ended connection does not need it.
                let _ = commands.send(Command::Exclude(learned.clone()));
            }
        }
    }

    /// Learns what to leave out from the newest known manifest, for open connections as well: a
    /// vBucket may move to one of them when it is past the event of a collection.
    pub(super) fn hide_by_manifest(&mut self) {
        let mut exclusions = self.config.delivery.exclusions.clone();
        if exclusions.excludes_system_scope() {
            exclusions.merge(&filter::exclusions(&self.config.filter, &self.bucket.manifest()));
        }
        exclusions.learn_manifest(&self.bucket.manifest());
        if exclusions != self.config.delivery.exclusions {
            self.exclude(&exclusions);
        }
    }
}
