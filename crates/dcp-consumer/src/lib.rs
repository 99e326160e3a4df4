//! Couchbase DCP consumer on tokio.

mod checkpoint_file;
mod config;
pub mod connect;
mod error;
mod tls;

pub use checkpoint_file::{load_checkpoint, save_checkpoint};
pub use config::{ClientCertificate, ConnectOptions, Credentials, Pem, TlsOptions};
pub use error::{Error, ErrorKind};
