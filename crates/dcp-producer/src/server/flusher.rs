//! Persists changes a short while after they were made.

use std::sync::Arc;
use std::time::Duration;

use dcp_wire::Vbid;

use crate::bucket::{Subscriber, VBucket};
use crate::cluster::Cluster;
use crate::store::Store;

/// Persists what changes, `delay` after the first change of each round.
///
/// Changes count from the call on, not from the first poll of the future: documents may be written
/// before the tasks of the cluster run.
pub(super) fn run(
    cluster: Arc<Cluster>,
    store: Option<Arc<Store>>,
    delay: Duration,
) -> impl Future<Output = ()> {
    let subscriber = cluster.bucket.changes().subscribe();
    persist_changes(cluster, store, subscriber, delay)
}

async fn persist_changes(
    cluster: Arc<Cluster>,
    store: Option<Arc<Store>>,
    subscriber: Arc<Subscriber>,
    delay: Duration,
) {
    let bucket = &cluster.bucket;
    loop {
        subscriber.notify.notified().await;
        tokio::time::sleep(delay).await;
        let mut dirty = Vec::new();
        subscriber.changed.take(|vbid| dirty.push(vbid));
        for &vbid in &dirty {
            if bucket.each_copy(vbid, VBucket::persist) {
                // Streams of persisted changes may be waiting for this.
                bucket.changes().announce_persisted(vbid, &subscriber);
            }
            tokio::task::yield_now().await;
        }
        if let Some(store) = &store {
            keep(&cluster, store, dirty).await;
        }
    }
}

/// Saves persisted changes to the data folder.
async fn keep(cluster: &Arc<Cluster>, store: &Arc<Store>, dirty: Vec<Vbid>) {
    let (cluster, store) = (Arc::clone(cluster), Arc::clone(store));
    let round = tokio::task::spawn_blocking(move || store.round(&cluster, dirty));
    if let Ok(Err(error)) = round.await {
        // Retried with the next changes; until then they are not reported as persisted.
        tracing::error!(%error, "changes could not be written to the data folder");
    }
}
