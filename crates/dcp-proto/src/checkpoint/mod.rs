//! Checkpoints: where a consumer stands in every vBucket, as a document to keep.
//!
//! A checkpoint is a value. It is cheap to clone, and changing one leaves its clones alone: each
//! batch carries the checkpoint that is right once that batch has been processed.

mod document;
#[cfg(test)]
mod tests;

use core::fmt;
use std::sync::Arc;

use dcp_wire::Vbid;
use thiserror::Error;

use crate::consumer::Moved;
use crate::{History, Position};

/// vBuckets that share one allocation: what a change of one position copies.
const CHUNK: usize = 32;

type Chunk = [Option<Arc<Standing>>; CHUNK];

/// What is kept of one vBucket.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Standing {
    position: Position,
    history: History,
}

/// Fingerprint of what a stream was asked to contain.
///
/// A position is only good for the filter it was made with: changes a narrower filter passed over
/// lie below it and would never be sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct FilterHash(pub u64);

impl FilterHash {
    /// Fingerprint of the parts of a filter; their order and their boundaries count.
    ///
    /// The same parts give the same hash in every version and on every platform (FNV-1a).
    #[must_use]
    pub fn of<'a>(parts: impl IntoIterator<Item = &'a str>) -> Self {
        const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
        const PRIME: u64 = 0x100_0000_01b3;
        let step = |hash: u64, byte: u8| (hash ^ u64::from(byte)).wrapping_mul(PRIME);
        Self(parts.into_iter().fold(OFFSET, |hash, part| {
            // 0xff is in no UTF-8 text, so it ends a part unmistakably.
            step(part.bytes().fold(hash, step), 0xff)
        }))
    }
}

impl fmt::Display for FilterHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Why a checkpoint cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The document is not as it was written: cut short, changed, or something else altogether.
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
    /// It was made on another bucket, or on one of the same name that has been deleted since.
    #[error(
        "the checkpoint belongs to another bucket (uuid {found}, this one has {expected}): the \
         bucket was made anew or it is not the one; start without a checkpoint"
    )]
    OtherBucket {
        /// UUID in the checkpoint.
        found: String,
        /// UUID of the bucket.
        expected: String,
    },
    /// It was made with another filter.
    #[error(
        "the checkpoint was made with another filter of scopes and collections, or what the filter \
         names was dropped and made anew: use the same filter, or start without a checkpoint"
    )]
    OtherFilter {
        /// Fingerprint in the checkpoint.
        found: FilterHash,
        /// Fingerprint of the filter now.
        expected: FilterHash,
    },
}

/// Where a consumer stands in every vBucket of a bucket.
///
/// A vBucket without a position has not been read: a stream from here starts it at the beginning.
///
/// ```
/// use dcp_proto::Position;
/// use dcp_proto::checkpoint::{Checkpoint, FilterHash};
/// use dcp_wire::Vbid;
///
/// let start = Checkpoint::new("6cf5…", FilterHash::of(["inventory.airline"]));
/// let later = start.clone().with_position(Vbid(7), Position::EARLIEST);
/// assert!(start.is_empty());
///
/// let json = later.to_json();
/// assert_eq!(Checkpoint::from_json(json.as_bytes())?, later);
/// assert!(Checkpoint::from_json(&json.as_bytes()[..99]).is_err());
/// # Ok::<(), dcp_proto::checkpoint::CheckpointError>(())
/// ```
#[derive(Clone)]
pub struct Checkpoint {
    bucket_uuid: Arc<str>,
    filter_hash: FilterHash,
    chunks: Arc<Vec<Arc<Chunk>>>,
}

impl Checkpoint {
    /// A checkpoint before the first change of any vBucket.
    #[must_use]
    pub fn new(bucket_uuid: &str, filter_hash: FilterHash) -> Self {
        Self { bucket_uuid: bucket_uuid.into(), filter_hash, chunks: Arc::default() }
    }

    /// Identity of the bucket the positions belong to.
    #[must_use]
    pub fn bucket_uuid(&self) -> &str {
        &self.bucket_uuid
    }

    /// Fingerprint of the filter the positions were made with.
    #[must_use]
    pub const fn filter_hash(&self) -> FilterHash {
        self.filter_hash
    }

    /// Where the consumer stands in a vBucket; `None` if it has not begun.
    #[must_use]
    pub fn position(&self, vbid: Vbid) -> Option<&Position> {
        Some(&self.slot(vbid)?.position)
    }

