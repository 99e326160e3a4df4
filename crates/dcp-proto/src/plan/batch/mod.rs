//! What the next batch reads.

mod begin;

use std::collections::BTreeMap;

use dcp_wire::{Seqno, Vbid, Vbuuid};

use self::begin::{Begin, begin, begin_again, common};
use super::share::share;
use super::start::Start;
use super::{Offset, Offsets, VbucketRange};
use crate::{FailoverLog, OnPurge, OnRollback, Position};

/// The observed state of one vBucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observed {
    /// Highest seqno of the active copy.
    pub high: Seqno,
    /// Highest seqno that the server reports to a stream; below `high` if only prepared or aborted
    /// writes follow and the server does not count them.
    pub reported: Seqno,
    /// Seqno that is persisted on every present copy; `None` if it was not requested.
    pub persisted: Option<Seqno>,
    /// Seqno up to which tombstones may have been purged; `None` if the server does not report it.
    pub purge: Option<Seqno>,
    /// The server's answers to stream requests.
    pub answers: Vec<Answer>,
    /// The vBucket's history.
    pub log: FailoverLog,
    /// The high seqno when the offsets to continue from were known to be read completely, on their
    /// branch: their snapshots end at or below it. `None` if it was not observed.
    pub high_after_read: Option<Seqno>,
}

/// The server's answer to a stream request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    /// Branch in the request.
    pub vbuuid: Vbuuid,
    /// Start seqno in the request.
    pub seqno: Seqno,
    /// Seqno to roll back to; `None` if the stream may resume.
    pub rollback: Option<Seqno>,
}

/// How far a batch may go.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// How many seqnos a batch may cover, all vBuckets together; no limit if `None`. With 0 nothing
    /// is read, but rollbacks are delivered.
    pub max_seqnos: Option<u64>,
    /// Offsets not to pass, such as those that "available now" stood for at the start.
    pub until: Option<Offsets>,
    /// On by default, unlike in a stream, because a batch ends at offsets that a failover could
    /// take back. Offer only what is persisted on every copy; see the module documentation.
    pub persisted_only: bool,
    /// What to do if the server's history is no longer the one that was read.
    pub on_rollback: OnRollback,
    /// What to do if tombstones above an offset may have been purged: fail, or resync.
    pub on_purge: OnPurge,
    /// Whether the server can resume streams below its purge seqno on request.
    pub ignores_purges: bool,
    /// No read follows: read everything, persisted or not.
    pub is_last: bool,
}

impl Default for Limits {
    /// No limit but that of what is persisted.
    fn default() -> Self {
        Self {
            max_seqnos: None,
            until: None,
            persisted_only: true,
            on_rollback: OnRollback::default(),
            on_purge: OnPurge::default(),
            ignores_purges: false,
            is_last: false,
        }
    }
}

/// Why a batch cannot be planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The server's history of a vBucket is no longer the one that was read.
    #[error(
        "the history of {vbid} was rolled back: it was read up to seqno {seqno} of branch \
         {vbuuid}, which the server's history shares only up to {common}; to continue, emit \
         rollbacks or read the vBucket again"
    )]
    RolledBack {
        /// The vBucket.
        vbid: Vbid,
        /// Branch that was read.
        vbuuid: Vbuuid,
        /// Last seqno that was read.
        seqno: Seqno,
        /// Last seqno in common with the server's history.
        common: Seqno,
    },
    /// Deletions may be missing, because the server no longer has them.
    #[error(
        "{vbid} was read up to seqno {seqno}, but the server has purged deletions {}: some may be \
         missed permanently; read from the beginning, or resync at a purge",
        purge.map_or_else(|| "above it".to_owned(), |purge| format!("up to {purge}"))
    )]
    Purged {
        /// The vBucket.
        vbid: Vbid,
        /// Last seqno that was read.
        seqno: Seqno,
        /// Seqno up to which deletions may have been purged; `None` if the server does not report
        /// it.
        purge: Option<Seqno>,
    },
    /// The snapshot that a checkpoint is in is not yet persisted on all copies, so no offset can be
    /// offered inside it. Temporary.
    #[error(
        "{vbid}: the snapshot that the checkpoint is in ends at seqno {end}, but all copies have \
         persisted only up to {persisted}"
    )]
    NotPersisted {
        /// The vBucket.
        vbid: Vbid,
        /// Where the snapshot ends.
        end: Seqno,
        /// Seqno up to which it is persisted on all copies.
        persisted: Seqno,
    },
}

/// The positions to ask the server about before a batch from `start` is planned: whether it would
/// resume from them. Put the answers into [`Observed::answers`] and call this again until there are
/// no more probes.
///
/// The history alone shows whether the changes read are still valid, except if the user may not see
/// the purge seqno, and for a position inside a snapshot.
#[must_use]
pub fn rollback_probes(
    start: &Start,
    observed: &BTreeMap<Vbid, Observed>,
    limits: &Limits,
) -> BTreeMap<Vbid, Position> {
    let is_inside = matches!(start, Start::Checkpoint { .. });
    let mut probes = BTreeMap::new();
    for (&vbid, seen) in observed.iter().filter(|(_, seen)| seen.purge.is_none() || is_inside) {
        // If a vBucket cannot be read, planning reports why.
        let Ok(begin) = begin(vbid, start, seen, limits) else { continue };
        let position = begin.from.position;
        let is_known = seen.answer(position.vbuuid(), position.seqno).is_some();
        let is_read = is_inside || seen.high > position.seqno;
        if position.seqno != Seqno::ZERO && is_read && !is_known {
            probes.insert(vbid, position);
        }
    }
    probes
}

