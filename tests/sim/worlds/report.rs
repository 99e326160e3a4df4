//! How often what happened: a kind of fault, of reader or of state that never occurs shows nothing.

use std::collections::BTreeMap;
use std::fmt;

use crate::plan::Kind;

/// Counts of one world, or of many.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    counts: BTreeMap<String, u64>,
}

/// What has to occur besides every kind of step, over all worlds of a run.
const REQUIRED: &[&str] = &[
    "ReplicationCut of a connection: true",
    "ReplicationLag of a connection: true",
    "ReplicationSilent of a connection: true",
    "ReplicationWindow of a connection: true",
    "accounts agree",
    "accounts agree on bytes held",
    "accounts even",
    "all below an end is there",
    "all of a task is there",
    "attempts agree",
    "attempts at once",
    "began anew after a purge",
    "began anew after a rollback",
    "began anew on another bucket",
    "began anew with a wider filter",
    "began anew with other collections",
    "branch of history",
    "call cancelled",
    "client used again",
    "end at, clamped false",
    "end at, clamped true",
    "end now, clamped false",
    "end now, clamped true",
    "end that exists, clamped false",
    "end that exists, clamped true",
    "end that is persisted, clamped false",
    "end that is persisted, clamped true",
    "end that was lost",
    "event BackingOff",
    "event ConnectionLost",
    "event Ended",
    "event Unpersisted",
    "event Lagging",
    "event Moved",
    "event NothingPersisted",
    "event Opened",
    "event RolledBack",
    "filter All",
    "filter Collections",
    "filter Patterns",
    "filter Scope",
    "filter of keys",
    "filter narrowed",
    "on_rollback Emit",
    "on_rollback Fail",
    "on_rollback Resync",
    "committed batches judged",
    "driver died",
    "first loads without deletions",
    "given: first password",
    "given: new password",
    "given: no password",
    "given: old password",
    "micro-batch committed",
    "micro-batch repeated",
    "micro-batches of what is available now",
    "read once",
    "reader Batches",
    "reader Endless",
    "reader Finite",
    "reader Latest",
    "reader Members",
    "reader Rivals",
    "retry_timeout zero",
    "row CollectionChanged",
    "row Deletion",
    "row Expiration",
    "row Mutation",
    "row Rollback",
    "row of history",
    "row with xattrs",
    "replicas have everything",
    "rollback inside of a micro-batch",
    "rollback of a micro-batch",
    "rows held for persistence",
    "state BackingOff",
    "state Complete",
    "state Opening",
    "state Streaming",
    "save refused",
    "share of another number of members",
    "stream outlived a password",
    "task run twice",
    "tasks side by side",
];

impl Report {
    pub(crate) fn count(&mut self, what: impl Into<String>) {
        self.add(what, 1);
    }

    pub(crate) fn add(&mut self, what: impl Into<String>, times: u64) {
        *self.counts.entry(what.into()).or_default() += times;
    }

    pub(crate) fn merge(&mut self, other: &Self) {
        for (what, times) in &other.counts {
            self.add(what.as_str(), *times);
        }
    }

    /// What should have occurred and did not.
    pub(crate) fn missing(&self) -> Vec<String> {
        let kinds = Kind::ALL.iter().map(|(kind, ..)| format!("step {kind:?}"));
        let required = kinds.chain(REQUIRED.iter().map(ToString::to_string));
        required.filter(|what| !self.counts.contains_key(what)).collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (what, times) in &self.counts {
            writeln!(f, "{times:>9}  {what}")?;
        }
        Ok(())
    }
}
