//! Golden packets: `tests/vectors/*.hex`.
//!
//! Each line has one packet: its row in the conformance table, a space, hex digits. Spaces between
//! digits are ignored, as are lines that begin with `#`. A row may have several packets.

use std::{fs, io};

use crate::{parse_hex, tests_folder};

/// One golden packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vector {
    /// Row of the conformance table.
    pub row: String,
    /// The packet.
    pub bytes: Vec<u8>,
}

/// The packets of `tests/vectors/<name>.hex`.
///
/// # Errors
/// If the file cannot be read, or [`io::ErrorKind::InvalidData`] for a line that is not a packet.
pub fn load(name: &str) -> io::Result<Vec<Vector>> {
    let text = fs::read_to_string(tests_folder("vectors").join(format!("{name}.hex")))?;
    text.lines()
        .filter(|line| !line.is_empty() && !line.starts_with('#'))
        .map(|line| {
            let vector = line.split_once(' ').and_then(|(row, hex)| {
                Some(Vector { row: row.to_owned(), bytes: parse_hex(hex)? })
            });
            vector.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, line.to_owned()))
        })
        .collect()
}

/// The packets of one row.
///
/// # Errors
/// As [`load`], or [`io::ErrorKind::NotFound`] if the row has none.
pub fn row(name: &str, row: &str) -> io::Result<Vec<Vec<u8>>> {
    let packets: Vec<_> = load(name)?
        .into_iter()
        .filter(|vector| vector.row == row)
        .map(|vector| vector.bytes)
        .collect();
    if packets.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, format!("{name} has no row {row}")));
    }
    Ok(packets)
}
