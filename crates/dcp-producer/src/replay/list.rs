//! The recordings that differ, as the project knows them.

use std::collections::BTreeMap;

use serde::Deserialize;

/// The recordings that differ.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct List {
    exempt: Vec<Exempt>,
    differences: Vec<Entry>,
}

/// Recordings that are not replayed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Exempt {
    /// The scenario, whatever the version; those that begin so if it ends in `*`.
    scenario: String,
    reason: String,
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

    /// Whether a recording is not replayed.
    pub(super) fn exempts(&self, name: &str) -> bool {
        let name = name.trim_start_matches(|c: char| !c.is_ascii_alphabetic());
        self.exempt.iter().any(|exempt| match exempt.scenario.strip_suffix('*') {
            Some(begins) => name.starts_with(begins),
            None => name == exempt.scenario,
        })
    }

    /// Recordings that are listed and not there.
    pub(super) fn missing(&self, found: &BTreeMap<String, Vec<String>>) -> Vec<String> {
        let listed = self.differences.iter().map(|entry| &entry.scenario);
        let missing = listed.filter(|name| !found.contains_key(*name));
        missing.map(|name| format!("{name} is listed, but there is no such recording")).collect()
    }

    /// What is not as the list says.
    pub(super) fn check(&self, found: &BTreeMap<String, Vec<String>>) -> Vec<String> {
        let unreasoned = self.exempt.iter().filter(|exempt| exempt.reason.is_empty());
        let mut wrong: Vec<String> = unreasoned
            .map(|exempt| format!("{} is exempt without a reason", exempt.scenario))
            .collect();
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
