//! The application's end of a stream of changes.

use dcp_proto::checkpoint::Checkpoint;

use crate::{Error, StreamStats};

/// One batch of changes and what to keep in order to go on after it.
#[derive(Debug)]
pub struct Delivered<B> {
    /// The changes.
    pub batch: B,
    /// Rows in it.
    pub rows: usize,
    /// Where the stream stands once the batch has been processed: store it with the batch, or
    /// after it, never before.
    pub checkpoint: Checkpoint,
}

/// Changes of a bucket, batch by batch.
///
/// Dropping it ends its connections.
#[derive(Debug)]
pub struct ChangeStream<B> {
    queue: std::collections::VecDeque<Delivered<B>>,
    checkpoint: Checkpoint,
}

impl<B: Send + 'static> ChangeStream<B> {
    /// The next batch; `None` once a finite stream is complete, the stream was closed, or an
    /// error was returned.
    ///
    /// Asking for the next batch acknowledges the one before it to the server. Cancellation-safe:
    /// a batch is either returned or still there for the next call.
    ///
    /// # Errors
    /// [`Error`] once, if the stream cannot go on.
    #[expect(clippy::unused_async, reason = "the engine is not in place yet")]
    pub async fn next(&mut self) -> Option<Result<Delivered<B>, Error>> {
        self.queue.pop_front().map(Ok)
    }

    /// Where the stream stands after the batch returned last: everything up to here was returned.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        self.checkpoint.clone()
    }

    /// Ends the stream and its connections. Batches not taken yet are dropped.
    pub fn close(&mut self) {
        self.queue.clear();
    }

    /// What the stream is doing.
    #[must_use]
    pub fn stats(&self) -> StreamStats {
        StreamStats::default()
    }
}
