use bytes::Bytes;
use dcp_producer::{Error, Producer, VBucketState, WriteOptions};
use dcp_wire::message::{
    OpenFlags, SnapshotFlags, SnapshotMarker, StreamEnd, StreamEndReason, StreamRequestFlags,
    rollback_seqno,
};
use dcp_wire::{Feature, Frame, Opcode, Seqno, Status, Vbid, Vbuuid};

use super::raw_client::{Packet, RawClient};
use super::start;

const VB: Vbid = Vbid(0);
const NONE: StreamRequestFlags = StreamRequestFlags::empty();

/// vBucket 0 is active on node 0, its first replica on node 1.
async fn cluster(nodes: usize, replicas: u8) -> Producer {
    start(|options| {
        options.nodes = nodes;
        options.replicas = replicas;
    })
    .await
}

/// Writes documents of vBucket 0 whose keys begin with `prefix`.
fn write(producer: &Producer, prefix: &str, count: usize) -> Seqno {
    let keys = (0..).map(|n| format!("{prefix}-{n}"));
    let keys = keys.filter(|key| producer.vbid_of(key.as_bytes()) == VB).take(count);
    let value = Bytes::from_static(b"1");
    let write = |key: String| {
        producer.upsert(key.as_bytes(), value.clone(), WriteOptions::default()).unwrap().seqno
    };
    keys.map(write).last().unwrap()
}

async fn reader(producer: &Producer, node: usize) -> RawClient {
    let mut client = RawClient::ready(producer, node, &[Feature::XERROR, Feature::JSON]).await;
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    client
}

/// Opens a stream from the beginning and reads everything up to `last`; returns the failover log.
async fn read_up_to(client: &mut RawClient, last: Seqno) -> Vec<(u64, u64)> {
    let answer = client.request_stream(VB, Seqno::ZERO, Seqno::MAX, Vbuuid(0), NONE).await;
    assert_eq!(answer.status(), Status::SUCCESS);
    skip_to(client, last).await;
    log_of(&answer)
}

async fn skip_to(client: &mut RawClient, last: Seqno) {
    loop {
        let packet = client.receive().await;
        let frame = packet.frame();
        if packet.opcode() == Opcode::DCP_MUTATION && frame.extras[..8] == last.0.to_be_bytes() {
            return;
        }
    }
}

fn log_of(answer: &Packet) -> Vec<(u64, u64)> {
    let frame = answer.frame();
    let number = |bytes: &[u8]| u64::from_be_bytes(bytes.try_into().unwrap());
    let entry = |entry: &[u8]| (number(&entry[..8]), number(&entry[8..]));
    frame.value.chunks(16).map(entry).collect()
}

/// Figures of OBSERVE_SEQNO: persisted and current seqno.
async fn observe(client: &mut RawClient, vbuuid: u64) -> (u64, u64) {
    let value = vbuuid.to_be_bytes();
    let ask = Frame::request(Opcode::OBSERVE_SEQNO).with_vbid(VB).with_value(&value);
    let answer = client.succeed(ask).await;
    let number =
        |at: usize| u64::from_be_bytes(answer.frame().value[at..at + 8].try_into().unwrap());
    (number(11), number(19))
}

async fn failover_log(client: &mut RawClient) -> Vec<(u64, u64)> {
    log_of(&client.succeed(Frame::request(Opcode::GET_FAILOVER_LOG).with_vbid(VB)).await)
}

async fn map(client: &mut RawClient) -> serde_json::Value {
    let answer = client.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await;
    serde_json::from_slice(answer.frame().value).unwrap()
}

fn chain(map: &serde_json::Value) -> Vec<i64> {
    let chain = map["vBucketServerMap"]["vBucketMap"][0].as_array().unwrap();
    chain.iter().map(|node| node.as_i64().unwrap()).collect()
}

