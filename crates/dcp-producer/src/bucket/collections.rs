//! The scopes and collections of one copy of a vBucket, as its system events made them.

use std::collections::BTreeSet;

use bytes::{BufMut, Bytes, BytesMut};
use dcp_proto::producer::{Item, ItemKind};
use dcp_wire::message::SystemEventId;
use dcp_wire::{CollectionId, Datatype, ManifestUid, RevSeqno, ScopeId, Seqno};
use rustc_hash::FxHashMap;

use super::clock::Now;
use super::manifest::Manifest;
use super::vbucket::VBucket;

/// What a vBucket knows of a collection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct CollectionState {
    scope_id: ScopeId,
    /// Highest seqno, events counted.
    high_seqno: Seqno,
    max_ttl: Option<u32>,
}

/// The scopes and collections of one copy of a vBucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VBucketCollections {
    collections: FxHashMap<CollectionId, CollectionState>,
    scopes: BTreeSet<ScopeId>,
    /// Manifest the vBucket has reached.
    manifest_uid: ManifestUid,
}

impl Default for VBucketCollections {
    /// The default scope and collection, which no event creates.
    fn default() -> Self {
        let default = CollectionState {
            scope_id: Manifest::DEFAULT_SCOPE,
            high_seqno: Seqno::ZERO,
            max_ttl: None,
        };
        Self {
            collections: FxHashMap::from_iter([(CollectionId::DEFAULT, default)]),
            scopes: BTreeSet::from([Manifest::DEFAULT_SCOPE]),
            manifest_uid: ManifestUid(0),
        }
    }
}

impl VBucketCollections {
    /// What the newest version of everything says.
    pub(super) fn of<'a>(items: impl Iterator<Item = &'a Item> + Clone) -> Self {
        let is_event = |item: &&Item| matches!(item.kind, ItemKind::SystemEvent { .. });
        let mut events: Vec<_> = items.clone().filter(is_event).collect();
        events.sort_unstable_by_key(|item| item.seqno);
        let mut known = Self::default();
        for event in events {
            known.note(event);
        }
        for item in items.filter(|item| !is_event(item)) {
            if let Some(state) = known.collections.get_mut(&item.collection_id) {
                state.high_seqno = state.high_seqno.max(item.seqno);
            }
        }
        known
    }

    /// Follows a change; returns the collection it dropped.
    pub(super) fn note(&mut self, item: &Item) -> Option<CollectionId> {
        let (id, collection_id) = (item.kind.clone(), item.collection_id);
        let ItemKind::SystemEvent { id, scope_id, .. } = id else {
            if let Some(state) = self.collections.get_mut(&collection_id) {
                state.high_seqno = item.seqno;
            }
            return None;
        };
        self.manifest_uid = manifest_uid(item).unwrap_or(self.manifest_uid);
        match id {
            SystemEventId::CREATE_SCOPE => _ = self.scopes.insert(scope_id),
            SystemEventId::DROP_SCOPE => _ = self.scopes.remove(&scope_id),
            SystemEventId::END_COLLECTION => _ = self.collections.remove(&collection_id),
            _ => {
                let state =
                    CollectionState { scope_id, high_seqno: item.seqno, max_ttl: max_ttl(item) };
                self.collections.insert(collection_id, state);
            }
        }
        dropped_by(item)
    }

    pub(crate) fn contains(&self, id: CollectionId) -> bool {
        self.collections.contains_key(&id)
    }

    /// Highest seqno of a collection, its events counted.
    pub(crate) fn high_seqno(&self, id: CollectionId) -> Option<Seqno> {
        self.collections.get(&id).map(|state| state.high_seqno)
    }

    /// Longest life of a collection's documents, in seconds.
    pub(crate) fn max_ttl(&self, id: CollectionId) -> Option<u32> {
        self.collections.get(&id)?.max_ttl
    }
}

/// The collection an event drops.
pub(super) fn dropped_by(item: &Item) -> Option<CollectionId> {
    let is_drop =
        matches!(item.kind, ItemKind::SystemEvent { id: SystemEventId::END_COLLECTION, .. });
    is_drop.then_some(item.collection_id)
}

