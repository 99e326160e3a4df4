//! Access to a locked vBucket.

use core::ops::Deref;
use std::sync::MutexGuard;

use super::copies::Copies;
use super::source::VBucketView;
use super::vbucket::VBucket;

/// Access to one copy of a vBucket, which stays locked while this lives.
pub(crate) type VBucketGuard<'a> = VBucketView<LockedCopy<'a>>;

/// One copy of a locked vBucket.
#[derive(Debug)]
pub(crate) struct LockedCopy<'a> {
    copies: MutexGuard<'a, Copies>,
    /// Index of an existing copy.
    index: usize,
}

impl Deref for LockedCopy<'_> {
    type Target = VBucket;

    fn deref(&self) -> &VBucket {
        self.copies.vbucket(self.index)
    }
}

impl<'a> VBucketGuard<'a> {
    /// Access to the copy that `which` selects, if it exists.
    pub(super) fn new(
        copies: MutexGuard<'a, Copies>,
        which: impl FnOnce(&Copies) -> Option<usize>,
    ) -> Option<Self> {
        let index = which(&copies)?;
        copies.get(index)?;
        Some(VBucketView(LockedCopy { copies, index }))
    }
}