#[tokio::test]
async fn replica_with_a_lag_has_what_passed_and_can_be_streamed() {
    let producer = cluster(3, 2).await;
    producer.set_replica_lag(VB, 2, Some(3)).unwrap();
    let last = write(&producer, "a", 10);
    let mut first = reader(&producer, 1).await;
    let log = read_up_to(&mut first, last).await;
    let mut second = reader(&producer, 2).await;
    assert_eq!(read_up_to(&mut second, Seqno(7)).await, log);
    second.expect_silence().await;
    let mut active = RawClient::ready(&producer, 0, &[]).await;
    let mut other = RawClient::ready(&producer, 2, &[]).await;
    assert_eq!(observe(&mut active, log[0].0).await.1, 10);
    assert_eq!(observe(&mut other, log[0].0).await.1, 7);
    assert_eq!(chain(&map(&mut other).await), [0, 1, 2]);
    let read = Frame::request(Opcode::GET).with_key(b"x").with_vbid(VB);
    other.fail(read, Status::NOT_MY_VBUCKET).await;
    producer.set_replica_lag(VB, 2, Some(0)).unwrap();
    skip_to(&mut second, Seqno(10)).await;
    let only_active = StreamRequestFlags::ACTIVE_VB_ONLY;
    let mut third = reader(&producer, 2).await;
    let answer = third.request_stream(VB, Seqno::ZERO, Seqno::MAX, Vbuuid(0), only_active).await;
    assert_eq!(answer.status(), Status::NOT_MY_VBUCKET);
}

#[tokio::test]
async fn ss_27_a_replica_tells_the_rest_of_a_snapshot_without_another_marker() {
    let producer = cluster(2, 1).await;
    write(&producer, "a", 2);
    producer.persist();
    producer.hold_persistence(VB, 1, true).unwrap();
    let last = write(&producer, "b", 2);
    let mut client = reader(&producer, 1).await;
    let answer = client.request_stream(VB, Seqno::ZERO, Seqno::MAX, Vbuuid(0), NONE).await;
    assert_eq!(answer.status(), Status::SUCCESS);
    let marker = client.receive().await;
    let marker = SnapshotMarker::decode(&marker.frame()).unwrap();
    assert!(marker.flags.contains(SnapshotFlags::DISK));
    assert_eq!((marker.start_seqno, marker.end_seqno), (Seqno::ZERO, last));
    for seqno in 1..=last.0 {
        let item = client.receive().await;
        assert_eq!(item.opcode(), Opcode::DCP_MUTATION);
        assert_eq!(item.frame().extras[..8], seqno.to_be_bytes());
    }
    write(&producer, "c", 1);
    assert_eq!(client.receive().await.opcode(), Opcode::DCP_SNAPSHOT_MARKER);
}

#[tokio::test]
async fn failover_without_grace_loses_what_was_not_replicated() {
    let producer = cluster(2, 1).await;
    write(&producer, "a", 10);
    producer.set_replica_lag(VB, 1, None).unwrap();
    let last = write(&producer, "b", 5);
    let mut old = reader(&producer, 0).await;
    let log = read_up_to(&mut old, last).await;
    let push = [Feature::DUPLEX, Feature::CLUSTER_MAP_CHANGE_NOTIFICATION];
    let mut pushed = RawClient::ready(&producer, 1, &push).await;
    let (before, refusing) = (producer.connection_string(), map(&mut pushed).await);
    producer.failover(0, false).unwrap();
    old.expect_end().await;
    let packet = pushed.receive().await;
    assert_eq!(packet.opcode(), Opcode::CLUSTER_MAP_CHANGE);
    let new: serde_json::Value = serde_json::from_slice(packet.frame().value).unwrap();
    assert_eq!((new["rev"].as_u64(), refusing["rev"].as_u64()), (Some(2), Some(1)));
    assert_eq!(new["vBucketServerMap"]["serverList"].as_array().unwrap().len(), 1);
    assert_eq!(chain(&new), [0, -1], "positions are among the nodes that are left");
    let first = before.trim_start_matches("couchbase://").split(',').next().unwrap();
    super::refuses(first).await;
    let mut client = reader(&producer, 0).await;
    let vbuuid = Vbuuid(log[0].0);
    let answer = client.request_stream(VB, last, Seqno::MAX, vbuuid, NONE).await;
    assert_eq!(answer.status(), Status::ROLLBACK);
    assert_eq!(rollback_seqno(&answer.frame()).unwrap(), Seqno(10));
    let answer = client.request_stream(VB, Seqno(10), Seqno::MAX, vbuuid, NONE).await;
    let after = log_of(&answer);
    assert_eq!((after.len(), after[0].1, after[1]), (2, 10, log[0]));
    assert_eq!(write(&producer, "c", 1), Seqno(11));
    skip_to(&mut client, Seqno(11)).await;
}

