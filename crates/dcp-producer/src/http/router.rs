//! Routing of requests.

use std::borrow::Cow;
use std::sync::Arc;

use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use percent_encoding::percent_decode_str;

use super::Management;
use super::authorization;
use super::body::{Body, Follower};
use super::buckets;
use super::documents::{self, Detail};
use super::scopes::Change;

const JSON: HeaderValue = HeaderValue::from_static("application/json");
const TEXT: HeaderValue = HeaderValue::from_static("text/plain");
const REALM: HeaderValue =
    HeaderValue::from_static("Basic realm=\"Couchbase Server Admin / REST\"");
const NO_CACHE: HeaderValue = HeaderValue::from_static("no-cache,no-store,must-revalidate");
const READ_ONLY: HeaderValue = HeaderValue::from_static("GET, HEAD");
const SERVER: HeaderValue = HeaderValue::from_static("Couchbase Server");

impl Management {
    /// The answer to a request with the body `form`, or one that is too long.
    pub(super) fn answer<B>(
        &self,
        request: &Request<B>,
        form: Option<&[u8]>,
        is_certified: bool,
    ) -> Response<Body> {
        let known =
            is_certified || authorization::is_authorized(request.headers(), &self.credentials);
        let mut response = if !known {
            let mut refused = text(StatusCode::UNAUTHORIZED, "");
            refused.headers_mut().insert(header::WWW_AUTHENTICATE, REALM);
            refused
        } else if let Some(changed) = self.change(request, form) {
            changed
        } else if !matches!(*request.method(), Method::GET | Method::HEAD) {
            let mut refused = text(StatusCode::METHOD_NOT_ALLOWED, "Method Not Allowed");
            refused.headers_mut().insert(header::ALLOW, READ_ONLY);
            refused
        } else {
            self.route(request.uri()).unwrap_or_else(not_found)
        };
        let headers = response.headers_mut();
        headers.insert(header::SERVER, SERVER);
        headers.insert(header::CACHE_CONTROL, NO_CACHE);
        response
    }

    /// Changes buckets, scopes and collections; `None` if the request is not one that does.
    fn change<B>(&self, request: &Request<B>, form: Option<&[u8]>) -> Option<Response<Body>> {
        let method = request.method();
        if !matches!(*method, Method::POST | Method::PATCH | Method::DELETE) {
            return None;
        }
        let segments = segments(request.uri())?;
        let segments: Vec<_> = segments.iter().map(AsRef::as_ref).collect();
        let ["pools", "default", "buckets", ref path @ ..] = *segments else {
            return None;
        };
        let Some(form) = form else {
            return Some(text(StatusCode::PAYLOAD_TOO_LARGE, "The form is too long.\r\n"));
        };
        let cluster = &*self.cluster;
        let (status, document) = match *path {
            [] if *method == Method::POST => buckets::create(cluster, form),
            [] => return None,
            [bucket, ref path @ ..] => {
                let Some(served) = cluster.bucket_named(bucket.as_bytes()) else {
                    return Some(not_found());
                };
                match *path {
                    ["scopes", ref path @ ..] => {
                        Change { method, path, form }.apply(cluster, &served)?
                    }
                    _ => buckets::change(cluster, &served, self.node, method, path, form)?,
                }
            }
        };
        let mut response = json(document);
        *response.status_mut() = status;
        Some(response)
    }

    /// `None` if there is nothing at that address.
    fn route(&self, uri: &Uri) -> Option<Response<Body>> {
        let (cluster, node) = (&*self.cluster, self.node);
        let segments = segments(uri)?;
        let segments: Vec<_> = segments.iter().map(AsRef::as_ref).collect();
        match *segments {
            ["pools"] => Some(json(documents::pools(cluster))),
            ["pools", "default"] => documents::pool(cluster, node).map(json),
            ["pools", "default", "nodeServices"] => {
                documents::node_services(cluster, node).map(json)
            }
            ["pools", "default", "buckets"] => documents::buckets(cluster, node).map(json),
            ["pools", "default", kind, bucket] => self.bucket(kind, bucket, uri),
            ["pools", "default", "buckets", bucket, "scopes"] => {
                let served = cluster.bucket_named(bucket.as_bytes())?;
                Some(json(served.manifest().to_json()))
            }
            // A bucket without views; 404 would mean that the bucket does not exist.
            ["pools", "default", "buckets", bucket, "ddocs"] => {
                cluster.bucket_named(bucket.as_bytes())?;
                let mut response = json(documents::no_views());
                *response.status_mut() = StatusCode::BAD_REQUEST;
                Some(response)
            }
            // The answer of servers without roles, which SDKs recognise.
            ["settings", "rbac", ..] => Some(text(StatusCode::NOT_FOUND, "Not found.")),
            ["whoami"] => Some(json(documents::whoami(self.credentials.username()))),
            _ => None,
        }
    }

    fn bucket(&self, kind: &str, bucket: &str, uri: &Uri) -> Option<Response<Body>> {
        let (detail, follow) = match kind {
            "b" => (Detail::Terse, false),
            "buckets" => (Detail::Full, false),
            "bs" => (Detail::Terse, true),
            "bucketsStreaming" => (Detail::Full, true),
            _ => return None,
        };
        let served = self.cluster.bucket_named(bucket.as_bytes())?;
        if asked_uuid(uri).is_some_and(|uuid| uuid != served.uuid()) {
            let reason = "Bucket uuid does not match the requested.\r\n";
            return Some(text(StatusCode::NOT_FOUND, reason));
        }
        let document = documents::bucket(&self.cluster, &served, self.node, detail)?;
        if !follow {
            return Some(json(document));
        }
        let follower =
            Follower::new(Arc::clone(&self.cluster), served, self.node, detail, self.stop.clone());
        let mut response = Response::new(Body::configs(follower));
        response.headers_mut().insert(header::CONTENT_TYPE, JSON);
        Some(response)
    }
}

/// The decoded segments of a path; `None` unless they are UTF-8.
fn segments(uri: &Uri) -> Option<Vec<Cow<'_, str>>> {
    let segments = uri.path().split('/').filter(|segment| !segment.is_empty());
    segments.map(decode).collect()
}

/// A decoded segment of a path; `None` unless it is UTF-8.
fn decode(segment: &str) -> Option<Cow<'_, str>> {
    percent_decode_str(segment).decode_utf8().ok()
}

/// The bucket UUID that the client requires.
fn asked_uuid(uri: &Uri) -> Option<&str> {
    uri.query()?.split('&').find_map(|pair| pair.strip_prefix("bucket_uuid="))
}

fn json(document: String) -> Response<Body> {
    let mut response = Response::new(Body::from(document));
    response.headers_mut().insert(header::CONTENT_TYPE, JSON);
    response
}

fn not_found() -> Response<Body> {
    text(StatusCode::NOT_FOUND, "Requested resource not found.\r\n")
}

fn text(status: StatusCode, text: &str) -> Response<Body> {
    let mut response = Response::new(Body::from(text.to_owned()));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, TEXT);
    response
}
