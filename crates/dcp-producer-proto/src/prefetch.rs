//! Prefetches memory.
//!
//! Documents are scattered over more memory than fits into the caches. Reading one after the other
//! waits for each item, then its key, then its value; prefetched, they arrive while earlier
//! documents are sent.

use super::Item;

/// Size of a cache line in bytes.
const CACHE_LINE: usize = 64;

/// Bytes of each value that are prefetched; the processor prefetches the rest by itself.
const MAX_BYTES: usize = 2048;

/// Prefetches the item, which points to its key and value.
#[inline]
pub(super) fn item(item: &Item) {
    place(&item.seqno);
    place(&item.delete_time);
    place(&item.key);
    place(&item.value);
}

/// Prefetches an item's key and value; waits for the item itself.
#[inline]
pub(super) fn contents(item: &Item) {
    if let Some(first) = item.key.first() {
        place(first);
    }
    let value = item.value.get(..MAX_BYTES).unwrap_or(&item.value);
    for line in value.iter().step_by(CACHE_LINE) {
        place(line);
    }
}

/// Prefetches the memory at `place`.
#[cfg(target_arch = "x86_64")]
#[inline]
fn place<T>(place: &T) {
    // Into the L2 cache: L1 is too small for it.
    safe_arch::prefetch_t1(place);
}

/// Other processors only have their hardware prefetching.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn place<T>(_place: &T) {}
