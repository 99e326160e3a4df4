//! Figures of a stream that are shared between its task and the application.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dcp_wire::{Seqno, Vbid};
use tokio::sync::Notify;

use super::lag::{Freshness, KnownCollections};
use crate::events::EventLog;
use crate::queue::Link;
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
}

/// Figures of a stream, written by its task and read by the application.
#[derive(Debug, Default)]
pub(crate) struct SharedStats {
    inner: Mutex<(StreamStats, Vec<Arc<Link>>)>,
    pub(super) vbuckets: Mutex<Vec<KnownVbucket>>,
    collections: Mutex<KnownCollections>,
    /// Whether the application has read the lag of collections.
    wants_collections: AtomicBool,
    freshness: Mutex<Freshness>,
    /// The application has read outdated figures.
    look: Notify,
    pub(crate) events: EventLog,
}

impl SharedStats {
    pub(crate) fn snapshot(&self) -> StreamStats {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut stats, links) = (inner.0, &inner.1);
        for link in links {
            let (counted, waiting) = link.stats();
            let (buffered, is_awaited) = link.buffered();
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
    pub(crate) fn look(&self, now: Instant) {
        if self.freshness.lock().unwrap_or_else(PoisonError::into_inner).is_stale(now) {
            self.look.notify_one();
        }
    }

    /// Waits until the application reads outdated figures.
    pub(super) async fn looked_at(&self) {
        self.look.notified().await;
    }

    /// Notes that high seqnos were requested.
    pub(super) fn asked(&self, now: Instant, interval: Duration) {
        self.freshness.lock().unwrap_or_else(PoisonError::into_inner).asked(now, interval);
    }

    /// Seqnos of collections; they are requested from the first call on.
    pub(crate) fn collections<T>(&self, read: impl FnOnce(&KnownCollections) -> T) -> T {
        if !self.wants_collections.swap(true, Ordering::Relaxed) {
            self.look.notify_one();
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
    pub(super) fn fold(&self, link: &Link) {
        link.close();
        self.update(|stats, links| {
            stats.connection.add(&link.take_stats());
            links.retain(|link| link.buffered().1 || link.has_queued());
        });
    }

    pub(super) fn update(&self, change: impl FnOnce(&mut StreamStats, &mut Vec<Arc<Link>>)) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let (stats, links) = &mut *inner;
        change(stats, links);
    }
}
