//! Consecutive bounded reads: planning them, and reading.
//!
//! Used by Spark. Its driver has one [`Planner`] for the lifetime of a query, which plans the
//! [end](Planner::end) of each batch and its [partitions](Planner::partitions); each task
//! [opens](open) the stream of one partition. All decisions are made by [`dcp_proto::micro_batch`].

mod error;
mod planner;
mod reader;

pub use dcp_proto::micro_batch::{
    Limits, Offset, Offsets, OffsetsError, Partition, PartitionError, PlanError, Start,
};
pub use error::PlannerError;
pub use planner::{Planner, PlannerOptions};
pub use reader::{open, stream_options};
