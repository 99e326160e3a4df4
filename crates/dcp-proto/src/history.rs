//! Earlier points of a vBucket that a rollback can go back to.

use std::sync::Arc;

use dcp_wire::{ManifestUid, Seqno};

use crate::{FailoverLog, Position, Snapshot};

/// Points to keep. The distances between them double from the newest to the oldest, so eight cover
/// everything that was streamed.
const KEPT: usize = 8;

/// A point at which a snapshot was complete: the parts of a [`Position`] there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CompletePoint {
    /// End of the snapshot; never 0.
    pub seqno: Seqno,
    /// Failover log of the stream that delivered the snapshot.
    pub failover_log: Option<FailoverLog>,
    /// Collections manifest current at that seqno.
    pub manifest_uid: ManifestUid,
    /// Purge seqno known at that seqno.
    pub purge_seqno: Seqno,
}

impl CompletePoint {
    /// The position at the point, on the branches that begin at or below it.
    fn into_position(self) -> Position {
        let mut failover_log = self.failover_log;
        if let Some(log) = &mut failover_log {
            log.prune(self.seqno);
        }
        Position {
            seqno: self.seqno,
            snapshot: Snapshot::at(self.seqno),
            failover_log,
            manifest_uid: self.manifest_uid,
            purge_seqno: self.purge_seqno,
            epoch: 0,
        }
    }
}

/// Points at which a snapshot was complete, oldest first. Cheap to clone: each checkpoint holds
/// one per vBucket.
///
/// A rollback can only go back to such a point: inside a snapshot, a version at or below a seqno
/// may have been omitted in favour of one above it, which no longer exists after a rollback.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History {
    points: Arc<Vec<CompletePoint>>,
}

impl History {
    /// Stored points, oldest first; `None` unless their seqnos ascend from above 0.
    pub(crate) fn from_points(points: Vec<CompletePoint>) -> Option<Self> {
        let seqnos = points.iter().map(|point| point.seqno);
        let ascends = seqnos.clone().zip(seqnos.skip(1)).all(|(older, newer)| older < newer);
        let begins = points.first().is_none_or(|oldest| oldest.seqno > Seqno::ZERO);
        (ascends && begins).then(|| Self { points: Arc::new(points) })
    }

    /// Arbitrary points, unchecked.
    #[cfg(test)]
    pub(crate) fn unchecked(points: Vec<CompletePoint>) -> Self {
        Self { points: Arc::new(points) }
    }

    /// Adds a position; one inside a snapshot, or at 0, is ignored, since a rollback cannot go back
    /// to it.
    pub fn push(&mut self, position: &Position) {
        if !position.is_snapshot_complete() || position.seqno == Seqno::ZERO {
            return;
        }
        let point = CompletePoint {
            seqno: position.seqno,
            failover_log: position.failover_log.clone(),
            manifest_uid: position.manifest_uid,
            purge_seqno: position.purge_seqno,
        };
        let points = Arc::make_mut(&mut self.points);
        while points.last().is_some_and(|newest| newest.seqno >= point.seqno) {
            points.pop();
        }
        points.push(point);
        if points.len() > KEPT {
            thin(points);
        }
    }

    /// Rolls back: forgets points above `seqno`, or at or above `before`, and returns the newest
    /// remaining position, [`Position::EARLIEST`] without any.
    ///
    /// `before` is the start of the refused request; going back to it would repeat that request.
    pub(crate) fn roll_back(&mut self, seqno: Seqno, before: Seqno) -> Position {
        let points = Arc::make_mut(&mut self.points);
        points.retain(|point| point.seqno <= seqno && point.seqno < before);
        points.last().cloned().map_or(Position::EARLIEST, CompletePoint::into_position)
    }

    /// The points, oldest first.
    #[must_use]
    pub fn points(&self) -> &[CompletePoint] {
        &self.points
    }
}

/// Forgets the point whose removal widens a gap the least in proportion to the gap's age. The
/// oldest and the newest stay.
fn thin(points: &mut Vec<CompletePoint>) {
    let newest = points.last().map_or(0, |point| point.seqno.0);
    let cost = |window: &[CompletePoint]| {
        let [before, _, after] = window else { return u128::MAX };
        let gap = after.seqno.0 - before.seqno.0;
        let age = newest - after.seqno.0 + 1;
        u128::from(gap) * u128::from(u32::MAX) / u128::from(age)
    };
    let cheapest = points.windows(3).enumerate().min_by_key(|(_, window)| cost(window));
    if let Some((before, _)) = cheapest {
        points.remove(before + 1);
    }
}

