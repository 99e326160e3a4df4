//! Where reading a vBucket begins, and where a rollback takes it.

use dcp_wire::{Seqno, Vbid, Vbuuid};

use super::{Limits, Observed, PlanError};
use crate::consumer::StreamPosition;
use crate::plan::Offset;
use crate::plan::start::{Start, at};
use crate::{OnPurge, OnRollback, Position, Snapshot};

/// Where reading a vBucket begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Begin {
    pub(super) from: StreamPosition,
    /// Whether it is the target of a rollback.
    pub(super) rolled_back: bool,
    /// Whether the server must resume below its purge seqno.
    pub(super) past_purge: bool,
}

impl Begin {
    pub(super) const fn seqno(&self) -> Seqno {
        self.from.position.seqno
    }

    pub(super) const fn epoch(&self) -> u32 {
        self.from.position.epoch
    }

    /// A beginning that is the target of a rollback.
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

/// Where a batch begins whose end was chosen before: at its start, whatever has happened since.
///
/// If the server has purged deletions above the start and the loss is allowed, it is asked to
/// resume anyway, and the batch has what is left of its range. If the server cannot do that,
/// everything it still has is read again, in the epoch in which the end was chosen. If the start is
/// no longer on the server's history, nothing is read, and the plan of the next batch reports the
/// rollback.
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
            from = StreamPosition::new(Position::EARLIEST);
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
        // The server does not resume from there; everything it still has is read again.
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

/// Follows the server's answers back from one point of the history to the next older one.
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

/// Where to go back to, if what was read is not, or may not be, the server's history.
fn rollback(start: Offset, seen: &Observed, limits: &Limits) -> Option<Seqno> {
    if start.seqno == Seqno::ZERO {
        return None;
    }
    let common = common(start, seen);
    if limits.persisted_only {
        return (common < start.seqno).then_some(common);
    }
    // The snapshot that contains the offset may end anywhere up to the high seqno at that time, and
    // a branch that begins inside it lacks the changes that it de-duplicated.
    match seen.log.branch_end(start.vbuuid) {
        Some(None) => (common < start.seqno).then_some(common),
        Some(Some(branch_end)) => {
            let read = seen.high_after_read.filter(|high| *high >= start.seqno);
            let whole = read.is_some_and(|high| branch_end >= high) && common >= start.seqno;
            (!whole).then_some(Seqno::ZERO)
        }
        None => Some(Seqno::ZERO),
    }
}

/// Seqno up to which an offset is on the server's history.
pub(super) fn common(offset: Offset, seen: &Observed) -> Seqno {
    match seen.log.branch_end(offset.vbuuid) {
        None => Seqno::ZERO,
        Some(None) => offset.seqno.min(seen.high),
        Some(Some(branch_end)) => offset.seqno.min(branch_end).min(seen.high),
    }
}

impl Observed {
    /// Where the server rolls a position back to; `None` if it resumes there, or has not been
    /// asked.
    fn rolled_back(&self, position: &Position) -> Option<Seqno> {
        self.answer(position.vbuuid(), position.seqno).flatten()
    }

    /// The server's answer to a stream request; `None` if it was not asked.
    pub(super) fn answer(&self, vbuuid: Vbuuid, seqno: Seqno) -> Option<Option<Seqno>> {
        let asked = self.answers.iter().find(|each| (each.vbuuid, each.seqno) == (vbuuid, seqno));
        asked.map(|each| each.rollback)
    }

    /// Whether the server does not resume from a seqno because of a purge, although it is on its
    /// history.
    fn is_purged(&self, vbuuid: Vbuuid, seqno: Seqno) -> bool {
        let is_refused = matches!(self.answer(vbuuid, seqno), Some(Some(_)));
        seqno > Seqno::ZERO && (self.purge.is_some_and(|purge| seqno < purge) || is_refused)
    }

    /// Whether the snapshot of a position is entirely on the server's history, so that only a purge
    /// explains a rollback.
    fn has_all_of(&self, position: &Position) -> bool {
        if let Some(purge) = self.purge {
            return position.seqno < purge;
        }
        let Snapshot { end, .. } = position.request_snapshot();
        match self.log.branch_end(position.vbuuid()) {
            None => false,
            Some(branch_end) => position.seqno <= self.high && branch_end.is_none_or(|b| end <= b),
        }
    }

    /// Fails if a purge has to.
    fn lost(&self, vbid: Vbid, seqno: Seqno, limits: &Limits) -> Result<(), PlanError> {
        match limits.on_purge {
            OnPurge::Fail => Err(PlanError::Purged { vbid, seqno, purge: self.purge }),
            OnPurge::Resync | OnPurge::Ignore => Ok(()),
        }
    }
}
