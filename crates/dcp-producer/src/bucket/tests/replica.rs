use std::collections::BTreeMap;

use bytes::Bytes;
use dcp_producer_proto::{Item, ItemKind, MemoryRead, VBucketState};
use dcp_wire::message::{DurabilityLevel, SnapshotFlags, SnapshotMarker};
use dcp_wire::{Cas, CollectionId, Datatype, DocKey, RevSeqno};
use proptest::prelude::*;

use crate::bucket::item::footprint;
use crate::bucket::*;
use crate::chance::Now;

pub(super) const VB: Vbid = Vbid(0);
pub(super) const NODES: usize = 3;

/// What can happen to the copies of a vBucket on three nodes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Set(u8),
    Remove(u8),
    /// A durable write begins.
    Prepare(u8),
    /// The one that is next is committed, or aborted.
    Complete(bool),
    Persist,
    Hold(usize, bool),
    /// The replica leaves this many changes unapplied; 3 for all.
    Lag(usize, u64),
    /// The connection to the replica is cut: what was on its way is lost.
    Cut(usize),
    CloseCheckpoint,
    /// The active copy's node crashes and comes back.
    Crash,
    /// A replica's does.
    CrashReplica(usize),
    CleanRestart,
    /// The active copy's node leaves; a new copy takes its place.
    Failover(bool),
    HandOver(usize),
    Purge,
    RollBack,
}

pub(super) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        10 => (0u8..8).prop_map(Step::Set),
        4 => (0u8..8).prop_map(Step::Remove),
        3 => (0u8..8).prop_map(Step::Prepare),
        3 => any::<bool>().prop_map(Step::Complete),
        2 => Just(Step::Persist),
        2 => (0..NODES, any::<bool>()).prop_map(|(copy, hold)| Step::Hold(copy, hold)),
        3 => (1..NODES, 0u64..=3).prop_map(|(copy, lag)| Step::Lag(copy, lag)),
        2 => (1..NODES).prop_map(Step::Cut),
        1 => Just(Step::CloseCheckpoint),
        1 => Just(Step::Crash),
        1 => (1..NODES).prop_map(Step::CrashReplica),
        1 => Just(Step::CleanRestart),
        2 => any::<bool>().prop_map(Step::Failover),
        1 => (0..NODES).prop_map(Step::HandOver),
        1 => Just(Step::Purge),
        1 => Just(Step::RollBack),
    ];
    prop::collection::vec(step, 1..100)
}

fn three_copies() -> Bucket {
    filled(Bucket::new(1, 1 << 30, 1 << 20))
}

/// A bucket with a copy on each node.
pub(super) fn filled(bucket: Bucket) -> Bucket {
    bucket.rearrange(VB, |copies| {
        copies.set_active(bucket.new_copy(0, VB));
        (1..NODES).for_each(|node| copies.add_replica(bucket.new_copy(node, VB)));
    });
    bucket
}

