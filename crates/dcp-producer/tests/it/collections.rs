use bytes::{Bytes, BytesMut};
use dcp_producer::{DocumentError, Producer, WriteOptions};
use dcp_wire::message::{
    OpenFlags, SnapshotMarker, StreamEnd, StreamEndReason, StreamRequest, StreamRequestFlags,
    SystemEvent, SystemEventId,
};
use dcp_wire::{
    CollectionId, Feature, Frame, Opaque, Opcode, ScopeId, Seqno, Status, Vbid, Vbuuid,
};

use super::raw_client::RawClient;
use super::start;

const VB: Vbid = Vbid(0);
const FEATURES: [Feature; 2] = [Feature::XERROR, Feature::COLLECTIONS];

async fn two_nodes() -> Producer {
    start(|options| {
        options.nodes = 2;
        options.replicas = 1;
        options.vbuckets = 2;
    })
    .await
}

fn key(producer: &Producer) -> String {
    let mut keys = (0..).map(|n| format!("key-{n}"));
    keys.find(|key| producer.vbid_of(key.as_bytes()) == VB).unwrap()
}

fn write(producer: &Producer, collection_id: CollectionId) -> Result<Seqno, DocumentError> {
    let mut options = WriteOptions::default();
    options.collection_id = collection_id;
    let key = key(producer);
    Ok(producer.upsert(key.as_bytes(), Bytes::from_static(b"1"), options)?.seqno)
}

/// A stream of everything from `node`, or of what `value` names.
async fn stream(producer: &Producer, node: usize, value: &[u8]) -> RawClient {
    stream_with(producer, node, value, &[]).await
}

async fn stream_with(
    producer: &Producer,
    node: usize,
    value: &[u8],
    controls: &[&[u8]],
) -> RawClient {
    let mut client = RawClient::ready(producer, node, &FEATURES).await;
    client.open_dcp(b"reader", OpenFlags::empty()).await;
    client.control(b"enable_noop", b"true").await;
    for control in controls {
        client.control(control, b"true").await;
    }
    request(&mut client, value).await;
    client
}

/// A stream of a client that does not know collections.
async fn legacy_stream(producer: &Producer) -> RawClient {
    let mut client = RawClient::ready(producer, 0, &[Feature::XERROR]).await;
    client.open_dcp(b"legacy", OpenFlags::empty()).await;
    request(&mut client, b"").await;
    client
}

async fn request(client: &mut RawClient, value: &[u8]) {
    let mut out = BytesMut::new();
    let request = StreamRequest {
        vbid: VB,
        opaque: Opaque(1),
        flags: StreamRequestFlags::empty(),
        start_seqno: Seqno::ZERO,
        end_seqno: Seqno::MAX,
        vbuuid: Vbuuid(0),
        snapshot_start: Seqno::ZERO,
        snapshot_end: Seqno::ZERO,
        value,
    };
    request.encode(&mut out).unwrap();
    client.send(&out).await;
    assert_eq!(client.receive().await.status(), Status::SUCCESS);
}

/// What the next events say: id, name, manifest uid, seqno.
async fn events(client: &mut RawClient, count: usize) -> Vec<(SystemEventId, String, u64, u64)> {
    let mut events = Vec::new();
    while events.len() < count {
        let packet = client.receive().await;
        if packet.opcode() == Opcode::DCP_SYSTEM_EVENT {
            let frame = packet.frame();
            let event = SystemEvent::decode(&frame).unwrap();
            let payload = event.payload().unwrap().unwrap();
            let name = String::from_utf8(event.key.to_vec()).unwrap();
            events.push((event.id, name, payload.manifest_uid.0, event.seqno.0));
        }
    }
    events
}

fn event(id: SystemEventId, name: &str, uid: u64, seqno: u64) -> (SystemEventId, String, u64, u64) {
    (id, name.to_owned(), uid, seqno)
}

