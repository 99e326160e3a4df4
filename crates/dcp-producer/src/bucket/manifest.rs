//! The collections manifest: the scopes and collections of the bucket.

use dcp_wire::{CollectionId, ManifestUid, ScopeId};
use serde_json::{Map, Value, json};

/// A collection of the manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Collection {
    pub(crate) id: CollectionId,
    pub(crate) name: String,
    pub(crate) settings: CollectionSettings,
    /// Uid of the manifest that last flushed it; 0 if never.
    pub(crate) flush_uid: ManifestUid,
}

/// The settings of a collection that can be changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CollectionSettings {
    /// Longest life of its documents, in seconds.
    pub(crate) max_ttl: Option<u32>,
    /// Whether it keeps every version of its documents.
    pub(crate) history: bool,
}

impl Collection {
    const fn new(id: CollectionId, name: String, settings: CollectionSettings) -> Self {
        Self { id, name, settings, flush_uid: ManifestUid(0) }
    }
}

/// A scope of the manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Scope {
    pub(crate) id: ScopeId,
    pub(crate) name: String,
    pub(crate) collections: Vec<Collection>,
}

impl Scope {
    /// The collection of that name; an empty one means the default collection.
    pub(crate) fn collection_named(&self, name: &[u8]) -> Option<&Collection> {
        let name = or_default(name);
        self.collections.iter().find(|collection| collection.name.as_bytes() == name)
    }
}

fn or_default(name: &[u8]) -> &[u8] {
    if name.is_empty() { DEFAULT_NAME.as_bytes() } else { name }
}

/// The collections manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Manifest {
    uid: ManifestUid,
    scopes: Vec<Scope>,
    next_scope: u32,
    next_collection: u32,
}

/// Name of the scope for documents of servers and services.
const SYSTEM_SCOPE: &str = "_system";

/// Name of the default scope and of the default collection.
const DEFAULT_NAME: &str = "_default";

/// First id that is not reserved.
const FIRST_ID: u32 = 8;

impl Default for Manifest {
    fn default() -> Self {
        let name = DEFAULT_NAME.to_owned();
        let settings = CollectionSettings::default();
        let collection = Collection::new(CollectionId::DEFAULT, name.clone(), settings);
        Self {
            uid: ManifestUid(0),
            scopes: vec![Scope { id: Self::DEFAULT_SCOPE, name, collections: vec![collection] }],
            next_scope: FIRST_ID,
            next_collection: FIRST_ID,
        }
    }
}

/// Why the manifest was not changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unchanged {
    /// The scope or collection exists.
    Exists,
    /// There is no such scope or collection.
    Missing,
    /// It cannot be dropped, or the name is not allowed.
    Refused,
}

impl Manifest {
    pub(crate) const DEFAULT_SCOPE: ScopeId = ScopeId(0);
    const MAX_NAME_LEN: usize = 251;

    /// The manifest of an earlier process. `next_ids` are those of the next scope and collection.
    pub(super) const fn restored(
        uid: ManifestUid,
        scopes: Vec<Scope>,
        next_ids: (u32, u32),
    ) -> Self {
        let (next_scope, next_collection) = next_ids;
        Self { uid, scopes, next_scope, next_collection }
    }

    /// Ids of the next scope and of the next collection.
    pub(super) const fn next_ids(&self) -> (u32, u32) {
        (self.next_scope, self.next_collection)
    }

    pub(crate) const fn uid(&self) -> ManifestUid {
        self.uid
    }

    pub(crate) fn scopes(&self) -> &[Scope] {
        &self.scopes
    }

    pub(crate) fn scope(&self, id: ScopeId) -> Option<&Scope> {
        self.scopes.iter().find(|scope| scope.id == id)
    }

    /// The scope of that name; an empty one means the default scope.
    pub(crate) fn scope_named(&self, name: &[u8]) -> Option<&Scope> {
        let name = or_default(name);
        self.scopes.iter().find(|scope| scope.name.as_bytes() == name)
    }

    pub(crate) fn has_collection(&self, id: CollectionId) -> bool {
        self.scopes.iter().any(|scope| scope.collections.iter().any(|known| known.id == id))
    }

    /// Creates a scope.
    pub(crate) fn create_scope(&mut self, name: &str) -> Result<ScopeId, Unchanged> {
        if name != SYSTEM_SCOPE {
            check_name(name)?;
        }
        if self.scope_named(name.as_bytes()).is_some() {
            return Err(Unchanged::Exists);
        }
        let id = ScopeId(self.next_scope);
        self.next_scope += 1;
        self.scopes.push(Scope { id, name: name.to_owned(), collections: Vec::new() });
        self.uid.0 += 1;
        Ok(id)
    }

