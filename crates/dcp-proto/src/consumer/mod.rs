//! The consumer: one machine per connection, one per stream.

mod bootstrap;
mod stats;

pub use bootstrap::{
    Auth, Bootstrap, BootstrapConfig, BootstrapError, BootstrapOutcome, ClusterConfig,
    ControlSetting, DcpOpen,
};
pub use stats::ConnectionStats;
