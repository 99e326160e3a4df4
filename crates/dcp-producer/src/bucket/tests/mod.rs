mod flush;
mod manifest;
mod replica;

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use dcp_producer_proto::{Item, ItemKind, MemoryRead, VBucketSource};
use dcp_wire::message::DurabilityLevel;
use dcp_wire::{Cas, CollectionId, Datatype, DocKey, RevSeqno};
use proptest::prelude::*;

use crate::bucket::item::footprint;
use crate::bucket::*;
use crate::chance::Now;

const VB: Vbid = Vbid(0);

/// A document with no value.
pub(super) fn item(seqno: u64) -> Item {
    Item {
        kind: ItemKind::Mutation,
        seqno: Seqno(seqno),
        rev_seqno: RevSeqno(1),
        cas: Cas(1),
        collection_id: CollectionId::DEFAULT,
        key: Bytes::from(format!("k{seqno}")),
        value: Bytes::new(),
        datatype: Datatype::RAW,
        flags: 0,
        expiry: 0,
        delete_time: 0,
    }
}

/// A key in the default collection.
const fn default_key(key: &[u8]) -> DocKey<'_> {
    DocKey { collection_id: CollectionId::DEFAULT, key }
}

fn write<'a>(key: &'a [u8], value: &'static [u8]) -> DocumentWrite<'a> {
    DocumentWrite {
        key: default_key(key),
        value: Bytes::from_static(value),
        datatype: Datatype::RAW,
        flags: 0,
        expiry: 0,
        cas: Cas(0),
        condition: Condition::Any,
        durability: None,
    }
}

fn one_vbucket() -> Bucket {
    let bucket = Bucket::new(1, 1 << 30, 1 << 20);
    bucket.rearrange(VB, |copies| copies.set_active(bucket.new_copy(0, VB))).unwrap();
    bucket
}

fn set(bucket: &Bucket, key: &[u8]) {
    bucket.with(VB, |vbucket| vbucket.store(Now(1), write(key, b"v")).unwrap()).unwrap();
}

fn seqnos(read: MemoryRead) -> Option<(u64, bool, Vec<u64>)> {
    match read {
        MemoryRead::Items { checkpoint_start, begins_checkpoint, items, .. } => {
            let seqnos = items.iter().map(|item| item.seqno.0).collect();
            Some((checkpoint_start.0, begins_checkpoint, seqnos))
        }
        MemoryRead::UpToDate | MemoryRead::NeedsBackfill => None,
    }
}

#[test]
fn checkpoint_that_is_open_holds_the_newest_version_of_each_key() {
    let bucket = one_vbucket();
    for key in [b"a", b"b", b"a", b"c"] {
        set(&bucket, key);
    }
    let vbucket = bucket.lock(VB).unwrap();
    assert_eq!(seqnos(vbucket.read_memory(Seqno(0))), Some((0, true, vec![2, 3, 4])));
    assert_eq!(seqnos(vbucket.read_memory(Seqno(3))), Some((0, false, vec![4])));
    assert_eq!(vbucket.read_memory(Seqno(4)), MemoryRead::UpToDate);
}

#[test]
fn checkpoint_that_is_closed_keeps_versions_that_are_replaced_later() {
    let bucket = one_vbucket();
    set(&bucket, b"a");
    bucket.with(VB, |vbucket| vbucket.checkpoints.close_open()).unwrap();
    set(&bucket, b"a");
    let vbucket = bucket.lock(VB).unwrap();
    assert_eq!(seqnos(vbucket.read_memory(Seqno(0))), Some((0, true, vec![1])));
    assert_eq!(seqnos(vbucket.read_memory(Seqno(1))), Some((2, true, vec![2])));
}

#[test]
fn checkpoints_that_are_persisted_leave_memory_and_open_images_unchanged() {
    let bucket = one_vbucket();
    for key in [b"a", b"b"] {
        set(&bucket, key);
    }
    bucket.with(VB, VBucket::persist_and_evict);
    let image = {
        let vbucket = bucket.lock(VB).unwrap();
        assert_eq!(vbucket.read_memory(Seqno(0)), MemoryRead::NeedsBackfill);
        assert_eq!(vbucket.read_memory(Seqno(2)), MemoryRead::UpToDate);
        vbucket.open_backfill(Seqno(0))
    };
    set(&bucket, b"a");
    bucket.with(VB, VBucket::persist_and_evict);
    assert_eq!(image.end_seqno, Seqno(2));
    let seen: Vec<u64> = image.items.map(|item| item.unwrap().seqno.0).collect();
    assert_eq!(seen, [1, 2]);
    let vbucket = bucket.lock(VB).unwrap();
    let seen: Vec<u64> =
        vbucket.open_backfill(Seqno(0)).items.map(|item| item.unwrap().seqno.0).collect();
    assert_eq!(seen, [2, 3]);
}

