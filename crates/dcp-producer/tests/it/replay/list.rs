//! The recordings that are not replayed or differ: which of the project's, and how it is told by
//! the packets of any.

use std::collections::{BTreeMap, BTreeSet};

use dcp_test::traces::{EventKind, Scenario};
use dcp_wire::{Datatype, Frame, MAX_BODY_LEN, Opcode};
use serde::Deserialize;

use super::Found;

/// Statuses of durable writes that did not succeed.
const DURABILITY_STATUSES: core::ops::RangeInclusive<u64> = 0xa0..=0xa4;

/// Why a recording is not replayed.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Exempt {
    /// Durable writes, which recordings do not write down one by one.
    DurableWrites,
    /// The consumer of a server, which asks another server for what no client asks for; how it
    /// connected is not recorded.
    ServersConsumer,
}

impl Exempt {
    /// Why a recording is not replayed, as its packets and facts tell.
    pub(super) fn of(scenario: &Scenario) -> Option<Self> {
        if writes_durably(scenario) {
            return Some(Self::DurableWrites);
        }
        let frames = || scenario.events.iter().filter_map(|event| Some((event, frame(event)?)));
        let connects = |conn: u32| {
            frames().any(|(event, frame)| {
                let by_client = matches!(event.kind, EventKind::ClientPacket(_));
                event.conn == conn
                    && by_client
                    && matches!(frame.header.opcode, Opcode::HELLO | Opcode::SASL_AUTH)
            })
        };
        let mut streams = frames().filter(|(_, frame)| {
            frame.header.opcode == Opcode::DCP_STREAM_REQ
                && frame.header.magic.is_response()
                && frame.header.status().is_success()
        });
        streams.any(|(event, _)| !connects(event.conn)).then_some(Self::ServersConsumer)
    }
}

fn writes_durably(scenario: &Scenario) -> bool {
    let is_durable = |opcode| {
        matches!(
            opcode,
            Opcode::DCP_PREPARE | Opcode::DCP_COMMIT | Opcode::DCP_ABORT | Opcode::DCP_SEQNO_ACK
        )
    };
    let mut frames = scenario.events.iter().filter_map(frame);
    // A client that only gets what was committed sees none of these.
    let operations = scenario.expected["kv_ops"].as_array().into_iter().flatten();
    let mut statuses = operations.filter_map(|operation| operation["status"].as_u64());
    frames.any(|frame| is_durable(frame.header.opcode))
        || statuses.any(|status| DURABILITY_STATUSES.contains(&status))
        || scenario.what.contains("durable")
}

fn frame(event: &dcp_test::traces::Event) -> Option<Frame<'_>> {
    Frame::parse(event.packet()?, MAX_BODY_LEN).ok()?.map(|(frame, _)| frame)
}

/// What differs in recordings of which nothing is known, and should not.
pub(super) fn unexplained(found: &Found) -> Vec<String> {
    let differs = found.differs.iter();
    let differs = differs.flat_map(|(name, differs)| differs.iter().map(move |what| (name, what)));
    let unexplained = differs.filter(|(_, what)| !is_explained(what));
    unexplained.map(|(name, what)| format!("{name} differs: {what}")).collect()
}

/// Whether a difference is one of the kinds that the list of the project's recordings explains.
fn is_explained(what: &str) -> bool {
    if let Some((_, extras)) = what.split_once(": DCP_MUTATION: extras ")
        && let Some((theirs, ours)) = extras.split_once(" is ")
    {
        return is_aged(theirs, ours);
    }
    if let Some((_, differs)) = what.split_once(": DCP_DELETION: ")
        && let Some((theirs, ours)) = differs.split_once(" is ")
    {
        return is_body_of_tombstone(theirs, ours);
    }
    false
}

/// Whether a tombstone has a body, as those of servers before 7.0 may. Attributes alone are no
/// body: their datatype lacks the bit of JSON.
fn is_body_of_tombstone(theirs: &str, ours: &str) -> bool {
    if let Some(datatype) = theirs.strip_prefix("datatype 0x") {
        let datatype = u8::from_str_radix(datatype, 16).unwrap_or_default();
        return ours == "0x0" && Datatype(datatype).contains(Datatype::JSON);
    }
    theirs.starts_with("value ") && ours == "nothing"
}

/// Whether extras of a document differ only in its access frequency, which a legacy server lets
/// fall from time to time: 3 is the lowest, 2 that of a document read from disk.
fn is_aged(theirs: &str, ours: &str) -> bool {
    theirs.strip_suffix("03").is_some_and(|rest| ours.strip_suffix("02") == Some(rest))
}

/// The recordings of the project that are not replayed or differ.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct List {
    exempt: Vec<ExemptEntry>,
    differences: Vec<Entry>,
}

/// Recordings that are not replayed.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct ExemptEntry {
    scenarios: BTreeSet<String>,
    because: Exempt,
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

    /// What is not as the list says.
    pub(super) fn check(&self, found: &Found) -> Vec<String> {
        let mut wrong = self.check_exempt(&found.exempt);
        let listed = self.differences.iter().map(|entry| &entry.scenario);
        let missing = listed.filter(|name| !found.differs.contains_key(*name));
        wrong.extend(
            missing.map(|name| format!("{name} is listed, but there is no such recording")),
        );
        for (name, differs) in &found.differs {
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
            // Other recordings of the same kind may differ in the same way.
            let unexplained = known.iter().filter(|what| !is_explained(what));
            wrong.extend(unexplained.map(|what| format!("{name}: no rule explains {what}")));
        }
        wrong
    }

    fn check_exempt(&self, found: &BTreeMap<String, Exempt>) -> Vec<String> {
        let mut listed = BTreeMap::new();
        let mut wrong = Vec::new();
        for entry in &self.exempt {
            listed.extend(entry.scenarios.iter().map(|name| (name.clone(), entry.because)));
            if entry.reason.is_empty() {
                wrong.push(format!("{:?} are exempt without a reason", entry.scenarios));
            }
        }
        if listed != *found {
            wrong.push(format!("{found:?} are not replayed, listed are {listed:?}"));
        }
        wrong
    }
}
