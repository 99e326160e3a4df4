//! The state machines of a DCP consumer and a DCP producer, without IO, clock or tasks.
//!
//! # The contract
//!
//! A machine is driven from outside. Every method belongs to one of four families:
//!
//! * **getters** look;
//! * **inputs** (`handle_*`) feed what happened: bytes that arrived, time that passed, a
//!   connection that closed. The current time is always an argument;
//! * **commands** ask for something: open a stream, acknowledge, close;
//! * **outputs** (`poll_*`) hand out what is to be done: bytes to send, the next moment at which
//!   `handle_timeout` wants to be called, events.
//!
//! After any input or command the driver drains all outputs, `poll_timeout` last, before it feeds
//! the next input.
//!
//! Everything that can become a row is pushed, in order and borrowed from the read buffer, into a
//! [`ChangeSink`]; only what can never be a row goes through `poll_event`.
//!
//! # Where things are
//!
//! * [`consumer`]: the consumer's connection and stream machines;
//! * [`producer`]: the producer's decisions: failover table, rollback, stream requests, streams;
//! * [`micro_batch`]: bounded reads that follow each other: offsets, limits, ranges, rollbacks;
//! * [`topology`]: cluster maps and collection manifests;
//! * [`Position`], [`FailoverLog`] and [`History`]: where a vBucket's consumer stands, on which
//!   history, and where it can go back to.
#![forbid(unsafe_code)]

pub mod checkpoint;
pub mod consumer;
mod failover_log;
pub mod flow_control;
mod history;
pub mod micro_batch;
mod position;
pub mod producer;
mod sink;
pub mod topology;

pub use failover_log::{FailoverLog, InvalidFailoverLog};
pub use history::{CompletePoint, History};
pub use position::{Position, Snapshot};
pub use sink::{
    BatchSink, Change, ChangeSink, MutationRun, OnRollback, Op, Rollback, RunError, SinkError,
    SystemEventRecord,
};
