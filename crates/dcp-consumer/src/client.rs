//! A bucket to stream changes from.

use std::collections::BTreeMap;
use std::sync::Arc;

use dcp_proto::BatchSink;
use dcp_proto::topology::Manifest;
use dcp_wire::{Seqno, Vbid};

use crate::{ChangeStream, ConnectOptions, Error, ErrorKind, StreamOptions};

/// A bucket to stream changes from. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Client {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    bucket_name: String,
}

impl Client {
    /// Connects to the first node of the connection string that answers, and learns the
    /// bucket's nodes and collections from it.
    ///
    /// # Errors
    /// [`Error`] saying what to check.
    #[expect(clippy::unused_async, reason = "the engine is not in place yet")]
    pub async fn connect(options: ConnectOptions) -> Result<Self, Error> {
        let bucket_name = options.bucket.ok_or_else(unfinished)?;
        Ok(Self { shared: Arc::new(Shared { bucket_name }) })
    }

    /// Name of the bucket.
    #[must_use]
    pub fn bucket_name(&self) -> &str {
        &self.shared.bucket_name
    }

    /// Identity of the bucket: another one under the same name means it was made anew.
    #[must_use]
    pub fn bucket_uuid(&self) -> &str {
        ""
    }

    /// How many vBuckets the bucket has.
    #[must_use]
    pub fn num_vbuckets(&self) -> u16 {
        0
    }

    /// Names and ids of the bucket's scopes and collections, as last seen.
    #[must_use]
    pub fn manifest(&self) -> Arc<Manifest> {
        Arc::default()
    }

    /// The vBuckets by the address of the node that holds them, ascending.
    #[must_use]
    pub fn vbuckets_by_node(&self) -> Vec<(String, Vec<Vbid>)> {
        Vec::new()
    }

    /// The highest seqno of every vBucket, asked of every node.
    ///
    /// # Errors
    /// [`Error`] if some vBucket's node did not answer within the connect timeout.
    #[expect(clippy::unused_async, reason = "the engine is not in place yet")]
    pub async fn high_seqnos(&self) -> Result<BTreeMap<Vbid, Seqno>, Error> {
        Err(unfinished())
    }

    /// Opens a stream of changes. `make_sink` makes one sink for each connection to a node.
    ///
    /// # Errors
    /// [`Error`] if the options contradict each other, the checkpoint does not belong to this
    /// bucket and filter or is ahead of the server, or the server refuses.
    #[expect(clippy::unused_async, reason = "the engine is not in place yet")]
    pub async fn stream<S: BatchSink>(
        &self,
        _options: StreamOptions,
        _make_sink: impl Fn() -> S + Send + Sync + 'static,
    ) -> Result<ChangeStream<S::Batch>, Error> {
        Err(unfinished())
    }

    /// Closes the client: no stream can be opened any more. Streams that are open go on.
    #[expect(clippy::unused_async, reason = "the engine is not in place yet")]
    pub async fn close(&self) {}
}

fn unfinished() -> Error {
    Error::new(ErrorKind::Unsupported, "streaming is not in place yet")
}
