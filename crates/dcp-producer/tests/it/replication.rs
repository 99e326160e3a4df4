//! A node whose vBuckets are fed over sockets, as the proxy of a cluster manager does it: the
//! consumer's end on one side, the producer on the other, and bytes passed on between them.

use std::time::Duration;

use bytes::Bytes;
use dcp_producer::{Producer, VBucketState, WriteOptions};
use dcp_producer_proto::{ConnectionConfig, ServerVersion};
use dcp_test::traces::{Event, EventKind, Scenario};
use dcp_wire::message::{Mutation, Open, OpenFlags, SnapshotMarker, StreamRequestFlags};
use dcp_wire::xattr::{self, Xattr};
use dcp_wire::{
    Datatype, Feature, Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid,
};
use tokio::task::JoinHandle;

use super::raw_client::RawClient;
use super::start;

const VB: Vbid = Vbid(0);
/// Longest wait for what must come.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
const FEATURES: &[Feature] = &[
    Feature::XATTR,
    Feature::XERROR,
    Feature::SNAPPY,
    Feature::JSON,
    Feature::COLLECTIONS,
    Feature::SYNC_REPLICATION,
];
const WHOLE: OpenFlags = OpenFlags::INCLUDE_XATTRS
    .union(OpenFlags::INCLUDE_DELETE_TIMES)
    .union(OpenFlags::INCLUDE_DELETED_USER_XATTRS);

/// A cluster of one node and one vBucket.
async fn one_vbucket() -> Producer {
    start(|options| options.vbuckets = 1).await
}

fn write(producer: &Producer, key: &str) -> Seqno {
    let value = Bytes::from_static(b"{}");
    producer.upsert(key.as_bytes(), value, WriteOptions::default()).unwrap().seqno
}

/// Has `to` fed by `from` until the task is ended.
async fn feed(from: &Producer, to: &Producer, flags: StreamRequestFlags) -> JoinHandle<()> {
    let mut consumer = RawClient::ready(to, 0, FEATURES).await;
    let value = br#"{"consumer_name":"n_1"}"#;
    let open =
        Open { flags: OpenFlags::empty(), name: b"replication", value, datatype: Datatype::JSON };
    let mut packet = Vec::new();
    open.encode(Opaque(1), &mut packet).unwrap();
    consumer.send(&packet).await;
    assert_eq!(consumer.receive().await.status(), Status::SUCCESS);
    let mut producer = RawClient::ready(from, 0, FEATURES).await;
    producer.open_dcp(b"replication", WHOLE).await;
    let extras = flags.bits().to_be_bytes();
    let mut packet = Vec::new();
    let add = Frame::request(Opcode::DCP_ADD_STREAM).with_vbid(VB).with_extras(&extras);
    add.encode(&mut packet).unwrap();
    consumer.send(&packet).await;
    let (mut consumer, mut producer) = (consumer.into_socket(), producer.into_socket());
    tokio::spawn(async move {
        drop(tokio::io::copy_bidirectional(&mut consumer, &mut producer).await);
    })
}

/// Where the vBucket's copy stands: its high seqno and its failover log.
async fn position(client: &mut RawClient) -> (Vec<u8>, Vec<u8>) {
    let seqnos = client.succeed(Frame::request(Opcode::GET_ALL_VB_SEQNOS)).await;
    let log = client.succeed(Frame::request(Opcode::GET_FAILOVER_LOG).with_vbid(VB)).await;
    (seqnos.frame().value.to_vec(), log.frame().value.to_vec())
}