/// A takeover may fail once: a replica that lacks the prepare of a committed write starts over.
pub(super) fn apply(bucket: &Bucket, step: Step) {
    let key = |n: u8| [b'k', n];
    let now = Now(1);
    let nodes = bucket.chains().remove(0);
    let copies = |op: &dyn Fn(&mut Copies)| bucket.rearrange(VB, op).unwrap();
    match step {
        Step::Set(n) => _ = store(bucket, &key(n), None),
        Step::Prepare(n) => {
            let durability = Durability { level: DurabilityLevel::MAJORITY, deadline: None };
            store(bucket, &key(n), Some(durability));
        }
        Step::Complete(commit) => _ = bucket.with(VB, |vbucket| vbucket.complete_next(commit)),
        Step::Remove(n) => {
            let key = &key(n);
            let key = DocKey { collection_id: CollectionId::DEFAULT, key };
            let remove = |vbucket: &mut VBucket| {
                vbucket.remove(now, key, Cas(0), ItemKind::Deletion, None).is_ok()
            };
            bucket.with(VB, remove).unwrap();
        }
        Step::Persist => _ = bucket.each_copy(VB, VBucket::persist),
        Step::Hold(copy, hold) => copies(&|copies| {
            copies.get_mut(copy).unwrap().vbucket.hold_persistence(hold);
        }),
        Step::Lag(copy, lag) => copies(&|copies| {
            copies.get_mut(copy).unwrap().lag = if lag == 3 { UNLIMITED_LAG } else { lag };
            copies.replicate();
        }),
        Step::Cut(copy) => copies(&|copies| copies.get_mut(copy).unwrap().link = None),
        Step::CloseCheckpoint => copies(&|copies| {
            copies.get_mut(0).unwrap().vbucket.checkpoints.close_open();
        }),
        Step::Crash => copies(&|copies| crash(copies, nodes[0], false)),
        Step::CrashReplica(copy) => copies(&|copies| crash(copies, nodes[copy], false)),
        Step::CleanRestart => copies(&|copies| crash(copies, nodes[0], true)),
        Step::Failover(graceful) => copies(&|copies| {
            if graceful {
                let hand_over = |copies: &mut Copies| copies.hand_over_from(nodes[0]);
                hand_over(copies).or_else(|_| hand_over(copies)).unwrap();
            }
            copies.leave(nodes[0], Chance::default().vbuuid());
            copies.add_replica(bucket.new_copy(nodes[0], VB));
        }),
        Step::HandOver(node) => copies(&|copies| {
            let handed_over = copies.hand_over(node).or_else(|_| copies.hand_over(node));
            assert!(handed_over.unwrap());
        }),
        Step::Purge => {
            let purge = |vbucket: &mut VBucket| {
                vbucket.purge(Seqno::MAX);
                true
            };
            bucket.each_copy(VB, purge);
        }
        Step::RollBack => {
            let to = bucket.lock(VB).unwrap().high_seqno.0 / 2;
            // Refused where overwritten documents are no longer kept.
            drop(bucket.roll_back(VB, Seqno(to)).unwrap());
        }
    }
}

/// Refused while another durable write of the document goes on.
fn store(bucket: &Bucket, key: &[u8], durability: Option<Durability>) -> Option<Written> {
    let write = DocumentWrite {
        key: DocKey { collection_id: CollectionId::DEFAULT, key },
        value: Bytes::from_static(b"v"),
        datatype: Datatype::RAW,
        flags: 0,
        expiry: 0,
        cas: Cas(0),
        condition: Condition::Any,
        durability,
    };
    bucket.with(VB, |vbucket| vbucket.store(Now(1), write).ok()).unwrap()
}

fn crash(copies: &mut Copies, node: usize, cleanly: bool) {
    copies.stop(node);
    copies.come_back(node, cleanly, Chance::default().vbuuid());
}

/// Live documents of a copy, with their seqnos.
fn documents(vbucket: &VBucket) -> BTreeMap<Bytes, u64> {
    let live = |item: &&Arc<Item>| item.kind == ItemKind::Mutation;
    let items = vbucket.table.iter().map(|slot| &slot.newest).filter(live);
    items.map(|item| (item.key.clone(), item.seqno.0)).collect()
}

pub(super) fn check(bucket: &Bucket) {
    let active = bucket.lock(VB).unwrap();
    assert_eq!(active.state, VBucketState::Active);
    assert!(active.failover.newest().seqno <= active.high_seqno);
    let bytes: usize = active.table.iter().map(|slot| footprint(&slot.newest)).sum();
    assert_eq!(bucket.memory().used(), bytes, "the quota is for the active copy");
    drop(active);
    for node in 0..NODES {
        let copy = bucket.lock_on(node, VB).unwrap();
        assert!(copy.persisted_seqno <= copy.high_seqno);
        let highest = copy.table.iter().map(|slot| slot.newest.seqno).max().unwrap_or_default();
        assert!(highest <= copy.high_seqno);
    }
}

/// Once nothing is held back all copies are the same.
pub(super) fn check_caught_up(bucket: &Bucket) {
    let release = |copies: &mut Copies| {
        (0..NODES).for_each(|copy| copies.get_mut(copy).unwrap().lag = 0);
        copies.replicate();
    };
    bucket.rearrange(VB, release).unwrap();
    let (high, log, expected, prepared) = {
        let active = bucket.lock(VB).unwrap();
        (active.high_seqno, active.failover.clone(), documents(&active), active.prepared())
    };
    for node in 0..NODES {
        let copy = bucket.lock_on(node, VB).unwrap();
        assert_eq!(copy.high_seqno, high, "node {node}");
        assert_eq!(&copy.failover, &log, "node {node}");
        assert_eq!(documents(&copy), expected, "node {node}");
        assert_eq!(copy.prepared(), prepared, "node {node}");
    }
}

