//! Notifies connections and the flusher about changed vBuckets.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use dcp_wire::Vbid;
use tokio::sync::Notify;

/// A set of vBuckets with many writers and one reader.
#[derive(Debug)]
pub(crate) struct VbidSet {
    words: Box<[AtomicU64]>,
}

impl VbidSet {
    fn new(count: u16) -> Self {
        Self { words: (0..count.div_ceil(64)).map(|_| AtomicU64::new(0)).collect() }
    }

    /// Adds a vBucket; `false` if it was already in the set.
    fn insert(&self, vbid: Vbid) -> bool {
        let Some(word) = self.words.get(vbid.index() / 64) else {
            return false;
        };
        let bit = 1u64 << (vbid.0 % 64);
        // Reading first keeps a busy writer from acquiring the cache line each time.
        word.load(Ordering::SeqCst) & bit == 0 && word.fetch_or(bit, Ordering::SeqCst) & bit == 0
    }

    /// Takes everything out.
    pub(crate) fn take(&self, mut each: impl FnMut(Vbid)) {
        for (index, word) in self.words.iter().enumerate() {
            let mut bits = word.swap(0, Ordering::SeqCst);
            while bits != 0 {
                let vbid = index * 64 + bits.trailing_zeros() as usize;
                bits &= bits - 1;
                each(Vbid(u16::try_from(vbid).unwrap_or(u16::MAX)));
            }
        }
    }
}

/// A subscriber to changes of vBuckets.
#[derive(Debug)]
pub(crate) struct Subscriber {
    /// vBuckets that grew, were rolled back or moved.
    pub(crate) changed: VbidSet,
    /// Notified whenever something is added to the set.
    pub(crate) notify: Notify,
}

/// The subscribers to changes of vBuckets.
#[derive(Debug)]
pub(crate) struct Changes {
    subscribers: RwLock<Arc<[Arc<Subscriber>]>>,
    count: u16,
}

impl Changes {
    pub(crate) fn new(count: u16) -> Self {
        Self { subscribers: RwLock::new(Arc::new([])), count }
    }

    /// A new subscriber, which is notified of every change until it unsubscribes.
    pub(crate) fn subscribe(&self) -> Arc<Subscriber> {
        let subscriber =
            Arc::new(Subscriber { changed: VbidSet::new(self.count), notify: Notify::new() });
        let mut all = self.subscribers.write().unwrap_or_else(PoisonError::into_inner);
        *all = all.iter().chain([&subscriber]).cloned().collect();
        subscriber
    }

    pub(crate) fn unsubscribe(&self, subscriber: &Arc<Subscriber>) {
        let mut all = self.subscribers.write().unwrap_or_else(PoisonError::into_inner);
        *all = all.iter().filter(|other| !Arc::ptr_eq(other, subscriber)).cloned().collect();
    }

    /// Announces that a vBucket grew, was rolled back or moved.
    pub(crate) fn announce(&self, vbid: Vbid) {
        self.tell(vbid, |_| true);
    }

    /// Announces to all but the flusher that persisted it that a vBucket is on disk.
    pub(crate) fn announce_persisted(&self, vbid: Vbid, by: &Arc<Subscriber>) {
        self.tell(vbid, |subscriber| !Arc::ptr_eq(subscriber, by));
    }

    fn tell(&self, vbid: Vbid, whom: impl Fn(&Arc<Subscriber>) -> bool) {
        let all = self.subscribers.read().unwrap_or_else(PoisonError::into_inner);
        for subscriber in all.iter().filter(|subscriber| whom(subscriber)) {
            if subscriber.changed.insert(vbid) {
                subscriber.notify.notify_one();
            }
        }
    }
}
