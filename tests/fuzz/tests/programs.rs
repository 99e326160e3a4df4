//! What lies in `fuzz/` agrees with the targets here.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use dcp_fuzz::{TARGETS, corpora};

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
    let corpora = corpora();
    assert!(
        corpora
            .keys()
            .map(String::as_str)
            .eq(TARGETS.iter().map(|(name, _)| *name).collect::<BTreeSet<_>>())
    );
    let inputs = || corpora.values().flat_map(BTreeMap::values);
    let (count, bytes) = (inputs().count(), inputs().map(Vec::len).sum::<usize>());
    assert!((1..=4000).contains(&count) && bytes <= 600 << 10, "{count} files of {bytes} bytes");
}
