//! One vBucket: what it holds and how it grows, is persisted, rolled back and purged.

use std::sync::Arc;

use bytes::Bytes;
use dcp_proto::producer::{FailoverTable, Item, ItemKind, VBucketState};
use dcp_wire::{Cas, CollectionId, DocKey, Seqno, Vbid, Vbuuid};
use rustc_hash::FxHashMap;

use super::checkpoint_log::CheckpointLog;
use super::clock::{HybridClock, Now};
use super::disk_image::DiskImage;
use super::footprint;
use super::hash_table::{Identity, ItemTable};
use super::history::History;
use super::memory::MemoryUse;
use crate::Error;

/// One vBucket.
///
/// Every change gets the next seqno, becomes the newest version in the table and joins the open
/// checkpoint; `persist` carries it into the disk image. Nothing here looks at a clock.
#[derive(Debug)]
pub(crate) struct VBucket {
    vbid: Vbid,
    pub(crate) state: VBucketState,
    pub(crate) failover: FailoverTable,
    pub(super) table: ItemTable,
    pub(super) checkpoints: CheckpointLog,
    pub(super) disk: DiskImage,
    history: History,
    pub(super) clock: HybridClock,
    pub(crate) high_seqno: Seqno,
    pub(crate) persisted_seqno: Seqno,
    pub(crate) purge_seqno: Seqno,
    /// Highest seqno of each collection, its events counted.
    pub(super) collections: FxHashMap<CollectionId, Seqno>,
    /// Highest rev seqno of a purged tombstone: keys never seen start above it.
    max_purged_rev: u64,
    live: LiveCounts,
    memory: Arc<MemoryUse>,
}

/// What the live documents of a vBucket amount to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LiveCounts {
    /// Documents.
    pub(crate) documents: u64,
    /// Documents with an expiry.
    pub(crate) expiring: u64,
}

/// Where a write went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) vbuuid: Vbuuid,
    pub(crate) seqno: Seqno,
    pub(crate) cas: Cas,
}

impl VBucket {
    /// An empty, active vBucket whose history begins with `vbuuid`.
    pub(crate) fn new(
        vbid: Vbid,
        vbuuid: Vbuuid,
        history_bytes: usize,
        memory: Arc<MemoryUse>,
    ) -> Self {
        Self {
            vbid,
            state: VBucketState::Active,
            failover: FailoverTable::new(vbuuid),
            table: ItemTable::default(),
            checkpoints: CheckpointLog::after(Seqno::ZERO),
            disk: DiskImage::default(),
            history: History::new(history_bytes),
            clock: HybridClock::default(),
            high_seqno: Seqno::ZERO,
            persisted_seqno: Seqno::ZERO,
            purge_seqno: Seqno::ZERO,
            collections: FxHashMap::from_iter([(CollectionId::DEFAULT, Seqno::ZERO)]),
            max_purged_rev: 0,
            live: LiveCounts::default(),
            memory,
        }
    }

    pub(crate) fn vbid(&self) -> Vbid {
        self.vbid
    }

    /// The history branch written to.
    pub(crate) fn vbuuid(&self) -> Vbuuid {
        self.failover.newest().vbuuid
    }

    pub(crate) fn live_counts(&self) -> LiveCounts {
        self.live
    }

    pub(super) fn memory(&self) -> &MemoryUse {
        &self.memory
    }

    /// Newest version of a document, tombstones included.
    pub(super) fn newest(&self, key: DocKey<'_>) -> Option<&Arc<Item>> {
        let slot = self.table.find(Identity::Document(key.collection_id, key.key))?;
        Some(&slot.newest)
    }

    /// Rev seqno of the next version after `previous`.
    pub(super) fn next_rev(&self, previous: Option<&Arc<Item>>) -> u64 {
        previous.map_or(self.max_purged_rev, |item| item.rev_seqno.0).saturating_add(1)
    }

    /// Gives `item` the next seqno and makes it the newest version.
    pub(super) fn append(&mut self, mut item: Item) -> Written {
        let seqno = Seqno(self.high_seqno.0 + 1);
        item.seqno = seqno;
        let cas = item.cas;
        self.high_seqno = seqno;
        if let Some(high) = self.collections.get_mut(&item.collection_id) {
            *high = seqno;
        }
        self.count(&item, true);
        let item = Arc::new(item);
        let previous = self.table.replace(Arc::clone(&item));
        self.checkpoints.push(item, previous.as_ref().map(|previous| previous.seqno));
        if let Some(previous) = previous {
            self.count(&previous, false);
            self.history.push(previous, seqno);
        }
        Written { vbuuid: self.vbuuid(), seqno, cas }
    }

