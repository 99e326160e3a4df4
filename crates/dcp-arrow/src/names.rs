//! Names of collections.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dcp_wire::message::{SystemEventId, SystemEventPayload};
use dcp_wire::{CollectionId, ScopeId};

/// Most bytes of names kept: many times what a bucket may have, so that only a server that makes names
/// up gets there.
const MAX_BYTES: usize = 4 * 1024 * 1024;

/// What a name takes besides its bytes.
const OVERHEAD: usize = 128;

/// Name of a collection and of the scope it lies in.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct CollectionName {
    /// Scope.
    pub scope: Arc<str>,
    /// Collection.
    pub collection: Arc<str>,
}

impl CollectionName {
    /// The name of `collection` in `scope`.
    #[must_use]
    pub fn new(scope: impl Into<Arc<str>>, collection: impl Into<Arc<str>>) -> Self {
        Self { scope: scope.into(), collection: collection.into() }
    }
}

type Lookup<I, N> = Arc<dyn Fn(I) -> Option<N> + Send + Sync>;

/// Names of collections and scopes by id, from the manifest and from the events of the stream.
///
/// An id belongs to one name for ever, so a name once seen is kept: the last changes of a dropped
/// collection have its name, and a collection made later under the same name is another id.
/// Clones share what they have seen.
#[derive(Clone)]
pub struct CollectionNames {
    collections: Lookup<CollectionId, CollectionName>,
    scopes: Lookup<ScopeId, Arc<str>>,
    seen: Arc<Mutex<Seen>>,
}

#[derive(Debug, Default)]
struct Seen {
    collections: HashMap<CollectionId, CollectionName>,
    scopes: HashMap<ScopeId, Arc<str>>,
    /// What they take together.
    bytes: usize,
}

impl Seen {
    fn keep_collection(&mut self, id: CollectionId, name: &CollectionName) {
        if self.has_room(name.collection.len()) && !self.collections.contains_key(&id) {
            self.bytes += name.collection.len() + OVERHEAD;
            self.collections.insert(id, name.clone());
        }
    }

    fn keep_scope(&mut self, id: ScopeId, name: &Arc<str>) {
        if self.has_room(name.len()) && !self.scopes.contains_key(&id) {
            self.bytes += name.len() + OVERHEAD;
            self.scopes.insert(id, Arc::clone(name));
        }
    }

    const fn has_room(&self, name_len: usize) -> bool {
        self.bytes + name_len + OVERHEAD <= MAX_BYTES
    }
}

impl CollectionNames {
    /// Names found by `lookup`, in whatever manifest is current when a name is first needed;
    /// `None` becomes null in the table.
    #[must_use]
    pub fn new(
        lookup: impl Fn(CollectionId) -> Option<CollectionName> + Send + Sync + 'static,
    ) -> Self {
        Self { collections: Arc::new(lookup), scopes: Arc::new(|_| None), seen: Arc::default() }
    }

    /// The same with names of scopes found by `lookup`.
    #[must_use]
    pub fn with_scopes(
        mut self,
        lookup: impl Fn(ScopeId) -> Option<Arc<str>> + Send + Sync + 'static,
    ) -> Self {
        self.scopes = Arc::new(lookup);
        self
    }

    /// The name of a collection, if it is known.
    #[must_use]
    pub fn name(&self, id: CollectionId) -> Option<CollectionName> {
        if let Some(name) = self.seen().collections.get(&id) {
            return Some(name.clone());
        }
        // Not under the lock: the lookup may take its own.
        let name = (self.collections)(id)?;
        self.seen().keep_collection(id, &name);
        Some(name)
    }

    /// The name of a scope, if it is known.
    #[must_use]
    pub fn scope_name(&self, id: ScopeId) -> Option<Arc<str>> {
        if let Some(name) = self.seen().scopes.get(&id) {
            return Some(Arc::clone(name));
        }
        let name = (self.scopes)(id)?;
        self.seen().keep_scope(id, &name);
        Some(name)
    }

    /// Takes the name that an event gives to a collection or scope, which comes before its first
    /// change and may be newer than any manifest fetched.
    pub(crate) fn learn(&self, event: SystemEventId, payload: &SystemEventPayload<'_>) {
        let Ok(name) = std::str::from_utf8(payload.name) else { return };
        match (event, payload.collection_id) {
            (SystemEventId::CREATE_SCOPE, _) => {
                self.seen().keep_scope(payload.scope_id, &Arc::from(name));
            }
            (
                SystemEventId::BEGIN_COLLECTION | SystemEventId::MODIFY_COLLECTION,
                Some(collection_id),
            ) => {
                let Some(scope) = self.scope_name(payload.scope_id) else { return };
                let name = CollectionName::new(scope, name);
                self.seen().keep_collection(collection_id, &name);
            }
            _ => {}
        }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for CollectionNames {
    /// Knows the default collection only, as on a bucket without a manifest.
    fn default() -> Self {
        Self::new(|id| {
            (id == CollectionId::DEFAULT).then(|| CollectionName::new("_default", "_default"))
        })
        .with_scopes(|id| (id == ScopeId(0)).then(|| "_default".into()))
    }
}

impl fmt::Debug for CollectionNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CollectionNames").finish_non_exhaustive()
    }
}
