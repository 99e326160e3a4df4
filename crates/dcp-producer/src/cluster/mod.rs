//! Which node has which vBucket of which bucket, and what clients see of it.

mod buckets;
mod change;
mod config_json;
mod follow;
mod layout;
mod map;
mod membership;
mod node;
mod replicas;
mod served;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use dcp_producer_proto::ConnectionConfig;
use dcp_wire::message::ConfigVersion;
use tokio_util::sync::CancellationToken;

use crate::ProducerOptions;
use crate::chance::Chance;
use buckets::Buckets;
pub(crate) use buckets::Resumed;
pub(crate) use follow::Follower;
use follow::Versions;
use map::MapNode;
pub(crate) use map::NodeMap;
pub(crate) use node::{Node, NodePower, TlsAddresses};
use served::BucketDefaults;
pub(crate) use served::{BucketSettings, NodeBucket, ServedBucket};

/// Server version of the nodes, from which clients derive features.
pub(crate) const SERVER_VERSION: &str = "8.0.2";

/// An embedded cluster: its nodes and its buckets.
#[derive(Debug)]
pub(crate) struct Cluster {
    /// Identity of the cluster, 32 hex digits.
    pub(crate) uuid: String,
    chance: Arc<Chance>,
    defaults: BucketDefaults,
    buckets: RwLock<Buckets>,
    /// Held while copies are moved and while buckets are created and dropped, so that such
    /// operations do not overlap.
    operation: Mutex<()>,
    /// By number; nodes that left keep theirs.
    power: RwLock<Vec<Arc<NodePower>>>,
    /// Ends everything.
    stop: CancellationToken,
    /// Locked before the maps of buckets.
    map: RwLock<Arc<NodeMap>>,
    /// Follows the version of the map.
    versions: Arc<Versions>,
    /// Configuration of new DCP connections.
    dcp_config: RwLock<ConnectionConfig>,
}

impl Cluster {
    /// A cluster whose `nodes` share the vBuckets of one bucket evenly.
    pub(crate) fn new(
        options: &ProducerOptions,
        nodes: &[Node],
        chance: Arc<Chance>,
        stop: &CancellationToken,
    ) -> Self {
        let power = |_| Arc::new(NodePower::new(stop.clone()));
        let version = ConfigVersion { epoch: 1, rev: 1 };
        let dcp_config = ConnectionConfig {
            idle_timeout: options.dcp_idle_timeout,
            max_streams: options.max_streams,
            max_buffer_size: options.max_unacknowledged_bytes,
            ..ConnectionConfig::default()
        };
        let map_node = |&addresses| MapNode { addresses, is_member: true };
        let members = nodes.iter().map(map_node).collect();
        let alternate_host = options.alternate_host.as_deref().map(Arc::from);
        let map = Arc::new(NodeMap::new(version, members, alternate_host));
        let defaults = BucketDefaults::new(options);
        let first = ServedBucket::new(&defaults.settings, &defaults, &chance, Arc::clone(&map));
        let laid_out = first.lay_out(&(0..nodes.len()).collect::<Vec<_>>());
        debug_assert!(laid_out.is_ok(), "new copies take nothing over");
        let uuid = Some(new_uuid(&chance).into());
        let first_map = first.next_map(&map, uuid, Arc::default());
        *first.write_map() = first_map;
        Self {
            uuid: new_uuid(&chance),
            chance,
            defaults,
            buckets: RwLock::new(Buckets::new(first)),
            operation: Mutex::default(),
            power: RwLock::new(nodes.iter().map(power).collect()),
            stop: stop.clone(),
            map: RwLock::new(map),
            versions: Arc::default(),
            dcp_config: RwLock::new(dcp_config),
        }
    }

    /// The source of random numbers and time.
    pub(crate) const fn chance(&self) -> &Arc<Chance> {
        &self.chance
    }

    /// Addresses of the nodes by number, including those that left.
    pub(crate) fn nodes(&self) -> Vec<Node> {
        self.map().nodes.iter().map(|node| node.addresses).collect()
    }

    /// Addresses of the nodes that belong to the cluster.
    pub(crate) fn members(&self) -> Vec<Node> {
        let map = self.map();
        map.nodes.iter().filter(|node| node.is_member).map(|node| node.addresses).collect()
    }

    /// The map of the nodes.
    pub(crate) fn map(&self) -> Arc<NodeMap> {
        Arc::clone(&self.map.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Follows the version of the map.
    pub(crate) fn follow_map(&self) -> Follower {
        self.versions.follow()
    }

    /// Whether a node runs, and how it is stopped; `None` for one that does not exist.
    pub(crate) fn power(&self, node: usize) -> Option<Arc<NodePower>> {
        self.power.read().unwrap_or_else(PoisonError::into_inner).get(node).cloned()
    }

    /// The nodes that can have copies.
    fn usable(&self, nodes: &[MapNode]) -> Vec<usize> {
        let is_usable = |&node: &usize| {
            nodes.get(node).is_some_and(|node| node.is_member)
                && self.power(node).is_some_and(|power| power.is_on())
        };
        (0..nodes.len()).filter(is_usable).collect()
    }

    /// Waits until no other operation moves copies.
    fn take_turn(&self) -> MutexGuard<'_, ()> {
        self.operation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Configuration of new DCP connections.
    pub(crate) fn dcp_config(&self) -> ConnectionConfig {
        self.dcp_config.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_dcp_config(&self, config: ConnectionConfig) {
        *self.dcp_config.write().unwrap_or_else(PoisonError::into_inner) = config;
    }
}

/// A new identity: 32 hex digits.
fn new_uuid(chance: &Chance) -> String {
    format!("{:032x}", chance.number())
}
