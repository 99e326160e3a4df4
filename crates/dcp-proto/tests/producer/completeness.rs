//! Every row of the conformance tables is a test, or says why it is none.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use serde_json::Value;

/// Text of every file with one of the extensions below a folder.
fn texts(folder: &Path, extensions: &[&str], into: &mut Vec<String>) {
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if path.is_dir() {
            texts(&path, extensions, into);
        } else if extension.is_some_and(|extension| extensions.contains(&extension))
            && !path.ends_with("conformance.json")
        {
            into.push(fs::read_to_string(&path).expect("text"));
        }
    }
}

/// The rows that a text names: as `SS-01`, as `ss_01`, or as `ss_01_to_ss_04`.
fn named(text: &str, table: &str, into: &mut BTreeSet<u64>) {
    let lower = table.to_lowercase();
    for prefix in [format!("{table}-"), format!("{table}_"), format!("{lower}_")] {
        let mut last = None;
        for (at, _) in text.match_indices(&prefix) {
            let rest = &text[at + prefix.len()..];
            let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
            let Ok(number) = rest[..digits].parse::<u64>() else { continue };
            if let Some(first) = last.filter(|_| text[..at].ends_with("_to_")) {
                into.extend(first..number);
            }
            into.insert(number);
            last = Some(number);
        }
    }
}

#[test]
fn every_row_is_tested_or_says_why_not() {
    let rows: Value = serde_json::from_str(include_str!("../data/conformance.json")).unwrap();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crates");
    let mut sources = Vec::new();
    texts(&crates.join("dcp-proto/tests"), &["rs", "json"], &mut sources);
    texts(&crates.join("dcp-proto/src/producer"), &["rs"], &mut sources);
    texts(&crates.join("dcp-wire/src"), &["rs"], &mut sources);
    texts(&crates.join("dcp-wire/tests"), &["rs"], &mut sources);
    texts(&crates.join("dcp-producer/tests"), &["rs"], &mut sources);
    let mut missing = Vec::new();
    for (table, numbers) in rows["tested"].as_object().unwrap() {
        let mut found = BTreeSet::new();
        for text in &sources {
            named(text, table, &mut found);
        }
        let wanted = numbers.as_array().unwrap().iter().map(|number| number.as_u64().unwrap());
        missing.extend(
            wanted.filter(|row| !found.contains(row)).map(|row| format!("{table}-{row:02}")),
        );
    }
    assert!(missing.is_empty(), "rows without a test: {missing:?}");
    for list in ["not_applicable", "open"] {
        for (row, why) in rows[list].as_object().unwrap() {
            assert!(why.as_str().is_some_and(|why| why.len() > 10), "{row} has a reason");
        }
    }
}