/// Replicas learn from it what their clients may see.
#[test]
fn aborts_and_prepares_from_before_a_restart_are_not_visible() {
    type Restart = fn(&mut VBucket);
    let restarts: [Restart; 4] = [
        |vbucket| vbucket.stop_cleanly(dcp_wire::Vbuuid(9)),
        |vbucket| vbucket.recover(dcp_wire::Vbuuid(9)),
        VBucket::persist_and_evict,
        |vbucket| {
            vbucket.purge(Seqno::MAX);
            assert_eq!(vbucket.purge_seqno, Seqno(2), "the last visible change is gone");
            vbucket.stop_cleanly(dcp_wire::Vbuuid(9));
        },
    ];
    for restart in restarts {
        let bucket = one_vbucket();
        set(&bucket, b"a");
        let durability = Some(Durability { level: DurabilityLevel::MAJORITY, deadline: None });
        let prepare = |vbucket: &mut VBucket| {
            vbucket.store(Now(1), DocumentWrite { durability, ..write(b"b", b"v") }).unwrap();
        };
        bucket.with(VB, |vbucket| {
            vbucket.remove(Now(1), default_key(b"a"), Cas(0), ItemKind::Deletion, None).unwrap();
            prepare(vbucket);
            vbucket.complete_next(false);
            vbucket.persist();
            restart(vbucket);
            prepare(vbucket);
        });
        let vbucket = bucket.lock(VB).unwrap();
        assert_eq!(vbucket.open_backfill(Seqno(0)).durable.max_visible, Seqno(2), "on disk");
        let MemoryRead::Items { max_visible_seqno, .. } = vbucket.read_memory(Seqno(4)) else {
            panic!("the last prepare is in memory");
        };
        assert_eq!(max_visible_seqno, Seqno(2), "in memory");
    }
}

#[test]
fn tombstone_that_was_purged_counts_for_its_collection_after_a_crash() {
    let bucket = one_vbucket();
    set(&bucket, b"a");
    bucket
        .with(VB, |vbucket| {
            vbucket.remove(Now(2), default_key(b"a"), Cas(0), ItemKind::Deletion, None).unwrap();
            // The last change is never purged: one of another collection follows.
            vbucket.append(Item { collection_id: CollectionId(8), ..item(3) });
            vbucket.purge(Seqno(3));
            vbucket.recover(dcp_wire::Vbuuid(9));
        })
        .unwrap();
    let vbucket = bucket.lock(VB).unwrap();
    assert_eq!((vbucket.high_seqno, vbucket.purge_seqno), (Seqno(3), Seqno(2)));
    assert_eq!(vbucket.collection_high_seqno(CollectionId::DEFAULT), Some(Seqno(2)));
}

#[test]
fn purge_never_takes_the_last_change() {
    let bucket = one_vbucket();
    set(&bucket, b"a");
    set(&bucket, b"b");
    bucket
        .with(VB, |vbucket| {
            for key in [b"a", b"b"] {
                vbucket.remove(Now(2), default_key(key), Cas(0), ItemKind::Deletion, None).unwrap();
            }
            vbucket.purge(Seqno::MAX);
            assert_eq!((vbucket.purge_seqno, vbucket.high_seqno), (Seqno(3), Seqno(4)));
            let kept = vbucket.disk.items_above(Seqno::ZERO).map(|item| item.seqno.0);
            assert_eq!(kept.collect::<Vec<_>>(), [4]);
            let rev = |vbucket: &VBucket| vbucket.newest(default_key(b"a")).unwrap().rev_seqno;
            vbucket.store(Now(3), write(b"a", b"again")).unwrap();
            assert_eq!(rev(vbucket), RevSeqno(3), "revs go on above what was purged");
        })
        .unwrap();
}

#[test]
fn rev_seqnos_continue_above_deletions_without_xattrs() {
    let bucket = one_vbucket();
    let rev = |key: &[u8]| {
        bucket.with(VB, |vbucket| vbucket.newest(default_key(key)).unwrap().rev_seqno).unwrap()
    };
    let xattrs = || Bytes::from_static(b"\0\0\0\x0a\0\0\0\x06_a\x001\0");
    for _ in 0..4 {
        bucket
            .with(VB, |vbucket| {
                vbucket.store_tombstone(Now(2), default_key(b"marked"), xattrs(), None).unwrap();
            })
            .unwrap();
    }
    assert_eq!(rev(b"marked"), RevSeqno(4));
    set(&bucket, b"a");
    assert_eq!(rev(b"a"), RevSeqno(1), "what is left has a value");
    bucket
        .with(VB, |vbucket| {
            vbucket.remove(Now(2), default_key(b"a"), Cas(0), ItemKind::Deletion, None).unwrap();
        })
        .unwrap();
    set(&bucket, b"b");
    assert_eq!(rev(b"b"), RevSeqno(3), "one above the deletion of a");
}

