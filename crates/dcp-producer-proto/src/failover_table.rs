//! The failover log on the producer's side.

use bytes::BufMut;
use dcp_wire::message::{FailoverEntries, FailoverEntry, encode_failover_log};
use dcp_wire::{DecodeError, Seqno, Vbuuid};
use thiserror::Error;

/// A table cannot be pruned to 0: a vBucket rolled back that far starts over with a new table.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("a failover table cannot be pruned to 0: give the vBucket a new table")]
pub struct PrunedToZero;

/// The history branches of a vBucket, newest first (DCP page "failover-log").
///
/// A branch `vbuuid` begins at its entry's seqno and is the vBucket's history until the entry
/// before it in the table begins. Seqnos never rise from newer to older entries, and there is
/// always at least one entry. The caller chooses branch ids; they must not be 0, which means "no
/// branch" on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailoverTable {
    entries: Vec<FailoverEntry>,
}

impl FailoverTable {
    /// How many branches a table keeps; beyond that, the oldest is dropped.
    pub const CAPACITY: usize = 25;

    /// The table of a new vBucket: one branch that begins at 0.
    #[must_use]
    pub fn new(vbuuid: Vbuuid) -> Self {
        Self::starting_at(vbuuid, Seqno::ZERO)
    }

    fn starting_at(vbuuid: Vbuuid, seqno: Seqno) -> Self {
        debug_assert_ne!(vbuuid, Vbuuid(0), "0 names no branch");
        Self { entries: vec![FailoverEntry { vbuuid, seqno }] }
    }

    /// A table from stored entries, newest first, and how many of them had to be dropped.
    ///
    /// Entries without an id, and entries that begin after the previous kept one, cannot come from
    /// a correct producer. If nothing remains the table is a new branch `fallback` that begins at
    /// `high_seqno`.
    #[must_use]
    pub fn load(
        entries: impl IntoIterator<Item = FailoverEntry>,
        fallback: Vbuuid,
        high_seqno: Seqno,
    ) -> (Self, usize) {
        let mut kept: Vec<FailoverEntry> = Vec::new();
        let mut dropped: usize = 0;
        for entry in entries {
            let rises = kept.last().is_some_and(|newer| entry.seqno > newer.seqno);
            if entry.vbuuid == Vbuuid(0) || rises {
                dropped += 1;
            } else {
                kept.push(entry);
            }
        }
        if kept.is_empty() {
            return (Self::starting_at(fallback, high_seqno), dropped);
        }
        kept.truncate(Self::CAPACITY);
        (Self { entries: kept }, dropped)
    }

    /// The entries, newest first.
    #[must_use]
    pub fn entries(&self) -> &[FailoverEntry] {
        &self.entries
    }

    /// The branch that is being written.
    #[must_use]
    pub fn newest(&self) -> FailoverEntry {
        self.entries[0]
    }

    /// Begins a new branch at `seqno`, as on a promotion or after an unclean shutdown.
    ///
    /// Branches that begin after `seqno` are removed; one that begins exactly there stays.
    pub fn create_entry(&mut self, vbuuid: Vbuuid, seqno: Seqno) {
        debug_assert_ne!(vbuuid, Vbuuid(0), "0 names no branch");
        self.entries.retain(|entry| entry.seqno <= seqno);
        self.entries.insert(0, FailoverEntry { vbuuid, seqno });
        self.entries.truncate(Self::CAPACITY);
    }

    /// Removes the branches that begin after `seqno`, to which the data was rolled back. If nothing
    /// remains, `fallback` begins there.
    ///
    /// # Errors
    /// [`PrunedToZero`] for seqno 0.
    pub fn prune(&mut self, seqno: Seqno, fallback: Vbuuid) -> Result<(), PrunedToZero> {
        if seqno == Seqno::ZERO {
            return Err(PrunedToZero);
        }
        self.entries.retain(|entry| entry.seqno <= seqno);
        if self.entries.is_empty() {
            *self = Self::starting_at(fallback, seqno);
        }
        Ok(())
    }

    /// Replaces the table by the log in the value of a successful stream request, as a replica
    /// does.
    ///
    /// # Errors
    /// [`DecodeError::InvalidLength`] unless the value is a non-empty list of entries; the table
    /// stays as it was.
    pub fn replace(&mut self, received: &[u8]) -> Result<(), DecodeError> {
        self.entries = FailoverEntries::decode(received)?.take(Self::CAPACITY).collect();
        Ok(())
    }

    /// Up to where the data of branch `vbuuid` is still part of this history: where the next
    /// newer branch begins, or `high_seqno` for the newest. `None` for an unknown branch.
    #[must_use]
    pub fn upper_bound(&self, vbuuid: Vbuuid, high_seqno: Seqno) -> Option<Seqno> {
        let mut upper = high_seqno;
        for entry in &self.entries {
            if entry.vbuuid == vbuuid {
                return Some(upper);
            }
            upper = entry.seqno;
        }
        None
    }

    /// Appends the table as the value of a response.
    pub fn encode(&self, out: &mut impl BufMut) {
        encode_failover_log(self.entries.iter().copied(), out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FRESH: Vbuuid = Vbuuid(0xf4e5);

    fn entries(list: &[(u64, u64)]) -> Vec<FailoverEntry> {
        list.iter()
            .map(|&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) })
            .collect()
    }

