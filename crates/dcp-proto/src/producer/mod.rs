//! The producer: its decisions and its streams.

mod connection;
mod control;
mod disconnect;
mod failover_table;
mod filter;
mod noop;
mod open;
mod outlet;
mod refusal;
mod reply;
mod requests;
pub mod rollback;
mod settings;
mod shape;
mod source;
mod stream;
mod stream_request;
mod streams;
mod window;

pub use connection::{Connection, Transmit};
pub use disconnect::Disconnect;
pub use failover_table::{FailoverTable, PrunedToZero};
pub use settings::{ConnectionConfig, Features};
pub use source::{
    Backfill, BackfillFailed, BucketSource, Item, ItemKind, MemoryRead, VBucketSource, VBucketState,
};
