use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use dcp_producer::{Error, Producer, ProducerOptions, WriteOptions};
use dcp_wire::message::{FailoverEntries, FailoverEntry};
use dcp_wire::{CollectionId, Frame, Opcode, Seqno, Vbid};

use super::raw_client::RawClient;
use super::start;

const VB: Vbid = Vbid(0);

async fn open(folder: &Path) -> Producer {
    start(|options| {
        options.data = Some(folder.to_owned());
        (options.nodes, options.replicas) = (2, 1);
        // Nothing is persisted unless it is asked for.
        options.persist_delay = Duration::from_secs(3600);
    })
    .await
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
    let mut client = RawClient::ready(producer, 0, &[]).await;
    let answer = client.succeed(Frame::request(Opcode::GET_FAILOVER_LOG).with_vbid(VB)).await;
    FailoverEntries::decode(answer.frame().value).unwrap().collect()
}

fn value(producer: &Producer, key: &str) -> Option<Vec<u8>> {
    producer.get(key.as_bytes()).map(|document| document.value.to_vec())
}

#[tokio::test]
async fn a_bucket_that_was_shut_down_goes_on_with_its_history() {
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
async fn a_crash_loses_what_was_not_stored_and_begins_a_branch() {
    let folder = tempfile::tempdir().unwrap();
    let producer = open(folder.path()).await;
    let keys = keys(&producer, 3);
    write(&producer, &keys[0], "1");
    write(&producer, &keys[1], "1");
    producer.persist();
    let [branch] = failover_log(&producer).await[..] else { panic!("one branch") };
    write(&producer, &keys[1], "2");
    write(&producer, &keys[2], "1");
    // The folder as it would be found after a crash now.
    let crashed = tempfile::tempdir().unwrap();
    std::fs::copy(folder.path().join("bucket.redb"), crashed.path().join("bucket.redb")).unwrap();
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
async fn what_goes_away_is_gone_from_the_folder() {
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
async fn a_change_is_told_as_persisted_once_it_is_in_the_folder() {
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
async fn a_copy_that_takes_over_is_stored_in_place_of_the_one_that_failed() {
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
    let crashed = tempfile::tempdir().unwrap();
    std::fs::copy(folder.path().join("bucket.redb"), crashed.path().join("bucket.redb")).unwrap();
    producer.shutdown().await;

    let producer = open(crashed.path()).await;
    assert_eq!(value(&producer, &keys[0]).unwrap(), b"1");
    assert_eq!((value(&producer, &keys[1]), value(&producer, &keys[2])), (None, None));
    assert_eq!(failover_log(&producer).await[1..], log, "the crash adds a branch to it");
}

#[tokio::test]
async fn a_folder_is_one_buckets_and_one_process_s_at_a_time() {
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
    std::fs::write(folder.path().join("bucket.redb"), b"something else").unwrap();
    assert!(matches!(refusal(|_| {}).await, Error::Data { .. }));
}
