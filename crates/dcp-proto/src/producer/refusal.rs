//! Why a request is answered with something else than success.

use dcp_wire::{DecodeError, ManifestUid, Opcode, Seqno, Status};

/// A request was refused; names the status and everything its body is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The packet itself is wrong: EINVAL with a body that says how.
    Malformed(DecodeError),
    /// As `Malformed`, for what the layout alone does not tell.
    Invalid(&'static str),
    /// As `Malformed`, for flag bits without a meaning.
    UnknownFlags(u32),
    /// A status without a body.
    Status(Status),
    /// The node does not have the vBucket in a state that fits; carries the cluster map.
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

    /// Whether the packet alone is what is wrong.
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
