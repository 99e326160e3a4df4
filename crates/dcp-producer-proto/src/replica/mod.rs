//! The consumer's end of DCP inside a server, which feeds the replicas of a node.
//!
//! ```text
//! manager ── ADD_STREAM ──► consumer's end ── STREAM_REQ ──► producer
//!            CLOSE_STREAM        ▲    │                         │
//!                                │    ├── BUFFER_ACK,           │
//!                                │    │   SEQNO_ACK ──────────► │
//!                                │    ▼                         │
//!                           [ReplicaStore] ◄── markers, changes ┘
//! ```
//!
//! A connection opened without the producer flag is served by a [`Connection`]. The cluster manager
//! adds streams to it, and relays all other packets between it and the node with the active copy.

mod config;
mod connection;
mod item;
mod negotiation;
mod store;
mod stream;

pub use config::Config;
pub use connection::Connection;
pub use store::{Completion, NoReplicas, NotApplied, ReplicaPosition, ReplicaStore};
