//! The nodes of a stream and their connections.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dcp_proto::BatchSink;
use dcp_proto::consumer::ConnectionConfig;
use dcp_proto::topology::{Address, BucketConfig};
use dcp_wire::Vbid;
use tokio::sync::mpsc;

use super::{Cluster, Event};
use crate::connect::ConnectionId;
use crate::connection::{NodeConnection, now};
use crate::driver::{Command, Driver};
use crate::events::StreamEvent;
use crate::queue::Link;
use crate::reconciler::SETTLED;
use crate::retry::Backoff;
use crate::{Chain, Error};

/// A node's connection.
pub(super) enum Slot {
    /// Being made.
    Connecting(ConnectionId),
    /// In use.
    Up { id: ConnectionId, link: Arc<Link>, commands: mpsc::UnboundedSender<Command> },
    /// Not to be tried before this time.
    Waiting(Instant),
}

pub(super) struct Node {
    pub(super) slot: Slot,
    /// Failures in a row, for the wait before the next attempt: connections that could not be made,
    /// or did not serve streams for a while.
    failures: u32,
    /// Since when a stream was open on the connection.
    serves_since: Option<Instant>,
    /// The last failure.
    error: Option<Arc<Error>>,
}

impl Node {
    pub(super) const fn connecting(id: ConnectionId) -> Self {
        Self { slot: Slot::Connecting(id), failures: 0, serves_since: None, error: None }
    }

    pub(super) const fn id(&self) -> Option<ConnectionId> {
        match self.slot {
            Slot::Connecting(id) | Slot::Up { id, .. } => Some(id),
            Slot::Waiting(_) => None,
        }
    }
}

impl<S: BatchSink> Cluster<S> {
    /// Assigns a vBucket to the connection of a node, which is opened if necessary.
    pub(super) fn place(&mut self, vbid: Vbid, address: &Address, now: Instant) {
        let id = match self.nodes.get(address).map(|node| (&node.slot, &node.error)) {
            Some((Slot::Connecting(id) | Slot::Up { id, .. }, _)) => *id,
            Some((Slot::Waiting(until), error)) if *until > now => {
                return self.reconciler.postpone(vbid, error.clone(), now);
            }
            _ => self.connect(address),
        };
        self.reconciler.assign(vbid, id);
    }

    /// Closes streams of vBuckets that the map assigns to another node; they are reported as ended
    /// and opened there, at once if they were not requested yet.
    pub(super) fn follow_map(
        &mut self,
        map: &BucketConfig,
        vbid: Vbid,
        on: ConnectionId,
        now: Instant,
    ) {
        let Some(address) = self.bucket.address_of(map, vbid) else { return };
        let right = self.nodes.get(&address).and_then(Node::id);
        if right == Some(on) {
            return;
        }
        if self.reconciler.recall(vbid, now) {
            return;
        }
        let wrong = self.nodes.values().find(|node| node.id() == Some(on));
        if let Some(Node { slot: Slot::Up { commands, .. }, .. }) = wrong {
            let _ = commands.send(Command::Close(vbid));
            let node = address.to_string();
            self.stats.events.push(StreamEvent::Moved { vbid, node });
        }
    }

    /// Drops idle connections to nodes without active vBuckets, which may have left the cluster.
    pub(super) fn retire(&mut self) {
        let named = &self.named;
        if self.nodes.keys().all(|address| named.contains(address)) {
            return;
        }
        let used: HashSet<ConnectionId> =
            self.reconciler.placed().into_iter().map(|(_, on)| on).collect();
        let (stats, backlog) = (&self.stats, &mut self.backlog);
        self.nodes.retain(|address, node| {
            let keep = named.contains(address) || node.id().is_some_and(|id| used.contains(&id));
            if !keep && let Slot::Up { link, .. } = &node.slot {
                // Its task ends when the sender of its commands is dropped.
                stats.fold(link);
                backlog.add(Arc::clone(link));
            }
            keep
        });
    }

    /// Closes all connections at the end of the stream.
    pub(super) fn leave_nodes(&mut self) {
        for node in std::mem::take(&mut self.nodes).into_values() {
            if let Slot::Up { link, .. } = node.slot {
                link.close();
            }
        }
    }

    fn connect(&mut self, address: &Address) -> ConnectionId {
        let id = self.new_id();
        let known = self.nodes.entry(address.clone());
        let node = known.or_insert_with(|| Node::connecting(id));
        node.slot = Slot::Connecting(id);
        let (bucket, opening) = (Arc::clone(&self.bucket), self.config.opening.clone());
        let (outcomes, address) = (self.outcomes.sender.clone(), address.clone());
        self.errands.spawn(async move {
            let limit = bucket.connect_timeout();
            let result = bucket.connect_to(&address, Some(&opening), limit).await;
            let _ = outcomes.send(Event::Connected(address, id, Box::new(result)));
        });
        id
    }

