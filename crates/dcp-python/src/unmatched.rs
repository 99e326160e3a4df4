//! Fields that the options of streams name, and that no document has.

use std::sync::{Arc, Mutex, PoisonError};

use dcp_arrow::{DocumentTally, Sightings, TableSchema};

/// Target of the records about documents: Python's logger `dcp_rs.documents`.
pub(crate) const DOCUMENTS: &str = "dcp_documents";

/// Documents after which a field that none of them has is reported.
const ENOUGH: u64 = 1_000;

/// Maximum number of different options that a client remembers.
const MAX_WATCHES: usize = 16;

/// What the streams of a client have seen of the fields that their options name.
///
/// Streams with the same options share it: those of a replication follow one another.
#[derive(Clone, Debug, Default)]
pub(crate) struct Watches(Arc<Mutex<Vec<Arc<Watch>>>>);

impl Watches {
    /// The watch of the streams with this table.
    pub(crate) fn of(&self, table: &TableSchema) -> Arc<Watch> {
        let masked = Fields::new(table.masked_paths());
        let watch = Watch { masked, decoded: Fields::new(table.decoded_fields()) };
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(same) = known.iter().find(|known| known.names_as(&watch)) {
            return Arc::clone(same);
        }
        if known.len() >= MAX_WATCHES {
            known.remove(0);
        }
        let watch = Arc::new(watch);
        known.push(Arc::clone(&watch));
        watch
    }
}

/// What was seen of the fields that options name. Those that no document has are reported, once.
#[derive(Debug)]
pub(crate) struct Watch {
    masked: Fields,
    decoded: Fields,
}

impl Watch {
    fn names_as(&self, other: &Self) -> bool {
        self.masked.names == other.masked.names && self.decoded.names == other.decoded.names
    }

    /// Adds the documents of a batch.
    pub(crate) fn add(&self, batch: &DocumentTally) {
        report_masks(self.masked.add(&batch.masked));
        report_columns(self.decoded.add(&batch.decoded));
    }

    /// Takes note that a stream has delivered all documents that there were.
    pub(crate) fn read_all(&self) {
        report_masks(self.masked.decide());
        report_columns(self.decoded.decide());
    }
}

/// Fields in none of a number of documents.
type Unseen<'a> = (Vec<&'a str>, u64);

fn report_masks((paths, documents): Unseen<'_>) {
    for path in paths {
        tracing::warn!(
            name: "mask_unmatched",
            target: DOCUMENTS,
            path, documents,
            "no document has a field that is to be masked: is its path spelt as in the documents? \
             Paths are case-sensitive"
        );
    }
}

fn report_columns((columns, documents): Unseen<'_>) {
    for column in columns {
        tracing::warn!(
            name: "column_unmatched",
            target: DOCUMENTS,
            column, documents,
            "no document has the field of a column, which is null in every row: is it spelt as in \
             the documents? Names are case-sensitive"
        );
    }
}

/// The fields that an option names.
#[derive(Debug)]
struct Fields {
    /// With their places.
    names: Vec<(usize, String)>,
    /// What was seen of them; `None` after it was decided whether they are reported.
    seen: Mutex<Option<Sightings>>,
}

impl Fields {
    fn new<'a>(names: impl Iterator<Item = (usize, &'a str)>) -> Self {
        let names: Vec<_> = names.map(|(index, name)| (index, name.to_owned())).collect();
        let seen = (!names.is_empty()).then(Sightings::default);
        Self { names, seen: Mutex::new(seen) }
    }

    /// Adds the documents of a batch; returns what is to be reported.
    fn add(&self, batch: &Sightings) -> Unseen<'_> {
        let has_enough = {
            let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.as_mut().is_some_and(|seen| {
                seen.add(batch);
                seen.documents >= ENOUGH
            })
        };
        if has_enough { self.decide() } else { Unseen::default() }
    }

    /// Decides, if there were documents; returns what is to be reported.
    fn decide(&self) -> Unseen<'_> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(seen) = seen.take_if(|seen| seen.documents > 0) else { return Unseen::default() };
        let unseen = self.names.iter().filter(|(index, _)| !seen.has_seen(*index));
        (unseen.map(|(_, name)| name.as_str()).collect(), seen.documents)
    }
}
