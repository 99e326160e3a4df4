//! Rollbacks and restarts of a copy of a vBucket.

use std::sync::Arc;

use dcp_producer_proto::VBucketState;
use dcp_proto::Snapshot;
use dcp_wire::{Seqno, Vbuuid};

use super::collections::VBucketCollections;
use super::disk_image::DiskImage;
use super::vbucket::VBucket;
use crate::Error;

impl VBucket {
    /// Restores the state at `to` and continues on the new branch `vbuuid`.
    pub(crate) fn roll_back(&mut self, to: Seqno, vbuuid: Vbuuid) -> Result<(), Error> {
        self.rewind(to)?;
        self.failover.create_entry(vbuuid, to);
        Ok(())
    }

    /// The last seqno up to `to` whose state can be restored, given snapshots that left versions
    /// out.
    pub(super) fn last_restorable(&self, mut to: Seqno) -> Seqno {
        for &(before, end) in self.thinned.iter().rev() {
            if before < to && to < end {
                to = before;
            }
        }
        to
    }

    /// Restores the state at `to`; the failover table stays.
    pub(super) fn rewind(&mut self, to: Seqno) -> Result<(), Error> {
        let (vbid, high_seqno, oldest) = (self.vbid, self.high_seqno, self.history.floor());
        if to > high_seqno {
            return Err(Error::RollbackBeyondHighSeqno { vbid, to, high_seqno });
        }
        // The change at the purge seqno itself is purged as well.
        let oldest = oldest.max(Seqno(self.purge_seqno.0 + u64::from(self.purge_seqno.0 != 0)));
        if to < oldest && to != Seqno::ZERO {
            return Err(Error::RollbackHistoryGone { vbid, to, oldest });
        }
        if self.last_restorable(to) != to {
            let ends = self.thinned.iter().filter(|&&(before, end)| before < to && to < end);
            let oldest = ends.map(|&(_, end)| end).max().unwrap_or(oldest);
            return Err(Error::RollbackHistoryGone { vbid, to, oldest });
        }
        self.thinned.retain(|&(before, _)| before < to);
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
        self.reset_to(to);
        Ok(())
    }

    /// Recovers from a crash with what is on disk. An active copy begins the branch `vbuuid`; one
    /// without a disk starts over.
    pub(super) fn recover(&mut self, vbuuid: Vbuuid) {
        if self.settings.is_ephemeral {
            self.reset(vbuuid);
            return;
        }
        let mut gone = Vec::new();
        self.table.retain(|slot| {
            gone.push(Arc::clone(&slot.newest));
            false
        });
        for item in gone {
            self.count(&item, false);
        }
        for item in self.disk.items_above(Seqno::ZERO) {
            self.count(&item, true);
            self.table.replace(item);
        }
        drop(self.history.restore(self.persisted_seqno));
        self.rebuild_disk();
        let snapshot = self.persisted_snapshot;
        self.reset_to(self.persisted_seqno);
        self.persisted_snapshot = snapshot;
        self.warm_up(Some(vbuuid));
    }

    /// Continues with what was on disk; an active copy does so on the branch `vbuuid`, if anything
    /// else may have been lost.
    pub(super) fn warm_up(&mut self, vbuuid: Option<Vbuuid>) {
        if self.state != VBucketState::Active {
            self.snapshot = self.persisted_snapshot;
            return;
        }
        if let Some(vbuuid) = vbuuid {
            self.failover.create_entry(vbuuid, self.consistent_seqno());
        }
        self.durable.decide_all_by_copies();
    }

    /// Restarts cleanly: everything is on disk, nothing in memory.
    pub(super) fn stop_cleanly(&mut self, vbuuid: Vbuuid) {
        if self.settings.is_ephemeral {
            self.reset(vbuuid);
            return;
        }
        self.persist_everything();
        self.forget_checkpoints(self.high_seqno);
        self.begin_life();
        self.warm_up(None);
    }

    /// Becomes empty, with a history that begins with `vbuuid`.
    pub(super) fn reset(&mut self, vbuuid: Vbuuid) {
        self.memory.sub(if self.is_charged { self.bytes } else { 0 });
        let memory = Arc::clone(&self.memory);
        *self = Self {
            state: self.state,
            settings: self.settings,
            is_charged: self.is_charged,
            clock: self.clock,
            ..Self::new(self.vbid, vbuuid, self.history.max_bytes(), memory)
        };
        self.keep_history(self.settings.keeps_history);
    }

    /// Restarts at `to`, which the table and the disk already are at.
    pub(super) fn reset_to(&mut self, to: Seqno) {
        self.begin_life();
        self.flush_progress.roll_back(to);
        self.high_seqno = to;
        self.persisted_seqno = to;
        self.forget_checkpoints(to);
        self.snapshot = Snapshot::at(to);
        self.from_disk = None;
        self.persisted_snapshot = self.snapshot;
        let purged = self.collections.purged_up_to(to);
        let items = self.table.iter().map(|slot| &*slot.newest);
        self.collections = VBucketCollections::of(items, purged);
        self.durable.roll_back(to, self.table.iter().map(|slot| &*slot.newest));
    }

    /// Rebuilds the disk image from the newest versions.
    pub(super) fn rebuild_disk(&mut self) {
        let mut items = Vec::with_capacity(self.table.len());
        self.table.retain(|slot| {
            slot.persisted = slot.newest.seqno;
            items.push(Arc::clone(&slot.newest));
            true
        });
        items.sort_unstable_by_key(|item| item.seqno);
        self.disk = DiskImage::from_sorted(items);
    }
}
