use std::time::Duration;

use bytes::{Bytes, BytesMut};
use dcp_producer::{Error, Producer, WriteOptions};
use dcp_wire::{Feature, Frame, Opcode, Seqno, Status, Vbid};

use super::raw_client::RawClient;
use super::{start, start_one};

/// Writes until vBucket 0 has `count` changes more.
fn write(producer: &Producer, count: usize) {
    let options = WriteOptions::default();
    let in_first = |key: &String| producer.vbid_of(key.as_bytes()) == Vbid(0);
    for key in (0..).map(|n| format!("key-{n}")).filter(in_first).take(count) {
        producer.upsert(key.as_bytes(), Bytes::new(), options).unwrap();
    }
}

#[tokio::test]
async fn seqnos_are_reported_by_the_node_of_each_vbucket() {
    let producer = start(|options| options.nodes = 2).await;
    write(&producer, 3);
    let ask = Frame::request(Opcode::GET_ALL_VB_SEQNOS);
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let mut expected = vec![0, 0, 0, 0, 0, 0, 0, 0, 0, 3];
    let second_is_empty = [0, 1, 0, 0, 0, 0, 0, 0, 0, 0];
    expected.extend_from_slice(&second_is_empty);
    for extras in [&[][..], &[0, 0, 0, 0], &[0, 0, 0, 1]] {
        let answer = client.succeed(ask.with_extras(extras)).await;
        let all = answer.frame().value;
        assert_eq!(all[..10], expected[..10]);
        assert_eq!(all.len(), 20, "half of the vBuckets");
    }
    let replicas = client.succeed(ask.with_extras(&[0, 0, 0, 2])).await;
    assert!(replicas.frame().value.is_empty());
    client.fail(ask.with_extras(&[0, 0, 0, 9]), Status::EINVAL).await;
    client.fail(ask.with_extras(&[0; 8]), Status::EINVAL).await;
    let collections = [Feature::XERROR, Feature::COLLECTIONS];
    let mut client = RawClient::ready(&producer, 0, &collections).await;
    assert_eq!(client.succeed(ask.with_extras(&[0; 8])).await.frame().value.len(), 20);
    let unknown = [0, 0, 0, 0, 0, 0, 0, 8];
    client.fail(ask.with_extras(&unknown), Status::UNKNOWN_COLLECTION).await;
}

#[tokio::test]
async fn observe_reports_both_branches_after_a_rollback() {
    let producer = start(|options| {
        options.persist_delay = Duration::from_secs(3600);
        options.persistence_timeout = Duration::from_millis(50);
    })
    .await;
    write(&producer, 5);
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let log = client.succeed(Frame::request(Opcode::GET_FAILOVER_LOG)).await;
    let old = log.frame().value[..8].to_vec();
    let observe = Frame::request(Opcode::OBSERVE_SEQNO);
    let seen = client.succeed(observe.with_value(&old)).await;
    assert_eq!(seen.frame().value[..3], [0, 0, 0]);
    assert_eq!(seen.frame().value[3..11], old);
    assert_eq!(seen.frame().value[11..], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5]);
    let persist = Frame::request(Opcode::SEQNO_PERSISTENCE);
    client.succeed(persist.with_extras(&5u64.to_be_bytes())).await;
    client.fail(persist.with_extras(&6u64.to_be_bytes()), Status::ETMPFAIL).await;
    producer.roll_back(Vbid(0), Seqno(3)).unwrap();
    let seen = client.succeed(observe.with_value(&old)).await;
    let value = seen.frame().value;
    assert_eq!((value.len(), value[0]), (43, 1));
    assert_eq!(value[11..27], [0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 3]);
    assert_eq!(value[27..35], old);
    assert_eq!(value[35..], 3u64.to_be_bytes());
    client.fail(observe.with_value(&[9; 8]), Status::KEY_ENOENT).await;
}