#[tokio::test]
async fn branch_begins_below_what_was_not_persisted() {
    let producer = cluster(2, 1).await;
    assert_eq!(write(&producer, "a", 3), Seqno(3));
    producer.persist();
    producer.hold_persistence(VB, 1, true).unwrap();
    write(&producer, "b", 7);
    let mut replica = RawClient::ready(&producer, 1, &[]).await;
    let vbuuid = failover_log(&mut replica).await[0].0;
    assert_eq!(observe(&mut replica, vbuuid).await, (3, 10));
    producer.failover(0, false).unwrap();
    assert_eq!(failover_log(&mut replica).await[0].1, 3);
    assert_eq!(producer.high_seqnos()[&VB], Seqno(10), "what was received is not lost");
    let mut client = reader(&producer, 0).await;
    let answer = client.request_stream(VB, Seqno(10), Seqno::MAX, Vbuuid(vbuuid), NONE).await;
    assert_eq!(rollback_seqno(&answer.frame()).unwrap(), Seqno(3));
}

#[tokio::test]
async fn ft_14_a_promoted_replica_begins_a_branch_at_its_last_complete_snapshot() {
    let producer = cluster(2, 1).await;
    assert_eq!(write(&producer, "a", 900), Seqno(900));
    producer.persist();
    producer.hold_persistence(VB, 1, true).unwrap();
    write(&producer, "b", 7);
    let mut replica = RawClient::ready(&producer, 1, &[]).await;
    let before = failover_log(&mut replica).await;
    producer.failover(0, false).unwrap();
    let after = failover_log(&mut replica).await;
    assert_eq!((after.len(), after[0].1, after[1]), (2, 900, before[0]));
    assert_eq!(producer.high_seqnos()[&VB], Seqno(907), "it keeps what it has");
}

#[tokio::test]
async fn ft_16_an_unclean_restart_begins_a_branch_where_the_snapshot_ended() {
    let producer = cluster(1, 0).await;
    assert_eq!(write(&producer, "a", 50), Seqno(50));
    producer.persist();
    let before = failover_log(&mut RawClient::ready(&producer, 0, &[]).await).await;
    producer.kill(0).unwrap();
    producer.restart(0, true).await.unwrap();
    let after = failover_log(&mut RawClient::ready(&producer, 0, &[]).await).await;
    assert_eq!((after.len(), after[0].1, after[1]), (2, 50, before[0]));
    assert_ne!(after[0].0, before[0].0);
    assert_eq!(producer.high_seqnos()[&VB], Seqno(50));
}

#[tokio::test]
async fn ft_15_a_graceful_failover_loses_nothing_and_begins_no_branch() {
    let producer = cluster(2, 1).await;
    producer.set_replica_lag(VB, 1, None).unwrap();
    let last = write(&producer, "a", 10);
    let mut old = reader(&producer, 0).await;
    let log = read_up_to(&mut old, last).await;
    producer.failover(0, true).unwrap();
    let end = old.receive().await;
    assert_eq!(StreamEnd::decode(&end.frame()).unwrap().reason, StreamEndReason::STATE_CHANGED);
    let answer = old.request_stream(VB, last, Seqno::MAX, Vbuuid(log[0].0), NONE).await;
    assert_eq!(answer.status(), Status::NOT_MY_VBUCKET);
    let map: serde_json::Value = serde_json::from_slice(answer.frame().value).unwrap();
    assert_eq!(map["rev"], 2);
    let mut client = reader(&producer, 0).await;
    let answer = client.request_stream(VB, last, Seqno::MAX, Vbuuid(log[0].0), NONE).await;
    assert_eq!((answer.status(), log_of(&answer)), (Status::SUCCESS, log));
}

