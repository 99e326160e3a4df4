//! The other end of DCP inside a server: how the replicas of a node are fed.
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
//! A server that has such a connection opened to it (DCP_OPEN without the producer flag) gives it
//! a [`Connection`]. The cluster manager adds streams to it, and passes everything else on to the
//! node that has the active copy, and back.

mod config;
mod connection;
mod item;
mod negotiation;
mod store;
mod stream;

pub use config::Config;
pub use connection::Connection;
pub use store::{Completion, NoReplicas, NotApplied, ReplicaPosition, ReplicaStore};
