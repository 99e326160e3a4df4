//! Creating, changing, flushing and dropping buckets through the management port.

use std::sync::Arc;

use hyper::{Method, StatusCode};
use serde_json::{Map, Value, json};

use super::documents::{self, fixed};
use super::form::{Answer, field};
use crate::cluster::{BucketSettings, Cluster, ServedBucket};
use crate::{Error, ProducerOptions};

/// Lowest memory quota, as in servers.
const MIN_QUOTA_MB: usize = 100;

/// Settings that are decided when a bucket is created; most are those of the cluster.
const FIXED: [&str; 9] = [
    "bucketType",
    "compressionMode",
    "conflictResolutionType",
    "durabilityMinLevel",
    "evictionPolicy",
    "maxTTL",
    "replicaIndex",
    "replicaNumber",
    "storageBackend",
];

/// Settings that change documents or writes: a new bucket with another value than the cluster has is
/// refused. Other settings that it lacks are ignored, since clients notice no difference.
const BINDING: [&str; 3] = ["conflictResolutionType", "durabilityMinLevel", "maxTTL"];

/// Applies a request about a bucket; `None` if there is no such request. `path` is what follows the
/// name of the bucket.
pub(super) fn change(
    cluster: &Cluster,
    served: &Arc<ServedBucket>,
    node: usize,
    method: &Method,
    path: &[&str],
    form: &[u8],
) -> Option<Answer> {
    match (method, path) {
        (&Method::POST, []) => Some(update(cluster, served, node, form)),
        (&Method::DELETE, []) => Some(done(cluster.drop_bucket(served))),
        (&Method::POST, ["controller", "doFlush"]) if !served.may_flush() => {
            let why = json!({"_": "Flush is disabled for the bucket"});
            Some((StatusCode::BAD_REQUEST, why.to_string()))
        }
        (&Method::POST, ["controller", "doFlush"]) => Some(done(cluster.flush_bucket(served))),
        _ => None,
    }
}

/// Creates a bucket.
pub(super) fn create(cluster: &Cluster, form: &[u8]) -> Answer {
    let settings = match new_settings(cluster.default_settings(), form) {
        Ok(settings) => settings,
        Err((field, why)) => return refused(field, &why),
    };
    match cluster.create_bucket(&settings) {
        Ok(()) => (StatusCode::ACCEPTED, String::new()),
        Err(Error::BucketExists) => refused("name", "Bucket with given name already exists"),
        Err(error) => refused("name", &error.to_string()),
    }
}

/// The settings of a new bucket; the field that is wrong, and why.
fn new_settings(
    defaults: &BucketSettings,
    form: &[u8],
) -> Result<BucketSettings, (&'static str, String)> {
    let name = field(form, "name").unwrap_or_default();
    if !ProducerOptions::is_bucket_name(&name) {
        return Err(("name", ProducerOptions::BUCKET_NAME.to_owned()));
    }
    let is_ephemeral = match field(form, "bucketType").as_deref() {
        None => defaults.is_ephemeral,
        Some("membase" | "couchbase") => false,
        Some("ephemeral") => true,
        Some(_) => return Err(("bucketType", "must be `membase` or `ephemeral`".to_owned())),
    };
    let most = ProducerOptions::MAX_REPLICAS;
    let replicas = match field(form, "replicaNumber").map(|text| text.parse()) {
        None => defaults.replicas,
        Some(Ok(replicas)) if replicas <= most => replicas,
        Some(_) => return Err(("replicaNumber", format!("must be 0 to {most}"))),
    };
    let fixed = fixed(is_ephemeral);
    for name in BINDING {
        if let (Some(wanted), Some(value)) = (field(form, name), fixed.get(name)) {
            expect(name, value, &wanted)?;
        }
    }
    let Settings { quota_mb, flush } = Settings::read(form)?;
    Ok(BucketSettings {
        name,
        replicas,
        is_ephemeral,
        quota_bytes: quota_mb.map_or(defaults.quota_bytes, |quota_mb| quota_mb << 20),
        // Servers refuse to flush a bucket unless that was asked for.
        may_flush: flush.unwrap_or(false),
    })
}

/// Refuses another value of a setting than the one it has.
fn expect(name: &'static str, value: &Value, wanted: &str) -> Result<(), (&'static str, String)> {
    if is_same(value, wanted) {
        return Ok(());
    }
    Err((name, format!("an embedded cluster cannot change this setting, which is {value}")))
}

/// Changes all of the settings in the form, or none.
fn update(cluster: &Cluster, served: &ServedBucket, node: usize, form: &[u8]) -> Answer {
    let bucket = documents::full_bucket(cluster, served, node).unwrap_or_default();
    for name in FIXED {
        if let (Some(wanted), Some(value)) = (field(form, name), bucket.get(name))
            && let Err((field, why)) = expect(name, value, &wanted)
        {
            return refused(field, &why);
        }
    }
    match Settings::read(form) {
        Ok(settings) => {
            settings.apply(served);
            (StatusCode::OK, String::new())
        }
        Err((field, why)) => refused(field, &why),
    }
}

/// Whether a field of a form has the value of a setting.
fn is_same(value: &Value, wanted: &str) -> bool {
    match value {
        Value::Bool(value) => wanted == if *value { "1" } else { "0" },
        Value::String(value) if value == "membase" => matches!(wanted, "membase" | "couchbase"),
        Value::String(value) => wanted == value,
        Value::Number(value) => wanted == value.to_string(),
        _ => false,
    }
}

/// Settings that clients can change.
struct Settings {
    /// Memory quota in MiB.
    quota_mb: Option<usize>,
    flush: Option<bool>,
}

impl Settings {
    /// The settings in a form; the field that is wrong, and why.
    fn read(form: &[u8]) -> Result<Self, (&'static str, String)> {
        let (quota, flush) = ("ramQuotaMB", "flushEnabled");
        let most = usize::MAX >> 20;
        let quota_mb = field(form, quota).map(|text| match text.parse() {
            Ok(quota_mb) if (MIN_QUOTA_MB..=most).contains(&quota_mb) => Ok(quota_mb),
            _ => Err((quota, format!("the quota must be {MIN_QUOTA_MB} to {most} MiB"))),
        });
        let flush = field(form, flush).map(|text| match &*text {
            "0" | "false" => Ok(false),
            "1" | "true" => Ok(true),
            _ => Err((flush, "must be 0 or 1".to_owned())),
        });
        Ok(Self { quota_mb: quota_mb.transpose()?, flush: flush.transpose()? })
    }

    fn apply(&self, served: &ServedBucket) {
        if let Some(quota_mb) = self.quota_mb {
            served.bucket.memory().set_quota(quota_mb << 20);
        }
        if let Some(flush) = self.flush {
            served.allow_flush(flush);
        }
    }
}

fn done(result: Result<(), Error>) -> Answer {
    match result {
        Ok(()) => (StatusCode::OK, String::new()),
        Err(error) => refused("name", &error.to_string()),
    }
}

fn refused(field: &str, why: &str) -> Answer {
    let errors = Map::from_iter([(field.to_owned(), why.into())]);
    (StatusCode::BAD_REQUEST, json!({"errors": errors}).to_string())
}
