//! Errors of the embedded producer.

use std::net::IpAddr;
use std::path::PathBuf;

use dcp_wire::{Cas, CollectionId, Seqno, Vbid};
use thiserror::Error;

/// Why the cluster could not start, or could not perform an operation.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum Error {
    /// An option has an invalid value.
    #[error("{option}: {reason}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// What it must be.
        reason: String,
    },
    /// Other machines reach the address to listen on, and know the password.
    #[error(
        "refusing to listen on {host}, which other machines may reach, with the default password: \
         set another, or choose a loopback address such as 127.0.0.1"
    )]
    DefaultPassword {
        /// Requested address.
        host: IpAddr,
    },
    /// A node could not open its port.
    #[error("cannot listen on {host}:{port}")]
    Listen {
        /// Requested address.
        host: IpAddr,
        /// Requested port; 0 for any.
        port: u16,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The data folder cannot be read or written.
    #[error("the data folder {path} cannot be used")]
    Data {
        /// The folder.
        path: PathBuf,
        /// Error of the storage library or the operating system.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// TLS could not be set up, for a reason other than an option.
    #[error("TLS cannot be set up: {reason}")]
    Tls {
        /// What went wrong.
        reason: String,
        /// Error of the library.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A document operation was refused.
    #[error(transparent)]
    Document(#[from] DocumentError),
    /// The bucket has no such vBucket.
    #[error("{vbid} does not exist: the bucket has {count} vBuckets")]
    UnknownVbucket {
        /// Requested vBucket.
        vbid: Vbid,
        /// vBuckets of the bucket.
        count: u16,
    },
    /// A fault keeps two nodes from reaching each other, which moving vBuckets requires.
    #[error("nodes {node} and {other} do not reach each other: end the fault between them")]
    NodesCutOff {
        /// One node.
        node: usize,
        /// The other.
        other: usize,
    },
    /// A copy of a vBucket did not receive everything that the active one has, which stays active.
    #[error("{vbid} stays where it is: its copy on node {node} failed to take it over; try again")]
    TakeoverFailed {
        /// The vBucket.
        vbid: Vbid,
        /// Node of the copy that was to become active.
        node: usize,
    },
    /// No replica can take a vBucket over.
    #[error(
        "{vbid} has no replica on a running node and would be lost: start a node, then rebalance"
    )]
    NoRunningReplica {
        /// The vBucket.
        vbid: Vbid,
    },
    /// No running node has the vBucket.
    #[error("{vbid} is on no running node: restart its node, fail it over or rebalance")]
    VbucketUnavailable {
        /// Requested vBucket.
        vbid: Vbid,
    },
    /// The vBucket has no such replica.
    #[error("{vbid} has no replica {replica}: replicas are numbered from 1")]
    UnknownReplica {
        /// Requested vBucket.
        vbid: Vbid,
        /// Requested replica.
        replica: usize,
    },
    /// The node is not running.
    #[error("node {node} is not running: restart it, or fail it over")]
    NodeDown {
        /// Number of the node.
        node: usize,
    },
    /// The node was failed over.
    #[error("node {node} does not belong to the cluster: restart it and rebalance")]
    NotAMember {
        /// Number of the node.
        node: usize,
    },
    /// The last node cannot leave.
    #[error("node {node} is the last one of the cluster: add another first")]
    LastNode {
        /// Number of the node.
        node: usize,
    },
    /// The bucket is dropped.
    #[error("there is no bucket: create it")]
    NoBucket,
    /// The bucket exists.
    #[error("the bucket exists already: drop it first")]
    BucketExists,
    /// The cluster has as many buckets as it may have.
    #[error("there are {max} buckets already, the most a cluster has: drop one first")]
    TooManyBuckets {
        /// The limit.
        max: usize,
    },
    /// There is no collection of that name.
    #[error("there is no collection {scope}.{collection}: create it first")]
    UnknownCollection {
        /// Name of the scope.
        scope: String,
        /// Name of the collection.
        collection: String,
    },
    /// The collections manifest was not changed.
    #[error("cannot change the collections: {0}")]
    Manifest(&'static str),
    /// A rollback would go forward.
    #[error("cannot roll {vbid} back to seqno {to}: its high seqno is {high_seqno}")]
    RollbackBeyondHighSeqno {
        /// vBucket concerned.
        vbid: Vbid,
        /// Requested seqno.
        to: Seqno,
        /// Highest seqno of the vBucket.
        high_seqno: Seqno,
    },
    /// The versions that were current at a seqno are no longer kept.
    #[error(
        "cannot roll {vbid} back to seqno {to}: overwritten documents are kept from seqno {oldest} \
         on; roll back to {oldest} or later, to 0, or raise `history_bytes`"
    )]
    RollbackHistoryGone {
        /// vBucket concerned.
        vbid: Vbid,
        /// Requested seqno.
        to: Seqno,
        /// Lowest seqno other than 0 that can be restored.
        oldest: Seqno,
    },
}

