//! An embedded Couchbase cluster: nodes in this process that speak KV and DCP.
//!
//! [`Producer::start`] opens one loopback port per node. Couchbase SDKs write documents to it, DCP
//! clients stream its changes, and the program that owns the [`Producer`] can do both directly, and
//! more than clients can: persist at a given moment, purge, roll a vBucket back, fail over, kill or
//! restart a node, rebalance, drop the bucket, create collections. It begins with one bucket, which
//! these operations are about; clients may create others through the management port.
//!
//! From the top down, where each layer knows only those below it:
//!
//! * `producer` is the handle of a cluster and its operations.
//! * `server` moves bytes between sockets and the machines of a connection: `kv` answers its
//!   commands, DCP excepted; DCP connections are driven by [`dcp_producer_proto`]. `http` answers
//!   requests to a node's management port, `store` keeps the buckets in a data folder, if
//!   there is one.
//! * `cluster` knows the nodes and the buckets: which node has which vBucket, and what clients see of it.
//! * `bucket` stores documents: seqnos, checkpoints in memory, an image of the disk, failover
//!   tables. It has no tasks and no clock.
//! * `fault` injects faults into connections, by rules that are data.
//!
//! "Persisted" documents are in a second structure in memory that represents the disk, with the
//! same consequences for seqnos, snapshots and rollbacks. With [`ProducerOptions::data`], it is
//! saved to a folder, and changes are reported as persisted once they are there.
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

pub use dcp_producer_proto::{
    ConnectionConfig, OsoBackfill, ServerVersion, StuckClients, VBucketState,
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