#[tokio::test]
async fn scopes_and_collections_come_and_go_by_events_on_every_copy() {
    let producer = two_nodes().await;
    assert_eq!(producer.create_scope("shop").unwrap(), ScopeId(8));
    let carts = producer.create_collection("shop", "carts", None).unwrap();
    let items = producer.create_collection("shop", "items", Some(60)).unwrap();
    assert_eq!((carts, items), (CollectionId(8), CollectionId(9)));
    assert!(producer.create_collection("shop", "items", None).is_err());
    assert!(producer.create_scope("_mine").is_err() && producer.drop_scope("_default").is_err());
    assert_eq!(write(&producer, carts).unwrap(), Seqno(4));
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    write(&producer, items).unwrap();
    let expiry = producer.get_from(items, key(&producer).as_bytes()).unwrap().expiry;
    assert!((59..=62).contains(&(u64::from(expiry) - now.as_secs())));
    producer.drop_scope("shop").unwrap();
    // The drop of a scope says in its last event only that the new manifest is reached.
    let expected = [
        event(SystemEventId::CREATE_SCOPE, "shop", 1, 1),
        event(SystemEventId::BEGIN_COLLECTION, "carts", 2, 2),
        event(SystemEventId::BEGIN_COLLECTION, "items", 3, 3),
        event(SystemEventId::END_COLLECTION, "", 3, 6),
        event(SystemEventId::END_COLLECTION, "", 3, 7),
        event(SystemEventId::DROP_SCOPE, "", 4, 8),
    ];
    let mut at_once = stream(&producer, 1, b"").await;
    assert_eq!(events(&mut at_once, 6).await, expected, "memory has them all");
    producer.persist();
    // On disk begin and end of a thing are versions of one item: only the last is left.
    let mut later = stream(&producer, 1, b"").await;
    assert_eq!(events(&mut later, 3).await, expected[3..]);
    assert!(matches!(write(&producer, carts), Err(DocumentError::UnknownCollection(_))));
    assert!(producer.get_from(items, key(&producer).as_bytes()).is_none());
}

