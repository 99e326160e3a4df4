//! One version of the cluster map: of the nodes, and of each bucket.

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

/// Properties that are the same in every version of a bucket's map.
#[derive(Debug)]
pub(super) struct MapFacts {
    pub(super) bucket_name: String,
    pub(super) replicas: u8,
    pub(super) is_ephemeral: bool,
}

/// One version of the map of the nodes, without a bucket.
#[derive(Debug)]
pub(crate) struct NodeMap {
    /// Above those of all maps before it, of buckets too.
    pub(crate) version: ConfigVersion,
    pub(super) nodes: Arc<[MapNode]>,
    /// Alternate name of the nodes.
    alternate_host: Option<Arc<str>>,
    /// By node, in JSON; written on first use, since a rebalance creates many versions that are
    /// never requested.
    views: Vec<OnceLock<Bytes>>,
}

impl NodeMap {
    pub(super) fn new(
        version: ConfigVersion,
        nodes: Arc<[MapNode]>,
        alternate_host: Option<Arc<str>>,
    ) -> Self {
        let views = nodes.iter().map(|_| OnceLock::new()).collect();
        Self { version, nodes, alternate_host, views }
    }

    /// The next version.
    pub(super) fn next(&self, version: ConfigVersion, nodes: Arc<[MapNode]>) -> Self {
        Self::new(version, nodes, self.alternate_host.clone())
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
    pub(crate) fn view(&self, node: usize) -> Option<&Bytes> {
        let write = || config_json::global(self.version, &self.members(node));
        self.views.get(node).map(|view| view.get_or_init(write))
    }

    fn members(&self, teller: usize) -> Vec<Member<'_>> {
        let member = |(index, node): (usize, &MapNode)| Member {
            node: node.addresses,
            is_teller: index == teller,
            alternate_host: self.alternate_host.as_deref(),
        };
        self.nodes.iter().enumerate().filter(|(_, node)| node.is_member).map(member).collect()
    }
}

/// One version of a bucket's map, as sent by each node.
#[derive(Debug)]
pub(crate) struct BucketMap {
    pub(crate) version: ConfigVersion,
    /// Identity of the bucket, 32 hex digits; `None` while it is dropped.
    pub(crate) bucket_uuid: Option<Arc<str>>,
    pub(crate) manifest: Arc<Manifest>,
    /// The nodes at that time.
    nodes: Arc<NodeMap>,
    facts: Arc<MapFacts>,
    /// Nodes of the copies of each vBucket, the active one's first.
    chains: Vec<Vec<usize>>,
    /// By node, in JSON, as in [`NodeMap`].
    views: Vec<OnceLock<Bytes>>,
}

impl BucketMap {
    /// The map of a bucket that does not exist yet.
    pub(super) fn empty(nodes: Arc<NodeMap>, facts: Arc<MapFacts>) -> Self {
        Self::new(nodes, None, Arc::default(), facts, Vec::new())
    }

    /// The map with the copies placed according to `chains`.
    pub(super) fn new(
        nodes: Arc<NodeMap>,
        bucket_uuid: Option<Arc<str>>,
        manifest: Arc<Manifest>,
        facts: Arc<MapFacts>,
        chains: Vec<Vec<usize>>,
    ) -> Self {
        let views = nodes.nodes.iter().map(|_| OnceLock::new()).collect();
        Self { version: nodes.version, bucket_uuid, manifest, nodes, facts, chains, views }
    }

    fn write_out(&self, teller: usize) -> Bytes {
        let (facts, nodes) = (&*self.facts, &*self.nodes);
        let Some(uuid) = &self.bucket_uuid else {
            return Bytes::new();
        };
        let chains = positions(&nodes.nodes, facts.replicas, &self.chains);
        let bucket = BucketView {
            name: &facts.bucket_name,
            uuid,
            is_ephemeral: facts.is_ephemeral,
            manifest_uid: self.manifest.uid().to_string(),
            replicas: facts.replicas,
            chains: &chains,
        };
        config_json::bucket(self.version, &nodes.members(teller), &bucket)
    }

    /// The map as sent by `node`; empty while the bucket is dropped.
    pub(crate) fn view(&self, node: usize) -> Option<&Bytes> {
        self.views.get(node).map(|view| view.get_or_init(|| self.write_out(node)))
    }
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
