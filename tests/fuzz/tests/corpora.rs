//! The committed corpora, replayed through the functions that libFuzzer calls.
//!
//! The only test of its program: others would allocate while it counts what a target holds.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use dcp_fuzz::TARGETS;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

/// The inputs of a target, by the name of their file.
fn corpus(target: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = folder().join("corpus").join(target);
    let files = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let input = |path: PathBuf| {
        let name = path.file_name().expect("a file").to_string_lossy().into_owned();
        (name, fs::read(path).expect("it is there"))
    };
    files.map(|file| input(file.expect("a file").path())).collect()
}

#[test]
fn no_input_of_a_corpus_does_harm() {
    for (name, target) in TARGETS {
        let inputs = corpus(name);
        assert!(inputs.len() >= 10, "{name} has a corpus of {} inputs", inputs.len());
        for (file, input) in &inputs {
            // libFuzzer's own way of running one: cargo fuzz run NAME fuzz/corpus/NAME/FILE
            let outcome = std::panic::catch_unwind(|| target(input));
            assert!(outcome.is_ok(), "{name} fails with fuzz/corpus/{name}/{file}");
        }
        // Nothing, and what is all the same.
        target(&[]);
        for byte in 0..=u8::MAX {
            target(&[byte; 200]);
        }
    }
}
