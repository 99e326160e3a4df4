//! The collections manifest: names and ids of a bucket's scopes and collections.

use dcp_wire::{CollectionId, ManifestUid, ScopeId};
use rustc_hash::FxHashMap;
use serde::Deserialize;
use thiserror::Error;

use super::MAX_CONFIG_LEN;
use super::at_most::AtMost;

/// Why JSON is not a collections manifest.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidManifest {
    /// The document is longer than [`MAX_CONFIG_LEN`].
    #[error("collections manifest of {len} bytes exceeds the limit of {MAX_CONFIG_LEN} bytes")]
    TooLarge {
        /// Its length in bytes.
        len: usize,
    },
    /// Not JSON, or a member missing or of the wrong type.
    #[error("collections manifest is not valid: line {line}, column {column}")]
    Json {
        /// Line of the fault, from 1.
        line: usize,
        /// Column of the fault, from 1.
        column: usize,
    },
    /// An id is not a hexadecimal number that fits.
    #[error("collections manifest has an invalid {0}")]
    Id(&'static str),
    /// Two entries have the same id.
    #[error("collections manifest names {0} twice")]
    Duplicate(&'static str),
}

/// Most scopes of a bucket, and most collections; servers allow a thousand or so.
const MAX_ENTRIES: usize = 50_000;

/// A scope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScopeEntry {
    /// Identity of the scope.
    pub id: ScopeId,
    /// Its name.
    pub name: String,
}

/// A collection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectionEntry {
    /// Identity of the collection.
    pub id: CollectionId,
    /// Its name within the scope.
    pub name: String,
    /// Its scope.
    pub scope_id: ScopeId,
    /// Seconds after which its documents expire, if the manifest has them.
    pub max_ttl: Option<u32>,
}

/// Names and ids of a bucket's scopes and collections at one moment (server page "Collections").
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    uid: ManifestUid,
    scopes: FxHashMap<ScopeId, ScopeEntry>,
    collections: FxHashMap<CollectionId, CollectionEntry>,
}

#[derive(Deserialize)]
struct ManifestJson {
    uid: String,
    #[serde(default)]
    scopes: AtMost<ScopeJson, MAX_ENTRIES>,
}

#[derive(Deserialize)]
struct ScopeJson {
    name: String,
    uid: String,
    #[serde(default)]
    collections: AtMost<CollectionJson, MAX_ENTRIES>,
}

#[derive(Deserialize)]
struct CollectionJson {
    name: String,
    uid: String,
    #[serde(rename = "maxTTL")]
    max_ttl: Option<u32>,
}

impl Default for Manifest {
    /// The manifest of a bucket without collections: `_default._default`.
    fn default() -> Self {
        let scope_id = ScopeId(0);
        let name = || "_default".to_owned();
        let collection =
            CollectionEntry { id: CollectionId::DEFAULT, name: name(), scope_id, max_ttl: None };
        Self {
            uid: ManifestUid(0),
            scopes: [(scope_id, ScopeEntry { id: scope_id, name: name() })].into_iter().collect(),
            collections: [(CollectionId::DEFAULT, collection)].into_iter().collect(),
        }
    }
}

impl Manifest {
    /// Reads the answer to GET_COLLECTIONS_MANIFEST.
    ///
    /// # Errors
    /// [`InvalidManifest`] if it is not one.
    pub fn parse(json: &[u8]) -> Result<Self, InvalidManifest> {
        if json.len() > MAX_CONFIG_LEN {
            return Err(InvalidManifest::TooLarge { len: json.len() });
        }
        let json: ManifestJson = serde_json::from_slice(json).map_err(|error| {
            InvalidManifest::Json { line: error.line(), column: error.column() }
        })?;
        if json.scopes.0.iter().map(|scope| scope.collections.0.len()).sum::<usize>() > MAX_ENTRIES
        {
            return Err(InvalidManifest::Id("number of collections"));
        }
        let mut manifest = Self {
            uid: ManifestUid(hex(&json.uid, "uid")?),
            scopes: FxHashMap::default(),
            collections: FxHashMap::default(),
        };
        for scope in json.scopes.0 {
            manifest.add_scope(scope)?;
        }
        Ok(manifest)
    }

    fn add_scope(&mut self, json: ScopeJson) -> Result<(), InvalidManifest> {
        let scope_id = ScopeId(id(&json.uid, "scope uid")?);
        for json in json.collections.0 {
            let id = CollectionId(id(&json.uid, "collection uid")?);
            let max_ttl = json.max_ttl;
            let entry = CollectionEntry { id, name: json.name, scope_id, max_ttl };
            if self.collections.insert(id, entry).is_some() {
                return Err(InvalidManifest::Duplicate("a collection"));
            }
        }
        let entry = ScopeEntry { id: scope_id, name: json.name };
        if self.scopes.insert(scope_id, entry).is_some() {
            return Err(InvalidManifest::Duplicate("a scope"));
        }
        Ok(())
    }

    /// Version of the manifest.
    #[must_use]
    pub const fn uid(&self) -> ManifestUid {
        self.uid
    }

    /// The collection with an id.
    #[must_use]
    pub fn collection(&self, id: CollectionId) -> Option<&CollectionEntry> {
        self.collections.get(&id)
    }

    /// The scope with an id.
    #[must_use]
    pub fn scope(&self, id: ScopeId) -> Option<&ScopeEntry> {
        self.scopes.get(&id)
    }

    /// Scope and collection name of a collection.
    #[must_use]
    pub fn names(&self, id: CollectionId) -> Option<(&str, &str)> {
        let collection = self.collection(id)?;
        Some((&self.scope(collection.scope_id)?.name, &collection.name))
    }

    /// The scope with a name.
    #[must_use]
    pub fn scope_named(&self, name: &str) -> Option<&ScopeEntry> {
        self.scopes.values().find(|scope| scope.name == name)
    }

    /// The collection with a scope's and its own name.
    #[must_use]
    pub fn collection_named(&self, scope: &str, name: &str) -> Option<&CollectionEntry> {
        let scope_id = self.scope_named(scope)?.id;
        self.collections.values().find(|entry| entry.scope_id == scope_id && entry.name == name)
    }

    /// All scopes, in no order.
    pub fn scopes(&self) -> impl Iterator<Item = &ScopeEntry> {
        self.scopes.values()
    }

    /// All collections, in no order.
    pub fn collections(&self) -> impl Iterator<Item = &CollectionEntry> {
        self.collections.values()
    }
}

/// A number in the server's format: hexadecimal, without a prefix.
fn hex(text: &str, what: &'static str) -> Result<u64, InvalidManifest> {
    u64::from_str_radix(text, 16).map_err(|_| InvalidManifest::Id(what))
}

fn id(text: &str, what: &'static str) -> Result<u32, InvalidManifest> {
    u32::try_from(hex(text, what)?).map_err(|_| InvalidManifest::Id(what))
}
