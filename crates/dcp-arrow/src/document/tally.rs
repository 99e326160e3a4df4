//! Counts of the documents that do not fit their columns.

use std::collections::HashMap;

use dcp_wire::{Seqno, Vbid};

use super::malformed_fields::MalformedFields;

/// Counts documents that do not fit their columns, and notes the first of each kind.
///
/// A kind is a field and a reason; neither contains a part of a document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MalformedTally {
    /// Documents that are malformed as a whole, so that all their columns are null.
    pub whole: u64,
    /// Documents of which only some values do not fit, so that only these are null.
    pub partial: u64,
    kinds: HashMap<(String, String), (Vbid, Seqno)>,
}

/// A kind of values that do not fit, and the first document with one.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MalformedKind {
    /// Path of the field, such as `items[].price`; empty for a document.
    pub field: String,
    /// What was expected.
    pub reason: String,
    /// vBucket of the first document.
    pub vbid: Vbid,
    /// Seqno of the first document.
    pub seqno: Seqno,
}

impl MalformedTally {
    /// Maximum number of kinds that are told apart. The rest is counted.
    pub const MAX_KINDS: usize = 64;

    /// Whether kinds that are new from now on are only counted.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.kinds.len() >= Self::MAX_KINDS
    }

    /// Adds a document with these notes.
    #[cold]
    pub(super) fn note(&mut self, notes: &MalformedFields, place: (Vbid, Seqno)) {
        for note in notes.iter() {
            if self.is_full() {
                break;
            }
            self.kinds.entry((note.field.clone(), note.reason.to_string())).or_insert(place);
        }
    }

    /// Adds what a later batch had, and returns the kinds that are new.
    #[must_use]
    pub fn add(&mut self, batch: Self) -> Vec<MalformedKind> {
        self.whole += batch.whole;
        self.partial += batch.partial;
        let mut new = Vec::new();
        for (kind, (vbid, seqno)) in batch.kinds {
            if self.is_full() || self.kinds.contains_key(&kind) {
                continue;
            }
            self.kinds.insert(kind.clone(), (vbid, seqno));
            let (field, reason) = kind;
            new.push(MalformedKind { field, reason, vbid, seqno });
        }
        new.sort_by(|a, b| (&a.field, &a.reason).cmp(&(&b.field, &b.reason)));
        new
    }
}

#[cfg(test)]
mod tests {
    use super::super::malformed::Problem;
    use super::super::malformed_fields::Step;
    use super::*;

    #[test]
    fn malformed_kinds_are_new_once_and_bounded_in_number() {
        let batch = |fields: std::ops::Range<usize>, seqno| {
            let mut tally = MalformedTally { partial: 1, ..MalformedTally::default() };
            for field in fields {
                let mut notes = MalformedFields::default();
                let steps = [Step::Field(&format!("f{field:03}")), Step::Element(field)];
                notes.push(&steps, Problem::Duplicate, b"1");
                tally.note(&notes, (Vbid(1), Seqno(seqno)));
            }
            tally
        };
        let mut all = MalformedTally::default();
        let new = all.add(batch(0..2, 10));
        let fields: Vec<_> = new.iter().map(|kind| (kind.field.as_str(), kind.seqno.0)).collect();
        assert_eq!(fields, [("f000[]", 10), ("f001[]", 10)]);
        assert_eq!(new[0].reason, "duplicate key");
        assert_eq!(all.add(batch(1..3, 11)).len(), 1);
        assert!(!all.is_full());
        assert_eq!(all.add(batch(0..60, 12)).len(), 57);
        assert_eq!(all.add(batch(60..200, 13)).len(), MalformedTally::MAX_KINDS - 60);
        assert!(all.is_full());
        assert_eq!(all.add(batch(300..301, 14)), []);
        assert_eq!((all.whole, all.partial), (0, 5));
    }
}
