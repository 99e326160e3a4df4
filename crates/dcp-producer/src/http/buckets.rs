//! The bucket made, emptied and dropped by clients.

use hyper::{Method, StatusCode};
use serde_json::json;

use super::form::{Answer, field};
use crate::Error;
use crate::cluster::Cluster;

/// Does what is asked for by a method, the path below `buckets`, of which the first part is the
/// bucket's name, and the form in the body; `None` if there is nothing like it.
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
