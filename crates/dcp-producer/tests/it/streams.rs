use bytes::Bytes;
use dcp_producer::{Producer, WriteOptions};
use dcp_wire::message::{
    Mutation, OpenFlags, SnapshotFlags, SnapshotMarker, StreamEnd, StreamEndReason,
    StreamRequestFlags, rollback_seqno,
};
use dcp_wire::{Feature, Frame, Opcode, Seqno, Status, Vbid, Vbuuid};

use super::raw_client::{Packet, RawClient};
use super::{start, start_one};

const VB: Vbid = Vbid(0);
const NEVER: std::time::Duration = std::time::Duration::from_secs(3600);

/// Keys of vBucket 0.
fn keys(producer: &Producer, count: usize) -> Vec<String> {
    (0..)
        .map(|n| format!("key-{n}"))
        .filter(|key| producer.vbid_of(key.as_bytes()) == VB)
        .take(count)
        .collect()
}

fn write(producer: &Producer, key: &str) -> Seqno {
    let value = Bytes::from_static(b"{\"a\":1}");
    producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap().seqno
}

fn write_all(producer: &Producer, count: usize) -> Vec<String> {
    let keys = keys(producer, count);
    for key in &keys {
        write(producer, key);
    }
    keys
}

async fn reader(producer: &Producer) -> RawClient {
    let mut client = RawClient::ready(producer, 0, &[Feature::XERROR, Feature::JSON]).await;
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    client
}

async fn open_from_start(client: &mut RawClient) -> Vbuuid {
    let answer = client
        .request_stream(VB, Seqno::ZERO, Seqno::MAX, Vbuuid(0), StreamRequestFlags::empty())
        .await;
    assert_eq!(answer.status(), Status::SUCCESS);
    Vbuuid(u64::from_be_bytes(answer.frame().value[..8].try_into().unwrap()))
}

/// A marker's range and flags.
fn marker(packet: &Packet) -> (u64, u64, SnapshotFlags) {
    let marker = SnapshotMarker::decode(&packet.frame()).unwrap();
    (marker.start_seqno.0, marker.end_seqno.0, marker.flags)
}

/// Reads mutations; returns their seqnos and keys.
async fn mutations(client: &mut RawClient, count: usize) -> Vec<(u64, String)> {
    let mut seen = Vec::new();
    for _ in 0..count {
        let packet = client.receive().await;
        let frame = packet.frame();
        let mutation = Mutation::decode(&frame).unwrap();
        seen.push((mutation.seqno.0, String::from_utf8(mutation.key.to_vec()).unwrap()));
    }
    seen
}

#[tokio::test]
async fn stream_gets_what_is_there_and_what_comes() {
    let producer = start_one().await;
    let keys = write_all(&producer, 3);
    let mut client = reader(&producer).await;
    open_from_start(&mut client).await;
    let in_checkpoint = SnapshotFlags::MEMORY | SnapshotFlags::CHECKPOINT;
    assert_eq!(marker(&client.receive().await), (0, 3, in_checkpoint));
    let seen = mutations(&mut client, 3).await;
    let expected: Vec<_> = (1..).zip(keys.clone()).collect();
    assert_eq!(seen, expected);
    client.expect_silence().await;
    assert_eq!(write(&producer, &keys[0]), Seqno(4));
    assert_eq!(marker(&client.receive().await), (4, 4, SnapshotFlags::MEMORY));
    assert_eq!(mutations(&mut client, 1).await, [(4, keys[0].clone())]);
}

