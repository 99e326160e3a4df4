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
//!
//! # Glossary
//!
//! One word for one thing, in names, errors, logs and documentation of all crates.
//!
//! | word | what it is |
//! |---|---|
//! | vBucket | one of the (mostly 1024) parts of a bucket; each has a history of its own |
//! | seqno | the number of a change in its vBucket; it only grows along a branch |
//! | snapshot | a range of seqnos that is consistent once all of it has come; a *snapshot marker* announces it |
//! | branch, vbuuid | a line of a vBucket's history, and its name; a failover begins a new one |
//! | failover log | the branches of a vBucket, newest first, with the seqnos they begin at |
//! | stream request | DCP_STREAM_REQ: from where on a branch, and up to where |
//! | rollback | the server's history is no longer the one that was read: what is above a seqno is void |
//! | `on_rollback` | what to do then: *emit* a record and go on, *resync* from the beginning, *fail* |
//! | epoch | how many rollbacks of a vBucket were seen; it tells equal seqnos of two branches apart |
//! | position | where a vBucket's consumer stands; a *position update* moves it |
//! | checkpoint | the positions of all vBuckets, with the bucket and the filter they are good for |
//! | flow-control buffer | how many bytes a server may send before some are acknowledged |
//! | noop | keep-alive of a connection |
//! | unpersisted | not yet on the disks of all copies; *rollback mitigation* delivers such changes later |
//! | diverged | copies of a vBucket are on different branches |
//! | observe | ask nodes for seqnos or failover logs, outside of any stream |
//! | connection pool | connections kept for the next stream |
//! | partition | the part of a bucket that one Spark task reads |
//! | embedded cluster | the producer with nodes, replicas and buckets, in this process |
//! | inject a fault | have the embedded cluster fail in a given way |
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::expect_used, clippy::panic, clippy::unwrap_used))]

pub mod checkpoint;
mod collection_patterns;
pub mod consumer;
mod failover_log;
pub mod flow_control;
mod history;
pub mod micro_batch;
mod position;
pub mod producer;
mod row_filter;
mod sink;
pub mod topology;

pub use collection_patterns::{CollectionPatterns, InvalidPatterns};
pub use failover_log::{FailoverLog, InvalidFailoverLog};
pub use history::{CompletePoint, History};
pub use position::{Position, Snapshot};
pub use row_filter::{InvalidRowFilter, RowFilter};
pub use sink::{
    BatchSink, CaughtUp, Change, ChangeSink, MutationRun, OnRollback, Op, Rollback, RunError,
    SinkError, SystemEventRecord,
};
