//! The newest version of everything in a vBucket, by identity.

use std::hash::BuildHasher;
use std::sync::Arc;

use dcp_producer_proto::{Item, ItemKind};
use dcp_wire::message::SystemEventId;
use dcp_wire::{CollectionId, ScopeId, Seqno};
use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};

/// Identity that versions of the same thing share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Identity<'a> {
    Document(CollectionId, &'a [u8]),
    /// The durable write of a document, prepared or aborted.
    Prepared(CollectionId, &'a [u8]),
    Collection(CollectionId),
    /// The modification of a collection, which does not replace its creation.
    Modification(CollectionId),
    Scope(ScopeId),
}

impl<'a> Identity<'a> {
    pub(crate) fn of(item: &'a Item) -> Self {
        match item.kind {
            ItemKind::SystemEvent { id, scope_id, .. } => match id {
                SystemEventId::CREATE_SCOPE | SystemEventId::DROP_SCOPE => Self::Scope(scope_id),
                SystemEventId::MODIFY_COLLECTION => Self::Modification(item.collection_id),
                _ => Self::Collection(item.collection_id),
            },
            ItemKind::Prepare { .. } | ItemKind::Abort { .. } => {
                Self::Prepared(item.collection_id, &item.key)
            }
            _ => Self::Document(item.collection_id, &item.key),
        }
    }
}

/// A version, and the persisted one.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    /// Newest version.
    pub(crate) newest: Arc<Item>,
    /// Seqno of the version in the disk image; 0 if there is none.
    pub(crate) persisted: Seqno,
}

/// Newest version by identity, including tombstones and system events.
#[derive(Debug, Default)]
pub(crate) struct ItemTable {
    slots: HashTable<Slot>,
    hasher: DefaultHashBuilder,
}

impl ItemTable {
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn find(&self, identity: Identity<'_>) -> Option<&Slot> {
        let hash = self.hasher.hash_one(identity);
        self.slots.find(hash, |slot| Identity::of(&slot.newest) == identity)
    }

    pub(crate) fn find_mut(&mut self, identity: Identity<'_>) -> Option<&mut Slot> {
        let hash = self.hasher.hash_one(identity);
        self.slots.find_mut(hash, |slot| Identity::of(&slot.newest) == identity)
    }

    /// Makes `item` the newest version; returns the previous one.
    pub(crate) fn replace(&mut self, item: Arc<Item>) -> Option<Arc<Item>> {
        let hash = self.hasher.hash_one(Identity::of(&item));
        let entry = self.slots.entry(
            hash,
            |slot| Identity::of(&slot.newest) == Identity::of(&item),
            |slot| self.hasher.hash_one(Identity::of(&slot.newest)),
        );
        match entry {
            Entry::Occupied(mut slot) => Some(std::mem::replace(&mut slot.get_mut().newest, item)),
            Entry::Vacant(slot) => {
                slot.insert(Slot { newest: item, persisted: Seqno::ZERO });
                None
            }
        }
    }

    pub(crate) fn retain(&mut self, mut keep: impl FnMut(&mut Slot) -> bool) {
        self.slots.retain(|slot| keep(slot));
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Slot> + Clone {
        self.slots.iter()
    }
}
