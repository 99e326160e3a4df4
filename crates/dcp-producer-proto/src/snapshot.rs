//! A snapshot that is sent from the source to the client.

use std::collections::BTreeSet;
use std::sync::Arc;

use dcp_wire::{EncodeError, Seqno};
use thiserror::Error;

use super::message_format::Unsendable;
use super::read_ahead::{CheckpointRest, DiskItems};
use super::{BackfillFailed, DurableSeqnos, Item};

/// Outcome of one step of a snapshot.
pub(super) enum Step {
    /// A message was written.
    Sent,
    /// Many items were read and none passed: let other streams have a turn.
    Scanned,
    /// Everything was written.
    Done,
}

/// Why a snapshot cannot be sent to its end.
#[derive(Clone, Copy, Debug, Error)]
pub(super) enum Unreadable {
    #[error(transparent)]
    Disk(#[from] BackfillFailed),
    #[error(transparent)]
    Item(#[from] Unsendable),
}

impl From<EncodeError> for Unreadable {
    fn from(error: EncodeError) -> Self {
        Self::Item(error.into())
    }
}

/// A snapshot that is being sent.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) items: Items,
    /// Where the snapshot begins if it is not the stream's first.
    pub(super) natural_start: Seqno,
    /// Where it ends for this client; `None` if nothing in it belongs to the stream.
    pub(super) end: Option<Seqno>,
    /// Seqno the stream has read up to once the snapshot is done.
    pub(super) read_up_to: Seqno,
    pub(super) marker_sent: bool,
    /// Highest of its seqnos sent to the client; 0 before.
    pub(super) last_sent: Seqno,
    /// Item from disk that waits to be sent.
    pub(super) next: Option<Arc<Item>>,
    pub(super) durable: DurableSeqnos,
    /// Whether it contains every version.
    pub(super) is_history: bool,
    /// The second part of the snapshot, with the same end.
    pub(super) then: Option<Box<Self>>,
}

impl Sending {
    pub(super) fn new(
        items: Items,
        natural_start: Seqno,
        end: Option<Seqno>,
        read_up_to: Seqno,
    ) -> Self {
        Self {
            items,
            natural_start,
            end,
            read_up_to,
            marker_sent: false,
            last_sent: Seqno::ZERO,
            next: None,
            durable: DurableSeqnos::default(),
            is_history: false,
            then: None,
        }
    }

    /// The same snapshot, announced up to `end` if that is beyond its own end.
    pub(super) fn ending_at(self, end: Option<Seqno>) -> Self {
        Self { end: self.end.max(end), ..self }
    }

    /// Whether it comes from disk.
    pub(super) const fn is_from_disk(&self) -> bool {
        matches!(self.items, Items::Disk { .. })
    }
}

/// The items of a snapshot that are still to be sent.
pub(super) enum Items {
    /// An image of the disk, still to be filtered.
    Disk { rest: DiskItems, purge_seqno: Seqno, superseded: BTreeSet<Seqno> },
    /// A checkpoint.
    Memory(CheckpointRest),
}

impl core::fmt::Debug for Items {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Disk { .. } => "Disk",
            Self::Memory(_) => "Memory",
        })
    }
}
