use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use dcp_producer::{Error, Producer, ProducerOptions, WriteOptions};
use dcp_test::packet::encoded;
use dcp_wire::message::{
    DurabilityLevel, FailoverEntries, FailoverEntry, OpenFlags, StreamRequestFlags,
};
use dcp_wire::{CollectionId, Feature, Frame, Opcode, Seqno, Status, Vbid, Vbuuid};
use redb::ReadableTable;
use tempfile::TempDir;

use super::raw_client::RawClient;
use super::start;

const VB: Vbid = Vbid(0);

async fn open(folder: &Path) -> Producer {
    open_with(folder, |_| {}).await
}

async fn open_with(folder: &Path, set: impl FnOnce(&mut ProducerOptions)) -> Producer {
    start(|options| {
        options.data = Some(folder.to_owned());
        (options.nodes, options.replicas) = (2, 1);
        // Nothing is persisted unless it is asked for.
        options.persist_delay = Duration::from_secs(3600);
        set(options);
    })
    .await
}

fn file(folder: &Path) -> PathBuf {
    folder.join("bucket.redb")
}

/// The folder as it would be found after a crash now.
fn crash(folder: &TempDir) -> TempDir {
    let crashed = tempfile::tempdir().unwrap();
    std::fs::copy(file(folder.path()), file(crashed.path())).unwrap();
    crashed
}

fn write(producer: &Producer, key: &str, value: &'static str) -> Seqno {
    let value = Bytes::from_static(value.as_bytes());
    producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap().seqno
}

/// Keys of vBucket 0.
fn keys(producer: &Producer, count: usize) -> Vec<String> {
    let keys = (0..).map(|n| format!("key-{n}"));
    keys.filter(|key| producer.vbid_of(key.as_bytes()) == VB).take(count).collect()
}

async fn failover_log(producer: &Producer) -> Vec<FailoverEntry> {
    failover_log_of(producer, 0).await
}

async fn failover_log_of(producer: &Producer, node: usize) -> Vec<FailoverEntry> {
    let mut client = RawClient::ready(producer, node, &[]).await;
    let answer = client.succeed(Frame::request(Opcode::GET_FAILOVER_LOG).with_vbid(VB)).await;
    FailoverEntries::decode(answer.frame().value).unwrap().collect()
}

fn value(producer: &Producer, key: &str) -> Option<Vec<u8>> {
    producer.get(key.as_bytes()).map(|document| document.value.to_vec())
}

#[tokio::test]
async fn ft_18_a_bucket_that_was_shut_down_goes_on_with_its_history() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let keys = keys(&producer, 4);
    for key in &keys {
        write(&producer, key, "1");
    }
    producer.persist();
    write(&producer, &keys[0], "2");
    producer.remove(keys[1].as_bytes(), WriteOptions::default()).unwrap();
    producer.create_scope("shop").unwrap();
    let carts = producer.create_collection("shop", "carts", Some(600)).unwrap();
    let mut in_carts = WriteOptions::default();
    in_carts.collection_id = carts;
    producer.upsert(keys[0].as_bytes(), Bytes::from_static(b"3"), in_carts).unwrap();
    let before = (producer.bucket_uuid(), producer.high_seqnos(), producer.manifest_json());
    let (log, document) = (failover_log(&producer).await, producer.get(keys[0].as_bytes()));
    let (epoch, _) = producer.map_version();
    producer.shutdown().await;

    let producer = open(folder.path()).await;
    let after = (producer.bucket_uuid(), producer.high_seqnos(), producer.manifest_json());
    assert_eq!(after, before);
    assert_eq!(failover_log(&producer).await, log);
    assert_eq!(producer.get(keys[0].as_bytes()), document, "its CAS and rev included");
    assert_eq!(value(&producer, &keys[1]), None);
    let in_carts = producer.get_from(carts, keys[0].as_bytes()).unwrap();
    assert!(in_carts.value == b"3"[..] && in_carts.expiry > 0);
    assert_eq!(producer.collection_id("shop", "carts").unwrap(), carts);
    assert_eq!(producer.create_collection("shop", "more", None).unwrap().0, carts.0 + 1);
    assert!(producer.map_version() > (epoch, i64::MAX), "clients take the new map");
    producer.failover(0, false).unwrap();
    assert_eq!(value(&producer, &keys[0]).unwrap(), b"2", "replicas have it too");
}

