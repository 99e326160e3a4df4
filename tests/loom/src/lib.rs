//! The queue and the watermark of `dcp-consumer`, compiled with the types of loom instead of those
//! of the standard library and tokio, so that a model can try every interleaving of their threads
//! and every value that a relaxed load may return.

// The unit tests of these files belong to dcp-consumer.
#![cfg(not(test))]
#![allow(dead_code, unreachable_pub, reason = "the models use a part of each file")]

#[path = "../../../crates/dcp-consumer/src/error.rs"]
mod error;
#[path = "../../../crates/dcp-consumer/src/queue.rs"]
mod queue;
mod sync;
#[path = "../../../crates/dcp-consumer/src/watermark.rs"]
mod watermark;

pub mod models;

pub use error::{Error, ErrorKind};
pub use watermark::{AckToken, Acknowledger};
