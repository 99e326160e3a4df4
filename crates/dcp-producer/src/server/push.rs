//! Cluster maps sent without being asked for.

use bytes::BytesMut;
use dcp_wire::Opaque;
use dcp_wire::message::{ClusterMapChange, PushedVersion};

use crate::kv::{MapPush, Session};

/// Appends the newest map, or its version, as the connection wants it.
pub(super) fn push_map(session: &Session, out: &mut BytesMut) {
    let map = session.cluster().map();
    let name = if session.has_bucket() { session.cluster().bucket_name().as_bytes() } else { &[] };
    let view = map.view(session.node());
    let config = match (session.features().map_push, view) {
        (MapPush::Full, Some(view)) if session.has_bucket() => view.bucket.as_ref(),
        (MapPush::Full, Some(view)) => view.global.as_ref(),
        _ => &[],
    };
    let change =
        ClusterMapChange { version: PushedVersion::EpochAndRev(map.version), bucket: name, config };
    let pushed = change.encode(Opaque(0), out);
    if let Err(error) = pushed {
        tracing::warn!(%error, "cannot push the cluster map");
    }
}
