//! Real clients' requests, recorded, answered by the machine and held against what the real
//! server answered.
//!
//! The documents come from a recording that shows all of them; the other recordings of the same
//! data show what the server made of them for other open flags, controls and filters.

use std::collections::BTreeMap;

use bytes::{Bytes, BytesMut};
use dcp_producer_proto::{
    Connection, ConnectionConfig, Features, Item, ItemKind, OsoBackfill, VBucketState,
};
use dcp_test::traces::{EventKind, Scenario};
use dcp_wire::message::{
    Deletion, Expiration, FailoverEntries, Mutation, SnapshotMarker, SystemEvent, SystemEventId,
};
use dcp_wire::{
    Cas, CollectionId, Datatype, DocKey, Feature, Frame, MAX_BODY_LEN, Opcode, RevSeqno, ScopeId,
    Seqno, Status, Vbid,
};

use crate::client::{packets, some_instant};
use crate::seen::{Seen, seen};
use dcp_test::bucket::{Bucket, Node, VBucket, doc, event};

/// The documents and events a recording shows, and its vBucket's failover log.
struct Data {
    vbid: u16,
    items: BTreeMap<Seqno, Item>,
    log: Vec<(u64, u64)>,
    purge_seqno: u64,
}

fn data(scenario: &str) -> Data {
    let scenario = Scenario::load(scenario).unwrap();
    let collections = features(&scenario).collections;
    let purge_seqno = scenario.expected["purge_seqno"].as_u64().unwrap_or_default();
    let mut data = Data { vbid: 0, items: BTreeMap::new(), log: Vec::new(), purge_seqno };
    for event in &scenario.events {
        let EventKind::ServerPacket(packet) = &event.kind else { continue };
        let (frame, _) = Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap();
        if frame.header.opcode == Opcode::DCP_STREAM_REQ && frame.header.status().is_success() {
            data.log = FailoverEntries::decode(frame.value)
                .unwrap()
                .map(|entry| (entry.vbuuid.0, entry.seqno.0))
                .collect();
        }
        if let Some(item) = item(&frame, collections) {
            data.vbid = frame.header.vbid().0;
            data.items.insert(item.seqno, item);
        }
    }
    assert!(!data.items.is_empty() && !data.log.is_empty(), "{}", scenario.name);
    data
}

fn item(frame: &Frame<'_>, collections: bool) -> Option<Item> {
    let (kind, seqno, rev_seqno, flags, expiry, delete_time) = match frame.header.opcode {
        Opcode::DCP_MUTATION => {
            let message = Mutation::decode(frame).unwrap();
            let Mutation { seqno, rev_seqno, flags, expiry, .. } = message;
            (ItemKind::Mutation, seqno, rev_seqno, flags, expiry, 0)
        }
        Opcode::DCP_DELETION => {
            let Deletion { seqno, rev_seqno, delete_time, .. } = Deletion::decode(frame).unwrap();
            (ItemKind::Deletion, seqno, rev_seqno, 0, 0, delete_time.unwrap_or_default())
        }
        Opcode::DCP_EXPIRATION => {
            let message = Expiration::decode(frame).unwrap();
            let Expiration { seqno, rev_seqno, delete_time, .. } = message;
            (ItemKind::Expiration, seqno, rev_seqno, 0, 0, delete_time)
        }
        Opcode::DCP_SYSTEM_EVENT => return Some(system_event(frame)),
        _ => return None,
    };
    let DocKey { collection_id, key } = if collections {
        DocKey::decode(frame.key).unwrap()
    } else {
        DocKey { collection_id: CollectionId::DEFAULT, key: frame.key }
    };
    Some(Item {
        kind,
        seqno,
        rev_seqno,
        cas: frame.header.cas,
        collection_id,
        key: Bytes::copy_from_slice(key),
        value: Bytes::copy_from_slice(frame.value),
        datatype: frame.header.datatype,
        flags,
        expiry,
        delete_time,
    })
}

