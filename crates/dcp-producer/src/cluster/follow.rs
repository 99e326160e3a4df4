//! Following the versions of the cluster map.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// Counts the versions there were. Followers are woken in the order in which they wait, so that a
/// cluster in simulated time does the same every time; those of `tokio::sync::watch` are not.
#[derive(Debug, Default)]
pub(crate) struct Versions {
    count: AtomicU64,
    changed: Notify,
}

impl Versions {
    /// There is another one.
    pub(super) fn announce(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_waiters();
    }

    /// Follows from the present one on.
    pub(super) fn follow(self: &Arc<Self>) -> Follower {
        Follower { versions: Arc::clone(self), seen: self.count.load(Ordering::Acquire) }
    }
}

/// Who wants to know of new versions.
#[derive(Debug)]
pub(crate) struct Follower {
    versions: Arc<Versions>,
    seen: u64,
}

impl Follower {
    /// Whether there is one that was not seen.
    pub(crate) fn has_changed(&self) -> bool {
        self.seen != self.versions.count.load(Ordering::Acquire)
    }

    /// The newest one was seen.
    pub(crate) fn mark_seen(&mut self) {
        self.seen = self.versions.count.load(Ordering::Acquire);
    }

    /// The present one was not seen.
    pub(crate) fn mark_unseen(&mut self) {
        self.seen = self.seen.wrapping_sub(1);
    }

    /// Waits until there is one that was not seen; it still counts as such. Cancellation-safe.
    pub(crate) async fn changed(&self) {
        loop {
            let mut changed = std::pin::pin!(self.versions.changed.notified());
            // Announcements from here on count.
            changed.as_mut().enable();
            if self.has_changed() {
                return;
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_version_is_new_until_it_was_seen() {
        let versions = Arc::new(Versions::default());
        let mut follower = versions.follow();
        assert!(!follower.has_changed());
        versions.announce();
        follower.changed().await;
        assert!(follower.has_changed(), "waiting for it is not seeing it");
        follower.mark_seen();
        assert!(!follower.has_changed());
        let (_, ()) = tokio::join!(follower.changed(), async { versions.announce() });
    }
}
