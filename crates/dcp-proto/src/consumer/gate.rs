//! What a stream holds back until it is on the disks of all copies.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};
use dcp_wire::message::{StreamEnd, StreamEndReason};
use dcp_wire::{Frame, Opcode, Seqno};

/// A message that is held back.
#[derive(Debug)]
struct Message {
    /// Passes once this is on all disks.
    seqno: Seqno,
    len: usize,
    counted: u64,
    is_row: bool,
}

/// A message that has passed.
#[derive(Debug)]
pub(super) struct Passed {
    pub(super) packet: Bytes,
    pub(super) counted: u64,
    pub(super) is_row: bool,
}

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

/// Messages of one stream in their order, up to the first whose change is not on the disks of all
/// copies.
#[derive(Debug, Default)]
pub(super) struct Gate {
    /// Up to here everything is.
    pub(super) open_to: Seqno,
    messages: VecDeque<Message>,
    packets: BytesMut,
    /// The end of the stream is the last of them.
    has_end: bool,
}

impl Gate {
    pub(super) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    /// Whether the server's end of the stream is held back.
    pub(super) const fn has_end(&self) -> bool {
        self.has_end
    }

    /// Whether a message that arrives now passes at once.
    pub(super) fn lets_pass(&self, seqno: Seqno) -> bool {
        self.is_empty() && seqno <= self.open_to
    }

    /// Whether the first message held back may pass now.
    pub(super) fn has_passed(&self) -> bool {
        self.messages.front().is_some_and(|first| first.seqno <= self.open_to)
    }

    /// Holds a message back.
    pub(super) fn push(&mut self, frame: &Frame<'_>, seqno: Seqno, is_row: bool, counted: u64) {
        let before = self.packets.len();
        // What was parsed fits a packet.
        let encoded = frame.encode(&mut self.packets);
        debug_assert!(encoded.is_ok(), "a packet that was parsed encodes");
        let len = self.packets.len() - before;
        self.messages.push_back(Message { seqno, len, counted, is_row });
        self.has_end = frame.header.opcode == Opcode::DCP_STREAM_END;
    }

    /// The first message, if it may pass.
    pub(super) fn pop(&mut self) -> Option<Passed> {
        if !self.has_passed() {
            return None;
        }
        let Message { len, counted, is_row, .. } = self.messages.pop_front()?;
        let packet = self.packets.split_to(len.min(self.packets.len())).freeze();
        if self.is_empty() {
            // A burst leaves no memory behind.
            self.packets = BytesMut::new();
            self.has_end = false;
        }
        Some(Passed { packet, counted, is_row })
    }

    /// Drops everything held back: how many rows, and how many counted bytes.
    pub(super) fn clear(&mut self) -> (u64, u64) {
        let rows = self.messages.iter().filter(|message| message.is_row).count();
        let counted = self.messages.iter().map(|message| message.counted).sum();
        self.messages = VecDeque::new();
        self.packets = BytesMut::new();
        self.has_end = false;
        (rows as u64, counted)
    }
}
