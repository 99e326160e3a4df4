//! One version of the cluster map.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use dcp_wire::message::ConfigVersion;

use super::config_json::{self, BucketView, Member};
use super::node::Node;
use crate::bucket::Manifest;

/// A node in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MapNode {
    pub(super) addresses: Node,
    /// Whether it belongs to the cluster; numbers of nodes that left are not reused.
    pub(super) is_member: bool,
}

/// Properties that are the same in every version of the map.
#[derive(Debug)]
pub(crate) struct MapFacts {
    pub(crate) bucket_name: String,
    pub(crate) replicas: u8,
    pub(crate) alternate_host: Option<String>,
    pub(crate) is_ephemeral: bool,
}

/// One version of the cluster map, as sent by each node.
#[derive(Debug)]
pub(crate) struct ClusterMap {
    pub(crate) version: ConfigVersion,
    pub(super) nodes: Vec<MapNode>,
    /// Identity of the bucket, 32 hex digits; `None` while it is dropped.
    pub(crate) bucket_uuid: Option<Arc<str>>,
    pub(crate) manifest: Arc<Manifest>,
    facts: Arc<MapFacts>,
    /// Nodes of the copies of each vBucket, the active one's first.
    chains: Vec<Vec<usize>>,
    /// By node; rendered on first use, since a rebalance creates many versions that are never
    /// requested.
    views: Vec<OnceLock<MapView>>,
}

/// The map as sent by one node.
#[derive(Clone, Debug)]
pub(crate) struct MapView {
    /// With the bucket; empty while it is dropped.
    pub(crate) bucket: Bytes,
    /// For connections without a bucket.
    pub(crate) global: Bytes,
}

impl ClusterMap {
    /// A map without nodes.
    pub(super) fn empty(version: ConfigVersion, facts: Arc<MapFacts>) -> Self {
        Self::new(version, Vec::new(), None, Arc::default(), facts, Vec::new())
    }

    /// The map with the copies placed according to `chains`.
    pub(super) fn new(
        version: ConfigVersion,
        nodes: Vec<MapNode>,
        bucket_uuid: Option<Arc<str>>,
        manifest: Arc<Manifest>,
        facts: Arc<MapFacts>,
        chains: Vec<Vec<usize>>,
    ) -> Self {
        let views = nodes.iter().map(|_| OnceLock::new()).collect();
        Self { version, nodes, bucket_uuid, manifest, facts, chains, views }
    }

    fn write_out(&self, teller: usize) -> MapView {
        let facts = &*self.facts;
        let chains = positions(&self.nodes, facts.replicas, &self.chains);
        let members: Vec<_> = members(facts, &self.nodes, teller).collect();
        let bucket = self.bucket_uuid.as_ref().map(|uuid| BucketView {
            name: &facts.bucket_name,
            uuid,
            is_ephemeral: facts.is_ephemeral,
            manifest_uid: self.manifest.uid().to_string(),
            replicas: facts.replicas,
            chains: &chains,
        });
        let bucket = bucket.map(|bucket| config_json::bucket(self.version, &members, &bucket));
        let global = config_json::global(self.version, &members);
        MapView { bucket: bucket.unwrap_or_default(), global }
    }

    /// Whether a node belongs to the cluster.
    pub(crate) fn is_member(&self, node: usize) -> bool {
        self.nodes.get(node).is_some_and(|node| node.is_member)
    }

    /// Nodes that do not belong to the cluster any more.
    pub(crate) fn failed_over(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|&node| !self.is_member(node)).collect()
    }

    /// The map as sent by `node`.
    pub(crate) fn view(&self, node: usize) -> Option<&MapView> {
        self.views.get(node).map(|view| view.get_or_init(|| self.write_out(node)))
    }
}

fn members<'a>(
    facts: &'a MapFacts,
    nodes: &'a [MapNode],
    teller: usize,
) -> impl Iterator<Item = Member<'a>> {
    let member = move |(index, node): (usize, &MapNode)| Member {
        node: node.addresses,
        is_teller: index == teller,
        alternate_host: facts.alternate_host.as_deref(),
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
