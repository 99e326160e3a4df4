//! Errors of a connection.

use core::fmt;

use dcp_wire::{DecodeError, ManifestUid, Opaque, Opcode, Seqno, Status, Vbid};
use thiserror::Error;

use super::ErrorContext;
use crate::{SinkError, Snapshot};

/// What the server did that the protocol does not allow.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Misbehaviour {
    /// A seqno is not above the previous one.
    #[error("seqno {seqno} does not follow {last}")]
    SeqnoNotAscending {
        /// The seqno.
        seqno: Seqno,
        /// The previous seqno.
        last: Seqno,
    },
    /// A seqno is outside its snapshot.
    #[error("seqno {seqno} is outside its snapshot {snapshot}")]
    OutsideSnapshot {
        /// The seqno.
        seqno: Seqno,
        /// The snapshot.
        snapshot: Snapshot,
    },
    /// A message that belongs to a snapshot came before any snapshot.
    #[error("message outside a snapshot")]
    NoSnapshot,
    /// A snapshot marker whose range or fields contradict each other.
    #[error("snapshot marker {snapshot} is impossible after seqno {last}")]
    InvalidMarker {
        /// The snapshot.
        snapshot: Snapshot,
        /// The previous seqno.
        last: Seqno,
    },
    /// An out-of-sequence-order snapshot began above seqno 0 or in another one, or ended outside
    /// one.
    #[error("misplaced out-of-sequence-order snapshot")]
    MisplacedOso,
    /// A failover log that is empty or not a list of entries.
    #[error("invalid failover log")]
    InvalidFailoverLog,
    /// A packet that was not requested.
    #[error("unexpected packet")]
    UnexpectedPacket,
    /// More bytes than the flow-control window allows.
    #[error("flow-control window overrun")]
    WindowOverrun,
}

/// What is wrong with a packet.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProtocolErrorKind {
    /// The bytes do not have the layout of the opcode.
    #[error("malformed packet: {0}")]
    InvalidMessage(#[from] DecodeError),
    /// The packet is well-formed and must not come now.
    #[error("{0}")]
    PeerMisbehaved(#[from] Misbehaviour),
}

/// The server broke the protocol: the connection can no longer be trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolError {
    /// What is wrong.
    pub kind: ProtocolErrorKind,
    /// Opcode of the packet.
    pub opcode: Opcode,
    /// vBucket of the packet.
    pub vbid: Vbid,
    /// Seqno of the packet, the first of the snapshot for a marker; `None` if it carries none.
    pub seqno: Option<Seqno>,
    /// Opaque of the packet.
    pub opaque: Opaque,
}

impl ProtocolError {
    /// Whether `other` is the same violation in the same packet, sent again.
    #[must_use]
    pub fn is_same_packet(&self, other: &Self) -> bool {
        let of = |error: &Self| (error.vbid, error.seqno, error.opcode, error.kind);
        of(self) == of(other)
    }
}

impl fmt::Display for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, opcode, vbid, seqno, .. } = self;
        match seqno {
            Some(seqno) => write!(f, "{vbid} {opcode} with seqno {seqno}: {kind}"),
            None => write!(f, "{vbid} {opcode}: {kind}"),
        }
    }
}

impl core::error::Error for ProtocolError {}

/// Why a connection ended.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ConnectionError {
    /// The server broke the protocol.
    #[error("the server broke the protocol: {0}")]
    Protocol(#[from] ProtocolError),
    /// The packet boundaries are lost.
    #[error("the server sent bytes that are not a packet: {0}")]
    Framing(DecodeError),
    /// The server answered that the connection has lost its login or its bucket: nothing that is
    /// requested on it succeeds, and a new one is needed.
    #[error("the server no longer serves the connection: {status}")]
    Invalidated {
        /// Opcode of the request.
        opcode: Opcode,
        /// The answer.
        status: Status,
    },
    /// The token that authenticates the connection has expired, and there was no newer one in time.
    #[error("its token has expired, and there was no newer one")]
    TokenExpired,
    /// The server refused a newer token.
    #[error("the server refused its new token ({status}{context})")]
    TokenRefused {
        /// The answer.
        status: Status,
        /// The server's explanation.
        context: ErrorContext,
    },
    /// Nothing arrived for twice the noop interval.
    #[error("nothing arrived for twice the noop interval: the connection is dead")]
    Idle,
    /// The server answers noops, but not the close of a stream that is to go on elsewhere.
    #[error("the server has not answered the close of {0} for twice the noop interval")]
    CloseUnanswered(Vbid),
    /// The sink failed; reconnecting does not help.
    #[error(transparent)]
    Sink(#[from] SinkError),
}

/// Why a stream was not opened.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum OpenStreamError {
    /// The server asked to go back although the request started at 0.
    #[error("the server asked to roll back a stream that starts at seqno 0")]
    RollbackAtZero,
    /// The server refused.
    #[error("the server refused the stream: {status}")]
    Refused {
        /// Its answer.
        status: Status,
        /// The collections manifest that the refusal names, if any.
        manifest_uid: Option<ManifestUid>,
    },
}

/// A command that contradicts an earlier one; the caller's mistake.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ApiMisuse {
    /// The vBucket is outside the bucket's.
    #[error("{0} does not exist in this bucket")]
    UnknownVbucket(Vbid),
    /// The vBucket has a stream on this connection.
    #[error("{0} already has a stream on this connection")]
    AlreadyOpen(Vbid),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn violation_by_the_same_packet_sent_again_is_the_same() {
        let error = ProtocolError {
            kind: ProtocolErrorKind::PeerMisbehaved(Misbehaviour::WindowOverrun),
            opcode: Opcode::DCP_MUTATION,
            vbid: Vbid(3),
            seqno: Some(Seqno(7)),
            opaque: Opaque(1),
        };
        // Each stream request has another opaque.
        assert!(error.is_same_packet(&ProtocolError { opaque: Opaque(2), ..error }));
        let malformed = DecodeError::InvalidField("key");
        for other in [
            ProtocolError { vbid: Vbid(4), ..error },
            ProtocolError { seqno: Some(Seqno(8)), ..error },
            ProtocolError { seqno: None, ..error },
            ProtocolError { opcode: Opcode::DCP_DELETION, ..error },
            ProtocolError { kind: ProtocolErrorKind::InvalidMessage(malformed), ..error },
        ] {
            assert!(!error.is_same_packet(&other), "{other}");
        }
    }

    #[test]
    fn violation_names_its_packet() {
        let malformed = ProtocolErrorKind::InvalidMessage(DecodeError::InvalidField("key"));
        let error = ProtocolError {
            kind: malformed,
            opcode: Opcode::DCP_MUTATION,
            vbid: Vbid(3),
            seqno: Some(Seqno(7)),
            opaque: Opaque(1),
        };
        assert_eq!(error.to_string(), format!("vb:3 DCP_MUTATION with seqno 7: {malformed}"));
        let without = ProtocolError { seqno: None, ..error };
        assert_eq!(without.to_string(), format!("vb:3 DCP_MUTATION: {malformed}"));
    }
}
