//! Kinds and origins of a batch's rows.

use arrow_buffer::ScalarBuffer;
use dcp_proto::{Op, SinkError};
use dcp_wire::{Seqno, Vbid};

/// Kind of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RowKind {
    Mutation,
    Deletion,
    Expiration,
    Rollback,
    SystemEvent,
    CaughtUp,
}

impl From<Op> for RowKind {
    #[inline]
    fn from(op: Op) -> Self {
        match op {
            Op::Mutation => Self::Mutation,
            Op::Deletion => Self::Deletion,
            Op::Expiration => Self::Expiration,
        }
    }
}

impl RowKind {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Mutation => "mutation",
            Self::Deletion => "deletion",
            Self::Expiration => "expiration",
            Self::Rollback => "rollback",
            Self::SystemEvent => "system_event",
            Self::CaughtUp => "caught_up",
        }
    }

    pub(crate) const fn is_document(self) -> bool {
        matches!(self, Self::Mutation | Self::Deletion | Self::Expiration)
    }
}

/// vBucket and seqno of each row, for errors.
pub(crate) struct Places {
    pub(crate) vbuckets: ScalarBuffer<i32>,
    pub(crate) seqnos: ScalarBuffer<i64>,
}

impl Places {
    #[cold]
    pub(crate) fn of(&self, row: usize) -> (Vbid, Seqno) {
        let vbid = self.vbuckets.get(row).and_then(|vbid| u16::try_from(*vbid).ok());
        let seqno = self.seqnos.get(row).copied().unwrap_or_default().cast_unsigned();
        (Vbid(vbid.unwrap_or_default()), Seqno(seqno))
    }

    #[cold]
    pub(crate) fn error(&self, row: usize, what: String) -> SinkError {
        let (vbid, seqno) = self.of(row);
        unrepresentable(vbid, seqno, what)
    }

    /// The error of a malformed document.
    #[cold]
    pub(crate) fn malformed(&self, row: usize, what: String) -> SinkError {
        match self.error(row, what) {
            SinkError::Unrepresentable { vbid, seqno, what } => {
                SinkError::Malformed { vbid, seqno, what }
            }
            other => other,
        }
    }
}

#[cold]
pub(crate) const fn unrepresentable(vbid: Vbid, seqno: Seqno, what: String) -> SinkError {
    SinkError::Unrepresentable { vbid, seqno, what }
}
