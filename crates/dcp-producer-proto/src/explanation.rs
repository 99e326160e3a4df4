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
                "branch {vbuuid} is the vBucket's newest and reaches to the high seqno {upper}"
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
                    write!(f, "; the client's start seqno {start} is not beyond seqno {upper}")
                } else {
                    write!(
                        f,
                        "; the client's snapshot {snapshot} does not end beyond seqno {upper}"
                    )
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
                 deletions between the two may have been purged and would be missed, so it \
                 must start over from seqno {seqno}"
            ),
            RollbackReason::UnknownVbuuid => {
                let entries = self.query.table.entries();
                write!(
                    f,
                    "the client's vbuuid {vbuuid} is not among the {} in the failover log, the \
                     newest of which is {}: nothing that the client has is known to be part of \
                     the vBucket's history, so it must start over from seqno {seqno}",
                    entries.len(),
                    self.query.table.newest().vbuuid
                )
            }
            RollbackReason::BeyondSharedHistory { upper } => {
                self.shared(upper, f)?;
                write!(
                    f,
                    "; the client stands at seqno {start} and has changes beyond seqno {upper} \
                     that the vBucket's history lacks, so it must go back to seqno {seqno}"
                )
            }
            RollbackReason::SnapshotBeyondSharedHistory { upper } => {
                self.shared(upper, f)?;
                write!(
                    f,
                    "; the client stands at seqno {start}, inside snapshot {snapshot}, which ends \
                     beyond seqno {upper}, so it must go back to the start of that snapshot, seqno \
                     {seqno}"
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
                        "the start must lie within the snapshot of the same request, which is \
                         checked before any rollback"
                    }
                    OutOfRange::StartAboveHigh { .. } => {
                        "the vBucket does not have that change yet, so nothing can follow it"
                    }
                })
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use dcp_wire::Vbuuid;
    use dcp_wire::message::FailoverEntry;

    use super::*;
    use crate::FailoverTable;
    use dcp_proto::Snapshot;

    /// Branch 0xa up to seqno 40, then branch 0xb; the high seqno is 100, the purge seqno 30.
    fn explained(start: u64, snapshot: (u64, u64), vbuuid: u64, end: u64) -> String {
        let entry = |vbuuid, seqno| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) };
        let table = FailoverTable::load([entry(0xb, 40), entry(0xa, 0)], Vbuuid(1), Seqno(100)).0;
        let query = RollbackQuery {
            table: &table,
            high_seqno: Seqno(100),
            purge_seqno: Seqno(30),
            start_seqno: Seqno(start),
            vbuuid: Vbuuid(vbuuid),
            snapshot: Snapshot { start: Seqno(snapshot.0), end: Seqno(snapshot.1) },
            strict_vbuuid: false,
            client_purge_seqno: Seqno(0),
            collection_high_seqno: None,
        };
        let explanation = Explanation::new(query, Seqno(end));
        assert_eq!(explanation.verdict(), rollback::explain(&query, Seqno(end)));
        explanation.to_string()
    }

    #[test]
    fn explanation_names_its_rule_and_numbers() {
        let max = u64::MAX;
        for (text, said) in [
            (
                explained(0, (0, 0), 0, max),
                "the client starts from seqno 0 and has nothing that could contradict the \
                 vBucket's history",
            ),
            (
                explained(60, (60, 60), 0xb, max),
                "branch 0xb is the vBucket's newest and reaches to the high seqno 100; the \
                 client's start seqno 60 is not beyond seqno 100",
            ),
            (
                explained(60, (50, 70), 0xb, max),
                "branch 0xb is the vBucket's newest and reaches to the high seqno 100; the \
                 client's snapshot [50, 70] does not end beyond seqno 100",
            ),
            (
                explained(35, (35, 40), 0xa, max),
                "branch 0xa is shared up to seqno 40, where the next newer branch 0xb begins; the \
                 client's start seqno 35 is not beyond seqno 40",
            ),
            (
                explained(20, (20, 20), 0xa, max),
                "the client's start seqno 20 is below the purge seqno 30: deletions between the \
                 two may have been purged and would be missed, so it must start over from seqno 0",
            ),
            (
                explained(60, (60, 60), 0xc, max),
                "the client's vbuuid 0xc is not among the 2 in the failover log, the newest of \
                 which is 0xb: nothing that the client has is known to be part of the vBucket's \
                 history, so it must start over from seqno 0",
            ),
            (
                explained(60, (60, 60), 0xa, max),
                "branch 0xa is shared up to seqno 40, where the next newer branch 0xb begins; the \
                 client stands at seqno 60 and has changes beyond seqno 40 that the vBucket's \
                 history lacks, so it must go back to seqno 40",
            ),
            (
                explained(120, (120, 120), 0xb, max),
                "branch 0xb is the vBucket's newest and reaches to the high seqno 100; the client \
                 stands at seqno 120 and has changes beyond seqno 100 that the vBucket's history \
                 lacks, so it must go back to seqno 100",
            ),
            (
                explained(38, (35, 50), 0xa, max),
                "branch 0xa is shared up to seqno 40, where the next newer branch 0xb begins; the \
                 client stands at seqno 38, inside snapshot [35, 50], which ends beyond seqno 40, \
                 so it must go back to the start of that snapshot, seqno 35",
            ),
            (
                explained(45, (40, 50), 0xa, max),
                "branch 0xa is shared up to seqno 40, where the next newer branch 0xb begins; the \
                 client stands at seqno 45, inside snapshot [40, 50], which ends beyond seqno 40, \
                 so it must go back to the start of that snapshot, seqno 40",
            ),
            (
                explained(60, (60, 60), 0xb, 50),
                "start seqno 60 is greater than end seqno 50: a request must not end before it \
                 starts, which is checked first",
            ),
            (
                explained(60, (70, 80), 0xb, max),
                "start seqno 60 is not within snapshot [70, 80]: the start must lie within the \
                 snapshot of the same request, which is checked before any rollback",
            ),
        ] {
            assert_eq!(text, said);
        }
    }
}
