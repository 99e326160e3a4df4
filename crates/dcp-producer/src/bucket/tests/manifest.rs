//! How a vBucket follows the manifest, event by event.

use std::sync::Arc;

use bytes::Bytes;
use dcp_producer_proto::{Item, ItemKind, MemoryRead, ServerVersion, VBucketSource};
use dcp_wire::message::{DurabilityLevel, SystemEvent, SystemEventId};
use dcp_wire::{Cas, CollectionId, Datatype, DocKey};

use crate::bucket::*;
use crate::chance::Now;

const VB: Vbid = Vbid(0);

fn one_vbucket() -> Bucket {
    let bucket = Bucket::new(1, 1 << 30, 1 << 20);
    bucket.rearrange(VB, |copies| copies.set_active(bucket.new_copy(0, VB))).unwrap();
    bucket
}

fn plain() -> CollectionSettings {
    CollectionSettings::default()
}

/// Lets the vBucket follow; returns what it tells: event, name, manifest uid.
fn follow(bucket: &Bucket, manifest: &Manifest) -> Vec<(SystemEventId, String, u64)> {
    follow_as(bucket, manifest, ServerVersion::NEWEST).concat()
}

/// The same as a server of a version does, checkpoint by checkpoint.
fn follow_as(
    bucket: &Bucket,
    manifest: &Manifest,
    version: ServerVersion,
) -> Vec<Vec<(SystemEventId, String, u64)>> {
    let mut read = bucket.lock(VB).unwrap().high_seqno;
    bucket.with(VB, |vbucket| vbucket.apply_manifest(Now(1), manifest, version)).unwrap();
    let mut checkpoints = Vec::new();
    while let MemoryRead::Items { items, .. } = bucket.lock(VB).unwrap().read_memory(read) {
        read = items.last().unwrap().seqno;
        checkpoints.push(items.iter().map(told).collect());
    }
    checkpoints
}

fn told(item: &Arc<Item>) -> (SystemEventId, String, u64) {
    let ItemKind::SystemEvent { id, version, .. } = item.kind else { panic!("a document") };
    let (key, value) = (&item.key[..], &item.value[..]);
    let event = SystemEvent { seqno: item.seqno, id, version, key, value };
    let payload = event.payload().unwrap().unwrap();
    (id, String::from_utf8(item.key.to_vec()).unwrap(), payload.manifest_uid.0)
}

fn event(id: SystemEventId, name: &str, uid: u64) -> (SystemEventId, String, u64) {
    (id, name.to_owned(), uid)
}

#[test]
fn co_41_only_the_last_of_several_events_carries_the_new_manifests_uid() {
    let (bucket, mut manifest) = (one_vbucket(), Manifest::default());
    manifest.create_scope("shop").unwrap();
    manifest.create_collection("shop", "carts", plain()).unwrap();
    manifest.create_collection("shop", "items", plain()).unwrap();
    let expected = [
        event(SystemEventId::CREATE_SCOPE, "shop", 0),
        event(SystemEventId::BEGIN_COLLECTION, "carts", 0),
        event(SystemEventId::BEGIN_COLLECTION, "items", 3),
    ];
    assert_eq!(follow(&bucket, &manifest), expected);
    assert_eq!(follow(&bucket, &manifest), [], "it is there already");
}

#[test]
fn co_42_drops_come_before_creations() {
    let (bucket, mut manifest) = (one_vbucket(), Manifest::default());
    manifest.create_collection("_default", "old", plain()).unwrap();
    follow(&bucket, &manifest);
    manifest.create_collection("_default", "new", plain()).unwrap();
    manifest.drop_collection("_default", "old").unwrap();
    let expected = [
        event(SystemEventId::END_COLLECTION, "", 1),
        event(SystemEventId::BEGIN_COLLECTION, "new", 3),
    ];
    assert_eq!(follow(&bucket, &manifest), expected);
}

