//! What the next batch reads.

use std::collections::BTreeMap;

use dcp_wire::{Seqno, Vbid, Vbuuid};

use super::share::share;
use super::{Offset, Offsets};
use crate::FailoverLog;

/// What the server says of one vBucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Highest seqno of the active copy.
    pub high: Seqno,
    /// Seqno that is persisted on every copy that is there; `None` if it was not asked for.
    pub persisted: Option<Seqno>,
    /// Tombstones at or below it may be gone; 0 if it is not known.
    pub purge: Seqno,
    /// The vBucket's history.
    pub log: FailoverLog,
    /// The high seqno when the offsets to go on from were known to be read completely, on the
    /// branch they name: no snapshot they fell into reaches beyond. `None` if nobody looked.
    pub high_after_read: Option<Seqno>,
}

/// What to do if the server's history is no longer the one that was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnRollback {
    /// Tell of it in the batch and go on from the last common seqno.
    #[default]
    Emit,
    /// Stop with [`PlanError::RolledBack`].
    Fail,
    /// Tell of it in the batch and read the vBucket again from its beginning.
    Resync,
}

/// How far a batch may go.
#[derive(Clone, Debug, Default)]
pub struct Limits {
    /// Most seqnos of all vBuckets together; no limit if `None`. With 0 nothing is read, but
    /// rollbacks are told.
    pub max_seqnos: Option<u64>,
    /// Offsets not to pass, as those which "available now" meant when it was said.
    pub until: Option<Offsets>,
    /// Offer only what is persisted on every copy; see the module.
    pub persisted_only: bool,
    /// What to do if the server's history is no longer the one that was read.
    pub on_rollback: OnRollback,
    /// Go on though tombstones above an offset may have been purged.
    pub allow_data_loss: bool,
}

/// Why no batch can be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The server's history of a vBucket is no longer the one that was read.
    #[error(
        "the history of vBucket {vbid} was rolled back: what was read up to seqno {seqno} of branch \
         {vbuuid} is common with the server's only up to {common}; to go on, have rollbacks \
         emitted, or the vBucket read again"
    )]
    RolledBack {
        /// The vBucket.
        vbid: Vbid,
        /// Branch that was read.
        vbuuid: Vbuuid,
        /// Up to where it was read.
        seqno: Seqno,
        /// Up to where that is still the server's history.
        common: Seqno,
    },
    /// Deletions may be missing, because the server no longer has them.
    #[error(
        "vBucket {vbid} was read up to seqno {seqno}, but the server has purged deletions up to \
         {purge}: some may be missed for good; read from the beginning, or allow the loss"
    )]
    Purged {
        /// The vBucket.
        vbid: Vbid,
        /// Up to where it was read.
        seqno: Seqno,
        /// Up to where deletions may be gone.
        purge: Seqno,
    },
}

/// What is to be read of one vBucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The vBucket.
    pub vbid: Vbid,
    /// Branch to name in the stream request; 0 from the beginning.
    pub vbuuid: Vbuuid,
    /// Reading begins above it.
    pub from: Seqno,
    /// Last seqno to read.
    pub to: Seqno,
    /// Epoch of the changes.
    pub epoch: u32,
    /// Whether a rollback to `from` is to be told before the changes.
    pub rolled_back: bool,
}

impl Range {
    /// How many seqnos it has; de-duplication leaves fewer changes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.to.0.saturating_sub(self.from.0)
    }
}

/// Where to end the batch that begins at `start`: one offset for each vBucket in `observed`, the
/// others stay.
///
/// # Errors
/// [`PlanError`], for the first vBucket in question.
pub fn plan_end(
    start: &Offsets,
    observed: &BTreeMap<Vbid, Observed>,
    limits: &Limits,
) -> Result<Offsets, PlanError> {
    let mut begins = Vec::with_capacity(observed.len());
    for (&vbid, seen) in observed {
        let begin = begin(vbid, start.get(vbid), seen, limits)?;
        begins.push((vbid, begin, available(vbid, begin, seen, limits)));
    }
    let amounts: Vec<u64> =
        begins.iter().map(|(_, begin, end)| end.0.saturating_sub(begin.seqno.0)).collect();
    let shares = match limits.max_seqnos {
        None => amounts,
        Some(limit) => share(&amounts, limit, turn(start)),
    };
    let mut end = start.clone();
    for ((vbid, begin, _), share) in begins.into_iter().zip(shares) {
        let next = Offset { seqno: Seqno(begin.seqno.0.saturating_add(share)), ..begin };
        let from = start.get(vbid);
        let still = next.seqno == from.seqno && next.epoch == from.epoch;
        // A branch that takes nothing away is no reason for an empty batch, unless the name of the
        // newest one is what later tells that nothing was taken away.
        if !still || (!limits.persisted_only && next.seqno > Seqno::ZERO) {
            end.set(vbid, next);
        }
    }
    Ok(end)
}

