//! The stream that feeds one replica.

use std::collections::VecDeque;

use dcp_wire::message::{
    Abort, Commit, DurabilityLevel, SeqnoAdvanced, SetVbucketState, SnapshotFlags, SnapshotMarker,
    StreamAddress, StreamRequest, StreamRequestFlags, VbucketState,
};
use dcp_wire::{DecodeError, Frame, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};

use super::item::{decode, doc_key};
use super::store::{Completion, NotApplied, ReplicaPosition, ReplicaStore};
use crate::{ItemKind, VBucketState};
use dcp_proto::Snapshot;

/// The highest possible seqno: servers use signed numbers.
const MAX_SEQNO: Seqno = Seqno(u64::MAX >> 1);

/// State of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Not requested yet.
    Queued,
    /// The request has been sent.
    Requested,
    /// The request was accepted.
    Open,
}

/// The current snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Receiving {
    snapshot: Snapshot,
    wants_ack: bool,
}

/// Why a message was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rejected {
    /// Answer it with this status.
    Status(Status),
    /// It does not have the layout of its opcode.
    Malformed(DecodeError),
    /// It is out of order or outside its snapshot. Closes the connection.
    OutOfRange(Seqno),
    /// It commits a write that was not prepared. Closes the connection, as applying what follows would
    /// lose the write.
    NotPrepared(Seqno),
    /// A marker contradicts itself, or lacks what a replica needs. Closes the connection.
    BadMarker,
}

impl From<DecodeError> for Rejected {
    fn from(error: DecodeError) -> Self {
        Self::Malformed(error)
    }
}

/// How an accepted message is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// Not at all.
    Silently,
    /// By acknowledging the snapshot that it completes.
    SnapshotReceived,
    /// With success.
    Done,
}

/// A stream that feeds one replica.
#[derive(Debug)]
pub(super) struct Stream {
    pub(super) vbid: Vbid,
    pub(super) opaque: Opaque,
    flags: StreamRequestFlags,
    /// Opaque of the ADD_STREAM that is still unanswered.
    pub(super) asked_by: Option<Opaque>,
    pub(super) phase: Phase,
    /// Start of the request.
    requested: Seqno,
    last: Seqno,
    receiving: Option<Receiving>,
    /// Up to here, every snapshot is complete.
    complete: Seqno,
    /// Unacknowledged prepares by their seqnos, and whether they have to be persisted first.
    prepares: VecDeque<(Seqno, bool)>,
}

impl Stream {
    pub(super) const fn new(
        vbid: Vbid,
        opaque: Opaque,
        flags: StreamRequestFlags,
        asked_by: Opaque,
    ) -> Self {
        Self {
            vbid,
            opaque,
            flags,
            asked_by: Some(asked_by),
            phase: Phase::Queued,
            requested: Seqno::ZERO,
            last: Seqno::ZERO,
            receiving: None,
            complete: Seqno::ZERO,
            prepares: VecDeque::new(),
        }
    }

    pub(super) const fn address(&self) -> StreamAddress {
        StreamAddress { vbid: self.vbid, opaque: self.opaque, stream_id: None }
    }

