//! Durable writes of clients: what they wait for, and what becomes of them.

use std::time::{Duration, Instant};

use dcp_producer::{Producer, WriteOptions};
use dcp_test::packet::encoded;
use dcp_wire::message::MutationToken;
use dcp_wire::{Cas, Feature, Frame, Opaque, Opcode, Seqno, Status, Vbid};
use tokio::time::timeout;

use super::raw_client::{Packet, RawClient};
use super::start;

const FEATURES: &[Feature] = &[
    Feature::XERROR,
    Feature::MUTATION_SEQNO,
    Feature::ALT_REQUEST_SUPPORT,
    Feature::SYNC_REPLICATION,
];

/// Framing extras for a level, which has a second to be reached.
const fn within_a_second(level: u8) -> [u8; 4] {
    let [high, low] = 1_000_u16.to_be_bytes();
    [0x13, level, high, low]
}

const MAJORITY: [u8; 4] = within_a_second(1);
/// For tests that look at a write while it waits.
const LASTING: [u8; 2] = [0x11, 1];
const PERSIST_ON_ACTIVE: [u8; 4] = within_a_second(2);
const PERSIST_TO_MAJORITY: [u8; 4] = within_a_second(3);

async fn two_nodes() -> Producer {
    start(|options| (options.nodes, options.replicas) = (2, 1)).await
}

/// Keys of vBucket 0, whose active copy is on node 0.
fn keys<const N: usize>(producer: &Producer) -> [String; N] {
    assert_eq!(producer.copies_of(Vbid(0)).unwrap()[0], 0);
    let mut keys = (0..).map(|n| format!("key-{n}"));
    std::array::from_fn(|_| keys.find(|key| producer.vbid_of(key.as_bytes()).0 == 0).unwrap())
}

fn set<'a>(key: &'a str, durability: &'a [u8]) -> Frame<'a> {
    let frame = Frame::request(Opcode::SET).with_key(key.as_bytes()).with_extras(&[0; 8]);
    frame.with_value(b"{}").with_framing_extras(durability)
}

fn token(packet: &Packet) -> MutationToken {
    MutationToken::decode(&packet.frame()).unwrap().unwrap()
}

#[tokio::test]
async fn durable_write_is_visible_once_a_majority_has_it() {
    let producer = two_nodes().await;
    let [key, other] = keys(&producer);
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    let written = client.succeed(set(&key, &MAJORITY)).await;
    // Prepared at 1, committed at 2 as the version that was prepared.
    // Where it began, as servers tell.
    assert_eq!(token(&written).seqno.0, 1);
    let found = client.succeed(Frame::request(Opcode::GET).with_key(key.as_bytes())).await;
    assert_eq!(found.frame().header.cas, written.frame().header.cas);

    producer.set_replica_lag(Vbid(0), 1, None).unwrap();
    let mut neighbour = RawClient::ready(&producer, 0, FEATURES).await;
    let write = set(&other, &MAJORITY);
    client.send(&encoded(&write)).await;
    let get = Frame::request(Opcode::GET).with_key(other.as_bytes());
    let begun = Instant::now();
    loop {
        // In progress, until which nobody else writes; and nobody sees it.
        let answer = neighbour.ask(set(&other, &[])).await;
        if answer.frame().header.status() == Status::SYNC_WRITE_IN_PROGRESS {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(1));
    }
    neighbour.succeed(get).await;
    producer.set_replica_lag(Vbid(0), 1, Some(0)).unwrap();
    let answer = timeout(Duration::from_secs(1), client.receive()).await.unwrap();
    assert_eq!(answer.frame().header.status(), Status::SUCCESS);
    let found = neighbour.succeed(get).await;
    assert_eq!(found.frame().header.cas, answer.frame().header.cas);
}

#[tokio::test]
async fn durable_write_that_takes_too_long_is_ambiguous_and_aborted() {
    let producer = two_nodes().await;
    let [key] = keys(&producer);
    producer.set_replica_lag(Vbid(0), 1, None).unwrap();
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    let begun = Instant::now();
    client.fail(set(&key, &MAJORITY), Status::SYNC_WRITE_AMBIGUOUS).await;
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());
    client.fail(Frame::request(Opcode::GET).with_key(key.as_bytes()), Status::KEY_ENOENT).await;
    client.succeed(set(&key, &[])).await;
}

#[tokio::test]
async fn durable_write_that_nobody_waits_for_is_completed() {
    let producer = two_nodes().await;
    let [key] = keys(&producer);
    producer.set_replica_lag(Vbid(0), 1, None).unwrap();
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    client.send(&encoded(&set(&key, &MAJORITY))).await;
    while producer.high_seqnos()[&Vbid(0)].0 == 0 {
        tokio::task::yield_now().await;
    }
    drop(client);
    assert!(producer.get(key.as_bytes()).is_none());
    producer.set_replica_lag(Vbid(0), 1, Some(0)).unwrap();
    assert!(producer.get(key.as_bytes()).is_some());
}

