//! Why a read cannot be planned, or not be begun.

use dcp_proto::checkpoint::CheckpointError;
use dcp_proto::micro_batch::{OffsetsError, PartitionError, PlanError};

use crate::{Error, ErrorKind};

/// Why a read cannot be planned, or not be begun.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlannerError {
    /// The cluster cannot be asked.
    #[error(transparent)]
    Cluster(#[from] Error),
    /// The read cannot go on from its start.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Offsets belong to something else.
    #[error(transparent)]
    Offsets(#[from] OffsetsError),
    /// A checkpoint belongs to something else.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// The plan of a task cannot be read.
    #[error(transparent)]
    Partition(#[from] PartitionError),
}

impl PlannerError {
    /// Whether it may pass by itself.
    ///
    /// A bucket that was opened before (`was_open`) is known to exist, with these credentials: a
    /// node that restarts denies both for a while.
    pub(super) fn may_pass(&self, was_open: bool) -> bool {
        match self {
            Self::Cluster(error) => {
                let is_denied = matches!(
                    error.kind(),
                    ErrorKind::AccessDenied
                        | ErrorKind::Authentication
                        | ErrorKind::BucketNotFound
                        | ErrorKind::NotCouchbase
                        | ErrorKind::Tls
                );
                error.is_retryable() || (was_open && is_denied)
            }
            Self::Plan(PlanError::NotPersisted { .. }) => true,
            _ => false,
        }
    }
}