#[test]
fn co_43_scope_is_dropped_after_its_collections_and_everything_else() {
    let (bucket, mut manifest) = (one_vbucket(), Manifest::default());
    manifest.create_scope("shop").unwrap();
    for name in ["carts", "items"] {
        manifest.create_collection("shop", name, plain()).unwrap();
        manifest.create_collection("_default", name, plain()).unwrap();
    }
    follow(&bucket, &manifest);
    manifest.drop_scope("shop").unwrap();
    manifest.flush_collection("_default", "carts").unwrap();
    let short_lived = CollectionSettings { max_ttl: Some(60), history: true };
    manifest.modify_collection("_default", "items", short_lived).unwrap();
    manifest.create_scope("stock").unwrap();
    manifest.create_collection("stock", "parts", plain()).unwrap();
    let expected = [
        event(SystemEventId::END_COLLECTION, "", 5),
        event(SystemEventId::END_COLLECTION, "", 5),
        event(SystemEventId::CREATE_SCOPE, "stock", 5),
        event(SystemEventId::BEGIN_COLLECTION, "parts", 5),
        event(SystemEventId::MODIFY_COLLECTION, "items", 5),
        event(SystemEventId::BEGIN_COLLECTION, "carts", 5),
        event(SystemEventId::DROP_SCOPE, "", 10),
    ];
    assert_eq!(follow(&bucket, &manifest), expected);
}

#[test]
fn co_42_before_8_0_settings_do_not_count_and_events_of_collections_begin_checkpoints() {
    const OLDER: ServerVersion = ServerVersion { major: 7, minor: 6, patch: 11 };
    let (bucket, mut manifest) = (one_vbucket(), Manifest::default());
    manifest.create_scope("shop").unwrap();
    for name in ["big", "veg"] {
        manifest.create_collection("shop", name, plain()).unwrap();
    }
    for name in ["fruit", "meat"] {
        manifest.create_collection("_default", name, plain()).unwrap();
    }
    follow(&bucket, &manifest);
    manifest.drop_collection("_default", "fruit").unwrap();
    let short_lived = CollectionSettings { max_ttl: Some(60), history: true };
    manifest.modify_collection("_default", "meat", short_lived).unwrap();
    let expected = [
        vec![event(SystemEventId::END_COLLECTION, "", 7)],
        vec![event(SystemEventId::MODIFY_COLLECTION, "meat", 7)],
    ];
    assert_eq!(follow_as(&bucket, &manifest, OLDER), expected);
    manifest.drop_scope("shop").unwrap();
    let drop = |uid| event(SystemEventId::END_COLLECTION, "", uid);
    let expected = [vec![drop(7)], vec![drop(7), event(SystemEventId::DROP_SCOPE, "", 8)]];
    assert_eq!(follow_as(&bucket, &manifest, OLDER), expected);
    manifest.create_scope("stock").unwrap();
    let expected = [vec![event(SystemEventId::CREATE_SCOPE, "stock", 9)]];
    assert_eq!(follow_as(&bucket, &manifest, OLDER), expected);
}

/// A prepared write goes with its collection: those after it do not wait for it.
#[test]
fn durable_write_of_a_dropped_or_flushed_collection_is_aborted() {
    for is_flush in [false, true] {
        let (bucket, mut manifest) = (one_vbucket(), Manifest::default());
        let id = manifest.create_collection("_default", "carts", plain()).unwrap();
        follow(&bucket, &manifest);
        let durability = Durability { level: DurabilityLevel::MAJORITY, deadline: None };
        let prepare = |collection_id| {
            let write = DocumentWrite {
                key: DocKey { collection_id, key: b"key" },
                value: Bytes::from_static(b"v"),
                datatype: Datatype::RAW,
                flags: 0,
                expiry: 0,
                cas: Cas(0),
                condition: Condition::Any,
                durability: Some(durability),
            };
            bucket.with(VB, |vbucket| vbucket.store(Now(1), write)).unwrap().unwrap().seqno
        };
        let gone = prepare(id);
        if is_flush {
            manifest.flush_collection("_default", "carts").unwrap();
        } else {
            manifest.drop_collection("_default", "carts").unwrap();
        }
        follow(&bucket, &manifest);
        let kept = prepare(CollectionId::DEFAULT);
        assert!(bucket.with(VB, |vbucket| vbucket.complete_next(true)).unwrap());
        let outcomes = bucket.with(VB, |vbucket| [gone, kept].map(|seqno| vbucket.outcome(seqno)));
        assert_eq!(outcomes.unwrap(), [Outcome::Ambiguous, Outcome::Committed]);
    }
}

