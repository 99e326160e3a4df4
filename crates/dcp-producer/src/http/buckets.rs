//! Creating, changing, flushing and dropping the bucket through the management port.

use hyper::{Method, StatusCode};
use serde_json::{Map, Value, json};

use super::documents;
use super::form::{Answer, field};
use crate::Error;
use crate::cluster::Cluster;

/// Lowest memory quota, as in servers.
const MIN_QUOTA_MB: usize = 100;

/// Settings that are decided when the cluster starts.
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

/// Applies a request; `None` if there is no such request. `path` is what follows `buckets` and starts
/// with the name of the bucket.
pub(super) fn change(
    cluster: &Cluster,
    node: usize,
    method: &Method,
    path: &[&str],
    form: &[u8],
) -> Option<Answer> {
    let is_there = || cluster.map().bucket_uuid.is_some();
    match (method, path) {
        (&Method::POST, []) => Some(create(cluster, form)),
        (_, [_] | [_, "controller", "doFlush"]) if !is_there() => {
            Some((StatusCode::NOT_FOUND, "Requested resource not found.\r\n".to_owned()))
        }
        (&Method::POST, [_]) => Some(update(cluster, node, form)),
        (&Method::DELETE, [_]) => Some(done(cluster.drop_bucket())),
        (&Method::POST, [_, "controller", "doFlush"]) if !cluster.may_flush() => {
            let why = json!({"_": "Flush is disabled for the bucket"});
            Some((StatusCode::BAD_REQUEST, why.to_string()))
        }
        (&Method::POST, [_, "controller", "doFlush"]) => Some(done(cluster.flush_bucket())),
        _ => None,
    }
}

fn create(cluster: &Cluster, form: &[u8]) -> Answer {
    let name = cluster.bucket_name();
    if field(form, "name").unwrap_or_default() != name {
        let why = format!(
            "an embedded cluster has one bucket, called '{name}'; start another cluster for another"
        );
        return refused("name", &why);
    }
    let settings = match Settings::read(form) {
        Ok(settings) => settings,
        Err((field, why)) => return refused(field, &why),
    };
    match cluster.create_bucket() {
        Ok(()) => {
            // Servers refuse to flush a bucket unless that was asked for.
            Settings { flush: settings.flush.or(Some(false)), ..settings }.apply(cluster);
            (StatusCode::ACCEPTED, String::new())
        }
        Err(Error::BucketExists) => refused("name", "Bucket with given name already exists"),
        Err(error) => refused("name", &error.to_string()),
    }
}

/// Changes all of the settings in the form, or none.
fn update(cluster: &Cluster, node: usize, form: &[u8]) -> Answer {
    let bucket = documents::full_bucket(cluster, node).unwrap_or_default();
    for name in FIXED {
        if let Some(wanted) = field(form, name)
            && let Some(value) = bucket.get(name)
            && !is_same(value, &wanted)
        {
            let why = format!("an embedded cluster cannot change this setting, which is {value}");
            return refused(name, &why);
        }
    }
    match Settings::read(form) {
        Ok(settings) => {
            settings.apply(cluster);
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

    fn apply(&self, cluster: &Cluster) {
        if let Some(quota_mb) = self.quota_mb {
            cluster.bucket.memory().set_quota(quota_mb << 20);
        }
        if let Some(flush) = self.flush {
            cluster.allow_flush(flush);
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