proptest! {
    /// However copies lag, crash, lead and follow: once nothing is held back they are the same.
    #[test]
    fn replicas_that_may_catch_up_are_copies_of_the_active_one(steps in steps()) {
        let bucket = three_copies();
        for step in steps {
            apply(&bucket, step);
            check(&bucket);
        }
        check_caught_up(&bucket);
    }

    /// A client that followed a replica to its end is never told that it may go on from a point
    /// that the new active copy's history does not have.
    #[test]
    fn replica_that_is_promoted_keeps_what_its_branch_says_it_shares(
        first in 1u64..10,
        lost in 0u64..10,
        lag in 0u64..10,
    ) {
        let bucket = three_copies();
        (0..first).for_each(|n| apply(&bucket, Step::Set(n as u8)));
        bucket.rearrange(VB, |copies| (1..NODES).for_each(|n| copies.get_mut(n).unwrap().lag = lag));
        (0..lost).for_each(|n| apply(&bucket, Step::Set((first + n) as u8)));
        let before = bucket.lock(VB).unwrap().vbuuid();
        bucket.rearrange(VB, |copies| copies.leave(0, Chance::default().vbuuid()));
        let active = bucket.lock(VB).unwrap();
        let kept = (first + lost).saturating_sub(lag).max(first);
        prop_assert_eq!(active.high_seqno, Seqno(kept));
        prop_assert_eq!(active.failover.upper_bound(before, active.high_seqno), Some(Seqno(kept)));
    }
}

/// A replica that catches up gets the newest versions only. Where it is promoted half way, it lacks
/// what others have at that seqno, so they must go back to where it stood before.
#[test]
fn replica_promoted_inside_a_deduplicated_snapshot_shares_nothing_of_it() {
    use Step::{CrashReplica, Failover, Lag, Set};
    let bucket = three_copies();
    apply(&bucket, Set(0));
    apply(&bucket, Lag(2, 1));
    apply(&bucket, Failover(false));
    // The other replica has less, so it is not promoted.
    apply(&bucket, Lag(2, 3));
    for step in [Set(5), Set(0), Set(5), CrashReplica(1)] {
        apply(&bucket, step);
    }
    let before = bucket.lock(VB).unwrap().vbuuid();
    apply(&bucket, Failover(false));
    let active = bucket.lock(VB).unwrap();
    let expected = BTreeMap::from([(Bytes::from_static(b"k\0"), 3)]);
    assert_eq!((active.high_seqno, documents(&active)), (Seqno(3), expected.clone()));
    assert_eq!(active.failover.upper_bound(before, active.high_seqno), Some(Seqno(1)));
    drop(active);
    apply(&bucket, Lag(1, 0));
    for node in 0..NODES {
        assert_eq!(documents(&bucket.lock_on(node, VB).unwrap()), expected, "node {node}");
    }
}

/// A snapshot from disk does not contain the abort of a write whose document is prepared again.
#[test]
fn replica_does_not_take_a_write_aborted_elsewhere_for_committed() {
    use Step::{CleanRestart, Complete, Lag, Prepare};
    for steps in [
        // Ended by the second prepare.
        &[Prepare(1), Lag(1, 3), Complete(false), Prepare(1), CleanRestart, Lag(1, 0)][..],
        // Ended by the high completed seqno of the marker.
        &[Lag(1, 3), Prepare(1), Complete(false), Prepare(1), CleanRestart, Lag(1, 0)],
    ] {
        let bucket = three_copies();
        for &step in steps {
            apply(&bucket, step);
        }
        let replica = bucket.lock_on(1, VB).unwrap();
        assert_eq!(replica.durable.high_completed(Seqno::MAX), Seqno(3), "the snapshot came");
        let outcomes = [1, 3].map(|seqno| replica.outcome(Seqno(seqno)));
        assert_eq!(outcomes, [Outcome::Ambiguous, Outcome::Committed]);
    }
}

