//! The failover log as a producer keeps it.

use dcp_wire::message::FailoverEntry;

/// The history branches of a vBucket as the server decides them (protocol.md §12).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailoverTable {
    entries: Vec<FailoverEntry>,
}

impl FailoverTable {
    /// The entries, newest first.
    #[must_use]
    pub fn entries(&self) -> &[FailoverEntry] {
        &self.entries
    }
}
