//! The consumer: one machine per connection, one per stream.

mod answers;
mod bootstrap;
mod branch;
mod connection;
mod delivery;
mod error;
mod event;
mod gate;
mod held;
mod opaque;
mod request;
mod run;
mod stats;
mod stream;
#[cfg(test)]
mod tests;
mod walk;
mod window;

pub use bootstrap::{
    Auth, Bootstrap, BootstrapConfig, BootstrapError, BootstrapOutcome, ClusterConfig,
    ControlSetting, DcpOpen, ErrorContext,
};
pub use connection::{Connection, ConnectionConfig, Limit, RollbackPolicy, Walk};
pub use delivery::{Delivery, Hidden};
pub use error::{
    ApiMisuse, ConnectionError, Misbehaviour, OpenStreamError, ProtocolError, ProtocolErrorKind,
};
pub use event::{EndCause, EndKind, Event, Moved, Resume};
pub use held::Held;
pub use request::StreamFilter;
pub use stats::ConnectionStats;
