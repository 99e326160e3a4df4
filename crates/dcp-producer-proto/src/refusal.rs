//! Why a request is refused.

use dcp_wire::{DecodeError, ManifestUid, Opcode, Seqno, Status};

/// A refusal: the status and the contents of its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The packet itself is invalid: EINVAL with an explanation in the body.
    Malformed(DecodeError),
    /// Like `Malformed`, for rules beyond the layout.
    Invalid(&'static str),
    /// Like `Malformed`, for unknown flag bits.
    UnknownFlags(u32),
    /// A status without a body.
    Status(Status),
    /// The node does not have the vBucket in a suitable state; the answer carries the cluster map.
    NotMyVbucket,
    /// The client must roll back to this seqno.
    Rollback(Seqno),
    /// A collection or scope is not known at this version of the manifest.
    Unknown(Status, ManifestUid),
}

impl Refusal {
    pub(super) const fn invalid(what: &'static str) -> Self {
        Self::Invalid(what)
    }

    /// Whether the packet itself is invalid.
    pub(super) fn is_of_packet(&self, opcode: Opcode) -> bool {
        match self {
            Self::Malformed(_) | Self::UnknownFlags(_) => true,
            Self::Invalid(_) => opcode != Opcode::DCP_CONTROL,
            _ => false,
        }
    }

    pub(super) const fn status(&self) -> Status {
        match self {
            Self::Malformed(_) | Self::Invalid(_) | Self::UnknownFlags(_) => Status::EINVAL,
            Self::Status(status) | Self::Unknown(status, _) => *status,
            Self::NotMyVbucket => Status::NOT_MY_VBUCKET,
            Self::Rollback(_) => Status::ROLLBACK,
        }
    }
}

impl From<DecodeError> for Refusal {
    fn from(error: DecodeError) -> Self {
        Self::Malformed(error)
    }
}
