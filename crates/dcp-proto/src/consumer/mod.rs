//! The consumer: one machine per connection, one per stream.

mod bootstrap;
mod bootstrap_config;
mod stats;

pub use bootstrap::Bootstrap;
pub use bootstrap_config::{
    Auth, BootstrapConfig, BootstrapError, BootstrapOutcome, ClusterConfig, ControlSetting, DcpOpen,
};
pub use stats::ConnectionStats;