/// A snapshot from disk may have the abort of a document's later write without that of an earlier one.
/// If the earlier one seemed outstanding, every later write would wait forever.
#[test]
fn replica_promoted_inside_a_snapshot_knows_writes_before_an_abort_ended() {
    use Step::{CleanRestart, Complete, Failover, Lag, Prepare, Set};
    let bucket = three_copies();
    for step in [Lag(2, 3), Prepare(1), Lag(1, 3), Complete(false), Prepare(1), Complete(false)] {
        apply(&bucket, step);
    }
    // All but the last change arrives.
    for step in [Set(2), CleanRestart, Lag(1, 1), Failover(false)] {
        apply(&bucket, step);
    }
    let active = bucket.lock(VB).unwrap();
    assert_eq!((active.high_seqno, active.prepared()), (Seqno(4), vec![]));
    drop(active);
    let (level, deadline) = (DurabilityLevel::MAJORITY, Some(Now::NEVER));
    let written = store(&bucket, b"new", Some(Durability { level, deadline })).unwrap();
    assert_eq!(bucket.lock(VB).unwrap().outcome(written.seqno), Outcome::Committed);
}

/// A snapshot from disk contains the abort of a write without its prepare.
#[test]
fn replica_that_goes_back_before_an_abort_forgets_it() {
    use Step::{CleanRestart, Complete, Lag, Prepare, RollBack, Set};
    let bucket = three_copies();
    for step in [Lag(1, 3), Set(0), Prepare(1), Complete(false), Set(2), CleanRestart, Lag(1, 0)] {
        apply(&bucket, step);
    }
    let completed = || bucket.lock_on(1, VB).unwrap().durable.high_completed(Seqno::MAX);
    assert_eq!(completed(), Seqno(2));
    apply(&bucket, RollBack);
    assert_eq!(bucket.lock(VB).unwrap().high_seqno, Seqno(2));
    assert_eq!(completed(), Seqno::ZERO);
    check_caught_up(&bucket);
}

/// The rest of a snapshot from disk arrives from the next active copy's memory, after some of it
/// was purged.
#[test]
fn replica_that_received_half_of_a_snapshot_from_disk_can_feed_others() {
    use Step::{CleanRestart, Failover, Hold, Lag, Purge, Remove, Set};
    let bucket = three_copies();
    for step in [Lag(2, 2), Set(3), Remove(3), Set(0), Purge, Hold(2, true), Set(3)] {
        apply(&bucket, step);
    }
    for step in [CleanRestart, Set(0), Failover(false), Failover(true)] {
        apply(&bucket, step);
    }
    assert_eq!(bucket.chains(), [[2, 0, 1]]);
    check_caught_up(&bucket);
}

/// Otherwise a replica would take the state there for one that the active copy had.
#[test]
fn checkpoint_does_not_end_inside_a_deduplicated_snapshot() {
    use Step::{
        CleanRestart, CrashReplica, Failover, Hold, Lag, Prepare, Purge, Remove, RollBack, Set,
    };
    let bucket = three_copies();
    for step in [Set(6), CleanRestart, Remove(6), Hold(1, true), Set(0), Set(0), Set(0), Lag(1, 2)]
    {
        apply(&bucket, step);
    }
    // Node 1 lacks the removal, which the rest of its snapshot replaces.
    for step in [Set(0), Prepare(2), Set(6), CrashReplica(1), Purge, Set(1), Set(0)] {
        apply(&bucket, step);
    }
    // Node 0 becomes its replica, then the active copy.
    for step in [Failover(true), Lag(1, 1), Set(0), Failover(false), Prepare(0)] {
        apply(&bucket, step);
    }
    assert_eq!(bucket.chains(), [[0, 2, 1]]);
    apply(&bucket, RollBack);
    check_caught_up(&bucket);
}

