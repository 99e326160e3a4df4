//! Consecutive bounded reads: planning them, and reading.
//!
//! Used by Spark. Its driver has one [`Planner`] for the lifetime of a query, which plans the
//! [end](Planner::end) of each batch and its [parts](Planner::partitions); each task [opens](open)
//! the stream of one. All decisions are made by [`dcp_proto::plan`].

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
