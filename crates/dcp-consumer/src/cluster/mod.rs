//! The task of one stream: places its vBuckets on connections and keeps them there.

mod dropped;
mod mitigation;

use std::collections::{BTreeMap, HashSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use dcp_proto::BatchSink;
use dcp_proto::consumer::{Connection, ConnectionConfig, Delivery, RollbackPolicy, StreamFilter};
use dcp_proto::topology::{Address, BucketConfig};
use dcp_wire::message::Control;
use dcp_wire::{Feature, MAX_BODY_LEN, Seqno, Vbid};
use rand::rngs::StdRng;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::bucket::{Bucket, Opening};
use crate::connect::Connected;
use crate::driver::{Command, ConnectionId, Driver, Progress, Report};
use crate::events::{EventLog, StreamEvent};
use crate::persistence::observer::Observed;
use crate::persistence::{Persistence, Question};
use crate::queue::{Entry, Link, Queue};
use crate::reconciler::{Reconciler, Verdict};
use crate::retry::Backoff;
use crate::{BatchPolicy, Error, ErrorKind, OnRollback, StreamStats, VbucketState};

/// How often the map is asked for while some vBucket waits and nobody pushes one.
const POLL_MAP: Duration = Duration::from_millis(2500);

/// Longest time in which connections are made ready for the next stream.
const LEAVE_WITHIN: Duration = Duration::from_secs(1);

/// How often nodes are asked for their high seqnos.
const POLL_PROGRESS: Duration = Duration::from_secs(10);

/// How soon they are asked after a stream was cut off, where ends may have been rolled back.
const POLL_END: Duration = Duration::from_millis(500);

/// How often in a row a node may refuse a connection for a reason that does not pass by itself,
/// as a wrong password, before the stream gives up. A node on its way out of the cluster refuses
/// too, until the map says so.
const REFUSALS: u32 = 5;

/// What is known of a vBucket besides where the application stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownVbucket {
    pub(crate) vbid: Vbid,
    pub(crate) state: VbucketState,
    /// Highest seqno the server was heard to have.
    pub(crate) high_seqno: Option<Seqno>,
    /// Up to here it is on the disks of all copies.
    pub(crate) persisted_seqno: Option<Seqno>,
    /// Since when changes wait for that.
    pub(crate) held_since: Option<Instant>,
    /// Whether copies are on different branches meanwhile.
    pub(crate) is_settling: bool,
}

/// Numbers of a stream, written by its task and read by the application.
#[derive(Debug, Default)]
pub(crate) struct SharedStats {
    inner: Mutex<(StreamStats, Vec<Arc<Link>>)>,
    vbuckets: Mutex<Vec<KnownVbucket>>,
    pub(crate) events: EventLog,
}

impl SharedStats {
    pub(crate) fn snapshot(&self) -> StreamStats {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut stats, links) = (inner.0, &inner.1);
        for link in links {
            let (counted, unacknowledged, waiting) = link.stats();
            stats.connection.add(&counted);
            stats.buffered_bytes += unacknowledged;
            stats.held_rows += waiting.rows;
            stats.held_bytes += waiting.bytes;
        }
        stats
    }

    /// What is known of every vBucket, ascending.
    pub(crate) fn vbuckets(&self) -> Vec<KnownVbucket> {
        self.vbuckets.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds up what a connection that is gone has counted.
    fn fold(&self, link: &Arc<Link>) {
        self.update(|stats, links| {
            stats.connection.add(&link.stats().0);
            links.retain(|other| !Arc::ptr_eq(other, link));
        });
    }

    fn update(&self, change: impl FnOnce(&mut StreamStats, &mut Vec<Arc<Link>>)) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (stats, links) = &mut *inner;
        change(stats, links);
    }
}

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

/// A node's connection.
enum Slot {
    /// Being made.
    Connecting(ConnectionId),
    /// In use.
    Up { id: ConnectionId, link: Arc<Link>, commands: mpsc::UnboundedSender<Command> },
    /// Not to be tried before a moment.
    Waiting(Instant),
}

struct Node {
    slot: Slot,
    /// Failures to connect in a row.
    failures: u32,
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

/// Both ends of a channel of reports. Not bounded: each vBucket reports once per request it made.
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
            return Err(Entry::Finished);
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
            Report::Map(json) => self.apply_map(id, &json)?,
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

    /// Gives a vBucket to the connection of a node, which is made if need be.
    fn place(&mut self, vbid: Vbid, address: &Address, now: Instant) {
        let id = match self.nodes.get(address).map(|node| &node.slot) {
            Some(Slot::Connecting(id) | Slot::Up { id, .. }) => *id,
            Some(Slot::Waiting(until)) if *until > now => {
                return self.reconciler.postpone(vbid, now);
            }
            _ => self.connect(address),
        };
        self.reconciler.assign(vbid, id);
    }