#[tokio::test]
async fn changes_that_are_persisted_come_from_disk_deduplicated() {
    let producer =
        start(|options| options.persist_delay = std::time::Duration::from_secs(3600)).await;
    let keys = write_all(&producer, 3);
    producer.persist();
    write(&producer, &keys[1]);
    producer.persist();
    write(&producer, &keys[2]);
    let mut client = reader(&producer).await;
    open_from_start(&mut client).await;
    let on_disk = SnapshotFlags::DISK | SnapshotFlags::CHECKPOINT;
    assert_eq!(marker(&client.receive().await), (0, 4, on_disk));
    let seen = mutations(&mut client, 3).await;
    assert_eq!(seen, [(1, keys[0].clone()), (3, keys[2].clone()), (4, keys[1].clone())]);
    let (start, end, flags) = marker(&client.receive().await);
    assert_eq!((start, end), (5, 5));
    assert!(flags.contains(SnapshotFlags::MEMORY));
    assert_eq!(mutations(&mut client, 1).await, [(5, keys[2].clone())]);
}

#[tokio::test]
async fn rollback_ends_the_stream_and_refuses_the_old_position() {
    let producer = start_one().await;
    let keys = write_all(&producer, 5);
    let mut client = reader(&producer).await;
    let vbuuid = open_from_start(&mut client).await;
    client.receive().await;
    mutations(&mut client, 5).await;
    producer.roll_back(VB, Seqno(3)).unwrap();
    let end = client.receive().await;
    assert_eq!(StreamEnd::decode(&end.frame()).unwrap().reason, StreamEndReason::STATE_CHANGED);
    assert_eq!(write(&producer, &keys[4]), Seqno(4));
    let none = StreamRequestFlags::empty();
    let answer = client.request_stream(VB, Seqno(5), Seqno::MAX, vbuuid, none).await;
    assert_eq!(answer.status(), Status::ROLLBACK);
    assert_eq!(rollback_seqno(&answer.frame()).unwrap(), Seqno(3));
    let answer = client.request_stream(VB, Seqno(3), Seqno::MAX, vbuuid, none).await;
    assert_eq!(answer.status(), Status::SUCCESS);
    assert_eq!(answer.frame().value.len(), 32, "two branches");
    client.receive().await;
    assert_eq!(mutations(&mut client, 1).await, [(4, keys[4].clone())]);
}

#[tokio::test]
async fn vbucket_that_moved_ends_its_streams_and_is_streamed_by_its_new_node() {
    let producer = start(|options| options.nodes = 2).await;
    let keys = write_all(&producer, 2);
    let mut client = reader(&producer).await;
    open_from_start(&mut client).await;
    client.receive().await;
    mutations(&mut client, 2).await;
    producer.move_vbucket(VB, 1).unwrap();
    let end = client.receive().await;
    assert_eq!(StreamEnd::decode(&end.frame()).unwrap().reason, StreamEndReason::STATE_CHANGED);
    let none = StreamRequestFlags::empty();
    let answer = client.request_stream(VB, Seqno::ZERO, Seqno::MAX, Vbuuid(0), none).await;
    assert_eq!(answer.status(), Status::NOT_MY_VBUCKET);
    let mut other = RawClient::ready(&producer, 1, &[Feature::XERROR]).await;
    other.open_dcp(b"reader", OpenFlags::empty()).await;
    open_from_start(&mut other).await;
    other.receive().await;
    let seen = mutations(&mut other, 2).await;
    assert_eq!(seen, [(1, keys[0].clone()), (2, keys[1].clone())]);
}

#[tokio::test]
async fn sr_66_and_se_41_a_connection_of_the_same_name_ends_the_older_one() {
    let producer = start_one().await;
    let mut first = reader(&producer).await;
    let mut second = reader(&producer).await;
    first.expect_end().await;
    open_from_start(&mut second).await;
}

#[tokio::test]
async fn client_that_does_not_acknowledge_gets_no_more_than_its_window() {
    let producer = start_one().await;
    write_all(&producer, 100);
    let mut client = reader(&producer).await;
    client.control(b"connection_buffer_size", b"1000").await;
    open_from_start(&mut client).await;
    let mut received = 0;
    while received < 1000 {
        received += client.receive().await.frame().packet_len();
    }
    client.expect_silence().await;
    client.acknowledge(u32::try_from(received).unwrap()).await;
    let opcode = client.receive().await.opcode();
    assert_eq!(opcode, Opcode::DCP_MUTATION);
}

