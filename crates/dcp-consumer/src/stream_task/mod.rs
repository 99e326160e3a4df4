//! The task of one stream: places its vBuckets on connections and keeps them there.
//!
//! The rules are in its parts, which are values: their methods take the time and return what to do.
//! Only the task does IO, in [tasks of its own](child_tasks).

mod backlog;
mod child_tasks;
mod config;
mod connections;
mod lag_watch;
mod log;
mod map_watch;
mod persistence_poll;
mod persistence_watch;
mod placement;
mod poison_packets;
mod reports;
mod shared_stats;

use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use dcp_proto::BatchSink;
use dcp_proto::consumer::{ConnectionConfig, Exclusions};
use dcp_proto::topology::{Address, BucketConfig};
use dcp_wire::{CollectionId, Vbid};
use rand::rngs::StdRng;
use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use self::child_tasks::{ChildTasks, Event};
use self::config::Dropped;
pub(crate) use self::config::StreamConfig;
use self::connections::{Assignment, Connections};
use self::lag_watch::LagWatch;
use self::log::CLUSTER;
use self::map_watch::{MapPoll, MapWatch, POLL_INTERVAL};
use self::persistence_watch::PersistenceWatch;
pub(crate) use self::placement::{Placement, check_end};
use self::poison_packets::PoisonPackets;
use self::shared_stats::Outdated;
pub(crate) use self::shared_stats::{KnownVbucket, SharedStats};
use crate::bucket::Bucket;
use crate::connect::ConnectionId;
use crate::connection::{NodeConnection, now, sleep_until};
use crate::driver::{Command, Driver, Load};
use crate::error::Seconds;
use crate::events::StreamEvent;
use crate::queue::{Entry, Queue, SharedState};
use crate::{Error, ErrorKind, VbucketState};

/// Longest time to prepare connections for the next stream.
const LEAVE_WITHIN: Duration = Duration::from_secs(1);

/// How soon it is checked again whether the application has taken the changes of ended connections.
const RECHECK_BACKLOG: Duration = Duration::from_millis(50);

/// The task of one stream.
pub(crate) struct StreamTask<S: BatchSink> {
    bucket: Arc<Bucket>,
    config: StreamConfig,
    make_sink: Box<dyn Fn() -> S + Send + Sync>,
    queue: Arc<Queue<S::Batch>>,
    stats: Arc<SharedStats>,
    placement: Placement,
    connections: Connections,
    map: MapWatch<Box<NodeConnection>>,
    /// Persisted seqnos of copies, if changes wait for them.
    persistence: PersistenceWatch,
    lag: LagWatch,
    poison_packets: PoisonPackets,
    load: Arc<Load>,
    outdated: Outdated,
    children: ChildTasks,
    randomness: StdRng,
    cancel: CancellationToken,
}

impl<S: BatchSink> StreamTask<S> {
    pub(crate) fn new(
        bucket: Arc<Bucket>,
        config: StreamConfig,
        placement: Placement,
        make_sink: Box<dyn Fn() -> S + Send + Sync>,
        queue: Arc<Queue<S::Batch>>,
        stats: Arc<SharedStats>,
        cancel: CancellationToken,
    ) -> Self {
        let mut task = Self {
            randomness: bucket.randomness(),
            children: ChildTasks::new(Arc::clone(&bucket), cancel.clone()),
            lag: LagWatch::new(config.end_exists, now()),
            map: MapWatch::new(now()),
            bucket,
            config,
            make_sink,
            queue,
            stats,
            placement,
            connections: Connections::default(),
            persistence: PersistenceWatch::default(),
            poison_packets: PoisonPackets::default(),
            load: Arc::default(),
            outdated: Outdated::All,
            cancel,
        };
        // Readers before the task runs must see unknown vBuckets, not an empty list.
        task.publish();
        task
    }