#[tokio::test]
async fn ft_16_a_crash_loses_what_was_not_stored_and_begins_a_branch() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let keys = keys(&producer, 3);
    write(&producer, &keys[0], "1");
    write(&producer, &keys[1], "1");
    producer.persist();
    let [branch] = failover_log(&producer).await[..] else { panic!("one branch") };
    write(&producer, &keys[1], "2");
    write(&producer, &keys[2], "1");
    let crashed = crash(&folder);
    for times in 1..=2 {
        let producer = open(crashed.path()).await;
        assert_eq!(producer.high_seqnos()[&VB], Seqno(2));
        assert_eq!(value(&producer, &keys[1]).unwrap(), b"1");
        assert_eq!(value(&producer, &keys[2]), None);
        let log = failover_log(&producer).await;
        // The second time it was shut down in good order.
        assert_eq!((log.len(), log[0].seqno, log[1]), (2, Seqno(2), branch), "{times}");
        assert_ne!(log[0].vbuuid, branch.vbuuid);
        assert_eq!(producer.bucket_uuid().len(), 32);
        producer.shutdown().await;
    }
}

#[tokio::test]
async fn data_folder_forgets_what_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let keys = keys(&producer, 3);
    for key in &keys {
        write(&producer, key, "1");
    }
    let removed = producer.remove(keys[0].as_bytes(), WriteOptions::default()).unwrap();
    write(&producer, &keys[1], "2");
    let old = producer.create_collection("_default", "old", None).unwrap();
    let mut options = WriteOptions::default();
    options.collection_id = old;
    producer.upsert(keys[0].as_bytes(), Bytes::new(), options).unwrap();
    producer.persist();
    producer.purge(VB, removed.seqno).unwrap();
    producer.drop_collection("_default", "old").unwrap();
    producer.persist();
    let high = write(&producer, &keys[2], "lost");
    producer.persist();
    producer.roll_back(VB, Seqno(high.0 - 1)).unwrap();
    let log = failover_log(&producer).await;
    producer.shutdown().await;

    let producer = open(folder.path()).await;
    assert_eq!(producer.high_seqnos()[&VB], Seqno(high.0 - 1));
    assert_eq!(value(&producer, &keys[2]).unwrap(), b"1", "the rollback is stored");
    assert_eq!(failover_log(&producer).await, log);
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    let details = Frame::request(Opcode::STAT).with_key(b"vbucket-details 0");
    let mut answer = client.succeed(details).await;
    let mut purge_seqno = Vec::new();
    while !answer.frame().key.is_empty() {
        if answer.frame().key == b"vb_0:purge_seqno" {
            purge_seqno = answer.frame().value.to_vec();
        }
        answer = client.receive().await;
    }
    assert_eq!(purge_seqno, removed.seqno.0.to_string().as_bytes());
    assert_ne!(old, CollectionId::DEFAULT);
    assert!(producer.get_from(old, keys[0].as_bytes()).is_none());
    let uuid = producer.bucket_uuid();
    producer.drop_bucket().unwrap();
    producer.shutdown().await;

    let producer = open(folder.path()).await;
    assert_eq!(producer.bucket_uuid(), "", "it stays dropped");
    producer.create_bucket().unwrap();
    assert_ne!(producer.bucket_uuid(), uuid);
    assert!(producer.high_seqnos().values().all(|&seqno| seqno == Seqno::ZERO));
}

