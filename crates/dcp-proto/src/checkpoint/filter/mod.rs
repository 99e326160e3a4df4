//! The filter that positions were made with.

#[cfg(test)]
mod tests;

use core::fmt;

use dcp_wire::{CollectionId, ScopeId};
use thiserror::Error;

use crate::consumer::StreamFilter;
use crate::topology::Manifest;
use crate::{CollectionPatterns, RowFilter};

/// Scope in which servers and services keep their own documents.
const SYSTEM_SCOPE: &str = "_system";

/// Most collections that an error names.
const MOST_NAMED: usize = 8;

/// The filter that positions were made with, by ids. Checkpoints and offsets store it.
///
/// A position is valid for its filter and for any narrower one: everything that a narrower stream
/// would send below the position has been sent. It is not valid for a wider one, since the changes
/// that the filter left out lie below the position and would never be sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoredFilter {
    /// Collections ascending, each once.
    documents: StreamFilter,
    system_documents: bool,
    /// Which of their collections are chosen.
    patterns: CollectionPatterns,
    rows: RowFilter,
}

impl StoredFilter {
    /// The filter of a stream that requests `documents`. With `system_documents`, it also delivers
    /// transaction records, and scope `_system` even if that is not named.
    #[must_use]
    pub fn new(documents: StreamFilter, system_documents: bool) -> Self {
        let documents = match documents {
            StreamFilter::Collections(mut ids) => {
                ids.sort_unstable();
                ids.dedup();
                StreamFilter::Collections(ids)
            }
            other => other,
        };
        let (patterns, rows) = (CollectionPatterns::default(), RowFilter::default());
        Self { documents, system_documents, patterns, rows }
    }

    /// Chooses collections of the requested scope or bucket.
    #[must_use]
    pub fn with_patterns(mut self, patterns: CollectionPatterns) -> Self {
        self.patterns = patterns;
        self
    }

    /// Also filters the changes of documents.
    #[must_use]
    pub fn with_rows(mut self, rows: RowFilter) -> Self {
        self.rows = rows;
        self
    }

    /// What is requested from the server.
    #[must_use]
    pub const fn documents(&self) -> &StreamFilter {
        &self.documents
    }

    /// Whether transaction records are delivered, and scope `_system` even if it is not named.
    #[must_use]
    pub const fn system_documents(&self) -> bool {
        self.system_documents
    }

    /// Which collections of those documents are delivered.
    #[must_use]
    pub const fn patterns(&self) -> &CollectionPatterns {
        &self.patterns
    }

    /// Whether the server sends more than is delivered, apart from system documents.
    pub(crate) const fn leaves_out(&self) -> bool {
        !(self.patterns.is_all() && self.rows.is_all())
    }

    /// Which changes of those documents are delivered.
    #[must_use]
    pub const fn rows(&self) -> &RowFilter {
        &self.rows
    }

    /// Checks that this filter contains `asked`, so that positions made with this filter are valid
    /// for a stream of `asked`. The manifest lists the collections of each scope.
    ///
    /// # Errors
    /// [`FilterMismatch`], which names what the stream asks for in addition.
    pub fn check(&self, asked: &Self, manifest: &Manifest) -> Result<(), FilterMismatch> {
        let mut beyond = Vec::new();
        if let Some(documents) = self.documents_beyond(asked, manifest) {
            beyond.push(describe(&documents, Some(manifest)));
        } else if !self.patterns_contain(asked, manifest) {
            beyond.push(asked.describe_documents(Some(manifest)));
        }
        if asked.system_documents && !self.system_documents {
            beyond.push("system documents".to_owned());
        }
        beyond.extend(self.rows.beyond(&asked.rows));
        if beyond.is_empty() {
            return Ok(());
        }
        Err(FilterMismatch::Beyond {
            stored: self.describe(Some(manifest)),
            beyond: beyond.join(" and "),
            dropped: self.names_dropped(manifest),
        })
    }

    /// What `asked` contains and this filter does not.
    fn documents_beyond(&self, asked: &Self, manifest: &Manifest) -> Option<StreamFilter> {
        use StreamFilter::{All, Collections, Scope};

        let scope_of = |id: CollectionId| Some(manifest.collection(id)?.scope_id);
        let system = manifest.scope_named(SYSTEM_SCOPE).map(|scope| scope.id);
        let holds_scope = |id: ScopeId| match &self.documents {
            All => self.system_documents || (manifest.scope(id).is_some() && Some(id) != system),
            Scope(own) => *own == id,
            Collections(_) => false,
        };
        let holds = |id: &CollectionId| match &self.documents {
            Collections(own) => own.binary_search(id).is_ok(),
            All if self.system_documents => true,
            All | Scope(_) => scope_of(*id).is_some_and(holds_scope),
        };
        match &asked.documents {
            All => (self.documents != All).then_some(All),
            Scope(id) => (!holds_scope(*id)).then_some(Scope(*id)),
            Collections(ids) => {
                let beyond: Vec<_> = ids.iter().copied().filter(|id| !holds(id)).collect();
                (!beyond.is_empty()).then_some(Collections(beyond))
            }
        }
    }

