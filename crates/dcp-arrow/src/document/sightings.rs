//! Which of the fields that an option names are in documents.

use super::MalformedTally;

/// Which of the fields that an option names were in documents, by their place in the option.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sightings {
    /// Documents that were read.
    pub documents: u64,
    are_seen: Vec<bool>,
}

impl Sightings {
    /// Notes that a document had a field.
    pub(super) fn see(&mut self, index: usize) {
        if self.are_seen.len() <= index {
            self.are_seen.resize(index + 1, false);
        }
        if let Some(is_seen) = self.are_seen.get_mut(index) {
            *is_seen = true;
        }
    }

    /// Whether a document had the field at `index`.
    #[must_use]
    pub fn has_seen(&self, index: usize) -> bool {
        self.are_seen.get(index).copied().unwrap_or_default()
    }

    /// Adds those of other documents.
    pub fn add(&mut self, others: &Self) {
        self.documents += others.documents;
        let seen = others.are_seen.iter().enumerate().filter(|(_, is_seen)| **is_seen);
        seen.for_each(|(index, _)| self.see(index));
    }
}

/// What the documents of batches were found to be.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct DocumentTally {
    /// Those that do not fit their columns.
    pub malformed: MalformedTally,
    /// The masked fields that were in them, by their place in
    /// [`FieldMasks::paths`](super::FieldMasks::paths).
    pub masked: Sightings,
    /// The fields of the schema that were in them, by their place in it.
    pub decoded: Sightings,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sightings_of_batches_add_up() {
        let (mut all, mut other) = (Sightings::default(), Sightings::default());
        (all.documents, other.documents) = (2, 3);
        all.see(0);
        other.see(2);
        all.add(&other);
        assert_eq!([0, 1, 2, 3].map(|index| all.has_seen(index)), [true, false, true, false]);
        assert_eq!(all.documents, 5);
    }
}