/// The manifest uid in the payload of an event.
fn manifest_uid(item: &Item) -> Option<ManifestUid> {
    Some(ManifestUid(u64::from_be_bytes(*item.value.first_chunk()?)))
}

/// The expiry in the payload of an event.
fn max_ttl(item: &Item) -> Option<u32> {
    Some(u32::from_be_bytes(*item.value.get(16..)?.first_chunk()?))
}

/// An event that is still to be given its place.
struct Event {
    id: SystemEventId,
    scope_id: ScopeId,
    collection_id: CollectionId,
    name: Bytes,
    max_ttl: Option<u32>,
}

impl Event {
    fn of_scope(id: SystemEventId, scope_id: ScopeId, name: &str) -> Self {
        let name = Bytes::copy_from_slice(name.as_bytes());
        Self { id, scope_id, collection_id: CollectionId::DEFAULT, name, max_ttl: None }
    }

    /// The payload in its plain form, and which form that is.
    fn payload(&self, uid: ManifestUid) -> (Bytes, u8) {
        let mut value = BytesMut::with_capacity(20);
        value.put_u64(uid.0);
        value.put_u32(self.scope_id.0);
        if !matches!(self.id, SystemEventId::CREATE_SCOPE | SystemEventId::DROP_SCOPE) {
            value.put_u32(self.collection_id.0);
        }
        if let Some(max_ttl) = self.max_ttl {
            value.put_u32(max_ttl);
        }
        (value.freeze(), u8::from(self.max_ttl.is_some()))
    }
}

impl VBucket {
    /// Creates and drops what makes the vBucket agree with `manifest`, an event each.
    ///
    /// Only the last event carries the new manifest's uid: who sees it knows everything of it.
    pub(crate) fn bring_forward(&mut self, now: Now, manifest: &Manifest) {
        let events = self.missing_events(manifest);
        let reached = self.collections.manifest_uid;
        let last = events.len().saturating_sub(1);
        for (index, event) in events.into_iter().enumerate() {
            let (value, version) =
                event.payload(if index == last { manifest.uid() } else { reached });
            let cas = self.next_cas(now);
            self.append(Item {
                kind: ItemKind::SystemEvent { id: event.id, version, scope_id: event.scope_id },
                seqno: Seqno::ZERO,
                rev_seqno: RevSeqno(1),
                cas,
                collection_id: event.collection_id,
                key: event.name,
                value,
                datatype: Datatype::RAW,
                flags: 0,
                expiry: 0,
                delete_time: 0,
            });
        }
        self.collections.manifest_uid = manifest.uid();
    }

    /// Collections dropped, scopes created, collections created, scopes dropped: in this order.
    fn missing_events(&self, manifest: &Manifest) -> Vec<Event> {
        let known = &self.collections;
        let mut events = Vec::new();
        let mut gone: Vec<_> =
            known.collections.iter().filter(|(id, _)| !manifest.has_collection(**id)).collect();
        gone.sort_unstable_by_key(|(id, _)| id.0);
        for (&collection_id, state) in gone {
            let drop = Event::of_scope(SystemEventId::END_COLLECTION, state.scope_id, "");
            events.push(Event { collection_id, ..drop });
        }
        for scope in manifest.scopes().iter().filter(|scope| !known.scopes.contains(&scope.id)) {
            events.push(Event::of_scope(SystemEventId::CREATE_SCOPE, scope.id, &scope.name));
        }
        for scope in manifest.scopes() {
            for collection in scope.collections.iter().filter(|new| !known.contains(new.id)) {
                events.push(Event {
                    collection_id: collection.id,
                    max_ttl: collection.max_ttl,
                    ..Event::of_scope(SystemEventId::BEGIN_COLLECTION, scope.id, &collection.name)
                });
            }
        }
        for &scope in known.scopes.iter().filter(|&&id| manifest.scope(id).is_none()) {
            events.push(Event::of_scope(SystemEventId::DROP_SCOPE, scope, ""));
        }
        events
    }
}
