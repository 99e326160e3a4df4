//! What one task reads, as a document to send to it.

use std::collections::BTreeMap;
use std::time::Duration;

use dcp_wire::{Seqno, Vbid};
use serde::{Deserialize, Serialize};

use super::{Located, OffsetsError, SeqnoRange};
use crate::OnRollback;
use crate::checkpoint::{Checkpoint, CheckpointError};
use crate::consumer::{PositionUpdate, StreamPosition};

/// Why a document is not a partition.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PartitionError {
    /// Not JSON, or changed since it was written.
    #[error("the plan of a task is damaged ({0}): plan the read again")]
    Damaged(String),
    /// Its positions cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
}

/// What one task reads: ranges of one node's vBuckets, and everything else that its stream needs.
///
/// Plain data, sent as JSON because the task runs elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    /// The node of the vBuckets when the read was planned; the task follows them if they move.
    pub node: String,
    /// Positions to begin at, of a bucket and a filter.
    pub start: Checkpoint,
    /// Last seqnos to read. vBuckets that are already there are not streamed.
    pub ends: BTreeMap<Vbid, Seqno>,
    /// vBuckets with a rollback to their position, which is delivered before the changes.
    pub rolled_back: Vec<Vbid>,
    /// Whether to skip deletions that were purged since the ends were chosen.
    pub past_purge: bool,
    /// Whether another read continues from the ends. Then this one stops there exactly, and fails
    /// on a rollback: its planner decides what follows.
    pub is_followed: bool,
    /// Whether to read only what is persisted on all copies, if another read follows.
    pub persisted_only: bool,
    /// What to do on a rollback in a read that no other read follows.
    pub on_rollback: OnRollback,
    /// Longest time a vBucket, or the whole cluster, may be unavailable.
    pub patience: Duration,
}

impl Partition {
    /// A partition for one non-empty list from [`pack`](super::pack()), with the options of `like`.
    #[must_use]
    pub fn with_ranges(like: &Self, located: Vec<Located>) -> Self {
        let node = located.first().map(|first| first.node.clone()).unwrap_or_default();
        let (mut ends, mut rolled_back) = (BTreeMap::new(), Vec::new());
        let mut start = like.start.restricted_to([]);
        let past_purge = located.iter().any(|located| located.range.past_purge);
        for Located { range, .. } in located {
            ends.insert(range.vbid, range.to);
            if range.rolled_back {
                rolled_back.push(range.vbid);
            }
            let StreamPosition { position, history, .. } = range.from;
            start.advance(PositionUpdate { vbid: range.vbid, position, history });
        }
        Self { node, start, ends, rolled_back, past_purge, ..like.clone() }
    }

    /// What is read of each vBucket, ascending.
    pub fn ranges(&self) -> impl Iterator<Item = SeqnoRange> {
        self.ends.iter().map(|(&vbid, &to)| SeqnoRange {
            vbid,
            from: self.start.stream_position(vbid),
            to,
            rolled_back: self.rolled_back.contains(&vbid),
            past_purge: self.past_purge,
        })
    }

    /// Checks that the bucket is the one the read was planned for.
    ///
    /// # Errors
    /// [`OffsetsError::OtherBucket`].
    pub fn check(&self, bucket_uuid: &str) -> Result<(), OffsetsError> {
        if self.start.bucket_uuid() == bucket_uuid {
            return Ok(());
        }
        let (found, expected) = (self.start.bucket_uuid().to_owned(), bucket_uuid.to_owned());
        Err(OffsetsError::OtherBucket { found, expected })
    }

    /// The partition as JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        let document = Document {
            node: self.node.clone(),
            start: self.start.to_json(),
            ends: self.ends.iter().map(|(vbid, to)| (vbid.0, to.0)).collect(),
            rolled_back: self.rolled_back.iter().map(|vbid| vbid.0).collect(),
            past_purge: self.past_purge,
            is_followed: self.is_followed,
            persisted_only: self.persisted_only,
            on_rollback: self.on_rollback,
            patience_ms: u64::try_from(self.patience.as_millis()).unwrap_or(u64::MAX),
        };
        // JSON of numbers and strings cannot fail.
        serde_json::to_string(&document).unwrap_or_default()
    }

    /// Reads a document that [`to_json`](Self::to_json) wrote, in this release.
    ///
    /// # Errors
    /// [`PartitionError`].
    pub fn from_json(json: &str) -> Result<Self, PartitionError> {
        let document: Document = serde_json::from_str(json)
            .map_err(|error| PartitionError::Damaged(error.to_string()))?;
        Ok(Self {
            node: document.node,
            start: Checkpoint::from_json(document.start.as_bytes())?,
            ends: document.ends.iter().map(|&(vbid, to)| (Vbid(vbid), Seqno(to))).collect(),
            rolled_back: document.rolled_back.into_iter().map(Vbid).collect(),
            past_purge: document.past_purge,
            is_followed: document.is_followed,
            persisted_only: document.persisted_only,
            on_rollback: document.on_rollback,
            patience: Duration::from_millis(document.patience_ms),
        })
    }

    /// The positions and ends of the vBuckets that have something to read.
    #[must_use]
    pub fn to_stream(&self) -> (Checkpoint, BTreeMap<Vbid, Seqno>) {
        let has_changes = |range: &SeqnoRange| range.size() > 0;
        let ends: BTreeMap<_, _> =
            self.ranges().filter(has_changes).map(|range| (range.vbid, range.to)).collect();
        (self.start.restricted_to(ends.keys().copied()), ends)
    }
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Document {
    node: String,
    /// A checkpoint's document, including its checksum.
    start: String,
    ends: Vec<(u16, u64)>,
    rolled_back: Vec<u16>,
    past_purge: bool,
    is_followed: bool,
    persisted_only: bool,
    on_rollback: OnRollback,
    patience_ms: u64,
}
