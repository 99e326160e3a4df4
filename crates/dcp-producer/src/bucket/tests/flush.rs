use std::collections::BTreeMap;

use dcp_producer_proto::{Item, VBucketSource};
use dcp_wire::Vbuuid;
use proptest::prelude::*;

use super::replica::{NODES, Step, VB, apply, check, check_caught_up, filled, steps};
use crate::bucket::*;

type Items = BTreeMap<Seqno, Item>;

/// Contents of a data folder for a vBucket.
#[derive(Debug, Default)]
struct Folder(Vec<(usize, Items, VBucketRecord)>);

impl Folder {
    /// Stores persisted changes.
    fn store(&mut self, bucket: &Bucket) {
        let mut before: BTreeMap<_, _> =
            self.0.drain(..).map(|(node, items, _)| (node, items)).collect();
        let mut stored = Vec::new();
        for (node, next_flush) in bucket.with_copies(VB, Copies::next_flush).unwrap() {
            let mut items =
                before.remove(&node).filter(|_| !next_flush.is_whole).unwrap_or_default();
            for seqno in &next_flush.gone {
                items.remove(seqno);
            }
            items.extend(next_flush.items.iter().map(|item| (item.seqno, Item::clone(item))));
            stored.push((node, next_flush.then));
            self.0.push((node, items, next_flush.record));
        }
        bucket.note_flushed(VB, &stored);
    }

    fn items(&self, node: usize) -> &Items {
        &self.0.iter().find(|(of, ..)| *of == node).unwrap().1
    }

    /// The bucket that goes on with it.
    fn open(&self) -> Bucket {
        let bucket = bucket();
        let mut copies: Vec<Copy> = Vec::new();
        for (node, items, record) in &self.0 {
            let mut copy = bucket.new_copy(*node, VB);
            if !copies.is_empty() {
                copy.make_replica();
            }
            let items = items.values().cloned().collect();
            copy.vbucket.restore(record, items, bucket.chance().vbuuid()).unwrap();
            copies.push(copy);
        }
        bucket.with_copies(VB, |held| held.restore(copies));
        bucket
    }
}

/// There is room for some ten overwritten versions.
fn bucket() -> Bucket {
    Bucket::new(1, 1 << 30, 3000).with_data_folder()
}

fn on_disk(bucket: &Bucket, node: usize) -> Vec<Item> {
    let copy = bucket.lock_on(node, VB).unwrap();
    copy.disk.items_above(Seqno::ZERO).map(|item| Item::clone(&item)).collect()
}

/// What a copy is after it went back.
fn gone_back(bucket: &Bucket, node: usize, to: Seqno) -> Option<(Vec<Item>, Vec<Seqno>)> {
    let back = |copies: &mut Copies| {
        let index = copies.on(node).unwrap();
        let copy = &mut copies.get_mut(index).unwrap().vbucket;
        copy.rewind(to).ok()?;
        Some(copy.prepared().into_iter().map(|(seqno, _)| seqno).collect())
    };
    let prepared = bucket.with_copies(VB, back).unwrap()?;
    Some((on_disk(bucket, node), prepared))
}