#[tokio::test]
async fn client_that_stops_reading_holds_nobody_up_and_misses_nothing() {
    let producer = start_one().await;
    let keys = keys(&producer, 64);
    let value = Bytes::from(vec![b'x'; 1 << 20]);
    for key in &keys {
        producer.upsert(key.as_bytes(), value.clone(), WriteOptions::default()).unwrap();
    }
    let mut client = reader(&producer).await;
    open_from_start(&mut client).await;
    // The socket takes a few MiB, then the stream waits.
    tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    let mut other = RawClient::ready(&producer, 0, &[]).await;
    other.succeed(Frame::request(Opcode::NOOP)).await;
    let mut seen = Vec::new();
    while seen.len() < 64 {
        let packet = client.receive().await;
        // Several checkpoints, each with a marker.
        if packet.opcode() == Opcode::DCP_MUTATION {
            seen.push(String::from_utf8(packet.frame().key.to_vec()).unwrap());
        }
    }
    assert_eq!(seen, keys);
}

#[tokio::test]
async fn streams_of_many_vbuckets_each_get_their_own_changes() {
    let producer = start(|options| options.vbuckets = 64).await;
    let mut client = reader(&producer).await;
    for vbid in (0..64).map(Vbid) {
        let none = StreamRequestFlags::empty();
        let answer = client.request_stream(vbid, Seqno::ZERO, Seqno::MAX, Vbuuid(0), none).await;
        assert_eq!(answer.status(), Status::SUCCESS);
    }
    client.expect_silence().await;
    let mut expected: Vec<(u32, Vec<u8>)> = Vec::new();
    for n in 0..500 {
        let key = format!("key-{n}");
        let token = producer.upsert(key.as_bytes(), Bytes::new(), WriteOptions::default()).unwrap();
        expected.push((u32::from(token.vbid.0) + 1, key.into_bytes()));
    }
    let mut seen = Vec::new();
    while seen.len() < expected.len() {
        let packet = client.receive().await;
        if packet.opcode() == Opcode::DCP_MUTATION {
            seen.push((packet.opaque().0, packet.frame().key.to_vec()));
        }
    }
    seen.sort();
    expected.sort();
    assert_eq!(seen, expected);
}

#[tokio::test]
async fn shutdown_closes_streams() {
    let producer = start_one().await;
    let mut client = reader(&producer).await;
    open_from_start(&mut client).await;
    producer.shutdown().await;
    client.expect_end().await;
}

#[tokio::test]
async fn failover_log_is_read_on_any_connection() {
    let producer = start_one().await;
    let mut client = RawClient::ready(&producer, 0, &[]).await;
    let log = client.succeed(Frame::request(Opcode::GET_FAILOVER_LOG).with_vbid(VB)).await;
    assert_eq!(log.frame().value.len(), 16);
    write_all(&producer, 1);
    producer.roll_back(VB, Seqno(1)).unwrap();
    let log = client.succeed(Frame::request(Opcode::GET_FAILOVER_LOG).with_vbid(VB)).await;
    let newest = &log.frame().value[..16];
    assert_eq!(newest[8..], 1u64.to_be_bytes());
}

#[tokio::test]
async fn vbucket_that_moved_away_and_back_unseen_ends_its_stream() {
    for replicas in [0, 1] {
        let options = |options: &mut dcp_producer::ProducerOptions| {
            (options.nodes, options.replicas) = (2, replicas);
        };
        let producer = start(options).await;
        write_all(&producer, 1);
        let mut client = reader(&producer).await;
        let vbuuid = open_from_start(&mut client).await;
        client.receive().await;
        mutations(&mut client, 1).await;
        // The connection has no chance to look between the two: this task does not wait.
        producer.move_vbucket(VB, 1).unwrap();
        producer.move_vbucket(VB, 0).unwrap();
        let end = client.receive().await;
        let end = StreamEnd::decode(&end.frame()).unwrap();
        assert_eq!(end.reason, StreamEndReason::STATE_CHANGED, "{replicas} replicas");
        let none = StreamRequestFlags::empty();
        let again = client.request_stream(VB, Seqno(1), Seqno::MAX, vbuuid, none).await;
        assert_eq!(again.status(), Status::SUCCESS, "the history is the same");
    }
}

