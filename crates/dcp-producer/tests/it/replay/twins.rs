//! Pairs of what the recorded server made up and what ours did: one always stands for the other.

use std::collections::{BTreeMap, BTreeSet};

use super::ignored::Ignored;
use super::markers::Counts;

/// The pairs of a replay.
#[derive(Debug, Default)]
pub(super) struct Twins {
    pub(super) vbuuids: Pairs,
    /// By vBucket: each has a clock of its own.
    pub(super) cas: BTreeMap<u16, Pairs>,
    /// Revisions of cluster maps.
    pub(super) revisions: Pairs,
    /// What was left out of the comparison.
    pub(super) ignored: BTreeSet<Ignored>,
    /// What the fields of the markers that were compared follow from.
    pub(super) marker_fields: Counts,
}

impl Twins {
    /// Notes that something was left out, if it made a difference.
    pub(super) fn ignore(&mut self, what: Ignored, differs: bool) {
        if differs {
            self.ignored.insert(what);
        }
    }
}

/// Pairs of recorded and own numbers, each in one pair only; 0 stands for itself.
#[derive(Debug, Default)]
pub(super) struct Pairs {
    ours: BTreeMap<u64, u64>,
    recorded: BTreeMap<u64, u64>,
}

impl Pairs {
    /// Makes a pair unless one of them has another partner.
    pub(super) fn bind(&mut self, recorded: u64, ours: u64) {
        if !self.ours.contains_key(&recorded) && !self.recorded.contains_key(&ours) {
            self.ours.insert(recorded, ours);
            self.recorded.insert(ours, recorded);
        }
    }

    /// What stands for a recorded number; itself if nothing does.
    pub(super) fn ours(&self, recorded: u64) -> u64 {
        self.ours.get(&recorded).copied().unwrap_or(recorded)
    }

    /// Whether the two are a pair, which two unknown numbers become.
    pub(super) fn match_up(&mut self, recorded: u64, ours: u64) -> bool {
        if recorded == 0 || ours == 0 {
            return recorded == ours;
        }
        self.bind(recorded, ours);
        self.ours.get(&recorded) == Some(&ours)
    }
}
