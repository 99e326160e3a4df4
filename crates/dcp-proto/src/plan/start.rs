//! Where a bounded read begins.

use dcp_wire::message::FailoverEntry;
use dcp_wire::{Seqno, Vbid};

use super::{Offset, Offsets};
use crate::checkpoint::{Checkpoint, CheckpointError, Positions, StoredFilter};
use crate::consumer::StreamPosition;
use crate::topology::Manifest;
use crate::{FailoverLog, Position, Snapshot};

/// Where a bounded read begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Start {
    /// Where an earlier bounded read ended.
    Offsets(Offsets),
    /// Where a stream was, with the snapshots of its positions and the points that a rollback can
    /// go back to. Made by [`Start::checkpoint`].
    Checkpoint {
        /// The checkpoint.
        checkpoint: Checkpoint,
        /// The same, as far as offsets can express it.
        offsets: Offsets,
    },
}

impl Start {
    /// A start at stored positions, on a bucket with this many vBuckets. They are checked when the
    /// start is used.
    #[must_use]
    pub fn new(positions: Positions, filter: StoredFilter, num_vbuckets: u16) -> Self {
        match positions {
            Positions::Offsets(offsets) => Self::Offsets(offsets),
            Positions::Checkpoint(given) => Self::checkpoint(given, filter, num_vbuckets),
        }
    }

    /// The start for a read of `filter`.
    ///
    /// # Errors
    /// [`CheckpointError`], as [`Offsets::narrowed_to`].
    pub fn narrowed_to(
        &self,
        bucket_uuid: &str,
        num_vbuckets: u16,
        filter: &StoredFilter,
        manifest: &Manifest,
    ) -> Result<Self, CheckpointError> {
        Ok(match self {
            Self::Offsets(offsets) => {
                let num_vbuckets = num_vbuckets.into();
                offsets.clone().narrowed_to(bucket_uuid, num_vbuckets, filter, manifest)?.into()
            }
            Self::Checkpoint { checkpoint, .. } => {
                let checkpoint = checkpoint.narrowed_to(bucket_uuid, filter, manifest)?;
                Self::checkpoint(checkpoint, filter.clone(), num_vbuckets)
            }
        })
    }

    /// A start at a checkpoint that is valid for the filter, on a bucket with this many vBuckets.
    #[must_use]
    pub fn checkpoint(checkpoint: Checkpoint, filter: StoredFilter, num_vbuckets: u16) -> Self {
        let mut offsets = Offsets::new(checkpoint.bucket_uuid(), filter, num_vbuckets);
        for (vbid, position) in checkpoint.positions() {
            let (seqno, epoch) = (position.seqno, position.epoch);
            offsets.set(vbid, Offset { seqno, vbuuid: position.vbuuid(), epoch });
        }
        Self::Checkpoint { checkpoint, offsets }
    }

    /// How far each vBucket was read; for a checkpoint, without the snapshots.
    #[must_use]
    pub const fn offsets(&self) -> &Offsets {
        match self {
            Self::Offsets(offsets) | Self::Checkpoint { offsets, .. } => offsets,
        }
    }

    /// The end that a read from here must reach for its offset to be a true position: positions of
    /// a checkpoint may lie inside a snapshot.
    pub(super) fn least_end(&self, vbid: Vbid) -> Option<Seqno> {
        let Self::Checkpoint { checkpoint, .. } = self else { return None };
        let position = checkpoint.position(vbid)?;
        (position.seqno != Seqno::ZERO).then(|| position.request_snapshot().end)
    }

    /// Where a stream of the vBucket resumes.
    pub(super) fn stream_position(&self, vbid: Vbid) -> StreamPosition {
        match self {
            Self::Offsets(offsets) => StreamPosition::new(at(offsets.get(vbid))),
            Self::Checkpoint { checkpoint, .. } => checkpoint.stream_position(vbid),
        }
    }
}

impl From<Offsets> for Start {
    fn from(offsets: Offsets) -> Self {
        Self::Offsets(offsets)
    }
}

/// The position that an offset stands for: a complete snapshot on its branch.
pub(super) fn at(offset: Offset) -> Position {
    let Offset { seqno, vbuuid, epoch } = offset;
    let branch = FailoverEntry { vbuuid, seqno: Seqno::ZERO };
    Position {
        seqno,
        snapshot: Snapshot::at(seqno),
        failover_log: FailoverLog::new(vec![branch]).ok().filter(|_| seqno != Seqno::ZERO),
        epoch,
        ..Position::EARLIEST
    }
}