    /// Creates a collection.
    pub(crate) fn create_collection(
        &mut self,
        scope: &str,
        name: &str,
        settings: CollectionSettings,
    ) -> Result<CollectionId, Unchanged> {
        // Names in the system scope are not restricted.
        check_name(if scope == SYSTEM_SCOPE { name.trim_start_matches('_') } else { name })?;
        let id = CollectionId(self.next_collection);
        let scope = self.named_mut(scope)?;
        if scope.collections.iter().any(|known| known.name == name) {
            return Err(Unchanged::Exists);
        }
        scope.collections.push(Collection::new(id, name.to_owned(), settings));
        self.next_collection += 1;
        self.uid.0 += 1;
        Ok(id)
    }

    /// Drops a scope and its collections.
    pub(crate) fn drop_scope(&mut self, name: &str) -> Result<(), Unchanged> {
        if self.named_mut(name)?.id == Self::DEFAULT_SCOPE {
            return Err(Unchanged::Refused);
        }
        self.scopes.retain(|scope| scope.name != name);
        self.uid.0 += 1;
        Ok(())
    }

    /// Drops a collection; the default one cannot be created again.
    pub(crate) fn drop_collection(&mut self, scope: &str, name: &str) -> Result<(), Unchanged> {
        let collections = &mut self.named_mut(scope)?.collections;
        let before = collections.len();
        collections.retain(|known| known.name != name);
        if collections.len() == before {
            return Err(Unchanged::Missing);
        }
        self.uid.0 += 1;
        Ok(())
    }

    /// Changes the settings of a collection.
    pub(crate) fn modify_collection(
        &mut self,
        scope: &str,
        name: &str,
        settings: CollectionSettings,
    ) -> Result<(), Unchanged> {
        let collection = self.collection_mut(scope, name)?;
        if collection.settings != settings {
            collection.settings = settings;
            self.uid.0 += 1;
        }
        Ok(())
    }

    /// Empties a collection.
    pub(crate) fn flush_collection(&mut self, scope: &str, name: &str) -> Result<(), Unchanged> {
        let uid = ManifestUid(self.uid.0 + 1);
        self.collection_mut(scope, name)?.flush_uid = uid;
        self.uid = uid;
        Ok(())
    }

    fn collection_mut(&mut self, scope: &str, name: &str) -> Result<&mut Collection, Unchanged> {
        let mut collections = self.named_mut(scope)?.collections.iter_mut();
        collections.find(|known| known.name == name).ok_or(Unchanged::Missing)
    }

    fn named_mut(&mut self, name: &str) -> Result<&mut Scope, Unchanged> {
        self.scopes.iter_mut().find(|scope| scope.name == name).ok_or(Unchanged::Missing)
    }

    /// The manifest as sent to clients.
    pub(crate) fn to_json(&self) -> String {
        let collection = |collection: &Collection| {
            let mut members = Map::new();
            members.insert("name".to_owned(), collection.name.clone().into());
            members.insert("uid".to_owned(), collection.id.to_string().into());
            if let Some(max_ttl) = collection.settings.max_ttl {
                members.insert("maxTTL".to_owned(), max_ttl.into());
            }
            if collection.settings.history {
                members.insert("history".to_owned(), true.into());
            }
            if collection.flush_uid != ManifestUid(0) {
                members.insert("flush_uid".to_owned(), collection.flush_uid.to_string().into());
            }
            Value::Object(members)
        };
        let scope = |scope: &Scope| {
            let collections: Vec<Value> = scope.collections.iter().map(collection).collect();
            json!({"name": scope.name, "uid": scope.id.to_string(), "collections": collections})
        };
        let scopes: Vec<Value> = self.scopes.iter().map(scope).collect();
        json!({"uid": self.uid.to_string(), "scopes": scopes}).to_string()
    }
}

/// Names that begin with `_` or `%` are reserved for the system.
fn check_name(name: &str) -> Result<(), Unchanged> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"_-%".contains(&byte);
    let is_valid = !name.is_empty()
        && name.len() <= Manifest::MAX_NAME_LEN
        && !name.starts_with(['_', '%'])
        && name.bytes().all(is_allowed);
    if is_valid { Ok(()) } else { Err(Unchanged::Refused) }
}
