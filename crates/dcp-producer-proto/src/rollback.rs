//! Whether a client may resume from its position, or must roll back.
//!
//! A pure function, used for stream requests and to explain them.

use core::fmt;

use dcp_wire::{Seqno, Vbuuid};
use thiserror::Error;

use super::FailoverTable;
use dcp_proto::Snapshot;

/// Everything the decision depends on (DCP pages "stream-request" and "rollback").
#[derive(Clone, Copy, Debug)]
pub struct RollbackQuery<'a> {
    /// The vBucket's history branches.
    pub table: &'a FailoverTable,
    /// Highest seqno assigned in the vBucket.
    pub high_seqno: Seqno,
    /// Seqno up to which tombstones were purged; 0 to leave the purge rule out.
    pub purge_seqno: Seqno,
    /// Last seqno the client has.
    pub start_seqno: Seqno,
    /// Branch the client believes it is on.
    pub vbuuid: Vbuuid,
    /// Snapshot of the client's start.
    pub snapshot: Snapshot,
    /// Whether the branch is also checked for a client that has nothing yet.
    pub strict_vbuuid: bool,
    /// Purge seqno the client has seen, 0 for none: if it is the current one, the client has missed
    /// no purged deletion.
    pub client_purge_seqno: Seqno,
    /// Highest seqno of the collections the client filters on; `None` without a filter, or if
    /// one of them is not known.
    pub collection_high_seqno: Option<Seqno>,
}

/// The answer to a client that wants to resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Resume from the start seqno.
    Continue(ContinueReason),
    /// Roll back to `seqno` and request again.
    Rollback {
        /// Seqno to go back to.
        seqno: Seqno,
        /// Why.
        reason: RollbackReason,
    },
    /// The request contradicts itself.
    OutOfRange(OutOfRange),
}

/// Why a client may resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ContinueReason {
    /// It starts from the beginning.
    FromTheBeginning,
    /// Its data is part of this history, which shares its branch up to this seqno.
    SharedHistory {
        /// Last seqno its branch has in common with this history.
        upper: Seqno,
    },
}

/// Why a client must roll back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RollbackReason {
    /// Tombstones above its start are purged: it could miss deletions.
    Purged {
        /// Seqno up to which tombstones were purged.
        purge_seqno: Seqno,
    },
    /// Its branch is not part of this vBucket's history.
    UnknownVbuuid,
    /// It has changes beyond the history it shares with this vBucket.
    BeyondSharedHistory {
        /// Last seqno its branch has in common with this history.
        upper: Seqno,
    },
    /// Its snapshot is incomplete and ends beyond the shared history.
    SnapshotBeyondSharedHistory {
        /// Last seqno its branch has in common with this history.
        upper: Seqno,
    },
}

/// Which rule between the seqnos of a stream request is broken.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub enum OutOfRange {
    /// The start is after the end.
    #[error("start seqno {start} is greater than end seqno {end}")]
    StartAfterEnd {
        /// Start seqno.
        start: Seqno,
        /// End seqno.
        end: Seqno,
    },
    /// The start is outside its snapshot.
    #[error("start seqno {start} is not within snapshot {snapshot}")]
    StartOutsideSnapshot {
        /// Start seqno.
        start: Seqno,
        /// Snapshot given for it.
        snapshot: Snapshot,
    },
    /// The start is beyond the newest change, on a branch that once reached further.
    #[error("start seqno {start} is greater than the vBucket's high seqno {high}")]
    StartAboveHigh {
        /// Start seqno.
        start: Seqno,
        /// Highest seqno assigned in the vBucket.
        high: Seqno,
    },
}

/// Checks the seqnos of a request against each other.
///
/// # Errors
/// [`OutOfRange`] names the rule that is broken.
pub fn check_range(start: Seqno, end: Seqno, snapshot: Snapshot) -> Result<(), OutOfRange> {
    if start > end {
        return Err(OutOfRange::StartAfterEnd { start, end });
    }
    if !snapshot.contains(start) {
        return Err(OutOfRange::StartOutsideSnapshot { start, snapshot });
    }
    Ok(())
}

/// Checks the seqnos of a request that need not roll back against the vBucket; `end` already
/// accounts for the request's flags.
///
/// # Errors
/// [`OutOfRange`] names the rule that is broken.
pub fn check_reachable(start: Seqno, end: Seqno, high: Seqno) -> Result<(), OutOfRange> {
    if start > end {
        return Err(OutOfRange::StartAfterEnd { start, end });
    }
    if start > high {
        return Err(OutOfRange::StartAboveHigh { start, high });
    }
    Ok(())
}

