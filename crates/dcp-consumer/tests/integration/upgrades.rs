//! Clusters whose nodes have different versions while they are upgraded, one after the other.

use std::collections::BTreeMap;

use dcp_consumer::{ChangeStream, End, Start};
use dcp_producer::{ConnectionConfig, Producer, ServerVersion, WriteOptions};
use dcp_proto::Op;
use dcp_test::with;
use dcp_wire::Vbid;

use crate::embedded::{cluster_options, connect, options, row, take, write};
use crate::rows::{Item, Row, Rows};

const VBUCKETS: u16 = 4;

const fn version(major: u8, minor: u8, patch: u8) -> ServerVersion {
    ServerVersion { major, minor, patch }
}

/// A cluster of two nodes, and the version of each.
struct Cluster {
    producer: Producer,
    versions: [ServerVersion; 2],
}

impl Cluster {
    async fn start(version: ServerVersion) -> Self {
        let mut options = cluster_options();
        (options.nodes, options.vbuckets, options.replicas) = (2, VBUCKETS, 0);
        let producer = Producer::start(options).await.unwrap();
        let cluster = Self { producer, versions: [version; 2] };
        cluster.serve_as(version);
        cluster
    }

    /// The version that connections from now on have.
    fn serve_as(&self, version: ServerVersion) {
        let config = self.producer.dcp_config();
        self.producer.set_dcp_config(ConnectionConfig { server_version: version, ..config });
    }

    fn node_of(&self, vbid: Vbid) -> usize {
        self.producer.copies_of(vbid).unwrap()[0]
    }

    fn on(&self, node: usize) -> Vec<Vbid> {
        (0..VBUCKETS).map(Vbid).filter(|&vbid| self.node_of(vbid) == node).collect()
    }

    /// Moves the vBuckets of a node away, starts it with another version, and moves them back.
    async fn upgrade(&mut self, node: usize, version: ServerVersion) {
        let vbids = self.on(node);
        for &vbid in &vbids {
            self.producer.move_vbucket(vbid, 1 - node).unwrap();
        }
        self.producer.persist();
        self.producer.kill(node).unwrap();
        self.serve_as(version);
        self.producer.restart(node, true).await.unwrap();
        self.versions[node] = version;
        for vbid in vbids {
            self.producer.move_vbucket(vbid, node).unwrap();
        }
    }
}

async fn rows(stream: &mut ChangeStream<Vec<Item>>, count: usize) -> Vec<Row> {
    take(stream, count).await.into_iter().map(row).collect()
}

/// Each node is asked for what it has, on every connection anew: what an older node lacks is done
/// without for its vBuckets, and used once it is upgraded.
#[tokio::test]
async fn sv_03_cluster_is_upgraded_node_by_node_while_it_is_read() {
    let mut cluster = Cluster::start(version(6, 0, 5)).await;
    let client = connect(&cluster.producer).await;
    let mut stream =
        client.stream(options(Start::Earliest, End::Never), Rows::default).await.unwrap();
    let mut key = 0;
    let mut seqnos = BTreeMap::new();
    for upgrade in [
        None,
        Some((0, version(6, 6, 5))),
        Some((1, version(6, 6, 5))),
        Some((0, version(7, 0, 5))),
        Some((1, version(7, 0, 5))),
        Some((0, version(7, 6, 11))),
        Some((1, version(7, 6, 11))),
        Some((1, version(8, 0, 2))),
        Some((0, version(8, 0, 2))),
    ] {
        if let Some((node, version)) = upgrade {
            cluster.upgrade(node, version).await;
        }
        let producer = &cluster.producer;
        assert_eq!((cluster.on(0).len(), cluster.on(1).len()), (2, 2), "both are in use");
        write(producer, key..key + 40);
        let written = rows(&mut stream, 40).await;
        assert!(written.iter().all(|row| row.key.starts_with(b"key-")), "without collection ids");
        for gone in key..key + 40 {
            let gone = format!("key-{gone}");
            producer.expire(gone.as_bytes(), WriteOptions::default()).unwrap();
        }
        let expired = rows(&mut stream, 40).await;
        for row in &expired {
            let version = cluster.versions[cluster.node_of(row.vbid)];
            let op = if version.is_at_least(6, 5) { Op::Expiration } else { Op::Deletion };
            assert_eq!(row.op, op, "{} with {version:?}", row.vbid);
        }
        for row in written.iter().chain(&expired) {
            let last = seqnos.insert(row.vbid, row.seqno);
            assert!(last.is_none_or(|last| last < row.seqno), "{row:?} after {last:?}");
        }
        key += 40;
    }
    let stats = stream.stats();
    assert_eq!((stats.failed, stats.connection.rollbacks), (0, 0), "{stats:?}");
    // What a client that connects now gets is as on any cluster of the newest version.
    let mut again = connect(&cluster.producer)
        .await
        .stream(options(Start::Earliest, End::Now), Rows::default)
        .await
        .unwrap();
    let items = crate::embedded::read_all(&mut again).await;
    let last: BTreeMap<_, _> = items.into_iter().map(row).map(|row| (row.key, row.op)).collect();
    assert_eq!(last.len(), usize::try_from(key).unwrap());
    // What moved between nodes of 6.0 has become a deletion on the way.
    let newest: Vec<_> = (key - 40..key).map(|key| format!("key-{key}").into_bytes()).collect();
    for (key, op) in last {
        let is_right = op == Op::Expiration || (op == Op::Deletion && !newest.contains(&key));
        assert!(is_right, "{op:?} of {key:?}");
    }
}

/// Collections that were created once all nodes had them are found by a reader from before.
#[tokio::test]
async fn sv_03_collections_are_read_once_the_nodes_have_them() {
    let mut cluster = Cluster::start(version(6, 6, 5)).await;
    let client = connect(&cluster.producer).await;
    let mut stream =
        client.stream(options(Start::Earliest, End::Never), Rows::default).await.unwrap();
    write(&cluster.producer, 0..10);
    rows(&mut stream, 10).await;
    for node in 0..2 {
        cluster.upgrade(node, version(7, 6, 11)).await;
    }
    let producer = &cluster.producer;
    producer.create_scope("shop").unwrap();
    let id = producer.create_collection("shop", "orders", None).unwrap();
    for key in 0..10 {
        let options = with(WriteOptions::default(), |o| o.collection_id = id);
        producer.upsert(format!("order-{key}").as_bytes(), "{}".into(), options).unwrap();
    }
    let orders = rows(&mut stream, 10).await;
    assert!(orders.iter().all(|row| row.collection_id == id && row.key.starts_with(b"order-")));
}
