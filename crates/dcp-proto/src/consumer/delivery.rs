//! Which changes of a stream reach the sink, and when.

use dcp_wire::message::{SystemEvent, SystemEventId};
use dcp_wire::{CollectionId, ScopeId};

use crate::RowFilter;

/// Prefix of the keys under which clients keep the records of distributed transactions.
const TRANSACTION_PREFIX: &[u8] = b"_txn:";

/// Name of the scope in which servers and services keep their own documents.
const SYSTEM_SCOPE: &[u8] = b"_system";

/// Which changes of a connection's streams reach the sink, and when. By default all do, at once,
/// and a stream that has an end goes on to the end of the snapshot that holds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// Whether a stream stops at the end seqno itself, inside a snapshot where that is. The rest of
    /// the snapshot may hold newer versions of keys at or below the end, so that this is only for
    /// a reader that goes on from there.
    pub clamp: bool,
    /// Whether a change waits until every copy of its vBucket has it on disk, as told with
    /// [`Connection::persisted`](super::Connection::persisted). What waits counts towards the
    /// flow-control window.
    pub persisted_only: bool,
    /// Whether a stream with an end is complete only once the whole snapshot its last change lies
    /// in is on the disks of all copies. Of effect together with `persisted_only`.
    pub end_persisted: bool,
    /// What is left out.
    pub hidden: Hidden,
    /// Which changes of documents are not left out.
    pub rows: RowFilter,
}

/// Most collections of scope `_system` that are told apart. Servers and services make a handful, and
/// one that was dropped long ago sends no documents any more.
const MAX_HIDDEN: usize = 1024;

/// Documents that are left out: positions pass over them like over what a filter leaves out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hidden {
    transactions: bool,
    /// Set if collections of scope `_system` are left out, its id once that is known.
    system_scope: Option<Option<ScopeId>>,
    /// Collections of that scope, in the order they were learnt.
    collections: Vec<CollectionId>,
}

impl Hidden {
    /// Leaves out the records of distributed transactions.
    #[must_use]
    pub const fn with_transactions(mut self) -> Self {
        self.transactions = true;
        self
    }

    /// Leaves out what lies in scope `_system`: its id, if there is such a scope yet, and its
    /// collections. Those made later are learnt from system events.
    #[must_use]
    pub fn with_system_scope(
        mut self,
        scope: Option<ScopeId>,
        collections: impl IntoIterator<Item = CollectionId>,
    ) -> Self {
        self.system_scope = Some(scope);
        collections.into_iter().for_each(|id| _ = self.add(id));
        self
    }

    /// Leaves out a collection's documents; whether that is new. Beyond [`MAX_HIDDEN`] the one that
    /// was learnt first is shown again.
    fn add(&mut self, id: CollectionId) -> bool {
        if self.collections.contains(&id) {
            return false;
        }
        if self.collections.len() == MAX_HIDDEN {
            self.collections.remove(0);
        }
        self.collections.push(id);
        true
    }

    /// This, if any document may be left out.
    #[inline]
    pub(super) fn may_hide(&self) -> Option<&Self> {
        (self.transactions || !self.collections.is_empty()).then_some(self)
    }

    /// Whether a document is left out.
    #[inline]
    pub(super) fn hides(&self, collection_id: CollectionId, key: &[u8]) -> bool {
        (self.transactions && key.first() == Some(&b'_') && key.starts_with(TRANSACTION_PREFIX))
            || (collection_id != CollectionId::DEFAULT && self.collections.contains(&collection_id))
    }

    /// Whether documents of scope `_system` are left out.
    #[must_use]
    pub const fn leaves_out_system_scope(&self) -> bool {
        self.system_scope.is_some()
    }

    /// Leaves out what `other` does, too.
    pub fn merge(&mut self, other: &Self) {
        self.transactions |= other.transactions;
        self.system_scope = other.system_scope.or(self.system_scope);
        other.collections.iter().for_each(|&id| _ = self.add(id));
    }

    /// The part that was learned last.
    pub(super) fn learned_last(&self) -> Self {
        let collections = self.collections.last().copied().into_iter().collect();
        Self { transactions: false, system_scope: self.system_scope, collections }
    }

    /// Learns of scopes and collections that are made meanwhile; whether there was anything new.
    pub(super) fn learn(&mut self, event: &SystemEvent<'_>) -> bool {
        let Some(known_scope) = self.system_scope else { return false };
        // A damaged payload names nothing to leave out.
        let Ok(Some(payload)) = event.payload() else { return false };
        match (event.id, payload.collection_id) {
            (SystemEventId::CREATE_SCOPE, _)
                if payload.name == SYSTEM_SCOPE && known_scope != Some(payload.scope_id) =>
            {
                self.system_scope = Some(Some(payload.scope_id));
                true
            }
            (SystemEventId::BEGIN_COLLECTION, Some(id))
                if known_scope == Some(payload.scope_id) =>
            {
                self.add(id)
            }
            // A dropped collection stays: its documents may still come on other vBuckets, and its
            // id is not given again.
            _ => false,
        }
    }
}