#[tokio::test]
async fn client_that_waits_for_a_persisted_seqno_delays_its_next_request() {
    let producer = start(|options| options.persistence_timeout = Duration::from_secs(600)).await;
    producer.hold_persistence(Vbid(0), 0, true).unwrap();
    write(&producer, 1);
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let mut requests = BytesMut::new();
    let persist = Frame::request(Opcode::SEQNO_PERSISTENCE);
    persist.with_extras(&1u64.to_be_bytes()).encode(&mut requests).unwrap();
    Frame::request(Opcode::NOOP).encode(&mut requests).unwrap();
    client.send(&requests).await;
    client.expect_silence().await;
    producer.hold_persistence(Vbid(0), 0, false).unwrap();
    let answer = client.receive().await;
    assert_eq!((answer.opcode(), answer.status()), (Opcode::SEQNO_PERSISTENCE, Status::SUCCESS));
    let answer = client.receive().await;
    assert_eq!((answer.opcode(), answer.status()), (Opcode::NOOP, Status::SUCCESS));
}

#[tokio::test]
async fn seqno_wait_without_a_disk_reports_nothing_persisted() {
    let producer = start(|options| {
        options.ephemeral = true;
        options.persistence_timeout = Duration::from_millis(50);
    })
    .await;
    write(&producer, 3);
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let persist = Frame::request(Opcode::SEQNO_PERSISTENCE);
    client.succeed(persist.with_extras(&3u64.to_be_bytes())).await;
    client.fail(persist.with_extras(&4u64.to_be_bytes()), Status::ETMPFAIL).await;
    let log = client.succeed(Frame::request(Opcode::GET_FAILOVER_LOG)).await;
    let observe = Frame::request(Opcode::OBSERVE_SEQNO).with_value(&log.frame().value[..8]);
    let seen = client.succeed(observe).await;
    assert_eq!(seen.frame().value[11..], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
}

#[tokio::test]
async fn seqno_wait_on_a_node_without_the_vbucket_is_refused() {
    let producer = start(|options| options.nodes = 2).await;
    let mut client = RawClient::ready(&producer, 1, &[Feature::XERROR]).await;
    let persist = Frame::request(Opcode::SEQNO_PERSISTENCE).with_extras(&[0; 8]);
    client.fail(persist, Status::NOT_MY_VBUCKET).await;
    client.fail(persist.with_extras(&[0; 4]), Status::EINVAL).await;
}

#[tokio::test]
async fn statistics_come_one_by_one_and_end() {
    let producer = start_one().await;
    write(&producer, 2);
    let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    let mut answer =
        client.succeed(Frame::request(Opcode::STAT).with_key(b"vbucket-seqno 0")).await;
    let mut seen = Vec::new();
    while !answer.frame().key.is_empty() {
        let frame = answer.frame();
        seen.push([frame.key, b"=", frame.value].concat().escape_ascii().to_string());
        answer = client.receive().await;
    }
    assert!(seen.contains(&"vb_0:high_seqno=2".to_owned()), "{seen:?}");
    client.fail(Frame::request(Opcode::STAT).with_key(b"nothing"), Status::KEY_ENOENT).await;
}

#[tokio::test]
async fn rollbacks_that_cannot_be_are_refused() {
    let producer = start(|options| options.history_bytes = 0).await;
    write(&producer, 3);
    let refused = producer.roll_back(Vbid(0), Seqno(4)).unwrap_err();
    assert!(matches!(refused, Error::RollbackBeyondHighSeqno { high_seqno: Seqno(3), .. }));
    let refused = producer.roll_back(Vbid(99), Seqno(0)).unwrap_err();
    assert!(matches!(refused, Error::UnknownVbucket { count: 4, .. }));
    // Overwrites the first of the three, and nothing is kept of it.
    write(&producer, 1);
    let refused = producer.roll_back(Vbid(0), Seqno(2)).unwrap_err();
    assert!(matches!(refused, Error::RollbackHistoryGone { oldest: Seqno(4), .. }));
    producer.roll_back(Vbid(0), Seqno(0)).unwrap();
    assert_eq!(producer.high_seqnos()[&Vbid(0)], Seqno(0));
}
