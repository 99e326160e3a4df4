//! What a connection reports to its driver.

use core::fmt;
use std::collections::BTreeMap;

use bytes::Bytes;
use dcp_wire::message::{ObservedSeqno, StreamEndReason};
use dcp_wire::{CollectionId, Opcode, Seqno, Status, Vbid, Vbuuid};

use super::{Exclusions, OpenStreamError};
use crate::{CaughtUp, FailoverLog, History, Position, Rollback};

/// Where a vBucket's next stream resumes: everything it needs from the previous one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamPosition {
    /// Position of the vBucket: everything up to here was given to the sink.
    pub position: Position,
    /// Positions a rollback can go back to.
    pub history: History,
    /// What is known of the stream's end.
    pub end: EndKind,
    /// High seqno when the vBucket was first streamed; `None` once that was delivered.
    pub catch_up: Option<Seqno>,
    /// Whether the delivered changes are void because an out-of-sequence-order snapshot was not
    /// completed: the vBucket starts again, with a rollback record first.
    pub begins_again: bool,
    /// How often in a row the server has purged deletions that the vBucket's first load had not
    /// reached, so that the load began again.
    pub overtaken: u32,
}

/// What is known of a stream's end seqno.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum EndKind {
    /// It may not have been written yet: the stream waits for it. A rollback means that history was
    /// lost, possibly including the end.
    #[default]
    Awaited,
    /// The server had it when it was chosen. If a failover has lost it by the time the stream is
    /// requested again, the stream ends with what there is.
    Seen,
    /// A failover may have lost it: the server's high seqno is requested first, and the stream ends
    /// there if it is lower.
    Latest,
    /// It must exist: the stream never ends at a lower one, not even after a rollback. The driver
    /// compares it with the server's high seqno.
    Required,
}

impl EndKind {
    /// The same once a request may have met a server that has lost the end.
    #[must_use]
    pub const fn after_a_try(self) -> Self {
        match self {
            Self::Seen => Self::Latest,
            other => other,
        }
    }

    /// The same once the server has lost history.
    pub(super) const fn after_a_rollback(self) -> Self {
        match self {
            Self::Required => Self::Required,
            _ => Self::Latest,
        }
    }
}

impl StreamPosition {
    /// From a position alone.
    #[must_use]
    pub fn new(position: Position) -> Self {
        Self::with_history(position, History::default())
    }

    /// The same with what is known of the end.
    #[must_use]
    pub const fn with_end(mut self, end: EndKind) -> Self {
        self.end = end;
        self
    }

    /// The same, reporting once everything up to `seqno` was delivered.
    #[must_use]
    pub const fn with_catch_up(mut self, seqno: Seqno) -> Self {
        self.catch_up = Some(seqno);
        self
    }

    /// From the contents of a checkpoint, as after a restart.
    #[must_use]
    pub fn with_history(position: Position, mut history: History) -> Self {
        history.push(&position);
        let end = EndKind::default();
        Self { position, history, end, catch_up: None, begins_again: false, overtaken: 0 }
    }
}

/// A vBucket's new position, and where a rollback could take it from there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PositionUpdate {
    /// The vBucket.
    pub vbid: Vbid,
    /// After the last item of it that was given to the sink.
    pub position: Position,
    /// None of them is above the position.
    pub history: History,
}

/// Why a stream ended.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EndCause {
    /// The requested end was reached: its snapshot is complete, or the server ended the stream.
    Complete,
    /// The server ended it.
    Ended(StreamEndReason),
    /// It was never opened.
    Refused(OpenStreamError),
    /// The server asked for a rollback, and [`OnRollback::Fail`](crate::OnRollback::Fail) is set.
    RolledBack {
        /// What it would do to the stream.
        rollback: Rollback,
        /// The seqno that the server asked to go back to.
        to: Seqno,
    },
    /// The first load would begin again, as it did so many times: the server purges deletions that
    /// it has not reached.
    Overtaken(u32),
    /// [`close_stream`](super::Connection::close_stream) was called.
    Closed,
}

/// The high seqnos of a collection on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectionSeqnos {
    /// The collection.
    pub collection: CollectionId,
    /// Its highest seqno in each active vBucket that contains it, or how the node refused.
    pub seqnos: Result<Vec<(Vbid, Seqno)>, Status>,
}

/// What a connection reports to its driver, apart from anything that can be a row.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// The server accepted a stream.
    StreamOpened {
        /// Its vBucket.
        vbid: Vbid,
        /// Its newest branch, if changes wait until they are
        /// [persisted](super::Connection::persisted) on it: changes that are reported as persisted
        /// before they arrive need not wait.
        persists_on: Option<Vbuuid>,
    },
    /// A stream ended. Everything it gave to the sink comes before what another connection delivers
    /// of the same vBucket.
    StreamEnded {
        /// Its vBucket.
        vbid: Vbid,
        /// Why.
        cause: EndCause,
        /// Where to resume.
        from: Box<StreamPosition>,
    },
    /// A vBucket was rolled back; the record of it is in the sink.
    RolledBack(Rollback),
    /// Everything that a vBucket had when it was first streamed has been delivered.
    CaughtUp(CaughtUp),
    /// Changes of a vBucket on this branch are not yet persisted on all copies: report progress
    /// with [`persisted`](super::Connection::persisted). `None`: all are persisted.
    Unpersisted {
        /// The vBucket.
        vbid: Vbid,
        /// Its newest branch.
        vbuuid: Option<Vbuuid>,
    },
    /// The highest seqnos of the node's active vBuckets, as far as its streams contain them; see
    /// [`request_high_seqnos`](super::Connection::request_high_seqnos).
    HighSeqnos(Vec<(Vbid, Seqno)>),
    /// The highest seqnos of collections in the node's active vBuckets; see
    /// [`request_collection_seqnos`](super::Connection::request_collection_seqnos).
    CollectionSeqnos(Vec<CollectionSeqnos>),
    /// The scope or collection that was created last and whose documents are left out: other
    /// connections need to know it before they take over a vBucket that is past its creation.
    Exclusions(Exclusions),
    /// A cluster map, requested, pushed or sent with a refusal, as JSON.
    ClusterMap(Bytes),
    /// The collections manifest as JSON; `None` if the node has none. See
    /// [`request_manifest`](super::Connection::request_manifest).
    Manifest(Option<Bytes>),
    /// The failover log of a vBucket; see
    /// [`request_failover_logs`](super::Connection::request_failover_logs).
    FailoverLog(Vbid, FailoverLog),
    /// Seqnos in memory and on disk of a copy; on branch 0 if it does not know the requested one.
    /// See [`request_observed_seqnos`](super::Connection::request_observed_seqnos).
    ObservedSeqno(ObservedSeqno),
    /// The purge seqnos of the node's copies; `None` if the user may not read them. See
    /// [`request_purge_seqnos`](super::Connection::request_purge_seqnos).
    PurgeSeqnos(Option<BTreeMap<Vbid, Seqno>>),
    /// A request outside of any stream was refused.
    Refused {
        /// Opcode of the request.
        opcode: Opcode,
        /// The answer.
        status: Status,
    },
}

impl fmt::Display for EndCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Complete => f.write_str("its end was reached"),
            Self::Ended(reason) => write!(f, "the server ended it ({reason})"),
            Self::Refused(error) => write!(f, "the server refused it ({error})"),
            Self::RolledBack { rollback, .. } => {
                write!(f, "rolled back to seqno {}", rollback.seqno)
            }
            Self::Overtaken(times) => {
                write!(f, "its first load began again {times} times after a purge")
            }
            Self::Closed => f.write_str("closed by the client"),
        }
    }
}
