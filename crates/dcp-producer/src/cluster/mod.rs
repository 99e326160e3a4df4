//! Which node has which vBucket, and what clients are told about it.

mod config_json;

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError, RwLock};

use bytes::Bytes;
use dcp_proto::producer::BucketSource;
use dcp_wire::message::ConfigVersion;
use dcp_wire::{CollectionId, ManifestUid, ScopeId, Vbid};
use serde_json::json;
use tokio::sync::watch;

use crate::bucket::{Bucket, VBucketGuard};

/// Version the nodes give, from which clients tell what they may rely on.
pub(crate) const SERVER_VERSION: &str = "8.0.2";

/// Version of the collections manifest: there are the default scope and collection only.
pub(crate) const MANIFEST_UID: ManifestUid = ManifestUid(0);

/// The collections manifest as clients get it.
pub(crate) fn manifest_json() -> String {
    let collections = [json!({"name": "_default", "uid": CollectionId::DEFAULT.to_string()})];
    let scopes = [json!({
        "name": "_default",
        "uid": DEFAULT_SCOPE.to_string(),
        "collections": collections,
    })];
    json!({"uid": MANIFEST_UID.to_string(), "scopes": scopes}).to_string()
}

/// Whether the bucket has a collection.
pub(crate) fn has_collection(id: CollectionId) -> bool {
    id == CollectionId::DEFAULT
}

const DEFAULT_SCOPE: ScopeId = ScopeId(0);

/// Where a node speaks TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TlsAddresses {
    pub(crate) kv: SocketAddr,
    pub(crate) mgmt: SocketAddr,
}

/// A node's addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) kv: SocketAddr,
    pub(crate) mgmt: SocketAddr,
    /// With TLS, if the cluster speaks it.
    pub(crate) tls: Option<TlsAddresses>,
}

/// One version of the cluster map, as each node tells it.
#[derive(Debug)]
pub(crate) struct ClusterMap {
    pub(crate) version: ConfigVersion,
    /// Node of each vBucket.
    owners: Vec<usize>,
    /// By node.
    views: Vec<MapView>,
}

/// The map as one node tells it.
#[derive(Clone, Debug)]
pub(crate) struct MapView {
    /// With the bucket.
    pub(crate) bucket: Bytes,
    /// For connections without a bucket.
    pub(crate) global: Bytes,
}

/// An embedded cluster with one bucket.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) bucket: Bucket,
    pub(crate) bucket_name: String,
    /// 32 hex digits.
    pub(crate) bucket_uuid: String,
    nodes: Vec<Node>,
    map: RwLock<Arc<ClusterMap>>,
    /// Follows the version of the map.
    version: watch::Sender<ConfigVersion>,
}

impl Cluster {
    /// A cluster whose `nodes` share the vBuckets of `bucket` evenly.
    pub(crate) fn new(bucket: Bucket, bucket_name: String, nodes: Vec<Node>) -> Self {
        let count = usize::from(bucket.vbucket_count());
        // Neighbours stay together: with 2 nodes the first has the lower half.
        let owners = (0..count).map(|vbid| vbid * nodes.len() / count.max(1)).collect();
        let bucket_uuid = format!("{:032x}", rand::random::<u128>());
        let version = ConfigVersion { epoch: 1, rev: 1 };
        let map = ClusterMap::new(version, owners, &nodes, &bucket_name, &bucket_uuid);
        Self {
            bucket,
            bucket_name,
            bucket_uuid,
            nodes,
            map: RwLock::new(Arc::new(map)),
            version: watch::Sender::new(version),
        }
    }

    pub(crate) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub(crate) fn map(&self) -> Arc<ClusterMap> {
        Arc::clone(&self.map.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Follows the version of the map.
    pub(crate) fn follow_map(&self) -> watch::Receiver<ConfigVersion> {
        self.version.subscribe()
    }

    /// Moves a vBucket to another node, as a finished rebalance does.
    pub(crate) fn move_vbucket(&self, vbid: Vbid, node: usize) {
        let mut current = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let mut owners = current.owners.clone();
        let Some(owner) = owners.get_mut(vbid.index()) else {
            return;
        };
        if *owner == node {
            return;
        }
        *owner = node;
        let version = ConfigVersion { rev: current.version.rev + 1, ..current.version };
        let map =
            ClusterMap::new(version, owners, &self.nodes, &self.bucket_name, &self.bucket_uuid);
        *current = Arc::new(map);
        drop(current);
        self.version.send_replace(version);
        self.bucket.changes().announce(vbid);
    }
}

impl ClusterMap {
    fn new(
        version: ConfigVersion,
        owners: Vec<usize>,
        nodes: &[Node],
        bucket_name: &str,
        bucket_uuid: &str,
    ) -> Self {
        let bucket = (bucket_name, bucket_uuid);
        let view = |this_node| MapView {
            bucket: config_json::bucket(version, nodes, this_node, &owners, bucket),
            global: config_json::global(version, nodes, this_node),
        };
        let views = (0..nodes.len()).map(view).collect();
        Self { version, owners, views }
    }

    /// Whether `node` has the vBucket.
    pub(crate) fn owns(&self, node: usize, vbid: Vbid) -> bool {
        self.owners.get(vbid.index()) == Some(&node)
    }

    /// The map as `node` tells it.
    pub(crate) fn view(&self, node: usize) -> Option<&MapView> {
        self.views.get(node)
    }
}

/// One node's part of the bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeBucket<'a> {
    pub(crate) cluster: &'a Cluster,
    pub(crate) map: &'a ClusterMap,
    pub(crate) node: usize,
}

impl BucketSource for NodeBucket<'_> {
    type VBucket<'a>
        = VBucketGuard<'a>
    where
        Self: 'a;

    fn vbucket(&self, vbid: Vbid) -> Option<VBucketGuard<'_>> {
        if !self.map.owns(self.node, vbid) {
            return None;
        }
        self.cluster.bucket.lock(vbid)
    }

    fn cluster_map(&self) -> Option<Bytes> {
        self.map.view(self.node).map(|view| view.bucket.clone())
    }

    fn manifest_uid(&self) -> ManifestUid {
        MANIFEST_UID
    }

    fn scope_collections(&self, scope: ScopeId) -> Option<Vec<CollectionId>> {
        (scope == DEFAULT_SCOPE).then(|| vec![CollectionId::DEFAULT])
    }
}
