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
//! Each rule of the protocol is in one place. Files without a crate are in this one; the test is the first
//! to read, and to see failing when the rule changes.
//!
//! | rule | protocol page | file | test |
//! |---|---|---|---|
//! | how far a client must roll back, and whether at all | `rollback` | `rollback.rs` of `dcp-producer-proto` | `rollback_decisions_follow_the_rows` |
//! | which checks a stream request passes, in which order | `stream-request` | `stream_request.rs` of `dcp-producer-proto` | `stream_requests_are_checked_by_the_rows` |
//! | which branches a failover log keeps | `failover-log` | `failover_table.rs` of `dcp-producer-proto` | `ft_03_the_oldest_branches_fall_out_of_a_full_table` |
//! | where a snapshot that is sent begins and ends | `snapshot-marker` | `sending.rs` of `dcp-producer-proto` | `ss_01_and_ss_02_checkpoint_is_a_snapshot_and_later_items_continue_it` |
//! | how a key, a value and a tombstone are laid out for a client | `open-connection` | `message_format.rs` of `dcp-producer-proto` | `tombstone_layout_follows_the_open_flags` |
//! | when a producer stops because the buffer is full | `flow-control` | `window.rs` of `dcp-producer-proto` | `fc_39_a_window_with_exactly_its_size_outstanding_is_closed` |
//! | what each packet counts | `flow-control` | `flow_control.rs` | `flow_control_counts_every_opcode_whole_or_not_at_all` |
//! | when a consumer acknowledges received bytes | `flow-control` | `consumer/window.rs` | `window_acknowledges_a_quarter_at_once` |
//! | when a silent connection is dead | `dead-connections` | `consumer/noop.rs`, `noop.rs` of `dcp-producer-proto` | `connection_that_is_silent_is_dead_after_two_intervals` |
//! | which steps set a connection up, in which order | `sasl`, `open-connection`, `control` | `consumer/bootstrap/mod.rs` | `connection_is_set_up_in_four_round_trips` |
//! | which proof of a password a SCRAM login sends, and which it accepts | `sasl` | `sasl/scram_client.rs` of `dcp-wire`, `sasl/scram_server.rs` of `dcp-wire` | `scram_client_refuses_a_server_that_does_not_know_the_password` |
//! | when a token is renewed, and what is held back without a valid one | `sasl` | `consumer/connection/login.rs` | `tk_07_token_that_expired_holds_back_acknowledgements_and_answers_to_noops` |
//! | which features and controls every connection requests | `control` | `consumer/bootstrap/config.rs` | `ct_14_expirations_are_asked_for_with_what_they_need` |
//! | which open flags and further controls the options of a stream add | `control` | `opening.rs` of `dcp-consumer` | `op_07_and_op_08_flags_that_servers_refuse_are_not_combined` |
//! | what a stream request sends | `stream-request` | `consumer/connection/stream_request.rs` | `stream_request_is_for_the_active_copy_and_every_deletion` |
//! | what else a consumer requests, and which answer belongs to which request | `protocol-flow` | `consumer/connection/requests.rs` | `answer_belongs_to_its_request_by_opaque_and_opcode` |
//! | what each answer to a consumer means, status by status, and each end of a stream | `stream-request`, `stream-end` | `consumer/reaction.rs` | `sv_01_answers_to_stream_requests_each_have_the_reaction_of_the_table` |
//! | what a consumer negotiates, and what it does without | `control` | `consumer/capabilities.rs` | `sv_02_server_tables_say_what_recorded_servers_answered` |
//! | which markers are valid, when a snapshot is complete, and with it a finite stream | `snapshot-marker`, `oso-snapshot` | `consumer/stream/mod.rs` | `rule_10_finite_stream_is_complete_with_the_snapshot_that_holds_its_end` |
//! | which snapshot and branch a stream resumes on | `failover-log` | `position.rs`, `failover_log.rs` | `branch_is_chosen_by_the_end_of_the_snapshot` |
//! | to which earlier point a consumer goes back at a rollback | `rollback` | `history.rs` | `history_keeps_the_point_that_a_rollback_goes_to` |
//! | what a stream leaves out by default: scope `_system`, transaction records | `collections` | `filter.rs` of `dcp-consumer` | `system_scope_is_hidden_unless_the_filter_names_it` |
//! | which collections a pattern matches | `collections` | `collection_patterns.rs` | `collection_pattern_must_match_scope_and_collection` |
//! | which documents are delivered, and which only move the position | `collections` | `consumer/delivery.rs` | `collection_patterns_choose_from_the_manifest_and_hide_the_others` |
//! | with which filters a stored position may be used | `collections` | `checkpoint/filter/mod.rs` | `filter_that_is_contained_was_delivered` |
//! | how a checkpoint is written, and which texts are read | | `checkpoint/document.rs` | `checkpoint_document_may_be_reformatted_but_not_changed` |
//! | which changes wait until they are persisted, and for what | `failure-scenarios` | `consumer/unpersisted.rs`, `consumer/connection/mitigation.rs` | `rule_11_a_change_waits_until_it_is_persisted_everywhere` |
//! | what all copies have persisted | `failure-scenarios` | `observe/persisted.rs` of `dcp-consumer`, `stream_task/persistence_watch/mod.rs` of `dcp-consumer` | `persistence_is_that_of_the_slowest_copy_once_all_have_answered` |
//! | whether a stream that ended is opened again, and after which wait | `stream-request` | `stream_task/placement/decisions.rs` of `dcp-consumer`, `retry.rs` of `dcp-consumer` | `stream_ends_each_have_their_decision` |
//! | when a packet that cannot be read ends the stream | | `stream_task/poison_packets.rs` of `dcp-consumer` | `packet_that_ends_three_connections_in_a_row_ends_the_stream` |
//! | which node has a vBucket, and which cluster map is newer | `protocol-flow` | `topology/bucket_config.rs` | `map_revision_of_a_newer_epoch_is_newer` |
//! | at which address and port a node is reached, and when at an alternate one | `protocol-flow` | `topology/node.rs` | `alternate_addresses_have_their_own_ports_or_the_usual_ones` |
//! | where a planned read begins, and whether a rollback or a purge changes that | `rollback` | `plan/batch/begin.rs` | `rollback_is_reported_and_read_again_from_the_common_seqno` |
//! | how far a checkpoint may go while batches are acknowledged in any order | | `watermark.rs` of `dcp-consumer` | `checkpoint_never_passes_a_batch_that_is_not_acknowledged` |
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
    BatchSink, CaughtUp, Change, ChangeSink, MutationRun, OnPurge, OnRollback, Op, Rollback,
    RunError, SinkError, SystemEventRecord,
};
