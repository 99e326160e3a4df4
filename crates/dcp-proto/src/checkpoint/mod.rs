//! Positions of a consumer in every vBucket, as documents to store.
//!
//! A [`Checkpoint`] has all that a stream needs to resume, or to be rolled back. It is cheap to
//! clone, and changing one does not affect its clones: each batch carries the checkpoint that
//! applies once that batch has been processed. [`Offsets`] have only where a bounded read ended,
//! which is small enough to be stored with every micro-batch. Both belong to a bucket and the filter
//! that they were made with, by the same rules.

mod document;
mod error;
mod filter;
mod offsets;
mod origin;
#[cfg(test)]
mod tests;
mod together;

use core::fmt;
use std::sync::Arc;

use dcp_wire::{Seqno, Vbid};

pub(crate) use self::document::{Envelope, FilterDocument};
pub use self::error::{CheckpointError, Form};
pub use self::filter::{FilterMismatch, StoredFilter};
pub use self::offsets::{Offset, Offsets};
use self::origin::{MadeWith, Origin};
use crate::consumer::{PositionUpdate, StreamPosition};
use crate::topology::Manifest;
use crate::{History, Position, Snapshot};

/// Positions in either form, as somebody stored them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Positions {
    /// Where a stream was.
    Checkpoint(Checkpoint),
    /// Where a bounded read ended.
    Offsets(Offsets),
}

impl Positions {
    /// Reads a document of either form, of this release or an older one.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] or [`CheckpointError::Version`].
    pub fn from_json(json: &str) -> Result<Self, CheckpointError> {
        if json.contains("\"format\"") {
            return Checkpoint::from_json(json.as_bytes()).map(Self::Checkpoint);
        }
        Offsets::from_json(json).map(Self::Offsets)
    }
}

impl From<Checkpoint> for Positions {
    fn from(checkpoint: Checkpoint) -> Self {
        Self::Checkpoint(checkpoint)
    }
}

impl From<Offsets> for Positions {
    fn from(offsets: Offsets) -> Self {
        Self::Offsets(offsets)
    }
}

/// vBuckets that share one allocation: what a change of one position copies.
const CHUNK: usize = 32;

type Chunk = [Option<Arc<CheckpointEntry>>; CHUNK];

/// The state of one vBucket.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CheckpointEntry {
    position: Position,
    history: History,
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
    origin: Origin,
    chunks: Arc<Vec<Arc<Chunk>>>,
}

impl Checkpoint {
    /// A checkpoint before the first change of any vBucket.
    #[must_use]
    pub fn new(bucket_uuid: &str, filter: StoredFilter) -> Self {
        Self::of(Origin::new(bucket_uuid, filter))
    }

    fn of(origin: Origin) -> Self {
        Self { origin, chunks: Arc::default() }
    }

    /// Identity of the bucket the positions belong to.
    #[must_use]
    pub fn bucket_uuid(&self) -> &str {
        &self.origin.bucket_uuid
    }

    /// The filter the positions were made with; `None` if the checkpoint was written by a release
    /// that stored only a hash of it.
    #[must_use]
    pub fn filter(&self) -> Option<&StoredFilter> {
        self.origin.filter()
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

    /// The checkpoint with a vBucket at its beginning and in its next epoch, as after a rollback to
    /// 0: what is read again is then newer than all that was read before.
    #[must_use]
    pub fn begun_again(&self, vbid: Vbid) -> Self {
        let mut again = self.clone();
        if let Some(position) = self.position(vbid) {
            let epoch = position.epoch.saturating_add(1);
            again.set(vbid, Position { epoch, ..Position::EARLIEST });
        }
        again
    }

    /// The checkpoint of some vBuckets only, as for one member of a group or one Spark task.
    #[must_use]
    pub fn restricted_to(&self, vbids: impl IntoIterator<Item = Vbid>) -> Self {
        let mut part = Self::of(self.origin.clone());
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
        other.origin.check_bucket(&self.origin.bucket_uuid)?;
        self.origin.made_with = match (&self.origin.made_with, &other.origin.made_with) {
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
        let origin = self.origin.narrowed_to(bucket_uuid, filter, manifest)?;
        Ok(Self { origin, ..self.clone() })
    }

    /// Checks that the positions belong to a bucket.
    ///
    /// # Errors
    /// [`CheckpointError::OtherBucket`].
    pub fn check_bucket(&self, bucket_uuid: &str) -> Result<(), CheckpointError> {
        self.origin.check_bucket(bucket_uuid)
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
            .field("bucket_uuid", &self.origin.bucket_uuid)
            .field("filter", &format_args!("{}", self.origin.made_with))
            .field("vbuckets", &self.positions().count())
            .finish()
    }
}
