//! The consumer: one machine per connection, one per stream.

mod bootstrap;
mod capabilities;
mod connection;
mod delivery;
mod error;
mod event;
mod inflated;
mod noop;
mod opaque;
mod reaction;
mod stats;
mod stream;
mod token;
mod unpersisted;
mod window;

pub use bootstrap::{
    Auth, Bootstrap, BootstrapConfig, BootstrapError, BootstrapOutcome, ClusterConfig,
    ControlSetting, DcpOpen, ErrorContext,
};
pub use capabilities::{Capability, Negotiated, Release};
pub use connection::{Connection, ConnectionConfig, Limit, StreamFilter, Walk};
pub use delivery::{Delivery, Exclusions};
pub use error::{
    ApiMisuse, ConnectionError, Misbehaviour, OpenStreamError, ProtocolError, ProtocolErrorKind,
};
pub use event::{CollectionSeqnos, EndCause, EndKind, Event, PositionUpdate, StreamPosition};
pub use reaction::{AfterEnd, Failure, Reaction, Step};
pub use stats::ConnectionStats;
pub use token::{InvalidToken, Token};
pub use unpersisted::Unpersisted;
