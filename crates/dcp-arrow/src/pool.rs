//! Reuses column memory that Arrow has released.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use arrow_array::StringArray;
use arrow_buffer::Buffer;

use crate::repeated::RepeatedTexts;

/// A block is lent and kept if at least one part in this many is used.
pub(crate) const MOSTLY_USED: usize = 4;

/// Keeps freed column memory for later batches, up to a limit in bytes, and one block that is larger
/// than that while it is used again.
///
/// The allocator returns freed megabyte-sized blocks to the system, and allocating them again costs
/// a page fault per page, several times the cost of copying the documents into them.
#[derive(Clone)]
pub struct BufferPool {
    shared: Arc<Mutex<Free>>,
    repeated: RepeatedTexts,
}

#[derive(Default)]
struct Free {
    blocks: Vec<Vec<u8>>,
    held_bytes: usize,
    max_bytes: usize,
    /// The last block that exceeded the limit by itself: batches of huge documents follow each other.
    huge: Vec<u8>,
    /// How often it has not been wanted since.
    passed_over: usize,
}

impl BufferPool {
    /// Smaller blocks are left to the allocator, which reuses them anyway.
    const MIN_BLOCK_BYTES: usize = 64 * 1024;

    /// A block that exceeds the limit is freed once others were wanted this many times in a row.
    const MAX_PASSED_OVER: usize = 16;

    /// Larger blocks are never kept. The column of a document of 20 MiB has 32 MiB.
    const MAX_HUGE_BYTES: usize = 64 * 1024 * 1024;

    /// A pool that holds up to `max_bytes` of free memory.
    #[must_use]
    pub fn new(max_bytes: usize) -> Self {
        Self {
            shared: Arc::new(Mutex::new(Free { max_bytes, ..Free::default() })),
            repeated: RepeatedTexts::default(),
        }
    }

    /// Free memory currently held, in bytes.
    #[must_use]
    pub fn held_bytes(&self) -> usize {
        let free = self.lock();
        free.held_bytes.saturating_add(free.huge.capacity())
    }

    /// A block with at least `capacity` bytes of room and unspecified contents.
    pub(crate) fn take(&self, capacity: usize) -> Vec<u8> {
        let mut free = self.lock();
        // The smallest that fits, and none that would stay mostly unused: otherwise keys would take
        // blocks sized for documents, and documents new ones.
        let room = capacity..=capacity.saturating_mul(MOSTLY_USED);
        let fits = |(index, block): (usize, &Vec<u8>)| {
            room.contains(&block.capacity()).then_some((block.capacity(), index))
        };
        if let Some((_, index)) = free.blocks.iter().enumerate().filter_map(fits).min() {
            let block = free.blocks.swap_remove(index);
            free.held_bytes = free.held_bytes.saturating_sub(block.capacity());
            return block;
        }
        if room.contains(&free.huge.capacity()) {
            return std::mem::take(&mut free.huge);
        }
        free.passed_over += 1;
        if free.passed_over >= Self::MAX_PASSED_OVER {
            free.huge = Vec::new();
        }
        drop(free);
        Vec::with_capacity(capacity)
    }

    /// Keeps a block for reuse, or frees it.
    pub(crate) fn give_back(&self, block: Vec<u8>) {
        if block.capacity() < Self::MIN_BLOCK_BYTES {
            return;
        }
        let mut free = self.lock();
        if block.capacity() > Self::MAX_HUGE_BYTES.max(free.max_bytes) {
            return;
        }
        if block.capacity() > free.max_bytes {
            (free.huge, free.passed_over) = (block, 0);
        } else if free.held_bytes.saturating_add(block.capacity()) <= free.max_bytes {
            free.held_bytes = free.held_bytes.saturating_add(block.capacity());
            free.blocks.push(block);
        }
    }

    /// The first `len` bytes of `block` as an Arrow buffer; the block returns to the pool when the
    /// buffer's last user drops it.
    pub(crate) fn buffer(&self, mut block: Vec<u8>, len: usize) -> Buffer {
        if block.capacity() < Self::MIN_BLOCK_BYTES {
            block.truncate(len);
            return Buffer::from_vec(block);
        }
        Buffer::from(bytes::Bytes::from_owner(Lent { block, len, pool: self.clone() }))
    }

    /// A column with `text` in every row.
    pub(crate) fn repeated(&self, text: &str, rows: usize) -> StringArray {
        self.repeated.column(text, rows)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Free> {
        // No invariant can be broken by a panic here.
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for BufferPool {
    /// Holds the memory of a few batches of the default size.
    fn default() -> Self {
        Self::new(16 * 1024 * 1024)
    }
}

impl fmt::Debug for BufferPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let free = self.lock();
        f.debug_struct("BufferPool")
            .field("held_bytes", &free.held_bytes)
            .field("max_bytes", &free.max_bytes)
            .finish_non_exhaustive()
    }
}

/// A block used by Arrow.
struct Lent {
    block: Vec<u8>,
    len: usize,
    pool: BufferPool,
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.block.get(..self.len).unwrap_or_default()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        self.pool.give_back(std::mem::take(&mut self.block));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pool_block_comes_back_when_its_buffer_is_dropped() {
        let pool = BufferPool::new(1024 * 1024);
        let mut block = pool.take(100_000);
        block.extend_from_slice(&[7; 100_000]);
        let address = block.as_ptr();
        let buffer = pool.buffer(block, 99_500);
        let view = buffer.slice(99_000);
        drop(buffer);
        assert_eq!(pool.held_bytes(), 0, "a view still uses it");
        assert_eq!(view.as_slice(), [7; 500]);
        drop(view);
        assert_eq!(pool.held_bytes(), 100_000);
        assert_eq!(pool.take(24_999).capacity(), 24_999, "most of it would not be used");
        assert_eq!(pool.held_bytes(), 100_000);
        let again = pool.take(25_000);
        assert_eq!((again.as_ptr(), again.len()), (address, 100_000), "it need not be cleared");
        assert_eq!(pool.held_bytes(), 0);
    }

    #[test]
    fn pool_keeps_one_block_above_its_bound_while_it_is_used() {
        let pool = BufferPool::new(250_000);
        let block = pool.take(300_000);
        let address = block.as_ptr();
        pool.give_back(block);
        assert_eq!(pool.held_bytes(), 300_000);
        let (block, other) = (pool.take(290_000), pool.take(290_000));
        assert_eq!((block.as_ptr(), block.capacity()), (address, 300_000));
        pool.give_back(block);
        pool.give_back(other);
        assert_eq!(pool.held_bytes(), 290_000, "one of them");
        for _ in 0..BufferPool::MAX_PASSED_OVER {
            assert_eq!(pool.held_bytes(), 290_000);
            pool.take(70_000);
        }
        assert_eq!(pool.held_bytes(), 0, "smaller ones are wanted now");
        pool.give_back(pool.take(BufferPool::MAX_HUGE_BYTES + 1));
        assert_eq!(pool.held_bytes(), 0, "that is too much");
    }

    #[test]
    fn pool_frees_what_exceeds_its_bound() {
        let pool = BufferPool::new(250_000);
        let blocks: Vec<_> = (0..4).map(|_| pool.buffer(pool.take(100_000), 0)).collect();
        drop(blocks);
        assert_eq!(pool.held_bytes(), 200_000);
        let block = pool.take(99_999);
        assert_eq!((block.capacity(), pool.held_bytes()), (100_000, 100_000));
    }
}
