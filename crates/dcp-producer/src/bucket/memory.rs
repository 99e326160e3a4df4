//! How much memory the documents of a bucket take.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::DocumentError;

/// Memory taken by the newest versions of all vBuckets of a bucket, and its limit.
#[derive(Debug)]
pub(crate) struct MemoryUse {
    used: AtomicUsize,
    quota: usize,
}

impl MemoryUse {
    pub(crate) const fn new(quota: usize) -> Self {
        Self { used: AtomicUsize::new(0), quota }
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) const fn quota(&self) -> usize {
        self.quota
    }

    pub(crate) fn add(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Refuses a write of about `bytes` when the quota is used up.
    pub(crate) fn check(&self, bytes: usize) -> Result<(), DocumentError> {
        if self.used().saturating_add(bytes) > self.quota {
            return Err(DocumentError::NoMemory { quota: self.quota });
        }
        Ok(())
    }
}
