//! Brings a vBucket up to date with the collections manifest, event by event.

use bytes::Bytes;
use dcp_producer_proto::{Item, ItemKind, ServerVersion};
use dcp_wire::message::{SystemEventId, SystemEventPayload};
use dcp_wire::{CollectionId, Datatype, ManifestUid, RevSeqno, ScopeId, Seqno};

use super::collections::FLATBUFFERS;
use super::manifest::{Collection, CollectionSettings, Manifest};
use super::vbucket::VBucket;
use crate::chance::Now;

/// An event that does not have a seqno yet.
struct Event<'a> {
    id: SystemEventId,
    scope_id: ScopeId,
    /// The collection and its settings.
    collection: Option<(CollectionId, CollectionSettings, ManifestUid)>,
    /// Empty if something is dropped.
    name: &'a str,
}

impl<'a> Event<'a> {
    const fn of_scope(id: SystemEventId, scope_id: ScopeId, name: &'a str) -> Self {
        Self { id, scope_id, collection: None, name }
    }

    fn of_collection(id: SystemEventId, scope_id: ScopeId, collection: &'a Collection) -> Self {
        let described = (collection.id, collection.settings, collection.flush_uid);
        Self { collection: Some(described), ..Self::of_scope(id, scope_id, &collection.name) }
    }

    fn payload(&self, manifest_uid: ManifestUid) -> Bytes {
        let (settings, flush_uid) =
            self.collection.map(|(_, settings, uid)| (settings, uid)).unwrap_or_default();
        let payload = SystemEventPayload {
            manifest_uid,
            scope_id: self.scope_id,
            collection_id: self.collection.map(|(id, ..)| id),
            name: self.name.as_bytes(),
            max_ttl: settings.max_ttl,
            history: settings.history,
            flush_uid,
        };
        payload.to_flatbuffers(self.id).into()
    }
}

impl VBucket {
    /// Creates, changes and drops scopes and collections, each with an event, until the vBucket
    /// agrees with `manifest`.
    ///
    /// Only the last event carries the new manifest's uid: a client that has seen it has seen all
    /// changes. Servers before 8.0 do not count changes of settings, and begin a checkpoint with
    /// each event of a collection and after a scope is dropped.
    pub(crate) fn apply_manifest(&mut self, now: Now, manifest: &Manifest, server: ServerVersion) {
        let events = self.missing_events(manifest);
        let reached = self.collections.manifest_uid;
        let divides = !server.is_at_least(8, 0);
        let counts = |event: &Event<'_>| !divides || event.id != SystemEventId::MODIFY_COLLECTION;
        let last = events.iter().rposition(counts).unwrap_or(events.len().saturating_sub(1));
        for (index, event) in events.into_iter().enumerate() {
            if divides && event.collection.is_some() {
                self.checkpoints.close_open();
            }
            let value = event.payload(if index < last { reached } else { manifest.uid() });
            let cas = self.next_cas(now);
            let (id, scope_id, version) = (event.id, event.scope_id, FLATBUFFERS);
            self.append(Item {
                kind: ItemKind::SystemEvent { id, version, scope_id },
                seqno: Seqno::ZERO,
                rev_seqno: RevSeqno(1),
                cas,
                collection_id: event.collection.map_or(CollectionId::DEFAULT, |(id, ..)| id),
                key: Bytes::copy_from_slice(event.name.as_bytes()),
                value,
                datatype: Datatype::RAW,
                flags: 0,
                expiry: 0,
                delete_time: 0,
            });
            if divides && id == SystemEventId::DROP_SCOPE {
                self.checkpoints.close_open();
            }
        }
        self.collections.manifest_uid = manifest.uid();
    }

    /// Collections dropped, scopes created, collections created, changed, flushed, scopes dropped:
    /// in this order.
    fn missing_events<'a>(&self, manifest: &'a Manifest) -> Vec<Event<'a>> {
        let known = &self.collections;
        let mut events = Vec::new();
        let mut gone: Vec<_> =
            known.collections.iter().filter(|(id, _)| !manifest.has_collection(**id)).collect();
        gone.sort_unstable_by_key(|(id, _)| id.0);
        for (&id, state) in gone {
            let drop = Event::of_scope(SystemEventId::END_COLLECTION, state.scope_id, "");
            events.push(Event { collection: Some((id, state.settings, state.flush_uid)), ..drop });
        }
        for scope in manifest.scopes().iter().filter(|scope| !known.scopes.contains(&scope.id)) {
            events.push(Event::of_scope(SystemEventId::CREATE_SCOPE, scope.id, &scope.name));
        }
        let (mut changed, mut flushed) = (Vec::new(), Vec::new());
        for scope in manifest.scopes() {
            for collection in &scope.collections {
                let event = |id| Event::of_collection(id, scope.id, collection);
                let Some(state) = known.collections.get(&collection.id) else {
                    events.push(event(SystemEventId::BEGIN_COLLECTION));
                    continue;
                };
                if state.settings != collection.settings {
                    changed.push(event(SystemEventId::MODIFY_COLLECTION));
                }
                // A flush appears as another creation.
                if state.flush_uid != collection.flush_uid {
                    flushed.push(event(SystemEventId::BEGIN_COLLECTION));
                }
            }
        }
        events.append(&mut changed);
        events.append(&mut flushed);
        for &scope in known.scopes.iter().filter(|&&id| manifest.scope(id).is_none()) {
            events.push(Event::of_scope(SystemEventId::DROP_SCOPE, scope, ""));
        }
        events
    }
}
