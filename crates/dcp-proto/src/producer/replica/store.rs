//! What the consumer's end asks of the storage it feeds.

use dcp_wire::message::{DurabilityLevel, SnapshotMarker};
use dcp_wire::{DocKey, Seqno, Vbid};
use thiserror::Error;

use crate::Snapshot;
use crate::producer::{FailoverTable, Item, VBucketState};

/// Where a copy of a vBucket stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaPosition {
    /// The last change it has.
    pub high_seqno: Seqno,
    /// Snapshot that change lies in.
    pub snapshot: Snapshot,
    /// Highest seqno on disk.
    pub persisted_seqno: Seqno,
}

/// The end of a durable write, as COMMIT and ABORT tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion<'a> {
    /// Document that was written.
    pub key: DocKey<'a>,
    /// Where the write began.
    pub prepared_seqno: Seqno,
    /// Where it ended.
    pub seqno: Seqno,
    /// Whether it took effect.
    pub is_commit: bool,
}

/// A durable write was completed that the copy knows nothing of.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("no write of this document is prepared")]
pub struct NotApplied;

/// One node's copies of vBuckets, as the consumer's end changes them.
///
/// Seqnos have been checked against the snapshot by then. A vBucket may go away at any time: what
/// is asked of one that is not there has no effect.
pub trait ReplicaStore {
    /// State of the copy; `None` if the node has none.
    fn state(&self, vbid: Vbid) -> Option<VBucketState>;

    /// Where the copy stands; `None` if the node has none.
    fn position(&self, vbid: Vbid) -> Option<ReplicaPosition>;

    /// History branches of the copy; `None` if the node has none.
    fn failover_table(&self, vbid: Vbid) -> Option<FailoverTable>;

    /// Replaces the history branches by those of the producer.
    fn set_failover_table(&self, vbid: Vbid, table: FailoverTable);

    /// Forgets the newest branch, on which nothing was written.
    fn drop_newest_branch(&self, vbid: Vbid);

    /// Goes back to `to`, or to the nearest point before it that can be restored: to 0 if there is
    /// none.
    fn roll_back(&self, vbid: Vbid, to: Seqno);

    /// A snapshot begins.
    fn begin_snapshot(&self, vbid: Vbid, marker: &SnapshotMarker);

    /// Takes a change in.
    fn apply(&self, vbid: Vbid, item: Item);

    /// Completes a durable write.
    ///
    /// # Errors
    /// [`NotApplied`] if the copy has no such write.
    fn complete(&self, vbid: Vbid, completion: &Completion<'_>) -> Result<(), NotApplied>;

    /// Nothing up to `seqno` concerns this copy.
    fn advance(&self, vbid: Vbid, seqno: Seqno);

    /// The durable writes that are prepared and no more, by the seqnos of their prepares.
    fn prepared(&self, vbid: Vbid) -> Vec<(Seqno, DurabilityLevel)>;

    /// Changes the state at the end of a takeover; the history goes on.
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
        Vec::new()
    }

    fn set_state(&self, _: Vbid, _: VBucketState) {}
}
