//! Access to a locked vBucket.

use core::ops::Deref;
use std::sync::MutexGuard;

use super::copies::Copies;
use super::source::Shown;
use super::vbucket::VBucket;

/// Access to one copy of a vBucket, which stays locked while this lives.
pub(crate) type VBucketGuard<'a> = Shown<LockedCopy<'a>>;

/// One copy of a locked vBucket.
#[derive(Debug)]
pub(crate) struct LockedCopy<'a> {
    copies: MutexGuard<'a, Copies>,
    /// Index of a copy that is there.
    index: usize,
}

impl Deref for LockedCopy<'_> {
    type Target = VBucket;

    fn deref(&self) -> &VBucket {
        self.copies.vbucket(self.index)
    }
}

impl<'a> VBucketGuard<'a> {
    /// Access to the copy that `which` names, if it is there.
    pub(super) fn new(
        copies: MutexGuard<'a, Copies>,
        which: impl FnOnce(&Copies) -> Option<usize>,
    ) -> Option<Self> {
        let index = which(&copies)?;
        copies.get(index)?;
        Some(Shown(LockedCopy { copies, index }))
    }
}
