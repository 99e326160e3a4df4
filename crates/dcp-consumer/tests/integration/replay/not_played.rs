//! The recorded streams that are not played to this consumer, and why.

use std::collections::BTreeMap;

use dcp_test::traces::{self, Scenario};

use super::recorded::recorded;

pub(super) const REPLICATION: &str =
    "prepares, commits and aborts go to replicas only: this consumer never asks for them";
pub(super) const NOT_OPEN: &str =
    "asked for on a connection that is not open for DCP: this consumer opens it first";
pub(super) const NOTHING_LEFT: &str =
    "starts above its end, or both are 0: this consumer asks for neither";
pub(super) const SETTINGS: &str =
    "refused for settings of the recorded client that this consumer has otherwise";
const MALFORMED: &str = "malformed on purpose by the recorded client";
const NO_STREAM: &str = "no stream is asked for: key-value packets only";

/// The project's recordings of which stream requests are not played: how many, and why.
const NOT_PLAYED: &[(&str, usize, &str)] = &[
    ("6.0.5-errors", 2, NOT_OPEN),
    ("6.0.5-errors", 2, MALFORMED),
    ("6.0.5-rollback-cases", 2, NOTHING_LEFT),
    ("7.6.11-noop-mandatory", 2, SETTINGS),
    ("8.0.2-errors", 2, NOT_OPEN),
    ("8.0.2-errors", 2, MALFORMED),
    ("8.0.2-errors", 1, SETTINGS),
    ("8.0.2-rollback-cases", 2, NOTHING_LEFT),
    ("8.0.2-sdk-python-plain", 0, NO_STREAM),
    ("8.0.2-sdk-python-scram", 0, NO_STREAM),
    ("8.0.2-sync-disk-syncrepl", 1, REPLICATION),
    ("8.0.2-sync-disk-syncwrites", 1, REPLICATION),
    ("8.0.2-sync-live", 2, REPLICATION),
    ("8.0.2-sync-live-replica-ack", 1, REPLICATION),
    ("8.0.2-sync-memory-syncrepl", 1, REPLICATION),
    ("8.0.2-sync-memory-syncwrites", 1, REPLICATION),
];

/// What of a recording is not played, by reason.
fn not_played(scenario: &Scenario) -> BTreeMap<&'static str, usize> {
    let requests = recorded(scenario);
    let mut reasons = BTreeMap::new();
    for reason in requests.streams.iter().filter_map(|stream| stream.why_not_played()) {
        *reasons.entry(reason).or_default() += 1;
    }
    if requests.malformed > 0 {
        reasons.insert(MALFORMED, requests.malformed);
    }
    if requests.streams.is_empty() && requests.malformed == 0 {
        reasons.insert(NO_STREAM, 0);
    }
    reasons
}

#[test]
fn recordings_that_are_not_played_are_listed_with_their_reason() {
    // The reasons are told by the packets, so they hold for other recordings too; names and counts
    // are known of the project's only.
    if !traces::is_own_folder() {
        return;
    }
    let scenarios = Scenario::load_all().unwrap();
    let mut found = BTreeMap::new();
    for scenario in &scenarios {
        for (reason, count) in not_played(scenario) {
            found.insert((scenario.name.as_str(), reason), count);
        }
    }
    let mut listed = BTreeMap::new();
    for &(name, count, reason) in NOT_PLAYED {
        assert_eq!(listed.insert((name, reason), count), None, "{name} is listed twice");
    }
    let mut wrong = Vec::new();
    for (&(name, reason), count) in &found {
        if listed.get(&(name, reason)) != Some(count) {
            wrong.push(format!(
                "{name}: {count} stream requests are not played to the consumer ({reason}). If \
                 that is right, list them in NOT_PLAYED; if the consumer could ask for them, \
                 teach Recorded::why_not_played"
            ));
        }
    }
    for &(name, reason) in listed.keys() {
        if !found.contains_key(&(name, reason)) {
            wrong.push(format!("{name}: listed in NOT_PLAYED, but played or gone ({reason})"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
