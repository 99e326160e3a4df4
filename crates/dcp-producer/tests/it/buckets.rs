//! Several buckets in one cluster.

use std::path::Path;
use std::time::Duration;

use dcp_producer::{Error, Producer, WriteOptions, parse_rules};
use dcp_wire::message::{Mutation, OpenFlags, StreamRequestFlags};
use dcp_wire::{Feature, Frame, Opcode, Seqno, Status, Vbid, Vbuuid};
use serde_json::{Value, json};

use super::http::{Configs, dial, get, send_form};
use super::raw_client::{Packet, RawClient};
use super::{start, start_one};

const VB: Vbid = Vbid(0);
const BUCKETS: &str = "/pools/default/buckets";
const OTHER: &str = "/pools/default/buckets/other";

async fn create(producer: &Producer, form: &str) {
    let created = send_form(producer, "POST", BUCKETS, form).await;
    assert_eq!(created.status, 202, "{form}: {}", created.body);
}

/// Why a bucket is not created.
async fn refusal(producer: &Producer, form: &str) -> String {
    let refused = send_form(producer, "POST", BUCKETS, form).await;
    assert_eq!(refused.status, 400, "{form}: {}", refused.body);
    refused.body
}

async fn names(producer: &Producer) -> Vec<String> {
    let listed = get(producer, BUCKETS).await.json();
    let listed = listed.as_array().unwrap().iter();
    listed.map(|bucket| bucket["name"].as_str().unwrap().to_owned()).collect()
}

/// Connects, authenticates and selects a bucket.
async fn on(producer: &Producer, node: usize, bucket: &[u8]) -> RawClient {
    let mut client = RawClient::connect(producer, node).await;
    client.hello(&[Feature::XERROR, Feature::JSON]).await;
    client.log_in("Administrator", "password").await;
    client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(bucket)).await;
    client
}

/// A key of vBucket 0.
fn key(producer: &Producer) -> String {
    let mut keys = (0..).map(|n| format!("key-{n}"));
    keys.find(|key| producer.vbid_of(key.as_bytes()) == VB).unwrap()
}

async fn set(client: &mut RawClient, key: &str, value: &[u8]) {
    let set = Frame::request(Opcode::SET).with_key(key.as_bytes()).with_extras(&[0; 8]);
    client.succeed(set.with_value(value)).await;
}

async fn body(client: &mut RawClient, key: &str) -> Vec<u8> {
    let get = Frame::request(Opcode::GET).with_key(key.as_bytes());
    client.succeed(get).await.frame().value.to_vec()
}

/// Streams vBucket 0 of a selected bucket.
async fn stream(client: &mut RawClient) {
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    let flags = StreamRequestFlags::empty();
    let opened = client.request_stream(VB, Seqno::ZERO, Seqno::MAX, Vbuuid(0), flags).await;
    assert_eq!(opened.status(), Status::SUCCESS);
}

/// The value of the next mutation.
async fn streamed(client: &mut RawClient) -> Vec<u8> {
    loop {
        let packet = client.receive().await;
        let frame = packet.frame();
        if frame.header.opcode == Opcode::DCP_MUTATION {
            return Mutation::decode(&frame).unwrap().value.to_vec();
        }
        assert_eq!(frame.header.opcode, Opcode::DCP_SNAPSHOT_MARKER);
    }
}

fn config(packet: &Packet) -> Value {
    serde_json::from_slice(packet.frame().value).unwrap()
}

