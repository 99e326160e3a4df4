//! Couchbase DCP consumer on tokio.
#![forbid(unsafe_code)]

mod bucket;
mod checkpoint_file;
mod client;
mod cluster;
mod config;
pub mod connect;
mod driver;
mod error;
mod filter;
mod options;
mod probe;
mod queue;
mod read_buffer;
mod reconciler;
mod retry;
mod socket;
mod srv;
mod stats;
mod stream;
mod survey;
mod tls;

pub use checkpoint_file::{load_checkpoint, save_checkpoint};
pub use client::Client;
pub use config::{ClientCertificate, ConnectOptions, Credentials, Pem, TlsOptions};
pub use error::{Error, ErrorKind};
pub use options::{BatchPolicy, Content, End, Filter, OnRollback, Start, StreamOptions};
pub use stats::StreamStats;
pub use stream::{ChangeStream, Delivered};
