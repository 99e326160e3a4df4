//! Cluster maps sent without being asked for.

use bytes::{BufMut, BytesMut};
use dcp_wire::{Datatype, Frame, Opcode};

use crate::kv::{MapPush, Session};

/// Appends the newest map, or its version, as the connection wants it.
pub(super) fn push_map(session: &Session, out: &mut BytesMut) {
    let map = session.cluster().map();
    let mut extras = [0; 16];
    let mut cursor = extras.as_mut_slice();
    cursor.put_i64(map.version.epoch);
    cursor.put_i64(map.version.rev);
    let name = if session.has_bucket() { session.cluster().bucket_name.as_bytes() } else { &[] };
    let view = map.view(session.node());
    let config = match (session.features().map_push, view) {
        (MapPush::Full, Some(view)) if session.has_bucket() => view.bucket.as_ref(),
        (MapPush::Full, Some(view)) => view.global.as_ref(),
        _ => &[],
    };
    let json = session.features().json && !config.is_empty();
    let pushed = Frame::server_request(Opcode::CLUSTER_MAP_CHANGE)
        .with_datatype(if json { Datatype::JSON } else { Datatype::RAW })
        .with_extras(&extras)
        .with_key(name)
        .with_value(config)
        .encode(out);
    if let Err(error) = pushed {
        tracing::warn!(%error, "cannot push the cluster map");
    }
}