    /// Whether the collections that the patterns choose include those chosen by `asked`, for a
    /// request to the server that is no wider.
    fn patterns_contain(&self, asked: &Self, manifest: &Manifest) -> bool {
        let own = &self.patterns;
        let chooses = |id: &CollectionId| {
            manifest.names(*id).is_some_and(|(scope, collection)| own.choose(scope, collection))
        };
        match (own.is_all(), asked.patterns.is_all()) {
            (true, true) => true,
            // Without system documents, the whole bucket does not contain a filter that names them.
            (true, false) => {
                self.documents != StreamFilter::All
                    || self.system_documents
                    || !asked.patterns.name_system_scope()
            }
            (false, false) => own.contain(&asked.patterns),
            (false, true) => match &asked.documents {
                StreamFilter::All => false,
                StreamFilter::Scope(id) => {
                    manifest.scope(*id).is_some_and(|scope| own.choose_all_of(&scope.name))
                }
                StreamFilter::Collections(ids) => ids.iter().all(chooses),
            },
        }
    }

    /// Whether the filter names something that is no longer in the bucket.
    fn names_dropped(&self, manifest: &Manifest) -> bool {
        match &self.documents {
            StreamFilter::All => false,
            StreamFilter::Scope(id) => manifest.scope(*id).is_none(),
            StreamFilter::Collections(ids) => {
                ids.iter().any(|id| manifest.collection(*id).is_none())
            }
        }
    }

    fn describe(&self, manifest: Option<&Manifest>) -> String {
        let system = if self.system_documents { "with" } else { "without" };
        let documents = self.describe_documents(manifest);
        format!("{documents} {system} system documents{}", self.rows)
    }

    fn describe_documents(&self, manifest: Option<&Manifest>) -> String {
        if self.patterns.is_all() {
            return describe(&self.documents, manifest);
        }
        format!("collections {}", some_of(self.patterns.names().into_iter()))
    }

    /// The hash that earlier releases stored in place of the filter: FNV-1a of its parts.
    pub(super) fn legacy_hash(&self) -> u64 {
        let hash = |kind: &str, ids: &[String]| {
            const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
            const PRIME: u64 = 0x100_0000_01b3;
            let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(PRIME);
            let parts = [kind].into_iter().chain(ids.iter().map(String::as_str));
            // 0xff does not occur in UTF-8, so it terminates a part unambiguously.
            parts.fold(OFFSET, |hash, part| step(part.bytes().fold(hash, step), 0xff))
        };
        match &self.documents {
            StreamFilter::All => hash("all", &[]),
            StreamFilter::Scope(id) => hash("scope", &[id.to_string()]),
            StreamFilter::Collections(ids) => {
                hash("collections", &ids.iter().map(ToString::to_string).collect::<Vec<_>>())
            }
        }
    }
}

/// With ids in place of names.
impl fmt::Display for StoredFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.describe(None))
    }
}

/// How a stream's filter goes beyond the stored one.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum FilterMismatch {
    /// The stream asks for more.
    #[error(
        "made with {stored}; the stream also asks for {beyond}, whose earlier changes it would \
         miss{}",
        if *dropped { " (a collection or scope that is created again has a new id)" } else { "" }
    )]
    Beyond {
        /// The stored filter, with the names of what is still in the bucket.
        stored: String,
        /// What the stream asks for in addition.
        beyond: String,
        /// Whether something that the stored filter names was dropped.
        dropped: bool,
    },
    /// An earlier release stored only a hash, which differs.
    #[error(
        "made with another filter (an earlier release stored only its hash), or with scopes or \
         collections that were since dropped and created again"
    )]
    Hash,
}

fn describe(documents: &StreamFilter, manifest: Option<&Manifest>) -> String {
    match documents {
        StreamFilter::All => "the whole bucket".to_owned(),
        StreamFilter::Scope(id) => match manifest.map(|manifest| manifest.scope(*id)) {
            Some(Some(scope)) => format!("scope {} (0x{id})", scope.name),
            Some(None) => format!("scope 0x{id} (dropped)"),
            None => format!("scope 0x{id}"),
        },
        StreamFilter::Collections(ids) => {
            let name = |id: &CollectionId| match manifest.map(|manifest| manifest.names(*id)) {
                Some(Some((scope, name))) => format!("{scope}.{name} (0x{id})"),
                Some(None) => format!("0x{id} (dropped)"),
                None => format!("0x{id}"),
            };
            let kind = if ids.len() == 1 { "collection" } else { "collections" };
            format!("{kind} {}", some_of(ids.iter().map(name)))
        }
    }
}

/// The first of them, and how many more there are.
fn some_of(all: impl ExactSizeIterator<Item = String>) -> String {
    let more = all.len().saturating_sub(MOST_NAMED);
    let mut named: Vec<_> = all.take(MOST_NAMED).collect();
    if more > 0 {
        named.push(format!("{more} more"));
    }
    named.join(", ")
}
