//! What to do with a vBucket after its stream ended or was refused.

use dcp_proto::consumer::{EndCause, OpenStreamError};
use dcp_wire::message::StreamEndReason;
use dcp_wire::{Status, Vbid};

use crate::retry::Backoff;
use crate::stream_task::log::RECONCILER;
use crate::{Error, ErrorKind};

/// What to do after an end.
#[derive(Debug)]
pub(super) enum Decision {
    Complete,
    Retry(Backoff),
    /// Retry once the cluster map is up to date.
    Moved,
    /// Retry unless the filter's scope or collections were dropped.
    FilterRefused,
    Fatal(Error),
}

/// The table of stream ends and open errors. If the stream `has_streamed`, a refusal may come from
/// a node that is starting, or does not know the user's privileges yet.
pub(super) fn decide(vbid: Vbid, cause: &EndCause, has_streamed: bool) -> Decision {
    match cause {
        EndCause::Complete => Decision::Complete,
        EndCause::Ended(reason) => decide_end(vbid, *reason),
        EndCause::Refused(OpenStreamError::Refused { status, .. }) => {
            decide_refusal(vbid, *status, has_streamed)
        }
        EndCause::RolledBack { rollback, .. } => {
            let message = format!(
                "{vbid} was rolled back to seqno {}: the changes read above it are no longer valid",
                rollback.seqno
            );
            let error = Error::new(ErrorKind::Rollback, message).with_vbid(vbid);
            Decision::Fatal(error.with_rollback_seqno(rollback.seqno))
        }
        // Closed by the client in order to move; a rollback at 0 is a server error, which may be
        // temporary.
        _ => Decision::Retry(Backoff::SHORT),
    }
}

fn decide_end(vbid: Vbid, reason: StreamEndReason) -> Decision {
    match reason {
        StreamEndReason::OK
        | StreamEndReason::CLOSED
        | StreamEndReason::DISCONNECTED
        | StreamEndReason::SLOW => Decision::Retry(Backoff::SHORT),
        StreamEndReason::STATE_CHANGED | StreamEndReason::ROLLBACK => Decision::Moved,
        StreamEndReason::FILTER_EMPTY => {
            tracing::warn!(target: RECONCILER, %vbid,
                "everything in the filter was dropped: the stream ends");
            Decision::Complete
        }
        StreamEndReason::LOST_PRIVILEGES => {
            let message =
                format!("{vbid}: the stream ended because the user lost the privilege to read it");
            Decision::Fatal(Error::new(ErrorKind::AccessDenied, message).with_vbid(vbid))
        }
        _ => Decision::Retry(Backoff::LONG),
    }
}

fn decide_refusal(vbid: Vbid, status: Status, has_streamed: bool) -> Decision {
    match status {
        Status::NOT_MY_VBUCKET => Decision::Moved,
        Status::EACCESS | Status::KEY_ENOENT if has_streamed => Decision::Retry(Backoff::SHORT),
        // A node may learn of a new collection later than the client.
        Status::UNKNOWN_COLLECTION | Status::UNKNOWN_SCOPE => Decision::FilterRefused,
        Status::EACCESS
        | Status::KEY_ENOENT
        | Status::EINVAL
        | Status::ERANGE
        | Status::NOT_SUPPORTED
        | Status::UNKNOWN_COMMAND
        | Status::DCP_STREAMID_INVALID => Decision::Fatal(refusal(vbid, status)),
        _ => Decision::Retry(Backoff::SHORT),
    }
}

fn refusal(vbid: Vbid, status: Status) -> Error {
    let (kind, message) = match status {
        Status::EACCESS => {
            (ErrorKind::AccessDenied, format!("{vbid}: the server refused the stream ({status})"))
        }
        _ => (ErrorKind::Status, format!("{vbid}: the server refused the stream ({status})")),
    };
    Error::new(kind, message).with_vbid(vbid).with_status(status)
}

/// Failure of a stream that must be reopened; `None` if it was closed on this side.
pub(super) fn failure(vbid: Vbid, cause: &EndCause) -> Option<Error> {
    match cause {
        EndCause::Closed => None,
        EndCause::Refused(OpenStreamError::Refused { status, .. }) => Some(refusal(vbid, *status)),
        cause => {
            let message = format!("{vbid}: {cause}");
            Some(Error::new(ErrorKind::StreamEnded, message).with_vbid(vbid))
        }
    }
}
