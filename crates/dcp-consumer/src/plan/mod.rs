//! Consecutive bounded reads: planning them, and reading.
//!
//! A [`Planner`] plans the [end](Planner::end) of each batch and its
//! [partitions](Planner::partitions). Each is a [`ReadPlan`]: plain data, sent as JSON to the process
//! that reads it, which [opens](open) its stream, or [runs](crate::Client::run) it on a client that it
//! has. Store the end once every partition was read: the next batch starts there. Spark's driver and
//! tasks do this, and so does `examples/plan.rs`. All decisions are made by [`dcp_proto::plan`].
//!
//! A partition may be read again. Its bounds, and the rollbacks that it begins with, are the same; a
//! key that was written again since has its change above them. If the history of a vBucket has changed
//! since the plan, the stream fails with [`ErrorKind::Rollback`](crate::ErrorKind::Rollback) and
//! nothing of the batch counts: plan the partitions of the same end again, or another batch from the
//! same start. A read that no other follows ([`Limits::is_last`]) rolls back by itself.

mod error;
mod planner;
mod reader;

pub use dcp_proto::checkpoint::Positions;
pub use dcp_proto::plan::{
    Ends, Limits, Offset, Offsets, PlanError, ReadPlan, Start, VbucketRange,
};
pub use error::PlannerError;
pub use planner::Planner;
pub use reader::open;
