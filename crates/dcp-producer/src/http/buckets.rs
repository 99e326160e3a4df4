//! Creating, flushing and dropping the bucket through the management port.

use hyper::{Method, StatusCode};
use serde_json::json;

use super::form::{Answer, field};
use crate::Error;
use crate::cluster::Cluster;

/// Applies a request; `None` if there is no such request. `path` is what follows `buckets` and starts
/// with the name of the bucket.
pub(super) fn change(
    cluster: &Cluster,
    method: &Method,
    path: &[&str],
    form: &[u8],
) -> Option<Answer> {
    let is_there = || cluster.map().bucket_uuid.is_some();
    match (method, path) {
        (&Method::POST, []) => Some(create(cluster, &field(form, "name").unwrap_or_default())),
        (_, [_] | [_, "controller", "doFlush"]) if !is_there() => {
            Some((StatusCode::NOT_FOUND, "Requested resource not found.\r\n".to_owned()))
        }
        (&Method::DELETE, [_]) => Some(done(cluster.drop_bucket())),
        (&Method::POST, [_, "controller", "doFlush"]) => Some(done(cluster.flush_bucket())),
        _ => None,
    }
}

fn create(cluster: &Cluster, asked: &str) -> Answer {
    let name = cluster.bucket_name();
    if asked != name {
        return refused(&format!(
            "an embedded cluster has one bucket, called '{name}'; start another cluster for another"
        ));
    }
    match cluster.create_bucket() {
        Ok(()) => (StatusCode::ACCEPTED, String::new()),
        Err(Error::BucketExists) => refused("Bucket with given name already exists"),
        Err(error) => refused(&error.to_string()),
    }
}

fn done(result: Result<(), Error>) -> Answer {
    match result {
        Ok(()) => (StatusCode::OK, String::new()),
        Err(error) => refused(&error.to_string()),
    }
}

fn refused(why: &str) -> Answer {
    (StatusCode::BAD_REQUEST, json!({"errors": {"name": why}}).to_string())
}
