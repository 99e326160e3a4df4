//! What positions belong to.

use core::fmt;
use std::sync::Arc;

use super::{CheckpointError, FilterMismatch, StoredFilter};
use crate::topology::Manifest;

/// What positions belong to: a bucket, and the filter that they were made with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Origin {
    pub(super) bucket_uuid: Arc<str>,
    pub(super) made_with: MadeWith,
}

/// What is known of the filter that positions were made with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum MadeWith {
    Filter(Arc<StoredFilter>),
    /// A release that stored no more than a hash wrote the document.
    Hash(u64),
    /// A release that stored nothing of it wrote the document.
    Unknown,
}

impl Origin {
    pub(super) fn new(bucket_uuid: &str, filter: StoredFilter) -> Self {
        let made_with = MadeWith::Filter(Arc::new(filter));
        Self { bucket_uuid: bucket_uuid.into(), made_with }
    }

    pub(super) fn filter(&self) -> Option<&StoredFilter> {
        match &self.made_with {
            MadeWith::Filter(filter) => Some(filter),
            MadeWith::Hash(_) | MadeWith::Unknown => None,
        }
    }

    pub(super) fn check_bucket(&self, bucket_uuid: &str) -> Result<(), CheckpointError> {
        if *self.bucket_uuid != *bucket_uuid {
            return Err(CheckpointError::OtherBucket {
                found: self.bucket_uuid.to_string(),
                expected: bucket_uuid.to_owned(),
            });
        }
        Ok(())
    }

    /// The origin of positions that a read of `filter` begins at.
    pub(super) fn narrowed_to(
        &self,
        bucket_uuid: &str,
        filter: &StoredFilter,
        manifest: &Manifest,
    ) -> Result<Self, CheckpointError> {
        self.check_bucket(bucket_uuid)?;
        let checked = match &self.made_with {
            MadeWith::Filter(stored) => stored.check(filter, manifest),
            // Whether it had system documents cannot be known.
            MadeWith::Hash(hash) if filter.legacy_hash() == *hash => Ok(()),
            MadeWith::Hash(_) => Err(FilterMismatch::Hash),
            MadeWith::Unknown => Ok(()),
        };
        checked.map_err(CheckpointError::OtherFilter)?;
        Ok(Self { made_with: MadeWith::Filter(Arc::new(filter.clone())), ..self.clone() })
    }
}

impl fmt::Display for MadeWith {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Filter(filter) => filter.fmt(f),
            Self::Hash(hash) => write!(f, "one with the hash {hash:016x}"),
            Self::Unknown => f.write_str("one that was not stored"),
        }
    }
}
