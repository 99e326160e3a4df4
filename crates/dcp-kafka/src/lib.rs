//! Columns of records into Kafka.
//!
//! A [`Producer`] writes [`Records`] in transactions, without an object for each. It uses a
//! librdkafka that is loaded at run time, such as that of the Python package `confluent-kafka`: so
//! nothing here needs a C compiler or OpenSSL. All unsafe code is in one module, `library`.
#![deny(clippy::expect_used, clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)]

mod error;
mod library;
mod partition;
mod producer;
mod records;

pub use error::{Error, Kind};
pub use partition::murmur2;
pub use producer::Producer;
pub use records::{Column, Header, Records};
