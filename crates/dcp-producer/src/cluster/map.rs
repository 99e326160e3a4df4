//! One version of the cluster map.

use std::sync::Arc;

use bytes::Bytes;
use dcp_wire::message::ConfigVersion;

use super::config_json::{self, BucketView, Member};
use super::{Cluster, Node};
use crate::bucket::Manifest;

/// A node in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MapNode {
    pub(super) addresses: Node,
    /// Whether it belongs to the cluster; numbers of nodes that left are not given again.
    pub(super) is_member: bool,
}

/// One version of the cluster map, as each node tells it.
#[derive(Debug)]
pub(crate) struct ClusterMap {
    pub(crate) version: ConfigVersion,
    pub(super) nodes: Vec<MapNode>,
    /// Identity of the bucket, 32 hex digits; `None` while it is dropped.
    pub(crate) bucket_uuid: Option<Arc<str>>,
    pub(crate) manifest: Arc<Manifest>,
    /// By node.
    views: Vec<MapView>,
}

/// The map as one node tells it.
#[derive(Clone, Debug)]
pub(crate) struct MapView {
    /// With the bucket; empty while it is dropped.
    pub(crate) bucket: Bytes,
    /// For connections without a bucket.
    pub(crate) global: Bytes,
}

impl ClusterMap {
    /// A map without nodes.
    pub(super) fn empty(version: ConfigVersion) -> Self {
        let (nodes, views) = (Vec::new(), Vec::new());
        Self { version, nodes, bucket_uuid: None, manifest: Arc::default(), views }
    }

    /// The map with the copies where `chains` says, told by each node.
    pub(super) fn new(
        cluster: &Cluster,
        version: ConfigVersion,
        nodes: Vec<MapNode>,
        bucket_uuid: Option<Arc<str>>,
        manifest: Arc<Manifest>,
        chains: &[Vec<usize>],
    ) -> Self {
        let chains = positions(&nodes, cluster.replicas, chains);
        let views = (0..nodes.len()).map(|teller| {
            let members: Vec<_> = members(cluster, &nodes, teller).collect();
            let bucket = bucket_uuid.as_ref().map(|uuid| BucketView {
                name: &cluster.bucket_name,
                uuid,
                is_ephemeral: cluster.bucket.is_ephemeral(),
                manifest_uid: manifest.uid().to_string(),
                replicas: cluster.replicas,
                chains: &chains,
            });
            let bucket = bucket.map(|bucket| config_json::bucket(version, &members, &bucket));
            let global = config_json::global(version, &members);
            MapView { bucket: bucket.unwrap_or_default(), global }
        });
        let views = views.collect();
        Self { version, nodes, bucket_uuid, manifest, views }
    }

    /// Whether a node belongs to the cluster.
    pub(crate) fn is_member(&self, node: usize) -> bool {
        self.nodes.get(node).is_some_and(|node| node.is_member)
    }

    /// The map as `node` tells it.
    pub(crate) fn view(&self, node: usize) -> Option<&MapView> {
        self.views.get(node)
    }
}

fn members<'a>(
    cluster: &'a Cluster,
    nodes: &'a [MapNode],
    teller: usize,
) -> impl Iterator<Item = Member<'a>> {
    let member = move |(index, node): (usize, &MapNode)| Member {
        node: node.addresses,
        is_teller: index == teller,
        alternate_host: cluster.alternate_host.as_deref(),
    };
    nodes.iter().enumerate().filter(|(_, node)| node.is_member).map(member)
}

/// Numbers of nodes as positions among the members of the map.
fn positions(nodes: &[MapNode], replicas: u8, chains: &[Vec<usize>]) -> Vec<Vec<i32>> {
    const NONE: i32 = -1;
    let mut next = 0..;
    let position = |node: &MapNode| if node.is_member { next.next().unwrap_or(NONE) } else { NONE };
    let positions: Vec<i32> = nodes.iter().map(position).collect();
    let chain = |chain: &Vec<usize>| {
        let known = chain.iter().map(|&node| positions.get(node).copied().unwrap_or(NONE));
        known.chain(std::iter::repeat(NONE)).take(1 + usize::from(replicas)).collect()
    };
    chains.iter().map(chain).collect()
}
