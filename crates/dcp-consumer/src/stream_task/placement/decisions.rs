//! What to do with a vBucket after its stream ended or was refused.

use dcp_proto::consumer::{AfterEnd, EndCause, OpenStreamError, Reaction, Step};
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
        EndCause::Overtaken(times) => {
            let message = format!(
                "{vbid}: the first load began again {times} times, because each was interrupted \
                 below the seqno up to which the server had purged deletions by then: raise the \
                 bucket's metadata purge interval, or read without collections, so that the \
                 position keeps up with the load"
            );
            Decision::Fatal(Error::new(ErrorKind::Rollback, message).with_vbid(vbid))
        }
        // Closed by the client in order to move; a rollback at 0 is a server error, which may be
        // temporary.
        _ => Decision::Retry(Backoff::SHORT),
    }
}

fn decide_end(vbid: Vbid, reason: StreamEndReason) -> Decision {
    match AfterEnd::of(reason) {
        AfterEnd::Retry => Decision::Retry(Backoff::SHORT),
        AfterEnd::RetrySlowly => Decision::Retry(Backoff::LONG),
        AfterEnd::FollowMap => Decision::Moved,
        AfterEnd::Complete => {
            tracing::warn!(name: "filter_dropped", target: RECONCILER, vbucket = vbid.0,
                "everything in the filter was dropped: the stream ends");
            Decision::Complete
        }
        AfterEnd::Fail(failure) => {
            let message =
                format!("{vbid}: the stream ended because the user lost the privilege to read it");
            Decision::Fatal(Error::new(failure.into(), message).with_vbid(vbid))
        }
    }
}

fn decide_refusal(vbid: Vbid, status: Status, has_streamed: bool) -> Decision {
    match Reaction::to(Step::StreamRequest, status) {
        Reaction::FollowMap => Decision::Moved,
        Reaction::CheckFilter => Decision::FilterRefused,
        Reaction::RetryOnceGranted(_) if has_streamed => Decision::Retry(Backoff::SHORT),
        // There is nothing to begin again.
        Reaction::BeginAgain | Reaction::RetryOnceGranted(_) | Reaction::Fail(_) => {
            Decision::Fatal(refusal(vbid, status))
        }
        Reaction::RetrySlowly => Decision::Retry(Backoff::LONG),
        // What the connection could do about the rest, it has done.
        Reaction::CloseFirst
        | Reaction::GoWithout
        | Reaction::Reconnect
        | Reaction::Retry
        | Reaction::RetryOnceConnected(_)
        | Reaction::RollBack
        | Reaction::Use => Decision::Retry(Backoff::SHORT),
    }
}

fn refusal(vbid: Vbid, status: Status) -> Error {
    let kind = match Reaction::to(Step::StreamRequest, status) {
        Reaction::RetryOnceGranted(failure) | Reaction::Fail(failure) => failure.into(),
        _ => ErrorKind::Status,
    };
    let message = format!("{vbid}: the server refused the stream ({status})");
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
