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
    pub exclusions: Exclusions,
    /// Which changes of documents are not left out.
    pub rows: RowFilter,
}

/// Most collections of scope `_system` that are remembered. Servers and services create a handful,
/// and no documents arrive for those dropped long ago.
const MAX_EXCLUDED: usize = 1024;

/// Most collections and scopes that are matched against patterns. A cluster has at most 1,200, and
/// ids ascend: beyond that the oldest one is forgotten, which was dropped long ago.
const MAX_KNOWN: usize = 8192;

/// Documents that are left out: positions move past them as past anything a filter leaves out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exclusions {
    transactions: bool,
    /// Set if collections of scope `_system` are left out, its id once that is known.
    system_scope: Option<Option<ScopeId>>,
    /// Collections of that scope, in the order in which they were learned.
    collections: Vec<CollectionId>,
    /// What patterns choose of the rest, if there are any.
    matched: Option<MatchedCollections>,
}

/// What patterns of collections are known to match.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MatchedCollections {
    patterns: CollectionPatterns,
    collections: BTreeSet<CollectionId>,
    /// Names of scopes, to match collections that are created later.
    scopes: BTreeMap<ScopeId, Box<str>>,
}

impl MatchedCollections {
    /// Matches a collection; returns whether it is new and chosen.
    fn note_collection(&mut self, id: CollectionId, scope: &str, name: &str) -> bool {
        self.patterns.choose(scope, name) && self.add(id)
    }

    /// Notes a chosen collection; returns whether it is new.
    fn add(&mut self, id: CollectionId) -> bool {
        // Each vBucket sends the event of a collection again.
        if self.collections.contains(&id) {
            return false;
        }
        if self.collections.len() == MAX_KNOWN {
            self.collections.pop_first();
        }
        self.collections.insert(id)
    }

    /// Notes a scope's name; returns whether it is new.
    fn note_scope(&mut self, id: ScopeId, name: &str) -> bool {
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
            (SystemEventId::CREATE_SCOPE, _) => self.note_scope(payload.scope_id, name),
            (SystemEventId::BEGIN_COLLECTION, Some(id)) => {
                let Some(scope) = self.scopes.get(&payload.scope_id).cloned() else { return false };
                self.note_collection(id, &scope, name)
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
            self.add(id);
        }
        other.scopes.iter().for_each(|(&id, name)| _ = self.note_scope(id, name));
    }
}

