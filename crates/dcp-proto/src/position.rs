//! The position of a consumer in one vBucket.

use core::fmt;

use dcp_wire::{ManifestUid, Seqno, Vbuuid};

use crate::FailoverLog;

/// The seqnos that a snapshot covers, both ends included. Displayed as `[start, end]`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// First seqno of the snapshot, or one below it.
    pub start: Seqno,
    /// Last seqno of the snapshot.
    pub end: Seqno,
}

impl Snapshot {
    /// A snapshot that ends where it starts.
    #[must_use]
    pub const fn at(seqno: Seqno) -> Self {
        Self { start: seqno, end: seqno }
    }

    /// Whether a seqno lies in the snapshot.
    #[inline]
    #[must_use]
    pub fn contains(&self, seqno: Seqno) -> bool {
        self.start <= seqno && seqno <= self.end
    }
}

impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {}]", self.start, self.end)
    }
}

/// The position of a consumer in one vBucket: everything a later stream request needs to resume
/// exactly there, or to be rolled back.
///
/// A snapshot becomes part of a position with its first item, never with its marker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Position {
    /// Last seqno processed.
    pub seqno: Seqno,
    /// Snapshot of that seqno.
    pub snapshot: Snapshot,
    /// Failover log of the stream that delivered the position; `None` before any stream.
    pub failover_log: Option<FailoverLog>,
    /// Collections manifest current at that seqno.
    pub manifest_uid: ManifestUid,
    /// Purge seqno from the last marker that carried one.
    pub purge_seqno: Seqno,
    /// How many rollbacks this consumer has seen on the vBucket.
    pub epoch: u32,
}

impl Position {
    /// Before the first change.
    pub const EARLIEST: Self = Self {
        seqno: Seqno::ZERO,
        snapshot: Snapshot::at(Seqno::ZERO),
        failover_log: None,
        manifest_uid: ManifestUid(0),
        purge_seqno: Seqno::ZERO,
        epoch: 0,
    };

    /// The snapshot range of a stream request from here. A complete snapshot collapses to its end:
    /// with its whole range, a branch that began inside it would cause a needless rollback.
    ///
    /// Some markers start at their first item. A request that starts there begins one below it: the
    /// server takes a start at the snapshot's start for one before the snapshot, and would accept it
    /// even if the rest, which may have replaced older versions, was lost in a failover.
    #[must_use]
    pub fn request_snapshot(&self) -> Snapshot {
        if self.is_snapshot_complete() {
            return Snapshot::at(self.seqno);
        }
        if self.seqno == self.snapshot.start {
            return Snapshot { start: Seqno(self.seqno.0.saturating_sub(1)), ..self.snapshot };
        }
        self.snapshot
    }

    /// The history branch of a stream request from here: the newest one that begins below the
    /// snapshot's end, in the log of the stream that delivered the position; 0 from the beginning.
    #[must_use]
    pub fn vbuuid(&self) -> Vbuuid {
        match &self.failover_log {
            Some(log) if self.seqno != Seqno::ZERO => {
                log.branch_of(self.request_snapshot().end).vbuuid
            }
            _ => Vbuuid(0),
        }
    }

    /// Whether the position is at the end of its snapshot, so that everything up to it has been
    /// delivered.
    #[must_use]
    pub fn is_snapshot_complete(&self) -> bool {
        self.seqno == self.snapshot.end
    }
}

#[cfg(test)]
mod tests {
    use dcp_wire::message::FailoverEntry;

    use super::*;

    #[test]
    fn requested_snapshot_begins_below_the_position() {
        let within = |seqno, start, end| {
            let snapshot = Snapshot { start: Seqno(start), end: Seqno(end) };
            let position = Position { seqno: Seqno(seqno), snapshot, ..Position::EARLIEST };
            let Snapshot { start, end } = position.request_snapshot();
            (start.0, end.0)
        };
        assert_eq!(within(5, 4, 10), (4, 10));
        assert_eq!(within(5, 5, 10), (4, 10), "its first item is at its start");
        assert_eq!(within(10, 4, 10), (10, 10));
        assert_eq!(within(0, 0, 10), (0, 10));
        assert_eq!(within(0, 0, 0), (0, 0));
    }

    #[test]
    fn branch_is_chosen_by_the_end_of_the_snapshot() {
        let entry = |vbuuid, seqno| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) };
        let log = FailoverLog::new(vec![entry(0xb, 100), entry(0xa, 0)]).unwrap();
        let mut position = Position {
            seqno: Seqno(50),
            snapshot: Snapshot { start: Seqno(0), end: Seqno(150) },
            failover_log: Some(log),
            ..Position::EARLIEST
        };
        assert_eq!(position.vbuuid(), Vbuuid(0xb), "inside [0, 150]");
        position.snapshot.end = Seqno(50);
        assert_eq!(position.vbuuid(), Vbuuid(0xa), "at the end of [0, 50]");
        assert_eq!(position.request_snapshot(), Snapshot::at(Seqno(50)));
    }
}
