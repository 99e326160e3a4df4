//! Numbers about a running stream.

use std::time::Duration;

use dcp_proto::consumer::ConnectionStats;
use dcp_wire::{CollectionId, Seqno, Vbid};

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
    /// Outages: connections lost, and nodes that could not be reached when they were needed. One
    /// that lasts counts once, however often the connection is tried.
    pub reconnects: u64,
    /// Batches the application has taken.
    pub batches: u64,
    /// Rows in those batches.
    pub rows: u64,
    /// Bytes received and not yet taken by the application.
    pub buffered_bytes: u64,
    /// Part of `buffered_bytes` that came on connections that are gone, so that no server waits for
    /// it to be acknowledged.
    pub leftover_bytes: u64,
    /// Rows received that wait until every copy of their vBucket has them on disk; 0 unless
    /// [`persisted_only`](crate::StreamOptions::persisted_only) is set.
    pub unpersisted_rows: u64,
    /// Bytes of what waits so, part of `buffered_bytes`.
    pub unpersisted_bytes: u64,
    /// For how long the oldest of what waits so has waited; zero if nothing does.
    pub unpersisted_for: Duration,
    /// vBuckets of which changes wait because copies are on different branches of history, as
    /// after a failover, until that has settled.
    pub diverged: usize,
    /// Time since the stream was opened: with `rows` and `connection` it gives rates.
    pub elapsed: Duration,
    /// Seqnos between the application and the server, of all vBuckets that are not complete
    /// together: see [`VbucketStats::lag`]. `None` while that of one of them is not known.
    pub lag: Option<u64>,
    /// The same of the vBucket that is furthest behind.
    pub max_lag: Option<u64>,
    /// What the connections counted, those gone included.
    pub connection: ConnectionStats,
}

impl StreamStats {
    /// With the lag of these vBuckets.
    pub(crate) fn with_lag(self, vbuckets: &[VbucketStats]) -> Self {
        let open = vbuckets.iter().filter(|vbucket| vbucket.state != VbucketState::Complete);
        let lags: Option<Vec<u64>> = open.map(VbucketStats::lag).collect();
        let max_lag = lags.as_ref().map(|lags| lags.iter().copied().max().unwrap_or(0));
        Self { lag: lags.map(|lags| lags.into_iter().sum()), max_lag, ..self }
    }
}

/// How far the server is ahead in one collection.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CollectionLag {
    /// The collection.
    pub id: CollectionId,
    /// Its name as `scope.collection`.
    pub name: String,
    /// Seqnos between the application and the collection's newest change in each vBucket, added up
    /// over those that are not complete; `None` while one of their nodes has not said it. Other
    /// collections' changes in between count, since a vBucket's seqnos are shared.
    pub lag: Option<u64>,
}

/// What a vBucket is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum VbucketState {
    /// Its stream is being opened.
    Opening,
    /// It is streaming.
    Streaming,
    /// It waits before it is opened again.
    BackingOff,
    /// It has reached its end.
    Complete,
    /// It cannot be streamed.
    Failed,
}

impl VbucketState {
    /// Name as in [`StreamStats`].
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Opening => "opening",
            Self::Streaming => "streaming",
            Self::BackingOff => "backing_off",
            Self::Complete => "complete",
            Self::Failed => "failed",
        }
    }
}

/// Where one vBucket of a stream stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VbucketStats {
    /// The vBucket.
    pub vbid: Vbid,
    /// What it is doing.
    pub state: VbucketState,
    /// Last seqno the application was given.
    pub seqno: Seqno,
    /// Highest seqno the server is known to have, of the collections that the stream's filter
    /// passes: from the snapshot the position lies in, and asked for when the stream was opened,
    /// every 10 s, and when figures are looked at that are older than 1 s. `None` if nothing is
    /// known yet.
    pub high_seqno: Option<Seqno>,
    /// Up to here every copy of the vBucket has everything on disk, as last heard; 0 while copies
    /// are not heard from or are on different branches. `None` if it was not asked for: see
    /// [`persisted_only`](crate::StreamOptions::persisted_only).
    pub persisted_seqno: Option<Seqno>,
    /// For how long changes have waited for that; `None` if none do.
    pub unpersisted_for: Option<Duration>,
    /// Whether they wait because copies are on different branches of history, as after a failover.
    pub is_diverged: bool,
}

impl VbucketStats {
    /// Seqnos between the application and the server; `None` if the server's are not known. Not a
    /// number of changes: of a key that was written twice only the newest version comes.
    #[must_use]
    pub fn lag(&self) -> Option<u64> {
        Some(self.high_seqno?.0.saturating_sub(self.seqno.0))
    }
}