proptest! {
    /// Whenever it is stored, a folder has of each copy what that has persisted, and the way back.
    #[test]
    fn copy_from_the_data_folder_has_what_it_had(
        rounds in prop::collection::vec(steps(), 1..4),
        back in 0u64..20,
    ) {
        let (bucket, mut folder) = (filled(bucket()), Folder::default());
        for steps in rounds {
            steps.into_iter().for_each(|step| apply(&bucket, step));
            folder.store(&bucket);
        }
        // The first round may have committed prepared writes.
        folder.store(&bucket);
        let opened = folder.open();
        for node in 0..NODES {
            let (before, persisted, purged, old) = {
                let copy = bucket.lock_on(node, VB).unwrap();
                let persisted = copy.persisted_seqno;
                let old = copy.history.replaced_above(Seqno::ZERO, persisted);
                (copy.state, persisted, copy.purge_seqno.min(persisted), old)
            };
            let old = old.into_iter().map(|item| Item::clone(&item));
            let kept = old.chain(on_disk(&bucket, node)).map(|item| (item.seqno, item)).collect();
            prop_assert_eq!(folder.items(node), &kept, "nothing is left behind");
            {
                let copy = opened.lock_on(node, VB).unwrap();
                prop_assert_eq!((copy.state, copy.persisted_seqno), (before, persisted));
                prop_assert_eq!(copy.purge_seqno, purged);
                prop_assert_eq!(copy.told_persisted_seqno(), persisted);
                if before == VBucketState::Replica {
                    let snapshot = bucket.lock_on(node, VB).unwrap().persisted_snapshot;
                    prop_assert_eq!(copy.replica_position().snapshot, snapshot);
                }
            }
            prop_assert_eq!(on_disk(&opened, node), on_disk(&bucket, node), "node {}", node);
            let to = Seqno(persisted.0.saturating_sub(back));
            if let Some(expected) = gone_back(&bucket, node, to) {
                prop_assert_eq!(gone_back(&opened, node, to), Some(expected), "node {}", node);
            }
        }
    }

    /// However copies differ when the cluster stops, they are equal once nothing is held back.
    #[test]
    fn copies_from_one_data_folder_go_on_together(before in steps(), late in steps(), after in steps()) {
        let (bucket, mut folder) = (filled(bucket()), Folder::default());
        for step in before {
            apply(&bucket, step);
            folder.store(&bucket);
        }
        late.into_iter().take(10).for_each(|step| apply(&bucket, step));
        let bucket = folder.open();
        bucket.rearrange(VB, Copies::replicate);
        for step in after {
            apply(&bucket, step);
            check(&bucket);
        }
        check_caught_up(&bucket);
    }
}

/// The number of the life of each copy, which is another one after it went back or started over.
fn lives(bucket: &Bucket) -> Vec<u64> {
    (0..NODES).map(|node| bucket.lock_on(node, VB).unwrap().incarnation()).collect()
}

fn prepare_versions(bucket: &Bucket) {
    for step in [Step::Set(0), Step::Set(1), Step::Set(0), Step::Set(1), Step::Persist] {
        apply(bucket, step);
    }
}

#[test]
fn replicas_go_on_from_what_they_have() {
    let (bucket, mut folder) = (filled(bucket()), Folder::default());
    prepare_versions(&bucket);
    apply(&bucket, Step::Hold(2, true));
    apply(&bucket, Step::Set(2));
    apply(&bucket, Step::Persist);
    folder.store(&bucket);
    let opened = folder.open();
    let before = lives(&opened);
    assert_eq!(opened.lock_on(2, VB).unwrap().high_seqno, Seqno(4), "it had persisted no more");
    opened.rearrange(VB, Copies::replicate);
    check_caught_up(&opened);
    assert_eq!(lives(&opened), before, "none went back");
    assert!(before.iter().all(|&life| life != 0));
}

#[test]
fn replica_with_more_than_the_active_copy_goes_back_to_where_they_part() {
    let (bucket, mut folder) = (filled(bucket()), Folder::default());
    prepare_versions(&bucket);
    apply(&bucket, Step::Hold(0, true));
    for step in [Step::Set(0), Step::Set(2), Step::Persist] {
        apply(&bucket, step);
    }
    folder.store(&bucket);
    let opened = folder.open();
    assert_eq!(opened.lock_on(1, VB).unwrap().high_seqno, Seqno(6));
    opened.rearrange(VB, Copies::replicate);
    check_caught_up(&opened);
    let replica = opened.lock_on(1, VB).unwrap();
    assert_eq!(replica.high_seqno, Seqno(4));
    assert!(replica.history_bytes() > 0, "it did not start over");
    let branches: Vec<_> = replica.failover.entries().iter().map(|entry| entry.seqno.0).collect();
    assert_eq!(branches, [4, 0]);
}

