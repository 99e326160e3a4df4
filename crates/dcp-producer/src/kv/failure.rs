//! Why a request was refused.

use dcp_wire::{DecodeError, EncodeError, Status};

use crate::DocumentError;

/// Why a request was refused; turned into a response by the session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    /// A status without further information.
    Status(Status),
    /// The user lacks this privilege.
    Denied(&'static str),
    /// The request is malformed.
    Invalid(&'static str),
    /// The node does not have the vBucket; the response carries the cluster map.
    NotMyVbucket,
    /// No such collection or scope, with the status that says which; the response carries the
    /// manifest's uid.
    Unknown(Status),
    /// Handle the request again later.
    Later,
    /// The connection must be closed.
    Close,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Status(status)
    }
}

impl From<DecodeError> for Failure {
    fn from(_: DecodeError) -> Self {
        Self::Invalid("malformed request")
    }
}

impl From<EncodeError> for Failure {
    fn from(_: EncodeError) -> Self {
        Self::Close
    }
}

impl From<DocumentError> for Failure {
    fn from(error: DocumentError) -> Self {
        match error {
            DocumentError::NotFound => Self::Status(Status::KEY_ENOENT),
            DocumentError::Exists | DocumentError::CasMismatch(_) => {
                Self::Status(Status::KEY_EEXISTS)
            }
            DocumentError::SyncWriteInProgress => Self::Status(Status::SYNC_WRITE_IN_PROGRESS),
            DocumentError::SyncWriteReCommitInProgress => {
                Self::Status(Status::SYNC_WRITE_RE_COMMIT_IN_PROGRESS)
            }
            DocumentError::Locked => Self::Status(Status::LOCKED),
            DocumentError::NotLocked => Self::Status(Status::NOT_LOCKED),
            DocumentError::NotPrepared => Self::Status(Status::EINVAL),
            DocumentError::InvalidKey { .. } => Self::Invalid("the key is empty or too long"),
            DocumentError::ValueTooLarge { .. } => Self::Status(Status::E2BIG),
            DocumentError::InvalidValue => Self::Invalid("the value is not what its datatype says"),
            DocumentError::NotANumber => Self::Status(Status::DELTA_BADVAL),
            DocumentError::UnknownCollection(_) => Self::Unknown(Status::UNKNOWN_COLLECTION),
            DocumentError::Unavailable(_) => Self::NotMyVbucket,
            DocumentError::NoMemory { .. } => Self::Status(Status::ENOMEM),
        }
    }
}
