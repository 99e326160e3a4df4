//! The configuration of one bucket: its nodes and its vBucket map.

use dcp_wire::{ManifestUid, Vbid};

use super::InvalidConfig;
use super::config_json::{ConfigJson, NodeJson, ServerMapJson, offered, split_server};
use super::node::{Endpoint, Node, Ports};

/// Version of a configuration; the larger (epoch, rev) pair is the newer one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Revision {
    /// Grows when revisions start over, as after an unsafe failover; 0 on servers before 7.1.
    pub epoch: i64,
    /// Grows with each change within an epoch.
    pub rev: i64,
}

/// The configuration of one bucket.
///
/// Node indexes are positions in [`nodes`](Self::nodes); all of them were checked when parsed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BucketConfig {
    revision: Revision,
    name: String,
    uuid: String,
    is_ephemeral: bool,
    capabilities: Vec<String>,
    manifest_uid: Option<ManifestUid>,
    nodes: Vec<Node>,
    /// Row per vBucket, active first; `None` where no node holds that copy.
    copies: Vec<Box<[Option<u16>]>>,
}

impl BucketConfig {
    /// Reads the answer to GET_CLUSTER_CONFIG, a pushed configuration, or the body of a
    /// NOT_MY_VBUCKET response.
    ///
    /// `connected_host` is the host that sent the configuration, used for nodes without a name.
    ///
    /// # Errors
    /// [`InvalidConfig`] if a member is missing or wrong, or the bucket has no vBuckets.
    pub fn parse(json: &[u8], connected_host: &str) -> Result<Self, InvalidConfig> {
        let json = ConfigJson::parse(json)?;
        let revision = revision(&json)?;
        if json.node_locator.as_deref().is_some_and(|locator| locator != "vbucket") {
            return Err(InvalidConfig::NoVbuckets);
        }
        let map = json.vbucket_server_map.ok_or(InvalidConfig::Missing("vBucketServerMap"))?;
        let nodes = data_nodes(json.nodes_ext.0, &map.server_list.0, connected_host)?;
        let copies = copies(&map, nodes.len())?;
        let manifest_uid = match json.collections_manifest_uid.as_deref() {
            None => None,
            Some(uid) => Some(ManifestUid(
                u64::from_str_radix(uid, 16)
                    .map_err(|_| InvalidConfig::Impossible("collectionsManifestUid"))?,
            )),
        };
        let capabilities = json.bucket_capabilities.unwrap_or_default().0;
        let is_ephemeral = match (json.bucket_type.as_deref(), json.storage_backend.as_deref()) {
            (Some(bucket_type), _) => bucket_type == "ephemeral",
            (None, Some(storage_backend)) => storage_backend == "undefined",
            // Before 7.1, only the capability for views shows that a bucket is persisted, and all
            // persisted buckets have it. A configuration without capabilities shows nothing.
            (None, None) => {
                !capabilities.is_empty() && capabilities.iter().all(|can| can != "couchapi")
            }
        };
        Ok(Self {
            revision,
            name: json.name.ok_or(InvalidConfig::Missing("name"))?,
            uuid: json.uuid.ok_or(InvalidConfig::Missing("uuid"))?,
            is_ephemeral,
            capabilities,
            manifest_uid,
            nodes,
            copies,
        })
    }

    /// Version of the configuration.
    #[must_use]
    pub const fn revision(&self) -> Revision {
        self.revision
    }

    /// Whether this configuration replaces `other`: only a strictly newer one does.
    #[must_use]
    pub fn is_newer_than(&self, other: &Self) -> bool {
        self.revision > other.revision
    }

    /// Name of the bucket.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Identity of the bucket: if it differs under the same name, the bucket was recreated, and
    /// positions in the old one are meaningless.
    #[must_use]
    pub fn uuid(&self) -> &str {
        &self.uuid
    }

    /// Whether the bucket's documents are in memory only.
    #[must_use]
    pub const fn is_ephemeral(&self) -> bool {
        self.is_ephemeral
    }

    /// Whether streams can resume below the purge seqno, as of 7.2.
    #[must_use]
    pub fn ignores_purges(&self) -> bool {
        self.has_capability("dcp.IgnorePurgedTombstones")
    }

    /// Whether the bucket has `capability`, by the server's name: `collections`, `durableWrite`, ...
    #[must_use]
    pub fn has_capability(&self, capability: &str) -> bool {
        self.capabilities.iter().any(|known| known == capability)
    }

