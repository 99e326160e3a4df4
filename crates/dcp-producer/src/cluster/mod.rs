//! Which node has which vBucket, and what clients see of it.

mod config_json;
mod follow;
mod layout;
mod map;
mod membership;
mod node;
mod replicas;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockWriteGuard};

use bytes::Bytes;
use dcp_proto::producer::replica::ReplicaStore;
use dcp_proto::producer::{BucketSource, ConnectionConfig, MemoryPressure, Privilege};
use dcp_wire::message::ConfigVersion;
use dcp_wire::{CollectionId, ManifestUid, ScopeId, Vbid};
use tokio_util::sync::CancellationToken;

use crate::ProducerOptions;
use crate::bucket::{Bucket, Manifest, VBucketGuard};
use crate::rights::Rights;
pub(crate) use follow::Follower;
use follow::Versions;
pub(crate) use map::ClusterMap;
use map::{MapFacts, MapNode};
pub(crate) use node::{Node, NodePower, TlsAddresses};

/// Server version of the nodes, from which clients derive features.
pub(crate) const SERVER_VERSION: &str = "8.0.2";

/// An embedded cluster with one bucket.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) bucket: Bucket,
    facts: Arc<MapFacts>,
    /// Held while copies are moved, so that such operations do not overlap.
    operation: Mutex<()>,
    /// By number; nodes that left keep theirs.
    power: RwLock<Vec<Arc<NodePower>>>,
    /// Ends everything.
    stop: CancellationToken,
    map: RwLock<Arc<ClusterMap>>,
    /// Follows the version of the map.
    versions: Arc<Versions>,
    /// Ends the connections that selected the bucket when it is dropped.
    bucket_life: RwLock<CancellationToken>,
    /// Whether clients may flush the bucket.
    may_flush: AtomicBool,
    /// Configuration of new DCP connections.
    dcp_config: RwLock<ConnectionConfig>,
}

impl Cluster {
    /// A cluster whose `nodes` share the vBuckets of `bucket` evenly.
    pub(crate) fn new(
        bucket: Bucket,
        options: &ProducerOptions,
        nodes: &[Node],
        stop: &CancellationToken,
    ) -> Self {
        let power = |_| Arc::new(NodePower::new(stop.clone()));
        let version = ConfigVersion { epoch: 1, rev: 1 };
        let facts = Arc::new(MapFacts {
            bucket_name: options.bucket.clone(),
            replicas: options.replicas,
            alternate_host: options.alternate_host.clone(),
            is_ephemeral: bucket.is_ephemeral(),
        });
        let dcp_config = ConnectionConfig {
            idle_timeout: options.dcp_idle_timeout,
            max_streams: options.max_streams,
            max_buffer_size: options.max_unacknowledged_bytes,
            ..ConnectionConfig::default()
        };
        let cluster = Self {
            bucket,
            operation: Mutex::default(),
            power: RwLock::new(nodes.iter().map(power).collect()),
            stop: stop.clone(),
            map: RwLock::new(Arc::new(ClusterMap::empty(version, Arc::clone(&facts)))),
            facts,
            versions: Arc::default(),
            bucket_life: RwLock::default(),
            may_flush: AtomicBool::new(true),
            dcp_config: RwLock::new(dcp_config),
        };
        let map_node = |&addresses| MapNode { addresses, is_member: true };
        let nodes: Vec<_> = nodes.iter().map(map_node).collect();
        let laid_out = cluster.lay_out(&nodes);
        debug_assert!(laid_out.is_ok(), "new copies take nothing over");
        let map = ClusterMap::new(
            version,
            nodes,
            Some(cluster.new_uuid()),
            Arc::default(),
            Arc::clone(&cluster.facts),
            cluster.bucket.chains(),
        );
        *cluster.write_map() = Arc::new(map);
        cluster
    }

    fn new_uuid(&self) -> Arc<str> {
        format!("{:032x}", self.bucket.chance().number()).into()
    }

