//! Explains in a sentence why a client must roll back.

use core::fmt;

use dcp_wire::Seqno;

use super::rollback::{self, ContinueReason, OutOfRange, RollbackQuery, RollbackReason, Verdict};

/// A server's answer to the seqnos of a stream request, and its reason: `Display` names the
/// decisive rule and numbers, for operators who only see the request.
#[derive(Clone, Copy, Debug)]
pub struct Explanation<'a> {
    query: RollbackQuery<'a>,
    verdict: Verdict,
}

impl<'a> Explanation<'a> {
    /// Uses [`rollback::explain`], which applies the same rules as stream requests.
    #[must_use]
    pub fn new(query: RollbackQuery<'a>, end: Seqno) -> Self {
        Self { query, verdict: rollback::explain(&query, end) }
    }

    /// The answer.
    #[must_use]
    pub const fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// How far the client's branch is part of the vBucket's history, and why it ends there.
    fn shared(&self, upper: Seqno, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let vbuuid = self.query.vbuuid;
        let entries = self.query.table.entries();
        let position = entries.iter().position(|entry| entry.vbuuid == vbuuid);
        let newer = position.and_then(|at| entries.get(at.checked_sub(1)?));
        match newer {
            None => write!(
                f,
                "branch {vbuuid} is the vBucket's newest and reaches to its high seqno {upper}"
            ),
            Some(newer) => write!(
                f,
                "branch {vbuuid} is shared up to seqno {upper}, where the next newer branch {} \
                 begins",
                newer.vbuuid
            ),
        }
    }

    fn continues(&self, reason: ContinueReason, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let RollbackQuery { start_seqno: start, snapshot, .. } = self.query;
        match reason {
            ContinueReason::FromTheBeginning => f.write_str(
                "the client starts from seqno 0 and has nothing that could contradict the \
                 vBucket's history",
            ),
            ContinueReason::SharedHistory { upper } => {
                self.shared(upper, f)?;
                if start == snapshot.start {
                    write!(f, "; the client's start seqno {start} lies within it")
                } else {
                    write!(f, "; the client's snapshot {snapshot} lies within it")
                }
            }
        }
    }

    fn rolls_back(
        &self,
        seqno: Seqno,
        reason: RollbackReason,
        f: &mut fmt::Formatter<'_>,
    ) -> fmt::Result {
        let RollbackQuery { start_seqno: start, snapshot, vbuuid, .. } = self.query;
        match reason {
            RollbackReason::Purged { purge_seqno } => write!(
                f,
                "the client's start seqno {start} is below the purge seqno {purge_seqno}: \
                 deletions in between are purged and would be missed, so it must start over from \
                 seqno {seqno}"
            ),
            RollbackReason::UnknownVbuuid => {
                let entries = self.query.table.entries();
                write!(
                    f,
                    "the client's vbuuid {vbuuid} is not among the {} in the failover log, the \
                     newest of which is {}: nothing it has is known to be part of this history, \
                     so it must start over from seqno {seqno}",
                    entries.len(),
                    self.query.table.newest().vbuuid
                )
            }
            RollbackReason::BeyondSharedHistory { upper } => {
                self.shared(upper, f)?;
                write!(
                    f,
                    "; the client stands at seqno {start} and has changes beyond it that this \
                     history does not have, so it must go back to seqno {seqno}"
                )
            }
            RollbackReason::SnapshotBeyondSharedHistory { upper } => {
                self.shared(upper, f)?;
                write!(
                    f,
                    "; the client stands at seqno {start} inside snapshot {snapshot}, which ends \
                     beyond it, so it must go back to where that snapshot starts, seqno {seqno}"
                )
            }
        }
    }
}

impl fmt::Display for Explanation<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.verdict {
            Verdict::Continue(reason) => self.continues(reason, f),
            Verdict::Rollback { seqno, reason } => self.rolls_back(seqno, reason, f),
            Verdict::OutOfRange(violation) => {
                write!(f, "{violation}: ")?;
                f.write_str(match violation {
                    OutOfRange::StartAfterEnd { .. } => {
                        "a request must not end before it starts, which is checked first"
                    }
                    OutOfRange::StartOutsideSnapshot { .. } => {
                        "a client's start must lie in the snapshot it names, which is checked \
                         before any rollback"
                    }
                    OutOfRange::StartAboveHigh { .. } => {
                        "there is no such change to resume from yet"
                    }
                })
            }
        }
    }
}