fn system_event(frame: &Frame<'_>) -> Item {
    let event = SystemEvent::decode(frame).unwrap();
    let number = |at: usize| {
        event.value.get(at..at + 4).map_or(0, |bytes| u32::from_be_bytes(bytes.try_into().unwrap()))
    };
    let (scope_id, collection_id) = (ScopeId(number(8)), CollectionId(number(12)));
    Item {
        kind: ItemKind::SystemEvent { id: event.id, version: event.version, scope_id },
        rev_seqno: RevSeqno(0),
        cas: Cas(0),
        collection_id,
        key: Bytes::copy_from_slice(event.key),
        value: Bytes::copy_from_slice(event.value),
        datatype: Datatype::RAW,
        ..doc(event.seqno.0, 0)
    }
}

/// What the HELLO of a recording's first connection negotiated.
fn features(scenario: &Scenario) -> Features {
    let hello = scenario.events.iter().find_map(|event| match &event.kind {
        EventKind::ServerPacket(packet) => Frame::parse(packet, MAX_BODY_LEN)
            .unwrap()
            .filter(|(frame, _)| frame.header.opcode == Opcode::HELLO)
            .map(|(frame, _)| frame.value.to_vec()),
        _ => None,
    });
    let codes = hello.unwrap_or_default();
    let has = |feature: Feature| codes.chunks(2).any(|code| code == feature.0.to_be_bytes());
    Features {
        collections: has(Feature::COLLECTIONS),
        xerror: has(Feature::XERROR),
        snappy: has(Feature::SNAPPY),
        json: has(Feature::JSON),
        unordered_execution: has(Feature::UNORDERED_EXECUTION),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Memory,
    Disk,
    /// All on disk, and in memory the checkpoint that begins at this seqno.
    Both(u64),
}

/// The bucket as it was when the recording began: up to the end of the first snapshot. The rest
/// is still to be written.
fn bucket(mut data: Data, place: Place, first_end: Seqno) -> (Bucket, BTreeMap<Seqno, Item>) {
    let later = data.items.split_off(&Seqno(first_end.0 + 1));
    let items: Vec<_> = data.items.into_values().collect();
    let mut scopes = BTreeMap::from([(0, vec![0])]);
    for item in &items {
        if let ItemKind::SystemEvent { scope_id, .. } = item.kind {
            let collections: &mut Vec<u32> = scopes.entry(scope_id.0).or_default();
            collections.extend(Some(item.collection_id.0).filter(|&id| id != 0));
        }
    }
    let vbucket = match place {
        Place::Memory => VBucket::new().checkpoint(1, items),
        Place::Disk => VBucket { is_restarted: true, ..VBucket::new().on_disk(items) },
        Place::Both(from) => {
            let newer: Vec<_> = items.iter().filter(|item| item.seqno.0 >= from).cloned().collect();
            VBucket::new().on_disk(items).checkpoint(from, newer)
        }
    };
    let mut vbucket = vbucket.with_table(&data.log);
    vbucket.memory_from = match place {
        Place::Memory => 1,
        Place::Disk => u64::MAX,
        Place::Both(from) => from,
    };
    vbucket.purge = data.purge_seqno;
    let vbuckets = [(data.vbid, vbucket)].into();
    (Bucket { vbuckets, scopes, cluster_map: None, node: Node::default() }, later)
}

/// Where the snapshot ends that a packet announces, if it does.
fn announced(packet: &[u8]) -> Option<Seqno> {
    let (frame, _) = Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap();
    if frame.header.magic.is_response() {
        return None;
    }
    SnapshotMarker::decode(&frame).ok().map(|marker| marker.end_seqno)
}

/// Plays a recording to the machine, a connection to each of its connections. What the recorded
/// server announces without having had it before is written at that moment.
fn replay(name: &str, reference: &str, place: Place) -> (Vec<Seen>, Vec<Seen>) {
    let scenario = Scenario::load(name).unwrap();
    let features = features(&scenario);
    let snapshots = scenario.events.iter().filter_map(|event| match &event.kind {
        EventKind::ServerPacket(packet) => announced(packet),
        _ => None,
    });
    // A filtered first snapshot may end before what was there.
    let first_end = match name {
        "8.0.2-stream-id" => Some(Seqno(11)),
        // Snapshots in the order of the keys announce no end.
        "8.0.2-oso-advanced" => Some(Seqno(18)),
        "8.0.2-oso-advanced-c9" => Some(Seqno(19)),
        _ => snapshots.into_iter().next(),
    };
    let mut data = data(reference);
    if name == "8.0.2-collections-drop" {
        // The manifest took the expiry off this one, which no recorded client could be told.
        let modified = event(16, SystemEventId::MODIFY_COLLECTION, 0, 9);
        data.items.insert(modified.seqno, modified);
    }
    let vbid = data.vbid;
    let (mut bucket, mut later) = bucket(data, place, first_end.unwrap_or(Seqno(u64::MAX - 1)));
    let mut connections: BTreeMap<u32, (Connection, BytesMut)> = BTreeMap::new();
    let mut recorded: BTreeMap<u32, Vec<Seen>> = BTreeMap::new();
    let now = some_instant();
    let config = ConnectionConfig { oso_backfill: OsoBackfill::Enabled, ..Default::default() };
    for event in &scenario.events {
        let (connection, out) = connections
            .entry(event.conn)
            .or_insert_with(|| (Connection::new(config.clone()), BytesMut::new()));
        match &event.kind {
            EventKind::ClientPacket(packet) => {
                let (frame, _) = Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap();
                if frame.header.opcode.is_dcp() {
                    connection
                        .handle_frame(now, &frame, Some(&bucket), features, out)
                        .unwrap_or_else(|error| panic!("{name}: {error}"));
                    connection.poll_transmit(now, &bucket, out, usize::MAX);
                }
            }
            EventKind::ServerPacket(packet) => {
                recorded.entry(event.conn).or_default().extend(seen(packet));
                let Some(end) = announced(packet) else { continue };
                let rest = later.split_off(&Seqno(end.0 + 1));
                for item in core::mem::replace(&mut later, rest).into_values() {
                    bucket.vbuckets.get_mut(&vbid).unwrap().write(item);
                }
                for (connection, out) in connections.values_mut() {
                    connection.notify(Vbid(vbid));
                    connection.poll_transmit(now, &bucket, out, usize::MAX);
                }
            }
            EventKind::ServerClosed => {}
        }
    }
    let mut ours: Vec<Seen> = Vec::new();
    for (_, out) in connections.into_values() {
        ours.extend(packets(&out).iter().filter_map(|packet| seen(packet)));
    }
    (recorded.into_values().flatten().collect(), ours)
}

/// Asserts that the machine answers like the server in all of `names`, recorded of the data that
/// `reference` shows.
fn answers_like_the_server(reference: &str, place: Place, names: &[&str]) {
    for name in names {
        let (recorded, ours) = replay(name, reference, place);
        assert!(recorded.len() > 2, "{name} has something to compare");
        // Streams take turns in their own ways; each has its own opaque and its own order.
        let (recorded, mut ours) = (by_opaque(recorded), by_opaque(ours));
        for (_, opaque, packets) in HUNG_UP.iter().filter(|(hung_up, ..)| hung_up == name) {
            ours.get_mut(opaque).unwrap().truncate(*packets);
        }
        assert!(recorded.keys().eq(ours.keys()), "{name}: the same requests and streams");
        for (theirs, ours) in recorded.values().zip(ours.values()) {
            for (number, (theirs, ours)) in theirs.iter().zip(ours).enumerate() {
                assert_eq!(ours, theirs, "{name}: packet {number}");
            }
            assert_eq!(ours.len(), theirs.len(), "{name}: number of packets");
        }
    }
}

/// Streams on which the recorded client hung up, and how many packets it had by then.
const HUNG_UP: [(&str, u32, usize); 2] =
    [("8.0.2-resume-mid-snapshot-memory", 0xb0, 7), ("8.0.2-resume-mid-snapshot-memory", 0xb1, 9)];

fn by_opaque(packets: Vec<Seen>) -> BTreeMap<u32, Vec<Seen>> {
    let mut groups: BTreeMap<u32, Vec<Seen>> = BTreeMap::new();
    for packet in packets {
        groups.entry(packet.opaque).or_default().push(packet);
    }
    groups
}

#[test]
fn recorded_collections_from_disk() {
    answers_like_the_server(
        "8.0.2-collections-disk-all",
        Place::Disk,
        &[
            "8.0.2-collections-disk-all",
            "8.0.2-collections-disk-c8a-9",
            "8.0.2-collections-disk-default-only",
            "8.0.2-collections-disk-empty-json",
            "8.0.2-collections-disk-flatbuf",
            "8.0.2-collections-disk-legacy",
            "8.0.2-collections-disk-scope0",
            "8.0.2-collections-disk-scope8",
            "8.0.2-collections-errors",
        ],
    );
}

#[test]
fn recorded_collections_from_memory() {
    answers_like_the_server(
        "8.0.2-collections-memory-all",
        Place::Memory,
        &[
            "8.0.2-collections-memory-all",
            "8.0.2-collections-memory-c8a-9",
            "8.0.2-collections-memory-default-only",
            "8.0.2-collections-memory-flatbuf",
            "8.0.2-collections-memory-legacy",
            "8.0.2-collections-memory-scope8",
        ],
    );
}

#[test]
fn recorded_collections_and_a_scope_dropped_while_three_streams_follow() {
    answers_like_the_server("8.0.2-collections-drop", Place::Disk, &["8.0.2-collections-drop"]);
}

#[test]
fn recorded_deletions_expirations_and_xattrs_from_disk() {
    // Not `novalue`: without values and xattrs the server sends tombstones as mutations there.
    answers_like_the_server(
        "8.0.2-deletes-disk-del-user-xattr",
        Place::Disk,
        &[
            "8.0.2-deletes-disk-del-user-xattr",
            "8.0.2-deletes-disk-deltimes",
            "8.0.2-deletes-disk-expiry-deltimes",
            "8.0.2-deletes-disk-expiry-deltimes-xattr",
            "8.0.2-deletes-disk-expiry-without-deltimes",
            "8.0.2-deletes-disk-novalue-underlying-dt",
            "8.0.2-deletes-disk-novalue-xattr",
            "8.0.2-deletes-disk-plain",
            "8.0.2-deletes-disk-xattr",
        ],
    );
}

#[test]
fn recorded_deletions_expirations_and_xattrs_from_memory() {
    answers_like_the_server(
        "8.0.2-deletes-memory-del-user-xattr",
        Place::Memory,
        &[
            "8.0.2-deletes-memory-del-user-xattr",
            "8.0.2-deletes-memory-deltimes",
            "8.0.2-deletes-memory-expiry-deltimes",
            "8.0.2-deletes-memory-expiry-deltimes-xattr",
            "8.0.2-deletes-memory-expiry-without-deltimes",
            "8.0.2-deletes-memory-novalue",
            "8.0.2-deletes-memory-plain",
        ],
    );
}

#[test]
fn recorded_compressed_values() {
    for (place, store) in [(Place::Disk, "disk"), (Place::Memory, "memory")] {
        for mode in ["", "passive-"] {
            let name = |suffix: &str| format!("8.0.2-snappy-{mode}{store}-{suffix}");
            let names: Vec<_> = ["hello", "nojson-hello", "force", "off", "force-without-hello"]
                .into_iter()
                .map(name)
                .filter(|name| Scenario::load(name).is_ok())
                .collect();
            let names: Vec<_> = names.iter().map(String::as_str).collect();
            assert!(names.len() >= 3, "{names:?}");
            answers_like_the_server(&name("hello"), place, &names);
        }
    }
}

#[test]
fn recorded_marker_versions() {
    answers_like_the_server(
        "8.0.2-disk-backfill-marker20-rejected",
        Place::Disk,
        &[
            "8.0.2-disk-backfill-v1",
            "8.0.2-disk-backfill-v2.0",
            "8.0.2-disk-backfill-v2.2",
            "8.0.2-disk-backfill-v1-syncwrites-noconsumer",
            "8.0.2-disk-backfill-consumer-name-after-sync",
            "8.0.2-disk-backfill-marker20-rejected",
            "8.0.2-disk-backfill-marker22-without-collections",
        ],
    );
}

#[test]
fn recorded_snapshots_in_the_order_of_the_keys() {
    let names = ["8.0.2-oso-advanced", "8.0.2-oso-advanced-c9", "8.0.2-oso-unfiltered"];
    answers_like_the_server("8.0.2-oso-unfiltered", Place::Disk, &names);
}

#[test]
fn recordings_that_show_all_their_data() {
    for (place, name) in [
        (Place::Memory, "8.0.2-stream-id"),
        (Place::Memory, "8.0.2-end-seqno"),
        (Place::Memory, "8.0.2-memory-fresh"),
        (Place::Memory, "8.0.2-resume-mid-snapshot-memory"),
        (Place::Disk, "8.0.2-disk-only-flag"),
        // The branch began at 10, and with it a checkpoint.
        (Place::Both(11), "8.0.2-rollback-cases"),
        (Place::Memory, "8.0.2-rollback-purge"),
        (Place::Memory, "8.0.2-close-stream"),
        (Place::Memory, "8.0.2-close-stream-with-end"),
    ] {
        answers_like_the_server(name, place, &[name]);
    }
}

#[test]
fn recorded_flow_control() {
    let names = ["8.0.2-flow-control", "8.0.2-flow-control-noack"];
    answers_like_the_server("8.0.2-flow-control", Place::Memory, &names);
}

#[test]
fn recorded_errors() {
    // The recording counts its connections; every one of them is about one refused request.
    let scenario = Scenario::load("8.0.2-errors").unwrap();
    let mut bucket = Bucket::with(VBucket::new());
    bucket.vb().write(Item { key: Bytes::from_static(b"a"), ..doc(1, 0) });
    let replica = VBucket { state: VBucketState::Replica, ..VBucket::new() };
    bucket.vbuckets.insert(3, replica);
    let now = some_instant();
    let mut compared = 0;
    for conn in scenario.connections() {
        let events: Vec<_> = scenario.events.iter().filter(|event| event.conn == conn).collect();
        let recorded = |wanted: Opcode, opaque: u32| {
            events.iter().find_map(|event| match &event.kind {
                EventKind::ServerPacket(packet) => seen(packet)
                    .filter(|seen| seen.opcode == wanted && seen.opaque == opaque)
                    .map(|seen| Status(seen.vbid_or_status)),
                _ => None,
            })
        };
        let has_bucket = events
            .iter()
            .filter_map(|event| event.packet())
            .any(|packet| packet.starts_with(&[0x81, Opcode::SELECT_BUCKET.0]));
        let xerror = events
            .iter()
            .filter_map(|event| event.packet())
            .any(|packet| packet.starts_with(&[0x81, Opcode::HELLO.0]));
        let features = Features { xerror, json: xerror, ..Features::NONE };
        let mut connection = Connection::new(ConnectionConfig::default());
        for event in &events {
            let EventKind::ClientPacket(packet) = &event.kind else { continue };
            let Ok(Some((frame, _))) = Frame::parse(packet, MAX_BODY_LEN) else { continue };
            let (opcode, opaque) = (frame.header.opcode, frame.header.opaque.0);
            // Privileges are the server's affair: connection 16 has none.
            if !opcode.is_dcp() || conn == 16 {
                continue;
            }
            let mut out = BytesMut::new();
            let source = has_bucket.then_some(&bucket);
            let outcome = connection.handle_frame(now, &frame, source, features, &mut out);
            let ours = packets(&out).first().and_then(|packet| seen(packet));
            let ours = ours.map(|seen| Status(seen.vbid_or_status));
            let what = format!("connection {conn}: {opcode} with opaque {opaque:#x}");
            assert_eq!(ours, recorded(opcode, opaque), "{what}");
            let closed = matches!(events.last().unwrap().kind, EventKind::ServerClosed);
            assert!(outcome.is_ok() || closed, "{what}: {outcome:?}");
            compared += 1;
        }
    }
    assert!(compared > 50, "{compared} requests");
}
