//! Which documents clients have locked.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use dcp_wire::{CollectionId, DocKey};

use crate::chance::Now;

/// How long a lock holds if the client does not say, or asks for longer than is allowed.
const DEFAULT: Duration = Duration::from_secs(15);

/// Longest time for which a document can be locked.
const LONGEST: Duration = Duration::from_secs(30);

/// Locks of a vBucket: until when each holds. They are in the active copy's memory and nowhere else.
#[derive(Debug, Default)]
pub(super) struct Locks(BTreeMap<(CollectionId, Bytes), Now>);

impl Locks {
    /// Locks a document, for as long as is allowed.
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
