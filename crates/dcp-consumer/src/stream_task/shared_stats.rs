//! Figures of a stream that are shared between its task and the application.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dcp_wire::{CollectionId, Seqno, Vbid};
use tokio::sync::Notify;

use crate::events::EventLog;
use crate::queue::SharedState;
use crate::{StreamStats, VbucketState};

/// State of a vBucket besides the application's position.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownVbucket {
    pub(crate) vbid: Vbid,
    pub(crate) state: VbucketState,
    /// Highest known seqno of the server.
    pub(crate) high_seqno: Option<Seqno>,
    /// Seqno up to which all copies have persisted it.
    pub(crate) persisted_seqno: Option<Seqno>,
    /// Since when changes wait to be persisted.
    pub(crate) unpersisted_since: Option<Instant>,
    /// Whether the copies have diverged.
    pub(crate) is_diverged: bool,
    /// Since when it has not been streaming, unless it need not.
    pub(crate) idle_since: Option<Instant>,
}

/// vBuckets whose state has changed since it was published.
#[derive(Debug)]
pub(super) enum Outdated {
    These(Vec<Vbid>),
    All,
}

impl Outdated {
    pub(super) fn add(&mut self, vbid: Vbid) {
        if let Self::These(vbids) = self {
            vbids.push(vbid);
        }
    }
}

/// Result of a round for one collection.
#[derive(Debug, Default)]
pub(crate) struct KnownCollection {
    /// Its name as `scope.collection`.
    pub(crate) name: String,
    /// Its highest seqno in the vBuckets whose nodes have answered.
    pub(crate) seqnos: BTreeMap<Vbid, Seqno>,
}

/// By collection.
pub(crate) type KnownCollections = BTreeMap<CollectionId, KnownCollection>;

/// Figures of a stream, written by its task and read by the application.
#[derive(Debug, Default)]
pub(crate) struct SharedStats {
    inner: Mutex<(StreamStats, Vec<Arc<SharedState>>)>,
    pub(super) vbuckets: Mutex<Vec<KnownVbucket>>,
    collections: Mutex<KnownCollections>,
    /// Whether the application has read the lag of collections.
    wants_collections: AtomicBool,
    freshness: Mutex<Freshness>,
    /// The application has read outdated figures.
    stale_read: Notify,
    pub(crate) events: EventLog,
}

impl SharedStats {
    pub(crate) fn snapshot(&self) -> StreamStats {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut stats, connections) = (inner.0, &inner.1);
        for shared in connections {
            let (counted, waiting) = shared.stats();
            let (buffered, is_awaited) = shared.buffered();
            stats.connection.add(&counted);
            stats.buffered_bytes += buffered;
            stats.leftover_bytes += if is_awaited { 0 } else { buffered };
            stats.unpersisted_rows += waiting.rows;
            stats.unpersisted_bytes += waiting.bytes;
        }
        stats
    }

    /// State of every vBucket, ascending.
    pub(crate) fn vbuckets(&self) -> Vec<KnownVbucket> {
        self.vbuckets.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Triggers new requests if the last ones were long ago.
    pub(crate) fn refresh(&self, now: Instant) {
        if self.freshness.lock().unwrap_or_else(PoisonError::into_inner).is_stale(now) {
            self.stale_read.notify_one();
        }
    }

    /// Waits until the application reads outdated figures.
    pub(super) async fn stale_read(&self) {
        self.stale_read.notified().await;
    }

    /// Notes that high seqnos were requested.
    pub(super) fn requested(&self, now: Instant, interval: Duration) {
        self.freshness.lock().unwrap_or_else(PoisonError::into_inner).requested(now, interval);
    }

    /// Seqnos of collections; they are requested from the first call on.
    pub(crate) fn collections<T>(&self, read: impl FnOnce(&KnownCollections) -> T) -> T {
        if !self.wants_collections.swap(true, Ordering::Relaxed) {
            self.stale_read.notify_one();
        }
        read(&self.collections.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn wants_collections(&self) -> bool {
        self.wants_collections.load(Ordering::Relaxed)
    }

    pub(super) fn update_collections(&self, change: impl FnOnce(&mut KnownCollections)) {
        change(&mut self.collections.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Adds the counters of an ended connection, and remembers what is still to be taken from it.
    pub(super) fn fold(&self, shared: &SharedState) {
        shared.close();
        self.update(|stats, connections| {
            stats.connection.add(&shared.take_stats());
            connections.retain(|shared| shared.buffered().1 || shared.has_queued());
        });
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut StreamStats, &mut Vec<Arc<SharedState>>)) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (stats, connections) = &mut *inner;
        change(stats, connections);
    }
}

/// When reading figures triggers new requests to nodes.
#[derive(Debug, Default)]
struct Freshness {
    stale_from: Option<Instant>,
}

impl Freshness {
    /// Notes a request, whose regular interval is `interval`; reading figures may shorten it to a
    /// tenth.
    fn requested(&mut self, now: Instant, interval: Duration) {
        self.stale_from = Some(now + interval / 10);
    }

    /// Whether reading figures now triggers requests; true once.
    fn is_stale(&mut self, now: Instant) -> bool {
        let is_stale = self.stale_from.is_some_and(|from| now >= from);
        if is_stale {
            self.stale_from = None;
        }
        is_stale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lag_figures_are_stale_after_a_tenth_of_the_interval_and_once() {
        let (mut freshness, now) = (Freshness::default(), Instant::now());
        let interval = Duration::from_secs(10);
        assert!(!freshness.is_stale(now), "nothing was requested yet");
        freshness.requested(now, interval);
        assert!(!freshness.is_stale(now + interval / 11));
        assert!(freshness.is_stale(now + interval / 10));
        assert!(!freshness.is_stale(now + interval), "a request is on its way");
    }
}
