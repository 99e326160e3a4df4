//! The state machines of a DCP producer, without IO, clock or tasks.
//!
//! They follow the contract of [`dcp_proto`], with which they share positions and flow control.
//! Nothing that only reads a bucket depends on this crate.
//!
//! A server gives each of its connections a [`Connection`], hands it every packet with a DCP
//! opcode, and drains [`Connection::poll_transmit`] into its socket. The streamed data comes from a
//! [`BucketSource`], which the server implements on top of its storage; when a vBucket changes, the
//! server notifies the connections that stream it ([`Connection::notify`]).
//!
//! * [`FailoverTable`]: the history branches of a vBucket;
//! * [`rollback`]: whether a client may resume from its position, with the reason;
//! * [`Explanation`]: that answer in a sentence, with the decisive numbers;
//! * one stream machine per stream turns disk images and memory checkpoints into snapshots;
//! * [`replica`]: the consumer's end, which feeds the replicas of a node.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::expect_used, clippy::panic, clippy::unwrap_used))]

mod connection;
mod control;
mod disconnect;
mod explanation;
mod failover_table;
mod filter;
mod item;
mod message_format;
mod noop;
mod open;
mod oso;
mod output;
mod prefetch;
mod read_ahead;
mod refusal;
pub mod replica;
mod reply;
pub mod rollback;
mod sending;
mod settings;
mod snapshot;
mod source;
mod state;
mod stream;
mod stream_request;
mod streams;
mod takeover;
mod window;

pub use connection::{Connection, Transmit};
pub use disconnect::Disconnect;
pub use explanation::Explanation;
pub use failover_table::{FailoverTable, PrunedToZero};
pub use item::{CheckpointItems, Item, ItemKind, Slots};
pub use settings::{ConnectionConfig, Features, OsoBackfill, ServerVersion, StuckClients};
pub use source::{
    Backfill, BackfillFailed, BucketSource, Cursor, DiskShare, DurableSeqnos, MemoryPressure,
    MemoryRead, Privilege, VBucketSource,
};
pub use state::VBucketState;
