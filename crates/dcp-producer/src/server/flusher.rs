//! Persists changes a short while after they were made.

use std::sync::Arc;
use std::time::Duration;

use dcp_wire::Vbid;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::bucket::VBucket;
use crate::cluster::{Cluster, ServedBucket};
use crate::store::Store;

/// Persists what changes in each bucket.
#[derive(Clone, Debug)]
pub(super) struct Flusher {
    pub(super) cluster: Arc<Cluster>,
    pub(super) store: Option<Arc<Store>>,
    /// From the first change of a round to the round.
    pub(super) delay: Duration,
}

impl Flusher {
    /// Flushes each bucket in a task of its own, those that are created later too.
    pub(super) async fn run(self, tasks: TaskTracker, stop: CancellationToken) {
        let mut version = self.cluster.follow_map();
        let mut flushed: Vec<Arc<ServedBucket>> = Vec::new();
        loop {
            let buckets = self.cluster.buckets();
            for served in &buckets {
                if !flushed.iter().any(|known| Arc::ptr_eq(known, served)) {
                    let flush = self.clone().flush(Arc::clone(served));
                    tasks.spawn(stop.clone().run_until_cancelled_owned(flush));
                }
            }
            flushed = buckets;
            version.changed().await;
            version.mark_seen();
        }
    }

    /// Persists the changes of a bucket until it is dropped and gone.
    async fn flush(self, served: Arc<ServedBucket>) {
        let bucket = &served.bucket;
        loop {
            served.unflushed.notify.notified().await;
            tokio::time::sleep(self.delay).await;
            let mut dirty = Vec::new();
            served.unflushed.changed.take(|vbid| dirty.push(vbid));
            for &vbid in &dirty {
                if bucket.each_copy(vbid, VBucket::persist) {
                    // Streams of persisted changes may be waiting for this.
                    bucket.changes().announce_persisted(vbid, &served.unflushed);
                }
                tokio::task::yield_now().await;
            }
            if let Some(store) = &self.store {
                self.keep(&served, store, dirty).await;
            }
            if !self.cluster.has(&served) {
                if let Some(store) = &self.store {
                    // It may have been dropped during the round.
                    self.keep(&served, store, Vec::new()).await;
                }
                return;
            }
        }
    }

    /// Saves persisted changes to the data folder.
    async fn keep(&self, served: &Arc<ServedBucket>, store: &Arc<Store>, dirty: Vec<Vbid>) {
        let (cluster, served, store) =
            (Arc::clone(&self.cluster), Arc::clone(served), Arc::clone(store));
        let round = tokio::task::spawn_blocking(move || store.round(&cluster, &served, dirty));
        if let Ok(Err(error)) = round.await {
            // Retried with the next changes; until then they are not reported as persisted.
            tracing::error!(name: "data_folder_not_written", %error, "changes could not be written to the data folder");
        }
    }
}
