//! The flow-control window of a connection (DCP page "flow-control").

use dcp_wire::Header;

use dcp_proto::flow_control::counted_bytes;

/// How many sent bytes may be unacknowledged.
///
/// The window is open while less than its size is outstanding, regardless of the next message's
/// length: it may be exceeded by one message, and one message always passes. Without a size,
/// nothing is counted and it is always open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    size: u32,
    outstanding: u64,
}

impl Window {
    /// Sets the size in bytes; 0 switches flow control off and forgets what is outstanding.
    pub(super) const fn resize(&mut self, size: u32) {
        self.size = size;
        if size == 0 {
            self.outstanding = 0;
        }
    }

    pub(super) const fn is_open(&self) -> bool {
        self.size == 0 || self.outstanding < self.size as u64
    }

    /// Counts a packet that was sent.
    pub(super) const fn sent(&mut self, header: &Header) {
        if self.size != 0 {
            self.outstanding = self.outstanding.saturating_add(counted_bytes(header));
        }
    }

    /// Subtracts acknowledged bytes; more than are outstanding earn no credit.
    pub(super) const fn acknowledged(&mut self, bytes: u32) {
        self.outstanding = self.outstanding.saturating_sub(bytes as u64);
    }

    pub(super) const fn outstanding(&self) -> u64 {
        self.outstanding
    }
}
