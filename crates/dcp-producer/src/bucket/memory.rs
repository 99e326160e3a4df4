//! Memory use of a bucket's documents.

use std::sync::atomic::{AtomicUsize, Ordering};

use crate::DocumentError;

/// Memory used by the newest versions of all vBuckets of a bucket, and its limit.
#[derive(Debug)]
pub(crate) struct MemoryUse {
    used: AtomicUsize,
    quota: AtomicUsize,
    vbuckets: usize,
}

impl MemoryUse {
    /// Divisor for the part of the quota that checkpoints may use.
    const CHECKPOINT_PART: usize = 4;

    pub(crate) fn new(quota: usize, vbuckets: u16) -> Self {
        let quota = AtomicUsize::new(quota);
        Self { used: AtomicUsize::new(0), quota, vbuckets: usize::from(vbuckets.max(1)) }
    }

    /// Bytes that the closed checkpoints of one vBucket may use for streams that are behind.
    pub(crate) fn checkpoint_limit(&self) -> usize {
        self.quota() / Self::CHECKPOINT_PART / self.vbuckets
    }

    /// How much of the quota is used, in percent.
    pub(crate) fn used_percent(&self) -> u8 {
        let percent = self.used() as u128 * 100 / self.quota().max(1) as u128;
        u8::try_from(percent).unwrap_or(u8::MAX)
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn quota(&self) -> usize {
        self.quota.load(Ordering::Relaxed)
    }

    /// Changes the quota. Documents stay if it is below what they use.
    pub(crate) fn set_quota(&self, bytes: usize) {
        self.quota.store(bytes, Ordering::Relaxed);
    }

    pub(crate) fn add(&self, bytes: usize) {
        self.used.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn sub(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Refuses a write of about `bytes` when the quota is used up.
    pub(crate) fn check(&self, bytes: usize) -> Result<(), DocumentError> {
        let quota = self.quota();
        if self.used().saturating_add(bytes) > quota {
            return Err(DocumentError::NoMemory { quota });
        }
        Ok(())
    }
}
