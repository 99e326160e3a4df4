//! Cluster maps, collection manifests and connection strings: which node has which vBucket, and at
//! which address.
//!
//! Everything here is parsed from a peer's bytes or a user's text: sizes are bounded, and indexes
//! are checked once, during parsing.

mod at_most;
mod bucket_config;
mod config_json;
mod connection_string;
mod global_config;
mod manifest;
mod node;
#[cfg(test)]
mod tests;

pub use bucket_config::{BucketConfig, Revision};
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
    /// A required member is missing.
    #[error("cluster configuration lacks {0}")]
    Missing(&'static str),
    /// A member has an invalid value.
    #[error("cluster configuration has an invalid {0}")]
    Impossible(&'static str),
    /// Buckets of this kind have no vBuckets, so they cannot be streamed.
    #[error(
        "the bucket has no vBuckets (a memcached bucket?): only Couchbase and ephemeral \
         buckets can be streamed"
    )]
    NoVbuckets,
    /// The map assigns a vBucket to a node that the configuration does not list.
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

/// The vBucket of a document key; `key` is without its collection prefix.
///
/// `num_vbuckets` comes from the map; 0 gives vBucket 0.
#[must_use]
pub fn vbucket_of_key(key: &[u8], num_vbuckets: u16) -> Vbid {
    let hash = crc32fast::hash(key) >> 16 & 0x7fff;
    let vbid = hash.checked_rem(u32::from(num_vbuckets)).unwrap_or(0);
    Vbid(u16::try_from(vbid).unwrap_or(0))
}