/// Waits until the copies of both stand at the same place.
async fn until_equal(one: &Producer, other: &Producer) {
    let mut clients = (RawClient::ready(one, 0, &[]).await, RawClient::ready(other, 0, &[]).await);
    let wait = async {
        while position(&mut clients.0).await != position(&mut clients.1).await {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(ANSWER_TIMEOUT, wait).await.expect("the copies become equal");
}

/// Every message of the vBucket's history but for its snapshots, without their opaques. It is read
/// from disk: how many older versions memory adds depends on when the flusher ran.
async fn everything(producer: &Producer) -> Vec<Vec<u8>> {
    producer.persist();
    let mut client = RawClient::ready(producer, 0, FEATURES).await;
    client.open_dcp(b"reader", WHOLE).await;
    client.control(b"enable_noop", b"true").await;
    client.control(b"enable_expiry_opcode", b"true").await;
    client.control(b"flatbuffers_system_events", b"true").await;
    let (seqnos, _) = position(&mut RawClient::ready(producer, 0, &[]).await).await;
    let end = Seqno(u64::from_be_bytes(seqnos[2..10].try_into().unwrap()));
    let flags = StreamRequestFlags::empty();
    let answer = client.request_stream(VB, Seqno::ZERO, end, Vbuuid(0), flags).await;
    assert_eq!(answer.status(), Status::SUCCESS);
    let mut all = Vec::new();
    loop {
        let packet = client.receive().await;
        match packet.opcode() {
            Opcode::DCP_STREAM_END => return all,
            Opcode::DCP_SNAPSHOT_MARKER => {}
            _ => all.push(packet.bytes().to_vec()),
        }
    }
}

#[tokio::test]
async fn replica_is_fed_over_sockets_and_resumes_where_it_stopped() {
    let (active, replica) = (one_vbucket().await, one_vbucket().await);
    replica.set_vbucket_state(VB, VBucketState::Replica).unwrap();
    let mut value = Vec::new();
    let xattrs = [(&b"_sys"[..], &b"1"[..]), (b"user", b"2")];
    let xattrs = xattrs.map(|(name, value)| Xattr { name, value });
    xattr::encode(xattrs.into_iter(), &mut value).unwrap();
    value.extend_from_slice(b"{}");
    let mut options = WriteOptions::default();
    (options.flags, options.expiry) = (7, 4_000_000_000);
    options.datatype = Some(Datatype::XATTR.with(Datatype::JSON));
    for key in ["with xattrs", "gone"] {
        active.upsert(key.as_bytes(), value.clone().into(), options).unwrap();
    }
    active.remove(b"gone", WriteOptions::default()).unwrap();
    active.create_scope("inventory").unwrap();
    active.create_collection("inventory", "hotels", None).unwrap();
    (0..100).for_each(|n| _ = write(&active, &format!("key-{n}")));
    active.persist();
    let link = feed(&active, &replica, StreamRequestFlags::empty()).await;
    until_equal(&active, &replica).await;
    (50..150).for_each(|n| _ = write(&active, &format!("key-{n}")));
    active.remove(b"key-7", WriteOptions::default()).unwrap();
    until_equal(&active, &replica).await;
    assert_eq!(everything(&replica).await, everything(&active).await);

    link.abort();
    (0..50).for_each(|n| _ = write(&active, &format!("key-{n}")));
    let _link = feed(&active, &replica, StreamRequestFlags::empty()).await;
    until_equal(&active, &replica).await;
    assert_eq!(everything(&replica).await, everything(&active).await);
}

#[tokio::test]
async fn replica_rolls_back_with_the_active_copy() {
    let (active, replica) = (one_vbucket().await, one_vbucket().await);
    replica.set_vbucket_state(VB, VBucketState::Replica).unwrap();
    (0..10).for_each(|n| _ = write(&active, &format!("key-{n}")));
    let link = feed(&active, &replica, StreamRequestFlags::empty()).await;
    until_equal(&active, &replica).await;
    link.abort();
    active.roll_back(VB, Seqno(6)).unwrap();
    write(&active, "another");
    let _link = feed(&active, &replica, StreamRequestFlags::empty()).await;
    until_equal(&active, &replica).await;
    assert_eq!(everything(&replica).await, everything(&active).await);
    assert_eq!(everything(&replica).await.len(), 7);
}

#[tokio::test]
async fn vbucket_is_taken_over_with_its_history() {
    let (from, to) = (one_vbucket().await, one_vbucket().await);
    to.set_vbucket_state(VB, VBucketState::Replica).unwrap();
    (0..100).for_each(|n| _ = write(&from, &format!("key-{n}")));
    let log = from.failover_logs();
    let _link = feed(&from, &to, StreamRequestFlags::TAKE_OVER).await;
    let wait = async {
        while to.upsert(b"taken", Bytes::from_static(b"{}"), WriteOptions::default()).is_err() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(ANSWER_TIMEOUT, wait).await.expect("the node takes the vBucket over");
    assert_eq!((to.failover_logs(), to.high_seqnos()[&VB]), (log, Seqno(101)));
    let refused = from.upsert(b"late", Bytes::from_static(b"{}"), WriteOptions::default());
    assert!(refused.is_err(), "it is dead where it was");
    assert_eq!(to.get(b"key-42").unwrap().seqno, Seqno(43));
}

/// Changes are taken only of those who may do anything.
#[tokio::test]
async fn reader_of_changes_may_not_send_them() {
    let reader =
        dcp_producer::User { username: "reader".into(), password: "secret".into(), reads: None };
    let producer = start(|options| options.users = vec![reader]).await;
    let mut client = RawClient::connect(&producer, 0).await;
    client.hello(FEATURES).await;
    client.log_in("reader", "secret").await;
    client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
    let open = Frame::request(Opcode::DCP_OPEN).with_key(b"thief").with_extras(&[0; 8]);
    client.fail(open, Status::EACCESS).await;
}

/// What a node's consumer says, recorded, is answered as the recorded node answered, and the changes
/// are sent to it in the same snapshots. Versions, branches and noops are of each node's own making.
#[tokio::test]
async fn consumer_of_a_real_node_is_answered_as_recorded() {
    let legacy = ServerVersion { major: 6, minor: 0, patch: 5 };
    for (name, version) in
        [("6.0.5-replication", legacy), ("8.0.2-replication", ServerVersion::NEWEST)]
    {
        let scenario = Scenario::load(name).unwrap();
        let producer = start(|options| options.vbuckets = 8).await;
        producer.set_dcp_config(ConnectionConfig {
            server_version: version,
            ..ConnectionConfig::default()
        });
        let features = if version.is_legacy() { &FEATURES[..4] } else { FEATURES };
        let mut client = RawClient::ready(&producer, 0, features).await;
        client.open_dcp(b"replication", WHOLE).await;
        let mut writer = RawClient::ready(&producer, 0, &FEATURES[..4]).await;
        let (mut written, mut compared) = (0, 0);
        for (at, event) in scenario.events.iter().enumerate() {
            match &event.kind {
                EventKind::ClientPacket(packet) if opcode(packet) != Opcode::DCP_NOOP => {
                    client.send(packet).await;
                }
                EventKind::ServerPacket(packet) if opcode(packet) != Opcode::DCP_NOOP => {
                    if opcode(packet) == Opcode::DCP_SNAPSHOT_MARKER {
                        let end = SnapshotMarker::decode(&parse(packet)).unwrap().end_seqno.0;
                        let after = &scenario.events[at + 1..];
                        write_recorded(&mut writer, after, end - written).await;
                        written = end;
                    }
                    let answer = client.receive().await;
                    assert_eq!(comparable(answer.bytes()), comparable(packet), "{name}, {at}");
                    compared += 1;
                }
                _ => {}
            }
        }
        assert!(compared > 25 && written == 10, "{name}");
    }
}

fn parse(packet: &[u8]) -> Frame<'_> {
    Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap().0
}

fn opcode(packet: &[u8]) -> Opcode {
    parse(packet).header.opcode
}

/// A packet without what each node makes by itself: versions, and branches in failover logs.
fn comparable(packet: &[u8]) -> Vec<u8> {
    let mut packet = packet.to_vec();
    packet[16..24].fill(0);
    if opcode(&packet) == Opcode::DCP_STREAM_REQ {
        packet[24..32].fill(0);
    }
    packet
}

/// Writes the first documents that recorded packets show, all at once.
async fn write_recorded(writer: &mut RawClient, packets: &[Event], count: u64) {
    let shown = packets.iter().filter_map(Event::packet).filter_map(|packet| {
        let frame = parse(packet);
        Mutation::decode(&frame).ok().map(|_| frame)
    });
    let mut all = Vec::new();
    for shown in shown.take(count.try_into().unwrap()) {
        let is_prefixed = shown.key.first() == Some(&0);
        let key = &shown.key[usize::from(is_prefixed)..];
        let set = Frame::request(Opcode::SET).with_vbid(VB).with_extras(&[0; 8]);
        set.with_key(key).with_value(shown.value).encode(&mut all).unwrap();
    }
    writer.send(&all).await;
    for _ in 0..count {
        assert_eq!(writer.receive().await.status(), Status::SUCCESS);
    }
}
