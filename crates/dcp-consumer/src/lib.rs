//! Couchbase DCP consumer on tokio: the changes of a bucket, batch by batch.
//!
//! ```no_run
//! use dcp_consumer::{Client, ConnectOptions, Credentials, End, StreamOptions};
//! # async fn example<S: dcp_proto::BatchSink + Default>() -> Result<(), dcp_consumer::Error> {
//! let options = ConnectOptions::new("couchbase://127.0.0.1/travel")
//!     .with_credentials(Credentials::new("reader", "password"));
//! let client = Client::connect(options).await?;
//! let mut options = StreamOptions::default();
//! options.end = End::Now;
//! let mut stream = client.stream(options, S::default).await?;
//! while let Some(delivered) = stream.next().await {
//!     let delivered = delivered?;
//!     // Store the batch, then (or with it) the checkpoint.
//!     let _ = (delivered.batch, delivered.checkpoint);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees
//!
//! * Every change is delivered at least once, and within a vBucket in the order of seqnos.
//! * A checkpoint covers what was delivered with it and before it, and nothing else. Resuming from
//!   it repeats nothing, unless the server asks for a rollback.
//! * With [`Acknowledge::Manual`], batches are acknowledged in any order, and the stream's
//!   checkpoint never passes an unacknowledged one.
//! * A rollback is never silent: it is a record among the changes, or ends the stream, depending on
//!   [`StreamOptions::on_rollback`].
//! * A vBucket is opening, streaming, backing off, complete or failed, and [`StreamStats`] counts
//!   each. One that cannot be streamed for [`StreamOptions::retry_timeout`] ends the stream with an
//!   error.
//!
//! # How it works
//!
//! A connection to a node is one state machine ([`Connection`](dcp_proto::consumer::Connection))
//! with its socket and a read buffer, whether it streams, is asked for seqnos and failover logs, or
//! is idle in the pool. One task per connection of a stream decodes the packets in place and appends
//! changes to that connection's sink. It cuts the sink's rows into batches and puts them into the
//! stream's queue, which is bounded by the connections' flow-control buffers. One task per stream
//! assigns vBuckets to connections, follows the cluster map, and reopens streams that have ended.
//! When a connection is lost, the rows in its sink are delivered and the next connection resumes
//! after them: rows and positions belong together. A vBucket's rows are in the queue before another
//! connection requests more of them.
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(clippy::expect_used, clippy::indexing_slicing, clippy::panic, clippy::unwrap_used)
)]

mod bucket;
mod checkpoint_file;
mod checkpoint_store;
mod client;
mod config;
pub mod connect;
mod connection;
mod credentials;
mod dial;
mod driver;
mod error;
mod events;
mod failure_log;
mod filter;
mod first_load;
mod observe;
mod opening;
mod options;
pub mod plan;
mod pool;
mod queue;
mod read_buffer;
mod retry;
mod socket;
mod srv;
mod stats;
mod stream;
mod stream_task;
mod sync;
mod tls;
mod watermark;

pub use checkpoint_file::{CheckpointLock, load_checkpoint, save_checkpoint};
pub use checkpoint_store::{CheckpointStore, FileStore, MemoryStore, check_ahead};
pub use client::Client;
pub use config::{ClientCertificate, ConnectOptions, Pem, SrvTargets, TlsOptions};
pub use credentials::{
    Credentials, CredentialsError, CredentialsSource, ProvideCredentials, ProvideToken,
};
// Types in signatures of this crate, so that users need no other crate.
pub use dcp_proto::checkpoint::{Checkpoint, CheckpointError, StoredFilter};
pub use dcp_proto::consumer::{ConnectionStats, ProtocolError, StreamFilter};
pub use dcp_proto::topology::{Address, Manifest, Network, NetworkSelection};
pub use dcp_proto::{
    BatchSink, Change, ChangeSink, FailoverLog, MutationRun, OnPurge, OnRollback, Op, Position,
    Rollback, RunError, SinkError, Snapshot, SystemEventRecord,
};
pub use dcp_wire::message::{MutationView, SystemEventId};
pub use dcp_wire::sasl::Mechanism;
pub use dcp_wire::{
    Cas, CollectionId, Datatype, Opcode, RevSeqno, ScopeId, Seqno, Status, Vbid, Vbuuid,
};
pub use dial::{Dial, Dialing, Transport};
pub use error::{Chain, Error, ErrorKind};
pub use events::StreamEvent;
pub use observe::{Observation, Observer};
pub use options::{
    Acknowledge, BackfillOrder, BatchPolicy, Content, End, Filter, InitialDeletions, Priority,
    Start, StreamOptions,
};
pub use stats::{CollectionLag, StreamStats, VbucketState, VbucketStats};
pub use stream::{ChangeStream, Delivered};
pub use watermark::{AckToken, Acknowledger};
