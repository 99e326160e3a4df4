//! The JSON documents of the management port, made from the cluster map.

use std::sync::Arc;

use serde_json::{Map, Value, json};

use crate::cluster::{Cluster, SERVER_VERSION, ServedBucket};

/// Level of detail about a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Detail {
    /// What clients need to locate vBuckets: the same as over KV.
    Terse,
    /// With settings and statistics.
    Full,
}

/// `/pools`: the kind and version of the server.
pub(super) fn pools(cluster: &Cluster) -> String {
    let uuid = &cluster.uuid;
    json!({
        "isAdminCreds": true,
        "isROAdminCreds": false,
        "isEnterprise": true,
        "allowedServices": ["kv"],
        "pools": [{
            "name": "default",
            "uri": format!("/pools/default?uuid={uuid}"),
            "streamingUri": format!("/poolsStreaming/default?uuid={uuid}"),
        }],
        "uuid": uuid,
        "implementationVersion": implementation_version(),
        "componentsVersion": {"ns_server": implementation_version()},
    })
    .to_string()
}

/// `/pools/default`: the nodes and the URIs of buckets.
pub(super) fn pool(cluster: &Cluster, node: usize) -> Option<String> {
    let uuid = &cluster.uuid;
    let existing = cluster.buckets().into_iter().filter(|served| served.exists());
    let name =
        |served: Arc<ServedBucket>| json!({"bucketName": served.name(), "uuid": served.uuid()});
    let buckets: Vec<_> = existing.map(name).collect();
    let pool = json!({
        "name": "default",
        "clusterName": "",
        "nodes": nodes(cluster, node)?,
        "balanced": true,
        "rebalanceStatus": "none",
        "bucketNames": buckets,
        "buckets": {
            "uri": format!("/pools/default/buckets?uuid={uuid}"),
            "terseBucketsBase": "/pools/default/b/",
            "terseStreamingBucketsBase": "/pools/default/bs/",
        },
        "nodeStatusUri": "/nodeStatuses",
        "serverGroupsUri": "/pools/default/serverGroups",
    });
    Some(pool.to_string())
}

/// `/pools/default/nodeServices`: the map without a bucket.
pub(super) fn node_services(cluster: &Cluster, node: usize) -> Option<String> {
    let map = cluster.map();
    String::from_utf8(map.view(node)?.to_vec()).ok()
}

/// `/pools/default/b/<bucket>` and `/pools/default/buckets/<bucket>`.
pub(super) fn bucket(
    cluster: &Cluster,
    served: &ServedBucket,
    node: usize,
    detail: Detail,
) -> Option<String> {
    match detail {
        Detail::Terse => {
            let map = served.map();
            // There is none while the bucket is dropped.
            let config = map.view(node).filter(|config| !config.is_empty())?;
            String::from_utf8(config.to_vec()).ok()
        }
        Detail::Full => Some(full_bucket(cluster, served, node)?.to_string()),
    }
}

/// `/pools/default/buckets`.
pub(super) fn buckets(cluster: &Cluster, node: usize) -> Option<String> {
    cluster.map().view(node)?;
    let buckets = cluster.buckets();
    let buckets = buckets.iter().filter_map(|served| full_bucket(cluster, served, node));
    let buckets: Vec<_> = buckets.collect();
    Some(Value::from(buckets).to_string())
}

/// `/whoami`.
pub(super) fn whoami(username: &str) -> String {
    json!({"id": username, "domain": "admin", "roles": [{"role": "admin"}]}).to_string()
}

/// The answer about views of a bucket without any.
pub(super) fn no_views() -> String {
    json!({"error": "no_ddocs_service"}).to_string()
}

/// The bucket in its full form; `None` while it is dropped.
pub(super) fn full_bucket(cluster: &Cluster, served: &ServedBucket, node: usize) -> Option<Value> {
    let map = served.map();
    let mut bucket: Map<String, Value> = serde_json::from_slice(map.view(node)?).ok()?;
    let servers = bucket.get("vBucketServerMap");
    let replicas = servers.and_then(|servers| servers.get("numReplicas")).cloned();
    let name = served.name();
    let memory = served.bucket.memory();
    // Clients take a bucket without the address for one that cannot be flushed.
    let flush = format!("/pools/default/buckets/{name}/controller/doFlush");
    let controllers = if served.may_flush() { json!({"flush": flush}) } else { json!({}) };
    let more = json!({
        "quota": {"ram": memory.quota(), "rawRAM": memory.quota()},
        "basicStats": {"memUsed": memory.used()},
        "authType": "sasl",
        "replicaNumber": replicas,
        "threadsNumber": 3,
        "autoCompactionSettings": false,
        "nodes": nodes(cluster, node)?,
        "controllers": controllers,
        "localRandomKeyUri": format!("/pools/default/buckets/{name}/localRandomKey"),
        "stats": {"uri": format!("/pools/default/buckets/{name}/stats")},
    });
    for more in [more, fixed(served.bucket.is_ephemeral())] {
        if let Value::Object(more) = more {
            bucket.extend(more);
        }
    }
    Some(Value::Object(bucket))
}

/// Settings that all buckets of a type have.
pub(super) fn fixed(is_ephemeral: bool) -> Value {
    let (backend, eviction) =
        if is_ephemeral { ("undefined", "noEviction") } else { ("couchstore", "valueOnly") };
    json!({
        "replicaIndex": false,
        "storageBackend": backend,
        "evictionPolicy": eviction,
        "durabilityMinLevel": "none",
        "conflictResolutionType": "seqno",
        "compressionMode": "passive",
        "maxTTL": 0,
    })
}

/// The nodes in the format of `/pools/default`.
fn nodes(cluster: &Cluster, node: usize) -> Option<Vec<Value>> {
    let map = cluster.map();
    let global: Value = serde_json::from_slice(map.view(node)?).ok()?;
    let nodes = global.get("nodesExt")?.as_array()?;
    Some(nodes.iter().filter_map(node_entry).collect())
}

fn node_entry(node: &Value) -> Option<Value> {
    let host = node.get("hostname").and_then(Value::as_str).unwrap_or("$HOST");
    let services = node.get("services")?;
    let management = services.get("mgmt")?.as_u64()?;
    let hostname = if host.contains(':') {
        format!("[{host}]:{management}")
    } else {
        format!("{host}:{management}")
    };
    let mut ports = Map::new();
    for (port, service) in [("direct", "kv"), ("kvSSL", "kvSSL"), ("httpsMgmt", "mgmtSSL")] {
        if let Some(number) = services.get(service) {
            ports.insert(port.to_owned(), number.clone());
        }
    }
    Some(json!({
        "hostname": hostname,
        "configuredHostname": hostname,
        "otpNode": format!("ns_{management}@{host}"),
        "thisNode": node.get("thisNode").is_some(),
        "status": "healthy",
        "clusterMembership": "active",
        "recoveryType": "none",
        "services": ["kv"],
        "ports": ports,
        "version": implementation_version(),
        "clusterCompatibility": CLUSTER_COMPATIBILITY,
        "os": std::env::consts::OS,
        "cpuCount": 1,
    }))
}

/// Version 8.0 as servers write it: 65536 per major version.
const CLUSTER_COMPATIBILITY: u32 = 8 << 16;

/// The version in the long form, which names a build and an edition.
fn implementation_version() -> String {
    format!("{SERVER_VERSION}-0000-enterprise")
}