    /// The stream request; `None` if the node no longer has the copy.
    pub(super) fn request(&mut self, store: &dyn ReplicaStore) -> Option<StreamRequest<'static>> {
        let ReplicaPosition { high_seqno, snapshot, .. } = store.position(self.vbid)?;
        let newest = store.failover_table(self.vbid)?.newest().vbuuid;
        let vbuuid = if high_seqno == Seqno::ZERO { Vbuuid(0) } else { newest };
        let Snapshot { start, end } = if snapshot.end <= high_seqno {
            Snapshot::at(high_seqno)
        } else {
            Snapshot { start: snapshot.start.min(high_seqno), ..snapshot }
        };
        self.requested = high_seqno;
        self.last = high_seqno;
        self.complete = start;
        self.phase = Phase::Requested;
        Some(StreamRequest {
            vbid: self.vbid,
            opaque: self.opaque,
            flags: self.flags,
            start_seqno: high_seqno,
            end_seqno: Seqno::MAX,
            vbuuid,
            snapshot_start: start,
            snapshot_end: end,
            value: &[],
        })
    }

    /// Rolls back to request again with `opaque`; `false` if the copy is empty already.
    pub(super) fn roll_back(
        &mut self,
        to: Seqno,
        opaque: Opaque,
        store: &dyn ReplicaStore,
    ) -> bool {
        let start = self.requested;
        if start == Seqno::ZERO {
            return false;
        }
        // If nothing was written on the newest branch, the producer may know the one before it.
        let table = store.failover_table(self.vbid);
        let has_older = table.as_ref().is_some_and(|table| table.entries().len() > 1);
        let is_unwritten = table.is_some_and(|table| table.newest().seqno == start);
        if to == Seqno::ZERO && has_older && is_unwritten {
            store.drop_newest_branch(self.vbid);
        } else {
            store.roll_back(self.vbid, to);
        }
        self.opaque = opaque;
        self.phase = Phase::Queued;
        true
    }

    /// The producer accepted the request.
    pub(super) fn open(&mut self, store: &dyn ReplicaStore) {
        self.phase = Phase::Open;
        self.prepares = store
            .prepared(self.vbid)
            .into_iter()
            .map(|(seqno, level)| (seqno, needs_disk(level)))
            .collect();
    }

    pub(super) fn marker(
        &mut self,
        frame: &Frame<'_>,
        is_replicating: bool,
        store: &dyn ReplicaStore,
    ) -> Result<Taken, Rejected> {
        let marker = SnapshotMarker::decode(frame)?;
        let SnapshotMarker { start_seqno, end_seqno, flags, .. } = marker;
        if start_seqno > end_seqno {
            return Err(Rejected::Status(Status::EINVAL));
        }
        if start_seqno < self.last && end_seqno <= self.last {
            return Err(Rejected::OutOfRange(end_seqno));
        }
        let is_disk = flags.contains(SnapshotFlags::DISK);
        let seqnos = [marker.max_visible_seqno, marker.purge_seqno, marker.high_prepared_seqno];
        if seqnos.into_iter().flatten().any(|seqno| seqno > end_seqno)
            || (is_disk && is_replicating && marker.high_completed_seqno.is_none())
        {
            return Err(Rejected::BadMarker);
        }
        self.check_state(store)?;
        store.begin_snapshot(self.vbid, &marker);
        self.receiving = Some(Receiving {
            snapshot: Snapshot { start: start_seqno, end: end_seqno },
            wants_ack: flags.contains(SnapshotFlags::ACK),
        });
        Ok(Taken::Silently)
    }

    /// Handles a change, or SEQNO_ADVANCED.
    pub(super) fn change(
        &mut self,
        frame: &Frame<'_>,
        collections: bool,
        store: &dyn ReplicaStore,
    ) -> Result<Taken, Rejected> {
        match frame.header.opcode {
            Opcode::DCP_SEQNO_ADVANCED => {
                let seqno = SeqnoAdvanced::decode(frame)?.seqno;
                self.follow(seqno, store)?;
                store.advance(self.vbid, seqno);
                Ok(self.received(seqno))
            }
            Opcode::DCP_COMMIT => {
                let Commit { prepared_seqno, commit_seqno: seqno, key } = Commit::decode(frame)?;
                let key = doc_key(key, collections)?;
                self.complete(Completion { key, prepared_seqno, seqno, is_commit: true }, store)
            }
            Opcode::DCP_ABORT => {
                let Abort { prepared_seqno, abort_seqno: seqno, key } = Abort::decode(frame)?;
                let key = doc_key(key, collections)?;
                self.complete(Completion { key, prepared_seqno, seqno, is_commit: false }, store)
            }
            _ => {
                let item = decode(frame, collections)?;
                let seqno = item.seqno;
                self.follow(seqno, store)?;
                if let ItemKind::Prepare { level, .. } = item.kind {
                    self.prepares.push_back((seqno, needs_disk(level)));
                }
                store.apply(self.vbid, item);
                Ok(self.received(seqno))
            }
        }
    }

    fn complete(
        &mut self,
        completion: Completion<'_>,
        store: &dyn ReplicaStore,
    ) -> Result<Taken, Rejected> {
        self.follow(completion.seqno, store)?;
        let seqno = completion.seqno;
        store
            .complete(self.vbid, &completion)
            .map_err(|NotApplied| Rejected::NotPrepared(seqno))?;
        // A completed write holds up no other.
        let prepared = completion.prepared_seqno;
        if let Ok(at) = self.prepares.binary_search_by_key(&prepared, |&(seqno, _)| seqno) {
            self.prepares.remove(at);
        }
        Ok(self.received(completion.seqno))
    }

    /// Handles SET_VBUCKET_STATE at the end of a takeover.
    pub(super) fn set_state(
        &self,
        frame: &Frame<'_>,
        store: &dyn ReplicaStore,
    ) -> Result<Taken, Rejected> {
        let state = match SetVbucketState::decode(frame)?.state {
            VbucketState::ACTIVE => VBucketState::Active,
            VbucketState::REPLICA => VBucketState::Replica,
            VbucketState::PENDING => VBucketState::Pending,
            _ => VBucketState::Dead,
        };
        if store.state(self.vbid).is_none() {
            return Err(Rejected::Status(Status::NOT_MY_VBUCKET));
        }
        store.set_state(self.vbid, state);
        Ok(Taken::Done)
    }

    /// The highest prepare up to which the copy holds all prepares as their levels demand; `None` if
    /// that has been acknowledged already.
    pub(super) fn take_acknowledged(&mut self, persisted: Seqno) -> Option<Seqno> {
        let mut acknowledged = None;
        while let Some(&(seqno, on_disk)) = self.prepares.front()
            && seqno <= self.complete
            && (!on_disk || seqno <= persisted)
        {
            acknowledged = Some(seqno);
            self.prepares.pop_front();
        }
        acknowledged
    }

    /// Whether any prepare is unacknowledged.
    pub(super) fn has_prepares(&self) -> bool {
        !self.prepares.is_empty()
    }

    /// Checks that a seqno is above the last one and within the snapshot.
    fn follow(&self, seqno: Seqno, store: &dyn ReplicaStore) -> Result<(), Rejected> {
        let fits = |receiving: Receiving| receiving.snapshot.contains(seqno);
        if seqno <= self.last || seqno > MAX_SEQNO || !self.receiving.is_some_and(fits) {
            return Err(Rejected::OutOfRange(seqno));
        }
        self.check_state(store)
    }

    /// Refuses changes to a copy that is neither a replica nor pending.
    fn check_state(&self, store: &dyn ReplicaStore) -> Result<(), Rejected> {
        match store.state(self.vbid) {
            Some(VBucketState::Replica | VBucketState::Pending) => Ok(()),
            _ => Err(Rejected::Status(Status::NOT_MY_VBUCKET)),
        }
    }

    fn received(&mut self, seqno: Seqno) -> Taken {
        self.last = seqno;
        let Some(received) = self.receiving.filter(|receiving| receiving.snapshot.end == seqno)
        else {
            return Taken::Silently;
        };
        self.complete = seqno;
        if received.wants_ack { Taken::SnapshotReceived } else { Taken::Silently }
    }
}

/// Whether a prepare is acknowledged only once it is on disk.
fn needs_disk(level: DurabilityLevel) -> bool {
    level == DurabilityLevel::PERSIST_TO_MAJORITY
}
