//! Every row of the conformance tables is answered by the consumer, or says why it is not.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use crate::named::{named, texts};

#[test]
fn every_row_is_answered_or_says_why_not() {
    let list: Value =
        serde_json::from_str(include_str!("../data/consumer_conformance.json")).unwrap();
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the crates");
    let mut sources = vec![crate::ROWS.to_owned()];
    sources.extend(crate::sent::rows().into_iter().map(|(name, _)| name));
    for tests in ["dcp-proto/src/consumer", "dcp-wire/src", "dcp-wire/tests", "dcp-consumer/tests"]
    {
        texts(&crates.join(tests), &["rs"], &mut sources);
    }
    let reason = |name: &str| list["not_applicable"][name].as_str();
    let mut missing = Vec::new();
    let mut count = 0;
    for (table, numbers) in list["rows"].as_object().unwrap() {
        let mut found = BTreeSet::new();
        for text in &sources {
            named(text, table, &mut found);
        }
        for number in numbers.as_array().unwrap().iter().map(|number| number.as_u64().unwrap()) {
            count += 1;
            let name = format!("{table}-{number:02}");
            if !found.contains(&number) && reason(&name).or_else(|| reason(table)).is_none() {
                missing.push(name);
            }
        }
    }
    assert!(missing.is_empty(), "rows without an answer: {missing:?}");
    assert_eq!(count, 498, "rows there are");
    for (name, why) in list["not_applicable"].as_object().unwrap() {
        assert!(why.as_str().is_some_and(|why| why.len() > 10), "{name} has a reason");
        let table = name.split('-').next().unwrap();
        assert!(list["rows"][table].is_array(), "{name} is a row or a table");
    }
}