/// A version that there is no room for is still the newest one on disk.
#[test]
fn version_that_was_overwritten_stays_until_its_successor_is_stored() {
    let (bucket, mut folder) =
        (filled(Bucket::new(1, 1 << 30, 0).with_data_folder()), Folder::default());
    apply(&bucket, Step::Set(0));
    apply(&bucket, Step::Persist);
    folder.store(&bucket);
    apply(&bucket, Step::Set(0));
    folder.store(&bucket);
    assert_eq!(on_disk(&folder.open(), 0).len(), 1);
    assert_eq!(folder.items(0).keys().collect::<Vec<_>>(), [&Seqno(1)]);
    apply(&bucket, Step::Persist);
    folder.store(&bucket);
    assert_eq!(folder.items(0).keys().collect::<Vec<_>>(), [&Seqno(2)]);
}

/// A replica may learn of a purge from a marker, and have no tombstone of its own to purge by then.
#[test]
fn versions_that_a_purge_forgets_leave_the_folder() {
    let (bucket, mut folder) = (filled(bucket()), Folder::default());
    let play = |steps: &[Step]| steps.iter().for_each(|&step| apply(&bucket, step));
    play(&[Step::Hold(1, true), Step::Set(0), Step::Set(0), Step::Set(1), Step::Remove(1)]);
    play(&[Step::Set(2), Step::Purge]);
    // The marker is one of a snapshot from disk.
    play(&[Step::Lag(1, 3), Step::Set(1), Step::Set(2), Step::Cut(1), Step::Purge]);
    play(&[Step::Lag(1, 0), Step::Hold(1, false), Step::Persist]);
    folder.store(&bucket);
    assert!(folder.items(1).contains_key(&Seqno(1)));
    play(&[Step::Purge]);
    folder.store(&bucket);
    assert!(!folder.items(1).contains_key(&Seqno(1)));
}

/// Durable writes were completed where they were, also if nothing is left of what completed them.
#[test]
fn durable_write_is_not_begun_again_by_a_rollback() {
    use Step::{Complete, Persist, Prepare, Purge, Remove, Set};
    let (bucket, mut folder) = (filled(bucket()), Folder::default());
    for step in [Prepare(0), Complete(true), Remove(0), Set(1), Purge] {
        apply(&bucket, step);
    }
    for step in [Prepare(2), Complete(false), Set(1), Persist] {
        apply(&bucket, step);
    }
    folder.store(&bucket);
    let opened = folder.open();
    let (to, before) = (Seqno(6), Seqno(4));
    let (_, prepared) = gone_back(&opened, 0, to).unwrap();
    assert_eq!(prepared, []);
    assert_eq!(opened.lock_on(0, VB).unwrap().durable.high_completed(to), Seqno(5));
    let (_, prepared) = gone_back(&opened, 0, before).unwrap();
    assert_eq!(prepared, []);
}

/// Whatever a folder says, opening it ends.
#[test]
fn stored_numbers_that_no_copy_can_have_are_refused() {
    let (bucket, mut folder) = (filled(bucket()), Folder::default());
    prepare_versions(&bucket);
    folder.store(&bucket);
    let (_, items, record) = folder.0.remove(0);
    let restored = |change: &dyn Fn(&mut serde_json::Value), items: Vec<Item>| {
        let mut changed = serde_json::to_value(&record).unwrap();
        change(&mut changed);
        let changed: VBucketRecord = serde_json::from_value(changed).unwrap();
        bucket.new_copy(0, VB).vbucket.restore(&changed, items, Vbuuid(1))
    };
    let items: Vec<_> = items.into_values().collect();
    restored(&|_| {}, items.clone()).unwrap();
    for (field, value) in [
        ("persisted_seqno", u64::MAX.into()),
        ("snapshot", serde_json::json!([5, 4])),
        ("snapshot", serde_json::json!([0, u64::MAX])),
        ("floor", 5.into()),
        ("purge_seqno", 5.into()),
        // Then there are items above it.
        ("persisted_seqno", 3.into()),
    ] {
        restored(&|record| record[field] = value.clone(), items.clone()).unwrap_err();
    }
    let backwards = items.into_iter().rev().collect();
    restored(&|_| {}, backwards).unwrap_err();
}
