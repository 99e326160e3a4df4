//! What the end-to-end tests are made of: an embedded cluster whose every write is recorded, a
//! client that reads it into record batches, and the rules a read must satisfy.
#![forbid(unsafe_code)]

mod history;
mod reading;

pub use history::{History, Ledger};
pub use reading::{Reader, Row, connect_options, options};
