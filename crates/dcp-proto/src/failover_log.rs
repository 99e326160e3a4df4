//! The failover log on the consumer's side.

use std::sync::Arc;

use dcp_wire::message::{FailoverEntries, FailoverEntry};
use dcp_wire::{DecodeError, Seqno, Vbuuid};
use thiserror::Error;

/// Why entries are not a failover log.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidFailoverLog {
    /// A log has at least one entry.
    #[error("a failover log has at least one entry")]
    Empty,
    /// A log has at most [`FailoverLog::MAX_ENTRIES`] entries.
    #[error("a failover log of {0} entries is too long")]
    TooLong(usize),
    /// The bytes are not a list of entries.
    #[error("{0}")]
    Decode(#[from] DecodeError),
}

/// The history branches of a vBucket, newest first; never empty (server page "failure-scenarios").
///
/// The log from a stream's answer belongs to the positions of that stream; a log fetched later may
/// name branches on which those positions never were. Cheap to clone, since every position holds
/// one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailoverLog {
    entries: Arc<[FailoverEntry]>,
}

impl FailoverLog {
    /// Most entries a server's log may have; servers keep 25. One is kept for each stream.
    pub const MAX_ENTRIES: usize = 256;

    /// A log of `entries`, newest first.
    ///
    /// # Errors
    /// [`InvalidFailoverLog::Empty`] if there are none.
    pub fn new(entries: Vec<FailoverEntry>) -> Result<Self, InvalidFailoverLog> {
        if entries.is_empty() {
            return Err(InvalidFailoverLog::Empty);
        }
        Ok(Self { entries: entries.into() })
    }

    /// The log in the value of a response.
    ///
    /// # Errors
    /// [`InvalidFailoverLog`] if the value is empty, too long or not a list of entries.
    pub fn decode(value: &[u8]) -> Result<Self, InvalidFailoverLog> {
        let entries = FailoverEntries::decode(value)?;
        let count = value.len() / FailoverEntry::LEN;
        if count > Self::MAX_ENTRIES {
            return Err(InvalidFailoverLog::TooLong(count));
        }
        Self::new(entries.collect())
    }

    /// The entries, newest first.
    #[must_use]
    pub fn entries(&self) -> &[FailoverEntry] {
        &self.entries
    }

    /// The branch that is current on the server.
    #[must_use]
    pub fn newest(&self) -> FailoverEntry {
        self.entries[0]
    }

    /// The branch that holds the change `seqno`: the newest one that begins below it, or the
    /// oldest.
    ///
    /// Called with a snapshot's end, it also returns the branch to resume that snapshot on.
    #[must_use]
    pub fn branch_of(&self, seqno: Seqno) -> FailoverEntry {
        let oldest = self.entries[self.entries.len() - 1];
        self.entries.iter().copied().find(|entry| entry.seqno < seqno).unwrap_or(oldest)
    }

    /// Where a branch ends because another begins: `Some(None)` for the newest, `None` for one that
    /// the log does not have.
    #[must_use]
    pub fn branch_end(&self, vbuuid: Vbuuid) -> Option<Option<Seqno>> {
        let at = self.entries.iter().position(|entry| entry.vbuuid == vbuuid)?;
        Some(at.checked_sub(1).and_then(|newer| self.entries.get(newer)).map(|newer| newer.seqno))
    }

    /// Forgets the branches that begin above `seqno`, as after a rollback to it; the oldest stays.
    pub fn prune(&mut self, seqno: Seqno) {
        let oldest = self.entries[self.entries.len() - 1];
        let mut kept: Vec<_> =
            self.entries.iter().copied().filter(|entry| entry.seqno <= seqno).collect();
        if kept.is_empty() {
            kept.push(oldest);
        }
        self.entries = kept.into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(entries: &[(u64, u64)]) -> FailoverLog {
        FailoverLog::new(
            entries
                .iter()
                .map(|&(vbuuid, seqno)| FailoverEntry {
                    vbuuid: Vbuuid(vbuuid),
                    seqno: Seqno(seqno),
                })
                .collect(),
        )
        .unwrap()
    }

    #[test]
    fn failover_log_places_a_change_on_the_newest_branch_begun_below_it() {
        let log = log(&[(3, 200), (2, 100), (1, 0)]);
        for (seqno, vbuuid) in [(0, 1), (1, 1), (100, 1), (101, 2), (200, 2), (201, 3)] {
            assert_eq!(log.branch_of(Seqno(seqno)).vbuuid, Vbuuid(vbuuid), "seqno {seqno}");
        }
    }

    #[test]
    fn failover_log_longer_than_any_servers_is_refused() {
        let value = |entries: usize| vec![1; entries * FailoverEntry::LEN];
        let longest = FailoverLog::decode(&value(FailoverLog::MAX_ENTRIES)).unwrap();
        assert_eq!(longest.entries().len(), FailoverLog::MAX_ENTRIES);
        let more = FailoverLog::MAX_ENTRIES + 1;
        assert_eq!(FailoverLog::decode(&value(more)), Err(InvalidFailoverLog::TooLong(more)));
    }

    #[test]
    fn failover_log_pruned_at_a_branch_keeps_it() {
        let all = log(&[(3, 200), (2, 100), (1, 0)]);
        for (seqno, kept) in [(201, 3), (200, 3), (199, 2), (100, 2), (99, 1), (0, 1)] {
            let mut pruned = all.clone();
            pruned.prune(Seqno(seqno));
            assert_eq!(pruned.entries(), &all.entries()[3 - kept..], "seqno {seqno}");
        }
    }

    #[test]
    fn failover_log_pruned_below_every_branch_keeps_only_the_oldest() {
        let mut pruned = log(&[(3, 200), (2, 100)]);
        pruned.prune(Seqno(99));
        assert_eq!(pruned, log(&[(2, 100)]));
    }

    #[test]
    fn failover_log_pruned_keeps_the_oldest_branch() {
        let mut pruned = log(&[(3, 200), (2, 100)]);
        pruned.prune(Seqno(150));
        assert_eq!(pruned, log(&[(2, 100)]));
        pruned.prune(Seqno(50));
        assert_eq!(pruned, log(&[(2, 100)]));
    }
}
