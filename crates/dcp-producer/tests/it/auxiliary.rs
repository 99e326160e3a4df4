//! Requests around the streams, as the tables of inputs and answers number them.

use bytes::Bytes;
use dcp_producer::{Producer, WriteOptions};
use dcp_wire::message::OpenFlags;
use dcp_wire::{CollectionId, Feature, Frame, Opcode, Status, Vbid};

use super::raw_client::RawClient;
use super::{start, start_one};

const VB: Vbid = Vbid(0);
const COLLECTIONS: [Feature; 2] = [Feature::XERROR, Feature::COLLECTIONS];

/// Writes `count` documents of a collection into the first vBucket.
fn write(producer: &Producer, collection_id: CollectionId, count: usize) {
    let mut options = WriteOptions::default();
    options.collection_id = collection_id;
    let keys = (0..).map(|n| format!("key-{n}"));
    for key in keys.filter(|key| producer.vbid_of(key.as_bytes()) == VB).take(count) {
        producer.upsert(key.as_bytes(), Bytes::from_static(b"1"), options).unwrap();
    }
}

/// The seqnos of a response to GET_ALL_VB_SEQNOS, by vBucket.
fn seqnos(value: &[u8]) -> Vec<(u16, u64)> {
    let (entries, rest) = value.as_chunks::<10>();
    assert!(rest.is_empty());
    let entry = |entry: &[u8; 10]| {
        let (vbid, seqno) = entry.split_at(2);
        let vbid = u16::from_be_bytes(vbid.try_into().unwrap());
        (vbid, u64::from_be_bytes(seqno.try_into().unwrap()))
    };
    entries.iter().map(entry).collect()
}

#[tokio::test]
async fn ax_02_notifications_of_maps_need_duplex() {
    let producer = start_one().await;
    let mut client = RawClient::connect(&producer, 0).await;
    let (duplex, notification) = ([0, 0x0c], [0, 0x0d]);
    let hello = Frame::request(Opcode::HELLO);
    client.fail(hello.with_value(&notification), Status::EINVAL).await;
    let both = [notification, duplex].concat();
    let granted = client.succeed(hello.with_value(&both)).await;
    assert_eq!(granted.frame().value, [duplex, notification].concat());
}

#[tokio::test]
async fn ax_04_the_second_hello_replaces_the_first() {
    let producer = start_one().await;
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    write(&producer, carts, 1);
    let mut client = RawClient::ready(&producer, 0, &COLLECTIONS).await;
    let ask = Frame::request(Opcode::GET_ALL_VB_SEQNOS);
    assert_eq!(seqnos(client.succeed(ask).await.frame().value)[0], (0, 2));
    client.hello(&[Feature::XERROR]).await;
    assert_eq!(seqnos(client.succeed(ask).await.frame().value)[0], (0, 0));
    client.fail(ask.with_extras(&[0, 0, 0, 1, 0, 0, 0, 8]), Status::EINVAL).await;
}

#[tokio::test]
async fn ax_08_to_ax_10_failover_logs_without_dcp_and_of_a_missing_vbucket() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let of_dcp = Frame::request(Opcode::DCP_GET_FAILOVER_LOG);
    client.fail(of_dcp, Status::EINVAL).await;
    let log = client.succeed(Frame::request(Opcode::GET_FAILOVER_LOG)).await;
    assert_eq!(log.frame().value.len(), 16);
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    assert_eq!(client.succeed(of_dcp).await.frame().value, log.frame().value);
    client.fail(of_dcp.with_vbid(Vbid(4)), Status::NOT_MY_VBUCKET).await;
}

#[tokio::test]
async fn ax_11_to_ax_14_seqnos_are_told_by_state() {
    let producer = start(|options| (options.nodes, options.replicas) = (2, 1)).await;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let ask = Frame::request(Opcode::GET_ALL_VB_SEQNOS);
    assert_eq!(seqnos(client.succeed(ask).await.frame().value).len(), 4, "replicas as well");
    let active = client.succeed(ask.with_extras(&[0, 0, 0, 1])).await;
    assert_eq!(seqnos(active.frame().value), [(0, 0), (1, 0)]);
    client.fail(ask.with_extras(&[0, 0, 0, 9]), Status::EINVAL).await;
    client.fail(ask.with_extras(&[0, 0, 0, 1, 0, 0, 0, 9]), Status::EINVAL).await;
}

#[tokio::test]
async fn ax_15_a_vbucket_that_lacks_the_collection_is_left_out() {
    let producer = start(|options| {
        (options.nodes, options.replicas, options.vbuckets) = (2, 1, 2);
    })
    .await;
    // The replica of vBucket 0 does not learn of the collection.
    producer.set_replica_lag(VB, 1, Some(1)).unwrap();
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    assert_eq!(carts, CollectionId(8));
    let mut client = RawClient::ready(&producer, 1, &COLLECTIONS).await;
    let ask = Frame::request(Opcode::GET_ALL_VB_SEQNOS);
    let of_carts = client.succeed(ask.with_extras(&[0, 0, 0, 0, 0, 0, 0, 8])).await;
    assert_eq!(seqnos(of_carts.frame().value), [(1, 1)]);
    let of_all = client.succeed(ask).await;
    assert_eq!(seqnos(of_all.frame().value), [(0, 0), (1, 1)]);
}

#[tokio::test]
async fn ax_16_without_collections_seqnos_are_those_of_the_default_collection() {
    let producer = start_one().await;
    write(&producer, CollectionId::DEFAULT, 7);
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    write(&producer, carts, 2);
    let ask = Frame::request(Opcode::GET_ALL_VB_SEQNOS);
    let mut client = RawClient::ready(&producer, 0, &COLLECTIONS).await;
    assert_eq!(seqnos(client.succeed(ask).await.frame().value)[0], (0, 10));
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    assert_eq!(seqnos(client.succeed(ask).await.frame().value)[0], (0, 7));
}

#[tokio::test]
async fn ax_19_a_branch_nobody_knows_is_not_observed() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    client
        .fail(Frame::request(Opcode::OBSERVE_SEQNO).with_value(&[9; 8]), Status::KEY_ENOENT)
        .await;
}

#[tokio::test]
async fn ax_23_a_collection_nobody_knows_is_told_with_the_manifest() {
    let producer = start_one().await;
    producer.create_collection("_default", "carts", None).unwrap();
    let mut client = RawClient::ready(&producer, 0, &COLLECTIONS).await;
    let ask = Frame::request(Opcode::GET_COLLECTION_ID).with_value(b"_default.nope");
    let refused = client.fail(ask, Status::UNKNOWN_COLLECTION).await;
    let body: serde_json::Value = serde_json::from_slice(refused.frame().value).unwrap();
    assert_eq!(body["manifest_uid"], "1");
}