#[tokio::test]
async fn collection_that_was_dropped_exists_again_before_that() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let key = keys(&producer, 1).remove(0);
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    let mut options = WriteOptions::default();
    options.collection_id = carts;
    let written = producer.upsert(key.as_bytes(), Bytes::from_static(b"1"), options).unwrap();
    producer.persist();
    producer.drop_collection("_default", "carts").unwrap();
    producer.persist();
    let crashed = open(crash(&folder).path()).await;
    assert_eq!(crashed.high_seqnos()[&VB].0, written.seqno.0 + 1);
    assert!(crashed.get_from(carts, key.as_bytes()).is_none());
    assert_eq!(changes(&crashed, 0, false).await, changes(&producer, 0, false).await);
    producer.roll_back(VB, written.seqno).unwrap();
    crashed.roll_back(VB, written.seqno).unwrap();
    // The manifest goes on: the collection is dropped again.
    assert_eq!(crashed.high_seqnos()[&VB].0, written.seqno.0 + 1);
    assert_eq!(changes(&crashed, 0, false).await, changes(&producer, 0, false).await);
}

#[tokio::test]
async fn change_is_reported_persisted_once_it_is_in_the_data_folder() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let key = keys(&producer, 1).remove(0);
    write(&producer, &key, "1");
    let persisted = async |client: &mut RawClient, vbuuid: u64| {
        let vbuuid = vbuuid.to_be_bytes();
        let ask = Frame::request(Opcode::OBSERVE_SEQNO).with_vbid(VB).with_value(&vbuuid);
        let answer = client.succeed(ask).await;
        u64::from_be_bytes(answer.frame().value[11..19].try_into().unwrap())
    };
    let vbuuid = failover_log(&producer).await[0].vbuuid.0;
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    assert_eq!(persisted(&mut client, vbuuid).await, 0);
    producer.persist();
    assert_eq!(persisted(&mut client, vbuuid).await, 1);
}

#[tokio::test]
async fn copy_that_takes_over_is_stored_in_place_of_the_failed_one() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let keys = keys(&producer, 3);
    write(&producer, &keys[0], "1");
    producer.set_replica_lag(VB, 1, None).unwrap();
    write(&producer, &keys[1], "lost");
    producer.persist();
    producer.failover(0, false).unwrap();
    producer.persist();
    write(&producer, &keys[2], "not stored");
    let log = failover_log(&producer).await;
    let crashed = crash(&folder);
    producer.shutdown().await;

    let producer = open(crashed.path()).await;
    assert_eq!(producer.copies_of(VB).unwrap(), [1], "the other node is out");
    assert_eq!(value(&producer, &keys[0]).unwrap(), b"1");
    assert_eq!((value(&producer, &keys[1]), value(&producer, &keys[2])), (None, None));
    assert_eq!(failover_log(&producer).await[1..], log, "the crash adds a branch to it");
}

#[tokio::test]
async fn node_that_was_failed_over_stays_out_until_a_rebalance() {
    let three = |options: &mut ProducerOptions| (options.nodes, options.replicas) = (3, 2);
    let folder = tempfile::tempdir().unwrap();
    let producer = open_with(folder.path(), three).await;
    let keys = keys(&producer, 3);
    write(&producer, &keys[0], "1");
    producer.persist();
    write(&producer, &keys[1], "not stored");
    producer.failover(0, false).unwrap();
    // The copies in the folder are those before the failover.
    let crashed = crash(&folder);
    producer.restart(0, true).await.unwrap();
    producer.shutdown().await;
    for (folder, second) in [(&crashed, None), (&folder, Some(&b"not stored"[..]))] {
        let producer = open_with(folder.path(), three).await;
        assert_eq!(producer.num_nodes(), 2);
        assert_eq!(producer.copies_of(VB).unwrap(), [1, 2]);
        assert_eq!(value(&producer, &keys[0]).as_deref(), Some(&b"1"[..]));
        assert_eq!(value(&producer, &keys[1]).as_deref(), second);
        producer.shutdown().await;
    }
    let producer = open_with(folder.path(), three).await;
    producer.rebalance().unwrap();
    assert_eq!((producer.num_nodes(), producer.copies_of(VB).unwrap()), (3, vec![0, 1, 2]));
    let crashed = crash(&folder);
    drop(producer);
    let producer = open_with(crashed.path(), three).await;
    assert_eq!((producer.num_nodes(), producer.copies_of(VB).unwrap().len()), (3, 3));
    producer.failover(0, false).unwrap();
    producer.shutdown().await;
    let alone = |options: &mut ProducerOptions| (options.nodes, options.replicas) = (1, 0);
    let producer = open_with(crashed.path(), alone).await;
    assert_eq!(producer.copies_of(VB).unwrap(), [0], "there is no other node now");
    assert_eq!(value(&producer, &keys[0]).as_deref(), Some(&b"1"[..]));
}