/// A replica that lacks the prepare of a committed write cannot take the vBucket over. It starts over
/// when the next stream is requested.
#[test]
fn takeover_that_fails_leaves_the_vbucket_where_it_is() {
    let bucket = three_copies();
    for step in [Step::Set(0), Step::Prepare(1), Step::Lag(1, 3)] {
        apply(&bucket, step);
    }
    bucket.with_on(1, VB, |copy| {
        copy.table.retain(|slot| slot.newest.seqno == Seqno(1));
        copy.durable.drop_documents(|_| true);
    });
    for step in [Step::Complete(true), Step::Set(2)] {
        apply(&bucket, step);
    }
    let before = (bucket.memory().used(), bucket.lock(VB).unwrap().failover.clone());
    bucket.rearrange(VB, |copies| {
        let error = copies.hand_over_from(0).unwrap_err();
        assert!(matches!(error, Error::TakeoverFailed { vbid: VB, node: 1 }), "{error}");
        assert_eq!(copies.nodes(), [0, 1, 2]);
    });
    let active = bucket.lock(VB).unwrap();
    assert_eq!((active.state, active.high_seqno), (VBucketState::Active, Seqno(4)));
    assert_eq!((bucket.memory().used(), active.failover.clone()), before);
    drop(active);
    assert_eq!(bucket.lock_on(1, VB).unwrap().state, VBucketState::Replica);
    bucket.rearrange(VB, |copies| {
        copies.hand_over_from(0).unwrap();
        assert_eq!(copies.nodes(), [1, 0, 2]);
    });
    check_caught_up(&bucket);
}

/// A copy that is not active cannot be taken over.
#[test]
fn copy_that_is_new_and_cannot_take_over_is_dropped() {
    let bucket = three_copies();
    apply(&bucket, Step::Set(0));
    let used = bucket.memory().used();
    bucket.rearrange(VB, |copies| {
        copies.get_mut(0).unwrap().vbucket.set_state(VBucketState::Dead);
        let error = copies.move_to(bucket.new_copy(3, VB)).unwrap_err();
        assert!(matches!(error, Error::TakeoverFailed { vbid: VB, node: 3 }), "{error}");
        assert_eq!(copies.nodes(), [0, 1, 2]);
    });
    assert_eq!(bucket.memory().used(), used);
}

#[test]
fn replica_lag_takes_no_more_memory_than_an_inbox_has() {
    let bucket = three_copies();
    let lag = |copies: &mut Copies| {
        let replica = copies.get_mut(1).unwrap();
        replica.lag = 1000;
        replica.link.as_mut().unwrap().max_waiting_bytes = 10_000;
    };
    bucket.rearrange(VB, lag);
    let write = |vbucket: &mut VBucket| {
        let key = DocKey { collection_id: CollectionId::DEFAULT, key: b"key" };
        let write = DocumentWrite {
            key,
            value: Bytes::from(vec![b'v'; 1000]),
            datatype: Datatype::RAW,
            flags: 0,
            expiry: 0,
            cas: Cas(0),
            condition: Condition::Any,
            durability: None,
        };
        vbucket.store(Now(1), write).unwrap();
    };
    for _ in 0..100 {
        bucket.with(VB, write).unwrap();
    }
    bucket.rearrange(VB, |copies| {
        let replica = copies.get_mut(1).unwrap();
        let waiting = replica.link.as_ref().unwrap().waiting_bytes();
        assert!(waiting <= 10_000 && waiting > 5_000, "{waiting}");
        let applied = replica.vbucket.high_seqno.0;
        assert!((90..100).contains(&applied), "{applied}");
    });
}

#[test]
fn copy_of_a_copy_knows_the_purge_seqno() {
    let bucket = three_copies();
    for step in [Step::Set(0), Step::Set(1), Step::Remove(0), Step::Set(2), Step::Purge] {
        apply(&bucket, step);
    }
    let renew = |node: usize| {
        bucket.rearrange(VB, |copies| {
            copies.hand_over_from(node).unwrap();
            copies.leave(node, Chance::default().vbuuid());
            copies.add_replica(bucket.new_copy(node, VB));
        });
    };
    // The first is copied from disk, and then holds in memory what there was on it; the second is
    // copied from that memory.
    renew(0);
    apply(&bucket, Step::HandOver(0));
    renew(1);
    for node in 0..NODES {
        let copy = bucket.lock_on(node, VB).unwrap();
        assert_eq!((copy.purge_seqno, copy.high_seqno), (Seqno(3), Seqno(4)), "node {node}");
    }
}

/// Where each checkpoint of a copy begins, and the seqnos of its changes.
fn checkpoints(vbucket: &VBucket) -> Vec<(u64, Vec<u64>)> {
    let (mut all, mut after) = (Vec::new(), Seqno::ZERO);
    while let MemoryRead::Items { checkpoint_start, items, .. } = vbucket.checkpoints.read(after) {
        after = items.last().unwrap().seqno;
        all.push((checkpoint_start.0, items.iter().map(|item| item.seqno.0).collect()));
    }
    all
}

