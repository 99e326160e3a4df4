//! The collections manifest in a data folder.

use dcp_wire::{CollectionId, ManifestUid, ScopeId};
use serde_json::{Value, json};

use super::manifest::{Collection, CollectionSettings, Manifest, Scope};

impl Manifest {
    /// The manifest and the state needed to continue it.
    pub(crate) fn to_stored(&self) -> Value {
        let manifest = serde_json::from_str::<Value>(&self.to_json()).unwrap_or_default();
        let (next_scope, next_collection) = self.next_ids();
        json!({
            "manifest": manifest,
            "next_scope": next_scope,
            "next_collection": next_collection,
        })
    }

    /// The stored manifest; `None` if it is not valid.
    pub(crate) fn from_stored(stored: &Value) -> Option<Self> {
        let number = |name: &str| u32::try_from(stored.get(name)?.as_u64()?).ok();
        let manifest = stored.get("manifest")?;
        let uid = ManifestUid(hex(manifest.get("uid")?)?);
        let scopes: Option<Vec<_>> =
            manifest.get("scopes")?.as_array()?.iter().map(scope).collect();
        Some(Self::restored(uid, scopes?, (number("next_scope")?, number("next_collection")?)))
    }
}

fn scope(stored: &Value) -> Option<Scope> {
    let collections: Option<Vec<_>> =
        stored.get("collections")?.as_array()?.iter().map(collection).collect();
    let id = ScopeId(u32::try_from(hex(stored.get("uid")?)?).ok()?);
    Some(Scope { id, name: name(stored)?, collections: collections? })
}

fn collection(stored: &Value) -> Option<Collection> {
    let id = CollectionId(u32::try_from(hex(stored.get("uid")?)?).ok()?);
    let max_ttl = stored.get("maxTTL").and_then(Value::as_u64);
    let max_ttl = max_ttl.map(u32::try_from).transpose().ok()?;
    let history = stored.get("history").and_then(Value::as_bool).unwrap_or_default();
    let flush_uid = stored.get("flush_uid").map_or(Some(0), hex)?;
    let settings = CollectionSettings { max_ttl, history };
    Some(Collection { id, name: name(stored)?, settings, flush_uid: ManifestUid(flush_uid) })
}

fn name(stored: &Value) -> Option<String> {
    Some(stored.get("name")?.as_str()?.to_owned())
}

/// Uids are hex digits.
fn hex(uid: &Value) -> Option<u64> {
    u64::from_str_radix(uid.as_str()?, 16).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manifest_comes_back_with_its_ids_and_those_to_come() {
        let mut manifest = Manifest::default();
        manifest.create_scope("shop").unwrap();
        let settings = CollectionSettings { max_ttl: Some(60), history: true };
        manifest.create_collection("shop", "carts", CollectionSettings::default()).unwrap();
        manifest.create_collection("shop", "items", settings).unwrap();
        manifest.flush_collection("shop", "items").unwrap();
        manifest.drop_collection("shop", "carts").unwrap();
        manifest.drop_collection("_default", "_default").unwrap();
        assert_eq!(Manifest::from_stored(&manifest.to_stored()), Some(manifest));
        assert_eq!(Manifest::from_stored(&json!({"manifest": {}})), None);
    }
}
