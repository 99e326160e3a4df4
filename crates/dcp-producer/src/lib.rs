//! An embedded Couchbase cluster: nodes in this process that speak KV and DCP.
//!
//! [`Producer::start`] opens one loopback port per node. Couchbase SDKs write documents to it,
//! DCP clients stream its changes, and the program that holds the [`Producer`] can do both
//! directly, and things no client can: persist at a given moment, purge, roll a vBucket back, fail
//! a node over, kill it, restart it, rebalance, drop the bucket, create collections.
//!
//! From the top down, each floor knowing only those below it:
//!
//! * `producer` is the cluster that is started, and what its holder does to it.
//! * `server` moves bytes between sockets and the machines of a connection: `kv` answers its
//!   commands, DCP excepted; what a DCP connection does is decided by [`dcp_proto::producer`].
//!   `http` answers what clients ask a node's management port, `store` keeps the bucket in a
//!   folder, if it is given one.
//! * `cluster` knows which node has which vBucket and what clients are told about it.
//! * `bucket` stores documents: seqnos, checkpoints in memory, an image of the disk, failover
//!   tables. It has no tasks and no clock.
//! * `fault` makes things go wrong on the way, by rules that are data.
//!
//! "Persisted" documents live in a second structure in memory that stands for the disk, with the
//! same consequences for seqnos, snapshots and rollbacks. With [`ProducerOptions::data`] that is
//! carried to a folder, and clients are told that a change is persisted once it is there.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::expect_used, clippy::panic, clippy::unwrap_used))]

mod producer;

mod http;
mod kv;
mod rights;
mod server;
mod store;

mod cluster;

mod bucket;

mod chance;
mod error;
mod fault;
mod options;
mod tls;
mod value;

pub use dcp_proto::producer::{
    ConnectionConfig, OsoBackfill, Privilege, ServerVersion, StuckClients, VBucketState,
};
pub use dcp_wire::message::DurabilityLevel;
pub use error::{DocumentError, Error};
pub use fault::{
    Condition, ConnectionIs, Direction, Probability, Reaction, Rule, RuleError, parse_rules,
};
pub use options::{Document, MutationToken, ProducerOptions, User, WriteOptions};
pub use producer::Producer;
pub use server::MemoryStream;
pub use tls::{NodeCertificate, TlsOptions};
pub use value::detect as datatype_of;
