//! Couchbase DCP consumer on tokio.

mod checkpoint_file;
mod client;
mod config;
pub mod connect;
mod error;
mod options;
mod socket;
mod stats;
mod stream;
mod tls;

pub use checkpoint_file::{load_checkpoint, save_checkpoint};
pub use client::Client;
pub use config::{ClientCertificate, ConnectOptions, Credentials, Pem, TlsOptions};
pub use error::{Error, ErrorKind};
pub use options::{BatchPolicy, Content, End, Filter, OnRollback, Start, StreamOptions};
pub use stats::StreamStats;
pub use stream::{ChangeStream, Delivered};