#[tokio::test]
async fn stream_sees_each_event_and_a_filter_ends_with_its_collection() {
    let producer = two_nodes().await;
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    let mut all = stream(&producer, 1, b"").await;
    let mut one = stream(&producer, 0, br#"{"collections":["8"]}"#).await;
    let begin = event(SystemEventId::BEGIN_COLLECTION, "carts", 1, 1);
    assert_eq!(events(&mut all, 1).await, std::slice::from_ref(&begin));
    assert_eq!(events(&mut one, 1).await, [begin]);
    producer.create_scope("shop").unwrap();
    write(&producer, carts).unwrap();
    producer.drop_collection("_default", "carts").unwrap();
    let scope = event(SystemEventId::CREATE_SCOPE, "shop", 2, 2);
    let end = event(SystemEventId::END_COLLECTION, "", 3, 4);
    assert_eq!(events(&mut all, 2).await, [scope, end.clone()]);
    assert_eq!(events(&mut one, 1).await, [end]);
    let last = one.receive().await;
    assert_eq!(StreamEnd::decode(&last.frame()).unwrap().reason, StreamEndReason::FILTER_EMPTY);
}

#[tokio::test]
async fn collection_names_and_keys_lead_to_collections_and_their_seqnos() {
    let producer = two_nodes().await;
    producer.create_scope("shop").unwrap();
    let carts = producer.create_collection("shop", "carts", None).unwrap();
    let mut client = RawClient::ready(&producer, 0, &FEATURES).await;
    let answer =
        client.succeed(Frame::request(Opcode::GET_COLLECTION_ID).with_value(b"shop.carts")).await;
    assert_eq!(answer.frame().extras, [0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 8]);
    let manifest = client.succeed(Frame::request(Opcode::GET_COLLECTIONS_MANIFEST)).await;
    assert_eq!(manifest.frame().value, producer.manifest_json().as_bytes());
    dcp_proto::topology::Manifest::parse(manifest.frame().value).unwrap();
    let config = client.succeed(Frame::request(Opcode::GET_CLUSTER_CONFIG)).await;
    let config: serde_json::Value = serde_json::from_slice(config.frame().value).unwrap();
    assert_eq!(config["collectionsManifestUid"], "2");
    let written = [&[8][..], key(&producer).as_bytes()].concat();
    let set = Frame::request(Opcode::SET).with_extras(&[0; 8]).with_value(b"1").with_vbid(VB);
    client.succeed(set.with_key(&written)).await;
    assert!(producer.get_from(carts, key(&producer).as_bytes()).is_some());
    assert!(producer.get(key(&producer).as_bytes()).is_none());
    let high = Frame::request(Opcode::GET_ALL_VB_SEQNOS);
    let high = high.with_extras(&[0, 0, 0, 1, 0, 0, 0, 8]);
    let answer = client.succeed(high).await;
    assert_eq!(answer.frame().value[..10], [0, 0, 0, 0, 0, 0, 0, 0, 0, 3]);
    producer.drop_collection("shop", "carts").unwrap();
    let refused = client.fail(set.with_key(&written), Status::UNKNOWN_COLLECTION).await;
    let refused: serde_json::Value = serde_json::from_slice(refused.frame().value).unwrap();
    assert_eq!(refused["manifest_uid"], "3");
    client.fail(high, Status::UNKNOWN_COLLECTION).await;
}

#[tokio::test]
async fn vbucket_that_rolls_back_gets_the_manifest_again() {
    let producer = two_nodes().await;
    write(&producer, CollectionId::DEFAULT).unwrap();
    producer.persist();
    producer.hold_persistence(VB, 0, true).unwrap();
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    write(&producer, carts).unwrap();
    producer.restart(0, false).await.unwrap();
    assert_eq!(producer.high_seqnos()[&VB], Seqno(2), "the collection began anew");
    assert!(producer.get_from(carts, key(&producer).as_bytes()).is_none());
    assert_eq!(write(&producer, carts).unwrap(), Seqno(3));
    let mut replica = stream(&producer, 1, b"").await;
    let begin = event(SystemEventId::BEGIN_COLLECTION, "carts", 1, 2);
    assert_eq!(events(&mut replica, 1).await, [begin]);
    producer.roll_back(VB, Seqno(1)).unwrap();
    assert_eq!(producer.high_seqnos()[&VB], Seqno(2));
    assert!(write(&producer, carts).is_ok());
}

#[tokio::test]
async fn collection_modify_and_flush_are_events_in_the_requested_form() {
    let producer = two_nodes().await;
    let carts = producer.create_collection("_default", "carts", None).unwrap();
    let mut told = stream_with(&producer, 1, b"", &[b"flatbuffers_system_events"]).await;
    let mut other = stream(&producer, 0, b"").await;
    let begin = event(SystemEventId::BEGIN_COLLECTION, "carts", 1, 1);
    assert_eq!(events(&mut told, 1).await, std::slice::from_ref(&begin));
    assert_eq!(events(&mut other, 1).await, [begin]);
    producer.modify_collection("_default", "carts", Some(60), true).unwrap();
    producer.modify_collection("_default", "carts", Some(60), true).unwrap();
    write(&producer, carts).unwrap();
    assert_ne!(producer.get_from(carts, key(&producer).as_bytes()).unwrap().expiry, 0);
    producer.flush_collection("_default", "carts").unwrap();
    let modify = event(SystemEventId::MODIFY_COLLECTION, "carts", 2, 2);
    let flush = event(SystemEventId::BEGIN_COLLECTION, "carts", 3, 4);
    assert_eq!(events(&mut told, 2).await, [modify, flush.clone()]);
    assert_eq!(events(&mut other, 1).await, [flush]);
    assert!(producer.get_from(carts, key(&producer).as_bytes()).is_none());
    let manifest: serde_json::Value = serde_json::from_str(&producer.manifest_json()).unwrap();
    let listed = &manifest["scopes"][0]["collections"][1];
    assert_eq!((&listed["maxTTL"], &listed["history"]), (&60.into(), &true.into()));
    assert_eq!(listed["flush_uid"], "3");
    assert!(producer.flush_collection("_default", "nope").is_err());
    assert!(producer.modify_collection("nope", "carts", None, false).is_err());
}

/// A modification shares a snapshot with the creation, but not with another one.
#[tokio::test]
async fn ss_25_each_modification_of_a_collection_is_a_snapshot_of_its_own() {
    let producer = start(|options| options.keeps_history = true).await;
    producer.create_collection("_default", "carts", None).unwrap();
    for ttl in [10, 20, 30] {
        producer.modify_collection("_default", "carts", Some(ttl), true).unwrap();
    }
    let controls: [&[u8]; 2] = [b"flatbuffers_system_events", b"change_streams"];
    let mut client = stream_with(&producer, 0, b"", &controls).await;
    for (start, seqnos) in [(0, 1..=2), (3, 3..=3), (4, 4..=4)] {
        assert_eq!(next_marker(&mut client).await, (start, *seqnos.end(), 0x15));
        for seqno in seqnos {
            let event = client.receive().await;
            assert_eq!(SystemEvent::decode(&event.frame()).unwrap().seqno, Seqno(seqno));
        }
    }
}

async fn next_marker(client: &mut RawClient) -> (u64, u64, u32) {
    let packet = client.receive().await;
    let marker = SnapshotMarker::decode(&packet.frame()).unwrap();
    (marker.start_seqno.0, marker.end_seqno.0, marker.flags.bits())
}

/// Without collections, a client only learns from the next marker that a checkpoint began.
#[tokio::test]
async fn checkpoint_begun_with_events_is_announced_with_the_first_document() {
    let producer = start(|options| options.vbuckets = 1).await;
    let mut client = legacy_stream(&producer).await;
    for (change, marker) in [
        ("write", Some((0, 1, 0x5))),
        // The first event of a collection is of the same checkpoint.
        ("create", None),
        ("write other", Some((3, 3, 0x1))),
        // The second one begins the next.
        ("drop", None),
        ("create", None),
        ("write", Some((4, 6, 0x5))),
        ("write other", Some((7, 7, 0x1))),
    ] {
        match change {
            "create" => _ = producer.create_collection("_default", "carts", None).unwrap(),
            "drop" => producer.drop_collection("_default", "carts").unwrap(),
            key => {
                let options = WriteOptions::default();
                producer.upsert(key.as_bytes(), Bytes::from_static(b"1"), options).unwrap();
            }
        }
        if let Some(marker) = marker {
            assert_eq!(next_marker(&mut client).await, marker, "{change}");
            assert_eq!(client.receive().await.opcode(), Opcode::DCP_MUTATION);
        }
    }
}
