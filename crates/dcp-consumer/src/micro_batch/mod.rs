//! Bounded reads that follow each other: the side that plans them, and the one that reads.
//!
//! What Spark runs. Its driver has one [`Planner`] for as long as a query lives, asks it for the
//! [end](Planner::end) of each batch and for the [partitions](Planner::partitions) to read for it;
//! each task [opens](open) the stream of one partition. What is decided is decided by
//! [`dcp_proto::micro_batch`].

mod error;
mod planner;
mod reader;

pub use dcp_proto::micro_batch::{
    Limits, Offset, Offsets, OffsetsError, Partition, PartitionError, PlanError, Start,
};
pub use error::PlannerError;
pub use planner::{Planner, PlannerOptions};
pub use reader::{open, stream_options};
