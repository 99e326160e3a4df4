//! What is read of one vBucket.

use dcp_wire::{Seqno, Vbid, Vbuuid};

use crate::Rollback;
use crate::consumer::{PositionUpdate, StreamPosition};

/// What is read of one vBucket: its changes above a position, up to and including a seqno.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VbucketRange {
    /// The vBucket.
    pub vbid: Vbid,
    /// Where reading begins, with the points that a rollback can go back to.
    pub from: StreamPosition,
    /// Last seqno to read; [`Seqno::MAX`] in a read without an end.
    pub to: Seqno,
    /// Whether to deliver a rollback to the beginning of the range before the changes.
    pub rolled_back: bool,
    /// Whether to skip deletions that the server has purged above the beginning.
    pub past_purge: bool,
}

impl VbucketRange {
    /// The changes of a vBucket from a position on.
    #[must_use]
    pub const fn new(vbid: Vbid, from: StreamPosition, to: Seqno) -> Self {
        Self { vbid, from, to, rolled_back: false, past_purge: false }
    }

    /// Seqno above which reading begins.
    #[must_use]
    pub const fn start_seqno(&self) -> Seqno {
        self.from.position.seqno
    }

    /// Branch to name in the stream request; 0 from the beginning.
    #[must_use]
    pub fn vbuuid(&self) -> Vbuuid {
        self.from.position.vbuuid()
    }

    /// Epoch of the changes.
    #[must_use]
    pub const fn epoch(&self) -> u32 {
        self.from.position.epoch
    }

    /// Number of seqnos; de-duplication leaves fewer changes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.to.0.saturating_sub(self.start_seqno().0)
    }

    /// The rollback to deliver before the changes. What was left is not known.
    #[must_use]
    pub fn rollback(&self) -> Option<Rollback> {
        self.rolled_back.then(|| Rollback {
            vbid: self.vbid,
            seqno: self.start_seqno(),
            from_seqno: self.start_seqno(),
            old_vbuuid: self.vbuuid(),
            new_vbuuid: self.vbuuid(),
            epoch: self.epoch(),
        })
    }
}

/// The position that a range begins at.
impl From<VbucketRange> for PositionUpdate {
    fn from(range: VbucketRange) -> Self {
        let StreamPosition { position, history, .. } = range.from;
        Self { vbid: range.vbid, position, history }
    }
}
