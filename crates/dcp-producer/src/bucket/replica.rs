//! How a replica applies the changes of its stream.

use std::sync::Arc;

use bytes::Bytes;
use dcp_producer_proto::replica::{Completion, NotApplied, ReplicaPosition};
use dcp_producer_proto::{FailoverTable, Item, ItemKind, VBucketState};
use dcp_proto::Snapshot;
use dcp_wire::message::{DurabilityLevel, FailoverEntry, SnapshotFlags, SnapshotMarker};
use dcp_wire::{Cas, Datatype, DocKey, RevSeqno, Seqno};

use super::collections::PurgedTombstones;
use super::durable::completed;
use super::hash_table::Identity;
use super::vbucket::VBucket;

/// Longest gap of seqnos that memory keeps slots for. After a longer one it starts over.
const MAX_GAP: u64 = 10_000;

impl VBucket {
    pub(crate) fn replica_position(&self) -> ReplicaPosition {
        ReplicaPosition {
            high_seqno: self.high_seqno,
            snapshot: self.snapshot,
            persisted_seqno: self.safe_seqno(),
        }
    }

    /// The durable writes that are prepared but not completed.
    pub(crate) fn prepared(&self) -> Vec<(Seqno, DurabilityLevel)> {
        self.durable.prepared().collect()
    }

    /// Drops the newest branch unless it is the only one.
    pub(crate) fn drop_newest_branch(&mut self) {
        if let [newest, older @ ..] = self.failover.entries()
            && !older.is_empty()
        {
            let (newest, older) = (newest.vbuuid, older.to_vec());
            (self.failover, _) = FailoverTable::load(older, newest, self.high_seqno);
        }
    }

    /// Rolls back to `to`, to the nearest earlier point that can be restored, or to 0. The next stream
    /// brings the failover log of the active copy.
    pub(crate) fn roll_back_replica(&mut self, to: Seqno) {
        let (at, to) = (self.high_seqno, self.last_restorable(to));
        let is_known = |entry: &FailoverEntry| entry.seqno <= to;
        let known: Vec<_> = self.failover.entries().iter().copied().filter(is_known).collect();
        let vbuuid = self.vbuuid();
        if to == Seqno::ZERO || to >= at || known.is_empty() || self.rewind(to).is_err() {
            self.reset(vbuuid);
            return;
        }
        (self.failover, _) = FailoverTable::load(known, vbuuid, to);
    }

    /// Starts receiving a snapshot.
    pub(crate) fn begin_snapshot(&mut self, marker: &SnapshotMarker) {
        let SnapshotMarker { start_seqno: start, end_seqno: end, flags, .. } = *marker;
        let is_cut = self.is_inside_snapshot();
        // The rest of one from disk may arrive in another snapshot, after the connection was cut.
        if self.from_disk.is_some() {
            self.leave_to_disk();
        }
        // Checkpoints are those of the active copy, but none ends inside a snapshot.
        if !is_cut && flags.intersects(SnapshotFlags::CHECKPOINT | SnapshotFlags::DISK) {
            self.checkpoints.begin(start);
        }
        self.snapshot = Snapshot { start, end };
        self.is_thinned = false;
        self.from_disk = flags.contains(SnapshotFlags::DISK).then_some(*marker);
        if self.from_disk.is_none() {
            return;
        }
        if self.high_seqno == Seqno::ZERO {
            self.initial_snapshot_end = end;
        }
        let purged = marker.purge_seqno.unwrap_or_default();
        if purged > self.purge_seqno {
            self.purge_seqno = purged;
            self.note_purge();
        }
    }

    /// Assumes that what was purged elsewhere was in every collection: markers do not say.
    fn note_purge(&mut self) {
        let purge_seqno = self.purge_seqno;
        let ids = self.collections.collections.keys().copied();
        let purged: PurgedTombstones = ids.map(|id| (id, purge_seqno)).collect();
        self.collections.have_purged(&purged);
    }

