//! The producer: its decisions and its streams.

mod failover_table;
mod source;

pub use failover_table::FailoverTable;
pub use source::{Backfill, BucketSource, Item, ItemKind, MemoryRead, VBucketSource, VBucketState};