    /// Where a rollback of a vBucket can go back to; `None` if the consumer has not begun.
    #[must_use]
    pub fn history(&self, vbid: Vbid) -> Option<&History> {
        Some(&self.slot(vbid)?.history)
    }

    /// All positions, by vBucket, ascending.
    pub fn positions(&self) -> impl Iterator<Item = (Vbid, &Position)> {
        self.standings().map(|(vbid, standing)| (vbid, &standing.position))
    }

    fn standings(&self) -> impl Iterator<Item = (Vbid, &Standing)> {
        let slots = self.chunks.iter().flat_map(|chunk| chunk.iter());
        (0..=u16::MAX)
            .map(Vbid)
            .zip(slots)
            .filter_map(|(vbid, slot)| Some((vbid, slot.as_deref()?)))
    }

    /// Whether no vBucket has a position.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.positions().next().is_none()
    }

    /// Puts a vBucket's position, with nothing older to go back to; clones made before keep
    /// theirs.
    pub fn set(&mut self, vbid: Vbid, position: Position) {
        self.advance(Moved { vbid, position, history: History::default() });
    }

    /// Takes over where a stream says that a vBucket stands; clones made before keep theirs.
    pub fn advance(&mut self, moved: Moved) {
        let Moved { vbid, position, history } = moved;
        self.put(vbid, Some(Arc::new(Standing { position, history })));
    }

    /// The checkpoint with a vBucket at `position`.
    #[must_use]
    pub fn with_position(mut self, vbid: Vbid, position: Position) -> Self {
        self.set(vbid, position);
        self
    }

    /// Forgets a vBucket's position.
    pub fn remove(&mut self, vbid: Vbid) {
        if self.position(vbid).is_some() {
            self.put(vbid, None);
        }
    }

    /// The checkpoint of some vBuckets only, as for one member of a group or one Spark task.
    #[must_use]
    pub fn restricted_to(&self, vbids: impl IntoIterator<Item = Vbid>) -> Self {
        let mut part = Self::new(&self.bucket_uuid, self.filter_hash);
        for vbid in vbids {
            if let Some(standing) = self.slot(vbid) {
                part.put(vbid, Some(Arc::clone(standing)));
            }
        }
        part
    }

    /// Takes over the positions `other` has, as when the parts of several readers are joined.
    ///
    /// # Errors
    /// [`CheckpointError`] if `other` belongs to another bucket or another filter.
    pub fn merge(&mut self, other: &Self) -> Result<(), CheckpointError> {
        other.check(&self.bucket_uuid, self.filter_hash)?;
        for (vbid, _) in other.positions() {
            self.put(vbid, other.slot(vbid).cloned());
        }
        Ok(())
    }

    /// Checks that the checkpoint may be used on a bucket with a filter.
    ///
    /// # Errors
    /// [`CheckpointError::OtherBucket`] or [`CheckpointError::OtherFilter`].
    pub fn check(&self, bucket_uuid: &str, filter_hash: FilterHash) -> Result<(), CheckpointError> {
        if *self.bucket_uuid != *bucket_uuid {
            return Err(CheckpointError::OtherBucket {
                found: self.bucket_uuid.to_string(),
                expected: bucket_uuid.to_owned(),
            });
        }
        if self.filter_hash != filter_hash {
            return Err(CheckpointError::OtherFilter {
                found: self.filter_hash,
                expected: filter_hash,
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

    fn slot(&self, vbid: Vbid) -> Option<&Arc<Standing>> {
        self.chunks.get(vbid.index() / CHUNK)?.get(vbid.index() % CHUNK)?.as_ref()
    }

    fn put(&mut self, vbid: Vbid, standing: Option<Arc<Standing>>) {
        let chunks = Arc::make_mut(&mut self.chunks);
        let chunk = vbid.index() / CHUNK;
        if chunks.len() <= chunk {
            chunks.resize_with(chunk + 1, Arc::default);
        }
        Arc::make_mut(&mut chunks[chunk])[vbid.index() % CHUNK] = standing;
    }
}

impl PartialEq for Checkpoint {
    fn eq(&self, other: &Self) -> bool {
        self.bucket_uuid == other.bucket_uuid
            && self.filter_hash == other.filter_hash
            && (Arc::ptr_eq(&self.chunks, &other.chunks) || self.standings().eq(other.standings()))
    }
}

impl Eq for Checkpoint {}

impl fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Checkpoint")
            .field("bucket_uuid", &self.bucket_uuid)
            .field("filter_hash", &format_args!("{}", self.filter_hash))
            .field("vbuckets", &self.positions().count())
            .finish()
    }
}
