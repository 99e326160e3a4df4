//! Following the versions of the cluster map.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// Counts versions. Followers are woken in the order in which they wait, so that a cluster in
/// simulated time is deterministic, unlike with `tokio::sync::watch`.
#[derive(Debug, Default)]
pub(crate) struct Versions {
    count: AtomicU64,
    changed: Notify,
}

impl Versions {
    /// Announces a new version.
    pub(super) fn announce(&self) {
        self.count.fetch_add(1, Ordering::AcqRel);
        self.changed.notify_waiters();
    }

    /// Follows from the current version on.
    pub(super) fn follow(self: &Arc<Self>) -> Follower {
        Follower { versions: Arc::clone(self), seen: self.count.load(Ordering::Acquire) }
    }
}

/// A follower of versions.
#[derive(Debug)]
pub(crate) struct Follower {
    versions: Arc<Versions>,
    seen: u64,
}

impl Follower {
    /// Whether there is an unseen version.
    pub(crate) fn has_changed(&self) -> bool {
        self.seen != self.versions.count.load(Ordering::Acquire)
    }

    /// Marks the newest version as seen.
    pub(crate) fn mark_seen(&mut self) {
        self.seen = self.versions.count.load(Ordering::Acquire);
    }

    /// Marks the current version as unseen.
    pub(crate) fn mark_unseen(&mut self) {
        self.seen = self.seen.wrapping_sub(1);
    }

    /// Waits until there is an unseen version, which stays unseen. Cancellation-safe.
    pub(crate) async fn changed(&self) {
        loop {
            let mut changed = std::pin::pin!(self.versions.changed.notified());
            // Announcements count from here on.
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
    async fn map_version_is_new_until_it_was_seen() {
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
