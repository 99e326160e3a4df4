//! The producer: its decisions and its streams.

mod connection;
mod disconnect;
mod failover_table;
mod settings;
mod source;

pub use connection::{Connection, Transmit};
pub use disconnect::Disconnect;
pub use failover_table::{FailoverTable, PrunedToZero};
pub use settings::{ConnectionConfig, Features};
pub use source::{
    Backfill, BackfillFailed, BucketSource, Item, ItemKind, MemoryRead, VBucketSource, VBucketState,
};
