//! Connections that are kept between streams.

use dcp_test::with;
use std::time::Duration;

use dcp_consumer::{ChangeStream, Client, ConnectOptions, End, Filter, Start, StreamOptions};
use dcp_producer::{Producer, WriteOptions, parse_rules};
use dcp_proto::Op;
use tokio::time::timeout;

use crate::embedded::{
    ANSWER_TIMEOUT, cluster_options, options, producer, read_all, reader, write,
};
use crate::rows::{Item, Rows};

const KEEP: Duration = Duration::from_secs(60);

async fn connect(producer: &Producer, keep: Duration) -> Client {
    let options = ConnectOptions::new(producer.connection_string())
        .with_bucket("default")
        .with_credentials(reader())
        .with_keep_connections(keep);
    Client::connect(options).await.unwrap()
}

/// Counts the packets of an opcode from now on.
fn count(producer: &Producer, opcode: &str) {
    let rules = format!(
        r#"[{{"condition": {{"opcode": "{opcode}", "direction": "to_server"}},
            "reaction": {{"delay": {{"seconds": 0}}}}}}]"#
    );
    producer.set_faults(parse_rules(&rules).unwrap()).unwrap();
}

fn counted(producer: &Producer) -> u64 {
    producer.fault_counts()[0]
}

async fn open(client: &Client, options: StreamOptions) -> ChangeStream<Vec<Item>> {
    timeout(ANSWER_TIMEOUT, client.stream(options, Rows::default)).await.unwrap().unwrap()
}

async fn rows(client: &Client, options: StreamOptions) -> usize {
    read_all(&mut open(client, options).await).await.len()
}

fn everything() -> StreamOptions {
    options(Start::Earliest, End::Now)
}

#[tokio::test]
async fn connection_pool_is_shared_by_consecutive_streams() {
    for (keep, opened) in [(KEEP, 2), (Duration::ZERO, 10)] {
        let producer = producer(2, 16).await;
        write(&producer, 0..500);
        let client = connect(&producer, keep).await;
        count(&producer, "DCP_OPEN");
        for _ in 0..5 {
            assert_eq!(rows(&client, everything()).await, 500);
        }
        assert_eq!(counted(&producer), opened);
    }
}

#[tokio::test]
async fn connection_pool_is_shared_by_queries_for_persisted_seqnos() {
    let producer = producer(1, 4).await;
    write(&producer, 0..100);
    producer.persist();
    let client = connect(&producer, KEEP).await;
    let persisted = || with(everything(), |o| o.persisted_only = true);
    assert_eq!(rows(&client, persisted()).await, 100);
    count(&producer, "SELECT_BUCKET");
    for _ in 0..3 {
        assert_eq!(rows(&client, persisted()).await, 100);
    }
    assert_eq!(counted(&producer), 0);
}

#[tokio::test]
async fn connection_pool_keeps_other_stream_contents_apart() {
    let producer = producer(1, 4).await;
    write(&producer, 0..100);
    let client = connect(&producer, KEEP).await;
    count(&producer, "DCP_OPEN");
    for values in [true, false, true, false] {
        let mut options = everything();
        options.content.values = values;
        let items = read_all(&mut open(&client, options).await).await;
        assert_eq!(items.len(), 100);
        let has_value = |item: &Item| matches!(item, Item::Row(row) if !row.value.is_empty());
        assert!(items.iter().all(|item| has_value(item) == values));
    }
    assert_eq!(counted(&producer), 2);
}

#[tokio::test]
async fn connection_pool_returns_a_whole_window_however_little_was_acknowledged() {
    let producer = producer(1, 1).await;
    write(&producer, 0..1000);
    let client = connect(&producer, KEEP).await;
    count(&producer, "DCP_OPEN");
    // Less than what is acknowledged at once: without more, three streams would fill the window.
    for _ in 0..20 {
        let mut options = everything();
        options.buffer_size = 256 * 1024;
        assert_eq!(rows(&client, options).await, 1000);
    }
    assert_eq!(counted(&producer), 1);
}