/// Markers say where they begin, so streams of all copies have the same versions.
#[test]
fn checkpoints_of_a_replica_are_those_of_the_active_copy() {
    use Step::{CloseCheckpoint, Complete, Lag, Prepare, Set};
    let bucket = three_copies();
    // One replica gets each change at once, the other one all of them at the end.
    apply(&bucket, Lag(2, 3));
    for step in [Set(0), Set(1), Set(0), CloseCheckpoint, Set(1), Set(0)] {
        apply(&bucket, step);
    }
    for step in [Prepare(2), Complete(false), Prepare(2), Complete(true), Set(2), Lag(2, 0)] {
        apply(&bucket, step);
    }
    let expected =
        [(0, vec![2, 3]), (4, vec![4, 5, 6]), (7, vec![7]), (8, vec![8, 9]), (10, vec![10])];
    for node in 0..NODES {
        assert_eq!(checkpoints(&bucket.lock_on(node, VB).unwrap()), expected, "node {node}");
    }
}

/// The rest of the snapshot comes with another marker for it. What its beginning lacks is in the rest.
#[test]
fn checkpoint_of_a_replica_does_not_end_where_its_connection_was_cut() {
    use Step::{Cut, Lag, Set};
    let bucket = three_copies();
    for step in [Lag(1, 3), Set(0), Set(1), Set(0), Lag(1, 1), Cut(1)] {
        apply(&bucket, step);
    }
    assert_eq!(checkpoints(&bucket.lock_on(1, VB).unwrap()), [(0, vec![2])]);
    apply(&bucket, Lag(1, 0));
    assert_eq!(checkpoints(&bucket.lock_on(1, VB).unwrap()), [(0, vec![2, 3])]);
}

/// One that restarted as a replica would begin it at the change before.
#[test]
fn replica_that_is_promoted_begins_a_checkpoint_with_its_first_change() {
    use Step::{CrashReplica, Failover, Persist, Set};
    let bucket = three_copies();
    for step in [Set(0), Persist, CrashReplica(1), CrashReplica(2), Failover(false), Set(1)] {
        apply(&bucket, step);
    }
    let MemoryRead::Items { checkpoint_start, .. } =
        bucket.lock(VB).unwrap().checkpoints.read(Seqno(1))
    else {
        panic!("the change is in memory");
    };
    assert_eq!(checkpoint_start, Seqno(2));
}

/// A producer may leave out as many seqnos as it likes: memory keeps no place for them.
#[test]
fn seqno_gap_of_any_length_takes_no_memory() {
    let bucket = three_copies();
    bucket.with_on(1, VB, |copy| {
        let end = Seqno(u64::MAX >> 1);
        copy.begin_snapshot(&SnapshotMarker::new(Seqno(0), end, SnapshotFlags::MEMORY));
        for seqno in [1, 2, 1 << 40, (1 << 40) + 1, end.0 - 1] {
            copy.receive(Item {
                kind: ItemKind::Mutation,
                seqno: Seqno(seqno),
                rev_seqno: RevSeqno(1),
                cas: Cas(seqno),
                collection_id: CollectionId::DEFAULT,
                key: seqno.to_be_bytes().to_vec().into(),
                value: Bytes::new(),
                datatype: Datatype::RAW,
                flags: 0,
                expiry: 0,
                delete_time: 0,
            });
        }
    });
    let copy = bucket.lock_on(1, VB).unwrap();
    let seqnos = |items: &mut dyn Iterator<Item = Arc<Item>>| -> Vec<u64> {
        items.map(|item| item.seqno.0).collect()
    };
    let all = [1, 2, 1 << 40, (1 << 40) + 1, (u64::MAX >> 1) - 1];
    assert_eq!(seqnos(&mut copy.disk.items_above(Seqno::ZERO)), all);
    assert_eq!(copy.checkpoints.read(Seqno(2)), MemoryRead::NeedsBackfill);
    assert_eq!(seqnos(&mut copy.checkpoints.above(Seqno::ZERO).cloned()), all[4..]);
}