#[tokio::test]
async fn snapshot_in_the_order_of_the_keys_is_one_whole_snapshot() {
    let producer = start_one().await;
    let mut config = producer.dcp_config();
    config.oso_backfill = dcp_producer::OsoBackfill::Enabled;
    producer.set_dcp_config(config);
    let mut keys = write_all(&producer, 5);
    producer.persist();
    let mut client = reader(&producer).await;
    client.control(b"enable_out_of_order_snapshots", b"true").await;
    open_from_start(&mut client).await;
    let opcodes = |packet: &Packet| (packet.opcode(), packet.frame().extras.to_vec());
    let bound = |flags| (Opcode::DCP_OSO_SNAPSHOT, vec![0, 0, 0, flags]);
    assert_eq!(opcodes(&client.receive().await), bound(1));
    keys.sort();
    let seen: Vec<_> = mutations(&mut client, 5).await.into_iter().map(|(_, key)| key).collect();
    assert_eq!(seen, keys);
    assert_eq!(opcodes(&client.receive().await), bound(2));
    write(&producer, &keys[0]);
    let in_checkpoint = SnapshotFlags::MEMORY | SnapshotFlags::CHECKPOINT;
    assert_eq!(marker(&client.receive().await), (5, 6, in_checkpoint));
}

fn describe(packet: &Packet) -> String {
    let frame = packet.frame();
    let seqno = |at: usize| u64::from_be_bytes(frame.extras[at..at + 8].try_into().unwrap());
    match packet.opcode() {
        Opcode::DCP_SNAPSHOT_MARKER => {
            let (start, end, flags) = marker(packet);
            format!("MARK [{start}-{end}] {:#x}", flags.bits())
        }
        Opcode::DCP_MUTATION => format!("MUT {}", seqno(0)),
        Opcode::DCP_DELETION => format!("DEL {}", seqno(0)),
        Opcode::DCP_PREPARE => format!("PREPARE {}", seqno(0)),
        Opcode::DCP_COMMIT => format!("COMMIT {} of {}", seqno(8), seqno(0)),
        Opcode::DCP_ABORT => format!("ABORT {} of {}", seqno(8), seqno(0)),
        Opcode::DCP_SET_VBUCKET_STATE => format!("STATE {}", frame.extras[0]),
        Opcode::DCP_STREAM_END => format!("END {}", frame.extras[3]),
        other => format!("{other}"),
    }
}

async fn expect_messages(client: &mut RawClient, wanted: &[&str]) {
    for wanted in wanted {
        assert_eq!(describe(&client.receive().await), *wanted);
    }
}