/// Its document is still there, and it leaves once its replica runs.
#[tokio::test]
async fn node_whose_vbuckets_cannot_be_taken_over_stays() {
    let producer = cluster(2, 1).await;
    write(&producer, "a", 1);
    let stays = || producer.num_nodes() == 2 && producer.copies_of(VB).unwrap() == [0, 1];
    producer.kill(1).unwrap();
    let error = producer.failover(0, true).unwrap_err();
    assert!(matches!(error, Error::NoRunningReplica { vbid: VB }), "{error}");
    assert!(stays());
    producer.restart(1, true).await.unwrap();
    producer.set_vbucket_state(VB, VBucketState::Dead).unwrap();
    for error in [producer.failover(0, true), producer.move_vbucket(VB, 1)] {
        let error = error.unwrap_err();
        assert!(matches!(error, Error::TakeoverFailed { vbid: VB, node: 1 }), "{error}");
    }
    assert!(stays());
    producer.set_vbucket_state(VB, VBucketState::Active).unwrap();
    producer.failover(0, true).unwrap();
    assert_eq!(producer.copies_of(VB).unwrap(), [1]);
    assert_eq!(producer.high_seqnos()[&VB], Seqno(1));
}

/// Its copy holds changes that the crash has lost, and nothing is read from a node that is down.
#[tokio::test]
async fn vbucket_does_not_move_away_from_a_node_that_is_down() {
    let producer = cluster(3, 1).await;
    assert_eq!(producer.copies_of(VB).unwrap(), [0, 1]);
    producer.set_replica_lag(VB, 1, None).unwrap();
    producer.hold_persistence(VB, 0, true).unwrap();
    write(&producer, "lost", 1);
    producer.kill(0).unwrap();
    for to in [1, 2] {
        let error = producer.move_vbucket(VB, to).unwrap_err();
        assert!(matches!(error, Error::NodeDown { node: 0 }), "{error}");
    }
    assert_eq!(producer.copies_of(VB).unwrap(), [0, 1]);
    producer.restart(0, false).await.unwrap();
    producer.move_vbucket(VB, 1).unwrap();
    assert_eq!(producer.high_seqnos()[&VB], Seqno::ZERO);
}

#[tokio::test]
async fn crash_loses_what_was_not_persisted_and_gives_its_seqnos_again() {
    let producer = cluster(2, 1).await;
    write(&producer, "a", 5);
    producer.persist();
    producer.hold_persistence(VB, 0, true).unwrap();
    let last = write(&producer, "b", 5);
    let mut client = reader(&producer, 0).await;
    let log = read_up_to(&mut client, last).await;
    producer.kill(0).unwrap();
    client.expect_end().await;
    let unavailable = producer.get(b"a-0").is_none();
    assert!(unavailable || producer.vbid_of(b"a-0") != VB);
    producer.restart(0, true).await.unwrap();
    assert_eq!(producer.high_seqnos()[&VB], Seqno(5), "it was killed: nothing was clean");
    let mut client = reader(&producer, 0).await;
    let vbuuid = Vbuuid(log[0].0);
    let answer = client.request_stream(VB, last, Seqno::MAX, vbuuid, NONE).await;
    assert_eq!(rollback_seqno(&answer.frame()).unwrap(), Seqno(5));
    let after = failover_log(&mut RawClient::ready(&producer, 0, &[]).await).await;
    assert_eq!((after.len(), after[0].1, after[1]), (2, 5, log[0]));
    assert_eq!(write(&producer, "c", 1), Seqno(6));
    let mut replica = RawClient::ready(&producer, 1, &[]).await;
    assert_eq!(failover_log(&mut replica).await, after, "the replica went back with it");
    let mut replica = reader(&producer, 1).await;
    read_up_to(&mut replica, Seqno(6)).await;
}