    /// Applies the next change of the snapshot.
    pub(crate) fn receive(&mut self, item: Item) {
        if item.seqno <= self.high_seqno {
            return;
        }
        self.note_gap(item.seqno);
        self.clock.observe(item.cas);
        self.note_version(&item);
        let is_far = item.seqno.0 - self.high_seqno.0 > MAX_GAP;
        if is_far {
            self.leave_to_disk();
            self.forget_checkpoints(Seqno(item.seqno.0 - 1));
        }
        self.take_in(Arc::new(item));
        if is_far {
            self.persist_everything();
        }
        self.end_snapshot_if_whole();
    }

    /// Notes a version of a document that comes from a disk, or another prepare. An earlier prepared
    /// write of the document is completed then, since no other write is allowed meanwhile; so are
    /// those before it. Data from disk shows no more than that.
    pub(super) fn note_version(&mut self, item: &Item) {
        let ends_write = matches!(
            item.kind,
            ItemKind::Mutation
                | ItemKind::Deletion
                | ItemKind::Expiration
                | ItemKind::Prepare { .. }
        );
        let key = DocKey { collection_id: item.collection_id, key: &item.key };
        if ends_write && let Some(prepared) = self.outstanding(key) {
            self.durable.catch_up(prepared, item.seqno);
        }
    }

    /// Moves on to `seqno`, up to which no change concerns this copy. Memory cannot hold such a
    /// position, so it goes to disk even while persistence is held.
    pub(crate) fn receive_nothing_up_to(&mut self, seqno: Seqno) {
        if seqno <= self.high_seqno {
            return;
        }
        self.note_gap(seqno);
        self.high_seqno = seqno;
        self.leave_to_disk();
        self.end_snapshot_if_whole();
    }

    /// Completes a durable write as the active copy did. A backfill leaves out the prepares of
    /// completed writes, so an abort may come without its prepare.
    pub(crate) fn receive_completion(
        &mut self,
        completion: &Completion<'_>,
    ) -> Result<(), NotApplied> {
        let Completion { key: DocKey { collection_id, key }, prepared_seqno, seqno, is_commit } =
            *completion;
        let slot = self.table.find(Identity::Prepared(collection_id, key));
        let prepare = slot.map(|slot| &*slot.newest).filter(|it| it.seqno == prepared_seqno);
        let item = match prepare {
            Some(prepare) => completed(prepare.clone(), is_commit),
            None if is_commit => return Err(NotApplied),
            None => Item {
                kind: ItemKind::Abort { prepared: prepared_seqno },
                seqno,
                rev_seqno: RevSeqno(0),
                cas: Cas(0),
                collection_id,
                key: Bytes::copy_from_slice(key),
                value: Bytes::new(),
                datatype: Datatype::RAW,
                flags: 0,
                expiry: 0,
                delete_time: 0,
            },
        };
        self.receive(Item { seqno, ..item });
        Ok(())
    }

    /// Changes the state as the previous owner of the vBucket demands. The history continues.
    pub(crate) fn take_over(&mut self, state: VBucketState) {
        match state {
            VBucketState::Active => self.promote(None),
            _ => self.set_state(state),
        }
    }

    /// Notes that the snapshot leaves out versions that it replaces later: from here to its end, the
    /// states of this copy are not those other copies had.
    fn note_gap(&mut self, seqno: Seqno) {
        let before = self.high_seqno;
        if self.is_thinned || seqno.0 == before.0 + 1 {
            return;
        }
        self.is_thinned = true;
        self.snapshot.start = self.snapshot.start.min(before);
        let oldest = self.history.floor();
        self.thinned.retain(|&(_, end)| end > oldest);
        self.thinned.push((before, self.snapshot.end));
    }

    /// Moves what memory holds to disk. A snapshot that came from a backfill lacks purged deletions
    /// and the prepares of completed writes, and only a backfill may pass it on.
    pub(super) fn leave_to_disk(&mut self) {
        self.persist_everything();
        self.forget_checkpoints(self.high_seqno);
    }

    fn end_snapshot_if_whole(&mut self) {
        let Some(marker) = self.from_disk.filter(|_| self.high_seqno >= self.snapshot.end) else {
            return;
        };
        self.from_disk = None;
        self.durable.catch_up(marker.high_completed_seqno.unwrap_or_default(), self.high_seqno);
        self.note_purge();
        self.leave_to_disk();
    }
}