    /// Uid of the collections manifest when the configuration was created, if it is included.
    #[must_use]
    pub const fn manifest_uid(&self) -> Option<ManifestUid> {
        self.manifest_uid
    }

    /// How many vBuckets the bucket has; at least 1.
    #[must_use]
    pub fn num_vbuckets(&self) -> u16 {
        // At most MAX_VBUCKETS, checked when parsed.
        u16::try_from(self.copies.len()).unwrap_or(u16::MAX)
    }

    /// The nodes that hold data, in the order of the node indexes.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node a vBucket is active on; `None` while no node has it, or if there is no such
    /// vBucket.
    #[must_use]
    pub fn active(&self, vbid: Vbid) -> Option<usize> {
        let active = self.copies.get(vbid.index())?.first()?;
        active.map(usize::from)
    }

    /// The nodes that hold replicas of a vBucket, in replica order; `None` where one is missing.
    pub fn replicas(&self, vbid: Vbid) -> impl Iterator<Item = Option<usize>> + '_ {
        let copies = self.copies.get(vbid.index()).into_iter().flatten();
        copies.skip(1).map(|node| node.map(usize::from))
    }

    /// The vBuckets active on a node, ascending.
    pub fn active_on(&self, node: usize) -> impl Iterator<Item = Vbid> + '_ {
        (0..self.num_vbuckets()).map(Vbid).filter(move |&vbid| self.active(vbid) == Some(node))
    }
}

pub(super) fn revision(json: &ConfigJson) -> Result<Revision, InvalidConfig> {
    let rev = json.rev.ok_or(InvalidConfig::Missing("rev"))?;
    if rev < 0 {
        return Err(InvalidConfig::Impossible("rev"));
    }
    Ok(Revision { epoch: json.rev_epoch.unwrap_or(0), rev })
}

/// The nodes of the server list, whose indexes the map uses, with their details from `nodesExt`.
///
/// `nodesExt` normally begins with the same nodes in the same order. Otherwise the entry with the
/// same data endpoint is used, and failing that the address in the server list.
fn data_nodes(
    nodes_ext: Vec<NodeJson>,
    server_list: &[String],
    connected_host: &str,
) -> Result<Vec<Node>, InvalidConfig> {
    let extended = nodes_ext.into_iter().map(|node| node.into_node(connected_host));
    let extended: Vec<Node> = extended.collect::<Result<_, _>>()?;
    if server_list.is_empty() {
        return Ok(extended);
    }
    let mut nodes = Vec::with_capacity(server_list.len());
    for (index, entry) in server_list.iter().enumerate() {
        let (hostname, port) = split_server(entry, connected_host)?;
        let names_it =
            |node: &&Node| node.default.ports.kv == Some(port) && node.default.hostname == hostname;
        let in_place = extended.get(index);
        let node = in_place
            .filter(names_it)
            .or_else(|| extended.iter().find(names_it))
            .or_else(|| in_place.filter(|node| offers_data(node)));
        nodes.push(node.cloned().unwrap_or_else(|| {
            let ports = Ports { kv: offered(Some(port)), ..Ports::default() };
            Node { default: Endpoint { hostname, ports }, external: None }
        }));
    }
    Ok(nodes)
}

const fn offers_data(node: &Node) -> bool {
    node.default.ports.kv.is_some() || node.default.ports.kv_ssl.is_some()
}

fn copies(map: &ServerMapJson, nodes: usize) -> Result<Vec<Box<[Option<u16>]>>, InvalidConfig> {
    let rows = &map.vbucket_map.0;
    if rows.is_empty() {
        return Err(InvalidConfig::NoVbuckets);
    }
    let vbids = (0..=u16::MAX).map(Vbid);
    vbids.zip(rows).map(|(vbid, row)| copies_of(vbid, &row.0, nodes)).collect()
}

fn copies_of(vbid: Vbid, row: &[i64], nodes: usize) -> Result<Box<[Option<u16>]>, InvalidConfig> {
    row.iter()
        .map(|&index| match u16::try_from(index) {
            _ if index == -1 => Ok(None),
            Ok(node) if usize::from(node) < nodes => Ok(Some(node)),
            _ => Err(InvalidConfig::NodeIndex { vbid, index, nodes }),
        })
        .collect()
}
