//! Statistics of a running stream.

use std::time::Duration;

use dcp_proto::consumer::ConnectionStats;
use dcp_wire::{CollectionId, Seqno, Vbid};

/// Statistics of a stream of changes.
///
/// Each vBucket is counted in exactly one of the states; one that is not `streaming` or `complete`
/// is being opened, or the stream has ended with an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StreamStats {
    /// vBuckets whose stream is being opened.
    pub opening: usize,
    /// vBuckets that are streaming.
    pub streaming: usize,
    /// vBuckets that wait before they are reopened.
    pub backing_off: usize,
    /// vBuckets that have reached their end.
    pub complete: usize,
    /// vBuckets that cannot be streamed.
    pub failed: usize,
    /// Connections in use.
    pub connections: usize,
    /// Outages: connections lost, and nodes that could not be reached when they were needed. A long
    /// one counts once, regardless of the number of attempts.
    pub reconnects: u64,
    /// Batches the application has taken.
    pub batches: u64,
    /// Rows in those batches.
    pub rows: u64,
    /// Bytes received and not yet taken by the application.
    pub buffered_bytes: u64,
    /// Part of `buffered_bytes` from ended connections, for whose acknowledgement no server waits.
    pub leftover_bytes: u64,
    /// Rows received that wait until every copy of their vBucket has persisted them; 0 unless
    /// [`persisted_only`](crate::StreamOptions::persisted_only) is set.
    pub unpersisted_rows: u64,
    /// Bytes of these unpersisted rows, part of `buffered_bytes`.
    pub unpersisted_bytes: u64,
    /// How long the oldest unpersisted row has waited; zero without any.
    pub unpersisted_for: Duration,
    /// vBuckets whose changes wait because copies have diverged, as after a failover.
    pub diverged: usize,
    /// vBuckets that have not been streaming for [`VbucketStats::DISCONNECTED`], so that their lag
    /// is unknown.
    pub disconnected: usize,
    /// Time since the stream was opened: with `rows` and `connection` it gives rates.
    pub elapsed: Duration,
    /// Seqnos between the application and the server, summed over all vBuckets that are not
    /// complete: see [`VbucketStats::lag`]. `None` while that of one of them is unknown.
    pub lag: Option<u64>,
    /// The lag of the vBucket that is furthest behind.
    pub max_lag: Option<u64>,
    /// Counters of the connections, including ended ones.
    pub connection: ConnectionStats,
}

impl StreamStats {
    /// With the lag of these vBuckets.
    pub(crate) fn with_lag(self, vbuckets: &[VbucketStats]) -> Self {
        let open = vbuckets.iter().filter(|vbucket| vbucket.state != VbucketState::Complete);
        let lags: Vec<Option<u64>> = open.map(VbucketStats::lag).collect();
        let lag = total_lag(lags.iter().copied());
        let max_lag = lag.map(|_| lags.iter().copied().flatten().max().unwrap_or(0));
        Self { lag, max_lag, ..self }
    }
}

/// The sum of lags; `None` if one of them is unknown. Seqnos are the server's, so it saturates.
pub(crate) fn total_lag(mut lags: impl Iterator<Item = Option<u64>>) -> Option<u64> {
    lags.try_fold(0, |total: u64, lag| Some(total.saturating_add(lag?)))
}

/// Lag behind the server in one collection.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CollectionLag {
    /// The collection.
    pub id: CollectionId,
    /// Its name as `scope.collection`.
    pub name: String,
    /// Seqnos between the application and the collection's newest change in each vBucket, summed
    /// over those that are not complete; `None` while one of their nodes has not reported it.
    /// Changes of other collections in between count, since collections share a vBucket's seqnos.
    pub lag: Option<u64>,
}

/// State of a vBucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum VbucketState {
    /// Its stream is being opened.
    Opening,
    /// It is streaming.
    Streaming,
    /// It waits before it is reopened.
    BackingOff,
    /// It has reached its end.
    Complete,
    /// It cannot be streamed.
    Failed,
}

impl VbucketState {
    /// Name, as in [`StreamStats`].
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

/// Statistics of one vBucket of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct VbucketStats {
    /// The vBucket.
    pub vbid: Vbid,
    /// Its state.
    pub state: VbucketState,
    /// Last seqno delivered to the application.
    pub seqno: Seqno,
    /// Highest known seqno of the server, of the collections that the stream's filter passes: from
    /// the snapshot of the position, and requested when the stream was opened, every 10 s, and when
    /// figures older than 1 s are read. `None` if it is not known yet.
    pub high_seqno: Option<Seqno>,
    /// Seqno that every copy of the vBucket has persisted, as last observed; 0 while copies do not
    /// answer or have diverged. `None` if it is not observed: see
    /// [`persisted_only`](crate::StreamOptions::persisted_only).
    pub persisted_seqno: Option<Seqno>,
    /// How long changes have waited to be persisted; `None` without any.
    pub unpersisted_for: Option<Duration>,
    /// Whether they wait because copies have diverged, as after a failover.
    pub is_diverged: bool,
    /// Whether it has not been streaming for [`DISCONNECTED`](Self::DISCONNECTED).
    pub is_disconnected: bool,
}

impl VbucketStats {
    /// How long a vBucket may be without a stream, as while it moves, before nothing is known of
    /// it.
    pub const DISCONNECTED: Duration = Duration::from_secs(3);

    /// Seqnos between the application and the server; `None` if the server's are unknown, or were
    /// known before the vBucket was disconnected. Not a number of changes: of a key that was
    /// written twice, only the newest version is sent.
    #[must_use]
    pub fn lag(&self) -> Option<u64> {
        if self.is_disconnected {
            return None;
        }
        Some(self.high_seqno?.0.saturating_sub(self.seqno.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vbucket(state: VbucketState, high_seqno: Option<u64>) -> VbucketStats {
        VbucketStats {
            vbid: Vbid(0),
            state,
            seqno: Seqno(5),
            high_seqno: high_seqno.map(Seqno),
            persisted_seqno: None,
            unpersisted_for: None,
            is_diverged: false,
            is_disconnected: false,
        }
    }

    #[test]
    fn lag_is_summed_unless_one_is_unknown_and_never_overflows() {
        use VbucketState::{Complete, Streaming};

        let lag = |vbuckets: &[VbucketStats]| {
            let stats = StreamStats::default().with_lag(vbuckets);
            (stats.lag, stats.max_lag)
        };
        assert_eq!(lag(&[]), (Some(0), Some(0)));
        let [one, other] = [7, 9].map(|high| vbucket(Streaming, Some(high)));
        assert_eq!(lag(&[one, other]), (Some(6), Some(4)));
        assert_eq!(lag(&[one, vbucket(Streaming, None)]), (None, None));
        assert_eq!(lag(&[one, vbucket(Complete, None)]), (Some(2), Some(2)));
        assert_eq!(lag(&[one, VbucketStats { is_disconnected: true, ..other }]), (None, None));
        let far = vbucket(Streaming, Some(u64::MAX));
        assert_eq!(lag(&[far, far]), (Some(u64::MAX), Some(u64::MAX - 5)));
    }
}