#[tokio::test]
async fn durability_levels_that_need_disks_wait_for_them() {
    let producer = two_nodes().await;
    let [first, second, third] = keys(&producer);
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    client.succeed(set(&first, &PERSIST_TO_MAJORITY)).await;
    producer.hold_persistence(Vbid(0), 1, true).unwrap();
    client.succeed(set(&second, &PERSIST_ON_ACTIVE)).await;
    client.fail(set(&second, &PERSIST_TO_MAJORITY), Status::SYNC_WRITE_AMBIGUOUS).await;
    producer.hold_persistence(Vbid(0), 0, true).unwrap();
    client.fail(set(&third, &PERSIST_ON_ACTIVE), Status::SYNC_WRITE_AMBIGUOUS).await;
    client.succeed(set(&third, &MAJORITY)).await;
}

#[tokio::test]
async fn durable_write_that_is_impossible_is_refused_at_once() {
    let lonely = start(|options| options.replicas = 1).await;
    let mut client = RawClient::ready(&lonely, 0, FEATURES).await;
    client
        .fail(
            set("key", &MAJORITY).with_vbid(lonely.vbid_of(b"key")),
            Status::DURABILITY_IMPOSSIBLE,
        )
        .await;
    let memory = start(|options| options.ephemeral = true).await;
    let mut client = RawClient::ready(&memory, 0, FEATURES).await;
    let [key] = keys(&memory);
    client.succeed(set(&key, &MAJORITY)).await;
    for level in [0, 2, 3, 4] {
        let durability = within_a_second(level);
        client.fail(set(&key, &durability), Status::DURABILITY_INVALID_LEVEL).await;
    }
    client.fail(set(&key, &[0x12, 1, 0]), Status::EINVAL).await;
}

#[tokio::test]
async fn durable_write_may_be_of_every_kind() {
    let producer = two_nodes().await;
    let [key, counter] = keys(&producer);
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    let frame =
        |opcode, key: &'_ str| Frame::request(opcode).with_key(key.as_bytes().to_vec().leak());
    let durable = |frame: Frame<'static>| frame.with_framing_extras(&MAJORITY);
    client.succeed(durable(frame(Opcode::ADD, &key).with_extras(&[0; 8]).with_value(b"a"))).await;
    client.succeed(durable(frame(Opcode::APPEND, &key).with_value(b"b"))).await;
    client.succeed(durable(frame(Opcode::PREPEND, &key).with_value(b"c"))).await;
    assert_eq!(&producer.get(key.as_bytes()).unwrap().value[..], b"cab");
    client
        .succeed(durable(frame(Opcode::REPLACE, &key).with_extras(&[0; 8]).with_value(b"d")))
        .await;
    client.succeed(durable(frame(Opcode::DELETE, &key))).await;
    assert!(producer.get(key.as_bytes()).is_none());
    let mut extras = [0; 20];
    (extras[7], extras[15]) = (2, 5);
    let extras: &'static [u8] = extras.to_vec().leak();
    let counted =
        client.succeed(durable(frame(Opcode::INCREMENT, &counter).with_extras(extras))).await;
    assert_eq!(counted.frame().value, 5_u64.to_be_bytes());
    let counted =
        client.succeed(durable(frame(Opcode::INCREMENT, &counter).with_extras(extras))).await;
    assert_eq!(counted.frame().value, 7_u64.to_be_bytes());
    client.fail(durable(frame(Opcode::DELETE, &key)), Status::KEY_ENOENT).await;
}

#[tokio::test]
async fn copy_that_takes_over_completes_what_was_prepared() {
    let producer = start(|options| (options.nodes, options.replicas) = (3, 2)).await;
    let [key] = keys(&producer);
    let behind = producer.copies_of(Vbid(0)).unwrap();
    // One replica has it, which is a majority only once another does.
    producer.set_replica_lag(Vbid(0), 2, None).unwrap();
    producer.set_replica_lag(Vbid(0), 1, None).unwrap();
    producer.upsert(key.as_bytes(), "old".into(), WriteOptions::default()).unwrap();
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    client.send(&encoded(&set(&key, &PERSIST_TO_MAJORITY))).await;
    while producer.high_seqnos()[&Vbid(0)].0 < 2 {
        tokio::task::yield_now().await;
    }
    producer.hold_persistence(Vbid(0), 1, true).unwrap();
    producer.hold_persistence(Vbid(0), 2, true).unwrap();
    producer.set_replica_lag(Vbid(0), 1, Some(0)).unwrap();
    assert_eq!(&producer.get(key.as_bytes()).unwrap().value[..], b"old");
    producer.failover(behind[0], false).unwrap();
    producer.set_replica_lag(Vbid(0), 1, Some(0)).unwrap();
    refuses_what_is_committed_again(&producer, &key).await;
    producer.hold_persistence(Vbid(0), 0, false).unwrap();
    producer.hold_persistence(Vbid(0), 1, false).unwrap();
    producer.persist();
    assert_eq!(&producer.get(key.as_bytes()).unwrap().value[..], b"{}");
    let mut client = RawClient::ready(&producer, place(&producer, 0), FEATURES).await;
    let found = client.succeed(Frame::request(Opcode::GET).with_key(key.as_bytes())).await;
    assert_eq!(found.frame().value, b"{}");
}

