//! What is read, as one value and one document.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dcp_wire::{Seqno, Vbid};
use serde::{Deserialize, Serialize};

use super::VbucketRange;
use crate::OnRollback;
use crate::checkpoint::{Checkpoint, CheckpointError, Envelope, Form, StoredFilter};
use crate::consumer::EndKind;

const FORMAT: &str = "dcp_rs read plan";
const VERSION: u64 = 1;

/// What the ends of a plan stand for.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Ends {
    /// There are none: the read goes on with what is written later.
    #[default]
    Never,
    /// What the server had when the read was planned.
    Now,
    /// Seqnos that somebody named; they may not have been written yet.
    Given,
    /// Seqnos that exist: a vBucket with a lower high seqno was rolled back since.
    Exist,
}

/// What is read: the changes of a bucket that a filter leaves, between two seqnos of each vBucket.
///
/// Plain data, made once and run anywhere, as JSON if that is elsewhere. Whoever runs it chooses
/// only how the changes are delivered. Parts of it can be run on their own: see
/// [`split`](Self::split).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReadPlan {
    /// The bucket, the filter, and positions to begin at; a vBucket without one is read from its
    /// beginning.
    pub start: Checkpoint,
    /// The vBuckets to read, and their last seqnos; [`Seqno::MAX`] without an end.
    pub to: BTreeMap<Vbid, Seqno>,
    /// What these seqnos stand for.
    pub ends: Ends,
    /// vBuckets with a rollback to their position, which is delivered before the changes.
    pub rolled_back: Vec<Vbid>,
    /// Whether to skip deletions that the server has purged above the positions.
    pub past_purge: bool,
    /// Whether to stop at the ends exactly, even inside a snapshot, since another read continues
    /// from there.
    pub clamp: bool,
    /// Whether to read only what is persisted on all copies.
    pub persisted_only: bool,
    /// Whether the whole snapshot of the last change must be persisted on all copies, too.
    pub end_persisted: bool,
    /// What to do on a rollback meanwhile.
    pub on_rollback: OnRollback,
    /// The node of the vBuckets when the read was planned and split; the read follows them if they
    /// move.
    pub node: Option<String>,
    /// Longest time a vBucket, or the whole cluster, may be unavailable.
    pub retry_timeout: Duration,
}

impl ReadPlan {
    /// A plan of ranges that another read may continue from.
    ///
    /// It stops there exactly if so, and fails on a rollback: the planner of the next read decides
    /// what follows.
    #[must_use]
    pub fn of_ranges(
        bucket_uuid: &str,
        filter: StoredFilter,
        ranges: Vec<VbucketRange>,
        is_followed: bool,
    ) -> Self {
        let mut plan = Self {
            start: Checkpoint::new(bucket_uuid, filter),
            to: BTreeMap::new(),
            ends: Ends::Exist,
            rolled_back: Vec::new(),
            past_purge: false,
            clamp: is_followed,
            persisted_only: false,
            end_persisted: false,
            on_rollback: OnRollback::Fail,
            node: None,
            retry_timeout: Duration::ZERO,
        };
        plan.extend(ranges);
        plan
    }

    fn extend(&mut self, ranges: Vec<VbucketRange>) {
        for range in ranges {
            self.to.insert(range.vbid, range.to);
            if range.rolled_back {
                self.rolled_back.push(range.vbid);
            }
            self.past_purge |= range.past_purge;
            self.start.advance(range.into());
        }
    }

    /// The same for other ranges, on one node.
    pub(super) fn with_ranges(&self, node: String, ranges: Vec<VbucketRange>) -> Self {
        let mut part = Self {
            start: self.start.restricted_to([]),
            to: BTreeMap::new(),
            rolled_back: Vec::new(),
            past_purge: false,
            node: Some(node),
            ..self.clone()
        };
        part.extend(ranges);
        part
    }

    /// Identity of the bucket.
    #[must_use]
    pub fn bucket_uuid(&self) -> &str {
        self.start.bucket_uuid()
    }

    /// Which documents are read, and which of their changes.
    #[must_use]
    pub fn filter(&self) -> StoredFilter {
        self.start.filter().cloned().unwrap_or_default()
    }

    /// What is read of each vBucket, ascending.
    pub fn ranges(&self) -> impl Iterator<Item = VbucketRange> {
        self.to.iter().map(|(&vbid, &to)| VbucketRange {
            rolled_back: self.rolled_back.contains(&vbid),
            past_purge: self.past_purge,
            ..VbucketRange::new(vbid, self.start.stream_position(vbid), to)
        })
    }

