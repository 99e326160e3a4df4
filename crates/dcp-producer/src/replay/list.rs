//! The recordings that differ, as the project knows them.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The recordings that differ.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct List {
    differences: Vec<Entry>,
}

/// One recording and what is known to differ.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    scenario: String,
    reason: String,
    differs: Vec<String>,
}

impl List {
    pub(super) fn read() -> Self {
        serde_json::from_str(include_str!("differences.json")).unwrap()
    }

    /// Recordings of what is not offered yet: durable writes, and a consumer as a server has it.
    pub(super) fn is_of_later(name: &str) -> bool {
        let name = name.trim_start_matches(|c: char| !c.is_ascii_alphabetic());
        name.starts_with("sync-") || name == "replication"
    }

    /// What is not as the list says.
    pub(super) fn check(&self, found: &BTreeMap<String, Vec<String>>) -> Vec<String> {
        let mut wrong = Vec::new();
        for (name, differs) in found {
            let entry = self.differences.iter().find(|entry| entry.scenario == *name);
            let known: &[String] = entry.map_or(&[], |entry| &entry.differs);
            if let (Some(_), true) = (entry, differs.is_empty()) {
                wrong.push(format!("{name} no longer differs: take it off the list"));
            } else if known != differs {
                let new = differs.iter().filter(|what| !known.contains(what));
                wrong.extend(new.map(|what| format!("{name} differs: {what}")));
                let gone = known.iter().filter(|what| !differs.contains(what));
                wrong.extend(gone.map(|what| format!("{name} no longer differs in: {what}")));
            }
            if entry.is_some_and(|entry| entry.reason.is_empty()) {
                wrong.push(format!("{name} is listed without a reason"));
            }
        }
        wrong
    }
}