#[cfg(test)]
mod tests {
    use dcp_wire::ManifestUid;

    use super::*;

    fn complete(seqno: u64) -> Position {
        Position { seqno: Seqno(seqno), snapshot: Snapshot::at(Seqno(seqno)), ..Position::EARLIEST }
    }

    #[test]
    fn history_keeps_no_position_inside_a_snapshot() {
        let mut history = History::default();
        let mut position = complete(5);
        position.snapshot.end = Seqno(9);
        history.push(&position);
        assert_eq!(history.points(), &[]);
    }

    #[test]
    fn history_points_are_few_and_their_distances_grow_with_age() {
        let mut history = History::default();
        for seqno in 1..=10_000 {
            history.push(&complete(seqno));
        }
        let seqnos: Vec<u64> = history.points().iter().map(|p| p.seqno.0).collect();
        assert_eq!(seqnos.len(), KEPT);
        assert_eq!((seqnos[0], seqnos[KEPT - 1]), (1, 10_000));
        let gaps: Vec<u64> = seqnos.windows(2).map(|w| w[1] - w[0]).collect();
        assert!(gaps.windows(2).all(|w| w[0] >= w[1]), "{seqnos:?}");
        assert!(seqnos[KEPT - 2] >= 9_900, "one is near the newest: {seqnos:?}");
    }

    #[test]
    fn rollback_never_returns_to_where_the_refused_request_started() {
        let mut history = History::default();
        history.push(&complete(20));
        history.push(&complete(40));
        assert_eq!(history.roll_back(Seqno(40), Seqno(40)).seqno, Seqno(20));
        assert_eq!(history.roll_back(Seqno(20), Seqno(20)), Position::EARLIEST);
    }

    #[test]
    fn history_clones_keep_their_points() {
        let mut history = History::default();
        history.push(&complete(20));
        let before = history.clone();
        history.push(&complete(40));
        assert_eq!(history.roll_back(Seqno(0), Seqno(40)), Position::EARLIEST);
        assert_eq!(before.points().len(), 1);
    }

    #[test]
    fn history_forgets_the_point_whose_gap_is_smallest_for_its_age() {
        for (seqnos, forgotten) in [
            // The newer gap is 100 times smaller but 1,000 times younger.
            (&[0, 500, 1000, 1990, 1995, 2000][..], 500),
            (&[0, 500, 1000, 1500, 1501, 1502, 2000], 1501),
            // Of equal gaps, the oldest.
            (&[0, 100, 200, 300, 10_000], 100),
            (&[0, 100, 200, 210, 10_000], 200),
            // Never the oldest nor the newest.
            (&[1, 2, 3], 2),
            (&[1, 2, u64::MAX], 2),
        ] {
            let point = |&seqno: &u64| CompletePoint {
                seqno: Seqno(seqno),
                failover_log: None,
                manifest_uid: ManifestUid(0),
                purge_seqno: Seqno::ZERO,
            };
            let mut points: Vec<_> = seqnos.iter().map(point).collect();
            thin(&mut points);
            let kept: Vec<u64> = points.iter().map(|point| point.seqno.0).collect();
            let wanted: Vec<u64> = seqnos.iter().copied().filter(|&at| at != forgotten).collect();
            assert_eq!(kept, wanted);
        }
    }

    #[test]
    fn history_point_replaces_those_at_and_above_it() {
        let mut history = History::default();
        for seqno in [20, 40, 60, 40] {
            history.push(&complete(seqno));
        }
        let seqnos: Vec<u64> = history.points().iter().map(|point| point.seqno.0).collect();
        assert_eq!(seqnos, [20, 40]);
    }

    #[test]
    fn history_keeps_the_point_that_a_rollback_goes_to() {
        let history = |seqno, before| {
            let mut history = History::default();
            [10, 20, 30].into_iter().for_each(|seqno| history.push(&complete(seqno)));
            history.roll_back(Seqno(seqno), Seqno(before)).seqno
        };
        assert_eq!(history(20, 40), Seqno(20), "at the seqno");
        assert_eq!(history(19, 40), Seqno(10), "below it");
        assert_eq!(history(30, 20), Seqno(10), "not at the refused start");
    }
}
