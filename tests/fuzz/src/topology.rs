//! Cluster configurations, manifests and connection strings.

use dcp_meter::Meter;
use dcp_proto::topology::{
    Address, BucketConfig, ConnectionString, GlobalConfig, MAX_VBUCKETS, Manifest, Network,
    NetworkSelection, Node,
};
use dcp_wire::Vbid;

use crate::assert_bounded;

const NETWORKS: [Network; 2] = [Network::Default, Network::External];

/// Whatever a configuration: what it says is within the bounds of a cluster, on either network.
pub fn cluster_config(data: &[u8]) {
    let meter = Meter::start();
    let config = BucketConfig::parse(data, "127.0.0.1");
    assert_bounded(meter.most(), data.len());
    if let Ok(config) = config {
        let vbuckets = config.num_vbuckets();
        assert!(vbuckets > 0 && usize::from(vbuckets) <= MAX_VBUCKETS);
        check_nodes(config.nodes());
        for vbid in (0..vbuckets).map(Vbid) {
            let copies = config.active(vbid).into_iter().chain(config.replicas(vbid).flatten());
            copies.for_each(|node| assert!(node < config.nodes().len()));
        }
        assert_eq!(config.active(Vbid(vbuckets)), None);
        let nodes = 0..config.nodes().len().min(4);
        let active: usize = nodes.map(|node| config.active_on(node).count()).sum();
        assert!(active <= usize::from(vbuckets));
        assert!(!config.is_newer_than(&config));
    }
    let meter = Meter::start();
    let config = GlobalConfig::parse(data, "::1");
    assert_bounded(meter.most(), data.len());
    if let Ok(config) = config {
        assert!(!config.nodes().is_empty());
        check_nodes(config.nodes());
    }
}

fn check_nodes(nodes: &[Node]) {
    for node in nodes {
        for (network, tls) in NETWORKS.into_iter().flat_map(|it| [(it, false), (it, true)]) {
            let Some(address) = node.data_address(network, tls) else { continue };
            assert!(address.port != 0 && !address.host.starts_with('['), "{address}");
            if network == Network::Default {
                let chosen = NetworkSelection::Auto.network(nodes, &address);
                assert_eq!(chosen, Network::Default, "{address} is one of its addresses");
            }
        }
    }
    for network in NETWORKS {
        let elsewhere = Address::new("elsewhere", 1);
        assert_eq!(NetworkSelection::Fixed(network).network(nodes, &elsewhere), network);
    }
}

/// Whatever a manifest: its names and ids find each other.
pub fn manifest(data: &[u8]) {
    let meter = Meter::start();
    let manifest = Manifest::parse(data);
    assert_bounded(meter.most(), data.len());
    let Ok(manifest) = manifest else { return };
    for scope in manifest.scopes() {
        assert_eq!(manifest.scope(scope.id), Some(scope));
        assert!(manifest.scope_named(&scope.name).is_some());
    }
    for collection in manifest.collections() {
        assert_eq!(manifest.collection(collection.id), Some(collection));
        let (scope, name) = manifest.names(collection.id).expect("its scope is there");
        assert_eq!(name, collection.name);
        assert!(manifest.scope_named(scope).is_some());
    }
}

/// Whatever a connection string: what it names can be connected to, and written again.
pub fn connection_string(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let Ok(parsed) = text.parse::<ConnectionString>() else { return };
    assert!(!parsed.addresses().is_empty());
    for address in parsed.addresses() {
        assert!(!address.host.is_empty() && address.port != 0, "{text:?}");
    }
    assert!(parsed.bucket().is_none_or(|bucket| !bucket.is_empty()));
    for (name, _) in parsed.params() {
        assert!(parsed.param(name).is_some());
    }
    if parsed.srv_name().is_some() {
        assert_eq!(parsed.addresses().len(), 1);
    }
    let hosts: Vec<_> = parsed.addresses().iter().map(Address::to_string).collect();
    let scheme = if parsed.scheme().is_tls() { "couchbases" } else { "couchbase" };
    let again = format!("{scheme}://{}", hosts.join(","));
    if let Ok(again) = again.parse::<ConnectionString>() {
        assert_eq!(again.addresses(), parsed.addresses());
    } else {
        // What percent escapes and others hide in a name need not be one that can be written.
        assert!(text.contains('%'), "{text:?} as {again:?}");
    }
}
