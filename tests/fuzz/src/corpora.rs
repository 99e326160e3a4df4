//! The committed corpora: inputs of each target, from which fuzzing goes on.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// The inputs of each target, by the names of their files, as `fuzz/corpus.zip` has them.
///
/// # Panics
/// If the archive is missing, or is not what `scripts/fuzz.py` writes.
#[must_use]
pub fn corpora() -> BTreeMap<String, BTreeMap<String, Vec<u8>>> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus.zip");
    let archive = fs::read(&path).unwrap_or_else(|error| panic!("{path:?}: {error}"));
    let mut corpora = BTreeMap::<String, BTreeMap<_, _>>::new();
    let mut rest = archive.as_slice();
    // Each file has a header of 30 bytes, its name and its bytes, which are not compressed; what
    // follows the last one is an index.
    while let Some((header, after)) =
        rest.split_first_chunk::<30>().filter(|(header, _)| header.starts_with(b"PK\x03\x04"))
    {
        let number = |at: usize| usize::from(u16::from_le_bytes([header[at], header[at + 1]]));
        let (compression, len) = (number(8), number(18) | number(20) << 16);
        assert_eq!(
            (compression, number(28)),
            (0, 0),
            "{path:?} is not what scripts/fuzz.py writes"
        );
        let (name, after) = after.split_at(number(26));
        let (input, after) = after.split_at(len);
        let name = std::str::from_utf8(name).expect("a name");
        let (target, file) = name.split_once('/').expect("a file in the folder of its target");
        corpora.entry(target.to_owned()).or_default().insert(file.to_owned(), input.to_vec());
        rest = after;
    }
    corpora
}