    /// Closes a stream whose vBucket the map has on another node; it is reported as ended and
    /// opened there.
    fn follow_map(&self, map: &BucketConfig, vbid: Vbid, on: ConnectionId) {
        let Some(address) = self.bucket.address_of(map, vbid) else { return };
        let right = self.nodes.get(&address).and_then(Node::id);
        if right == Some(on) {
            return;
        }
        let wrong = self.nodes.values().find(|node| node.id() == Some(on));
        if let Some(Node { slot: Slot::Up { commands, .. }, .. }) = wrong {
            let _ = commands.send(Command::Close(vbid));
            let node = address.to_string();
            self.stats.events.push(StreamEvent::Moved { vbid, node });
        }
    }

    /// Lets go of connections to nodes the map no longer names, once nothing is on them.
    fn retire(&mut self, map: &BucketConfig) {
        if self.nodes.len() <= map.nodes().len() {
            return;
        }
        let named: HashSet<Address> = (0..self.bucket.num_vbuckets())
            .filter_map(|vbid| self.bucket.address_of(map, Vbid(vbid)))
            .collect();
        let used: HashSet<ConnectionId> =
            self.reconciler.placed().into_iter().map(|(_, on)| on).collect();
        let stats = &self.stats;
        self.nodes.retain(|address, node| {
            let keep = named.contains(address) || node.id().is_some_and(|id| used.contains(&id));
            if !keep && let Slot::Up { link, .. } = &node.slot {
                // Its task ends when nobody can send it commands any more.
                stats.fold(link);
            }
            keep
        });
    }

    fn connect(&mut self, address: &Address) -> ConnectionId {
        let id = self.new_id();
        let failures = self.nodes.get(address).map_or(0, |node| node.failures);
        if failures > 0 {
            self.stats.update(|stats, _| stats.reconnects += 1);
        }
        self.nodes.insert(address.clone(), Node { slot: Slot::Connecting(id), failures });
        let (bucket, opening) = (Arc::clone(&self.bucket), self.config.opening.clone());
        let (outcomes, address) = (self.outcomes.sender.clone(), address.clone());
        let cancel = self.cancel.clone();
        tokio::spawn(async move {
            let connect = bucket.connect_dcp(&address, &opening);
            if let Some(result) = cancel.run_until_cancelled(connect).await {
                let _ = outcomes.send(Event::Connected(address, id, Box::new(result)));
            }
        });
        id
    }

    fn connected(&mut self, address: &Address, id: ConnectionId, result: Result<Connected, Error>) {
        let now = now();
        let Some(node) = self.nodes.get_mut(address).filter(|node| node.id() == Some(id)) else {
            return;
        };
        match result {
            Ok(connected) => {
                node.failures = 0;
                let slot = self.start(id, connected);
                if let Some(node) = self.nodes.get_mut(address) {
                    node.slot = slot;
                }
            }
            Err(error) => {
                tracing::warn!(%address, %error, "a node cannot be reached");
                node.slot =
                    Slot::Waiting(now + Backoff::SHORT.wait(node.failures, &mut self.randomness));
                node.failures = node.failures.saturating_add(1);
                self.reconciler.unreachable(id, now);
                self.poll_map_at = self.poll_map_at.min(now);
                self.last_error = Some(error);
            }
        }
    }

    /// Gives up on a node that keeps refusing for a reason that does not pass.
    fn refused(&mut self, address: &Address) -> Result<(), Error> {
        let failures = self.nodes.get(address).map_or(0, |node| node.failures);
        match self.last_error.take() {
            Some(error) if failures >= REFUSALS && !error.is_retryable() => Err(error),
            other => {
                self.last_error = other;
                Ok(())
            }
        }
    }

