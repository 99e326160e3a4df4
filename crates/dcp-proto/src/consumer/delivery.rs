//! Which changes of a stream reach the sink, and when.

use std::collections::{BTreeMap, BTreeSet};

use dcp_wire::message::{SystemEvent, SystemEventId, SystemEventPayload};
use dcp_wire::{CollectionId, ScopeId};

use crate::topology::Manifest;
use crate::{CollectionPatterns, RowFilter};

/// Prefix of the keys of transaction records, which clients write for distributed transactions.
const TRANSACTION_PREFIX: &[u8] = b"_txn:";

/// Name of the scope in which servers and services keep their own documents.
const SYSTEM_SCOPE: &[u8] = b"_system";

/// Which changes of a connection's streams reach the sink, and when. By default all do,
/// immediately, and a stream with an end continues to the end of the snapshot that holds it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delivery {
    /// Whether a stream stops exactly at the end seqno, even inside a snapshot. The rest of the
    /// snapshot may hold newer versions of keys at or below the end, so this is only for readers
    /// that continue from there.
    pub clamp: bool,
    /// Whether a change waits until every copy of its vBucket has persisted it, as reported to
    /// [`Connection::persisted`](super::Connection::persisted). Waiting changes count towards the
    /// flow-control window.
    pub persisted_only: bool,
    /// Whether a stream with an end is complete only once the whole snapshot of its last change is
    /// persisted on all copies. Needs `persisted_only`.
    pub end_persisted: bool,
    /// Documents that are left out.
    pub hidden: Hidden,
    /// Which changes of documents are not left out.
    pub rows: RowFilter,
}

/// Most collections of scope `_system` that are remembered. Servers and services create a handful,
/// and no documents arrive for those dropped long ago.
const MAX_HIDDEN: usize = 1024;

/// Most collections and scopes that are matched against patterns. A cluster has at most 1,200, and
/// ids ascend: beyond that the oldest one is forgotten, which was dropped long ago.
const MAX_KNOWN: usize = 8192;

/// Documents that are left out: positions move past them as past anything a filter leaves out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hidden {
    transactions: bool,
    /// Set if collections of scope `_system` are left out, its id once that is known.
    system_scope: Option<Option<ScopeId>>,
    /// Collections of that scope, in the order in which they were learned.
    collections: Vec<CollectionId>,
    /// What patterns choose of the rest, if there are any.
    chosen: Option<Chosen>,
}

/// What patterns of collections are known to match.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Chosen {
    patterns: CollectionPatterns,
    collections: BTreeSet<CollectionId>,
    /// Names of scopes, to match collections that are created later.
    scopes: BTreeMap<ScopeId, Box<str>>,
}

impl Chosen {
    /// Matches a collection; returns whether it is new and chosen.
    fn meet(&mut self, id: CollectionId, scope: &str, name: &str) -> bool {
        if !self.patterns.choose(scope, name) {
            return false;
        }
        if self.collections.len() == MAX_KNOWN {
            self.collections.pop_first();
        }
        self.collections.insert(id)
    }

    /// Notes a scope's name; returns whether it is new.
    fn meet_scope(&mut self, id: ScopeId, name: &str) -> bool {
        if !self.patterns.may_choose_in(name) || self.scopes.contains_key(&id) {
            return false;
        }
        if self.scopes.len() == MAX_KNOWN {
            self.scopes.pop_first();
        }
        self.scopes.insert(id, name.into());
        true
    }

    /// Learns of new scopes and collections; returns whether there was anything new.
    fn learn(&mut self, id: SystemEventId, payload: &SystemEventPayload<'_>) -> bool {
        let Ok(name) = core::str::from_utf8(payload.name) else { return false };
        match (id, payload.collection_id) {
            (SystemEventId::CREATE_SCOPE, _) => self.meet_scope(payload.scope_id, name),
            (SystemEventId::BEGIN_COLLECTION, Some(id)) => {
                let Some(scope) = self.scopes.get(&payload.scope_id).cloned() else { return false };
                self.meet(id, &scope, name)
            }
            _ => false,
        }
    }

    /// Whether an event is about something that is chosen. Drops are always delivered: the
    /// collection may have been delivered by a stream that named it.
    fn takes_event(&self, id: SystemEventId, payload: &SystemEventPayload<'_>) -> bool {
        match (id, payload.collection_id) {
            (SystemEventId::CREATE_SCOPE, _) => self.scopes.contains_key(&payload.scope_id),
            (SystemEventId::BEGIN_COLLECTION | SystemEventId::MODIFY_COLLECTION, Some(id)) => {
                self.collections.contains(&id)
            }
            _ => true,
        }
    }

