//! What becomes of a filter of which something is dropped while the stream runs.

use dcp_proto::BatchSink;

use super::{Cluster, Slot};
use crate::driver::Command;
use crate::queue::Entry;
use crate::{Error, ErrorKind, filter};

impl<S: BatchSink> Cluster<S> {
    /// A node does not know what the filter names: it was dropped, or the node is behind. The
    /// newest manifest tells, and while it says nothing new the node is asked again.
    pub(super) fn filter_refused(&mut self) -> Result<(), Error> {
        if !self.drop_from_filter()? {
            self.fetch_map();
        }
        Ok(())
    }

    /// How a stream ends whose vBuckets are all complete. One without an end gets there only when
    /// everything its filter names was dropped, which must not look as if it had been closed.
    pub(super) fn last_entry(&self) -> Entry<S::Batch> {
        if !self.reconciler.is_endless() {
            return Entry::Finished;
        }
        let message = "everything in the filter was dropped, so no more changes can arrive: open \
                       another stream for its replacement";
        Entry::Error(Error::new(ErrorKind::StreamEnded, message))
    }

    /// Takes out of the filter what the newest manifest known no longer has, for requests from
    /// now on; streams that are open end by themselves once nothing is left for them. Returns
    /// whether there was anything. Checkpoints keep the filter that the stream was opened with: it
    /// contains what is left, and ids are not given twice.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if nothing is left before any stream was opened.
    pub(super) fn drop_from_filter(&mut self) -> Result<bool, Error> {
        let manifest = self.bucket.manifest();
        match filter::remaining(&self.config.filter, &manifest) {
            Some(rest) if rest == self.config.filter => Ok(false),
            Some(rest) => {
                tracing::warn!(?rest, "a collection that the filter names was dropped");
                for node in self.nodes.values() {
                    if let Slot::Up { commands, .. } = &node.slot {
                        let _ = commands.send(Command::Filter(rest.clone()));
                    }
                }
                self.config.filter = rest;
                Ok(true)
            }
            None if self.reconciler.complete_refused() => Ok(true),
            None => {
                let message = "the scope or collections that the filter names were dropped";
                Err(Error::new(ErrorKind::Config, message))
            }
        }
    }
}