    /// Starts the task of a connection.
    fn start(&mut self, id: ConnectionId, connected: Connected) -> Slot {
        let Connected { socket, leftover, outcome, address } = connected;
        let opening = &self.config.opening;
        let machine = Connection::new(
            ConnectionConfig {
                num_vbuckets: self.bucket.num_vbuckets(),
                collections: outcome.has_feature(Feature::COLLECTIONS),
                window: opening.buffer_size,
                noop_interval: Some(opening.noop_interval()),
                filter: self.config.filter.clone(),
                purge_seqno: outcome.has_control(Control::MAX_MARKER_VERSION),
                on_rollback: match self.config.on_rollback {
                    OnRollback::Emit => RollbackPolicy::Resume,
                    OnRollback::Raise => RollbackPolicy::Stop,
                    OnRollback::Resync => RollbackPolicy::FromZero,
                },
                delivery: self.config.delivery.clone(),
                max_body_len: MAX_BODY_LEN,
            },
            now(),
        );
        let link = Arc::new(Link::default());
        let (commands, receiver) = mpsc::unbounded_channel();
        let driver = Driver {
            id,
            machine,
            sink: (self.make_sink)(),
            policy: self.config.batch,
            window: u64::from(opening.buffer_size),
            max_body_len: MAX_BODY_LEN,
            queue: Arc::clone(&self.queue),
            link: Arc::clone(&link),
            commands: receiver,
            reports: self.reports.sender.clone(),
            cancel: self.cancel.clone(),
        };
        let (bucket, opening) = (Arc::clone(&self.bucket), self.config.opening.clone());
        while self.tasks.try_join_next().is_some() {}
        self.tasks.spawn(async move {
            if let Some((socket, leftover)) = driver.run(socket, leftover).await {
                let connected = Connected { socket, leftover, outcome, address };
                bucket.kept().keep(connected, Some(opening));
            }
        });
        self.stats.update(|_, links| links.push(Arc::clone(&link)));
        Slot::Up { id, link, commands }
    }

    fn drop_connection(&mut self, id: ConnectionId) {
        let Some(node) = self.nodes.values_mut().find(|node| node.id() == Some(id)) else { return };
        node.failures = node.failures.max(1);
        let slot = std::mem::replace(&mut node.slot, Slot::Waiting(now()));
        if let Slot::Up { link, .. } = slot {
            self.stats.fold(&link);
        }
    }

    fn apply_map(&mut self, from: ConnectionId, json: &Bytes) -> Result<(), Error> {
        let from = self.nodes.iter().find(|(_, node)| node.id() == Some(from));
        let Some((address, _)) = from else { return Ok(()) };
        match BucketConfig::parse(json, &address.host) {
            Ok(map) => self.bucket.apply(map),
            Err(error) => tracing::warn!(%address, %error, "a cluster map cannot be used"),
        }
        self.bucket.check_identity()
    }

    /// Asks some connection for the map, or, while there is none, any node at all.
    fn poll_map(&mut self, now: Instant) {
        self.poll_map_at = now + POLL_MAP;
        let up = self.nodes.values().find_map(|node| match &node.slot {
            Slot::Up { commands, .. } => Some(commands),
            _ => None,
        });
        if let Some(commands) = up {
            let _ = commands.send(Command::FetchMap);
        } else {
            self.fetch_map();
        }
    }

    /// Asks any node for the map and the manifest, unless that is going on already.
    fn fetch_map(&mut self) {
        if !std::mem::replace(&mut self.fetching_map, true) {
            let (bucket, outcomes) = (Arc::clone(&self.bucket), self.outcomes.sender.clone());
            let cancel = self.cancel.clone();
            tokio::spawn(async move {
                let fetch = bucket.fetch_map();
                if let Some(result) = cancel.run_until_cancelled(fetch).await {
                    let _ = outcomes.send(Event::Fetched(result));
                }
            });
        }
    }

    /// Asks every connection how far its vBuckets have come.
    fn poll_progress(&mut self, now: Instant) {
        self.poll_progress_at = now + POLL_PROGRESS;
        for node in self.nodes.values() {
            if let Slot::Up { commands, .. } = &node.slot {
                let _ = commands.send(Command::FetchHighSeqnos);
            }
        }
    }

    /// Asks soon whether the ends are still there: streams that go on elsewhere may be of another
    /// history.
    fn doubt_ends(&mut self, now: Instant) {
        if self.config.end_exists {
            self.poll_progress_at = self.poll_progress_at.min(now + POLL_END);
        }
    }

    fn progressed(&mut self, progress: &[Progress], now: Instant) -> Result<(), Error> {
        for &progress in progress {
            if self.config.end_exists {
                self.reconciler.check_end(progress)?;
            }
            let Progress { vbid, seqno, high_seqno, .. } = progress;
            let Some(still) = self.reconciler.progressed(progress, now) else { continue };
            tracing::warn!(%vbid, %seqno, %high_seqno, ?still, "a vbucket lags without progress");
            let event = StreamEvent::Lagging { vbid, seqno, high_seqno, still };
            self.stats.events.push(event);
        }
        Ok(())
    }

    fn node_name(&self, id: ConnectionId) -> String {
        let node = self.nodes.iter().find(|(_, node)| node.id() == Some(id));
        node.map_or_else(String::new, |(address, _)| address.to_string())
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

    const fn new_id(&mut self) -> ConnectionId {
        self.next_id += 1;
        ConnectionId(self.next_id)
    }
}

impl Node {
    const fn id(&self) -> Option<ConnectionId> {
        match self.slot {
            Slot::Connecting(id) | Slot::Up { id, .. } => Some(id),
            Slot::Waiting(_) => None,
        }
    }
}

fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}
