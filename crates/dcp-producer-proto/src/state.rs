//! States of vBuckets.

/// State of a vBucket on its node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VBucketState {
    /// Takes reads and writes.
    Active,
    /// Follows an active one.
    Replica,
    /// About to become active.
    Pending,
    /// Refuses everything.
    Dead,
}