    /// Upper bound of the number of changes; [`u64::MAX`] without an end.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.ranges().fold(0, |sum, range| sum.saturating_add(range.size()))
    }

    /// The ranges to request from the server.
    ///
    /// The planner asked about those that have only a rollback to deliver. Any other is requested
    /// even if nothing is left to read: only the server can detect that the position is no longer
    /// on its history.
    pub fn streamed(&self) -> impl Iterator<Item = VbucketRange> {
        self.ranges().filter(|range| !range.rolled_back || range.size() > 0)
    }

    /// What is known of the end of a range, whose vBucket has `high` as its high seqno now. `seen`
    /// is whether the end is known to have been there.
    #[must_use]
    pub fn end_kind(&self, range: &VbucketRange, high: Seqno, seen: bool) -> EndKind {
        match self.ends {
            Ends::Never => EndKind::Awaited,
            Ends::Now => EndKind::Latest,
            Ends::Exist => EndKind::Required,
            Ends::Given if high >= range.to => EndKind::Seen,
            Ends::Given if seen || range.start_seqno() >= range.to => EndKind::Latest,
            Ends::Given => EndKind::Awaited,
        }
    }

    /// Checks that a bucket is the one the read was planned for.
    ///
    /// # Errors
    /// [`CheckpointError::OtherBucket`].
    pub fn check(&self, bucket_uuid: &str) -> Result<(), CheckpointError> {
        self.start.check_bucket(bucket_uuid)
    }

    /// The plan as JSON.
    #[must_use]
    pub fn to_json(&self) -> String {
        let content = Content {
            node: self.node.clone(),
            start: self.start.to_json(),
            to: self.to.iter().map(|(vbid, to)| (vbid.0, to.0)).collect(),
            ends: self.ends,
            rolled_back: self.rolled_back.iter().map(|vbid| vbid.0).collect(),
            past_purge: self.past_purge,
            clamp: self.clamp,
            persisted_only: self.persisted_only,
            end_persisted: self.end_persisted,
            on_rollback: self.on_rollback,
            retry_timeout_ms: u64::try_from(self.retry_timeout.as_millis()).unwrap_or(u64::MAX),
        };
        Envelope::write(FORMAT, VERSION, content)
    }

    /// Reads a document that [`to_json`](Self::to_json) wrote, in this release.
    ///
    /// # Errors
    /// [`CheckpointError::Damaged`] or [`CheckpointError::Version`].
    pub fn from_json(json: &str) -> Result<Self, CheckpointError> {
        let found = Envelope::version_of(json.as_bytes(), FORMAT, Form::Plan)?;
        if found != VERSION {
            let (form, supported) = (Form::Plan, VERSION);
            return Err(CheckpointError::Version { form, found, supported });
        }
        let content: Content = Envelope::read(json.as_bytes(), Form::Plan)?;
        let damaged = |what| Err(CheckpointError::damaged(Form::Plan, what));
        let to: BTreeMap<_, _> =
            content.to.iter().map(|&(vbid, to)| (Vbid(vbid), Seqno(to))).collect();
        if to.len() != content.to.len() {
            return damaged("a vBucket that is read twice");
        }
        let rolled_back: Vec<_> = content.rolled_back.into_iter().map(Vbid).collect();
        if rolled_back.iter().any(|vbid| !to.contains_key(vbid)) {
            return damaged("a rollback of a vBucket that is not read");
        }
        if rolled_back.iter().collect::<BTreeSet<_>>().len() != rolled_back.len() {
            return damaged("a vBucket that is rolled back twice");
        }
        let start = Checkpoint::from_json(content.start.as_bytes())?;
        // Without one, the whole bucket would be read.
        if start.filter().is_none() {
            return damaged("positions without a filter");
        }
        // Nothing of such a range would be read, in silence. A stream may begin above an end that
        // somebody named.
        let begins = |vbid| start.position(vbid).map_or(Seqno::ZERO, |position| position.seqno);
        if content.ends == Ends::Exist && to.iter().any(|(&vbid, &to)| to < begins(vbid)) {
            return damaged("a range that ends before it begins");
        }
        Ok(Self {
            node: content.node,
            start,
            to,
            ends: content.ends,
            rolled_back,
            past_purge: content.past_purge,
            clamp: content.clamp,
            persisted_only: content.persisted_only,
            end_persisted: content.end_persisted,
            on_rollback: content.on_rollback,
            retry_timeout: Duration::from_millis(content.retry_timeout_ms),
        })
    }
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Content {
    node: Option<String>,
    /// A checkpoint's document.
    start: String,
    to: Vec<(u16, u64)>,
    ends: Ends,
    rolled_back: Vec<u16>,
    past_purge: bool,
    clamp: bool,
    persisted_only: bool,
    end_persisted: bool,
    on_rollback: OnRollback,
    retry_timeout_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plan_that_reads_a_vbucket_twice_is_refused_whoever_wrote_it() {
        let document = |to| {
            let start = Checkpoint::new("bucket", StoredFilter::default()).to_json();
            let content = Content {
                node: None,
                start,
                to,
                ends: Ends::Exist,
                rolled_back: Vec::new(),
                past_purge: false,
                clamp: true,
                persisted_only: false,
                end_persisted: false,
                on_rollback: OnRollback::Fail,
                retry_timeout_ms: 0,
            };
            ReadPlan::from_json(&Envelope::write(FORMAT, VERSION, content))
        };
        assert_eq!(document(vec![(3, 5), (4, 5)]).map(|plan| plan.size()), Ok(10));
        let refused = document(vec![(3, 5), (3, 6)]).unwrap_err();
        assert_eq!(refused, CheckpointError::damaged(Form::Plan, "a vBucket that is read twice"));
    }
}