#[tokio::test]
async fn durable_write_is_a_prepare_for_some_streams_and_a_mutation_for_others() {
    use dcp_producer::{DocumentError, DurabilityLevel};
    // Nothing leaves memory before it is told to.
    let producer = start(|options| options.persist_delay = NEVER).await;
    let keys = keys(&producer, 2);
    let (one, other) = (keys[0].as_bytes(), keys[1].as_bytes());
    let default = dcp_wire::CollectionId::DEFAULT;
    let prepare = |key: &[u8], value: Option<&'static [u8]>| {
        let value = value.map(Bytes::from_static);
        producer.prepare(key, value, WriteOptions::default(), DurabilityLevel::MAJORITY)
    };
    prepare(one, Some(b"{}")).unwrap();
    assert!(producer.get(one).is_none(), "nobody sees it yet");
    let again = producer.upsert(one, Bytes::new(), WriteOptions::default());
    assert_eq!(again, Err(DocumentError::SyncWriteInProgress));
    assert_eq!(producer.commit(other, default), Err(DocumentError::NotPrepared));
    producer.commit(one, default).unwrap();
    assert_eq!(&producer.get(one).unwrap().value[..], b"{}");
    prepare(one, None).unwrap();
    producer.commit(one, default).unwrap();
    assert!(producer.get(one).is_none());
    prepare(other, Some(b"{}")).unwrap();
    producer.abort(other, default).unwrap();
    assert!(producer.get(other).is_none());
    let mut plain = reader(&producer).await;
    open_from_start(&mut plain).await;
    expect_messages(&mut plain, &["MARK [0-2] 0x5", "MUT 2", "MARK [3-4] 0x5", "DEL 4"]).await;
    let mut replica = RawClient::ready(&producer, 0, &[Feature::XERROR]).await;
    replica.open_dcp(b"replica", OpenFlags::empty()).await;
    replica.control(b"enable_sync_writes", b"true").await;
    open_from_start(&mut replica).await;
    let all = ["MARK [0-2] 0x5", "PREPARE 1", "COMMIT 2 of 1", "MARK [3-5] 0x5", "PREPARE 3"];
    expect_messages(&mut replica, &all).await;
    let rest = ["COMMIT 4 of 3", "PREPARE 5", "MARK [6-6] 0x5", "ABORT 6 of 5"];
    expect_messages(&mut replica, &rest).await;
    producer.persist();
    let mut plain = reader(&producer).await;
    open_from_start(&mut plain).await;
    expect_messages(&mut plain, &["MARK [0-4] 0x6", "DEL 4"]).await;
}

#[tokio::test]
async fn vbucket_that_is_taken_over_is_dead_until_it_is_made_active_again() {
    use dcp_producer::VBucketState;
    let producer = start_one().await;
    let keys = write_all(&producer, 1);
    producer.persist();
    let mut client = reader(&producer).await;
    let flags = StreamRequestFlags::TAKE_OVER;
    let answer = client.request_stream(VB, Seqno::ZERO, Seqno::MAX, Vbuuid(0), flags).await;
    assert_eq!(answer.status(), Status::SUCCESS);
    expect_messages(&mut client, &["MARK [0-1] 0x6", "MUT 1", "STATE 3"]).await;
    let acknowledge = Frame::response(Opcode::DCP_SET_VBUCKET_STATE, Status::SUCCESS);
    let mut packet = Vec::new();
    acknowledge.with_opaque(dcp_wire::Opaque(u32::from(VB.0) + 1)).encode(&mut packet).unwrap();
    client.send(&packet).await;
    expect_messages(&mut client, &["STATE 1"]).await;
    let write = || producer.upsert(keys[0].as_bytes(), Bytes::new(), WriteOptions::default());
    assert!(write().is_err(), "it is dead here");
    client.send(&packet).await;
    expect_messages(&mut client, &["END 0"]).await;
    producer.set_vbucket_state(VB, VBucketState::Active).unwrap();
    assert!(write().is_ok());
}

#[tokio::test]
async fn stream_has_every_version_where_history_is_kept() {
    let options = |options: &mut dcp_producer::ProducerOptions| {
        (options.keeps_history, options.persist_delay) = (true, NEVER);
    };
    let producer = start(options).await;
    let keys = write_all(&producer, 1);
    write(&producer, &keys[0]);
    write(&producer, &keys[0]);
    for from_disk in [false, true] {
        if from_disk {
            producer.persist();
        }
        let mut client = reader(&producer).await;
        client.control(b"change_streams", b"true").await;
        open_from_start(&mut client).await;
        if from_disk {
            expect_messages(&mut client, &["MARK [0-3] 0x36", "MUT 1", "MUT 2", "MUT 3"]).await;
        } else {
            let each = ["MARK [0-1] 0x15", "MUT 1", "MARK [2-2] 0x15", "MUT 2", "MARK [3-3] 0x15"];
            expect_messages(&mut client, &each).await;
        }
    }
}