fn set(bucket: &Bucket, collection: CollectionId, key: &[u8]) -> u32 {
    let write = DocumentWrite {
        key: DocKey { collection_id: collection, key },
        value: Bytes::from_static(b"v"),
        datatype: Datatype::RAW,
        flags: 0,
        expiry: 0,
        cas: Cas(0),
        condition: Condition::Any,
        durability: None,
    };
    let stored = |vbucket: &mut VBucket| {
        vbucket.store(Now(1), write).unwrap();
        vbucket.live(Now(1), DocKey { collection_id: collection, key }).unwrap().expiry
    };
    bucket.with(VB, stored).unwrap()
}

/// Seqnos on disk.
fn persisted(bucket: &Bucket) -> Vec<u64> {
    bucket.with(VB, VBucket::persist_and_evict).unwrap();
    let vbucket = bucket.lock(VB).unwrap();
    vbucket.open_backfill(Seqno(0)).items.map(|item| item.unwrap().seqno.0).collect()
}

#[test]
fn collection_that_was_modified_keeps_its_creation_through_a_crash() {
    let (bucket, mut manifest) = (one_vbucket(), Manifest::default());
    let carts = manifest.create_collection("_default", "carts", plain()).unwrap();
    follow(&bucket, &manifest);
    assert_eq!(set(&bucket, carts, b"old"), 0);
    let settings = CollectionSettings { max_ttl: Some(60), history: false };
    manifest.modify_collection("_default", "carts", settings).unwrap();
    follow(&bucket, &manifest);
    assert_eq!(set(&bucket, carts, b"new"), 60);
    assert_eq!(persisted(&bucket), [1, 2, 3, 4]);
    bucket.rearrange(VB, |copies| {
        copies.stop(0);
        copies.come_back(0, false, Chance::default().vbuuid());
    });
    assert_eq!(set(&bucket, carts, b"newer"), 60);
    assert_eq!(follow(&bucket, &manifest), []);
    manifest.drop_collection("_default", "carts").unwrap();
    follow(&bucket, &manifest);
    assert_eq!(persisted(&bucket), [6], "nothing is left but that it was dropped");
}

#[test]
fn collection_that_was_flushed_has_what_was_written_since_and_no_more() {
    for persists_first in [true, false] {
        let (bucket, mut manifest) = (one_vbucket(), Manifest::default());
        let carts = manifest.create_collection("_default", "carts", plain()).unwrap();
        follow(&bucket, &manifest);
        set(&bucket, carts, b"old");
        set(&bucket, CollectionId::DEFAULT, b"other");
        if persists_first {
            persisted(&bucket);
        }
        manifest.flush_collection("_default", "carts").unwrap();
        let flushed = event(SystemEventId::BEGIN_COLLECTION, "carts", 2);
        assert_eq!(follow(&bucket, &manifest), [flushed]);
        assert_eq!(follow(&bucket, &manifest), [], "once is enough");
        set(&bucket, carts, b"new");
        assert_eq!(persisted(&bucket), [3, 4, 5]);
        let old = DocKey { collection_id: carts, key: b"old" };
        assert!(bucket.with(VB, |vbucket| vbucket.live(Now(1), old)).unwrap().is_none());
    }
}

#[test]
fn collection_statistics_of_a_copy_count_what_was_purged_elsewhere() {
    let (bucket, mut manifest) = (one_vbucket(), Manifest::default());
    let carts = manifest.create_collection("_default", "carts", plain()).unwrap();
    follow(&bucket, &manifest);
    set(&bucket, carts, b"gone");
    set(&bucket, carts, b"kept");
    let gone = DocKey { collection_id: carts, key: b"gone" };
    let purge = |vbucket: &mut VBucket| {
        vbucket.remove(Now(2), gone, Cas(0), ItemKind::Deletion, None).unwrap();
        vbucket.persist();
    };
    bucket.with(VB, purge).unwrap();
    set(&bucket, CollectionId::DEFAULT, b"the last one");
    bucket.with(VB, |vbucket| vbucket.purge(Seqno(4))).unwrap();
    // The copy is made of what is on disk: the event of the collection comes after the purge.
    bucket.rearrange(VB, |copies| copies.add_replica(bucket.new_copy(1, VB))).unwrap();
    for node in 0..2 {
        let copy = bucket.lock_on(node, VB).unwrap();
        assert_eq!(copy.purge_seqno, Seqno(4), "node {node}");
        assert_eq!(copy.collection_high_seqno(carts), Some(Seqno(4)), "node {node}");
    }
}
