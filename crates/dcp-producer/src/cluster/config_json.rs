//! The cluster map as JSON, in the form clients expect of a server.

use bytes::Bytes;
use dcp_wire::message::ConfigVersion;
use serde_json::{Value, json};

use super::Node;

/// The map of a bucket as `this_node` tells it.
pub(super) fn bucket(
    version: ConfigVersion,
    nodes: &[Node],
    this_node: usize,
    owners: &[usize],
    (name, uuid): (&str, &str),
) -> Bytes {
    let member = |node: &Node| {
        json!({
            "couchApiBase": format!("http://{}/{name}", node.mgmt),
            "hostname": node.mgmt.to_string(),
            "ports": {"direct": node.kv.port()},
        })
    };
    let vbucket_map: Vec<[usize; 1]> = owners.iter().map(|&owner| [owner]).collect();
    let config = json!({
        "rev": version.rev,
        "revEpoch": version.epoch,
        "name": name,
        "uuid": uuid,
        "nodeLocator": "vbucket",
        "bucketType": "membase",
        "uri": format!("/pools/default/buckets/{name}?bucket_uuid={uuid}"),
        "streamingUri": format!("/pools/default/bucketsStreaming/{name}?bucket_uuid={uuid}"),
        "bucketCapabilitiesVer": "",
        // What is missing here, clients do not ask for even though it would be granted.
        "bucketCapabilities":
            ["collections", "dcp", "dcp.IgnorePurgedTombstones", "cccp", "nodesExt", "xattr"],
        "collectionsManifestUid": "0",
        "numVBuckets": owners.len(),
        "nodes": nodes.iter().map(member).collect::<Vec<_>>(),
        "nodesExt": nodes_ext(nodes, this_node),
        "clusterCapabilitiesVer": [1, 0],
        "clusterCapabilities": {},
        "vBucketServerMap": {
            "hashAlgorithm": "CRC",
            "numReplicas": 0,
            "serverList": nodes.iter().map(|node| node.kv.to_string()).collect::<Vec<_>>(),
            "vBucketMap": vbucket_map,
        },
    });
    Bytes::from(config.to_string())
}

/// The map without a bucket as `this_node` tells it.
pub(super) fn global(version: ConfigVersion, nodes: &[Node], this_node: usize) -> Bytes {
    let config = json!({
        "rev": version.rev,
        "revEpoch": version.epoch,
        "nodesExt": nodes_ext(nodes, this_node),
        "clusterCapabilitiesVer": [1, 0],
        "clusterCapabilities": {},
    });
    Bytes::from(config.to_string())
}

/// Ports by the names clients know them by.
fn services(node: &Node) -> Value {
    let mut services = json!({"kv": node.kv.port(), "mgmt": node.mgmt.port()});
    if let (Some(tls), Some(services)) = (node.tls, services.as_object_mut()) {
        services.insert("kvSSL".to_owned(), tls.kv.port().into());
        services.insert("mgmtSSL".to_owned(), tls.mgmt.port().into());
    }
    services
}

fn nodes_ext(nodes: &[Node], this_node: usize) -> Vec<Value> {
    let entry = |(index, node): (usize, &Node)| {
        let mut entry = json!({
            "hostname": node.kv.ip().to_string(),
            "services": services(node),
        });
        if index == this_node
            && let Some(members) = entry.as_object_mut()
        {
            members.insert("thisNode".to_owned(), Value::Bool(true));
        }
        entry
    };
    nodes.iter().enumerate().map(entry).collect()
}
