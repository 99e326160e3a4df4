//! The documents of scope `_system`, which are left out on every connection alike.
//!
//! A connection learns of a new collection from the event in its own streams. Another one may take
//! over a vBucket that is past that event, so what one learns is passed on to all, and a new one
//! begins with what all know.

use dcp_proto::BatchSink;
use dcp_proto::consumer::Hidden;

use super::{Cluster, Slot};
use crate::driver::Command;
use crate::filter;

impl<S: BatchSink> Cluster<S> {
    /// A connection has learned what to leave out.
    pub(super) fn hide(&mut self, learned: &Hidden) {
        self.config.delivery.hidden.merge(learned);
        for node in self.nodes.values() {
            if let Slot::Up { commands, .. } = &node.slot {
                // One that is gone needs to know nothing.
                let _ = commands.send(Command::Hide(learned.clone()));
            }
        }
    }

    /// Learns what to leave out from the newest manifest known.
    pub(super) fn hide_by_manifest(&mut self) {
        let hidden = &mut self.config.delivery.hidden;
        if hidden.leaves_out_system_scope() {
            hidden.merge(&filter::hidden(&self.config.filter, &self.bucket.manifest()));
        }
    }
}
