//! Why a read cannot be planned or started.

use dcp_proto::checkpoint::CheckpointError;
use dcp_proto::plan::PlanError;

use crate::{Error, ErrorKind};

/// Why a read cannot be planned or started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlannerError {
    /// The cluster cannot be observed.
    #[error(transparent)]
    Cluster(#[from] Error),
    /// The read cannot resume from its start.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// A checkpoint, offsets or a plan are damaged, or belong to another bucket or filter.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

impl PlannerError {
    /// Whether it may be temporary.
    ///
    /// A bucket that was opened before (`was_open`) exists, and the credentials are valid: a node
    /// that restarts denies both for a while.
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
