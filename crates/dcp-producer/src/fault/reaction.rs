//! What happens to a packet that meets a rule's condition.

use core::num::NonZeroU32;
use core::time::Duration;

use dcp_wire::{Opcode, Seqno, Status};

use super::error::RuleError;

/// Direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the cluster to the client.
    ToClient,
    /// From the client to the cluster.
    ToServer,
}

impl Direction {
    pub(super) const ALL: [Self; 2] = [Self::ToClient, Self::ToServer];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::ToClient => "to_client",
            Self::ToServer => "to_server",
        }
    }
}

/// What happens to a packet.
///
/// Packets that a client did not get still count against its flow-control buffer, as if a network
/// had lost them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reaction {
    /// The packet is lost. A lost request is never answered.
    Drop,
    /// The packet, and everything after it on the connection, is delayed.
    Delay(Duration),
    /// Nothing is read or written from this packet on; the socket stays open.
    HalfOpen,
    /// The connection is closed instead; earlier packets are still written.
    Disconnect,
    /// This many more bytes are written, counted from the packet's first, then the connection is
    /// closed.
    DisconnectAfter(usize),
    /// The request is not executed but answered with a status and an empty body.
    Answer(Status),
    /// The request is answered with NOT_MY_VBUCKET.
    NotMyVbucket {
        /// Whether the answer carries the cluster map.
        map: bool,
    },
    /// The stream request is answered with a rollback to a seqno.
    Rollback(Seqno),
    /// Streams never end: their last message is lost.
    NoStreamEnd,
    /// Snapshots from memory whose end has no message of the stream are never completed: the
    /// SEQNO_ADVANCED behind their items is lost, as on servers with MB-73354.
    NoSnapshotEnd,
    /// The requested stream continues for up to this many changes beyond its end, as far as the
    /// vBucket has them.
    ItemsPastEnd(u64),
    /// A snapshot marker is sent alone: the stream's messages up to the next marker, or up to its
    /// end, are lost.
    MarkerWithoutItems,
    /// An item is preceded by a SEQNO_ADVANCED with the same seqno.
    SeqnoAdvancedBeforeItem,
    /// An out-of-sequence-order snapshot is cut: the connection is closed after this many of its
    /// items, at the latest before its end.
    OsoCut(u64),
    /// Only the packet's first bytes are written, by default half of it; the next packet follows
    /// directly.
    Truncate(Option<usize>),
    /// One byte of the packet is inverted: at this offset, but at most the packet's last, or by
    /// default at one chosen by the rule's seed.
    Corrupt(Option<usize>),
    /// No noops are sent, but they count as answered.
    NoNoop,
    /// Replicas leave this many changes unapplied. Only between nodes.
    Lag(u64),
    /// Replicas ask for a flow-control buffer of this many bytes. Only between nodes.
    Window(NonZeroU32),
}

/// Messages that carry a document or an event with a seqno.
const ITEMS: &[Opcode] =
    &[Opcode::DCP_MUTATION, Opcode::DCP_DELETION, Opcode::DCP_EXPIRATION, Opcode::DCP_SYSTEM_EVENT];

/// Whether a message carries a document or an event.
pub(super) fn is_item(opcode: Opcode) -> bool {
    ITEMS.contains(&opcode)
}

impl Reaction {
    /// Default direction of its packets.
    pub(super) const fn direction(self) -> Direction {
        match self {
            Self::Answer(_)
            | Self::NotMyVbucket { .. }
            | Self::Rollback(_)
            | Self::ItemsPastEnd(_) => Direction::ToServer,
            _ => Direction::ToClient,
        }
    }

    /// Whether the condition may choose another direction.
    pub(super) const fn goes_both_ways(self) -> bool {
        matches!(self, Self::Drop | Self::Delay(_) | Self::HalfOpen | Self::Disconnect)
    }

    /// Whether it can happen to connections between nodes.
    pub(super) const fn is_between_nodes(self) -> bool {
        matches!(self, Self::HalfOpen | Self::Disconnect) || self.is_only_between_nodes()
    }

    /// Whether it can happen to nothing else.
    pub(super) const fn is_only_between_nodes(self) -> bool {
        matches!(self, Self::Lag(_) | Self::Window(_))
    }

    /// The only opcodes it can apply to; `None` for all.
    pub(super) const fn opcodes(self) -> Option<&'static [Opcode]> {
        match self {
            Self::Rollback(_) | Self::ItemsPastEnd(_) => Some(&[Opcode::DCP_STREAM_REQ]),
            Self::NoStreamEnd => Some(&[Opcode::DCP_STREAM_END]),
            Self::NoSnapshotEnd => Some(&[Opcode::DCP_SEQNO_ADVANCED]),
            Self::MarkerWithoutItems => Some(&[Opcode::DCP_SNAPSHOT_MARKER]),
            Self::SeqnoAdvancedBeforeItem => Some(ITEMS),
            Self::OsoCut(_) => Some(&[Opcode::DCP_OSO_SNAPSHOT]),
            Self::NoNoop => Some(&[Opcode::DCP_NOOP]),
            _ => None,
        }
    }

    pub(super) fn check(self, path: &str) -> Result<(), RuleError> {
        /// Longest delay.
        const MAX_DELAY: Duration = Duration::from_secs(24 * 60 * 60);
        match self {
            Self::Delay(delay) if delay > MAX_DELAY => {
                Err(RuleError::invalid(path, "a delay of at most a day"))
            }
            _ => Ok(()),
        }
    }
}