#[tokio::test]
async fn ft_18_a_clean_restart_keeps_everything() {
    let producer = cluster(1, 0).await;
    let last = write(&producer, "a", 5);
    let mut client = reader(&producer, 0).await;
    let log = read_up_to(&mut client, last).await;
    for _ in 0..3 {
        producer.restart(0, true).await.unwrap();
        client.expect_end().await;
        client = reader(&producer, 0).await;
        assert_eq!(read_up_to(&mut client, last).await, log);
    }
    producer.hold_persistence(VB, 0, true).unwrap();
    write(&producer, "b", 5);
    producer.restart(0, false).await.unwrap();
    assert_eq!(producer.high_seqnos()[&VB], last);
}

#[tokio::test]
async fn rebalance_spreads_vbuckets_over_new_and_returned_nodes() {
    let producer = cluster(1, 1).await;
    let last = write(&producer, "a", 5);
    let mut client = reader(&producer, 0).await;
    let log = read_up_to(&mut client, last).await;
    assert_eq!(producer.copies_of(VB).unwrap(), [0], "there is no node for the replica");
    assert_eq!(producer.add_node().await.unwrap(), 1);
    assert_eq!(producer.num_nodes(), 2);
    producer.rebalance().unwrap();
    assert_eq!(producer.copies_of(VB).unwrap(), [0, 1]);
    assert_eq!(producer.copies_of(Vbid(3)).unwrap(), [1, 0]);
    client.expect_silence().await;
    let mut replica = reader(&producer, 1).await;
    assert_eq!(read_up_to(&mut replica, last).await, log);
    producer.failover(1, false).unwrap();
    producer.restart(1, true).await.unwrap();
    assert_eq!(producer.num_nodes(), 1);
    producer.rebalance().unwrap();
    assert_eq!(producer.copies_of(Vbid(3)).unwrap(), [1, 0]);
    producer.move_vbucket(VB, 1).unwrap();
    assert_eq!(producer.copies_of(VB).unwrap(), [1, 0]);
    let end = client.receive().await;
    assert_eq!(StreamEnd::decode(&end.frame()).unwrap().reason, StreamEndReason::STATE_CHANGED);
    let mut client = reader(&producer, 1).await;
    assert_eq!(read_up_to(&mut client, last).await, log);
    assert_eq!(write(&producer, "b", 1), Seqno(6));
    producer.kill(0).unwrap();
    assert!(producer.rebalance().is_err(), "a node of the cluster is down");
}

#[tokio::test]
async fn rebalance_gives_a_map_for_each_vbucket_that_moves() {
    let producer = start(|options| (options.vbuckets, options.replicas) = (16, 1)).await;
    let mut client = RawClient::ready(
        &producer,
        0,
        &[Feature::DUPLEX, Feature::CLUSTER_MAP_CHANGE_NOTIFICATION],
    )
    .await;
    producer.add_node().await.unwrap();
    let (epoch, before) = producer.map_version();
    producer.rebalance().unwrap();
    // All move: half of them get another node, all of them a replica.
    assert_eq!(producer.map_version(), (epoch, before + 17));
    let mut last = 0;
    while last < producer.map_version().1 {
        let map: serde_json::Value =
            serde_json::from_slice(client.receive().await.frame().value).unwrap();
        assert!(map["rev"].as_i64().unwrap() > last, "versions rise");
        last = map["rev"].as_i64().unwrap();
    }
    producer.rebalance().unwrap();
    assert_eq!(producer.map_version(), (epoch, last + 1), "nothing is left to be moved");
}

