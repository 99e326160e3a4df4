//! Changes of a stream that are not yet persisted on all copies.

use std::ops::{AddAssign, SubAssign};

use bytes::BytesMut;
use dcp_wire::message::{StreamEnd, StreamEndReason};
use dcp_wire::{Frame, MAX_BODY_LEN, Opcode, Seqno};

/// Amount of changes that are not yet persisted on all copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unpersisted {
    /// Rows.
    pub rows: u64,
    /// Bytes that count towards the window.
    pub bytes: u64,
}

impl AddAssign for Unpersisted {
    fn add_assign(&mut self, other: Self) {
        self.rows += other.rows;
        self.bytes += other.bytes;
    }
}

impl SubAssign for Unpersisted {
    fn sub_assign(&mut self, other: Self) {
        self.rows -= other.rows;
        self.bytes -= other.bytes;
    }
}

/// What must be persisted before a message is handled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needs {
    /// This seqno on all copies; messages keep their order.
    Persisted { seqno: Seqno, is_row: bool },
    /// The stream ends early: it will be reopened after the delivered changes, so the unpersisted
    /// ones are sent again.
    Discard,
    /// Nothing: it never waits.
    Nothing,
}

impl Needs {
    /// Whether a message can be handled if everything up to `persisted_to` is persisted.
    pub(super) fn is_met(self, persisted_to: Seqno) -> bool {
        match self {
            Self::Persisted { seqno, .. } => seqno <= persisted_to,
            Self::Discard | Self::Nothing => true,
        }
    }

    /// By the message.
    pub(super) fn of(frame: &Frame<'_>) -> Self {
        let by_seqno = |is_row| match frame.extras.first_chunk::<8>() {
            Some(seqno) => Self::Persisted { seqno: Seqno(u64::from_be_bytes(*seqno)), is_row },
            // Malformed, which is detected right away.
            None => Self::Nothing,
        };
        match frame.header.opcode {
            Opcode::DCP_MUTATION | Opcode::DCP_DELETION | Opcode::DCP_EXPIRATION => by_seqno(true),
            Opcode::DCP_SYSTEM_EVENT | Opcode::DCP_SEQNO_ADVANCED => by_seqno(false),
            // Handled together with what follows them.
            Opcode::DCP_SNAPSHOT_MARKER | Opcode::DCP_OSO_SNAPSHOT => {
                Self::Persisted { seqno: Seqno::ZERO, is_row: false }
            }
            Opcode::DCP_STREAM_END => match StreamEnd::decode(frame) {
                Ok(StreamEnd { reason: StreamEndReason::OK }) => {
                    Self::Persisted { seqno: Seqno::ZERO, is_row: false }
                }
                Ok(_) => Self::Discard,
                Err(_) => Self::Nothing,
            },
            _ => Self::Nothing,
        }
    }
}

/// Messages of one stream in order of arrival: the change of the first one is not persisted on all
/// copies, so those behind it wait as well.
#[derive(Debug, Default)]
pub(super) struct UnpersistedQueue {
    /// Everything up to here is persisted.
    pub(super) persisted_to: Seqno,
    pub(super) packets: Packets,
    /// The end of the stream is the last of them.
    has_end: bool,
}

/// Packets that are unpersisted.
#[derive(Debug, Default)]
pub(super) struct Packets {
    /// Whole ones.
    pub(super) bytes: BytesMut,
    /// Amount of these packets.
    pub(super) amount: Unpersisted,
}

impl UnpersistedQueue {
    pub(super) fn is_empty(&self) -> bool {
        self.packets.bytes.is_empty()
    }

    /// Whether the server's STREAM_END is one of them.
    pub(super) const fn has_end(&self) -> bool {
        self.has_end
    }

    /// Seqno up to which changes that arrive now are handled at once.
    pub(super) fn takes_up_to(&self) -> Seqno {
        if self.is_empty() { self.persisted_to } else { Seqno::ZERO }
    }

    /// Whether a message that arrives now is handled at once.
    pub(super) fn takes(&self, seqno: Seqno) -> bool {
        self.is_empty() && seqno <= self.persisted_to
    }

    /// Whether the first message can be handled now.
    pub(super) fn is_first_persisted(&self) -> bool {
        match Frame::parse(&self.packets.bytes, MAX_BODY_LEN) {
            Ok(Some((frame, _))) => Needs::of(&frame).is_met(self.persisted_to),
            _ => false,
        }
    }

    /// Queues a message whose change is not persisted.
    pub(super) fn push(&mut self, packet: &[u8], is_end: bool, amount: Unpersisted) {
        self.packets.bytes.extend_from_slice(packet);
        self.packets.amount += amount;
        self.has_end = is_end;
    }

    /// Takes all messages out, to be checked from the first one on.
    pub(super) fn take(&mut self) -> Packets {
        std::mem::take(&mut self.packets)
    }

    /// Puts the remaining messages back.
    pub(super) fn put_back(&mut self, packets: Packets) {
        self.has_end &= !packets.bytes.is_empty();
        self.packets = packets;
    }
}
