//! Persists changes a short while after they were made.

use std::sync::Arc;
use std::time::Duration;

use crate::bucket::VBucket;
use crate::cluster::Cluster;

/// Persists what changes, `delay` after the first change of each round.
pub(super) async fn run(cluster: Arc<Cluster>, delay: Duration) {
    let bucket = &cluster.bucket;
    let subscriber = bucket.changes().subscribe();
    loop {
        subscriber.notify.notified().await;
        tokio::time::sleep(delay).await;
        let mut dirty = Vec::new();
        subscriber.changed.take(|vbid| dirty.push(vbid));
        for vbid in dirty {
            if bucket.each_copy(vbid, VBucket::persist) {
                // Streams of what is on disk may be waiting for this.
                bucket.changes().announce_persisted(vbid, &subscriber);
            }
            tokio::task::yield_now().await;
        }
    }
}
