//! Why positions, or a plan with positions, cannot be used.

use core::fmt;
use std::borrow::Cow;

use super::FilterMismatch;

/// A kind of document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Form {
    /// A [`Checkpoint`](super::Checkpoint).
    Checkpoint,
    /// [`Offsets`](super::Offsets).
    Offsets,
    /// A [`ReadPlan`](crate::plan::ReadPlan).
    Plan,
}

/// The subject and the verb of a sentence about one.
impl fmt::Display for Form {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Checkpoint => "the checkpoint is",
            Self::Offsets => "the offsets are",
            Self::Plan => "the plan of a read is",
        })
    }
}

/// Why a checkpoint, offsets or a plan cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The document was truncated or changed, or is of another kind.
    #[error("{form} damaged ({what}): restore an undamaged copy, or start anew")]
    Damaged {
        /// What the document should be.
        form: Form,
        /// What is wrong.
        what: Cow<'static, str>,
    },
    /// A newer release wrote the document.
    #[error(
        "{form} of format version {found}, this release reads up to {supported}: use the release \
         that wrote it, or a newer one"
    )]
    Version {
        /// What the document is.
        form: Form,
        /// Version of the document.
        found: u64,
        /// Newest version this release reads.
        supported: u64,
    },
    /// It was made for another bucket, or for one of the same name that has been deleted since.
    #[error(
        "the checkpoint belongs to another bucket (uuid {found}, this one has {expected}): the \
         bucket was recreated, or the checkpoint was made for another one; start without a \
         checkpoint"
    )]
    OtherBucket {
        /// UUID in the document.
        found: String,
        /// UUID of the bucket.
        expected: String,
    },
    /// The bucket has another number of vBuckets than the offsets.
    #[error(
        "the offsets cover {found} vBuckets, the bucket has {expected}: start with new offsets"
    )]
    OtherShape {
        /// vBuckets in the offsets.
        found: usize,
        /// vBuckets of the bucket.
        expected: usize,
    },
    /// The read asks for more than the filter it was made with.
    #[error(
        "the checkpoint was {0}: use the filter it was made with or a narrower one, or start \
         without a checkpoint"
    )]
    OtherFilter(FilterMismatch),
    /// Checkpoints to be joined were made with different filters.
    #[error(
        "the checkpoints were made with different filters ({first}, and {second}): join only \
         checkpoints with the same filter"
    )]
    MixedFilters {
        /// Filter of the one that was to be added to.
        first: String,
        /// Filter of the other.
        second: String,
    },
}

impl CheckpointError {
    pub(crate) fn damaged(form: Form, what: impl Into<Cow<'static, str>>) -> Self {
        Self::Damaged { form, what: what.into() }
    }
}