#[tokio::test]
async fn connection_pool_replaces_connections_to_a_restarted_node() {
    let producer = producer(2, 16).await;
    write(&producer, 0..500);
    producer.persist();
    let client = connect(&producer, KEEP).await;
    assert_eq!(rows(&client, everything()).await, 500);
    producer.restart(0, true).await.unwrap();
    assert_eq!(rows(&client, everything()).await, 500);
}

#[tokio::test]
async fn connection_pool_passes_on_a_pushed_map_without_a_request() {
    let mut options = cluster_options();
    (options.nodes, options.vbuckets, options.replicas) = (2, 4, 1);
    let producer = Producer::start(options).await.unwrap();
    write(&producer, 0..100);
    let client = connect(&producer, KEEP).await;
    assert_eq!(rows(&client, everything()).await, 100);
    assert_eq!(client.vbuckets_by_node().len(), 2);
    count(&producer, "GET_CLUSTER_CONFIG");
    producer.failover(1, true).unwrap();
    let moved = async {
        while client.vbuckets_by_node().len() != 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(ANSWER_TIMEOUT, moved).await.unwrap();
    assert_eq!(counted(&producer), 0);
}

#[tokio::test]
async fn connection_pool_replaces_connections_that_do_not_answer() {
    let producer = producer(1, 4).await;
    write(&producer, 0..100);
    let client = connect(&producer, KEEP).await;
    assert_eq!(rows(&client, everything()).await, 100);
    let rules = r#"[{"condition": {"opcode": "GET_CLUSTER_CONFIG", "direction": "to_server", "nth": 1},
        "reaction": "half_open"}]"#;
    producer.set_faults(parse_rules(rules).unwrap()).unwrap();
    assert_eq!(rows(&client, everything()).await, 100);
    assert_eq!(counted(&producer), 1);
}

#[tokio::test]
async fn connection_pool_closes_connections_when_nobody_wants_them() {
    let producer = producer(1, 4).await;
    write(&producer, 0..100);
    let client = connect(&producer, Duration::from_millis(10)).await;
    count(&producer, "DCP_OPEN");
    for opened in 1..=3 {
        assert_eq!(rows(&client, everything()).await, 100);
        assert_eq!(counted(&producer), opened);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

#[tokio::test]
async fn connection_pool_drops_a_connection_whose_stream_was_abandoned() {
    let producer = producer(1, 4).await;
    write(&producer, 0..100);
    let client = connect(&producer, KEEP).await;
    count(&producer, "DCP_OPEN");
    for _ in 0..3 {
        let mut endless = open(&client, options(Start::Earliest, End::Never)).await;
        assert!(timeout(ANSWER_TIMEOUT, endless.next()).await.unwrap().unwrap().unwrap().rows > 0);
        drop(endless);
    }
    assert_eq!(counted(&producer), 3);
    assert_eq!(rows(&client, everything()).await, 100);
}

#[tokio::test]
async fn connection_pool_knows_a_collection_that_was_recreated_meanwhile() {
    let producer = producer(1, 4).await;
    let client = connect(&producer, KEEP).await;
    for round in 0..3_u32 {
        let id = producer.create_collection("_default", "carts", None).unwrap();
        for key in 0..=round {
            let mut write = WriteOptions::default();
            write.collection_id = id;
            producer.upsert(format!("key-{key}").as_bytes(), "{}".into(), write).unwrap();
        }
        let mut options = everything();
        options.filter = Filter::Collections(vec!["_default.carts".to_owned()]);
        let items = read_all(&mut open(&client, options).await).await;
        let is_mutation = |item: &&Item| matches!(item, Item::Row(row) if row.op == Op::Mutation);
        assert_eq!(items.iter().filter(is_mutation).count(), round as usize + 1);
        producer.drop_collection("_default", "carts").unwrap();
    }
}

#[tokio::test]
async fn connection_pool_is_empty_once_the_client_is_closed() {
    let producer = producer(1, 4).await;
    write(&producer, 0..100);
    let client = connect(&producer, KEEP).await;
    let mut stream = open(&client, everything()).await;
    assert_eq!(read_all(&mut stream).await.len(), 100);
    client.close().await;
    let refused = client.stream(everything(), Rows::default).await.unwrap_err();
    assert_eq!(refused.kind(), dcp_consumer::ErrorKind::Closed);
}
