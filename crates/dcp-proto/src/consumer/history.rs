//! Earlier positions of a vBucket a rollback can go back to.

use dcp_wire::Seqno;

use crate::Position;

/// How many are kept. Their distances double from the newest to the oldest, so that eight reach
/// back over the whole of what was streamed.
const KEPT: usize = 8;

/// Positions at which a snapshot was complete, oldest first.
///
/// Only such a position can be gone back to: inside a snapshot a version at or below a seqno may
/// have been left out in favour of one above it, which after a rollback is no more.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    positions: Vec<Position>,
}

impl History {
    /// Keeps a position; one in the middle of a snapshot, or at 0, is none to go back to.
    pub fn push(&mut self, position: &Position) {
        if !position.is_snapshot_complete() || position.seqno == Seqno::ZERO {
            return;
        }
        if let Some(newest) = self.positions.last_mut()
            && newest.seqno >= position.seqno
        {
            *newest = position.clone();
            return;
        }
        self.positions.push(position.clone());
        if self.positions.len() > KEPT {
            self.thin();
        }
    }

    /// Forgets the position whose loss widens a gap the least, in proportion to how long ago the
    /// gap is. The oldest and the newest stay.
    fn thin(&mut self) {
        let newest = self.positions.last().map_or(0, |position| position.seqno.0);
        let mut cheapest = None;
        for (i, window) in self.positions.windows(3).enumerate() {
            let [before, _, after] = window else { continue };
            let gap = after.seqno.0 - before.seqno.0;
            let age = newest - after.seqno.0 + 1;
            let cost = u128::from(gap) * u128::from(u32::MAX) / u128::from(age);
            if cheapest.is_none_or(|(least, _)| cost < least) {
                cheapest = Some((cost, i + 1));
            }
        }
        if let Some((_, i)) = cheapest {
            self.positions.remove(i);
        }
    }

    /// Goes back: forgets what lies above `seqno`, or at or above `before`, and returns the newest
    /// position left, [`Position::EARLIEST`] if none is.
    ///
    /// `before` is where the refused request started; going back to it would ask the same again.
    pub(super) fn roll_back(&mut self, seqno: Seqno, before: Seqno) -> Position {
        self.positions.retain(|position| position.seqno <= seqno && position.seqno < before);
        let mut position = self.positions.last().cloned().unwrap_or(Position::EARLIEST);
        if let Some(log) = &mut position.failover_log {
            log.prune(position.seqno);
        }
        position
    }

    /// The positions, oldest first.
    #[must_use]
    pub fn positions(&self) -> &[Position] {
        &self.positions
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Snapshot;

    fn complete(seqno: u64) -> Position {
        Position {
            seqno: Seqno(seqno),
            snapshot: Snapshot { start: Seqno(seqno), end: Seqno(seqno) },
            ..Position::EARLIEST
        }
    }

    #[test]
    fn a_position_inside_a_snapshot_is_not_kept() {
        let mut history = History::default();
        let mut position = complete(5);
        position.snapshot.end = Seqno(9);
        history.push(&position);
        assert_eq!(history.positions(), &[]);
    }

    #[test]
    fn positions_kept_are_few_and_their_distances_grow_with_age() {
        let mut history = History::default();
        for seqno in 1..=10_000 {
            history.push(&complete(seqno));
        }
        let seqnos: Vec<u64> = history.positions().iter().map(|p| p.seqno.0).collect();
        assert_eq!(seqnos.len(), KEPT);
        assert_eq!((seqnos[0], seqnos[KEPT - 1]), (1, 10_000));
        let gaps: Vec<u64> = seqnos.windows(2).map(|w| w[1] - w[0]).collect();
        assert!(gaps.windows(2).all(|w| w[0] >= w[1]), "{seqnos:?}");
        assert!(seqnos[KEPT - 2] >= 9_900, "one is near the newest: {seqnos:?}");
    }

    #[test]
    fn a_rollback_never_returns_to_where_the_refused_request_started() {
        let mut history = History::default();
        history.push(&complete(20));
        history.push(&complete(40));
        assert_eq!(history.roll_back(Seqno(40), Seqno(40)).seqno, Seqno(20));
        assert_eq!(history.roll_back(Seqno(20), Seqno(20)), Position::EARLIEST);
    }
}
