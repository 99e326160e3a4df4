//! The cluster map as JSON, in the form that clients expect.

use std::net::SocketAddr;

use bytes::Bytes;
use dcp_wire::message::ConfigVersion;
use serde_json::{Value, json};

use super::node::Node;

/// A node in a map.
#[derive(Clone, Debug)]
pub(super) struct Member<'a> {
    pub(super) node: Node,
    /// Whether it is the node that sends the map.
    pub(super) is_teller: bool,
    /// Alternate name for the same ports.
    pub(super) alternate_host: Option<&'a str>,
}

/// The bucket in a map.
#[derive(Clone, Debug)]
pub(super) struct BucketView<'a> {
    pub(super) name: &'a str,
    pub(super) uuid: &'a str,
    pub(super) is_ephemeral: bool,
    pub(super) manifest_uid: String,
    pub(super) replicas: u8,
    /// Positions of each vBucket's copies among the members, -1 for none.
    pub(super) chains: &'a [Vec<i32>],
}

/// A node's address in a map: clients replace `$HOST`, which is sent for the unspecified address,
/// with the name they used.
fn named(address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        return format!("$HOST:{}", address.port());
    }
    address.to_string()
}

/// Capabilities of the bucket, by the names that servers use. SDKs report features that are missing
/// here, such as `rangeScan`, as not available, or do without them.
const CAPABILITIES: [&str; 9] = [
    "collections",
    "durableWrite",
    "tombstonedUserXAttrs",
    "dcp",
    "dcp.IgnorePurgedTombstones",
    "cccp",
    "nodesExt",
    "xattr",
    "subdoc.ReplicaRead",
];

/// The map of a bucket.
pub(super) fn bucket(
    version: ConfigVersion,
    members: &[Member<'_>],
    bucket: &BucketView<'_>,
) -> Bytes {
    let (name, uuid) = (bucket.name, bucket.uuid);
    let member = |Member { node, .. }: &Member<'_>| {
        json!({
            "couchApiBase": format!("http://{}/{name}", named(node.mgmt)),
            "hostname": named(node.mgmt),
            "ports": {"direct": node.kv.port()},
        })
    };
    let servers: Vec<_> = members.iter().map(|member| named(member.node.kv)).collect();
    let config = json!({
        "rev": version.rev,
        "revEpoch": version.epoch,
        "name": name,
        "uuid": uuid,
        "nodeLocator": "vbucket",
        "bucketType": if bucket.is_ephemeral { "ephemeral" } else { "membase" },
        "storageBackend": if bucket.is_ephemeral { "undefined" } else { "couchstore" },
        "uri": format!("/pools/default/buckets/{name}?bucket_uuid={uuid}"),
        "streamingUri": format!("/pools/default/bucketsStreaming/{name}?bucket_uuid={uuid}"),
        "bucketCapabilitiesVer": "",
        "bucketCapabilities": CAPABILITIES,
        "collectionsManifestUid": bucket.manifest_uid,
        "numVBuckets": bucket.chains.len(),
        "nodes": members.iter().map(member).collect::<Vec<_>>(),
        "nodesExt": nodes_ext(members),
        "clusterCapabilitiesVer": [1, 0],
        "clusterCapabilities": {},
        "vBucketServerMap": {
            "hashAlgorithm": "CRC",
            "numReplicas": bucket.replicas,
            "serverList": servers,
            "vBucketMap": bucket.chains,
        },
    });
    Bytes::from(config.to_string())
}

/// The map without a bucket.
pub(super) fn global(version: ConfigVersion, members: &[Member<'_>]) -> Bytes {
    let config = json!({
        "rev": version.rev,
        "revEpoch": version.epoch,
        "nodesExt": nodes_ext(members),
        "clusterCapabilitiesVer": [1, 0],
        "clusterCapabilities": {},
    });
    Bytes::from(config.to_string())
}

/// Ports by service name.
fn services(node: &Node) -> Value {
    let mut services = json!({"kv": node.kv.port(), "mgmt": node.mgmt.port()});
    if let (Some(tls), Some(services)) = (node.tls, services.as_object_mut()) {
        services.insert("kvSSL".to_owned(), tls.kv.port().into());
        services.insert("mgmtSSL".to_owned(), tls.mgmt.port().into());
    }
    services
}

fn nodes_ext(members: &[Member<'_>]) -> Vec<Value> {
    members.iter().map(node_ext).collect()
}

fn node_ext(member: &Member<'_>) -> Value {
    let node = member.node;
    let services = services(&node);
    let mut entry = json!({"services": services});
    if let Some(entry) = entry.as_object_mut() {
        // Without a name, clients use the one they connected to.
        if !node.kv.ip().is_unspecified() {
            entry.insert("hostname".to_owned(), node.kv.ip().to_string().into());
        }
        if member.is_teller {
            entry.insert("thisNode".to_owned(), Value::Bool(true));
        }
        if let Some(hostname) = member.alternate_host {
            let external = json!({"external": {"hostname": hostname, "ports": services}});
            entry.insert("alternateAddresses".to_owned(), external);
        }
    }
    entry
}