/// The end of the batch that begins at `start`: one offset for each vBucket in `observed`, the
/// others stay.
///
/// # Errors
/// [`PlanError`] for the first vBucket that cannot be planned.
pub fn plan_end(
    start: &Start,
    observed: &BTreeMap<Vbid, Observed>,
    limits: &Limits,
) -> Result<Offsets, PlanError> {
    let mut begins = Vec::with_capacity(observed.len());
    for (&vbid, seen) in observed {
        let begin = begin(vbid, start, seen, limits)?;
        let end = available(vbid, &begin, seen, limits);
        let least = least_end(vbid, start, &begin, limits);
        if least > end {
            return Err(PlanError::NotPersisted { vbid, end: least, persisted: end });
        }
        begins.push((vbid, begin, end, least));
    }
    let amounts: Vec<u64> =
        begins.iter().map(|(_, begin, end, _)| end.0.saturating_sub(begin.seqno().0)).collect();
    let from = start.offsets();
    let shares = match limits.max_seqnos {
        None => amounts,
        Some(limit) => share(&amounts, limit, turn(from)),
    };
    let mut end = from.clone();
    for ((vbid, begin, _, least), share) in begins.into_iter().zip(shares) {
        let seqno = Seqno(begin.seqno().0.saturating_add(share)).max(least);
        let vbuuid = observed.get(&vbid).map_or(Vbuuid(0), |seen| seen.log.newest().vbuuid);
        let next = Offset { seqno, vbuuid, epoch: begin.epoch() };
        let from = from.get(vbid);
        let still = next.seqno == from.seqno && next.epoch == from.epoch;
        // A new branch that removes nothing is no reason for an empty batch, unless its name is
        // needed later to show that nothing was removed.
        if !still || (!limits.persisted_only && next.seqno > Seqno::ZERO) {
            end.set(vbid, next);
        }
    }
    Ok(end)
}

/// What to read for the batch from `start` to `end`, by vBucket.
///
/// A batch can be requested again long after its end was chosen. Changes that are no longer in the
/// server's history are left out; the next [`plan_end`] reports them. vBuckets that are not in
/// `observed` are not read.
///
/// # Errors
/// [`PlanError::Purged`]; and [`PlanError::RolledBack`] if `end` includes a rollback and
/// [`OnRollback::Fail`] is set.
pub fn plan_ranges(
    start: &Start,
    end: &Offsets,
    observed: &BTreeMap<Vbid, Observed>,
    limits: &Limits,
) -> Result<Vec<VbucketRange>, PlanError> {
    let mut ranges = Vec::new();
    for (&vbid, seen) in observed {
        let (offset, to) = (start.offsets().get(vbid), end.get(vbid));
        if to == offset {
            continue;
        }
        let is_told = to.epoch > offset.epoch;
        // Losses since the end was chosen are reported by the plan of the next batch.
        let Begin { mut from, rolled_back, past_purge } = if is_told || limits.is_last {
            begin(vbid, start, seen, limits)?
        } else {
            begin_again(vbid, start, seen, limits)?
        };
        from.position.epoch = from.position.epoch.max(to.epoch);
        let begins = from.position.seqno;
        // The planned rollback still applies, but another failover may have lost more since.
        let to = common(to, seen).min(to.seqno).min(seen.reported).max(begins);
        let rolled_back = is_told || rolled_back;
        if to > begins || rolled_back {
            ranges.push(VbucketRange { vbid, from, to, rolled_back, past_purge });
        }
    }
    Ok(ranges)
}

/// Last seqno that may be read now; not below where reading begins.
fn available(vbid: Vbid, begin: &Begin, seen: &Observed, limits: &Limits) -> Seqno {
    // A task checks that its end exists, by what the server reports.
    let mut end = seen.reported.min(seen.high);
    if limits.persisted_only && !limits.is_last {
        end = end.min(seen.persisted.unwrap_or(Seqno::ZERO));
    }
    if let Some(until) = &limits.until {
        end = end.min(until.get(vbid).seqno);
    }
    end.max(begin.seqno())
}

/// The end below which no offset may be offered.
fn least_end(vbid: Vbid, start: &Start, begin: &Begin, limits: &Limits) -> Seqno {
    let is_claimed = limits.persisted_only && !limits.is_last && !begin.rolled_back;
    let least = start.least_end(vbid).filter(|_| is_claimed).unwrap_or(Seqno::ZERO);
    // A given end was already checked by its planner.
    let is_given = limits.until.as_ref().is_some_and(|until| until.get(vbid).seqno < least);
    if is_given { Seqno::ZERO } else { least }
}

/// Advances with each batch, so that a small limit reaches all vBuckets in turn.
fn turn(start: &Offsets) -> u64 {
    start.iter().fold(0, |sum: u64, (_, offset)| sum.wrapping_add(offset.seqno.0))
}
