//! Numbers about a running stream.

use dcp_proto::consumer::ConnectionStats;

/// What a stream of changes is doing.
///
/// Each vBucket is counted in exactly one of the states; a vBucket that is not `streaming` or
/// `complete` is being worked on, or the stream has ended with an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamStats {
    /// vBuckets whose stream is being opened.
    pub opening: usize,
    /// vBuckets that are streaming.
    pub streaming: usize,
    /// vBuckets that wait before they are opened again.
    pub backing_off: usize,
    /// vBuckets that have reached their end.
    pub complete: usize,
    /// vBuckets that cannot be streamed.
    pub failed: usize,
    /// Connections in use.
    pub connections: usize,
    /// Connections lost and made again.
    pub reconnects: u64,
    /// Batches the application has taken.
    pub batches: u64,
    /// Rows in those batches.
    pub rows: u64,
    /// Bytes received and not yet taken by the application.
    pub buffered_bytes: u64,
    /// What the connections counted, those gone included.
    pub connection: ConnectionStats,
}
