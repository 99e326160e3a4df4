//! Which rows of the conformance tables have been run, and held.
//!
//! A test whose name has a row's number stands for the row. One that plays rows as data says of each
//! that it held, into the file that `DCP_CONFORMANCE` names; `scripts/conformance.py` holds both
//! against the tables.

use std::fs::OpenOptions;
use std::io::Write;

/// What came of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// With its inputs, its answer.
    Held,
    /// Another answer than the row's, on purpose.
    Departs,
}

/// Notes what came of a row at the end `end` of a connection; only its number counts, without what
/// stands behind it.
///
/// # Panics
/// If the file cannot be written.
pub fn note(end: &str, row: &str, outcome: Outcome) {
    let Some(path) = std::env::var_os("DCP_CONFORMANCE") else { return };
    let number = row.split(' ').next().unwrap_or_default();
    let line = format!("{end} {number} {outcome:?}\n");
    let mut file = OpenOptions::new().create(true).append(true).open(path).expect("the file");
    // At once, so that lines of tests side by side do not mix.
    file.write_all(line.as_bytes()).expect("the file takes it");
}
