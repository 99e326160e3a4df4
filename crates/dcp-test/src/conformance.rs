//! Records which rows of the conformance tables were tested, and with which outcome.
//!
//! A test with a row's number in its name covers that row. Tests that play rows as data append each
//! outcome to the file named by `DCP_CONFORMANCE`; `scripts/conformance.py` compares both with the
//! tables.

use std::fs::OpenOptions;
use std::io::Write;

/// Outcome of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The answer matches the row.
    Held,
    /// The answer deliberately differs from the row's.
    Departs,
}

/// Records the outcome of a row at the end `end` of a connection. Only the row's number counts; any
/// suffix is ignored.
///
/// # Panics
/// If the file cannot be written.
pub fn note(end: &str, row: &str, outcome: Outcome) {
    let Some(path) = std::env::var_os("DCP_CONFORMANCE") else { return };
    let number = row.split(' ').next().unwrap_or_default();
    let line = format!("{end} {number} {outcome:?}\n");
    let mut file = OpenOptions::new().create(true).append(true).open(path).expect("the file");
    // In a single write, so that lines of concurrent tests do not mix.
    file.write_all(line.as_bytes()).expect("the file takes it");
}