/// Decides whether the client must roll back, and why. The ranges are not checked.
#[must_use]
pub fn decide(query: &RollbackQuery<'_>) -> Verdict {
    let start = query.start_seqno;
    if start == Seqno::ZERO && (!query.strict_vbuuid || query.vbuuid == Vbuuid(0)) {
        return Verdict::Continue(ContinueReason::FromTheBeginning);
    }
    if purge_may_hide_deletions(
        start,
        query.purge_seqno,
        query.client_purge_seqno,
        query.collection_high_seqno,
    ) {
        let reason = RollbackReason::Purged { purge_seqno: query.purge_seqno };
        return Verdict::Rollback { seqno: Seqno::ZERO, reason };
    }
    let Some(upper) = query.table.upper_bound(query.vbuuid, query.high_seqno) else {
        return Verdict::Rollback { seqno: Seqno::ZERO, reason: RollbackReason::UnknownVbuuid };
    };
    let Snapshot { start: mut snapshot_start, end: mut snapshot_end } = query.snapshot;
    if start == snapshot_start {
        // Nothing of the snapshot has arrived, so where it ends does not matter.
        snapshot_end = start;
    }
    if snapshot_end <= upper {
        return Verdict::Continue(ContinueReason::SharedHistory { upper });
    }
    if start == snapshot_end {
        // The snapshot is complete, so its end is as consistent a point as its start.
        snapshot_start = start;
    }
    if upper < snapshot_start {
        let reason = RollbackReason::BeyondSharedHistory { upper };
        return Verdict::Rollback { seqno: upper, reason };
    }
    let reason = RollbackReason::SnapshotBeyondSharedHistory { upper };
    Verdict::Rollback { seqno: snapshot_start, reason }
}

/// The complete answer to a request's seqnos, with the checks in the order of a stream request:
/// their relations, [`decide`], and whether the vBucket reaches that far. The end is used
/// unchanged.
#[must_use]
pub fn explain(query: &RollbackQuery<'_>, end: Seqno) -> Verdict {
    if let Err(violation) = check_range(query.start_seqno, end, query.snapshot) {
        return Verdict::OutOfRange(violation);
    }
    let verdict = decide(query);
    if matches!(verdict, Verdict::Continue(_))
        && let Err(violation) = check_reachable(query.start_seqno, end, query.high_seqno)
    {
        return Verdict::OutOfRange(violation);
    }
    verdict
}

/// Whether a deletion above `start` may be missing from a history purged up to `purge`.
pub(super) fn purge_may_hide_deletions(
    start: Seqno,
    purge: Seqno,
    client_purge: Seqno,
    collection_high: Option<Seqno>,
) -> bool {
    if start == Seqno::ZERO || start >= purge || client_purge == purge {
        return false;
    }
    // A client that has everything of its collections misses nothing: later purges concern only
    // other collections.
    collection_high.is_none_or(|high| start < high)
}

impl fmt::Display for ContinueReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::FromTheBeginning => f.write_str("the client starts from the beginning"),
            Self::SharedHistory { upper } => {
                write!(
                    f,
                    "the client's branch is shared up to seqno {upper}, and its data lies within"
                )
            }
        }
    }
}

impl fmt::Display for RollbackReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Purged { purge_seqno } => write!(
                f,
                "tombstones up to seqno {purge_seqno} are purged, so deletions could be missed"
            ),
            Self::UnknownVbuuid => {
                f.write_str("the client's vbuuid is not in the vBucket's failover log")
            }
            Self::BeyondSharedHistory { upper } => {
                write!(f, "the client has changes beyond seqno {upper}, where its branch ends")
            }
            Self::SnapshotBeyondSharedHistory { upper } => write!(
                f,
                "the client's incomplete snapshot ends beyond seqno {upper}, where its branch ends"
            ),
        }
    }
}

impl fmt::Display for Verdict {
    /// Status, seqno and reason in one line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Continue(reason) => write!(f, "ok: {reason}"),
            Self::Rollback { seqno, reason } => write!(f, "rollback to {seqno}: {reason}"),
            Self::OutOfRange(violation) => write!(f, "erange: {violation}"),
        }
    }
}
