//! Checkpoints: the positions of a consumer in every vBucket, as a document to store.
//!
//! A checkpoint is a value. It is cheap to clone, and changing one does not affect its clones: each
//! batch carries the checkpoint that applies once that batch has been processed.

mod document;
mod filter;
#[cfg(test)]
mod tests;

use core::fmt;
use std::sync::Arc;

use dcp_wire::{Seqno, Vbid};
use thiserror::Error;

pub(crate) use self::document::FilterDocument;
pub use self::filter::{FilterMismatch, StoredFilter};
use crate::consumer::{PositionUpdate, StreamPosition};
use crate::topology::Manifest;
use crate::{History, Position, Snapshot};

/// vBuckets that share one allocation: what a change of one position copies.
const CHUNK: usize = 32;

type Chunk = [Option<Arc<CheckpointEntry>>; CHUNK];

/// The state of one vBucket.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CheckpointEntry {
    position: Position,
    history: History,
}

/// What is known of the filter that the positions were made with.
#[derive(Clone, Debug, PartialEq, Eq)]
enum MadeWith {
    Filter(Arc<StoredFilter>),
    /// A release that stored no more than a hash wrote the document.
    Hash(u64),
}

impl fmt::Display for MadeWith {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Filter(filter) => filter.fmt(f),
            Self::Hash(hash) => write!(f, "one with the hash {hash:016x}"),
        }
    }
}

/// Why a checkpoint cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The document was truncated or changed, or is not a checkpoint.
    #[error(
        "the checkpoint is damaged ({0}): restore an undamaged copy, or start without a checkpoint"
    )]
    Damaged(&'static str),
    /// A newer release wrote it.
    #[error(
        "the checkpoint has format version {found}, this release reads up to {supported}: use \
         the release that wrote it, or a newer one"
    )]
    Version {
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
        /// UUID in the checkpoint.
        found: String,
        /// UUID of the bucket.
        expected: String,
    },
    /// The stream asks for more than the filter it was made with.
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

/// The positions of a consumer in every vBucket of a bucket.
///
/// A vBucket without a position has not been read: a stream from here starts it at the beginning.
///
/// ```
/// use dcp_proto::Position;
/// use dcp_proto::checkpoint::{Checkpoint, StoredFilter};
/// use dcp_proto::consumer::StreamFilter;
/// use dcp_wire::{CollectionId, Vbid};
///
/// let airline = StreamFilter::Collections(vec![CollectionId(0x9)]);
/// let start = Checkpoint::new("6cf5…", StoredFilter::new(airline, false));
/// let later = start.clone().with_position(Vbid(7), Position::EARLIEST);
/// assert!(start.is_empty());
///
/// let json = later.to_json();
/// assert_eq!(Checkpoint::from_json(json.as_bytes())?, later);
/// assert!(Checkpoint::from_json(&json.as_bytes()[..99]).is_err());
/// # Ok::<(), dcp_proto::checkpoint::CheckpointError>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Checkpoint {
    bucket_uuid: Arc<str>,
    made_with: MadeWith,
    chunks: Arc<Vec<Arc<Chunk>>>,
}

impl Checkpoint {
    /// A checkpoint before the first change of any vBucket.
    #[must_use]
    pub fn new(bucket_uuid: &str, filter: StoredFilter) -> Self {
        Self::made(bucket_uuid, MadeWith::Filter(Arc::new(filter)))
    }

    fn made(bucket_uuid: &str, made_with: MadeWith) -> Self {
        Self { bucket_uuid: bucket_uuid.into(), made_with, chunks: Arc::default() }
    }

    /// Identity of the bucket the positions belong to.
    #[must_use]
    pub fn bucket_uuid(&self) -> &str {
        &self.bucket_uuid
    }

    /// The filter the positions were made with; `None` if the checkpoint was written by a release
    /// that stored only a hash of it.
    #[must_use]
    pub fn filter(&self) -> Option<&StoredFilter> {
        match &self.made_with {
            MadeWith::Filter(filter) => Some(filter),
            MadeWith::Hash(_) => None,
        }
    }

    /// The position of a vBucket; `None` if it has not been read.
    #[must_use]
    pub fn position(&self, vbid: Vbid) -> Option<&Position> {
        Some(&self.slot(vbid)?.position)
    }

    /// Where a rollback of a vBucket can go back to; `None` if it has not been read.
    #[must_use]
    pub fn history(&self, vbid: Vbid) -> Option<&History> {
        Some(&self.slot(vbid)?.history)
    }

    /// Where a stream of the vBucket resumes.
    #[must_use]
    pub fn stream_position(&self, vbid: Vbid) -> StreamPosition {
        let position = self.position(vbid).cloned().unwrap_or(Position::EARLIEST);
        StreamPosition::with_history(position, self.history(vbid).cloned().unwrap_or_default())
    }

    /// All positions, by vBucket, ascending.
    pub fn positions(&self) -> impl Iterator<Item = (Vbid, &Position)> {
        self.entries().map(|(vbid, entry)| (vbid, &entry.position))
    }