    fn merge(&mut self, other: &Self) {
        for &id in &other.collections {
            if self.collections.len() == MAX_KNOWN {
                self.collections.pop_first();
            }
            self.collections.insert(id);
        }
        other.scopes.iter().for_each(|(&id, name)| _ = self.meet_scope(id, name));
    }
}

impl Hidden {
    /// Leaves out the records of distributed transactions.
    #[must_use]
    pub const fn with_transactions(mut self) -> Self {
        self.transactions = true;
        self
    }

    /// Leaves out documents in scope `_system`: its id, if there is such a scope yet, and its
    /// collections. Those created later are learned from system events.
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

    /// Leaves out what the patterns do not choose. They match collections in the manifest, and
    /// those created later, which are learned from system events.
    #[must_use]
    pub fn with_patterns(mut self, patterns: &CollectionPatterns, manifest: &Manifest) -> Self {
        if patterns.is_all() {
            return self;
        }
        let (patterns, collections, scopes) = (patterns.clone(), BTreeSet::new(), BTreeMap::new());
        self.chosen = Some(Chosen { patterns, collections, scopes });
        self.learn_manifest(manifest);
        self
    }

    /// Learns what patterns choose of a newer manifest.
    pub fn learn_manifest(&mut self, manifest: &Manifest) {
        let Some(chosen) = &mut self.chosen else { return };
        for scope in manifest.scopes() {
            chosen.meet_scope(scope.id, &scope.name);
        }
        for entry in manifest.collections() {
            if let Some((scope, name)) = manifest.names(entry.id) {
                chosen.meet(entry.id, scope, name);
            }
        }
    }

    /// Leaves out a collection's documents; returns whether that is new. Beyond [`MAX_HIDDEN`], the
    /// one that was learned first is no longer left out.
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

    /// `self`, if system documents may be left out.
    #[inline]
    pub(super) fn may_hide(&self) -> Option<&Self> {
        (self.transactions || !self.collections.is_empty()).then_some(self)
    }

    /// The collections that patterns choose, if there are any patterns.
    #[inline]
    pub(super) fn chosen(&self) -> Option<&BTreeSet<CollectionId>> {
        self.chosen.as_ref().map(|chosen| &chosen.collections)
    }

    /// Whether a document is left out as a system document.
    #[inline]
    pub(super) fn hides_unasked(&self, collection_id: CollectionId, key: &[u8]) -> bool {
        (self.transactions && key.first() == Some(&b'_') && key.starts_with(TRANSACTION_PREFIX))
            || (collection_id != CollectionId::DEFAULT && self.collections.contains(&collection_id))
    }

    /// Whether a document is left out.
    pub(super) fn hides(&self, collection_id: CollectionId, key: &[u8]) -> bool {
        self.hides_unasked(collection_id, key)
            || self.chosen().is_some_and(|chosen| !chosen.contains(&collection_id))
    }

    /// Whether an event of a collection or scope is left out.
    pub(super) fn hides_event(&self, event: &SystemEvent<'_>) -> bool {
        let Some(chosen) = &self.chosen else { return false };
        event.payload().ok().flatten().is_some_and(|of| !chosen.takes_event(event.id, &of))
    }

    /// Whether documents of scope `_system` are left out.
    #[must_use]
    pub const fn leaves_out_system_scope(&self) -> bool {
        self.system_scope.is_some()
    }

    /// Merges what `other` knows: what to leave out, and what patterns match.
    pub fn merge(&mut self, other: &Self) {
        self.transactions |= other.transactions;
        self.system_scope = other.system_scope.or(self.system_scope);
        other.collections.iter().for_each(|&id| _ = self.add(id));
        if let (Some(own), Some(others)) = (&mut self.chosen, &other.chosen) {
            own.merge(others);
        }
    }

    /// The part that was learned last, and all that patterns are known to match.
    pub(super) fn learned_last(&self) -> Self {
        let collections = self.collections.last().copied().into_iter().collect();
        let chosen = self.chosen.clone();
        Self { transactions: false, system_scope: self.system_scope, collections, chosen }
    }

    /// Learns of new scopes and collections; returns whether there was anything new.
    pub(super) fn learn(&mut self, event: &SystemEvent<'_>) -> bool {
        if self.system_scope.is_none() && self.chosen.is_none() {
            return false;
        }
        // A damaged payload has no names.
        let Ok(Some(payload)) = event.payload() else { return false };
        let is_chosen = self.chosen.as_mut().is_some_and(|of| of.learn(event.id, &payload));
        self.learn_system_scope(event.id, &payload) || is_chosen
    }

    fn learn_system_scope(&mut self, id: SystemEventId, payload: &SystemEventPayload<'_>) -> bool {
        let Some(known_scope) = self.system_scope else { return false };
        match (id, payload.collection_id) {
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
