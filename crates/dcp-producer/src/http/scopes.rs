//! Creation, change and drop of scopes and collections by clients.

use hyper::{Method, StatusCode};
use serde_json::json;

use super::form::{Answer, field};
use crate::bucket::{CollectionSettings, Manifest, Unchanged};
use crate::cluster::{Cluster, ServedBucket};

/// A request: a method, the path below a bucket's `scopes`, and the form in the body.
pub(super) struct Change<'a> {
    pub(super) method: &'a Method,
    pub(super) path: &'a [&'a str],
    pub(super) form: &'a [u8],
}

impl Change<'_> {
    /// Applies the request; `None` if there is no such request.
    pub(super) fn apply(&self, cluster: &Cluster, served: &ServedBucket) -> Option<Answer> {
        let update =
            |op: &dyn Fn(&mut Manifest) -> Result<(), Unchanged>| update(cluster, served, op);
        let field = |name: &str| field(self.form, name);
        let settings = CollectionSettings {
            max_ttl: field("maxTTL").and_then(|text| text.parse().ok()).filter(|ttl| *ttl > 0),
            history: field("history").is_some_and(|text| text == "true"),
        };
        let (name, manifest) = (field("name").unwrap_or_default(), served.manifest());
        let unchanged = match (self.method, self.path) {
            (&Method::POST, []) if has(&manifest, &name, None) => exists("Scope", &name),
            (&Method::POST, []) => update(&|manifest| manifest.create_scope(&name).map(drop)),
            (&Method::DELETE, [scope]) if !has(&manifest, scope, None) => missing("Scope", scope),
            (&Method::DELETE, [scope]) => update(&|manifest| manifest.drop_scope(scope)),
            (_, [scope, "collections", ..]) if !has(&manifest, scope, None) => {
                missing("Scope", scope)
            }
            (&Method::POST, [scope, "collections"]) if has(&manifest, scope, Some(&name)) => {
                exists("Collection", &name)
            }
            (&Method::POST, [scope, "collections"]) => {
                update(&|manifest| manifest.create_collection(scope, &name, settings).map(drop))
            }
            (_, [scope, "collections", name]) if !has(&manifest, scope, Some(name)) => {
                missing("Collection", name)
            }
            (&Method::DELETE, [scope, "collections", name]) => {
                update(&|manifest| manifest.drop_collection(scope, name))
            }
            (&Method::PATCH, [scope, "collections", name]) => {
                update(&|manifest| manifest.modify_collection(scope, name, settings).map(drop))
            }
            _ => return None,
        };
        Some(unchanged.unwrap_or_else(|| {
            let uid = served.manifest().uid().to_string();
            (StatusCode::OK, json!({"uid": uid}).to_string())
        }))
    }
}

/// Whether there is a scope, or a collection in it.
fn has(manifest: &Manifest, scope: &str, collection: Option<&str>) -> bool {
    manifest.scopes().iter().filter(|known| known.name == scope).any(|scope| {
        collection.is_none_or(|name| scope.collections.iter().any(|known| known.name == name))
    })
}

/// Changes the manifest; `None` on success.
fn update(
    cluster: &Cluster,
    served: &ServedBucket,
    op: impl FnOnce(&mut Manifest) -> Result<(), Unchanged>,
) -> Option<Answer> {
    let error = cluster.update_manifest(served, cluster.chance().now(), op).err()?;
    Some(refused(StatusCode::BAD_REQUEST, &error.to_string()))
}

fn exists(what: &str, name: &str) -> Option<Answer> {
    let text = format!("{what} with name \"{name}\" already exists");
    Some(refused(StatusCode::BAD_REQUEST, &text))
}

fn missing(what: &str, name: &str) -> Option<Answer> {
    Some(refused(StatusCode::NOT_FOUND, &format!("{what} with name \"{name}\" is not found")))
}

fn refused(status: StatusCode, text: &str) -> Answer {
    (status, json!({"errors": {"_": text}}).to_string())
}
