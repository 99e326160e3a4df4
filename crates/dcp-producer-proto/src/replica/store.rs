//! The storage that the consumer's end feeds.

use dcp_wire::message::{DurabilityLevel, SnapshotMarker};
use dcp_wire::{DocKey, Seqno, Vbid};
use thiserror::Error;

use crate::{FailoverTable, Item, VBucketState};
use dcp_proto::Snapshot;

/// Position of a copy of a vBucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaPosition {
    /// Seqno of its last change.
    pub high_seqno: Seqno,
    /// Snapshot of that change.
    pub snapshot: Snapshot,
    /// Highest seqno on disk.
    pub persisted_seqno: Seqno,
}

/// The end of a durable write, from a COMMIT or an ABORT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion<'a> {
    /// Document that was written.
    pub key: DocKey<'a>,
    /// Seqno of the prepare.
    pub prepared_seqno: Seqno,
    /// Seqno of the commit or abort.
    pub seqno: Seqno,
    /// Whether it was committed.
    pub is_commit: bool,
}

/// A commit of a write that the copy has no prepare of.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the document has no prepared write")]
pub struct NotApplied;

/// One node's copies of vBuckets, as the consumer's end changes them.
///
/// Seqnos are already checked against the snapshot. A vBucket may disappear at any time; calls for
/// one that does not exist have no effect.
pub trait ReplicaStore {
    /// State of the copy; `None` if the node has none.
    fn state(&self, vbid: Vbid) -> Option<VBucketState>;

    /// Position of the copy; `None` if the node has none.
    fn position(&self, vbid: Vbid) -> Option<ReplicaPosition>;

    /// History branches of the copy; `None` if the node has none.
    fn failover_table(&self, vbid: Vbid) -> Option<FailoverTable>;

    /// Replaces the history branches with those of the producer.
    fn set_failover_table(&self, vbid: Vbid, table: FailoverTable);

    /// Drops the newest branch, on which nothing was written.
    fn drop_newest_branch(&self, vbid: Vbid);

    /// Rolls back to `to`, to the nearest earlier point that can be restored, or to 0.
    fn roll_back(&self, vbid: Vbid, to: Seqno);

    /// Starts a snapshot.
    fn begin_snapshot(&self, vbid: Vbid, marker: &SnapshotMarker);

    /// Applies a change.
    fn apply(&self, vbid: Vbid, item: Item);

    /// Completes a durable write.
    ///
    /// # Errors
    /// [`NotApplied`] if it is a commit and the copy has no such prepare.
    fn complete(&self, vbid: Vbid, completion: &Completion<'_>) -> Result<(), NotApplied>;

    /// Moves on to `seqno`, up to which no change concerns this copy.
    fn advance(&self, vbid: Vbid, seqno: Seqno);

    /// The durable writes that are prepared but not completed, in the order of their seqnos.
    fn prepared(&self, vbid: Vbid) -> Vec<(Seqno, DurabilityLevel)>;

    /// Changes the state at the end of a takeover; the history continues.
    fn set_state(&self, vbid: Vbid, state: VBucketState);
}

/// A node without copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NoReplicas;

impl ReplicaStore for NoReplicas {
    fn state(&self, _: Vbid) -> Option<VBucketState> {
        None
    }

    fn position(&self, _: Vbid) -> Option<ReplicaPosition> {
        None
    }

    fn failover_table(&self, _: Vbid) -> Option<FailoverTable> {
        None
    }

    fn set_failover_table(&self, _: Vbid, _: FailoverTable) {}

    fn drop_newest_branch(&self, _: Vbid) {}

    fn roll_back(&self, _: Vbid, _: Seqno) {}

    fn begin_snapshot(&self, _: Vbid, _: &SnapshotMarker) {}

    fn apply(&self, _: Vbid, _: Item) {}

    fn complete(&self, _: Vbid, _: &Completion<'_>) -> Result<(), NotApplied> {
        Err(NotApplied)
    }

    fn advance(&self, _: Vbid, _: Seqno) {}

    fn prepared(&self, _: Vbid) -> Vec<(Seqno, DurabilityLevel)> {
        vec![]
    }

    fn set_state(&self, _: Vbid, _: VBucketState) {}
}
