//! Numbers of a stream that its task and the application share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use dcp_wire::{Seqno, Vbid};
use tokio::sync::Notify;

use super::lag::{Freshness, KnownCollections};
use crate::events::EventLog;
use crate::queue::Link;
use crate::{StreamStats, VbucketState};

/// What is known of a vBucket besides where the application stands.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KnownVbucket {
    pub(crate) vbid: Vbid,
    pub(crate) state: VbucketState,
    /// Highest seqno the server was heard to have.
    pub(crate) high_seqno: Option<Seqno>,
    /// Up to here it is on the disks of all copies.
    pub(crate) persisted_seqno: Option<Seqno>,
    /// Since when changes wait for that.
    pub(crate) unpersisted_since: Option<Instant>,
    /// Whether copies are on different branches meanwhile.
    pub(crate) is_diverged: bool,
}

/// Numbers of a stream, written by its task and read by the application.
#[derive(Debug, Default)]
pub(crate) struct SharedStats {
    inner: Mutex<(StreamStats, Vec<Arc<Link>>)>,
    pub(super) vbuckets: Mutex<Vec<KnownVbucket>>,
    collections: Mutex<KnownCollections>,
    /// Whether anybody has asked for the lag of collections.
    wants_collections: AtomicBool,
    freshness: Mutex<Freshness>,
    /// The application has looked at figures that are not fresh.
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

    /// What is known of every vBucket, ascending.
    pub(crate) fn vbuckets(&self) -> Vec<KnownVbucket> {
        self.vbuckets.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Has nodes asked soon if it was long ago that they were.
    pub(crate) fn look(&self, now: Instant) {
        if self.freshness.lock().unwrap_or_else(PoisonError::into_inner).is_stale(now) {
            self.look.notify_one();
        }
    }

    /// Waits until the application looks at figures that are not fresh.
    pub(super) async fn looked_at(&self) {
        self.look.notified().await;
    }

    /// Nodes are asked how far they are.
    pub(super) fn asked(&self, now: Instant, interval: Duration) {
        self.freshness.lock().unwrap_or_else(PoisonError::into_inner).asked(now, interval);
    }

    /// What is known of collections; from the first call on they are asked for.
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

    /// Adds up what a connection that is gone has counted, and keeps in mind what of it is still to
    /// be taken.
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
