//! What a stream holds back until it is on the disks of all copies.

use bytes::BytesMut;
use dcp_wire::message::{StreamEnd, StreamEndReason};
use dcp_wire::{Frame, MAX_BODY_LEN, Opcode, Seqno};

use super::Held;

/// How a message concerns a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Toll {
    /// It passes once this seqno is on all disks, and after what came before it.
    Seqno { seqno: Seqno, is_row: bool },
    /// The stream ends early: it will be opened again behind what was delivered, so that what is
    /// held back comes again.
    Abandon,
    /// It is not held back.
    None,
}

impl Toll {
    /// Whether a message passes where everything up to `open_to` is on all disks.
    pub(super) fn is_paid(self, open_to: Seqno) -> bool {
        match self {
            Self::Seqno { seqno, .. } => seqno <= open_to,
            Self::Abandon | Self::None => true,
        }
    }

    /// By the message.
    pub(super) fn of(frame: &Frame<'_>) -> Self {
        let by_seqno = |is_row| match frame.extras.first_chunk::<8>() {
            Some(seqno) => Self::Seqno { seqno: Seqno(u64::from_be_bytes(*seqno)), is_row },
            // Malformed, which is found out at once.
            None => Self::None,
        };
        match frame.header.opcode {
            Opcode::DCP_MUTATION | Opcode::DCP_DELETION | Opcode::DCP_EXPIRATION => by_seqno(true),
            Opcode::DCP_SYSTEM_EVENT | Opcode::DCP_SEQNO_ADVANCED => by_seqno(false),
            // Passed on with what comes after them.
            Opcode::DCP_SNAPSHOT_MARKER | Opcode::DCP_OSO_SNAPSHOT => {
                Self::Seqno { seqno: Seqno::ZERO, is_row: false }
            }
            Opcode::DCP_STREAM_END => match StreamEnd::decode(frame) {
                Ok(StreamEnd { reason: StreamEndReason::OK }) => {
                    Self::Seqno { seqno: Seqno::ZERO, is_row: false }
                }
                Ok(_) => Self::Abandon,
                Err(_) => Self::None,
            },
            _ => Self::None,
        }
    }
}

/// Messages of one stream in their order, as they came: the first is one whose change is not on the
/// disks of all copies.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// Up to here everything is.
    pub(super) open_to: Seqno,
    pub(super) waiting: Waiting,
    /// The end of the stream is the last of them.
    has_end: bool,
}

/// What is held back.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    /// Whole packets.
    pub(super) packets: BytesMut,
    /// How much that is.
    pub(super) held: Held,
}

impl Gate {
    pub(super) fn is_empty(&self) -> bool {
        self.waiting.packets.is_empty()
    }

    /// Whether the server's end of the stream is held back.
    pub(super) const fn has_end(&self) -> bool {
        self.has_end
    }

    /// Up to where changes that arrive now pass at once.
    pub(super) fn passes(&self) -> Seqno {
        if self.is_empty() { self.open_to } else { Seqno::ZERO }
    }

    /// Whether a message that arrives now passes at once.
    pub(super) fn lets_pass(&self, seqno: Seqno) -> bool {
        self.is_empty() && seqno <= self.open_to
    }

    /// Whether the first message held back may pass now.
    pub(super) fn has_passed(&self) -> bool {
        match Frame::parse(&self.waiting.packets, MAX_BODY_LEN) {
            Ok(Some((frame, _))) => Toll::of(&frame).is_paid(self.open_to),
            _ => false,
        }
    }

    /// Holds a message back.
    pub(super) fn push(&mut self, packet: &[u8], is_end: bool, held: Held) {
        self.waiting.packets.extend_from_slice(packet);
        self.waiting.held += held;
        self.has_end = is_end;
    }

    /// Takes everything that is held back, to be looked at from the first message on.
    pub(super) fn take(&mut self) -> Waiting {
        std::mem::take(&mut self.waiting)
    }

    /// Holds back what is left of what was taken.
    pub(super) fn put_back(&mut self, waiting: Waiting) {
        self.has_end &= !waiting.packets.is_empty();
        self.waiting = waiting;
    }
}
