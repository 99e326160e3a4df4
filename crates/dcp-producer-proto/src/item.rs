//! The items of a vBucket's history, shared with the storage that holds them.

use std::sync::Arc;

use bytes::Bytes;
use dcp_wire::message::{DurabilityLevel, SystemEventId};
use dcp_wire::{Cas, CollectionId, Datatype, RevSeqno, ScopeId, Seqno};

/// What an item of a vBucket's history is.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ItemKind {
    /// A document was written.
    Mutation,
    /// A document was removed.
    Deletion,
    /// A document expired.
    Expiration,
    /// A collection or scope changed; key and value of the item are those of the event.
    SystemEvent {
        /// What happened.
        id: SystemEventId,
        /// Form of the payload.
        version: u8,
        /// Scope concerned.
        scope_id: ScopeId,
    },
    /// A durable write began; key, value and metadata are those that the document will have.
    Prepare {
        /// Durability level of the write.
        level: DurabilityLevel,
        /// Whether it removes the document.
        is_deletion: bool,
    },
    /// A durable write succeeded; key, value and metadata are those of the document now. Only in
    /// memory: on disk, it is stored as the resulting mutation or deletion.
    Commit {
        /// Seqno of the prepare.
        prepared: Seqno,
        /// Whether it removed the document.
        is_deletion: bool,
    },
    /// A durable write was aborted.
    Abort {
        /// Seqno of the prepare.
        prepared: Seqno,
    },
}

impl ItemKind {
    /// Whether it is visible to clients that take no part in durable writes.
    #[must_use]
    pub const fn is_visible(&self) -> bool {
        !matches!(self, Self::Prepare { .. } | Self::Abort { .. })
    }
}

/// One item of a vBucket's history, shared by everything that refers to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// What it is.
    pub kind: ItemKind,
    /// Position in the vBucket.
    pub seqno: Seqno,
    /// Revision seqno of the document.
    pub rev_seqno: RevSeqno,
    /// Version of the document.
    pub cas: Cas,
    /// Collection of the document, or that the event is about.
    pub collection_id: CollectionId,
    /// Key without its collection id.
    pub key: Bytes,
    /// Value as stored; the datatype tells whether it begins with an xattr section and whether it
    /// is compressed.
    pub value: Bytes,
    /// Encoding of the value.
    pub datatype: Datatype,
    /// Flags set by the application.
    pub flags: u32,
    /// Seconds since 1970 at which the document expires; 0 never.
    pub expiry: u32,
    /// Seconds since 1970 at which the document was removed; 0 for a live one.
    pub delete_time: u32,
}

/// Slots for consecutive seqnos, each with its item unless a later one replaced it.
pub type Slots = Vec<Option<Arc<Item>>>;

/// Items of a checkpoint in seqno order, as runs of slots that are shared with the storage until it
/// changes them: reading counts references to runs, not to items.
#[derive(Clone, Debug, Default)]
pub struct CheckpointItems {
    runs: Vec<Arc<Slots>>,
    /// Slots to skip at the beginning of the first run.
    skip: usize,
}

impl CheckpointItems {
    /// The items in `runs`, without the first `skip` slots of the first run.
    #[must_use]
    pub const fn new(runs: Vec<Arc<Slots>>, skip: usize) -> Self {
        Self { runs, skip }
    }

    /// The items.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Arc<Item>> {
        let first = self.runs.first().and_then(|run| run.get(self.skip..)).unwrap_or_default();
        let others = self.runs.get(1..).unwrap_or_default();
        first.iter().chain(others.iter().flat_map(|run| run.iter())).flatten()
    }

    /// The last item; `None` without any.
    #[must_use]
    pub fn last(&self) -> Option<&Arc<Item>> {
        self.iter().next_back()
    }

    /// The runs, and how many slots of the first one to skip.
    pub(super) fn into_parts(self) -> (Vec<Arc<Slots>>, usize) {
        (self.runs, self.skip)
    }
}

impl FromIterator<Arc<Item>> for CheckpointItems {
    fn from_iter<I: IntoIterator<Item = Arc<Item>>>(items: I) -> Self {
        Self::new(vec![Arc::new(items.into_iter().map(Some).collect())], 0)
    }
}

impl PartialEq for CheckpointItems {
    fn eq(&self, other: &Self) -> bool {
        self.iter().eq(other.iter())
    }
}

impl Eq for CheckpointItems {}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(seqno: u64) -> Option<Arc<Item>> {
        Some(Arc::new(Item {
            kind: ItemKind::Mutation,
            seqno: Seqno(seqno),
            rev_seqno: RevSeqno(1),
            cas: Cas(seqno),
            collection_id: CollectionId::DEFAULT,
            key: Bytes::from_static(b"key"),
            value: Bytes::new(),
            datatype: Datatype::RAW,
            flags: 0,
            expiry: 0,
            delete_time: 0,
        }))
    }

    #[test]
    fn items_are_the_same_however_they_are_cut_into_runs() {
        let cut = |runs: Vec<Slots>, skip| {
            CheckpointItems::new(runs.into_iter().map(Arc::new).collect(), skip)
        };
        let items: CheckpointItems = [2, 4].into_iter().filter_map(slot).collect();
        assert_eq!(items, cut(vec![vec![slot(1), slot(2), None], vec![slot(4)]], 1));
        assert_ne!(items, cut(vec![vec![slot(1), slot(2), None], vec![slot(4)]], 0));
        assert_ne!(items, cut(vec![vec![slot(2)]], 0));
    }
}