/// What to read for the batch from `start` to `end`, by vBucket.
///
/// A batch can be asked for again long after its end was chosen. What is no longer the server's
/// history is left out; the next [`plan_end`] tells of it. vBuckets that are not in `observed` are
/// not read.
///
/// # Errors
/// [`PlanError::Purged`]; and [`PlanError::RolledBack`] if `end` tells of a rollback, but
/// rollbacks are to fail.
pub fn plan_ranges(
    start: &Offsets,
    end: &Offsets,
    observed: &BTreeMap<Vbid, Observed>,
    limits: &Limits,
) -> Result<Vec<Range>, PlanError> {
    let mut ranges = Vec::new();
    for (&vbid, seen) in observed {
        let (from, to) = (start.get(vbid), end.get(vbid));
        let rolled_back = to.epoch > from.epoch;
        if to == from {
            continue;
        }
        let begin = if rolled_back { begin(vbid, from, seen, limits)? } else { from };
        // The rollback that was planned may have been undone by nothing, but another failover can
        // have lost more since.
        let last = common(to, seen).min(to.seqno).max(begin.seqno);
        if last > begin.seqno || rolled_back {
            ranges.push(Range {
                vbid,
                vbuuid: if begin.seqno == Seqno::ZERO { Vbuuid(0) } else { begin.vbuuid },
                from: begin.seqno,
                to: last,
                epoch: to.epoch,
                rolled_back,
            });
        }
    }
    Ok(ranges)
}

/// Where reading goes on: at the offset, or where a rollback leads.
fn begin(vbid: Vbid, start: Offset, seen: &Observed, limits: &Limits) -> Result<Offset, PlanError> {
    let newest = seen.log.newest().vbuuid;
    let purged = |seqno: Seqno| seqno > Seqno::ZERO && seqno < seen.purge;
    let Some(common) = rollback(start, seen, limits) else {
        if !purged(start.seqno) {
            return Ok(Offset { vbuuid: newest, ..start });
        }
        if !limits.allow_data_loss {
            return Err(PlanError::Purged { vbid, seqno: start.seqno, purge: seen.purge });
        }
        // The server lets nobody go on from there; all that it still has comes again.
        let epoch = start.epoch.saturating_add(1);
        return Ok(Offset { seqno: Seqno::ZERO, vbuuid: newest, epoch });
    };
    let epoch = start.epoch.saturating_add(1);
    match limits.on_rollback {
        OnRollback::Fail => {
            let Offset { vbuuid, seqno, .. } = start;
            Err(PlanError::RolledBack { vbid, vbuuid, seqno, common })
        }
        OnRollback::Resync => Ok(Offset { seqno: Seqno::ZERO, vbuuid: newest, epoch }),
        // Below the purge seqno the server lets nobody go on.
        OnRollback::Emit if purged(common) => {
            Ok(Offset { seqno: Seqno::ZERO, vbuuid: newest, epoch })
        }
        OnRollback::Emit => Ok(Offset { seqno: common, vbuuid: newest, epoch }),
    }
}

/// Where to go back to, if what was read is not, or not surely, the server's history.
fn rollback(start: Offset, seen: &Observed, limits: &Limits) -> Option<Seqno> {
    if start.seqno == Seqno::ZERO {
        return None;
    }
    let common = common(start, seen);
    if limits.persisted_only {
        return (common < start.seqno).then_some(common);
    }
    // The snapshot that the offset fell into may end anywhere up to the high seqno of that time,
    // and a branch that begins in it takes away what it de-duplicated.
    match branch_end(start.vbuuid, &seen.log) {
        Some(None) => (common < start.seqno).then_some(common),
        Some(Some(branch_end)) => {
            let read = seen.high_after_read.filter(|high| *high >= start.seqno);
            let whole = read.is_some_and(|high| branch_end >= high) && common >= start.seqno;
            (!whole).then_some(Seqno::ZERO)
        }
        None => Some(Seqno::ZERO),
    }
}

/// Up to where an offset lies on the server's history.
fn common(offset: Offset, seen: &Observed) -> Seqno {
    match branch_end(offset.vbuuid, &seen.log) {
        _ if offset.seqno == Seqno::ZERO => Seqno::ZERO,
        None => Seqno::ZERO,
        Some(None) => offset.seqno.min(seen.high),
        Some(Some(branch_end)) => offset.seqno.min(branch_end).min(seen.high),
    }
}

/// Where a branch ends because another begins: `Some(None)` for the newest, `None` for one that the
/// log does not have.
fn branch_end(vbuuid: Vbuuid, log: &FailoverLog) -> Option<Option<Seqno>> {
    let entries = log.entries();
    let at = entries.iter().position(|entry| entry.vbuuid == vbuuid)?;
    Some(at.checked_sub(1).and_then(|newer| entries.get(newer)).map(|newer| newer.seqno))
}

/// Last seqno that may be read now; not below where reading begins.
fn available(vbid: Vbid, begin: Offset, seen: &Observed, limits: &Limits) -> Seqno {
    let mut end = seen.high;
    if limits.persisted_only {
        end = end.min(seen.persisted.unwrap_or(Seqno::ZERO));
    }
    if let Some(until) = &limits.until {
        end = end.min(until.get(vbid).seqno);
    }
    end.max(begin.seqno)
}

/// Moves on by what a batch read, so that a small limit goes round all vBuckets.
fn turn(start: &Offsets) -> u64 {
    start.iter().fold(0, |sum: u64, (_, offset)| sum.wrapping_add(offset.seqno.0))
}
