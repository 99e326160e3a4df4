//! What a read covers.
//!
//! A [`ReadPlan`] is what is read: the bucket, the filter, the [range](VbucketRange) of each
//! vBucket, and what to do at a rollback. A stream, a replication and a task of Spark all run one.
//!
//! # Consecutive reads
//!
//! A driver that plans reads for tasks on other machines, and learns only that they are done, needs
//! a smaller position than a stream: an [`Offset`], a seqno on a history branch. From [`Offsets`]
//! and the observed state of the server ([`Observed`]), this module decides:
//!
//! * [`rollback_probes`]: which positions to ask the server about, where its history is not enough;
//! * [`plan_end`]: where the next read ends, and whether a vBucket must be rolled back;
//! * [`plan_ranges`]: what to read, checked again against the server's history because a read may
//!   be planned long before it runs;
//! * [`ReadPlan::split`]: which task reads which ranges.
//!
//! All are pure: no IO, no clock.
//!
//! # When an offset is a true position
//!
//! The end of a read is chosen before a task learns which snapshot contains it. With
//! [`Limits::persisted_only`] an end is offered only if it is persisted on every copy of the
//! vBucket, and the task ends only when the snapshot of its last row is persisted as well: then any
//! copy that is promoted has everything up to that snapshot's end, and the offset can be used as a
//! complete snapshot. Without it, a new branch may have begun inside that unknown snapshot, so a
//! new branch restarts the vBucket unless it is known to begin above the snapshot.
mod batch;
#[cfg(test)]
mod checkpoint_tests;
mod range;
mod read_plan;
mod share;
mod split;
mod start;
#[cfg(test)]
mod tests;

pub use batch::{Answer, Limits, Observed, PlanError, plan_end, plan_ranges, rollback_probes};
pub use range::VbucketRange;
pub use read_plan::{Ends, ReadPlan};
pub use start::Start;

pub use crate::checkpoint::{Offset, Offsets};