#[tokio::test]
async fn buckets_are_written_streamed_flushed_and_dropped_apart() {
    let producer = start_one().await;
    let key = key(&producer);
    create(&producer, "name=other&bucketType=ephemeral&ramQuotaMB=123&flushEnabled=1").await;
    assert_eq!(names(&producer).await, ["default", "other"]);
    let listed = get(&producer, OTHER).await.json();
    assert_eq!(
        (&listed["bucketType"], &listed["evictionPolicy"]),
        (&"ephemeral".into(), &"noEviction".into())
    );
    assert_eq!(listed["quota"]["rawRAM"], 123 << 20);
    let terse = get(&producer, "/pools/default/b/other").await.json();
    assert_ne!(terse["uuid"], producer.bucket_uuid());
    let pool = get(&producer, "/pools/default").await.json();
    assert_eq!(pool["bucketNames"][1]["bucketName"], "other");

    let (mut first, mut other) =
        (on(&producer, 0, b"default").await, on(&producer, 0, b"other").await);
    let asked = other.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await;
    assert_eq!(config(&asked)["uuid"], terse["uuid"]);
    set(&mut first, &key, b"1").await;
    set(&mut other, &key, b"2").await;
    assert_eq!(body(&mut first, &key).await, b"1");
    assert_eq!(body(&mut other, &key).await, b"2");
    assert_eq!(producer.get(key.as_bytes()).unwrap().value, "1");
    let scopes = format!("{OTHER}/scopes");
    assert_eq!(send_form(&producer, "POST", &scopes, "name=shop").await.status, 200);
    assert!(get(&producer, &scopes).await.body.contains("shop"));
    assert!(!producer.manifest_json().contains("shop"));

    // Names of DCP connections are of a bucket.
    let (mut first, mut reader) =
        (on(&producer, 0, b"default").await, on(&producer, 0, b"other").await);
    stream(&mut first).await;
    stream(&mut reader).await;
    assert_eq!(streamed(&mut first).await, b"1");
    assert_eq!(streamed(&mut reader).await, b"2");
    let flush = format!("{OTHER}/controller/doFlush");
    assert_eq!(send_form(&producer, "POST", &flush, "").await.status, 200);
    assert_eq!(reader.receive().await.frame().header.opcode, Opcode::DCP_STREAM_END);
    other.fail(Frame::request(Opcode::GET).with_key(key.as_bytes()), Status::KEY_ENOENT).await;
    first.expect_silence().await;

    assert_eq!(send_form(&producer, "DELETE", OTHER, "").await.status, 200);
    other.expect_end().await;
    reader.expect_end().await;
    producer.upsert(key.as_bytes(), "3".into(), WriteOptions::default()).unwrap();
    assert_eq!(streamed(&mut first).await, b"3", "the other bucket's streams go on");
    assert_eq!(names(&producer).await, ["default"]);
    assert_eq!(get(&producer, OTHER).await.status, 404);
    let mut client = on(&producer, 0, b"default").await;
    let select = Frame::request(Opcode::SELECT_BUCKET).with_key(b"other");
    client.fail(select, Status::KEY_ENOENT).await;
    assert_eq!(body(&mut client, &key).await, b"3", "the selected bucket stays");

    create(&producer, "name=other&bucketType=membase").await;
    let again = get(&producer, OTHER).await.json();
    assert_eq!((&again["bucketType"], again["uuid"] == terse["uuid"]), (&"membase".into(), false));
    assert_eq!(send_form(&producer, "POST", &flush, "").await.status, 400, "nobody asked for it");
    producer.drop_bucket().unwrap();
    assert_eq!(names(&producer).await, ["other"]);
    let nodes = get(&producer, "/pools/default/nodeServices").await.json();
    assert!(nodes.get("name").is_none() && nodes["nodesExt"][0]["services"]["kv"].is_u64());
    let mut other = on(&producer, 0, b"other").await;
    set(&mut other, &key, b"4").await;
    producer.create_bucket().unwrap();
    assert_eq!(names(&producer).await, ["default", "other"]);
    assert!(producer.get(key.as_bytes()).is_none());
}

