//! Planning of bounded reads that follow each other, as the micro-batches of Spark do.
//!
//! A driver that hands ranges of seqnos to tasks on other machines, and learns nothing from them
//! but that they are done, needs a smaller position than a stream has: [`Offset`], which is a seqno
//! on a history branch. This module decides, from [`Offsets`] and what the server says of itself
//! ([`Observed`]):
//!
//! * [`questions`]: what the server has to be asked besides, where its history does not tell;
//! * [`plan_end`]: up to where the next batch goes, and whether a vBucket is to be rolled back;
//! * [`plan_ranges`]: what is to be read for a batch, checked again against the server's history,
//!   because a batch may be planned long before it runs;
//! * [`pack()`]: which ranges go into which task; a [`Partition`] is what that task reads.
//!
//! All are pure: no IO, no clock.
//!
//! # When an offset is a true position
//!
//! The end of a batch is fixed before a task learns which snapshot it falls into. With
//! [`Limits::persisted_only`] an end is offered only if it is persisted on every copy of the
//! vBucket, and the task ends only when the snapshot its last row fell into is persisted too: then
//! whichever copy is promoted holds everything up to that snapshot's end, and the offset may be
//! claimed as a complete snapshot. Without it any new branch may have begun inside that unknown
//! snapshot, so any branch that cannot be shown to begin above it restarts the vBucket.
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
