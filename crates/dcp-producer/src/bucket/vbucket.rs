//! One copy of a vBucket: its contents, and how it grows, is persisted, rolled back and purged.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use dcp_producer_proto::{FailoverTable, Item, ItemKind, VBucketState};
use dcp_proto::Snapshot;
use dcp_wire::message::SnapshotMarker;
use dcp_wire::{Cas, CollectionId, DocKey, Seqno, Vbid, Vbuuid};

use super::checkpoint_log::{CheckpointLog, Cursors};
use super::clock::HybridClock;
use super::collections::{Dropped, VBucketCollections};
use super::disk_image::DiskImage;
use super::durable::{DurableWrites, newest_version};
use super::flush_progress::FlushProgress;
use super::hash_table::{Identity, ItemTable};
use super::history::History;
use super::item::{footprint, is_expired};
use super::locks::Locks;
use super::memory::MemoryUse;
use crate::chance::Now;

/// One copy of a vBucket.
///
/// Every change gets the next seqno, becomes the newest version in the table and joins the open
/// checkpoint; `persist` adds it to the disk image. Nothing here reads a clock.
#[derive(Debug)]
pub(crate) struct VBucket {
    pub(super) vbid: Vbid,
    pub(crate) state: VBucketState,
    /// Incarnation of the copy, which changes whenever its streams must not continue.
    pub(super) incarnation: u64,
    pub(crate) failover: FailoverTable,
    pub(super) table: ItemTable,
    pub(super) checkpoints: CheckpointLog,
    pub(super) disk: DiskImage,
    pub(super) history: History,
    pub(super) clock: HybridClock,
    pub(crate) high_seqno: Seqno,
    pub(crate) persisted_seqno: Seqno,
    pub(crate) purge_seqno: Seqno,
    /// Snapshot a replica is receiving; its last change is the newest one once it is complete.
    pub(super) snapshot: Snapshot,
    /// Marker of the snapshot from disk that a replica is receiving.
    pub(super) from_disk: Option<SnapshotMarker>,
    /// Whether the snapshot that a replica is receiving leaves versions out.
    pub(super) is_thinned: bool,
    /// Received snapshots that left versions out, as their start and end: states in between cannot
    /// be restored.
    pub(super) thinned: Vec<(Seqno, Seqno)>,
    /// Snapshot of the newest persisted change.
    pub(super) persisted_snapshot: Snapshot,
    /// Up to where the data folder has the copy.
    pub(super) flush_progress: FlushProgress,
    pub(super) collections: VBucketCollections,
    pub(super) durable: DurableWrites,
    pub(super) locks: Locks,
    /// Cursors of the streams.
    pub(super) cursors: Cursors,
    /// End of the first snapshot from disk that a replica is receiving.
    pub(super) initial_snapshot_end: Seqno,
    /// Highest rev seqno of a tombstone without xattrs, including purged ones: new keys start above
    /// it.
    pub(super) max_deleted_rev: u64,
    pub(super) live: LiveCounts,
    pub(super) memory: Arc<MemoryUse>,
    /// Bytes of the newest versions, and whether they count against the quota: those of the active
    /// copy do.
    pub(super) bytes: usize,
    pub(super) is_charged: bool,
    pub(super) settings: CopySettings,
}

/// Storage settings of a copy of a vBucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CopySettings {
    /// There is no disk: everything is lost when the node stops.
    pub(crate) is_ephemeral: bool,
    /// Values read from disk are compressed.
    pub(crate) compresses_disk: bool,
    /// Nothing is persisted until this is lifted.
    pub(crate) holds_persistence: bool,
    /// Every version is kept, as far as the space for overwritten ones allows.
    pub(crate) keeps_history: bool,
    /// Persisted changes go into a data folder.
    pub(crate) has_data_folder: bool,
}

/// Statistics of the live documents of a vBucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LiveCounts {
    /// Documents.
    pub(crate) documents: u64,
    /// Documents with an expiry.
    pub(crate) expiring: u64,
}

/// Location of a write in the history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) vbuuid: Vbuuid,
    pub(crate) seqno: Seqno,
    pub(crate) cas: Cas,
    /// Whether the write is only prepared: it becomes visible once it is committed.
    pub(crate) is_prepared: bool,
}