#[test]
fn history_tells_each_seqno_once_while_an_overwrite_is_not_on_disk() {
    let bucket = Bucket::new(1, 1 << 30, 1 << 20).with_history();
    bucket.rearrange(VB, |copies| copies.set_active(bucket.new_copy(0, VB))).unwrap();
    let told = || {
        let vbucket = bucket.lock(VB).unwrap();
        let items = vbucket.open_history(Seqno::ZERO).items;
        items.map(|item| item.unwrap().seqno.0).collect::<Vec<_>>()
    };
    set(&bucket, b"a");
    set(&bucket, b"b");
    bucket.with(VB, VBucket::persist).unwrap();
    set(&bucket, b"a");
    assert_eq!(told(), [1, 2]);
    set(&bucket, b"a");
    assert_eq!(told(), [1, 2]);
    bucket.with(VB, VBucket::persist).unwrap();
    assert_eq!(told(), [1, 2, 3, 4]);
}

/// What can happen to a vBucket.
#[derive(Clone, Copy, Debug)]
enum Step {
    Set(u8),
    Remove(u8),
    Persist,
    Evict,
    CloseCheckpoint,
    /// To this many percent of the high seqno.
    RollBack(u64),
    Purge(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        8 => (0u8..12).prop_map(Step::Set),
        4 => (0u8..12).prop_map(Step::Remove),
        2 => Just(Step::Persist),
        1 => Just(Step::Evict),
        1 => Just(Step::CloseCheckpoint),
        1 => (0u64..=100).prop_map(Step::RollBack),
        1 => (0u64..=100).prop_map(Step::Purge),
    ];
    prop::collection::vec(step, 1..120)
}

/// A reader of the vBucket's changes: what it knows, and up to where.
#[derive(Clone, Debug, Default)]
struct Reader {
    after: u64,
    documents: BTreeMap<Bytes, u64>,
}

impl Reader {
    fn take(&mut self, items: impl Iterator<Item = Arc<Item>>) {
        let mut keys = BTreeSet::new();
        for item in items {
            assert!(item.seqno.0 > self.after, "seqnos ascend");
            assert!(keys.insert(item.key.clone()), "a snapshot has each key once");
            self.after = item.seqno.0;
            match item.kind {
                ItemKind::Mutation => self.documents.insert(item.key.clone(), item.seqno.0),
                _ => self.documents.remove(&item.key),
            };
        }
    }

    fn catch_up(&mut self, bucket: &Bucket) {
        loop {
            let vbucket = bucket.lock(VB).unwrap();
            match vbucket.read_memory(Seqno(self.after)) {
                MemoryRead::UpToDate => return,
                MemoryRead::Items { items, .. } => self.take(items.iter().cloned()),
                MemoryRead::NeedsBackfill => {
                    let image = vbucket.open_backfill(Seqno(self.after));
                    assert!(image.end_seqno.0 > self.after, "the disk has what memory lacks");
                    self.take(image.items.map(Result::unwrap));
                    self.after = image.end_seqno.0;
                }
            }
        }
    }
}

/// Every change of the branch: key, and whether the document lived afterwards.
type Log = Vec<(Bytes, bool)>;

fn documents_of(log: &Log) -> BTreeMap<Bytes, u64> {
    let mut documents = BTreeMap::new();
    for ((key, lives), seqno) in log.iter().zip(1u64..) {
        if *lives {
            documents.insert(key.clone(), seqno);
        } else {
            documents.remove(key);
        }
    }
    documents
}