/// Where copy `index` is among the nodes that are left: the first one failed.
fn place(producer: &Producer, index: usize) -> usize {
    producer.copies_of(Vbid(0)).unwrap()[index] - 1
}

/// The write may have been committed on the node that failed, so nobody may read the old version.
/// Writes are refused as before.
async fn refuses_what_is_committed_again(producer: &Producer, key: &str) {
    let mut client = RawClient::ready(producer, place(producer, 0), FEATURES).await;
    let request = |opcode| Frame::request(opcode).with_key(key.as_bytes());
    let again = Status::SYNC_WRITE_RE_COMMIT_IN_PROGRESS;
    client.fail(request(Opcode::GET), again).await;
    client.fail(request(Opcode::GET_META), again).await;
    let path = request(Opcode::SUBDOC_GET).with_extras(&[0, 1, 0]).with_value(b"a");
    client.fail(path, again).await;
    // What reads before it writes is refused like a read.
    client.fail(request(Opcode::DELETE), again).await;
    client.fail(request(Opcode::APPEND).with_value(b"{}"), again).await;
    client.fail(request(Opcode::INCREMENT).with_extras(&[0; 20]), again).await;
    let in_progress = Status::SYNC_WRITE_IN_PROGRESS;
    client.fail(set(key, &[]), in_progress).await;
    client.fail(request(Opcode::TOUCH).with_extras(&[0; 4]), in_progress).await;
    client.fail(request(Opcode::GET_LOCKED), in_progress).await;
    client.fail(request(Opcode::UNLOCK).with_cas(Cas(1)), in_progress).await;
    // Other documents are not affected, and replicas have what was committed.
    client.fail(Frame::request(Opcode::GET).with_key(b"none"), Status::KEY_ENOENT).await;
    let mut client = RawClient::ready(producer, place(producer, 1), FEATURES).await;
    let found = client.succeed(request(Opcode::GET_REPLICA)).await;
    assert_eq!(found.frame().value, b"old");
}

const UNORDERED: &[Feature] = &[
    Feature::XERROR,
    Feature::MUTATION_SEQNO,
    Feature::ALT_REQUEST_SUPPORT,
    Feature::SYNC_REPLICATION,
    Feature::UNORDERED_EXECUTION,
];

fn numbered(request: Frame<'_>, number: u32) -> Vec<u8> {
    encoded(&request.with_opaque(Opaque(number)))
}

/// Opaques of the next answers, which must be successes.
async fn answered<const N: usize>(client: &mut RawClient) -> [u32; N] {
    let mut opaques = [0; N];
    for opaque in &mut opaques {
        let answer = client.receive().await;
        assert_eq!(answer.status(), Status::SUCCESS);
        *opaque = answer.frame().header.opaque.0;
    }
    opaques
}

/// A write that waits for a held replica, then a read of another document, on one connection.
async fn write_and_read(features: &[Feature], barrier: &[u8]) -> (Producer, RawClient) {
    let producer = two_nodes().await;
    let [held, other] = keys(&producer);
    producer.upsert(other.as_bytes(), "{}".into(), WriteOptions::default()).unwrap();
    producer.set_replica_lag(Vbid(0), 1, None).unwrap();
    let mut client = RawClient::ready(&producer, 0, features).await;
    let read = Frame::request(Opcode::GET).with_key(other.as_bytes());
    client.send(&numbered(set(&held, &LASTING), 1)).await;
    client.send(&numbered(read.with_framing_extras(barrier), 2)).await;
    (producer, client)
}

#[tokio::test]
async fn ordered_execution_makes_answers_wait_for_a_durable_write() {
    let (producer, mut client) = write_and_read(FEATURES, &[]).await;
    client.expect_silence().await;
    producer.set_replica_lag(Vbid(0), 1, Some(0)).unwrap();
    assert_eq!(answered(&mut client).await, [1, 2]);
}