    fn table(list: &[(u64, u64)]) -> FailoverTable {
        let (table, dropped) = FailoverTable::load(entries(list), FRESH, Seqno::ZERO);
        assert_eq!(dropped, 0, "the fixture is a sound table");
        table
    }

    fn seqnos(table: &FailoverTable) -> Vec<u64> {
        table.entries().iter().map(|entry| entry.seqno.0).collect()
    }

    #[test]
    fn ft_01_a_new_table_has_one_branch_from_0() {
        assert_eq!(FailoverTable::new(Vbuuid(7)).entries(), entries(&[(7, 0)]));
    }

    #[test]
    fn ft_02_every_created_entry_is_kept_even_at_the_same_seqno() {
        let mut table = FailoverTable::new(Vbuuid(1));
        for (n, seqno) in [0, 150, 300, 450, 600].into_iter().enumerate() {
            table.create_entry(Vbuuid(n as u64 + 2), Seqno(seqno));
        }
        assert_eq!(seqnos(&table), [600, 450, 300, 150, 0, 0]);
        assert_eq!(table.newest().vbuuid, Vbuuid(6));
    }

    #[test]
    fn ft_03_the_oldest_branches_fall_out_of_a_full_table() {
        let mut table = FailoverTable::new(Vbuuid(1));
        for n in 0..30 {
            table.create_entry(Vbuuid(n + 2), Seqno(150 * n));
        }
        assert_eq!(table.entries().len(), FailoverTable::CAPACITY);
        assert_eq!(seqnos(&table)[0], 4350);
        assert_eq!(seqnos(&table)[24], 750, "0, 150, ... 600 and the first branch are gone");
    }

    #[test]
    fn ft_07_entries_no_producer_can_have_written_are_dropped_and_counted() {
        let stored = entries(&[(0, 0), (0xa, 100), (0xb, 200), (0xc, 300), (0, 50), (0xd, 0)]);
        let (table, dropped) = FailoverTable::load(stored, FRESH, Seqno(400));
        assert_eq!(table.entries(), entries(&[(0xa, 100), (0xd, 0)]));
        assert_eq!(dropped, 4);
    }

    #[test]
    fn failover_table_loaded_from_nothing_begins_a_branch_at_the_high_seqno() {
        let (table, dropped) = FailoverTable::load(entries(&[(0, 9)]), FRESH, Seqno(400));
        assert_eq!((table.newest().vbuuid, table.newest().seqno), (FRESH, Seqno(400)));
        assert_eq!(dropped, 1);
    }

    #[test]
    fn failover_table_pruned_keeps_branches_begun_at_or_below_the_seqno() {
        let mut table = table(&[(3, 900), (2, 500), (1, 0)]);
        table.prune(Seqno(500), FRESH).unwrap();
        assert_eq!(table.entries(), entries(&[(2, 500), (1, 0)]));
    }

    #[test]
    fn ft_11_pruning_below_every_branch_begins_a_new_one() {
        let mut table = table(&[(0xe, 900), (0xd, 500)]);
        table.prune(Seqno(400), FRESH).unwrap();
        assert_eq!(table.entries(), entries(&[(FRESH.0, 400)]));
    }

    #[test]
    fn ft_12_pruning_to_0_is_refused_and_changes_nothing() {
        let mut table = table(&[(2, 900), (1, 0)]);
        let before = table.clone();
        assert_eq!(table.prune(Seqno::ZERO, FRESH), Err(PrunedToZero));
        assert_eq!(table, before);
    }

    #[test]
    fn branch_begun_below_the_high_seqno_drops_newer_branches() {
        let mut table = table(&[(3, 950), (2, 500), (1, 0)]);
        table.create_entry(Vbuuid(4), Seqno(900));
        assert_eq!(table.entries(), entries(&[(4, 900), (2, 500), (1, 0)]));
    }

    #[test]
    fn branch_that_is_new_becomes_the_newest() {
        let mut table = table(&[(1, 0)]);
        table.create_entry(Vbuuid(2), Seqno(50));
        assert_eq!(table.entries(), entries(&[(2, 50), (1, 0)]));
    }

    #[test]
    fn ft_19_the_encoded_table_is_what_a_replica_takes_over() {
        let table = table(&[(3, 200), (2, 100), (1, 0)]);
        let mut value = Vec::new();
        table.encode(&mut value);
        assert_eq!(value.len(), 48);
        let mut replica = FailoverTable::new(FRESH);
        replica.replace(&value).unwrap();
        assert_eq!(replica, table);
        assert!(replica.replace(&value[..20]).is_err());
        assert!(replica.replace(&[]).is_err());
        assert_eq!(replica, table, "a malformed log changes nothing");
    }

    #[test]
    fn branch_reaches_to_where_the_next_newer_one_begins() {
        let table = table(&[(3, 60), (2, 30), (1, 0)]);
        let upper = |vbuuid| table.upper_bound(Vbuuid(vbuuid), Seqno(100));
        assert_eq!(upper(3), Some(Seqno(100)));
        assert_eq!(upper(2), Some(Seqno(60)));
        assert_eq!(upper(1), Some(Seqno(30)));
        assert_eq!(upper(9), None);
        assert_eq!(upper(0), None);
    }
}