    /// Name of the bucket.
    pub(crate) fn bucket_name(&self) -> &str {
        &self.facts.bucket_name
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

    pub(crate) fn map(&self) -> Arc<ClusterMap> {
        Arc::clone(&self.map.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write_map(&self) -> RwLockWriteGuard<'_, Arc<ClusterMap>> {
        self.map.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Follows the version of the map.
    pub(crate) fn follow_map(&self) -> Follower {
        self.versions.follow()
    }

    /// Whether a node runs, and how it is stopped; `None` for one that does not exist.
    pub(crate) fn power(&self, node: usize) -> Option<Arc<NodePower>> {
        self.power.read().unwrap_or_else(PoisonError::into_inner).get(node).cloned()
    }

    /// The bucket's identity: 32 hex digits; empty while it is dropped.
    pub(crate) fn bucket_uuid(&self) -> String {
        self.map().bucket_uuid.as_deref().unwrap_or_default().to_owned()
    }

    pub(crate) fn manifest(&self) -> Arc<Manifest> {
        Arc::clone(&self.map().manifest)
    }

    /// Token that ends the connections that selected the bucket.
    pub(crate) fn bucket_life(&self) -> CancellationToken {
        self.bucket_life.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Whether clients may flush the bucket.
    pub(crate) fn may_flush(&self) -> bool {
        self.may_flush.load(Ordering::Relaxed)
    }

    /// Lets clients flush the bucket, or not.
    pub(crate) fn allow_flush(&self, allow: bool) {
        self.may_flush.store(allow, Ordering::Relaxed);
    }

    /// Configuration of new DCP connections.
    pub(crate) fn dcp_config(&self) -> ConnectionConfig {
        self.dcp_config.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set_dcp_config(&self, config: ConnectionConfig) {
        *self.dcp_config.write().unwrap_or_else(PoisonError::into_inner) = config;
    }
}

/// One node's part of the bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeBucket<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) map: &'a ClusterMap,
    pub(crate) node: usize,
    /// Rights of the client's user.
    pub(crate) rights: &'a Rights,
}

impl BucketSource for NodeBucket<'_> {
    type VBucket<'a>
        = VBucketGuard<'a>
    where
        Self: 'a;

    fn vbucket(&self, vbid: Vbid) -> Option<VBucketGuard<'_>> {
        self.cluster.bucket.lock_on(self.node, vbid)
    }

    fn cluster_map(&self) -> Option<Bytes> {
        // Not an earlier map: the vBucket may have been moved since. No vBucket is locked here, so
        // waiting for a map that is being changed is allowed.
        self.cluster.map().view(self.node).map(|view| view.bucket.clone())
    }

    fn manifest_uid(&self) -> ManifestUid {
        self.map.manifest.uid()
    }

    fn has_collection(&self, collection: CollectionId) -> bool {
        self.map.manifest.has_collection(collection)
    }

    fn scope_collections(&self, scope: ScopeId) -> Option<Vec<CollectionId>> {
        let scope = self.map.manifest.scope(scope)?;
        Some(scope.collections.iter().map(|collection| collection.id).collect())
    }

    fn has_privilege(&self, privilege: Privilege) -> bool {
        self.rights.has(privilege, &self.map.manifest)
    }

    fn is_warming_up(&self) -> bool {
        // A restarted node has everything at once.
        false
    }

    fn memory_pressure(&self) -> MemoryPressure {
        /// Percentage of the quota from which backfills are postponed.
        const HIGH: u8 = 96;
        match self.cluster.bucket.memory().used_percent() {
            100.. => MemoryPressure::Full,
            HIGH.. => MemoryPressure::High,
            _ => MemoryPressure::None,
        }
    }

    fn disk_usage_percent(&self) -> u8 {
        self.cluster.bucket.memory().used_percent()
    }

    fn keeps_history(&self) -> bool {
        self.cluster.bucket.keeps_history()
    }

    fn retire(&self, vbid: Vbid) {
        self.cluster.bucket.retire(self.node, vbid);
    }

    fn replicas(&self) -> &dyn ReplicaStore {
        self
    }
}
