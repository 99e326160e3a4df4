//! Why a server ends a connection.

use core::time::Duration;

use dcp_wire::{Opcode, Seqno, Status, Vbid};
use thiserror::Error;

/// The connection must be closed, once what was written so far is sent.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Disconnect {
    /// The request belongs to the other role of a DCP connection.
    #[error("{0} does not fit the role of the connection")]
    UnexpectedRequest(Opcode),
    /// The request is malformed, and the server's version answers that and closes.
    #[error("{0} is malformed")]
    InvalidRequest(Opcode),
    /// A response to no request, or with a status that makes no sense.
    #[error("unexpected response to {opcode} with status {status}")]
    UnexpectedResponse {
        /// Opcode of the response.
        opcode: Opcode,
        /// Its status.
        status: Status,
    },
    /// The answer is a status that a client without XERROR does not know.
    #[error("status {0} cannot be sent to a client that did not negotiate XERROR")]
    StatusNeedsXerror(Status),
    /// The answer does not fit a packet; only a cluster map of 4 GiB could be so long.
    #[error("a response of {0} bytes does not fit a packet")]
    ResponseTooLong(usize),
    /// The client left its flow-control window exhausted for too long.
    #[error("nothing acknowledged for {} s", .0.as_secs())]
    Stuck(Duration),
    /// The client acknowledged a change that was not sent to it.
    #[error("seqno {0} was acknowledged before it was sent")]
    AcknowledgedUnsent(Seqno),
    /// A change is out of order or outside its snapshot.
    #[error("seqno {seqno} of vBucket {vbid} is out of order or outside its snapshot")]
    OutOfRange {
        /// The vBucket.
        vbid: Vbid,
        /// The seqno.
        seqno: Seqno,
    },
    /// A commit of a durable write that was not prepared.
    #[error("seqno {seqno} of vBucket {vbid} commits a write that was not prepared")]
    NotPrepared {
        /// The vBucket.
        vbid: Vbid,
        /// Seqno of the commit.
        seqno: Seqno,
    },
    /// A snapshot marker contradicts itself, or lacks what a replica needs.
    #[error(
        "the snapshot marker of vBucket {0} contradicts itself or lacks the high completed seqno"
    )]
    BadMarker(Vbid),
    /// The answer to a stream request is malformed.
    #[error("the answer to {0} is malformed")]
    MalformedResponse(Opcode),
    /// Nothing was received for too long although noops are enabled.
    #[error("nothing received for {} s", .0.as_secs())]
    Idle(Duration),
}