#[tokio::test]
async fn failover_that_is_unsafe_begins_an_epoch() {
    let producer = cluster(3, 1).await;
    let last = write(&producer, "a", 5);
    let (epoch, _) = producer.map_version();
    producer.move_vbucket(VB, 1).unwrap();
    let told = [Feature::DUPLEX, Feature::CLUSTER_MAP_CHANGE_NOTIFICATION];
    let mut told = RawClient::ready(&producer, 2, &told).await;
    producer.failover_unsafely(&[0, 1]).unwrap();
    let pushed = told.receive().await;
    assert_eq!(pushed.opcode(), Opcode::CLUSTER_MAP_CHANGE);
    let version = [(epoch + 1).to_be_bytes(), 1i64.to_be_bytes()].concat();
    assert_eq!(pushed.frame().extras, version, "its rev is lower, and it is newer");
    assert_eq!(producer.map_version(), (epoch + 1, 1));
    assert_eq!(producer.num_nodes(), 1);
    assert!(producer.copies_of(VB).unwrap().is_empty(), "both copies are gone");
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    assert_eq!(map(&mut client).await["revEpoch"], epoch + 1);
    let refused = producer.failover_unsafely(&[2]);
    assert!(matches!(refused, Err(Error::LastNode { node: 2 })));
    producer.rebalance().unwrap();
    assert!(write(&producer, "b", 1) < last, "the vBucket begins anew");
}

#[tokio::test]
async fn map_of_1024_vbuckets_with_three_replicas_is_sent() {
    let producer = start(|options| {
        (options.nodes, options.vbuckets, options.replicas) = (4, 1024, 3);
    })
    .await;
    write(&producer, "a", 1);
    let mut client = RawClient::ready(&producer, 3, &[]).await;
    let map = map(&mut client).await;
    let chains = map["vBucketServerMap"]["vBucketMap"].as_array().unwrap();
    assert_eq!(chains.len(), 1024);
    for chain in chains {
        let mut nodes: Vec<_> =
            chain.as_array().unwrap().iter().map(|node| node.as_i64().unwrap()).collect();
        nodes.sort_unstable();
        assert_eq!(nodes, [0, 1, 2, 3]);
    }
    let mut replica = reader(&producer, 3).await;
    read_up_to(&mut replica, Seqno(1)).await;
}

#[tokio::test]
async fn bucket_that_was_dropped_ends_connections_and_comes_back_as_another() {
    let producer = cluster(2, 1).await;
    let last = write(&producer, "a", 5);
    let mut client = reader(&producer, 0).await;
    read_up_to(&mut client, last).await;
    let mut unbound = RawClient::connect(&producer, 0).await;
    unbound.hello(&[Feature::XERROR]).await;
    unbound.log_in("Administrator", "password").await;
    let uuid = producer.bucket_uuid();
    producer.drop_bucket().unwrap();
    client.expect_end().await;
    let select = Frame::request(Opcode::SELECT_BUCKET).with_key(b"default");
    unbound.fail(select, Status::KEY_ENOENT).await;
    let refused = producer.upsert(b"a", Bytes::new(), WriteOptions::default());
    assert!(refused.is_err() && producer.drop_bucket().is_err());
    producer.create_bucket().unwrap();
    assert_ne!(producer.bucket_uuid(), uuid);
    unbound.succeed(select).await;
    assert_eq!(producer.high_seqnos()[&VB], Seqno::ZERO);
    assert_eq!(write(&producer, "b", 2), Seqno(2));
    assert_eq!(map(&mut unbound).await["uuid"], producer.bucket_uuid());
    let mut replica = reader(&producer, 1).await;
    read_up_to(&mut replica, Seqno(2)).await;
}

