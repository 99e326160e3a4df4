//! Where reading a vBucket begins, and where a rollback takes it from there.

use dcp_wire::{Seqno, Vbid, Vbuuid};

use super::{Limits, Observed, OnRollback, PlanError};
use crate::consumer::StreamPosition;
use crate::micro_batch::Offset;
use crate::micro_batch::start::{Start, at};
use crate::{FailoverLog, Position, Snapshot};

/// Where reading a vBucket begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Begin {
    pub(super) from: StreamPosition,
    /// Whether that is a rollback's target.
    pub(super) rolled_back: bool,
    /// Whether the server is to go on below what it has purged.
    pub(super) past_purge: bool,
}

impl Begin {
    pub(super) const fn seqno(&self) -> Seqno {
        self.from.position.seqno
    }

    pub(super) const fn epoch(&self) -> u32 {
        self.from.position.epoch
    }

    /// As a rollback's target.
    fn rolled_back(mut from: StreamPosition, epoch: u32) -> Self {
        from.position.epoch = epoch.saturating_add(1);
        Self { from, rolled_back: true, past_purge: false }
    }
}

/// Where reading begins: at the start, or where a rollback leads.
pub(super) fn begin(
    vbid: Vbid,
    start: &Start,
    seen: &Observed,
    limits: &Limits,
) -> Result<Begin, PlanError> {
    match start {
        Start::Offsets(offsets) => begin_at_offset(vbid, offsets.get(vbid), seen, limits),
        Start::Checkpoint { .. } => {
            begin_at_position(vbid, start.stream_position(vbid), seen, limits)
        }
    }
}

/// Where a batch begins whose end was chosen before: at its start, whatever has become of that.
///
/// Where the server has purged above that and the loss is allowed, it is asked to go on all the same:
/// the batch has what is left of its range. A server that cannot do that goes on from no seqno so old:
/// all that it still has comes again, in the epoch that the end was chosen in. A start that is not on the server's history any more is another
/// matter: nothing is read from there, and the plan of the next batch tells of the rollback.
pub(super) fn begin_again(
    vbid: Vbid,
    start: &Start,
    seen: &Observed,
    limits: &Limits,
) -> Result<Begin, PlanError> {
    let (offset, mut from) = (start.offsets().get(vbid), start.stream_position(vbid));
    let is_offset = matches!(start, Start::Offsets(_));
    let is_on_history = common(offset, seen) >= offset.seqno;
    let mut past_purge = false;
    if is_offset && is_on_history && seen.is_purged(offset.vbuuid, offset.seqno) {
        seen.lost(vbid, offset.seqno, limits)?;
        past_purge = limits.ignores_purges;
        if !past_purge {
            from = StreamPosition::new(Position { epoch: offset.epoch, ..Position::EARLIEST });
        }
    }
    Ok(Begin { from, rolled_back: false, past_purge })
}

fn begin_at_offset(
    vbid: Vbid,
    start: Offset,
    seen: &Observed,
    limits: &Limits,
) -> Result<Begin, PlanError> {
    let newest = seen.log.newest().vbuuid;
    let back_to = |seqno| {
        let to = if seen.is_purged(newest, seqno) { Seqno::ZERO } else { seqno };
        Begin::rolled_back(
            StreamPosition::new(at(Offset { seqno: to, vbuuid: newest, epoch: 0 })),
            start.epoch,
        )
    };
    let Some(common) = rollback(start, seen, limits) else {
        if !seen.is_purged(start.vbuuid, start.seqno) {
            let from = StreamPosition::new(at(start));
            return Ok(Begin { from, rolled_back: false, past_purge: false });
        }
        // The server lets nobody go on from there; all that it still has comes again.
        return seen.lost(vbid, start.seqno, limits).map(|()| back_to(Seqno::ZERO));
    };
    match limits.on_rollback {
        OnRollback::Fail => {
            let Offset { vbuuid, seqno, .. } = start;
            Err(PlanError::RolledBack { vbid, vbuuid, seqno, common })
        }
        OnRollback::Resync => Ok(back_to(Seqno::ZERO)),
        OnRollback::Emit => Ok(back_to(common)),
    }
}

/// Follows the server's answers from one point of the history to the one before it.
fn begin_at_position(
    vbid: Vbid,
    mut from: StreamPosition,
    seen: &Observed,
    limits: &Limits,
) -> Result<Begin, PlanError> {
    let Position { seqno, epoch, .. } = from.position;
    let vbuuid = from.position.vbuuid();
    let Some(common) = seen.rolled_back(&from.position) else {
        return Ok(Begin { from, rolled_back: false, past_purge: false });
    };
    let earliest = || Begin::rolled_back(StreamPosition::new(Position::EARLIEST), epoch);
    if seen.has_all_of(&from.position) {
        return seen.lost(vbid, seqno, limits).map(|()| earliest());
    }
    match limits.on_rollback {
        OnRollback::Fail => return Err(PlanError::RolledBack { vbid, vbuuid, seqno, common }),
        OnRollback::Resync => return Ok(earliest()),
        OnRollback::Emit => {}
    }
    let mut refused = common;
    loop {
        let before = from.position.seqno;
        from.position = from.history.roll_back(refused, before);
        match seen.rolled_back(&from.position) {
            None => return Ok(Begin::rolled_back(from, epoch)),
            Some(further) => refused = further,
        }
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
pub(super) fn common(offset: Offset, seen: &Observed) -> Seqno {
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

impl Observed {
    /// Where the server takes a position back to; `None` if it goes on from there, or is yet to be
    /// asked.
    fn rolled_back(&self, position: &Position) -> Option<Seqno> {
        self.answer(position.vbuuid(), position.seqno).flatten()
    }

    /// What the server answered to a stream request; `None` if it was not asked.
    pub(super) fn answer(&self, vbuuid: Vbuuid, seqno: Seqno) -> Option<Option<Seqno>> {
        let asked = self.answers.iter().find(|each| (each.vbuuid, each.seqno) == (vbuuid, seqno));
        asked.map(|each| each.rollback)
    }

    /// Whether the server goes on from no seqno so old, though it is on its history.
    fn is_purged(&self, vbuuid: Vbuuid, seqno: Seqno) -> bool {
        let is_refused = matches!(self.answer(vbuuid, seqno), Some(Some(_)));
        seqno > Seqno::ZERO && (self.purge.is_some_and(|purge| seqno < purge) || is_refused)
    }

    /// Whether the snapshot of a position is on the server's history as a whole, so that nothing
    /// but a purge explains a rollback.
    fn has_all_of(&self, position: &Position) -> bool {
        if let Some(purge) = self.purge {
            return position.seqno < purge;
        }
        let Snapshot { end, .. } = position.request_snapshot();
        match branch_end(position.vbuuid(), &self.log) {
            None => false,
            Some(branch_end) => position.seqno <= self.high && branch_end.is_none_or(|b| end <= b),
        }
    }

    /// Refuses to go on, unless the loss of deletions is allowed.
    fn lost(&self, vbid: Vbid, seqno: Seqno, limits: &Limits) -> Result<(), PlanError> {
        if limits.allow_data_loss {
            return Ok(());
        }
        Err(PlanError::Purged { vbid, seqno, purge: self.purge })
    }
}
