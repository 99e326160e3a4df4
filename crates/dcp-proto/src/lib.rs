//! The state machines of a DCP consumer, without IO, clock or tasks, and what a producer shares with
//! them. The machines of the producer are `dcp-producer-proto`.
//!
//! # The contract
//!
//! A machine does nothing by itself. Every method belongs to one of four families:
//!
//! * **getters** read state;
//! * **inputs** (`handle_*`) report what happened: bytes arrived, time passed, a connection closed.
//!   The current time is always an argument;
//! * **commands** request an action: open a stream, acknowledge, close;
//! * **outputs** (`poll_*`) return what the driver has to do: bytes to send, the next time to call
//!   `handle_timeout`, events.
//!
//! After any input or command the driver drains all outputs, `poll_timeout` last, before it feeds
//! the next input.
//!
//! Everything that can become a row is pushed into a [`ChangeSink`], in order and borrowed from the
//! read buffer; `poll_event` returns only what can never be a row.
//!
//! # Where things are
//!
//! * [`consumer`]: the consumer's connection and stream machines;
//! * [`plan`]: what a read covers: the range of each vBucket, and where consecutive reads end;
//! * [`flow_control`]: what each packet counts;
//! * [`topology`]: cluster maps and collection manifests;
//! * [`Position`], [`FailoverLog`] and [`History`]: the position in a vBucket, its history, and the
//!   points a rollback can go back to.
//!
//! Rules that two crates or several files take part in are each in one place:
//!
//! | rule | where |
//! |---|---|
//! | when a stream request must roll back, and how far | `rollback.rs` of `dcp-producer-proto` |
//! | which checks a stream request passes, in which order | `stream_request.rs` of `dcp-producer-proto` |
//! | which points a consumer can go back to | `history.rs` |
//! | what a stream request sends | `consumer/connection/stream_request.rs` |
//! | what else a consumer requests, and which answer belongs to which request | `consumer/connection/requests.rs` |
//! | what each answer to a consumer means, status by status | `consumer/connection/answers.rs` |
//! | which snapshot and branch a stream resumes on | `position.rs`, `failover_log.rs` |
//! | which snapshot markers are valid | `consumer/stream/mod.rs` |
//! | when the consumer acknowledges received bytes | `consumer/window.rs` |
//! | when a silent connection is dead | `consumer/noop.rs`, `noop.rs` of `dcp-producer-proto` |
//! | which changes wait until they are persisted | `consumer/connection/mitigation.rs` |
//! | what all copies have persisted | `stream_task/persistence_watch/mod.rs` of `dcp-consumer` |
//! | whether a stream that ended is opened again | `stream_task/placement/decisions.rs` of `dcp-consumer` |
//!
//! # Glossary
//!
//! One word for one thing, in names, errors, logs and documentation of all crates.
//!
//! | word | what it is |
//! |---|---|
//! | vBucket | one of the (usually 1024) parts of a bucket; each has its own history |
//! | seqno | the number of a change in its vBucket; it only grows along a branch |
//! | snapshot | seqnos that are consistent once all arrived; a *snapshot marker* announces them |
//! | branch, vbuuid | a line of a vBucket's history, and its name; a failover begins a new one |
//! | failover log | the branches of a vBucket, newest first, with the seqnos they begin at |
//! | stream request | DCP_STREAM_REQ: asks for changes from a seqno on a branch to an end seqno |
//! | rollback | the server's history is not the one that was read: changes above a seqno are void |
//! | `on_rollback` | what to do then: *emit* a record, *resync* from the beginning, or *fail* |
//! | epoch | rollbacks seen of a vBucket; distinguishes equal seqnos of two branches |
//! | position | where the consumer is in a vBucket; a *position update* moves it |
//! | checkpoint | positions of all vBuckets, with the bucket and filter they are valid for |
//! | flow-control buffer | bytes a server may send unacknowledged; a *window* counts them |
//! | noop | keep-alive of a connection |
//! | unpersisted | not yet persisted on all copies; *rollback mitigation* delays such changes |
//! | diverged | copies of a vBucket are on different branches |
//! | observe | request seqnos or failover logs from nodes, outside of any stream |
//! | connection pool | connections kept for the next stream |
//! | partition | the part of a bucket that one Spark task reads |
//! | embedded cluster | the producer with nodes, replicas and buckets, in this process |
//! | inject a fault | make the embedded cluster fail in a given way |
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::expect_used, clippy::panic, clippy::unwrap_used))]

pub mod checkpoint;
mod collection_patterns;
pub mod consumer;
mod failover_log;
pub mod flow_control;
mod history;
pub mod plan;
mod position;
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