/// How many packets of `opcode` there are.
fn count(bytes: &[u8], opcode: Opcode) -> usize {
    let (mut rest, mut found) = (bytes, 0);
    // The connection may be closed inside a packet.
    while let Ok(Some((frame, len))) = Frame::parse(rest, dcp_wire::MAX_BODY_LEN) {
        found += usize::from(frame.header.opcode == opcode);
        rest = &rest[len..];
    }
    found
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_under_load_get_no_end_from_a_dropped_bucket() {
    let producer = start(|options| options.vbuckets = 64).await;
    for round in 0..10 {
        let mut clients = Vec::new();
        for number in 0..4 {
            let mut client = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
            client.open_dcp(format!("reader {number}").as_bytes(), OpenFlags::empty()).await;
            for vbid in (0..64).map(Vbid) {
                let answer =
                    client.request_stream(vbid, Seqno::ZERO, Seqno::MAX, Vbuuid(0), NONE).await;
                assert_eq!(answer.status(), Status::SUCCESS);
            }
            clients.push(tokio::spawn(client.rest()));
        }
        for n in 0..2000 {
            let key = format!("{round} {n}");
            producer.upsert(key.as_bytes(), Bytes::new(), WriteOptions::default()).unwrap();
        }
        producer.drop_bucket().unwrap();
        for client in clients {
            let rest = client.await.unwrap();
            assert_eq!(count(&rest, Opcode::DCP_STREAM_END), 0, "round {round}");
        }
        producer.create_bucket().unwrap();
    }
}

#[tokio::test]
async fn ephemeral_bucket_has_no_disk() {
    let producer = start(|options| {
        options.ephemeral = true;
        options.alternate_host = Some("localhost".to_owned());
    })
    .await;
    let last = write(&producer, "a", 5);
    producer.persist();
    let mut client = reader(&producer, 0).await;
    let answer = client.request_stream(VB, Seqno::ZERO, Seqno::MAX, Vbuuid(0), NONE).await;
    let marker = client.receive().await;
    assert_eq!(marker.frame().extras[16..20], 6u32.to_be_bytes(), "from disk, as far as it goes");
    skip_to(&mut client, last).await;
    let mut plain = RawClient::ready(&producer, 0, &[]).await;
    let vbuuid = log_of(&answer)[0].0;
    assert_eq!(observe(&mut plain, vbuuid).await, (0, 5));
    let map = map(&mut plain).await;
    assert_eq!(
        (&map["bucketType"], &map["storageBackend"]),
        (&"ephemeral".into(), &"undefined".into())
    );
    let external = &map["nodesExt"][0]["alternateAddresses"]["external"];
    assert_eq!(external["hostname"], "localhost");
    assert_eq!(external["ports"], map["nodesExt"][0]["services"]);
    producer.restart(0, true).await.unwrap();
    assert_eq!(producer.high_seqnos()[&VB], Seqno::ZERO);
    let log = failover_log(&mut RawClient::ready(&producer, 0, &[]).await).await;
    assert!(log.len() == 1 && log[0].0 != vbuuid);
}

#[tokio::test]
async fn replica_made_active_begins_a_branch_at_its_persisted_seqno() {
    let producer = cluster(1, 0).await;
    let persisted = write(&producer, "before", 3);
    producer.persist();
    producer.hold_persistence(VB, 0, true).unwrap();
    write(&producer, "after", 2);
    let before = producer.failover_logs()[&VB].clone();
    // A dead one goes on as it was.
    for state in [VBucketState::Dead, VBucketState::Active] {
        producer.set_vbucket_state(VB, state).unwrap();
    }
    assert_eq!(producer.failover_logs()[&VB], before);
    for state in [VBucketState::Replica, VBucketState::Active] {
        producer.set_vbucket_state(VB, state).unwrap();
    }
    let after = &producer.failover_logs()[&VB];
    assert_eq!((after[0].seqno, &after[1..]), (persisted, &before[..]));
    assert_ne!(after[0].vbuuid, before[0].vbuuid);
    assert_eq!(write(&producer, "on the branch", 1).0, persisted.0 + 3, "nothing is lost");
}
