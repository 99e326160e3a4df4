//! The scopes and collections of one copy of a vBucket, as created by its system events.

use std::collections::{BTreeMap, BTreeSet};

use dcp_producer_proto::{Item, ItemKind};
use dcp_wire::message::{SystemEvent, SystemEventId, SystemEventPayload};
use dcp_wire::{CollectionId, ManifestUid, ScopeId, Seqno};
use rustc_hash::FxHashMap;

use super::manifest::{CollectionSettings, Manifest};

/// Form in which events are stored: the only complete one. Streams send the form that their client
/// requested.
pub(super) const FLATBUFFERS: u8 = 2;

/// State of a collection in a vBucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CollectionState {
    pub(super) scope_id: ScopeId,
    /// Highest seqno, including events.
    high_seqno: Seqno,
    pub(super) settings: CollectionSettings,
    pub(super) flush_uid: ManifestUid,
}

/// The scopes and collections of one copy of a vBucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VBucketCollections {
    pub(super) collections: FxHashMap<CollectionId, CollectionState>,
    pub(super) scopes: BTreeSet<ScopeId>,
    /// Manifest the vBucket has reached.
    pub(super) manifest_uid: ManifestUid,
    /// The newest tombstone that was purged, by collection.
    purged: PurgedTombstones,
}

/// The newest tombstone that was purged, by collection. It still counts towards the collection's
/// high seqno: a client that is below it has missed a deletion.
pub(crate) type PurgedTombstones = BTreeMap<CollectionId, Seqno>;

impl Default for VBucketCollections {
    /// The default scope and collection, which no event creates.
    fn default() -> Self {
        let default = CollectionState {
            scope_id: Manifest::DEFAULT_SCOPE,
            high_seqno: Seqno::ZERO,
            settings: CollectionSettings::default(),
            flush_uid: ManifestUid(0),
        };
        Self {
            collections: FxHashMap::from_iter([(CollectionId::DEFAULT, default)]),
            scopes: BTreeSet::from([Manifest::DEFAULT_SCOPE]),
            manifest_uid: ManifestUid(0),
            purged: BTreeMap::new(),
        }
    }
}

impl VBucketCollections {
    /// The state according to the newest versions and the purged tombstones.
    pub(super) fn of<'a>(
        items: impl Iterator<Item = &'a Item> + Clone,
        purged: PurgedTombstones,
    ) -> Self {
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
        known.have_purged(&purged);
        known
    }

    /// Notes that tombstones up to these are purged.
    pub(super) fn have_purged(&mut self, purged: &PurgedTombstones) {
        for (&id, &seqno) in purged {
            let newest = self.purged.entry(id).or_default();
            *newest = seqno.max(*newest);
            if let Some(state) = self.collections.get_mut(&id) {
                state.high_seqno = seqno.max(state.high_seqno);
            }
        }
    }

    /// The purged tombstones of a history that ends at `to`.
    pub(super) fn purged_up_to(&self, to: Seqno) -> PurgedTombstones {
        self.purged
            .iter()
            .filter(|(_, seqno)| **seqno <= to)
            .map(|(&id, &seqno)| (id, seqno))
            .collect()
    }

    /// Applies a change; returns what it drops.
    pub(super) fn note(&mut self, item: &Item) -> Option<Dropped> {
        let collection_id = item.collection_id;
        let ItemKind::SystemEvent { id, scope_id, .. } = item.kind else {
            if let Some(state) = self.collections.get_mut(&collection_id) {
                // A copy may know of a purge before it has the changes below it.
                state.high_seqno = state.high_seqno.max(item.seqno);
            }
            return None;
        };
        let event = event_of(item)?;
        let payload = payload_of(&event)?;
        self.manifest_uid = payload.manifest_uid;
        match id {
            SystemEventId::CREATE_SCOPE => _ = self.scopes.insert(scope_id),
            SystemEventId::DROP_SCOPE => _ = self.scopes.remove(&scope_id),
            SystemEventId::END_COLLECTION => _ = self.collections.remove(&collection_id),
            _ => {
                let settings =
                    CollectionSettings { max_ttl: payload.max_ttl, history: payload.history };
                let purged = self.purged.get(&collection_id).copied().unwrap_or_default();
                let (high_seqno, flush_uid) = (item.seqno.max(purged), payload.flush_uid);
                let state = CollectionState { scope_id, high_seqno, settings, flush_uid };
                self.collections.insert(collection_id, state);
            }
        }
        Dropped::by(item)
    }

    pub(crate) fn contains(&self, id: CollectionId) -> bool {
        self.collections.contains_key(&id)
    }

    /// Highest seqno of a collection, including its events.
    pub(crate) fn high_seqno(&self, id: CollectionId) -> Option<Seqno> {
        self.collections.get(&id).map(|state| state.high_seqno)
    }

    /// Longest life of a collection's documents, in seconds.
    pub(crate) fn max_ttl(&self, id: CollectionId) -> Option<u32> {
        self.collections.get(&id)?.settings.max_ttl
    }
}

/// The system event of an item.
fn event_of(item: &Item) -> Option<SystemEvent<'_>> {
    let ItemKind::SystemEvent { id, version, .. } = item.kind else {
        return None;
    };
    let (key, value) = (&item.key[..], &item.value[..]);
    Some(SystemEvent { seqno: item.seqno, id, version, key, value })
}

/// The payload of an event; `None` if it is malformed.
fn payload_of<'a>(event: &SystemEvent<'a>) -> Option<SystemEventPayload<'a>> {
    event.payload().ok().flatten()
}

/// What is removed with a collection that is dropped or flushed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Dropped {
    collection: CollectionId,
    /// Not only its documents but its modifications as well.
    entirely: bool,
}

impl Dropped {
    /// What the newest item removes.
    pub(super) fn by(item: &Item) -> Option<Self> {
        let ItemKind::SystemEvent { id, .. } = item.kind else {
            return None;
        };
        let collection = item.collection_id;
        match id {
            SystemEventId::END_COLLECTION => Some(Self { collection, entirely: true }),
            SystemEventId::BEGIN_COLLECTION => {
                let flushed = payload_of(&event_of(item)?)?.flush_uid != ManifestUid(0);
                flushed.then_some(Self { collection, entirely: false })
            }
            _ => None,
        }
    }

    /// Whether the documents of a collection are removed.
    pub(super) fn is_of(self, collection: CollectionId) -> bool {
        self.collection == collection
    }

    /// Whether an older item is removed.
    pub(super) fn takes(self, item: &Item) -> bool {
        if !self.is_of(item.collection_id) {
            return false;
        }
        match item.kind {
            ItemKind::SystemEvent { id, .. } => {
                self.entirely && id == SystemEventId::MODIFY_COLLECTION
            }
            _ => true,
        }
    }
}