impl Error {
    /// The option or argument that is wrong, if it is one.
    #[must_use]
    pub const fn option(&self) -> Option<&'static str> {
        Some(match self {
            Self::InvalidOption { option, .. } => option,
            Self::DefaultPassword { .. } => "password",
            Self::Data { .. } => "data",
            Self::Tls { .. } => "tls",
            Self::UnknownVbucket { .. } => "vbucket",
            Self::UnknownReplica { .. } => "replica",
            Self::UnknownCollection { .. } => "collection",
            Self::RollbackBeyondHighSeqno { .. } | Self::RollbackHistoryGone { .. } => "to",
            _ => return None,
        })
    }
}

/// Why a document operation was refused.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DocumentError {
    /// There is no such document.
    #[error("the document does not exist")]
    NotFound,
    /// The document already exists.
    #[error("the document exists already")]
    Exists,
    /// The document has another CAS than the given one.
    #[error("the CAS of the document is not {0}: read it again and retry")]
    CasMismatch(Cas),
    /// The key is empty or too long.
    #[error("a key has 1 to {max} bytes, not {len}")]
    InvalidKey {
        /// Length of the key in bytes.
        len: usize,
        /// Longest key in its collection in bytes.
        max: usize,
    },
    /// The value is too long.
    #[error("a value has at most {max} bytes, not {len}")]
    ValueTooLarge {
        /// Length of the value in bytes.
        len: usize,
        /// Longest value in bytes.
        max: usize,
    },
    /// The value does not match its datatype.
    #[error("the value does not match its datatype")]
    InvalidValue,
    /// The document is not a decimal number, or the result would not be one.
    #[error("the document is not a 64-bit decimal number")]
    NotANumber,
    /// No running node has the vBucket of the document.
    #[error("{0} is on no running node: restart its node, fail it over or rebalance")]
    Unavailable(Vbid),
    /// The document has a durable write that is neither committed nor aborted.
    #[error("the document has a durable write in progress: commit or abort it first")]
    SyncWriteInProgress,
    /// A durable write of the document was prepared before a failover or a restart, and is not
    /// committed again yet.
    #[error("a durable write of the document is being committed again: retry in a moment")]
    SyncWriteReCommitInProgress,
    /// A client has locked the document.
    #[error("the document is locked: unlock it, or wait for half a minute at most")]
    Locked,
    /// The document is not locked.
    #[error("the document is not locked")]
    NotLocked,
    /// The document has no durable write, or it is not the next one of its vBucket to complete.
    #[error(
        "the document has no durable write, or an earlier one of the vBucket is not complete yet"
    )]
    NotPrepared,
    /// There is no such collection.
    #[error("collection {0} does not exist")]
    UnknownCollection(CollectionId),
    /// The bucket's memory quota is used up.
    #[error("the memory quota of {quota} bytes is used up: raise `memory_quota_bytes`")]
    NoMemory {
        /// The quota in bytes.
        quota: usize,
    },
}
