//! Memory use of a bucket's documents.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::DocumentError;

/// Memory used by the newest versions of all vBuckets of a bucket, and its limit.
#[derive(Debug)]
pub(crate) struct MemoryUse {
    used: AtomicUsize,
    quota: usize,
    /// Bytes that the closed checkpoints of one vBucket may use for streams that are behind.
    checkpoint_limit: usize,
}

impl MemoryUse {
    /// Divisor for the part of the quota that checkpoints may use.
    const CHECKPOINT_PART: usize = 4;

    pub(crate) fn new(quota: usize, vbuckets: u16) -> Self {
        let checkpoint_limit = quota / Self::CHECKPOINT_PART / usize::from(vbuckets.max(1));
        Self { used: AtomicUsize::new(0), quota, checkpoint_limit }
    }

    /// Bytes that the closed checkpoints of one vBucket may use for streams that are behind.
    pub(crate) const fn checkpoint_limit(&self) -> usize {
        self.checkpoint_limit
    }

    /// How much of the quota is used, in percent.
    pub(crate) fn used_percent(&self) -> u8 {
        let percent = self.used() as u128 * 100 / self.quota.max(1) as u128;
        u8::try_from(percent).unwrap_or(u8::MAX)
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