#[tokio::test]
async fn data_folder_belongs_to_one_bucket_and_one_process_at_a_time() {
    let folder = tempfile::tempdir().unwrap();
    let refusal = async |set: fn(&mut ProducerOptions)| {
        let mut options = ProducerOptions::default();
        options.vbuckets = 4;
        options.data = Some(folder.path().to_owned());
        set(&mut options);
        Producer::start(options).await.expect_err("the folder does not fit")
    };
    let invalid = |error: &Error, name: &str| {
        assert!(matches!(error, Error::InvalidOption { option, .. } if *option == name), "{error}");
    };
    let producer = open(folder.path()).await;
    assert!(matches!(refusal(|_| {}).await, Error::Data { .. }), "it is in use");
    producer.shutdown().await;
    invalid(&refusal(|options| options.vbuckets = 8).await, "vbuckets");
    invalid(&refusal(|options| options.bucket = "other".to_owned()).await, "bucket");
    invalid(&refusal(|options| options.ephemeral = true).await, "data");
    std::fs::write(file(folder.path()), b"something else").unwrap();
    assert!(matches!(refusal(|_| {}).await, Error::Data { .. }));
}

/// What a reader of a node's copy gets from the beginning: every version where history is kept.
async fn changes(producer: &Producer, node: usize, keeps_history: bool) -> Vec<(Opcode, u64)> {
    let mut client = RawClient::ready(producer, node, &[]).await;
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    if keeps_history {
        client.control(b"change_streams", b"true").await;
    }
    let flags = StreamRequestFlags::TO_LATEST;
    let begun = client.request_stream(VB, Seqno::ZERO, Seqno::MAX, Vbuuid(0), flags).await;
    assert_eq!(begun.status(), Status::SUCCESS);
    let mut changes = Vec::new();
    loop {
        let packet = client.receive().await;
        let frame = packet.frame();
        match frame.header.opcode {
            Opcode::DCP_STREAM_END => return changes,
            Opcode::DCP_SNAPSHOT_MARKER => {}
            opcode => {
                let seqno = frame.extras[..8].try_into().unwrap();
                changes.push((opcode, u64::from_be_bytes(seqno)));
            }
        }
    }
}

#[tokio::test]
async fn data_folder_has_every_version_where_history_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let with_history = |options: &mut ProducerOptions| options.keeps_history = true;
    let producer = open_with(folder.path(), with_history).await;
    let keys = keys(&producer, 2);
    for value in ["1", "2", "3"] {
        write(&producer, &keys[0], value);
        write(&producer, &keys[1], value);
        if value == "2" {
            producer.persist();
        }
    }
    producer.persist();
    let before = changes(&producer, 0, true).await;
    assert_eq!(before.len(), 6);
    let crashed = crash(&folder);
    let reopened = open_with(crashed.path(), with_history).await;
    for node in 0..2 {
        assert_eq!(changes(&reopened, node, true).await, before, "node {node}");
    }
    // It can be rolled back to before it was opened.
    reopened.roll_back(VB, Seqno(3)).unwrap();
    assert_eq!(value(&reopened, &keys[0]).unwrap(), b"2");
    assert_eq!(value(&reopened, &keys[1]).unwrap(), b"1");
    reopened.shutdown().await;
    let reopened = open_with(crashed.path(), with_history).await;
    assert_eq!(changes(&reopened, 0, true).await, before[..3]);
}

