//! Saves vBuckets to a data folder, and restores them.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_proto::Snapshot;
use dcp_proto::producer::{FailoverTable, Item};
use dcp_wire::message::FailoverEntry;
use dcp_wire::{Cas, CollectionId, Seqno, Vbuuid};
use serde::{Deserialize, Serialize};

use super::vbucket::VBucket;

/// What is stored of a vBucket besides its items.
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
    /// Seqno of the prepare of the last completed durable write.
    completed: u64,
    /// Whether this is everything: the vBucket was stopped cleanly.
    pub(crate) is_clean: bool,
}

/// How much of a vBucket is in a data folder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stored {
    /// Generation of the disk image that was stored.
    pub(crate) generation: u64,
    pub(crate) seqno: Seqno,
}

/// What is missing from a vBucket's data folder.
#[derive(Clone, Debug)]
pub(crate) struct Unstored {
    /// Whether `items` are everything, and replace what was stored.
    pub(crate) is_whole: bool,
    pub(crate) items: Vec<Arc<Item>>,
    pub(crate) record: VBucketRecord,
    /// State of the data folder afterwards.
    pub(crate) then: Stored,
}

impl VBucket {
    /// Persisted items that are not `stored` yet; `None` without any.
    pub(crate) fn unstored(&self, stored: Stored) -> Option<Unstored> {
        let then = Stored { generation: self.disk.generation(), seqno: self.persisted_seqno };
        if stored == then {
            return None;
        }
        let is_whole = stored.generation != then.generation;
        let after = if is_whole { Seqno::ZERO } else { stored.seqno };
        let items = self.disk.items_above(after).collect();
        Some(Unstored { is_whole, items, record: self.record(false), then })
    }

    /// Everything but the items; `is_clean` if nothing is unpersisted.
    pub(crate) fn record(&self, is_clean: bool) -> VBucketRecord {
        let entry = |entry: &FailoverEntry| (entry.vbuuid.0, entry.seqno.0);
        let Snapshot { start, end } = self.persisted_snapshot;
        let purged = self.collections.purged_up_to(self.persisted_seqno);
        VBucketRecord {
            failover: self.failover.entries().iter().map(entry).collect(),
            persisted_seqno: self.persisted_seqno.0,
            snapshot: (start.0, end.0),
            purge_seqno: self.purge_seqno.0,
            purged: purged.into_iter().map(|(id, seqno)| (id.0, seqno.0)).collect(),
            max_deleted_rev: self.max_deleted_rev,
            last_cas: self.clock.last().0,
            completed: self.durable.high_completed(self.persisted_seqno).0,
            is_clean: is_clean && self.persisted_seqno == self.high_seqno,
        }
    }

    /// Notes how much of the vBucket is in the data folder, unless it was rewritten meanwhile.
    pub(crate) fn note_stored(&mut self, stored: Stored) {
        if stored.generation == self.disk.generation() {
            self.stored_seqno = Some(stored.seqno);
        }
    }

    /// Fills an empty vBucket from a data folder. Unless that was stopped cleanly, the history
    /// continues on the branch `vbuuid`, as after a crash.
    pub(crate) fn restore(
        &mut self,
        record: &VBucketRecord,
        items: Vec<Item>,
        vbuuid: Vbuuid,
    ) -> Stored {
        self.clock.observe(Cas(record.last_cas));
        for item in items {
            self.clock.observe(item.cas);
            let item = Arc::new(item);
            self.count(&item, true);
            self.table.replace(item);
        }
        self.rebuild_disk();
        let seqno = Seqno(record.persisted_seqno);
        self.purge_seqno = Seqno(record.purge_seqno);
        self.max_deleted_rev = record.max_deleted_rev;
        // Versions that were replaced are not stored.
        self.history.forget_below(seqno);
        self.stand_at(seqno);
        let purged = record.purged.iter().map(|(&id, &seqno)| (CollectionId(id), Seqno(seqno)));
        self.collections.have_purged(&purged.collect());
        let items = self.table.iter().map(|slot| &*slot.newest);
        self.durable.resume(seqno, Seqno(record.completed), items);
        let (start, end) = record.snapshot;
        self.persisted_snapshot = Snapshot { start: Seqno(start), end: Seqno(end) };
        let entry =
            |&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) };
        (self.failover, _) = FailoverTable::load(record.failover.iter().map(entry), vbuuid, seqno);
        if !record.is_clean {
            self.failover.create_entry(vbuuid, self.consistent_seqno());
        }
        let stored = Stored { generation: self.disk.generation(), seqno };
        self.note_stored(stored);
        stored
    }
}