const NOTHING: Snapshot = Snapshot::at(Seqno::ZERO);

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
            incarnation: next_incarnation(),
            failover: FailoverTable::new(vbuuid),
            table: ItemTable::default(),
            checkpoints: CheckpointLog::after(Seqno::ZERO, Seqno::ZERO),
            disk: DiskImage::default(),
            history: History::new(history_bytes),
            clock: HybridClock::default(),
            high_seqno: Seqno::ZERO,
            persisted_seqno: Seqno::ZERO,
            purge_seqno: Seqno::ZERO,
            snapshot: NOTHING,
            from_disk: None,
            is_thinned: false,
            thinned: Vec::new(),
            persisted_snapshot: NOTHING,
            flush_progress: FlushProgress::default(),
            collections: VBucketCollections::default(),
            durable: DurableWrites::default(),
            locks: Locks::default(),
            cursors: Cursors::default(),
            initial_snapshot_end: Seqno::ZERO,
            max_deleted_rev: 0,
            live: LiveCounts::default(),
            memory,
            bytes: 0,
            is_charged: true,
            settings: CopySettings::default(),
        }
    }

    pub(crate) fn vbid(&self) -> Vbid {
        self.vbid
    }

    /// The history branch of new changes.
    pub(crate) fn vbuuid(&self) -> Vbuuid {
        self.failover.newest().vbuuid
    }

    pub(crate) fn live_counts(&self) -> LiveCounts {
        self.live
    }

    pub(super) fn memory(&self) -> &MemoryUse {
        &self.memory
    }

    /// Persisted seqno that is reported to clients: 0 without a disk.
    pub(crate) fn told_persisted_seqno(&self) -> Seqno {
        if self.settings.is_ephemeral {
            return Seqno::ZERO;
        }
        // With a data folder, persisted means in that folder.
        if self.settings.has_data_folder {
            return self.persisted_seqno.min(self.flush_progress.seqno());
        }
        self.persisted_seqno
    }

    /// Seqno up to which nothing can be lost any more. Without a disk that is everything, although
    /// clients are told that nothing is persisted.
    pub(crate) fn safe_seqno(&self) -> Seqno {
        if self.settings.is_ephemeral { self.high_seqno } else { self.told_persisted_seqno() }
    }

    /// High seqno that is reported to clients: for a replica, the end of the snapshot it is
    /// receiving.
    pub(crate) fn told_high_seqno(&self) -> Seqno {
        match self.state {
            VBucketState::Replica => self.high_seqno.max(self.snapshot.end),
            _ => self.high_seqno,
        }
    }

    /// Newest version of a document, tombstones included.
    pub(super) fn newest(&self, key: DocKey<'_>) -> Option<&Arc<Item>> {
        let slot = self.table.find(Identity::Document(key.collection_id, key.key))?;
        Some(&slot.newest)
    }

    /// Rev seqno of the next version after `previous`.
    pub(super) fn next_rev(&self, previous: Option<&Arc<Item>>) -> u64 {
        previous.map_or(self.max_deleted_rev, |item| item.rev_seqno.0).saturating_add(1)
    }

    /// Gives `item` the next seqno and makes it the newest version.
    pub(super) fn append(&mut self, mut item: Item) -> Written {
        let seqno = Seqno(self.high_seqno.0 + 1);
        item.seqno = seqno;
        let cas = item.cas;
        let is_prepared = matches!(item.kind, ItemKind::Prepare { .. });
        self.take_in(Arc::new(item));
        Written { vbuuid: self.vbuuid(), seqno, cas, is_prepared }
    }

    /// Makes `item`, whose seqno is above all others, the newest version.
    pub(super) fn take_in(&mut self, item: Arc<Item>) {
        let (seqno, is_inside) = (item.seqno, self.is_inside_snapshot());
        self.high_seqno = seqno;
        self.note_deletion(&item);
        let dropped = self.collections.note(&item);
        self.durable.note(&item);
        let replaced = self.make_newest(newest_version(&item));
        self.checkpoints.push(item, replaced, is_inside);
        if let Some(dropped) = dropped {
            self.drop_documents(dropped, seqno);
        }
        if self.settings.is_ephemeral {
            // The image in seqno order serves as the disk of an ephemeral vBucket, so it is kept up
            // to date.
            self.flush();
        }
    }

    /// Makes `item` the newest version of its document or event; returns the seqno of the previous
    /// one.
    pub(super) fn make_newest(&mut self, item: Arc<Item>) -> Option<Seqno> {
        let by = item.seqno;
        self.count(&item, true);
        let previous = self.table.replace(item)?;
        self.count(&previous, false);
        let replaced = previous.seqno;
        self.supersede(previous, by);
        Some(replaced)
    }

    /// Keeps a version that the change at `by` replaced, if there is room.
    fn supersede(&mut self, item: Arc<Item>, by: Seqno) {
        let gone = self.history.push(item, by);
        self.forget_versions(gone);
    }

    /// Has the data folder delete versions that the history no longer keeps.
    pub(super) fn forget_versions(&mut self, versions: Vec<(Seqno, Seqno)>) {
        if self.settings.has_data_folder {
            self.flush_progress.superseded(versions);
        }
    }

    /// Notes the rev seqno above which new keys start. A deletion that keeps xattrs is written as a
    /// version with a value, which servers do not count.
    fn note_deletion(&mut self, item: &Item) {
        let deletes = match item.kind {
            ItemKind::Deletion => item.value.is_empty(),
            ItemKind::Commit { is_deletion, .. } => is_deletion,
            ItemKind::Expiration => true,
            _ => false,
        };
        if deletes {
            self.max_deleted_rev = self.max_deleted_rev.max(item.rev_seqno.0);
        }
    }

    /// Removes the documents that the event at `by` dropped.
    pub(super) fn drop_documents(&mut self, gone: Dropped, by: Seqno) {
        let mut dropped = Vec::new();
        self.table.retain(|slot| {
            let keep = !gone.takes(&slot.newest);
            if !keep {
                dropped.push(Arc::clone(&slot.newest));
            }
            keep
        });
        for item in dropped {
            self.count(&item, false);
            self.supersede(item, by);
        }
        self.durable.drop_documents(|collection| gone.is_of(collection));
    }

    /// Adds a newest version to the statistics, or subtracts it.
    pub(super) fn count(&mut self, item: &Item, present: bool) {
        let live = item.kind == ItemKind::Mutation;
        let expiring = live && item.expiry != 0;
        let bytes = footprint(item);
        if present {
            self.bytes += bytes;
            self.live.documents += u64::from(live);
            self.live.expiring += u64::from(expiring);
        } else {
            self.bytes -= bytes;
            self.live.documents -= u64::from(live);
            self.live.expiring -= u64::from(expiring);
        }
        if self.is_charged && present {
            self.memory.add(bytes);
        } else if self.is_charged {
            self.memory.sub(bytes);
        }
    }

    /// Makes the copy count against the quota or not.
    pub(super) fn charge(&mut self, is_charged: bool) {
        match (self.is_charged, is_charged) {
            (false, true) => self.memory.add(self.bytes),
            (true, false) => self.memory.sub(self.bytes),
            _ => {}
        }
        self.is_charged = is_charged;
    }

    /// Adds every change to the disk image; returns whether there was one. Does nothing while
    /// persistence is held.
    pub(crate) fn persist(&mut self) -> bool {
        if self.persisted_seqno == self.high_seqno || self.settings.holds_persistence {
            return false;
        }
        self.flush();
        true
    }

    /// Like [`persist`](Self::persist), but even while persistence is held: the node stops cleanly.
    pub(crate) fn persist_everything(&mut self) {
        if self.persisted_seqno != self.high_seqno {
            self.flush();
        }
    }

    /// Holds persistence of the copy, or resumes it.
    pub(crate) fn hold_persistence(&mut self, hold: bool) {
        self.settings.holds_persistence = hold;
        self.persist();
    }

    /// Seqnos on disk of documents of which a newer version is in memory only.
    pub(super) fn superseded(&self) -> BTreeSet<Seqno> {
        let newer = self.checkpoints.above(self.persisted_seqno);
        let slots = newer.filter_map(|item| self.table.find(Identity::of(item)));
        slots.map(|slot| slot.persisted).filter(|&seqno| seqno != Seqno::ZERO).collect()
    }

    fn flush(&mut self) {
        for item in self.checkpoints.above(self.persisted_seqno) {
            if let Some(dropped) = Dropped::by(item) {
                self.disk.retain(|other| !dropped.takes(other));
            }
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
            self.disk.push(Arc::clone(&slot.newest));
        }
        self.persisted_seqno = self.high_seqno;
        self.persisted_snapshot = match self.state {
            VBucketState::Active => Snapshot::at(self.high_seqno),
            _ => self.snapshot,
        };
        self.free_checkpoints();
    }

    /// Drops closed checkpoints that are on disk and that every stream has read, or that exceed the
    /// limit.
    fn free_checkpoints(&mut self) {
        if !self.checkpoints.has_closed() {
            return;
        }
        let (needed, held) = (self.cursors.slowest(false), self.cursors.slowest(true));
        let limit = self.memory.checkpoint_limit();
        self.checkpoints.drop_persisted(self.persisted_seqno, needed, held, limit);
    }

    /// Removes everything up to `seqno` from memory.
    pub(super) fn forget_checkpoints(&mut self, seqno: Seqno) {
        self.checkpoints = CheckpointLog::after(seqno, self.visible_seqno());
        self.checkpoints.is_historical = self.settings.keeps_history;
    }

    /// Highest seqno on disk, purged or not, of anything but a prepare or an abort.
    pub(super) fn visible_seqno(&self) -> Seqno {
        let purged = Some(self.purge_seqno).filter(|&seqno| seqno <= self.persisted_seqno);
        let visible = self.disk.last_seqno_where(|item| item.kind.is_visible());
        visible.max(purged.unwrap_or_default())
    }

    /// Sets whether the copy keeps every version.
    pub(super) fn keep_history(&mut self, keep: bool) {
        self.settings.keeps_history = keep;
        self.checkpoints.is_historical = keep;
    }

    /// Seqno from which every version is kept; `None` if that is disabled.
    pub(super) fn history_start(&self) -> Option<Seqno> {
        let first = Seqno(self.history.floor().0 + 1);
        self.settings.keeps_history.then_some(first)
    }

    /// Persists everything and evicts it from memory, so that a stream from 0 is read from disk.
    pub(crate) fn persist_and_evict(&mut self) {
        self.persist();
        if !self.is_inside_snapshot() {
            self.checkpoints.close_open();
        }
        self.checkpoints.drop_persisted(self.persisted_seqno, Seqno::MAX, Seqno::MAX, 0);
        self.checkpoints.begin_as_after_restart();
    }

    /// Changes the state, which begins a new incarnation.
    pub(super) fn set_state(&mut self, state: VBucketState) {
        if self.state == VBucketState::Active {
            self.snapshot = Snapshot::at(self.high_seqno);
        }
        self.state = state;
        self.begin_life();
    }

    /// Begins a new incarnation, which ends the streams of the copy.
    pub(super) fn begin_life(&mut self) {
        self.incarnation = next_incarnation();
        self.locks.release_all();
    }

    /// Makes a replica the active copy, on the branch `vbuuid`; `None` continues the current one,
    /// as in a takeover.
    pub(super) fn promote(&mut self, vbuuid: Option<Vbuuid>) {
        self.become_active(vbuuid);
        self.checkpoints.begin(Seqno(self.high_seqno.0 + 1));
    }

    /// Makes the copy active, on a new branch if there is one.
    pub(super) fn become_active(&mut self, vbuuid: Option<Vbuuid>) {
        self.persist();
        if let Some(vbuuid) = vbuuid {
            let begins = self.consistent_seqno();
            self.failover.create_entry(vbuuid, begins);
        }
        // The rest of a snapshot from disk will not arrive, nor its purges.
        self.purge_seqno = self.purge_seqno.min(self.high_seqno);
        if self.from_disk.take().is_some() {
            self.leave_to_disk();
        }
        self.set_state(VBucketState::Active);
        self.durable.decide_all_by_copies();
        // In the data folder, another copy may still be the active one.
        self.disk.begin_generation();
        self.flush_progress.reset();
    }

    /// Whether a replica may have received only a part of a snapshot.
    pub(super) fn is_inside_snapshot(&self) -> bool {
        let Snapshot { start, end } = self.snapshot;
        self.state != VBucketState::Active && start <= self.high_seqno && self.high_seqno < end
    }

    /// Seqno up to which the history is certainly the one that other nodes have seen: the end of
    /// the last snapshot that is complete on disk, or the start of an incomplete one.
    pub(super) fn consistent_seqno(&self) -> Seqno {
        let Snapshot { start, end } = self.persisted_snapshot;
        if self.persisted_seqno >= end { self.persisted_seqno } else { start }
    }

    /// Removes persisted tombstones up to `to`, except for the last change on disk.
    pub(crate) fn purge(&mut self, to: Seqno) {
        self.persist_and_evict();
        self.compact(to);
    }

    /// Like [`purge`](Self::purge), but leaves memory unchanged.
    pub(crate) fn compact(&mut self, to: Seqno) {
        self.persist();
        let (last, to) = (self.persisted_seqno, to.min(self.persisted_seqno));
        let mut purged = Vec::new();
        self.table.retain(|slot| {
            let item = &slot.newest;
            let tombstone = matches!(item.kind, ItemKind::Deletion | ItemKind::Expiration);
            let purge = tombstone && item.seqno <= to && item.seqno != last;
            if purge {
                purged.push(Arc::clone(item));
            }
            !purge
        });
        if !purged.is_empty() {
            self.disk.begin_generation();
        }
        for item in purged {
            self.collections.have_purged(&[(item.collection_id, item.seqno)].into());
            self.disk.remove(item.seqno);
            self.purge_seqno = self.purge_seqno.max(item.seqno);
            self.count(&item, false);
        }
        let gone = self.history.forget_below(self.purge_seqno);
        self.forget_versions(gone);
    }

    /// Keys of the documents whose expiry has passed.
    pub(super) fn expired_keys(&self, now: Now) -> Vec<(CollectionId, Bytes)> {
        if self.live.expiring == 0 {
            return Vec::new();
        }
        let expired = |item: &&Arc<Item>| is_expired(item, now);
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

/// A number no copy of a vBucket in this process has had.
fn next_incarnation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}
