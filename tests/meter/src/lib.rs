//! The system's allocator, which counts what is held.
//!
//! A program that uses this crate allocates with it. Counts are of the whole process: whoever
//! measures makes sure, with [`alone`], that nobody else does at the same time.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static MOST: AtomicUsize = AtomicUsize::new(0);

fn took(bytes: usize) {
    let held = HELD.fetch_add(bytes, Ordering::Relaxed) + bytes;
    MOST.fetch_max(held, Ordering::Relaxed);
}

fn gave_back(bytes: usize) {
    HELD.fetch_sub(bytes, Ordering::Relaxed);
}

#[expect(unsafe_code, reason = "an allocator is")]
// SAFETY: everything is the system allocator's.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: as the caller promised.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        took(layout.size());
        // SAFETY: as the caller promised.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        gave_back(layout.size());
        // SAFETY: as the caller promised.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        took(size);
        gave_back(layout.size());
        // SAFETY: as the caller promised.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Waits until no other test of the process measures.
pub fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    // Of a test that failed nothing is left but what it held.
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What is held beyond what was held when it was made.
#[derive(Clone, Copy, Debug)]
pub struct Meter {
    before: usize,
}

impl Meter {
    /// Begins to measure; meters that were made before lose their maximum.
    #[must_use]
    pub fn start() -> Self {
        let before = HELD.load(Ordering::Relaxed);
        MOST.store(before, Ordering::Relaxed);
        Self { before }
    }

    /// The most bytes that were held at any moment since.
    #[must_use]
    pub fn most(&self) -> usize {
        MOST.load(Ordering::Relaxed).saturating_sub(self.before)
    }

    /// The bytes that are held now.
    #[must_use]
    pub fn held(&self) -> usize {
        HELD.load(Ordering::Relaxed).saturating_sub(self.before)
    }
}
