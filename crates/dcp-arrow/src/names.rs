//! Names of collections.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dcp_wire::message::{SystemEventId, SystemEventPayload};
use dcp_wire::{CollectionId, ScopeId};

/// Maximum bytes of names to keep: many times what a bucket may have, so only a server that invents
/// names reaches it.
const MAX_BYTES: usize = 4 * 1024 * 1024;

/// Overhead of a name besides its bytes.
const OVERHEAD: usize = 128;

/// Name of a collection and its scope.
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

/// Names of collections and scopes by id, from the manifest and from the stream's system events.
///
/// An id belongs to one name forever, so a resolved name is kept: the last changes of a dropped
/// collection still have its name, and a collection created later under the same name has another
/// id. Clones share their names.
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
    /// Total size of the names in bytes.
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
    /// Resolves names with `lookup`, using the manifest that is current when a name is first
    /// needed; `None` becomes null in the table.
    #[must_use]
    pub fn new(
        lookup: impl Fn(CollectionId) -> Option<CollectionName> + Send + Sync + 'static,
    ) -> Self {
        Self { collections: Arc::new(lookup), scopes: Arc::new(|_| None), seen: Arc::default() }
    }

    /// The same, with scope names resolved by `lookup`.
    #[must_use]
    pub fn with_scopes(
        mut self,
        lookup: impl Fn(ScopeId) -> Option<Arc<str>> + Send + Sync + 'static,
    ) -> Self {
        self.scopes = Arc::new(lookup);
        self
    }

    /// The name of a collection, if known.
    #[must_use]
    pub fn name(&self, id: CollectionId) -> Option<CollectionName> {
        if let Some(name) = self.seen().collections.get(&id) {
            return Some(name.clone());
        }
        // Not under our lock: the lookup may take its own.
        let name = (self.collections)(id)?;
        self.seen().keep_collection(id, &name);
        Some(name)
    }

    /// The name of a scope, if known.
    #[must_use]
    pub fn scope_name(&self, id: ScopeId) -> Option<Arc<str>> {
        if let Some(name) = self.seen().scopes.get(&id) {
            return Some(Arc::clone(name));
        }
        let name = (self.scopes)(id)?;
        self.seen().keep_scope(id, &name);
        Some(name)
    }

    /// Records the name of a collection or scope from a system event, which precedes its first
    /// change and may be newer than any fetched manifest.
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
    /// Knows only the default collection, as on a bucket without a manifest.
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
