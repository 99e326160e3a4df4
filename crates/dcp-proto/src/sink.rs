//! Sinks, which append changes to columns directly from the read buffer.

use dcp_wire::message::{MutationView, SystemEventId};
use dcp_wire::{Cas, CollectionId, Datatype, RevSeqno, Seqno, Vbid, Vbuuid};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::Snapshot;

/// What happened to a document.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Op {
    /// It was written.
    Mutation,
    /// It was removed.
    Deletion,
    /// It expired.
    Expiration,
}

impl Op {
    /// All there are.
    pub const ALL: [Self; 3] = [Self::Mutation, Self::Deletion, Self::Expiration];

    /// Its name in options and checkpoints.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Mutation => "mutation",
            Self::Deletion => "deletion",
            Self::Expiration => "expiration",
        }
    }
}

/// One change of a document, borrowed from the read buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Change<'a> {
    /// What happened.
    pub op: Op,
    /// vBucket of the document.
    pub vbid: Vbid,
    /// Position in the vBucket.
    pub seqno: Seqno,
    /// History branch that holds the change.
    pub vbuuid: Vbuuid,
    /// How many rollbacks this consumer had seen on the vBucket.
    pub epoch: u32,
    /// Snapshot the change came in.
    pub snapshot: Snapshot,
    /// Whether that snapshot keeps several versions of a key: all versions for collections with
    /// change history.
    pub history: bool,
    /// Collection of the document.
    pub collection_id: CollectionId,
    /// Key without its collection id.
    pub key: &'a [u8],
    /// Value as sent: the sink decompresses it and removes the xattr section, according to
    /// `datatype`. Servers before 7.0 may send a tombstone with a meaningless body.
    pub value: &'a [u8],
    /// Encoding of the value.
    pub datatype: Datatype,
    /// Version of the document.
    pub cas: Cas,
    /// Revision seqno of the document.
    pub rev_seqno: RevSeqno,
    /// Flags set by the application (mutations; otherwise 0).
    pub flags: u32,
    /// Seconds since 1970 at which the document expires; 0 never (mutations).
    pub expiry: u32,
    /// Seconds since 1970 at which the document was removed, 0 unknown (deletions, expirations).
    pub delete_time: u32,
}

/// Consecutive mutations of one stream in the read buffer, in one snapshot and on one branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MutationRun<'r, 'a> {
    /// vBucket of the documents.
    pub vbid: Vbid,
    /// History branch that holds the changes.
    pub vbuuid: Vbuuid,
    /// How many rollbacks this consumer had seen on the vBucket.
    pub epoch: u32,
    /// Snapshot the changes came in.
    pub snapshot: Snapshot,
    /// Whether that snapshot keeps several versions of a key.
    pub history: bool,
    /// The mutations, their seqnos ascending.
    pub mutations: &'r [MutationView<'a>],
}

impl<'a> MutationRun<'_, 'a> {
    /// Gives the mutations to a sink one at a time.
    ///
    /// # Errors
    /// Those of [`ChangeSink::mutations`].
    #[inline]
    pub fn give_each<S: ChangeSink + ?Sized>(&self, sink: &mut S) -> Result<(), RunError> {
        for (taken, mutation) in self.mutations.iter().enumerate() {
            sink.change(&self.change(mutation)).map_err(|error| RunError { taken, error })?;
        }
        Ok(())
    }

    /// One of the mutations.
    #[inline]
    #[must_use]
    pub fn change(&self, mutation: &MutationView<'a>) -> Change<'a> {
        Change {
            op: Op::Mutation,
            vbid: self.vbid,
            seqno: mutation.seqno(),
            vbuuid: self.vbuuid,
            epoch: self.epoch,
            snapshot: self.snapshot,
            history: self.history,
            collection_id: mutation.collection_id(),
            key: mutation.key(),
            value: mutation.value(),
            datatype: mutation.datatype(),
            cas: mutation.cas(),
            rev_seqno: mutation.rev_seqno(),
            flags: mutation.flags(),
            expiry: mutation.expiry(),
            delete_time: 0,
        }
    }
}

/// A sink could not take a whole run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RunError {
    /// How many mutations it has taken, all before the one that failed.
    pub taken: usize,
    /// Why that one failed.
    pub error: SinkError,
}

/// What to do if the server's history of a vBucket is no longer the one that was read.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Hash, Serialize)]
#[non_exhaustive]
#[serde(rename_all = "lowercase")]
pub enum OnRollback {
    /// Deliver a record with the seqno above which changes are sent again, and resume from the last
    /// common seqno.
    #[default]
    Emit,
    /// Stop with an error.
    Fail,
    /// As [`Emit`](Self::Emit), but from the beginning of the vBucket.
    Resync,
}

