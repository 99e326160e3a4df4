//! Handling of filters whose scope or collections are dropped while the stream runs.

use dcp_proto::BatchSink;

use super::{Cluster, Slot};
use crate::driver::Command;
use crate::queue::Entry;
use crate::{Error, ErrorKind, filter};

impl<S: BatchSink> Cluster<S> {
    /// A node does not know a scope or collection of the filter: it was dropped, or the node is
    /// behind. The newest manifest decides; until it changes, the request is repeated.
    pub(super) fn filter_refused(&mut self) -> Result<(), Error> {
        if !self.drop_from_filter()? {
            self.fetch_map();
        }
        Ok(())
    }

    /// How a stream ends when all vBuckets are complete. A stream without an end gets here only
    /// when everything in its filter was dropped, which must not look like a normal end.
    pub(super) fn last_entry(&self) -> Entry<S::Batch> {
        if !self.reconciler.is_endless() {
            return Entry::Finished;
        }
        let message = "everything in the filter was dropped, so no more changes can arrive: open \
                       another stream for its replacement";
        Entry::Error(Error::new(ErrorKind::StreamEnded, message))
    }

    /// Removes from the filter of future requests what the newest known manifest no longer has;
    /// open streams end by themselves once nothing is left for them. Returns whether anything was
    /// removed. Checkpoints keep the filter of the stream: it contains what is left, and ids are
    /// not reused.
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