    /// Books a newest version in or out.
    fn count(&mut self, item: &Item, present: bool) {
        let live = item.kind == ItemKind::Mutation;
        let expiring = live && item.expiry != 0;
        if present {
            self.memory.add(footprint(item));
            self.live.documents += u64::from(live);
            self.live.expiring += u64::from(expiring);
        } else {
            self.memory.sub(footprint(item));
            self.live.documents -= u64::from(live);
            self.live.expiring -= u64::from(expiring);
        }
    }

    /// Carries every change into the disk image; returns whether there was one.
    pub(crate) fn persist(&mut self) -> bool {
        if self.persisted_seqno == self.high_seqno {
            return false;
        }
        for item in self.checkpoints.above(self.persisted_seqno) {
            let Some(slot) = self.table.find_mut(Identity::of(item)) else {
                continue;
            };
            // A newer version follows in a later checkpoint: this one never reaches the disk.
            if slot.newest.seqno != item.seqno {
                continue;
            }
            if slot.persisted != Seqno::ZERO {
                self.disk.remove(slot.persisted);
            }
            slot.persisted = item.seqno;
            self.disk.push(Arc::clone(item));
        }
        self.persisted_seqno = self.high_seqno;
        self.checkpoints.drop_persisted(self.persisted_seqno);
        true
    }

    /// Persists everything and lets it leave memory, so that a stream from 0 is read from disk.
    pub(crate) fn persist_and_evict(&mut self) {
        self.persist();
        self.checkpoints.close_open();
        self.checkpoints.drop_persisted(self.persisted_seqno);
    }

    /// Goes back to how things were at `to` and continues on the new branch `vbuuid`.
    pub(crate) fn roll_back(&mut self, to: Seqno, vbuuid: Vbuuid) -> Result<(), Error> {
        let (vbid, high_seqno, oldest) = (self.vbid, self.high_seqno, self.history.floor());
        if to > high_seqno {
            return Err(Error::RollbackBeyondHighSeqno { vbid, to, high_seqno });
        }
        if to < oldest && to != Seqno::ZERO {
            return Err(Error::RollbackHistoryGone { vbid, to, oldest });
        }
        let restored = self.history.restore(to);
        let mut dropped = Vec::new();
        self.table.retain(|slot| {
            let keep = slot.newest.seqno <= to;
            if !keep {
                dropped.push(Arc::clone(&slot.newest));
            }
            keep
        });
        for item in dropped {
            self.count(&item, false);
        }
        for item in restored {
            self.count(&item, true);
            self.table.replace(item);
        }
        self.rebuild_disk();
        if to == Seqno::ZERO {
            self.history.reset();
            self.purge_seqno = Seqno::ZERO;
        }
        self.checkpoints = CheckpointLog::after(to);
        self.high_seqno = to;
        self.persisted_seqno = to;
        self.failover.create_entry(vbuuid, to);
        for high in self.collections.values_mut() {
            *high = Seqno::ZERO;
        }
        for slot in self.table.iter() {
            if let Some(high) = self.collections.get_mut(&slot.newest.collection_id) {
                *high = slot.newest.seqno.max(*high);
            }
        }
        Ok(())
    }

    /// Makes the disk hold exactly the newest versions.
    fn rebuild_disk(&mut self) {
        let mut items = Vec::with_capacity(self.table.len());
        self.table.retain(|slot| {
            slot.persisted = slot.newest.seqno;
            items.push(Arc::clone(&slot.newest));
            true
        });
        items.sort_unstable_by_key(|item| item.seqno);
        self.disk = DiskImage::from_sorted(items);
    }

    /// Removes tombstones up to `to`, the vBucket's last change excepted.
    pub(crate) fn purge(&mut self, to: Seqno) {
        self.persist_and_evict();
        let high_seqno = self.high_seqno;
        let mut purged = Vec::new();
        self.table.retain(|slot| {
            let item = &slot.newest;
            let tombstone = matches!(item.kind, ItemKind::Deletion | ItemKind::Expiration);
            let purge = tombstone && item.seqno <= to && item.seqno != high_seqno;
            if purge {
                purged.push(Arc::clone(item));
            }
            !purge
        });
        for item in purged {
            self.disk.remove(item.seqno);
            self.purge_seqno = self.purge_seqno.max(item.seqno);
            self.max_purged_rev = self.max_purged_rev.max(item.rev_seqno.0);
            self.count(&item, false);
        }
        self.history.forget_below(self.purge_seqno);
    }

    /// Keys of the documents whose expiry has passed.
    pub(super) fn expired_keys(&self, now: Now) -> Vec<(CollectionId, Bytes)> {
        if self.live.expiring == 0 {
            return Vec::new();
        }
        let expired = |item: &&Arc<Item>| super::is_expired(item, now);
        self.table
            .iter()
            .map(|slot| &slot.newest)
            .filter(expired)
            .map(|item| (item.collection_id, item.key.clone()))
            .collect()
    }

    /// Bytes of overwritten versions kept.
    pub(crate) fn history_bytes(&self) -> usize {
        self.history.bytes()
    }
}
