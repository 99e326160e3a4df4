//! Documents that a client has locked. Locks are in the active copy's memory and nowhere else.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dcp_proto::producer::{Item, ItemKind};
use dcp_wire::{Cas, CollectionId, DocKey};

use super::hash_table::Identity;
use super::vbucket::VBucket;
use crate::DocumentError;
use crate::chance::Now;

/// Locks of a vBucket: until when each holds.
pub(super) type Locks = BTreeMap<(CollectionId, Bytes), Now>;

/// How long a lock holds if the client does not say, or asks for longer than is allowed.
const DEFAULT: Duration = Duration::from_secs(15);

/// Longest time for which a document can be locked.
const LONGEST: Duration = Duration::from_secs(30);

impl VBucket {
    /// Locks a document; returns it under a new version, with which alone it can be written.
    pub(crate) fn lock(
        &mut self,
        now: Now,
        key: DocKey<'_>,
        time: Duration,
    ) -> Result<Arc<Item>, DocumentError> {
        self.check_collection(key)?;
        self.check_writable(now, key, Cas(0))?;
        let item = self.live_as_stored(now, key).ok_or(DocumentError::NotFound)?;
        let time = if time.is_zero() || time > LONGEST { DEFAULT } else { time };
        let cas = self.clock.tick(now);
        let locked = Arc::new(Item { cas, ..Item::clone(&item) });
        // No change: neither replicas nor streams are told.
        let slot = self.table.find_mut(Identity::Document(key.collection_id, key.key));
        slot.ok_or(DocumentError::NotFound)?.newest = Arc::clone(&locked);
        let identity = (key.collection_id, Bytes::copy_from_slice(key.key));
        self.locks.retain(|_, until| now < *until);
        self.locks.insert(identity, now.after(time));
        Ok(locked)
    }

    /// Unlocks a document that was locked as version `cas`.
    pub(crate) fn unlock(
        &mut self,
        now: Now,
        key: DocKey<'_>,
        cas: Cas,
    ) -> Result<(), DocumentError> {
        self.check_collection(key)?;
        let item = self.live_as_stored(now, key).ok_or(DocumentError::NotFound)?;
        if !self.is_locked(now, key) {
            return Err(DocumentError::NotLocked);
        }
        if item.cas != cas {
            return Err(DocumentError::Locked);
        }
        self.release(key);
        Ok(())
    }

    /// Whether a document is locked.
    pub(crate) fn is_locked(&self, now: Now, key: DocKey<'_>) -> bool {
        let locked = || self.locks.get(&(key.collection_id, Bytes::copy_from_slice(key.key)));
        !self.locks.is_empty() && locked().is_some_and(|until| now < *until)
    }

    fn release(&mut self, key: DocKey<'_>) {
        self.locks.remove(&(key.collection_id, Bytes::copy_from_slice(key.key)));
    }

    /// Refuses to write a document whose durable write is not completed, or which is locked as
    /// another version than `cas`. Writing that one unlocks it.
    pub(super) fn check_writable(
        &mut self,
        now: Now,
        key: DocKey<'_>,
        cas: Cas,
    ) -> Result<(), DocumentError> {
        self.check_not_prepared(key)?;
        if !self.is_locked(now, key) {
            return Ok(());
        }
        let live = self.newest(key).filter(|item| item.kind == ItemKind::Mutation);
        if live.is_some_and(|item| item.cas != cas) {
            return Err(DocumentError::Locked);
        }
        self.release(key);
        Ok(())
    }
}
