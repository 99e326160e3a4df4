//! The tasks that a stream's task has spawned, and what they report.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_proto::BatchSink;
use dcp_proto::topology::Address;
use tokio::sync::mpsc;
use tokio::task::{JoinError, JoinSet};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use super::log::CLUSTER;
use super::persistence_poll::poll_persisted;
use super::persistence_watch::{Branches, Polled};
use crate::bucket::Bucket;
use crate::connect::ConnectionId;
use crate::connection::NodeConnection;
use crate::driver::{Driver, Report};
use crate::opening::Opening;
use crate::socket::Socket;
use crate::{Chain, Error, ErrorKind};

/// A connection to a node that the stream does not use, with the node's address.
pub(super) type ProbeConnection = (Address, Box<NodeConnection>);

/// Events of the task.
pub(super) enum Event {
    /// From the task of a connection.
    Driver(ConnectionId, Report),
    /// A connection was made, or failed.
    Connected(Address, ConnectionId, Box<Result<NodeConnection, Error>>),
    /// A map was fetched from some node, or from none.
    MapFetched(Result<(), Error>),
    /// A node that the stream does not use has sent its map, or has failed to.
    MapProbed(Option<ProbeConnection>),
    /// Persisted seqnos of a node.
    Polled(Address, Polled),
}

/// Both ends of a channel of events. Not bounded: each vBucket reports once per request it made,
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

/// The tasks of a stream besides its own.
pub(super) struct ChildTasks {
    bucket: Arc<Bucket>,
    cancel: CancellationToken,
    reports: Channel<(ConnectionId, Report)>,
    outcomes: Channel<Event>,
    /// The tasks of connections and of polled nodes, which may return connections to the pool.
    connected: JoinSet<()>,
    /// Tasks that make connections and fetch maps.
    connecting: JoinSet<()>,
    /// Requests for persisted seqnos, by node.
    pollers: BTreeMap<Address, mpsc::UnboundedSender<Branches>>,
}

impl ChildTasks {
    pub(super) fn new(bucket: Arc<Bucket>, cancel: CancellationToken) -> Self {
        Self {
            bucket,
            cancel,
            reports: Channel::new(),
            outcomes: Channel::new(),
            connected: JoinSet::new(),
            connecting: JoinSet::new(),
            pollers: BTreeMap::new(),
        }
    }

    /// The next event; `None` if a task has ended. Cancellation-safe.
    ///
    /// # Errors
    /// [`ErrorKind::StreamEnded`] if a task panicked.
    pub(super) async fn next(&mut self) -> Result<Option<Event>, Error> {
        tokio::select! {
            biased;
            Some(outcome) = self.outcomes.receiver.recv() => Ok(Some(outcome)),
            Some((id, report)) = self.reports.receiver.recv() => {
                Ok(Some(Event::Driver(id, report)))
            }
            Some(ended) = self.connected.join_next() => ended.map(|()| None).map_err(panicked),
            Some(ended) = self.connecting.join_next() => ended.map(|()| None).map_err(panicked),
        }
    }

    /// The next report of a connection, if there is one.
    pub(super) fn try_next_report(&mut self) -> Option<Event> {
        let (id, report) = self.reports.receiver.try_recv().ok()?;
        Some(Event::Driver(id, report))
    }

    /// Makes a connection to a node.
    pub(super) fn connect(&mut self, address: Address, id: ConnectionId, opening: Opening) {
        let (bucket, outcomes) = (Arc::clone(&self.bucket), self.outcomes.sender.clone());
        self.connecting.spawn(async move {
            let limit = bucket.connect_timeout();
            let result = bucket.connect_to(&address, Some(&opening), limit).await;
            let _ = outcomes.send(Event::Connected(address, id, Box::new(result)));
        });
    }

    /// Fetches the map and the manifest from any node.
    pub(super) fn fetch_map(&mut self) {
        let (bucket, outcomes) = (Arc::clone(&self.bucket), self.outcomes.sender.clone());
        self.connecting.spawn(async move {
            let _ = outcomes.send(Event::MapFetched(bucket.fetch_map().await));
        });
    }

    /// Fetches the map from a node that the stream does not use, over this connection or a new one.
    pub(super) fn probe_map(&mut self, address: Address, kept: Option<Box<NodeConnection>>) {
        let (bucket, outcomes) = (Arc::clone(&self.bucket), self.outcomes.sender.clone());
        self.connecting.spawn(async move {
            let limit = bucket.connect_timeout();
            let ask = async {
                let Some(mut kept) = kept else {
                    return bucket.connect_to(&address, None, limit).await.map(Box::new);
                };
                bucket.refresh(&mut kept).await.map(|()| kept)
            };
            let connection = match timeout(limit, Box::pin(ask)).await {
                Ok(Ok(connection)) => Some((connection.address.clone(), connection)),
                Ok(Err(error)) => {
                    let error = Chain(&error);
                    tracing::debug!(target: CLUSTER, %error, "another node sent no map");
                    None
                }
                Err(_) => None,
            };
            let _ = outcomes.send(Event::MapProbed(connection));
        });
    }

    /// Where the task of a connection reports to.
    pub(super) fn reports(&self) -> mpsc::UnboundedSender<(ConnectionId, Report)> {
        self.reports.sender.clone()
    }

    /// Runs the task of a connection that was opened so.
    pub(super) fn drive<S: BatchSink>(&mut self, driver: Driver<S, Socket>, opening: Opening) {
        let bucket = Arc::clone(&self.bucket);
        self.connected.spawn(async move {
            if let Some(connection) = driver.run().await {
                bucket.put_into_pool(connection, Some(opening));
            }
        });
    }

    /// Requests persisted seqnos from a node.
    pub(super) fn poll_persisted(&mut self, address: &Address, branches: Branches) {
        let Err(refused) = self.poller(address).send(branches) else { return };
        // The runtime has ended its task; a new one takes over.
        self.pollers.remove(address);
        let _ = self.poller(address).send(refused.0);
    }

    /// The task that polls a node.
    fn poller(&mut self, address: &Address) -> &mpsc::UnboundedSender<Branches> {
        let Self { bucket, cancel, outcomes, connected, pollers, .. } = self;
        pollers.entry(address.clone()).or_insert_with(|| {
            let (sender, requests) = mpsc::unbounded_channel();
            let (outcomes, node) = (outcomes.sender.clone(), address.clone());
            let report = move |polled| {
                // There is no receiver only if the stream has ended.
                let _ = outcomes.send(Event::Polled(node.clone(), polled));
            };
            let poll = poll_persisted(Arc::clone(bucket), address.clone(), requests, report);
            let cancel = cancel.clone();
            connected.spawn(async move {
                let _ = cancel.run_until_cancelled(poll).await;
            });
            sender
        })
    }

    /// Ends the tasks that poll nodes which need not be polled any longer.
    pub(super) fn retain_pollers(&mut self, is_needed: impl Fn(&Address) -> bool) {
        self.pollers.retain(|address, _| is_needed(address));
    }

    /// Waits until no task has a connection any longer.
    pub(super) async fn join_connected(&mut self) {
        self.pollers.clear();
        while self.connected.join_next().await.is_some() {}
    }
}

/// A task of the stream panicked: its work will not be done.
fn panicked(error: JoinError) -> Error {
    let message = "a task of the stream panicked: please report this";
    Error::new(ErrorKind::StreamEnded, message).with_source(error)
}