/// One that was fed anew would have the newest versions only.
#[tokio::test]
async fn replica_comes_back_with_what_its_node_had() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let keys = keys(&producer, 3);
    for key in &keys {
        write(&producer, key, "1");
        write(&producer, key, "2");
    }
    producer.persist();
    // The replica's disk is behind.
    producer.hold_persistence(VB, 1, true).unwrap();
    write(&producer, &keys[2], "3");
    producer.persist();
    let crashed = crash(&folder);
    let reopened = open(crashed.path()).await;
    let log = failover_log(&reopened).await;
    assert_eq!(failover_log_of(&reopened, 1).await, log);
    reopened.failover(0, false).unwrap();
    assert_eq!(reopened.high_seqnos()[&VB], Seqno(7), "it asked for the rest");
    assert_eq!(value(&reopened, &keys[2]).unwrap(), b"3");
    reopened.roll_back(VB, Seqno(3)).unwrap();
    let values: Vec<_> = keys.iter().map(|key| value(&reopened, key)).collect();
    assert_eq!(values, [Some(b"2".to_vec()), Some(b"1".to_vec()), None]);
}

const DURABLE: &[Feature] = &[Feature::ALT_REQUEST_SUPPORT, Feature::SYNC_REPLICATION];

fn durable_set(key: &str) -> Frame<'_> {
    let frame = Frame::request(Opcode::SET).with_key(key.as_bytes()).with_extras(&[0; 8]);
    // A level, and a second for it.
    frame.with_value(b"durable").with_framing_extras(&[0x13, 3, 3, 232])
}

/// A client whose durable write is prepared: the active copy has it on disk and no replica does.
async fn prepared(producer: &Producer, key: &str) -> RawClient {
    producer.set_replica_lag(VB, 1, None).unwrap();
    let before = producer.high_seqnos()[&VB];
    let mut client = RawClient::ready(producer, 0, DURABLE).await;
    client.send(&encoded(&durable_set(key))).await;
    while producer.high_seqnos()[&VB] == before {
        tokio::task::yield_now().await;
    }
    producer.persist();
    client
}

#[tokio::test]
async fn durable_write_that_was_prepared_is_committed_once_copies_have_it() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let key = keys(&producer, 1).remove(0);
    write(&producer, &key, "old");
    let _client = prepared(&producer, &key).await;
    assert_eq!(value(&producer, &key).unwrap(), b"old");
    let crashed = crash(&folder);
    // Without a second node it stays as it is, whatever time it was given.
    let lonely = open_with(crashed.path(), |options| options.nodes = 1).await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert_eq!(value(&lonely, &key).unwrap(), b"old");
    let mut client = RawClient::ready(&lonely, 0, &[]).await;
    let set = Frame::request(Opcode::SET).with_key(key.as_bytes()).with_extras(&[0; 8]);
    client.fail(set, Status::SYNC_WRITE_IN_PROGRESS).await;
    lonely.shutdown().await;

    let both = open(crashed.path()).await;
    assert_eq!(value(&both, &key).unwrap(), b"durable", "the replica asked for the prepare");
    let log = failover_log(&both).await;
    let branches: Vec<_> = log.iter().map(|entry| entry.seqno.0).collect();
    assert_eq!(branches, [2, 0], "of the crash; the prepare was persisted");
    both.shutdown().await;
    let again = open(crashed.path()).await;
    assert_eq!(value(&again, &key).unwrap(), b"durable");
    assert_eq!(failover_log(&again).await, log);
    assert_eq!(again.high_seqnos()[&VB], Seqno(3), "it is not committed twice");
}

#[tokio::test]
async fn durable_write_waits_for_the_data_folder() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let key = keys(&producer, 1).remove(0);
    let mut client = RawClient::ready(&producer, 0, DURABLE).await;
    client.fail(durable_set(&key), Status::SYNC_WRITE_AMBIGUOUS).await;
    client.send(&encoded(&durable_set(&key))).await;
    while producer.high_seqnos()[&VB] != Seqno(3) {
        tokio::task::yield_now().await;
    }
    producer.persist();
    assert_eq!(client.receive().await.status(), Status::SUCCESS);
    let crashed = open(crash(&folder).path()).await;
    assert_eq!(value(&crashed, &key).unwrap(), b"durable");
}

