//! Saves copies to a data folder, and restores them.
//!
//! The folder has the versions of a copy by seqno: the newest ones, and the overwritten ones that
//! the copy keeps. Applied in this order, they restore the copy.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_producer_proto::{FailoverTable, Item, ItemKind};
use dcp_proto::Snapshot;
use dcp_wire::message::FailoverEntry;
use dcp_wire::{Cas, CollectionId, Seqno, Vbuuid};
use serde::{Deserialize, Serialize};

use super::collections::Dropped;
use super::flush_progress::Flushed;
use super::vbucket::VBucket;

/// Highest possible seqno: servers use signed numbers.
const MAX_SEQNO: u64 = u64::MAX >> 1;

/// What is stored of a copy besides its items.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(crate) struct VBucketRecord {
    /// History branches, newest first: identity and where it begins.
    failover: Vec<(u64, u64)>,
    persisted_seqno: u64,
    /// Snapshot of the last change.
    snapshot: (u64, u64),
    purge_seqno: u64,
    /// The newest tombstone that was purged, by collection.
    #[serde(default)]
    purged: BTreeMap<u32, u64>,
    max_deleted_rev: u64,
    last_cas: u64,
    /// Seqno of the prepare of the last completed durable write; and of the last one whose
    /// completion need not be among the items.
    completed: (u64, u64),
    /// Lowest seqno whose state can be restored.
    floor: u64,
    /// Snapshots that left versions out: states in between cannot be restored.
    thinned: Vec<(u64, u64)>,
    /// Whether this is everything: the copy was stopped cleanly.
    is_clean: bool,
}

/// What is missing from a copy's data folder.
#[derive(Clone, Debug)]
pub(crate) struct FlushBatch {
    /// Whether `items` are everything, and replace what was stored.
    pub(crate) is_whole: bool,
    pub(crate) items: Vec<Arc<Item>>,
    /// Seqnos of the items to delete.
    pub(crate) gone: Vec<Seqno>,
    pub(crate) record: VBucketRecord,
    /// State of the data folder afterwards.
    pub(crate) then: Flushed,
}

/// A data folder has contents that no copy can have had.
pub(crate) type Damaged = &'static str;

impl VBucket {
    /// Persisted items that are not stored yet.
    pub(crate) fn next_flush(&mut self) -> FlushBatch {
        let then = Flushed { generation: self.disk.generation(), seqno: self.persisted_seqno };
        let known = self.flush_progress.known(then.generation);
        let leaving = self.flush_progress.deletable(then.seqno);
        if known.is_none() {
            leaving.clear();
        }
        let gone = leaving.clone();
        let after = known.map_or(Seqno::ZERO, |known| known.seqno);
        let mut items = self.history.replaced_above(after, then.seqno);
        items.extend(self.disk.items_above(after));
        FlushBatch { is_whole: known.is_none(), items, gone, record: self.record(false), then }
    }

    /// Everything but the items; `is_clean` if nothing is unpersisted.
    pub(crate) fn record(&self, is_clean: bool) -> VBucketRecord {
        let entry = |entry: &FailoverEntry| (entry.vbuuid.0, entry.seqno.0);
        let Snapshot { start, end } = self.persisted_snapshot;
        let persisted = self.persisted_seqno;
        let purged = self.collections.purged_up_to(persisted);
        let purge_seqno = self.purge_seqno.min(persisted);
        let floor = self.history.floor().min(persisted);
        let completed = |seqno| self.durable.high_completed(seqno).0;
        let thinned = self.thinned.iter().filter(|&&(before, _)| before < persisted);
        VBucketRecord {
            failover: self.failover.entries().iter().map(entry).collect(),
            persisted_seqno: persisted.0,
            snapshot: (start.0, end.0),
            purge_seqno: purge_seqno.0,
            purged: purged.into_iter().map(|(id, seqno)| (id.0, seqno.0)).collect(),
            max_deleted_rev: self.max_deleted_rev,
            last_cas: self.clock.last().0,
            completed: (completed(persisted), completed(floor.max(purge_seqno))),
            floor: floor.0,
            thinned: thinned.map(|&(before, end)| (before.0, end.0)).collect(),
            is_clean: is_clean && persisted == self.high_seqno,
        }
    }

    /// Notes how much of the copy is in the data folder, unless it was rewritten meanwhile.
    pub(crate) fn note_flushed(&mut self, stored: Flushed) {
        if stored.generation == self.disk.generation() {
            self.flush_progress.note(stored);
        }
    }

    /// Fills an empty copy from a data folder, with `items` in seqno order. Unless it was stopped
    /// cleanly, the history of an active copy continues on the branch `vbuuid`, as after a crash.
    ///
    /// # Errors
    /// [`Damaged`]; the copy cannot be used then.
    pub(crate) fn restore(
        &mut self,
        record: &VBucketRecord,
        items: Vec<Item>,
        vbuuid: Vbuuid,
    ) -> Result<(), Damaged> {
        record.check()?;
        let seqno = Seqno(record.persisted_seqno);
        self.clock.observe(Cas(record.last_cas));
        let (completed, untold) = record.completed;
        self.durable.catch_up(Seqno(untold), Seqno(record.floor.max(record.purge_seqno)));
        self.play_back(items, seqno)?;
        self.rebuild_disk();
        self.purge_seqno = Seqno(record.purge_seqno);
        self.max_deleted_rev = record.max_deleted_rev;
        let gone = self.history.forget_below(Seqno(record.floor));
        self.forget_versions(gone);
        let thinned = record.thinned.iter().map(|&(before, end)| (Seqno(before), Seqno(end)));
        self.thinned = thinned.collect();
        self.durable.catch_up(Seqno(completed), seqno);
        self.reset_to(seqno);
        let purged = record.purged.iter().map(|(&id, &seqno)| (CollectionId(id), Seqno(seqno)));
        self.collections.have_purged(&purged.collect());
        let (start, end) = record.snapshot;
        self.persisted_snapshot = Snapshot { start: Seqno(start), end: Seqno(end) };
        let entry =
            |&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) };
        (self.failover, _) = FailoverTable::load(record.failover.iter().map(entry), vbuuid, seqno);
        self.warm_up((!record.is_clean).then_some(vbuuid));
        self.note_flushed(Flushed { generation: self.disk.generation(), seqno });
        Ok(())
    }

    /// Applies the stored versions as when they arrived.
    fn play_back(&mut self, items: Vec<Item>, end: Seqno) -> Result<(), Damaged> {
        let mut last = Seqno::ZERO;
        for item in items {
            if item.seqno <= last || item.seqno > end {
                return Err("the items of a vBucket are damaged");
            }
            last = item.seqno;
            self.clock.observe(item.cas);
            if let ItemKind::Abort { prepared } = item.kind {
                self.durable.catch_up(prepared, last);
            } else {
                self.note_version(&item);
                self.durable.note(&item);
            }
            let dropped = Dropped::by(&item);
            self.make_newest(Arc::new(item));
            if let Some(dropped) = dropped {
                self.drop_documents(dropped, last);
            }
        }
        Ok(())
    }
}

impl VBucketRecord {
    /// Refuses numbers that no copy can have.
    fn check(&self) -> Result<(), Damaged> {
        let Self { persisted_seqno, snapshot: (start, end), .. } = *self;
        let is_sound = start <= end
            && end.max(persisted_seqno) <= MAX_SEQNO
            && self.floor.max(self.purge_seqno) <= persisted_seqno;
        if is_sound { Ok(()) } else { Err("the record of a vBucket is damaged") }
    }
}
