//! Asking another node for the cluster map while a stream uses only one node.
//!
//! Nodes push new maps, but one that is cut off from its cluster has none: it streams what it has,
//! and a failover that gave its vBuckets to others stays unknown for as long as the connection
//! lasts. Of several nodes, the others know.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dcp_proto::BatchSink;
use dcp_proto::topology::Address;
use rand::seq::IteratorRandom;
use tokio::time::timeout;

use super::nodes::{Node, Slot};
use super::{Cluster, Event};
use crate::connection::{NodeConnection, now};
use crate::{Chain, Error};

/// How often another node is asked.
const INTERVAL: Duration = Duration::from_secs(10);

/// How long to wait after a failure: a node that refuses the user should not be asked often.
const AFTER_FAILURE: Duration = Duration::from_secs(60);

/// The connection to the other node, and when that node is asked next.
pub(super) struct Lookout {
    at: Instant,
    /// Whether a node is being asked.
    is_out: bool,
    connection: Option<Box<NodeConnection>>,
}

impl Lookout {
    pub(super) fn new(now: Instant) -> Self {
        Self { at: now + INTERVAL, is_out: false, connection: None }
    }

    /// When the other node is asked next; `None` while it is being asked.
    pub(super) fn deadline(&self) -> Option<Instant> {
        (!self.is_out).then_some(self.at)
    }

    /// The connection, at the end of the stream.
    pub(super) fn into_connection(self) -> Option<NodeConnection> {
        self.connection.map(|connection| *connection)
    }
}

impl<S: BatchSink> Cluster<S> {
    /// Asks another node for the map if that is due and the stream uses only one node.
    pub(super) fn look_out(&mut self, now: Instant) {
        if self.lookout.deadline().is_none_or(|at| now < at) {
            return;
        }
        self.lookout.at = now + INTERVAL;
        let kept = self.lookout.connection.take();
        let up = |(_, node): &(&Address, &Node)| matches!(node.slot, Slot::Up { .. });
        let mut used = self.nodes.iter().filter(up);
        let (Some((used, _)), None) = (used.next(), used.next()) else { return };
        let kept = kept.filter(|kept| kept.address != *used && self.named.contains(&kept.address));
        let others = self.named.iter().filter(|address| *address != used);
        let Some(address) = others.choose(&mut self.randomness).cloned() else { return };
        self.lookout.is_out = true;
        let (bucket, outcomes) = (Arc::clone(&self.bucket), self.outcomes.sender.clone());
        self.errands.spawn(async move {
            let limit = bucket.connect_timeout();
            let ask = async {
                let Some(mut kept) = kept else {
                    return bucket.connect_to(&address, None, limit).await.map(Box::new);
                };
                bucket.refresh(&mut kept).await.map(|()| kept)
            };
            let connection = match timeout(limit, Box::pin(ask)).await {
                Ok(Ok(connection)) => Some(connection),
                Ok(Err(error)) => {
                    tracing::debug!(error = %Chain(&error), "another node sent no map");
                    None
                }
                Err(_) => None,
            };
            let _ = outcomes.send(Event::LookedOut(connection));
        });
    }

    /// Another node has sent its map, or has failed to.
    ///
    /// # Errors
    /// [`ErrorKind::BucketNotFound`](crate::ErrorKind::BucketNotFound) if the bucket was recreated.
    pub(super) fn looked_out(
        &mut self,
        connection: Option<Box<NodeConnection>>,
    ) -> Result<(), Error> {
        if connection.is_none() {
            self.lookout.at = now() + AFTER_FAILURE;
        }
        (self.lookout.is_out, self.lookout.connection) = (false, connection);
        self.bucket.check_identity()
    }
}