#[tokio::test]
async fn bucket_that_a_cluster_cannot_have_is_refused_with_the_reason() {
    let producer = start_one().await;
    for (form, reason) in [
        ("name=", "100 letters"),
        ("name=a/b", "100 letters"),
        ("name=DEFAULT", "already exists"),
        ("name=other&bucketType=memcached", "ephemeral"),
        ("name=other&replicaNumber=4", "0 to 3"),
        ("name=other&replicaNumber=many", "0 to 3"),
        ("name=other&ramQuotaMB=99", "100"),
        ("name=other&flushEnabled=2", "0 or 1"),
        ("name=other&conflictResolutionType=lww", "seqno"),
        ("name=other&maxTTL=60", "which is 0"),
        ("name=other&bucketType=ephemeral&durabilityMinLevel=majority", "none"),
    ] {
        let refused = refusal(&producer, form).await;
        assert!(refused.contains(reason), "{form}: {refused}");
    }
    for number in 1..30 {
        create(&producer, &format!("name=b{number}&replicaNumber=1")).await;
    }
    assert!(refusal(&producer, "name=b30").await.contains("30 buckets"));
    assert_eq!(send_form(&producer, "DELETE", "/pools/default/buckets/b1", "").await.status, 200);
    // Of these, clients notice nothing.
    create(&producer, "name=b30&replicaIndex=1&evictionPolicy=fullEviction").await;
}

#[tokio::test]
async fn buckets_all_move_with_operations_on_nodes() {
    let producer = start(|options| (options.nodes, options.replicas) = (2, 1)).await;
    create(&producer, "name=other&replicaNumber=1").await;
    create(&producer, "name=single&replicaNumber=0").await;
    let key = key(&producer);
    let mut client = on(&producer, 0, b"other").await;
    set(&mut client, &key, b"1").await;
    let lost = Frame::request(Opcode::GET).with_key(key.as_bytes());
    producer.failover(0, false).unwrap();
    client.expect_end().await;
    // The node that is left is the first member now.
    let mut client = on(&producer, 0, b"other").await;
    assert_eq!(body(&mut client, &key).await, b"1");
    for (bucket, copies) in
        [("default", json!([0, -1])), ("other", json!([0, -1])), ("single", json!([0]))]
    {
        let map = get(&producer, &format!("/pools/default/b/{bucket}")).await.json();
        let chains = map["vBucketServerMap"]["vBucketMap"].as_array().unwrap().clone();
        let count = chains.iter().filter(|chain| **chain == copies).count();
        // What has no replica is lost with its node.
        assert_eq!(count, if bucket == "single" { 2 } else { 4 }, "{bucket}: {chains:?}");
    }
    let mut single = on(&producer, 0, b"single").await;
    single.fail(lost, Status::NOT_MY_VBUCKET).await;
    producer.restart(0, true).await.unwrap();
    producer.rebalance().unwrap();
    for bucket in ["default", "other", "single"] {
        let map = get(&producer, &format!("/pools/default/b/{bucket}")).await.json();
        let chains = map["vBucketServerMap"]["vBucketMap"].as_array().unwrap().clone();
        assert_eq!((&chains[0][0], &chains[3][0]), (&0.into(), &1.into()), "{bucket}: {chains:?}");
    }
    let mut client = on(&producer, 0, b"other").await;
    assert_eq!(body(&mut client, &key).await, b"1");
    // A crash loses what the other bucket has not persisted, as it does in the first.
    producer.hold_persistence(VB, 0, true).unwrap();
    producer.kill(0).unwrap();
    producer.restart(0, false).await.unwrap();
    let mut client = on(&producer, 0, b"other").await;
    assert_eq!(body(&mut client, &key).await, b"1", "the flusher persisted it");
}

/// The value that the replica of vBucket 0, on node 1, has of a document; empty if it has none.
async fn on_replica(producer: &Producer, bucket: &[u8], key: &str) -> Vec<u8> {
    let get = Frame::request(Opcode::GET_REPLICA).with_vbid(VB).with_key(key.as_bytes());
    let answer = on(producer, 1, bucket).await.ask(get).await;
    match answer.status() {
        Status::SUCCESS => answer.frame().value.to_vec(),
        status => {
            assert_eq!(status, Status::KEY_ENOENT);
            Vec::new()
        }
    }
}