    /// Runs the stream until it is complete, fails, or is closed. `connections` are already open.
    pub(crate) async fn run(mut self, connections: Vec<NodeConnection>) {
        for connection in connections {
            let id = self.connections.begin(&connection.address);
            self.start(id, connection);
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
        self.connections.close();
        self.outdated = Outdated::All;
        self.publish();
        if matches!(last, Entry::Finished) && self.bucket.pool().is_on() {
            // Lets the tasks return their connections to the pool for the next stream.
            if timeout(LEAVE_WITHIN, self.children.join_connected()).await.is_err() {
                tracing::debug!(target: CLUSTER,
                    "a connection is not pooled: the server did not end a stream in time");
            }
            if let Some(connection) = self.map.into_connection() {
                self.bucket.put_into_pool(*connection, None);
            }
        }
        self.queue.push(match last {
            Entry::Error(error) => Entry::Error(self.bucket.explain(error)),
            last => last,
        });
        self.cancel.cancel();
    }

    /// One turn: handles what is due, then waits for the next event. Ends with the last entry of
    /// the stream.
    async fn turn(&mut self, cancel: &CancellationToken) -> Result<Option<()>, Entry<S::Batch>> {
        self.act().map_err(Entry::Error)?;
        if self.placement.is_complete() {
            return Err(self.last_entry());
        }
        self.publish();
        let deadline = self.deadline();
        let event = tokio::select! {
            biased;
            () = cancel.cancelled() => return Ok(None),
            event = self.children.next() => event.map_err(Entry::Error)?,
            () = self.stats.stale_read() => {
                if self.placement.has_streaming() {
                    self.lag.stale_read(now());
                }
                None
            }
            () = sleep_until(deadline) => {
                self.outdated = Outdated::All;
                None
            }
        };
        if let Some(event) = event {
            self.handle(event).map_err(Entry::Error)?;
            // A thousand streams may end at once: they are handled together.
            while let Some(report) = self.children.try_next_report() {
                self.handle(report).map_err(Entry::Error)?;
            }
        }
        Ok(Some(()))
    }

    fn handle(&mut self, event: Event) -> Result<(), Error> {
        if !matches!(event, Event::Driver(..)) {
            self.outdated = Outdated::All;
        }
        match event {
            Event::Driver(id, report) => self.reported(id, report),
            Event::Connected(address, id, result) => self.connected(&address, id, *result),
            Event::MapFetched(result) => {
                self.map.fetched(result);
                self.bucket.check_identity()?;
                self.drop_from_filter().map(drop)
            }
            Event::MapProbed(connection) => {
                self.map.probed(connection, now());
                self.bucket.check_identity()
            }
            Event::Polled(address, polled) => {
                let now = now();
                if polled.is_map_doubtful() {
                    self.poll_map(now);
                }
                let retry_timeout = self.placement.retry_timeout();
                let advanced = self.persistence.polled(&address, polled, retry_timeout, now)?;
                self.connections.send_persisted(advanced);
                Ok(())
            }
        }
    }

    /// Handles what is due.
    fn act(&mut self) -> Result<(), Error> {
        let now = now();
        // Waiting for the application does not count towards the time without a stream.
        let buffer_size = self.config.opening.buffer_size;
        // Usually none is idle, and then nothing is due: one look at all of them is enough.
        let has_idle = self.placement.has_idle();
        if has_idle && self.connections.is_backlogged(buffer_size) {
            self.placement.hold_up(now, now + RECHECK_BACKLOG);
        }
        if has_idle && let Some((vbid, idle, cause)) = self.placement.stalled(now) {
            let cause = cause.or_else(|| self.map.error().cloned());
            return Err(Error::out_of_reach(vbid, idle, cause));
        }
        let map = self.bucket.config();
        if self.map.is_new(&map) {
            self.follow_map(&map, now);
        }
        self.retire_connections();
        if has_idle {
            self.outdated = Outdated::All;
            for vbid in self.placement.due(now) {
                self.place(vbid, &map, now);
            }
            self.open_streams(now);
            if self.map.is_due(now) {
                self.poll_map(now);
            }
        }
        if now >= self.lag.deadline() {
            self.poll_lag(now);
        }
        if self.placement.has_streaming() {
            self.probe_map(now);
        }
        self.poll_persistence(now);
        let alive = self.connections.ids();
        self.placement.check(|id| alive.contains(&id))
    }

    /// The map is new: streams and requests for persisted seqnos move to where it says.
    fn follow_map(&mut self, map: &Arc<BucketConfig>, now: Instant) {
        self.outdated = Outdated::All;
        let (bucket, connections) = (&self.bucket, &self.connections);
        let home = |vbid| {
            let address = bucket.address_of(map, vbid)?;
            let id = connections.id_of(&address);
            Some((address, id))
        };
        for misplaced in self.placement.follow_map(home, now) {
            if self.connections.send(misplaced.on, Command::Close(misplaced.vbid)) {
                let (vbid, node) = (misplaced.vbid, misplaced.to.to_string());
                self.stats.events.push(StreamEvent::Moved { vbid, node });
            }
        }
        let advanced = self.persistence.follow(|vbid| self.bucket.copies_of(map, vbid), now);
        self.connections.send_persisted(advanced);
        self.children.retain_pollers(|address| self.persistence.needs(address));
        self.map.follow(Arc::clone(map), self.bucket.data_nodes(map));
    }

    /// Closes connections to nodes that no longer have active vBuckets.
    fn retire_connections(&mut self) {
        let used = || self.placement.placed().into_iter().map(|(_, on)| on).collect();
        for shared in self.connections.retire(self.map.data_nodes(), used) {
            self.stats.fold(&shared);
        }
    }

    /// Assigns a vBucket to the connection of its node, which is opened if necessary.
    fn place(&mut self, vbid: Vbid, map: &BucketConfig, now: Instant) {
        let Some(address) = self.bucket.address_of(map, vbid) else {
            self.map.poll_by(now + POLL_INTERVAL);
            let cause = self.no_node(map, vbid);
            return self.placement.postpone(vbid, Some(cause), false, now);
        };
        let id = match self.connections.assign(&address, now) {
            Assignment::Existing(id) => id,
            Assignment::New(id) => {
                self.children.connect(address, id, self.config.opening.clone());
                id
            }
            Assignment::Later(cause) => {
                return self.placement.postpone(vbid, cause, true, now);
            }
        };
        self.placement.assign(vbid, id);
    }

    /// Why a vBucket that the map assigns to no node is not streamed.
    fn no_node(&self, map: &BucketConfig, vbid: Vbid) -> Arc<Error> {
        if let Some(error) = self.bucket.why_no_address(map, vbid) {
            return Arc::new(error);
        }
        let error = Error::new(ErrorKind::Connect, "the cluster map assigns it to no node");
        Arc::new(match self.map.error() {
            Some(cause) => error.with_source(Arc::clone(cause)),
            None => error,
        })
    }

    /// Opens the streams of vBuckets that were assigned to connections in use.
    fn open_streams(&mut self, now: Instant) {
        // Usually none: looking through the vBuckets once saves doing so for every node.
        let requesting = self.placement.requesting();
        for (address, up) in self.connections.up() {
            if !requesting.contains(&up.id) {
                continue;
            }
            for (vbid, end_seqno, from) in self.placement.take_requests(up.id) {
                // An ended task accepts nothing; one that is ending returns what it was sent.
                let command = Command::Open { vbid, end_seqno, from };
                if let Err(Command::Open { vbid, from, .. }) = up.send(command) {
                    let message = format!("the connection to {address} has ended");
                    let cause = Arc::new(Error::new(ErrorKind::ConnectionLost, message));
                    self.placement.lost(up.id, vec![(vbid, *from)], &cause, now);
                }
            }
        }
    }

    /// A connection was made, or failed. Temporary failures are retried until the stream's retry
    /// timeout.
    ///
    /// # Errors
    /// A failure that is not temporary.
    fn connected(
        &mut self,
        address: &Address,
        id: ConnectionId,
        result: Result<NodeConnection, Error>,
    ) -> Result<(), Error> {
        if !self.connections.awaits(address, id) {
            return Ok(());
        }
        match result {
            Ok(connection) => {
                self.start(id, connection);
                let map = self.bucket.config();
                let is_there = |vbid| self.bucket.address_of(&map, vbid).as_ref() == Some(address);
                self.placement.reached(is_there, now());
            }
            Err(error) if !self.bucket.may_pass(&error) => return Err(error),
            Err(error) => {
                let (now, error) = (now(), Arc::new(error));
                let cause = Arc::clone(&error);
                if self.connections.failed(address, cause, now, &mut self.randomness) {
                    self.stats.update(|stats, _| stats.reconnects += 1);
                }
                self.placement.unreachable(id, &error, now);
                self.map.poll_by(now);
            }
        }
        Ok(())
    }

    /// Starts the task of a connection.
    fn start(&mut self, id: ConnectionId, mut connection: NodeConnection) {
        if let Some(exclusions) = self.config.exclude_by_manifest(&self.bucket.manifest()) {
            self.exclude(&exclusions);
        }
        let config = ConnectionConfig {
            filter: self.config.filter.clone(),
            ignore_purged_tombstones: self.config.ignore_purged_tombstones,
            on_rollback: self.config.on_rollback,
            delivery: self.config.delivery.clone(),
            ..connection.machine.config().clone()
        };
        connection.machine = connection.machine.reuse(config, now());
        let (shared, (commands, receiver)) =
            (Arc::<SharedState>::default(), mpsc::unbounded_channel());
        self.connections.opened(&connection.address, id, Arc::clone(&shared), commands);
        let driver = Driver {
            id,
            connection,
            sink: (self.make_sink)(),
            policy: self.config.batch,
            queue: Arc::clone(&self.queue),
            shared: Arc::clone(&shared),
            load: Arc::clone(&self.load),
            commands: receiver,
            reports: self.children.reports(),
            cancel: self.cancel.clone(),
        };
        self.children.drive(driver, self.config.opening.clone());
        self.stats.update(|_, connections| connections.push(shared));
    }

    /// Tells open connections what to leave out.
    fn exclude(&self, exclusions: &Exclusions) {
        self.connections.send_all(|| Command::Exclude(exclusions.clone()));
    }

    /// Requests the map over some connection or, if that may not help, from any node.
    fn poll_map(&mut self, now: Instant) {
        let has_waited = self.placement.has_waited(now, POLL_INTERVAL);
        let MapPoll { over_connection, any_node } =
            self.map.poll(self.connections.up().count(), has_waited, now);
        // A random one: a fixed choice might be dead without being detected.
        let asked = over_connection.then(|| self.connections.any_up(&mut self.randomness));
        let is_asked = asked.flatten().is_some_and(|up| up.send(Command::FetchMap).is_ok());
        if !is_asked || any_node {
            self.fetch_map();
        }
    }

    /// Requests the map and the manifest from any node, unless a request is in progress.
    fn fetch_map(&mut self) {
        if self.map.begin_fetch() {
            self.children.fetch_map();
        }
    }

    /// Requests the map from a node that the stream does not use, if that is due.
    fn probe_map(&mut self, now: Instant) {
        let used: Vec<_> = self.connections.up().map(|(address, _)| address).collect();
        if let Some((address, kept)) = self.map.probe(&used, now, &mut self.randomness) {
            self.children.probe_map(address, kept);
        }
    }

    /// Requests high seqnos over every connection.
    fn poll_lag(&mut self, now: Instant) {
        let collections = self.collections();
        let interval = self.lag.poll(collections.as_ref().map_or(0, |ids| ids.len()), now);
        self.stats.requested(now, interval);
        for (_, up) in self.connections.up() {
            let _ = up.send(Command::FetchHighSeqnos);
            if let Some(ids) = &collections {
                let _ = up.send(Command::FetchCollectionSeqnos(Arc::clone(ids)));
            }
        }
    }

    /// The collections whose seqnos are requested; `None` if the application does not use their lag.
    fn collections(&self) -> Option<Arc<[CollectionId]>> {
        if !self.config.is_filtered() && !self.stats.wants_collections() {
            return None;
        }
        let ids = lag_watch::passed(&self.config.filter, &self.bucket.manifest())?;
        Some(ids.into())
    }

    /// Requests persisted seqnos from the nodes that are due.
    fn poll_persistence(&mut self, now: Instant) {
        for (address, branches) in self.persistence.due(now) {
            self.children.poll_persisted(&address, branches);
        }
        for (vbid, on) in self.persistence.left_behind(now) {
            self.outdated.add(vbid);
            tracing::debug!(target: CLUSTER, vbucket = vbid.0,
                "the active copy has left the branch of unpersisted changes");
            self.connections.send(on, Command::Close(vbid));
        }
        for (vbid, waits) in self.persistence.overdue(now) {
            self.stats.events.push(StreamEvent::Unpersisted { vbid, waits });
            let waits = Seconds(waits);
            tracing::warn!(name: "unpersisted", target: CLUSTER, vbucket = vbid.0, %waits,
                "changes stay unpersisted: a copy does not have them on disk");
        }
    }

    /// Removes from the filter of future requests what the newest known manifest no longer has;
    /// open streams end by themselves once nothing remains for them. Returns whether anything was
    /// removed.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if nothing remains before any stream was opened.
    fn drop_from_filter(&mut self) -> Result<bool, Error> {
        self.outdated = Outdated::All;
        match self.config.drop_from_filter(&self.bucket.manifest()) {
            Dropped::Nothing => Ok(false),
            Dropped::Some(remaining) => {
                tracing::warn!(name: "collection_dropped", target: CLUSTER, ?remaining,
                    "a collection that the filter names was dropped");
                self.connections.send_all(|| Command::Filter(remaining.clone()));
                Ok(true)
            }
            Dropped::All if self.placement.complete_refused() => Ok(true),
            Dropped::All => {
                Err(Error::option(&["collections"], "the scope or collections were dropped"))
            }
        }
    }

    /// How a stream ends when all vBuckets are complete. A stream without an end gets here only
    /// when everything in its filter was dropped, which must not look like a normal end.
    fn last_entry(&self) -> Entry<S::Batch> {
        if !self.placement.is_endless() {
            return Entry::Finished;
        }
        let message = "everything in the filter was dropped, so no more changes can arrive: open \
                       another stream for its replacement";
        Entry::Error(Error::new(ErrorKind::StreamEnded, message))
    }

    fn deadline(&self) -> Option<Instant> {
        let (is_waiting, is_streaming) =
            (self.placement.has_idle(), self.placement.has_streaming());
        let all = [
            is_waiting.then(|| self.placement.deadline()).flatten(),
            self.map.deadline(is_waiting, is_streaming),
            is_streaming.then(|| self.lag.deadline()),
            self.persistence.deadline(),
        ];
        all.into_iter().flatten().min()
    }

    /// Publishes the figures, but of vBuckets only what is outdated: there may be a thousand, and
    /// their streams may end one by one.
    fn publish(&mut self) {
        let connections = self.connections.up().count();
        self.stats.update(|stats, _| {
            self.placement.count(stats);
            stats.connections = connections;
        });
        let outdated = std::mem::replace(&mut self.outdated, Outdated::These(Vec::new()));
        let mut known = self.stats.vbuckets.lock().unwrap_or_else(PoisonError::into_inner);
        match outdated {
            Outdated::All => {
                known.clear();
                known.extend(self.placement.states().map(|state| self.known(state)));
            }
            Outdated::These(vbids) => {
                for vbid in vbids {
                    if let Ok(index) = known.binary_search_by_key(&vbid, |each| each.vbid)
                        && let Some(each) = known.get_mut(index)
                        && let Some(state) = self.placement.state_of(vbid)
                    {
                        *each = self.known(state);
                    }
                }
            }
        }
    }

    fn known(
        &self,
        (vbid, state, idle_since): (Vbid, VbucketState, Option<Instant>),
    ) -> KnownVbucket {
        let (unpersisted_since, is_diverged) = self.persistence.unpersisted_since(vbid);
        KnownVbucket {
            vbid,
            state,
            high_seqno: self.lag.high_seqno(vbid),
            persisted_seqno: self.persistence.persisted(vbid),
            unpersisted_since,
            is_diverged,
            idle_since,
        }
    }
}
