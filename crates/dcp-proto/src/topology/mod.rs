//! Cluster maps, collection manifests and connection strings: who holds which vBucket, and under
//! which address.
//!
//! Everything here is parsed from a peer's bytes or a user's text: sizes are bounded, indexes are
//! checked once, when parsed, and never again.

mod at_most;
mod bucket_config;
mod config_json;
mod connection_string;
mod global_config;
mod manifest;
mod node;
#[cfg(test)]
mod tests;

pub use bucket_config::{BucketConfig, BucketType, Revision};
pub use connection_string::{ConnectionString, InvalidConnectionString, Scheme};
pub use global_config::GlobalConfig;
pub use manifest::{CollectionEntry, InvalidManifest, Manifest, ScopeEntry};
pub use node::{Address, Network, NetworkSelection, Node};

use dcp_wire::Vbid;
use thiserror::Error;

/// Longest cluster configuration or manifest accepted, in bytes.
pub const MAX_CONFIG_LEN: usize = 10 * 1024 * 1024;

/// Largest number of vBuckets a map may have: ids are 16 bits, and keys are mapped with 15 of them.
pub const MAX_VBUCKETS: usize = 0x8000;

/// Why JSON is not a cluster configuration this crate can use.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum InvalidConfig {
    /// The document is longer than [`MAX_CONFIG_LEN`].
    #[error("cluster configuration of {len} bytes exceeds the limit of {MAX_CONFIG_LEN} bytes")]
    TooLarge {
        /// Its length in bytes.
        len: usize,
    },
    /// Not JSON, or a member of the wrong type.
    #[error("cluster configuration is not valid: line {line}, column {column}")]
    Json {
        /// Line of the fault, from 1.
        line: usize,
        /// Column of the fault, from 1.
        column: usize,
    },
    /// A member every configuration has is not there.
    #[error("cluster configuration lacks {0}")]
    Missing(&'static str),
    /// A member holds a value that cannot be.
    #[error("cluster configuration has an invalid {0}")]
    Impossible(&'static str),
    /// Buckets of this kind have no vBuckets, so they cannot be streamed.
    #[error(
        "the bucket has no vBuckets (a memcached bucket?): only Couchbase and ephemeral \
         buckets can be streamed"
    )]
    NoVbuckets,
    /// The map places a vBucket on a node that the configuration does not name.
    #[error("{vbid} is mapped to node {index} of {nodes}")]
    NodeIndex {
        /// vBucket concerned.
        vbid: Vbid,
        /// Index found.
        index: i64,
        /// How many nodes there are.
        nodes: usize,
    },
}

/// The vBucket a document key lies in; `key` is without its collection prefix.
///
/// `num_vbuckets` is what the map says; 0 gives vBucket 0.
#[must_use]
pub fn vbucket_of_key(key: &[u8], num_vbuckets: u16) -> Vbid {
    let hash = crc32fast::hash(key) >> 16 & 0x7fff;
    let vbid = hash.checked_rem(u32::from(num_vbuckets)).unwrap_or(0);
    Vbid(u16::try_from(vbid).unwrap_or(0))
}
