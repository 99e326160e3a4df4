//! Properties of items, and conversions between their forms.

use std::sync::Arc;

use bytes::{BufMut, Bytes, BytesMut};
use dcp_producer_proto::{Item, ItemKind};
use dcp_wire::{Datatype, snappy, xattr};

use crate::chance::Now;

/// Longest value in bytes: 20 MiB of document and 1 MiB of system xattrs.
pub(crate) const MAX_VALUE_LEN: usize = 21 << 20;

/// Approximate bytes of an item: itself, its counters, key and value, its entries in table and
/// image.
pub(super) fn footprint(item: &Item) -> usize {
    const PLACES: usize = 48;
    size_of::<Item>() + PLACES + item.key.len() + item.value.len()
}

/// Whether a live document's time has passed.
pub(super) fn is_expired(item: &Item, now: Now) -> bool {
    item.kind == ItemKind::Mutation && item.expiry != 0 && item.expiry <= now.seconds()
}

/// The item with its value inflated.
pub(crate) fn inflated(item: &Arc<Item>) -> Arc<Item> {
    if !item.datatype.contains(Datatype::SNAPPY) {
        return Arc::clone(item);
    }
    // Values that do not decompress are never stored.
    let Ok(value) = snappy::decompress(&item.value, MAX_VALUE_LEN) else {
        return Arc::clone(item);
    };
    let datatype = item.datatype.without(Datatype::SNAPPY);
    Arc::new(Item { value: value.into(), datatype, ..Item::clone(item) })
}

/// The item with its value compressed, even if that does not make it smaller.
pub(super) fn compressed(item: Arc<Item>) -> Arc<Item> {
    let is_document = matches!(item.kind, ItemKind::Mutation);
    if !is_document || item.value.is_empty() || item.datatype.contains(Datatype::SNAPPY) {
        return item;
    }
    let Ok(value) = snappy::compress(&item.value) else {
        return item;
    };
    let Item { seqno, rev_seqno, cas, collection_id, flags, expiry, delete_time, .. } = *item;
    Arc::new(Item {
        kind: ItemKind::Mutation,
        seqno,
        rev_seqno,
        cas,
        collection_id,
        // The first clone of a key or a value allocates what is kept as long as the item.
        key: Bytes::copy_from_slice(&item.key),
        value: value.into(),
        datatype: item.datatype.with(Datatype::SNAPPY),
        flags,
        expiry,
        delete_time,
    })
}

/// The xattr section that outlives a document; empty if there is none.
pub(crate) fn system_xattrs(item: &Item) -> Bytes {
    if !item.datatype.contains(Datatype::XATTR) {
        return Bytes::new();
    }
    let Ok((xattrs, _)) = xattr::split(&item.value) else {
        return Bytes::new();
    };
    let system: Vec<_> = xattrs.flatten().filter(xattr::Xattr::is_system).collect();
    let mut out = BytesMut::new().limit(MAX_VALUE_LEN);
    if system.is_empty() || xattr::encode(system, &mut out).is_err() {
        return Bytes::new();
    }
    out.into_inner().freeze()
}
