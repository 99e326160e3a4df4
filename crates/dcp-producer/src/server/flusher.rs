//! Persists changes a short while after they were made.

use std::sync::Arc;
use std::time::Duration;

use crate::bucket::{Subscriber, VBucket};
use crate::cluster::Cluster;

/// Persists what changes, `delay` after the first change of each round.
///
/// Changes count from the call on, not from when the future is first polled: whoever started the
/// cluster may write before its tasks run.
pub(super) fn run(cluster: Arc<Cluster>, delay: Duration) -> impl Future<Output = ()> {
    let subscriber = cluster.bucket.changes().subscribe();
    persist_changes(cluster, subscriber, delay)
}

async fn persist_changes(cluster: Arc<Cluster>, subscriber: Arc<Subscriber>, delay: Duration) {
    let bucket = &cluster.bucket;
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