/// What happens when the server has purged deletions above the position of a reader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum OnPurge {
    /// Stop with an error. Only for a plan: a server answers a stream request below its purge seqno
    /// with ROLLBACK, as any other that it cannot resume.
    #[default]
    Fail,
    /// Deliver a record of the rollback, and the vBucket from its beginning.
    Resync,
    /// Resume, and miss these deletions. Only for a stream; servers before 7.2 cannot do it.
    Ignore,
}

/// A vBucket was rolled back: changes delivered above `seqno` are void, and the current ones
/// follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rollback {
    /// vBucket concerned.
    pub vbid: Vbid,
    /// Restart point: the end of a complete snapshot, above which everything is sent again.
    pub seqno: Seqno,
    /// Last seqno that had been delivered.
    pub from_seqno: Seqno,
    /// Branch left.
    pub old_vbuuid: Vbuuid,
    /// Branch that holds the restart point, 0 for the beginning.
    pub new_vbuuid: Vbuuid,
    /// Rollbacks seen on the vBucket, this one counted.
    pub epoch: u32,
}

/// Everything that a vBucket had when it was first streamed has been delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CaughtUp {
    /// vBucket concerned.
    pub vbid: Vbid,
    /// Last seqno delivered.
    pub seqno: Seqno,
    /// Rollbacks seen on the vBucket.
    pub epoch: u32,
}

/// A collection or scope changed, borrowed from the read buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemEventRecord<'a> {
    /// vBucket the event was seen on; each vBucket has its own copy of an event.
    pub vbid: Vbid,
    /// Position in the vBucket.
    pub seqno: Seqno,
    /// Rollbacks seen on the vBucket.
    pub epoch: u32,
    /// What happened.
    pub id: SystemEventId,
    /// Form of the payload.
    pub version: u8,
    /// Name of the collection or scope, where the event has one.
    pub key: &'a [u8],
    /// Payload.
    pub value: &'a [u8],
}

/// Why a sink failed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SinkError {
    /// A change cannot be represented.
    #[error("{vbid} seqno {seqno}: {what}")]
    Unrepresentable {
        /// vBucket of the change.
        vbid: Vbid,
        /// Its seqno.
        seqno: Seqno,
        /// What is wrong and what to do about it; contains no part of the document.
        what: String,
    },
    /// A document is not what it should be, and that is to fail.
    #[error("{vbid} seqno {seqno}: {what}")]
    Malformed {
        /// vBucket of the change.
        vbid: Vbid,
        /// Its seqno.
        seqno: Seqno,
        /// What is wrong with it; contains no part of the document.
        what: String,
    },
}

/// Receives everything that can become a row, in order per vBucket.
pub trait ChangeSink {
    /// Appends one change, which is borrowed only for the call.
    ///
    /// # Errors
    /// [`SinkError`] if the change cannot be represented.
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError>;

    /// Appends consecutive mutations; by default one at a time.
    ///
    /// # Errors
    /// [`RunError`] if one of them cannot be represented; those before it have been appended.
    #[inline]
    fn mutations(&mut self, run: &MutationRun<'_, '_>) -> Result<(), RunError> {
        run.give_each(self)
    }

    /// Appends a rollback.
    ///
    /// # Errors
    /// [`SinkError`] if it cannot be represented.
    fn rollback(&mut self, rollback: &Rollback) -> Result<(), SinkError>;

    /// Appends that a vBucket is caught up; ignored by default.
    ///
    /// # Errors
    /// [`SinkError`] if it cannot be represented.
    fn caught_up(&mut self, _caught_up: &CaughtUp) -> Result<(), SinkError> {
        Ok(())
    }

    /// Appends a system event; ignored by default.
    ///
    /// # Errors
    /// [`SinkError`] if it cannot be represented.
    fn system_event(&mut self, _event: &SystemEventRecord<'_>) -> Result<(), SinkError> {
        Ok(())
    }
}

/// A sink that returns its rows as batches.
pub trait BatchSink: ChangeSink + Send + 'static {
    /// A finished batch.
    type Batch: Send + 'static;

    /// Rows held.
    fn rows(&self) -> usize;

    /// Approximate bytes held in columns.
    fn size_bytes(&self) -> usize;

    /// Takes all rows as a batch and leaves the sink empty.
    ///
    /// # Errors
    /// [`SinkError`] if a row held cannot be represented.
    fn take_batch(&mut self) -> Result<Self::Batch, SinkError>;
}