#[tokio::test]
async fn replicas_of_every_bucket_feel_faults_between_nodes() {
    const NAMES: [&[u8]; 3] = [b"default", b"other", b"late"];
    let producer = start(|options| (options.nodes, options.replicas) = (2, 1)).await;
    create(&producer, "name=other&replicaNumber=1").await;
    let key = key(&producer);
    for (reaction, holds_back) in [
        (r#""disconnect""#, true),
        (r#""half_open""#, true),
        (r#"{"lag": {"changes": 1}}"#, true),
        (r#"{"window": {"bytes": 50}}"#, false),
    ] {
        let condition = r#"{"between": [0, 1], "vbucket": 0}"#;
        let rule = format!(r#"[{{"condition": {condition}, "reaction": {reaction}}}]"#);
        producer.set_faults(parse_rules(&rule).unwrap()).unwrap();
        assert_eq!(producer.fault_counts(), [2], "{reaction}: one connection in each bucket");
        create(&producer, "name=late&replicaNumber=1").await;
        assert_eq!(producer.fault_counts(), [3], "{reaction}: and in one that is created later");
        for bucket in NAMES {
            set(&mut on(&producer, 0, bucket).await, &key, reaction.as_bytes()).await;
            let has = on_replica(&producer, bucket, &key).await == reaction.as_bytes();
            assert_eq!(has, !holds_back, "{reaction}");
        }
        producer.set_faults(Vec::new()).unwrap();
        for bucket in NAMES {
            assert_eq!(on_replica(&producer, bucket, &key).await, reaction.as_bytes());
        }
        let late = send_form(&producer, "DELETE", "/pools/default/buckets/late", "").await;
        assert_eq!(late.status, 200);
    }
}

#[tokio::test]
async fn documents_of_every_bucket_expire_on_demand() {
    const PAST: u32 = 1_700_000_000;
    let producer = start_one().await;
    create(&producer, "name=other").await;
    let key = key(&producer);
    let mut readers = Vec::new();
    for bucket in [&b"default"[..], b"other"] {
        let extras = [0u32.to_be_bytes(), PAST.to_be_bytes()].concat();
        let set = Frame::request(Opcode::SET).with_key(key.as_bytes()).with_extras(&extras);
        on(&producer, 0, bucket).await.succeed(set.with_value(b"1")).await;
        let mut reader = on(&producer, 0, bucket).await;
        stream(&mut reader).await;
        assert_eq!(streamed(&mut reader).await, b"1");
        readers.push(reader);
    }
    assert_eq!(producer.expire_due(), 2);
    for reader in &mut readers {
        assert_eq!(reader.receive().await.frame().header.opcode, Opcode::DCP_SNAPSHOT_MARKER);
        assert_eq!(reader.receive().await.frame().header.opcode, Opcode::DCP_DELETION);
    }
}

#[tokio::test]
async fn map_of_a_bucket_is_sent_when_that_bucket_or_the_nodes_change() {
    let producer = start(|options| (options.nodes, options.replicas) = (2, 1)).await;
    create(&producer, "name=other").await;
    let push = [Feature::DUPLEX, Feature::CLUSTER_MAP_CHANGE_NOTIFICATION];
    let mut client = RawClient::ready(&producer, 0, &push).await;
    client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"other")).await;
    let mut configs = Configs::follow(dial(&producer, 0).await, "/pools/default/bs/other").await;
    let before = configs.next().await.unwrap();
    producer.move_vbucket(VB, 1).unwrap();
    client.expect_silence().await;
    let same = get(&producer, "/pools/default/b/other").await.json();
    assert_eq!(same["rev"], before["rev"], "the revision of a bucket is of its last change");
    producer.failover(0, true).unwrap();
    let pushed = client.receive().await;
    assert_eq!(pushed.frame().header.opcode, Opcode::CLUSTER_MAP_CHANGE);
    assert_eq!(pushed.frame().key, b"other");
    let map = config(&pushed);
    assert_eq!(map["name"], "other");
    assert_eq!(configs.next().await.unwrap()["rev"], map["rev"], "no version in between");
    // All versions are of one counter, which the failover increased for both.
    assert_eq!(map["rev"].as_i64(), Some(producer.map_version().1));
    assert!(map["rev"].as_i64() > before["rev"].as_i64().map(|rev| rev + 1));
    assert_eq!(send_form(&producer, "DELETE", OTHER, "").await.status, 200);
    assert!(configs.next().await.is_none(), "a bucket that is dropped has no more");
}

async fn open(folder: &Path) -> Producer {
    start(|options| {
        options.data = Some(folder.to_owned());
        (options.nodes, options.replicas) = (2, 1);
        options.persist_delay = Duration::from_millis(1);
    })
    .await
}

fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// Waits until the folder has so many files.
async fn has_files(folder: &Path, count: usize) {
    for _ in 0..1000 {
        if files(folder) == count {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(files(folder), count);
}

#[tokio::test]
async fn data_folder_keeps_every_bucket() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let key = key(&producer);
    create(&producer, "name=other&ramQuotaMB=123&flushEnabled=1").await;
    create(&producer, "name=memory&bucketType=ephemeral&replicaNumber=0").await;
    create(&producer, "name=gone").await;
    for bucket in [&b"other"[..], b"memory", b"gone"] {
        set(&mut on(&producer, 0, bucket).await, &key, b"1").await;
    }
    producer.persist();
    has_files(folder.path(), 4).await;
    let gone = send_form(&producer, "DELETE", "/pools/default/buckets/gone", "").await;
    assert_eq!(gone.status, 200);
    has_files(folder.path(), 3).await;
    let crashed = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(folder.path()).unwrap() {
        let file = file.unwrap();
        std::fs::copy(file.path(), crashed.path().join(file.file_name())).unwrap();
    }
    let shown = async |producer: &Producer, name: &str| {
        let shown = get(producer, &format!("{BUCKETS}/{name}")).await.json();
        ["uuid", "bucketType", "replicaNumber", "quota", "controllers"]
            .map(|key| shown[key].clone())
    };
    let before = [shown(&producer, "other").await, shown(&producer, "memory").await];
    let (epoch, _) = producer.map_version();
    producer.shutdown().await;

    for folder in [&folder, &crashed] {
        let producer = open(folder.path()).await;
        assert!(producer.map_version() > (epoch, i64::MAX));
        let mut listed = names(&producer).await;
        listed.sort();
        assert_eq!(listed, ["default", "memory", "other"]);
        let after = [shown(&producer, "other").await, shown(&producer, "memory").await];
        assert_eq!(after, before);
        let mut client = on(&producer, 0, b"other").await;
        assert_eq!(body(&mut client, &key).await, b"1");
        let mut client = on(&producer, 0, b"memory").await;
        let get = Frame::request(Opcode::GET).with_key(key.as_bytes());
        client.fail(get, Status::KEY_ENOENT).await;
        set(&mut client, &key, b"2").await;
        producer.failover(0, false).unwrap();
        let mut client = on(&producer, 0, b"other").await;
        assert_eq!(body(&mut client, &key).await, b"1", "replicas have it too");
        producer.shutdown().await;
        // The node stays out, of all buckets.
        let producer = open(folder.path()).await;
        assert_eq!(producer.num_nodes(), 1);
        let mut client = on(&producer, 0, b"other").await;
        assert_eq!(body(&mut client, &key).await, b"1");
        producer.shutdown().await;
    }
}

#[tokio::test]
async fn bucket_file_that_is_damaged_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    create(&producer, "name=other").await;
    has_files(folder.path(), 2).await;
    producer.shutdown().await;
    let mut files = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().path());
    let other = files.find(|file| !file.ends_with("bucket.redb")).unwrap();
    std::fs::write(other, b"not a database").unwrap();
    let mut options = dcp_producer::ProducerOptions::default();
    options.vbuckets = 4;
    options.data = Some(folder.path().to_owned());
    assert!(matches!(Producer::start(options).await, Err(Error::Data { .. })));
}
