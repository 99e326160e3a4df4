//! Planning of consecutive bounded reads, such as the micro-batches of Spark.
//!
//! A driver that assigns ranges of seqnos to tasks on other machines, and learns only that they are
//! done, needs a smaller position than a stream: [`Offset`], a seqno on a history branch. From
//! [`Offsets`] and the observed state of the server ([`Observed`]), this module decides:
//!
//! * [`questions`]: what else to ask the server, where its history is not enough;
//! * [`plan_end`]: where the next batch ends, and whether a vBucket must be rolled back;
//! * [`plan_ranges`]: what to read for a batch, checked again against the server's history because
//!   a batch may be planned long before it runs;
//! * [`pack()`]: which task reads which ranges; a [`Partition`] describes the read of one task.
//!
//! All are pure: no IO, no clock.
//!
//! # When an offset is a true position
//!
//! The end of a batch is chosen before a task learns which snapshot contains it. With
//! [`Limits::persisted_only`] an end is offered only if it is persisted on every copy of the
//! vBucket, and the task ends only when the snapshot of its last row is persisted as well: then any
//! copy that is promoted has everything up to that snapshot's end, and the offset can be used as a
//! complete snapshot. Without it, a new branch may have begun inside that unknown snapshot, so a
//! new branch restarts the vBucket unless it is known to begin above the snapshot.
#[cfg(test)]
mod checkpoint_tests;
mod offsets;
mod pack;
mod partition;
mod plan;
mod share;
mod start;
#[cfg(test)]
mod tests;

pub use offsets::{Offset, Offsets, OffsetsError};
pub use pack::{Located, pack};
pub use partition::{Partition, PartitionError};
pub use plan::{Answer, Limits, Observed, PlanError, SeqnoRange, plan_end, plan_ranges, questions};
pub use start::Start;