impl Exclusions {
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
        self.matched = Some(MatchedCollections { patterns, collections, scopes });
        self.learn_manifest(manifest);
        self
    }

    /// Learns what patterns choose of a newer manifest.
    pub fn learn_manifest(&mut self, manifest: &Manifest) {
        let Some(chosen) = &mut self.matched else { return };
        for scope in manifest.scopes() {
            chosen.note_scope(scope.id, &scope.name);
        }
        for entry in manifest.collections() {
            if let Some((scope, name)) = manifest.names(entry.id) {
                chosen.note_collection(entry.id, scope, name);
            }
        }
    }

    /// Leaves out a collection's documents; returns whether that is new. Beyond [`MAX_EXCLUDED`], the
    /// one that was learned first is no longer left out.
    fn add(&mut self, id: CollectionId) -> bool {
        if self.collections.contains(&id) {
            return false;
        }
        if self.collections.len() == MAX_EXCLUDED {
            self.collections.remove(0);
        }
        self.collections.push(id);
        true
    }

    /// `self`, if system documents may be left out.
    #[inline]
    pub(super) fn of_system_documents(&self) -> Option<&Self> {
        (self.transactions || !self.collections.is_empty()).then_some(self)
    }

    /// The collections that patterns choose, if there are any patterns.
    #[inline]
    pub(super) fn matched(&self) -> Option<&BTreeSet<CollectionId>> {
        self.matched.as_ref().map(|chosen| &chosen.collections)
    }

    /// Whether a document is left out as a system document.
    #[inline]
    pub(super) fn excludes_system(&self, collection_id: CollectionId, key: &[u8]) -> bool {
        (self.transactions && key.first() == Some(&b'_') && key.starts_with(TRANSACTION_PREFIX))
            || (collection_id != CollectionId::DEFAULT && self.collections.contains(&collection_id))
    }

    /// Whether a document is left out.
    pub(super) fn excludes(&self, collection_id: CollectionId, key: &[u8]) -> bool {
        self.excludes_system(collection_id, key)
            || self.matched().is_some_and(|chosen| !chosen.contains(&collection_id))
    }

    /// Whether an event of a collection or scope is left out.
    pub(super) fn excludes_event(&self, event: &SystemEvent<'_>) -> bool {
        let Some(chosen) = &self.matched else { return false };
        event.payload().ok().flatten().is_some_and(|of| !chosen.takes_event(event.id, &of))
    }

    /// Whether documents of scope `_system` are left out.
    #[must_use]
    pub const fn excludes_system_scope(&self) -> bool {
        self.system_scope.is_some()
    }

    /// Merges what `other` knows: what to leave out, and what patterns match.
    pub fn merge(&mut self, other: &Self) {
        self.transactions |= other.transactions;
        self.system_scope = other.system_scope.or(self.system_scope);
        other.collections.iter().for_each(|&id| _ = self.add(id));
        if let (Some(own), Some(others)) = (&mut self.matched, &other.matched) {
            own.merge(others);
        }
    }

    /// The part that was learned last, and all that patterns are known to match.
    pub(super) fn learned_last(&self) -> Self {
        let collections = self.collections.last().copied().into_iter().collect();
        let matched = self.matched.clone();
        Self { transactions: false, system_scope: self.system_scope, collections, matched }
    }

    /// Learns of new scopes and collections; returns whether there was anything new.
    pub(super) fn learn(&mut self, event: &SystemEvent<'_>) -> bool {
        if self.system_scope.is_none() && self.matched.is_none() {
            return false;
        }
        // A damaged payload has no names.
        let Ok(Some(payload)) = event.payload() else { return false };
        let is_chosen = self.matched.as_mut().is_some_and(|of| of.learn(event.id, &payload));
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

#[cfg(test)]
mod tests {
    use dcp_wire::{ManifestUid, Seqno};

    use super::*;

    const MANIFEST: &[u8] = br#"{"uid":"7","scopes":[
        {"name":"shop","uid":"8","collections":[
            {"name":"orders","uid":"9"},{"name":"carts","uid":"a"}]},
        {"name":"other","uid":"b","collections":[{"name":"orders","uid":"c"}]},
        {"name":"_system","uid":"d","collections":[{"name":"_mobile","uid":"e"}]}]}"#;

    /// What patterns choose of the manifest.
    fn chosen(patterns: &[&str]) -> Exclusions {
        let patterns = CollectionPatterns::new(patterns.iter().copied()).unwrap();
        Exclusions::default().with_patterns(&patterns, &Manifest::parse(MANIFEST).unwrap())
    }

    fn ids(exclusions: &Exclusions) -> Option<Vec<u32>> {
        exclusions.matched().map(|chosen| chosen.iter().map(|id| id.0).collect())
    }

    /// The value of an event, in the version whose every event has a name.
    fn payload(id: SystemEventId, scope: u32, collection: Option<u32>, name: &str) -> Vec<u8> {
        let payload = SystemEventPayload {
            manifest_uid: ManifestUid(8),
            scope_id: ScopeId(scope),
            collection_id: collection.map(CollectionId),
            name: name.as_bytes(),
            max_ttl: None,
            history: false,
            flush_uid: ManifestUid(0),
        };
        payload.to_flatbuffers(id)
    }

    fn event(id: SystemEventId, value: &[u8]) -> SystemEvent<'_> {
        SystemEvent { seqno: Seqno(1), id, version: 2, key: b"", value }
    }

    fn learn(exclusions: &mut Exclusions, id: SystemEventId, of: (u32, Option<u32>, &str)) -> bool {
        exclusions.learn(&event(id, &payload(id, of.0, of.1, of.2)))
    }

    fn excludes_event(exclusions: &Exclusions, id: SystemEventId, of: (u32, Option<u32>)) -> bool {
        exclusions.excludes_event(&event(id, &payload(id, of.0, of.1, "name")))
    }

    const BEGIN: SystemEventId = SystemEventId::BEGIN_COLLECTION;
    const MODIFY: SystemEventId = SystemEventId::MODIFY_COLLECTION;
    const END: SystemEventId = SystemEventId::END_COLLECTION;
    const CREATE: SystemEventId = SystemEventId::CREATE_SCOPE;
    const DROP: SystemEventId = SystemEventId::DROP_SCOPE;

    #[test]
    fn collection_patterns_choose_from_the_manifest_and_hide_the_others() {
        assert_eq!(ids(&Exclusions::default()), None);
        assert_eq!(ids(&chosen(&["shop.*"])), Some(vec![9, 10]));
        assert_eq!(ids(&chosen(&["*.orders"])), Some(vec![9, 12]));
        assert_eq!(ids(&chosen(&["*.*"])), Some(vec![9, 10, 12]));
        assert_eq!(ids(&chosen(&["_system.*"])), Some(vec![14]));
        let exclusions = chosen(&["shop.o*"]);
        for (id, excludes) in [(9, false), (10, true), (12, true), (0, true), (99, true)] {
            assert_eq!(exclusions.excludes(CollectionId(id), b"k"), excludes, "{id}");
            assert!(!exclusions.excludes_system(CollectionId(id), b"k"), "no system document");
        }
        let all = Exclusions::default()
            .with_patterns(&CollectionPatterns::default(), &Manifest::parse(MANIFEST).unwrap());
        assert_eq!(all, Exclusions::default());
        assert!(!all.excludes(CollectionId(99), b"k"));
    }

    #[test]
    fn system_events_of_unmatched_collections_are_hidden_and_drops_never_are() {
        let exclusions = chosen(&["shop.o*"]);
        for id in [BEGIN, MODIFY] {
            assert!(!excludes_event(&exclusions, id, (8, Some(9))), "{id}");
            assert!(excludes_event(&exclusions, id, (8, Some(10))), "{id}");
            assert!(excludes_event(&exclusions, id, (11, Some(12))), "{id}");
        }
        assert!(!excludes_event(&exclusions, CREATE, (8, None)));
        assert!(excludes_event(&exclusions, CREATE, (11, None)));
        for scope in [8, 11] {
            assert!(!excludes_event(&exclusions, END, (scope, Some(12))));
            assert!(!excludes_event(&exclusions, DROP, (scope, None)));
        }
        // Nobody knows what a damaged or unknown payload is about.
        assert!(!exclusions.excludes_event(&event(BEGIN, b"")));
        assert!(!exclusions.excludes_event(&SystemEvent { version: 9, ..event(BEGIN, b"") }));
        assert!(!excludes_event(&Exclusions::default(), BEGIN, (11, Some(12))));
    }

    #[test]
    fn collection_patterns_choose_what_is_created_later() {
        let mut exclusions = chosen(&["shop.o*", "new*.*"]);
        assert!(learn(&mut exclusions, BEGIN, (8, Some(20), "offers")));
        assert!(!learn(&mut exclusions, BEGIN, (8, Some(20), "offers")), "known already");
        assert!(!learn(&mut exclusions, BEGIN, (8, Some(21), "carts")));
        assert!(!learn(&mut exclusions, BEGIN, (30, Some(31), "any")), "its scope is not known");
        assert!(learn(&mut exclusions, CREATE, (30, None, "newest")));
        assert!(!learn(&mut exclusions, CREATE, (30, None, "newest")), "known already");
        assert!(!learn(&mut exclusions, CREATE, (40, None, "old")));
        assert!(learn(&mut exclusions, BEGIN, (30, Some(31), "any")));
        assert!(!learn(&mut exclusions, BEGIN, (40, Some(41), "any")));
        assert!(!learn(&mut exclusions, MODIFY, (30, Some(32), "any")), "only a creation");
        assert!(!learn(&mut exclusions, END, (30, Some(31), "")));
        assert!(!learn(&mut exclusions, DROP, (30, None, "")));
        assert_eq!(ids(&exclusions), Some(vec![9, 20, 31]), "a dropped one stays");
        assert!(!exclusions.learn(&event(BEGIN, b"")));
        assert!(!learn(&mut Exclusions::default(), CREATE, (30, None, "newest")));
        let mut with_bytes = payload(BEGIN, 30, Some(33), "name");
        let at = with_bytes.windows(4).position(|bytes| bytes == b"name").unwrap();
        with_bytes[at] = 0xff;
        assert!(!exclusions.learn(&event(BEGIN, &with_bytes)), "a name that is no text");
    }

    #[test]
    fn system_scope_is_learned_with_its_collections() {
        let mut exclusions = Exclusions::default().with_system_scope(None, []);
        assert!(exclusions.excludes_system_scope());
        assert!(exclusions.of_system_documents().is_none(), "nothing is known yet");
        assert!(!learn(&mut exclusions, BEGIN, (8, Some(9), "_mobile")), "its scope is not known");
        assert!(!learn(&mut exclusions, CREATE, (7, None, "shop")));
        assert!(learn(&mut exclusions, CREATE, (8, None, "_system")));
        assert!(!learn(&mut exclusions, CREATE, (8, None, "_system")));
        assert!(!learn(&mut exclusions, BEGIN, (7, Some(9), "carts")));
        assert!(learn(&mut exclusions, BEGIN, (8, Some(9), "_mobile")));
        assert!(!learn(&mut exclusions, BEGIN, (8, Some(9), "_mobile")));
        assert!(exclusions.of_system_documents().is_some());
        assert!(
            exclusions.excludes(CollectionId(9), b"k")
                && !exclusions.excludes(CollectionId(10), b"k")
        );
        assert!(!Exclusions::default().excludes_system_scope());
        assert!(learn(&mut exclusions, CREATE, (18, None, "_system")), "it was made again");
        assert!(learn(&mut exclusions, BEGIN, (18, Some(19), "_mobile")));
        assert!(
            exclusions.excludes(CollectionId(9), b"k")
                && exclusions.excludes(CollectionId(19), b"k")
        );
    }

    #[test]
    fn transaction_records_are_known_by_their_keys() {
        let exclusions = Exclusions::default().with_transactions();
        for (key, excludes) in [
            (&b"_txn:"[..], true),
            (b"_txn:atr-1", true),
            (b"_txn", false),
            (b"_tx:", false),
            (b"a_txn:", false),
            (b"", false),
        ] {
            for collection in [CollectionId::DEFAULT, CollectionId(9)] {
                assert_eq!(exclusions.excludes(collection, key), excludes);
                assert_eq!(exclusions.excludes_system(collection, key), excludes);
                assert!(!Exclusions::default().excludes(collection, key));
            }
        }
        assert!(
            exclusions.of_system_documents().is_some()
                && Exclusions::default().of_system_documents().is_none()
        );
        // The default collection is in no system scope.
        let wrong =
            Exclusions::default().with_system_scope(Some(ScopeId(8)), [CollectionId::DEFAULT]);
        assert!(!wrong.excludes(CollectionId::DEFAULT, b"k"));
    }

    #[test]
    fn collections_learned_by_other_connections_are_merged() {
        let (mut own, mut other) = (chosen(&["shop.o*", "new*.*"]), chosen(&["shop.o*", "new*.*"]));
        learn(&mut other, BEGIN, (8, Some(20), "offers"));
        learn(&mut other, CREATE, (30, None, "newest"));
        own.merge(&other.learned_last());
        assert_eq!(ids(&own), Some(vec![9, 20]));
        assert!(learn(&mut own, BEGIN, (30, Some(31), "any")), "its scope came with it");

        let mut own = Exclusions::default().with_system_scope(None, [CollectionId(1)]);
        let other = Exclusions::default()
            .with_transactions()
            .with_system_scope(Some(ScopeId(8)), [CollectionId(2), CollectionId(3)]);
        own.merge(&other.learned_last());
        assert!(own.excludes(CollectionId(1), b"k") && own.excludes(CollectionId(3), b"k"));
        assert!(!own.excludes(CollectionId(2), b"k"), "only what was learned last");
        assert!(!own.excludes(CollectionId(0), b"_txn:1"), "transactions are not learned");
        own.merge(&other);
        assert!(own.excludes(CollectionId(2), b"k") && own.excludes(CollectionId(0), b"_txn:1"));
        assert!(learn(&mut own, BEGIN, (8, Some(9), "_mobile")), "the scope came with it");
        own.merge(&Exclusions::default());
        assert!(own.excludes(CollectionId(0), b"_txn:1"), "nothing is forgotten");
        assert!(learn(&mut own, BEGIN, (8, Some(10), "_mobile")));
    }

    #[test]
    fn collections_learned_are_bounded_and_the_oldest_is_forgotten() {
        let many = u32::try_from(MAX_KNOWN).unwrap();
        let mut exclusions = chosen(&["new.*", "new*.*"]);
        for id in 100..100 + many {
            assert!(learn(&mut exclusions, CREATE, (id, None, "new")));
        }
        for id in 100..100 + many {
            assert!(learn(&mut exclusions, BEGIN, (100 + many - 1, Some(id), "any")));
        }
        let known = |exclusions: &Exclusions| {
            let chosen = exclusions.matched.as_ref().unwrap();
            (chosen.collections.len(), chosen.scopes.len())
        };
        assert_eq!(known(&exclusions), (MAX_KNOWN, MAX_KNOWN));
        let before = exclusions.clone();
        exclusions.merge(&before);
        assert!(
            !learn(&mut exclusions, BEGIN, (100, Some(100), "any")),
            "the next vBucket's event"
        );
        assert_eq!(exclusions, before, "what is known already takes the place of nothing");
        assert!(learn(&mut exclusions, CREATE, (100 + many, None, "new")));
        assert!(learn(&mut exclusions, BEGIN, (100 + many, Some(100 + many), "any")));
        assert_eq!(known(&exclusions), (MAX_KNOWN, MAX_KNOWN));
        assert!(
            exclusions.excludes(CollectionId(100), b"k")
                && !exclusions.excludes(CollectionId(101), b"k")
        );
        assert!(!exclusions.excludes(CollectionId(100 + many), b"k"));
        exclusions.merge(&before);
        assert_eq!(known(&exclusions), (MAX_KNOWN, MAX_KNOWN));

        let mut exclusions = Exclusions::default().with_system_scope(Some(ScopeId(8)), []);
        for id in 1..=u32::try_from(MAX_EXCLUDED).unwrap() {
            assert!(learn(&mut exclusions, BEGIN, (8, Some(id), "_any")));
        }
        assert!(exclusions.excludes(CollectionId(1), b"k"), "as many as fit");
        assert!(learn(&mut exclusions, BEGIN, (8, Some(5000), "_any")));
        assert!(
            !exclusions.excludes(CollectionId(1), b"k")
                && exclusions.excludes(CollectionId(2), b"k")
        );
    }
}
