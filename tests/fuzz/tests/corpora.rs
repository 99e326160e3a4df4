//! The committed corpora, replayed through the functions that libFuzzer calls.

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
    let _alone = dcp_meter::alone();
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

#[test]
fn every_target_has_a_program_and_every_program_a_target() {
    let manifest = fs::read_to_string(folder().join("Cargo.toml")).expect("the programs' manifest");
    let programs: Vec<_> =
        manifest.lines().filter_map(|line| line.strip_prefix("path = \"fuzz_targets/")).collect();
    let wanted: Vec<_> = TARGETS.iter().map(|(name, _)| format!("{name}.rs\"")).collect();
    assert_eq!(programs, wanted);
    for (name, _) in TARGETS {
        let program = folder().join(format!("fuzz_targets/{name}.rs"));
        let program = fs::read_to_string(program).expect("a program");
        assert!(program.contains(&format!("dcp_fuzz::{name}(data)")), "{program}");
    }
}

#[test]
fn corpora_are_small() {
    let sizes = TARGETS.iter().flat_map(|(name, _)| corpus(name).into_values());
    let (count, bytes) = sizes.fold((0, 0), |(count, sum), input| (count + 1, sum + input.len()));
    assert!(count <= 4000 && bytes <= 600 << 10, "{count} files of {bytes} bytes");
}