#[tokio::test]
async fn durable_write_prepared_by_hand_is_completed_too() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let key = keys(&producer, 1).remove(0);
    let level = DurabilityLevel::MAJORITY;
    let options = WriteOptions::default();
    producer.prepare(key.as_bytes(), Some("1".into()), options, level).unwrap();
    producer.persist();
    let crashed = crash(&folder);
    let reopened = open(crashed.path()).await;
    assert_eq!(value(&reopened, &key).unwrap(), b"1");
}

#[tokio::test]
async fn copies_move_where_the_cluster_has_other_nodes_now() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open_with(folder.path(), |options| options.nodes = 3).await;
    let keys = keys(&producer, 1);
    write(&producer, &keys[0], "1");
    producer.move_vbucket(VB, 2).unwrap();
    let (copies, log) = (producer.copies_of(VB).unwrap(), failover_log_of(&producer, 2).await);
    assert_eq!(copies[0], 2);
    producer.shutdown().await;

    let same = open_with(folder.path(), |options| options.nodes = 3).await;
    assert_eq!(same.copies_of(VB).unwrap(), copies, "they stay where they were");
    assert_eq!(value(&same, &keys[0]).unwrap(), b"1");
    same.shutdown().await;
    for (nodes, replicas) in [(1, 0), (2, 1), (3, 2)] {
        let other = open_with(folder.path(), |options| {
            (options.nodes, options.replicas) = (nodes, replicas);
        })
        .await;
        assert_eq!(other.copies_of(VB).unwrap(), (0..nodes).collect::<Vec<_>>());
        assert_eq!(value(&other, &keys[0]).unwrap(), b"1");
        for node in 0..nodes {
            assert_eq!(failover_log_of(&other, node).await, log, "they moved in good order");
        }
        other.shutdown().await;
    }
}

/// A folder that an earlier version wrote, or a later one.
#[tokio::test]
async fn data_folder_of_another_format_is_refused_with_advice() {
    let folder = tempfile::tempdir().unwrap();
    open(folder.path()).await.shutdown().await;
    let table = redb::TableDefinition::<&str, &[u8]>::new("bucket");
    let database = redb::Database::open(file(folder.path())).unwrap();
    let transaction = database.begin_write().unwrap();
    {
        let mut bucket = transaction.open_table(table).unwrap();
        let record = bucket.get("record").unwrap().unwrap().value().to_vec();
        let mut record: serde_json::Value = serde_json::from_slice(&record).unwrap();
        record["format"] = 1.into();
        bucket.insert("record", &serde_json::to_vec(&record).unwrap()[..]).unwrap();
    }
    transaction.commit().unwrap();
    drop(database);
    let mut options = ProducerOptions::default();
    (options.vbuckets, options.data) = (4, Some(folder.path().to_owned()));
    let error = Producer::start(options).await.expect_err("nobody knows it");
    assert!(matches!(error, Error::InvalidOption { option: "data", .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("format 1") && text.contains("use another folder"), "{text}");
}

/// Bits that fell over, and files that end too early: the folder opens or is refused.
#[tokio::test]
async fn data_folder_that_is_damaged_is_an_error_or_none() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    for key in keys(&producer, 40) {
        write(&producer, &key, "some value");
        write(&producer, &key, "another value");
    }
    producer.persist();
    producer.shutdown().await;
    let sound = std::fs::read(file(folder.path())).unwrap();
    let mut numbers = 1_u64;
    let mut number = |below: usize| {
        numbers = numbers.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (numbers >> 33) as usize % below
    };
    let mut refused = 0;
    for _ in 0..150 {
        let mut damaged = sound.clone();
        for _ in 0..=number(8) {
            let at = number(damaged.len());
            damaged[at] ^= 1 << number(8);
        }
        if number(10) == 0 {
            damaged.truncate(number(sound.len()));
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(file(folder.path()), damaged).unwrap();
        let mut options = ProducerOptions::default();
        (options.vbuckets, options.nodes, options.replicas) = (4, 2, 1);
        options.data = Some(folder.path().to_owned());
        match Producer::start(options).await {
            Ok(producer) => producer.shutdown().await,
            Err(_) => refused += 1,
        }
    }
    assert!(refused > 0);
}
