//! Which documents clients have locked.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use dcp_wire::{CollectionId, DocKey};

use crate::chance::Now;

/// How long a lock lasts if the client does not specify it, or requests more than is allowed.
const DEFAULT: Duration = Duration::from_secs(15);

/// Longest time for which a document can be locked.
const LONGEST: Duration = Duration::from_secs(30);

/// Locks of a vBucket, with the time each expires. They exist only in the active copy's memory.
#[derive(Debug, Default)]
pub(super) struct Locks(BTreeMap<(CollectionId, Bytes), Now>);

impl Locks {
    /// Locks a document, for at most the allowed time.
    pub(super) fn lock(&mut self, now: Now, key: DocKey<'_>, time: Duration) {
        let time = if time.is_zero() || time > LONGEST { DEFAULT } else { time };
        self.0.retain(|_, until| now < *until);
        self.0.insert(identity(key), now.after(time));
    }

    /// Whether a document is locked.
    pub(super) fn hold(&self, now: Now, key: DocKey<'_>) -> bool {
        !self.0.is_empty() && self.0.get(&identity(key)).is_some_and(|until| now < *until)
    }

    pub(super) fn release(&mut self, key: DocKey<'_>) {
        self.0.remove(&identity(key));
    }

    pub(super) fn release_all(&mut self) {
        self.0.clear();
    }
}

fn identity(key: DocKey<'_>) -> (CollectionId, Bytes) {
    (key.collection_id, Bytes::copy_from_slice(key.key))
}