#[tokio::test]
async fn unordered_execution_answers_others_before_a_durable_write() {
    let (producer, mut client) = write_and_read(UNORDERED, &[]).await;
    assert_eq!(answered(&mut client).await, [2]);
    // What may not be reordered waits, and so does what follows it.
    client.send(&numbered(Frame::request(Opcode::NOOP), 3)).await;
    let maps = Frame::request(Opcode::GET_CLUSTER_CONFIG);
    client.send(&numbered(maps, 4)).await;
    client.expect_silence().await;
    producer.set_replica_lag(Vbid(0), 1, Some(0)).unwrap();
    assert_eq!(answered(&mut client).await, [1, 3, 4]);
}

#[tokio::test]
async fn unordered_execution_keeps_the_order_at_a_barrier() {
    let (producer, mut client) = write_and_read(UNORDERED, &[0x00]).await;
    client.expect_silence().await;
    producer.set_replica_lag(Vbid(0), 1, Some(0)).unwrap();
    assert_eq!(answered(&mut client).await, [1, 2]);
}

#[tokio::test]
async fn connection_has_at_most_32_requests_underway() {
    let producer = two_nodes().await;
    let held: [String; 32] = keys(&producer);
    producer.set_replica_lag(Vbid(0), 1, None).unwrap();
    let mut client = RawClient::ready(&producer, 0, UNORDERED).await;
    for (number, key) in (1..).zip(&held) {
        if number == 32 {
            let maps = Frame::request(Opcode::GET_CLUSTER_CONFIG);
            client.send(&numbered(maps, 0)).await;
            assert_eq!(answered(&mut client).await, [0]);
        }
        client.send(&numbered(set(key, &LASTING), number)).await;
    }
    client.send(&numbered(Frame::request(Opcode::GET_CLUSTER_CONFIG), 33)).await;
    client.expect_silence().await;
    producer.set_replica_lag(Vbid(0), 1, Some(0)).unwrap();
    let answers: [u32; 33] = answered(&mut client).await;
    assert!(answers.into_iter().eq(1..=33));
}

/// Node 0 crashes and comes back without its changes, and its replica hears nothing of it: what it
/// acknowledged before says nothing about the writes that follow.
#[tokio::test]
async fn replica_acknowledges_again_after_a_crash() {
    let producer = two_nodes().await;
    let [first, second, third] = keys(&producer);
    producer.hold_persistence(Vbid(0), 0, true).unwrap();
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    client.succeed(set(&first, &MAJORITY)).await;
    client.succeed(set(&second, &MAJORITY)).await;
    drop(client);
    producer.set_replica_lag(Vbid(0), 1, None).unwrap();
    producer.kill(0).unwrap();
    producer.restart(0, false).await.unwrap();
    assert_eq!(producer.high_seqnos()[&Vbid(0)].0, 0);
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    client.fail(set(&third, &MAJORITY), Status::SYNC_WRITE_AMBIGUOUS).await;
    producer.set_replica_lag(Vbid(0), 1, Some(0)).unwrap();
    client.succeed(set(&third, &MAJORITY)).await;
}

/// The same when the active copy is rolled back.
#[tokio::test]
async fn replica_acknowledges_again_after_a_rollback() {
    let producer = two_nodes().await;
    let [first, second, third] = keys(&producer);
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    client.succeed(set(&first, &MAJORITY)).await;
    client.succeed(set(&second, &MAJORITY)).await;
    producer.set_replica_lag(Vbid(0), 1, None).unwrap();
    producer.roll_back(Vbid(0), Seqno(2)).unwrap();
    client.fail(set(&third, &MAJORITY), Status::SYNC_WRITE_AMBIGUOUS).await;
    producer.set_replica_lag(Vbid(0), 1, Some(0)).unwrap();
    client.succeed(set(&third, &MAJORITY)).await;
}

#[tokio::test]
async fn write_with_metadata_cannot_be_durable() {
    let producer = two_nodes().await;
    let [key] = keys(&producer);
    let mut client = RawClient::ready(&producer, 0, FEATURES).await;
    let mut extras = [0; 24];
    (extras[15], extras[23]) = (1, 1);
    for opcode in [Opcode::SET_WITH_META, Opcode::DELETE_WITH_META] {
        let write = Frame::request(opcode).with_key(key.as_bytes()).with_extras(&extras);
        client.fail(write.with_framing_extras(&MAJORITY), Status::EINVAL).await;
        assert_eq!(producer.high_seqnos()[&Vbid(0)].0, 0);
        client.succeed(write).await;
        producer.roll_back(Vbid(0), Seqno(0)).unwrap();
    }
}
