//! Asks for memory before it is needed.
//!
//! Documents lie scattered over more memory than the caches hold. Read one after the other, each
//! waits for its item, then its key, then its value; asked for some time before, they arrive while
//! the ones before them are sent.

use super::Item;

/// Distance of two places in memory that are fetched together.
const CACHE_LINE: usize = 64;

/// Bytes of each value that are asked for; the processor foresees the rest by itself.
const MAX_BYTES: usize = 2048;

/// Asks for what says where an item's key and value lie.
#[inline]
pub(super) fn item(item: &Item) {
    place(&item.seqno);
    place(&item.delete_time);
    place(&item.key);
    place(&item.value);
}

/// Asks for an item's key and value; waits for the item itself.
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

/// Asks for the memory at `place`.
#[cfg(target_arch = "x86_64")]
#[inline]
fn place<T>(place: &T) {
    // Into the second cache: the first one is too small for what is asked for.
    safe_arch::prefetch_t1(place);
}

/// Other processors foresee what they can.
#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn place<T>(_place: &T) {}