    /// A connection was made, or failed. Temporary failures are retried until the stream's retry
    /// timeout.
    ///
    /// # Errors
    /// A failure that is not temporary.
    pub(super) fn connected(
        &mut self,
        address: &Address,
        id: ConnectionId,
        result: Result<NodeConnection, Error>,
    ) -> Result<(), Error> {
        let now = now();
        let Some(node) = self.nodes.get_mut(address).filter(|node| node.id() == Some(id)) else {
            return Ok(());
        };
        match result {
            Ok(connection) => self.made(address, id, connection),
            Err(error) if !self.bucket.may_pass(&error) => return Err(error),
            Err(error) => {
                tracing::warn!(%address, error = %Chain(&error), "a node cannot be reached");
                // A connection that was lost before was counted then.
                if node.failures == 0 {
                    self.stats.update(|stats, _| stats.reconnects += 1);
                }
                let error = Arc::new(error);
                let wait = Backoff::SHORT.wait(node.failures, &mut self.randomness);
                node.slot = Slot::Waiting(now + wait);
                node.failures = node.failures.saturating_add(1);
                node.error = Some(Arc::clone(&error));
                self.reconciler.unreachable(id, &error, now);
                self.poll_map_at = self.poll_map_at.min(now);
            }
        }
        Ok(())
    }

    /// A connection was opened.
    pub(super) fn made(&mut self, address: &Address, id: ConnectionId, connection: NodeConnection) {
        let slot = self.start(id, connection);
        if let Some(node) = self.nodes.get_mut(address) {
            node.slot = slot;
        }
    }

    /// A stream was opened on a connection.
    pub(super) fn serves(&mut self, id: ConnectionId) {
        if let Some(node) = self.nodes.values_mut().find(|node| node.id() == Some(id)) {
            node.serves_since.get_or_insert_with(now);
            node.error = None;
        }
    }

    /// Starts the task of a connection.
    fn start(&mut self, id: ConnectionId, mut connection: NodeConnection) -> Slot {
        self.hide_by_manifest();
        let config = ConnectionConfig {
            filter: self.config.filter.clone(),
            ignore_purged_tombstones: self.config.ignore_purged_tombstones,
            on_rollback: self.config.on_rollback,
            delivery: self.config.delivery.clone(),
            ..connection.machine.config().clone()
        };
        connection.machine = connection.machine.reuse(config, now());
        let link = Arc::new(Link::default());
        let (commands, receiver) = mpsc::unbounded_channel();
        let driver = Driver {
            id,
            connection,
            sink: (self.make_sink)(),
            policy: self.config.batch,
            queue: Arc::clone(&self.queue),
            link: Arc::clone(&link),
            commands: receiver,
            reports: self.reports.sender.clone(),
            cancel: self.cancel.clone(),
        };
        let (bucket, opening) = (Arc::clone(&self.bucket), self.config.opening.clone());
        self.tasks.spawn(async move {
            if let Some(connection) = driver.run().await {
                bucket.put_into_pool(connection, Some(opening));
            }
        });
        self.stats.update(|_, links| links.push(Arc::clone(&link)));
        Slot::Up { id, link, commands }
    }

    /// A connection was lost. It is replaced at once if it had served streams for a while: otherwise
    /// a node that accepts connections and nothing else would get one for each vBucket.
    pub(super) fn drop_connection(&mut self, id: ConnectionId, cause: Arc<Error>) {
        let now = now();
        let Some(node) = self.nodes.values_mut().find(|node| node.id() == Some(id)) else { return };
        let served = node.serves_since.take().map(|since| now.saturating_duration_since(since));
        if served.is_some_and(|served| served >= SETTLED) {
            node.failures = 0;
        }
        let is_outage = node.failures == 0 || served.is_some();
        let wait = match node.failures {
            0 => Duration::ZERO,
            failures => Backoff::SHORT.wait(failures, &mut self.randomness),
        };
        node.failures = node.failures.saturating_add(1);
        node.error = Some(cause);
        let slot = std::mem::replace(&mut node.slot, Slot::Waiting(now + wait));
        if let Slot::Up { link, .. } = slot {
            if is_outage {
                self.stats.update(|stats, _| stats.reconnects += 1);
            }
            self.stats.fold(&link);
            self.backlog.add(link);
        }
    }

    pub(super) fn node_name(&self, id: ConnectionId) -> String {
        let node = self.nodes.iter().find(|(_, node)| node.id() == Some(id));
        node.map_or_else(String::new, |(address, _)| address.to_string())
    }

    pub(super) const fn new_id(&mut self) -> ConnectionId {
        self.next_id += 1;
        ConnectionId(self.next_id)
    }
}
