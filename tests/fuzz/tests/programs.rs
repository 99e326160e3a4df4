//! What lies in `fuzz/` agrees with the targets here.

use std::fs;
use std::path::{Path, PathBuf};

use dcp_fuzz::TARGETS;

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
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
    let files = TARGETS.iter().flat_map(|(name, _)| {
        fs::read_dir(folder().join("corpus").join(name)).expect("each target has a corpus")
    });
    let len = |file: std::io::Result<fs::DirEntry>| file?.metadata().map(|data| data.len());
    let (count, bytes) = files.fold((0, 0), |(count, sum), file| {
        (count + 1, sum + len(file).expect("its size can be read"))
    });
    assert!((1..=4000).contains(&count) && bytes <= 600 << 10, "{count} files of {bytes} bytes");
}
