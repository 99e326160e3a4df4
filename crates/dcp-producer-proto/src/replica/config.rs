//! The configuration of the consumer's end.

use core::time::Duration;

use crate::ServerVersion;

/// The configuration of a node's consumer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Version of the node.
    pub server_version: ServerVersion,
    /// Name under which the node acknowledges durable writes; `None` if it takes no part in them.
    pub consumer_name: Option<String>,
    /// Flow-control buffer in bytes.
    pub buffer_size: u32,
    /// Interval of the producer's noops.
    pub noop_interval: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            server_version: ServerVersion::NEWEST,
            consumer_name: None,
            buffer_size: 26_843_546,
            noop_interval: Duration::from_secs(1),
        }
    }
}
