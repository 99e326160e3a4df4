//! Every row of the conformance tables is a test, or says why it is none.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use crate::named::{named, texts};

#[test]
fn every_row_is_tested_or_says_why_not() {
    let rows: Value = serde_json::from_str(include_str!("../data/conformance.json")).unwrap();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crates");
    let mut sources = Vec::new();
    texts(&crates.join("dcp-proto/tests"), &["rs", "json"], &mut sources);
    texts(&crates.join("dcp-proto/src/producer"), &["rs"], &mut sources);
    texts(&crates.join("dcp-producer/src"), &["rs"], &mut sources);
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