fn apply(bucket: &Bucket, step: Step, log: &mut Log, reader: &mut Reader, floor: &mut u64) {
    let key = |n: u8| Bytes::from(format!("key-{n}"));
    let percent = |share: u64, log: &Log| log.len() as u64 * share / 100;
    match step {
        Step::Set(n) => {
            set(bucket, &key(n));
            log.push((key(n), true));
        }
        Step::Remove(n) => {
            let remove = |vbucket: &mut VBucket| {
                vbucket
                    .remove(Now(1), default_key(&key(n)), Cas(0), ItemKind::Deletion, None)
                    .is_ok()
            };
            let removed = bucket.with(VB, remove).unwrap();
            assert_eq!(removed, documents_of(log).contains_key(&key(n)));
            if removed {
                log.push((key(n), false));
            }
        }
        Step::Persist => drop(bucket.with(VB, VBucket::persist)),
        Step::Evict => bucket.with(VB, VBucket::persist_and_evict).unwrap(),
        Step::CloseCheckpoint => {
            bucket.with(VB, |vbucket| vbucket.checkpoints.close_open()).unwrap();
        }
        Step::RollBack(share) => {
            let to = percent(share, log);
            let allowed = to == 0 || to >= *floor;
            let branches = bucket.lock(VB).unwrap().failover.entries().len();
            assert_eq!(bucket.roll_back(VB, Seqno(to)).unwrap().is_ok(), allowed);
            if allowed {
                log.truncate(usize::try_from(to).unwrap());
                *reader = Reader::default();
                *floor = if to == 0 { 0 } else { *floor };
                let vbucket = bucket.lock(VB).unwrap();
                let newest = vbucket.failover.newest();
                assert_eq!(newest.seqno, Seqno(to));
                assert!(vbucket.failover.entries().len() <= branches + 1);
            }
        }
        Step::Purge(share) => {
            let to = percent(share, log);
            bucket.with(VB, |vbucket| vbucket.purge(Seqno(to))).unwrap();
            // The tombstone at the purge seqno is gone as well.
            let purge_seqno = bucket.lock(VB).unwrap().purge_seqno.0;
            *floor = (purge_seqno + u64::from(purge_seqno != 0)).max(*floor);
        }
    }
}

fn check(bucket: &Bucket, log: &Log) {
    let vbucket = bucket.lock(VB).unwrap();
    let documents = documents_of(log);
    assert_eq!(vbucket.high_seqno.0, log.len() as u64);
    assert_eq!(vbucket.live_counts().documents, documents.len() as u64);
    let used: usize = vbucket.table.iter().map(|slot| footprint(&slot.newest)).sum();
    assert_eq!(bucket.memory().used(), used);
    let high = vbucket.collection_high_seqno(CollectionId::DEFAULT).unwrap();
    assert!(high <= vbucket.high_seqno);
    assert!(vbucket.persisted_seqno <= vbucket.high_seqno);
}

proptest! {
    /// The reader that follows every change and one that starts from nothing agree with the log
    /// of all changes, whatever is in memory, on disk, rolled back or purged.
    #[test]
    fn readers_all_end_up_with_the_documents_of_the_log(steps in steps()) {
        let bucket = one_vbucket();
        let (mut log, mut reader, mut floor) = (Log::new(), Reader::default(), 0);
        for step in steps {
            apply(&bucket, step, &mut log, &mut reader, &mut floor);
            check(&bucket, &log);
            reader.catch_up(&bucket);
            prop_assert_eq!(&reader.documents, &documents_of(&log), "after {:?}", step);
            let mut fresh = Reader::default();
            fresh.catch_up(&bucket);
            prop_assert_eq!(&fresh.documents, &documents_of(&log), "from 0 after {:?}", step);
        }
    }
}

#[test]
fn stream_that_is_slow_keeps_its_place_in_memory_while_there_is_room() {
    use dcp_producer_proto::Cursor;
    // Each vBucket's checkpoints may take its share of a quarter of the quota; three closed ones of
    // 10 000 changes take about 100 KiB each.
    const VBUCKETS: u16 = 1024;
    for (room, is_droppable, is_kept) in [
        (64 << 20, true, true),
        (200 << 10, true, false),
        (1 << 20, false, true),
        (64 << 10, false, false),
    ] {
        let bucket = Bucket::new(VBUCKETS, room * 4 * usize::from(VBUCKETS), 0);
        bucket.rearrange(VB, |copies| copies.set_active(bucket.new_copy(0, VB))).unwrap();
        let cursor = Arc::new(Cursor::new(Seqno(0), is_droppable));
        bucket.lock(VB).unwrap().register_cursor(&cursor);
        for n in 0..30_001u32 {
            set(&bucket, &n.to_be_bytes());
        }
        bucket.with(VB, VBucket::persist).unwrap();
        let read = bucket.lock(VB).unwrap().read_memory(Seqno(0));
        assert_eq!(read != MemoryRead::NeedsBackfill, is_kept, "{room} {is_droppable}");
        drop(cursor);
        set(&bucket, b"more");
        bucket.with(VB, VBucket::persist).unwrap();
        let read = bucket.lock(VB).unwrap().read_memory(Seqno(0));
        assert_eq!(read, MemoryRead::NeedsBackfill, "nobody needs it any more");
    }
}