    fn entries(&self) -> impl Iterator<Item = (Vbid, &Arc<CheckpointEntry>)> {
        let slots = self.chunks.iter().flat_map(|chunk| chunk.iter());
        (0..=u16::MAX).map(Vbid).zip(slots).filter_map(|(vbid, slot)| Some((vbid, slot.as_ref()?)))
    }

    /// Whether no vBucket has a position.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.positions().next().is_none()
    }

    /// Puts a vBucket's position, with nothing older to go back to; clones made before keep
    /// theirs.
    pub fn set(&mut self, vbid: Vbid, position: Position) {
        self.advance(PositionUpdate { vbid, position, history: History::default() });
    }

    /// Applies a stream's position update; clones made before keep theirs.
    pub fn advance(&mut self, moved: PositionUpdate) {
        let PositionUpdate { vbid, position, history } = moved;
        self.put(vbid, Arc::new(CheckpointEntry { position, history }));
    }

    /// The checkpoint with a vBucket at `position`.
    #[must_use]
    pub fn with_position(mut self, vbid: Vbid, position: Position) -> Self {
        self.set(vbid, position);
        self
    }

    /// The checkpoint with a vBucket's position moved back to `seqno`, on the branch that had it, to
    /// read what follows again.
    #[must_use]
    pub fn rewound_to(&self, vbid: Vbid, seqno: Seqno) -> Self {
        let mut rewound = self.clone();
        if let Some(position) = self.position(vbid).filter(|position| position.seqno > seqno) {
            let snapshot = Snapshot::at(seqno);
            rewound.set(vbid, Position { seqno, snapshot, ..position.clone() });
        }
        rewound
    }

    /// The checkpoint of some vBuckets only, as for one member of a group or one Spark task.
    #[must_use]
    pub fn restricted_to(&self, vbids: impl IntoIterator<Item = Vbid>) -> Self {
        let mut part = Self::made(&self.bucket_uuid, self.made_with.clone());
        for vbid in vbids {
            if let Some(entry) = self.slot(vbid) {
                part.put(vbid, Arc::clone(entry));
            }
        }
        part
    }

    /// Takes over the positions of `other`, for example to join the parts of several readers.
    ///
    /// # Errors
    /// [`CheckpointError::OtherBucket`] or [`CheckpointError::MixedFilters`].
    pub fn merge(&mut self, other: &Self) -> Result<(), CheckpointError> {
        other.check_bucket(&self.bucket_uuid)?;
        self.made_with = match (&self.made_with, &other.made_with) {
            (own, others) if own == others => own.clone(),
            // One of them was written by a release that stored only a hash.
            (MadeWith::Filter(filter), MadeWith::Hash(hash))
            | (MadeWith::Hash(hash), MadeWith::Filter(filter))
                if filter.legacy_hash() == *hash =>
            {
                MadeWith::Filter(Arc::clone(filter))
            }
            (first, second) => {
                let (first, second) = (first.to_string(), second.to_string());
                return Err(CheckpointError::MixedFilters { first, second });
            }
        };
        for (vbid, entry) in other.entries() {
            self.put(vbid, Arc::clone(entry));
        }
        Ok(())
    }

    /// The checkpoint to start a stream of `filter` from. It stores `filter` from then on, so that
    /// a narrowed filter cannot be widened again.
    ///
    /// # Errors
    /// [`CheckpointError::OtherBucket`]; [`CheckpointError::OtherFilter`] if the checkpoint was not
    /// made with `filter` or one that contains it.
    pub fn narrowed_to(
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
        };
        checked.map_err(CheckpointError::OtherFilter)?;
        Ok(Self { made_with: MadeWith::Filter(Arc::new(filter.clone())), ..self.clone() })
    }

    fn check_bucket(&self, bucket_uuid: &str) -> Result<(), CheckpointError> {
        if *self.bucket_uuid != *bucket_uuid {
            return Err(CheckpointError::OtherBucket {
                found: self.bucket_uuid.to_string(),
                expected: bucket_uuid.to_owned(),
            });
        }
        Ok(())
    }

    /// The checkpoint as one JSON document, to be read with [`from_json`](Self::from_json).
    #[must_use]
    pub fn to_json(&self) -> String {
        document::write(self)
    }

    /// Reads a document that [`to_json`](Self::to_json) wrote, in this release or an older one.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] or [`CheckpointError::Version`]. An empty or cut document is
    /// never an empty checkpoint.
    pub fn from_json(json: &[u8]) -> Result<Self, CheckpointError> {
        document::read(json)
    }

    fn slot(&self, vbid: Vbid) -> Option<&Arc<CheckpointEntry>> {
        self.chunks.get(vbid.index() / CHUNK)?.get(vbid.index() % CHUNK)?.as_ref()
    }

    fn put(&mut self, vbid: Vbid, entry: Arc<CheckpointEntry>) {
        let chunks = Arc::make_mut(&mut self.chunks);
        let chunk = vbid.index() / CHUNK;
        if chunks.len() <= chunk {
            chunks.resize_with(chunk + 1, Arc::default);
        }
        Arc::make_mut(&mut chunks[chunk])[vbid.index() % CHUNK] = Some(entry);
    }
}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("bucket_uuid", &self.bucket_uuid)
            .field("filter", &format_args!("{}", self.made_with))
            .field("vbuckets", &self.positions().count())
            .finish()
    }
}
