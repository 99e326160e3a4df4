//! Operations on single documents, durable writes among them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dcp_producer_proto::{Item, ItemKind};
use dcp_wire::message::DurabilityLevel;
use dcp_wire::{Cas, CollectionId, Datatype, DocKey, RevSeqno, Seqno};

use super::durable::{Outcome, completed};
use super::hash_table::Identity;
use super::item::{MAX_VALUE_LEN, inflated, is_expired, system_xattrs};
use super::vbucket::{VBucket, Written};
use crate::DocumentError;
use crate::chance::Now;

/// When a write is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Condition {
    /// Always.
    Any,
    /// Only if the document does not exist.
    Absent,
    /// Only if it exists.
    Present,
}

/// A document to write.
#[derive(Clone, Debug)]
pub(crate) struct DocumentWrite<'a> {
    pub(crate) key: DocKey<'a>,
    /// Value, xattr section first if the datatype says so; never compressed.
    pub(crate) value: Bytes,
    pub(crate) datatype: Datatype,
    pub(crate) flags: u32,
    /// Seconds since 1970; 0 never.
    pub(crate) expiry: u32,
    /// Version the document must have; 0 for any.
    pub(crate) cas: Cas,
    pub(crate) condition: Condition,
    pub(crate) durability: Option<Durability>,
}

/// What a write waits for before it becomes visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Durability {
    pub(crate) level: DurabilityLevel,
    /// When it is aborted unless enough copies have it; `None` if the bucket's owner decides.
    pub(crate) deadline: Option<Now>,
}

/// A version created elsewhere.
#[derive(Clone, Debug)]
pub(crate) struct MetaWrite<'a> {
    pub(crate) key: DocKey<'a>,
    pub(crate) kind: ItemKind,
    pub(crate) value: Bytes,
    pub(crate) datatype: Datatype,
    pub(crate) flags: u32,
    /// Expiry of a live document, delete time of a tombstone, in seconds since 1970.
    pub(crate) time: u32,
    pub(crate) rev_seqno: RevSeqno,
    /// Version to store.
    pub(crate) cas: Cas,
    /// Version the document must have; 0 for any.
    pub(crate) expected_cas: Cas,
    pub(crate) condition: Condition,
    /// Whether an older version may replace a newer one.
    pub(crate) force: bool,
}

/// Refuses keys that do not fit the protocol.
pub(crate) fn check_key(key: DocKey<'_>) -> Result<(), DocumentError> {
    let max =
        if key.collection_id.0 == 0 { DocKey::MAX_DEFAULT_LEN } else { DocKey::MAX_COLLECTION_LEN };
    if key.key.is_empty() || key.key.len() > max {
        return Err(DocumentError::InvalidKey { len: key.key.len(), max });
    }
    Ok(())
}

impl VBucket {
    /// The document if it is alive; one whose expiry has passed is expired now.
    pub(crate) fn live(&mut self, now: Now, key: DocKey<'_>) -> Option<Arc<Item>> {
        self.newest_now(now, key).filter(|item| item.kind == ItemKind::Mutation)
    }

    /// The same with its value as it is stored, which may be compressed.
    pub(crate) fn live_as_stored(&mut self, now: Now, key: DocKey<'_>) -> Option<Arc<Item>> {
        self.newest_as_stored(now, key).filter(|item| item.kind == ItemKind::Mutation)
    }

    /// The document if it is alive, with its value as stored; one whose expiry has passed is not
    /// expired.
    pub(crate) fn live_if_unexpired(&self, now: Now, key: DocKey<'_>) -> Option<Arc<Item>> {
        let item = self.newest(key).filter(|item| !is_expired(item, now));
        item.filter(|item| item.kind == ItemKind::Mutation).cloned()
    }

    /// Newest version of the document, including tombstones; one whose expiry has passed is not
    /// expired.
    pub(crate) fn newest_unless_expired(&self, now: Now, key: DocKey<'_>) -> Option<Arc<Item>> {
        Some(inflated(self.newest(key)?)).filter(|item| !is_expired(item, now))
    }

    /// Newest version of the document, including tombstones; expires it if its time has passed.
    pub(crate) fn newest_now(&mut self, now: Now, key: DocKey<'_>) -> Option<Arc<Item>> {
        self.newest_as_stored(now, key).map(|item| inflated(&item))
    }

    /// The same with its value as it is stored, which may be compressed.
    pub(crate) fn newest_as_stored(&mut self, now: Now, key: DocKey<'_>) -> Option<Arc<Item>> {
        let item = self.newest(key).cloned()?;
        if is_expired(&item, now) {
            self.bury(now, &inflated(&item), ItemKind::Expiration, None);
            return self.newest(key).cloned();
        }
        Some(item)
    }

    /// The version that a write replaces, if the write is allowed. `cas` is the version the document
    /// must have; 0 for any.
    fn check_write(
        &mut self,
        now: Now,
        key: DocKey<'_>,
        len: usize,
        cas: Cas,
        condition: Condition,
    ) -> Result<Option<Arc<Item>>, DocumentError> {
        check_key(key)?;
        if len > MAX_VALUE_LEN {
            return Err(DocumentError::ValueTooLarge { len, max: MAX_VALUE_LEN });
        }
        self.check_collection(key)?;
        self.check_writable(now, key, cas)?;
        let previous = self.newest_now(now, key);
        match previous.as_ref().filter(|item| item.kind == ItemKind::Mutation) {
            Some(_) if condition == Condition::Absent => Err(DocumentError::Exists),
            Some(item) if cas != Cas(0) && cas != item.cas => Err(DocumentError::CasMismatch(cas)),
            None if condition == Condition::Present || cas != Cas(0) => {
                Err(DocumentError::NotFound)
            }
            _ => Ok(previous),
        }
    }

    /// Writes a document.
    pub(crate) fn store(
        &mut self,
        now: Now,
        write: DocumentWrite<'_>,
    ) -> Result<Written, DocumentError> {
        let DocumentWrite { key, cas, condition, .. } = write;
        let previous = self.check_write(now, key, write.value.len(), cas, condition)?;
        self.memory().check(write.value.len())?;
        let key = match &previous {
            Some(item) => item.key.clone(),
            None => Bytes::copy_from_slice(write.key.key),
        };
        let rev_seqno = RevSeqno(self.next_rev(previous.as_ref()));
        let cas = self.clock.tick(now);
        let item = Item {
            kind: ItemKind::Mutation,
            seqno: Seqno::ZERO,
            rev_seqno,
            cas,
            collection_id: write.key.collection_id,
            key,
            value: write.value,
            datatype: write.datatype,
            flags: write.flags,
            expiry: self.limited_expiry(now, write.key, write.expiry),
            delete_time: 0,
        };
        Ok(self.put(item, write.durability))
    }

    /// Removes a document, on request or because its time has passed; with a `durability`, it is
    /// removed once that is reached.
    pub(crate) fn remove(
        &mut self,
        now: Now,
        key: DocKey<'_>,
        cas: Cas,
        kind: ItemKind,
        durability: Option<Durability>,
    ) -> Result<Written, DocumentError> {
        check_key(key)?;
        self.check_collection(key)?;
        self.check_writable(now, key, cas)?;
        let item = self.live(now, key).ok_or(DocumentError::NotFound)?;
        if cas != Cas(0) && cas != item.cas {
            return Err(DocumentError::CasMismatch(cas));
        }
        Ok(self.bury(now, &item, kind, durability))
    }

    /// Changes a document's expiry; returns the document as stored afterwards.
    pub(crate) fn touch(
        &mut self,
        now: Now,
        key: DocKey<'_>,
        expiry: u32,
    ) -> Result<Arc<Item>, DocumentError> {
        check_key(key)?;
        self.check_collection(key)?;
        self.check_writable(now, key, Cas(0))?;
        let item = self.live_as_stored(now, key).ok_or(DocumentError::NotFound)?;
        let expiry = self.limited_expiry(now, key, expiry);
        if item.expiry == expiry {
            return Ok(item);
        }
        let cas = self.clock.tick(now);
        let rev_seqno = RevSeqno(self.next_rev(Some(&item)));
        self.append(Item { cas, rev_seqno, expiry, ..Item::clone(&item) });
        Ok(self.newest(key).map_or(item, Arc::clone))
    }

    /// Stores a version created elsewhere.
    pub(crate) fn store_with_meta(
        &mut self,
        now: Now,
        write: MetaWrite<'_>,
    ) -> Result<Written, DocumentError> {
        let MetaWrite { key, expected_cas, condition, .. } = write;
        let previous = self.check_write(now, key, write.value.len(), expected_cas, condition)?;
        if !write.force && previous.as_ref().is_some_and(|item| !write.wins_over(item)) {
            return Err(DocumentError::Exists);
        }
        self.memory().check(write.value.len())?;
        self.clock.observe(write.cas);
        let live = write.kind == ItemKind::Mutation;
        let expiry = if live { self.limited_expiry(now, write.key, write.time) } else { 0 };
        Ok(self.append(Item {
            kind: write.kind,
            seqno: Seqno::ZERO,
            rev_seqno: write.rev_seqno,
            cas: write.cas,
            collection_id: write.key.collection_id,
            key: Bytes::copy_from_slice(write.key.key),
            value: write.value,
            datatype: write.datatype,
            flags: write.flags,
            expiry,
            delete_time: if live { 0 } else { write.time },
        }))
    }

    /// Makes a version the newest one, or prepares it if it has to be durable first.
    fn put(&mut self, mut item: Item, durability: Option<Durability>) -> Written {
        let Some(Durability { level, deadline }) = durability else {
            return self.append(item);
        };
        let is_deletion = item.kind != ItemKind::Mutation;
        item.kind = ItemKind::Prepare { level, is_deletion };
        let written = self.append(item);
        if let Some(deadline) = deadline {
            self.durable.decide_by_copies(written.seqno, deadline);
        }
        written
    }

    /// Outcome of the durable write that was prepared at a seqno.
    pub(crate) fn outcome(&self, prepared: Seqno) -> Outcome {
        self.durable.outcome(prepared)
    }

    /// A new CAS for a document.
    pub(crate) fn next_cas(&mut self, now: Now) -> Cas {
        self.clock.tick(now)
    }

    /// The CAS of the next write.
    pub(crate) fn upcoming_cas(&self, now: Now) -> Cas {
        self.clock.clone().tick(now)
    }

    /// Expires every document whose time has passed; returns how many.
    pub(crate) fn expire_due(&mut self, now: Now) -> usize {
        let keys = self.expired_keys(now);
        for (collection_id, key) in &keys {
            self.live(now, DocKey { collection_id: *collection_id, key });
        }
        keys.len()
    }

    /// Replaces `item` with a tombstone; system xattrs outlive the document.
    fn bury(
        &mut self,
        now: Now,
        item: &Arc<Item>,
        kind: ItemKind,
        durability: Option<Durability>,
    ) -> Written {
        let (key, xattrs) = (item.key.clone(), system_xattrs(item));
        let item = self.tombstone(now, kind, item.collection_id, key, xattrs, Some(item));
        self.put(item, durability)
    }

    /// The tombstone that follows `previous`.
    fn tombstone(
        &mut self,
        now: Now,
        kind: ItemKind,
        collection_id: CollectionId,
        key: Bytes,
        xattrs: Bytes,
        previous: Option<&Arc<Item>>,
    ) -> Item {
        let cas = self.clock.tick(now);
        let rev_seqno = RevSeqno(self.next_rev(previous));
        Item {
            kind,
            seqno: Seqno::ZERO,
            rev_seqno,
            cas,
            collection_id,
            key,
            datatype: if xattrs.is_empty() { Datatype::RAW } else { Datatype::XATTR },
            value: xattrs,
            flags: 0,
            expiry: 0,
            delete_time: now.seconds(),
        }
    }

    /// Writes the xattrs of a tombstone, which may be an existing one or that of a document that
    /// never existed.
    pub(crate) fn store_tombstone(
        &mut self,
        now: Now,
        key: DocKey<'_>,
        xattrs: Bytes,
        durability: Option<Durability>,
    ) -> Result<Written, DocumentError> {
        check_key(key)?;
        self.check_collection(key)?;
        self.check_not_prepared(key)?;
        self.memory().check(xattrs.len())?;
        let previous = self.newest_now(now, key);
        let (id, key) = (key.collection_id, Bytes::copy_from_slice(key.key));
        let item = self.tombstone(now, ItemKind::Deletion, id, key, xattrs, previous.as_ref());
        Ok(self.put(item, durability))
    }

    /// A document's expiry, limited by its collection's maximum.
    fn limited_expiry(&self, now: Now, key: DocKey<'_>, expiry: u32) -> u32 {
        let Some(max_ttl) = self.collections.max_ttl(key.collection_id).filter(|&ttl| ttl != 0)
        else {
            return expiry;
        };
        let latest = now.seconds().saturating_add(max_ttl);
        if expiry == 0 { latest } else { expiry.min(latest) }
    }

    /// Refuses keys of collections the vBucket does not have.
    pub(crate) fn check_collection(&self, key: DocKey<'_>) -> Result<(), DocumentError> {
        if self.collections.contains(key.collection_id) {
            return Ok(());
        }
        Err(DocumentError::UnknownCollection(key.collection_id))
    }
}

impl VBucket {
    /// Commits the durable write of a document, or aborts it. Writes are completed in the order in
    /// which they were prepared.
    pub(crate) fn complete(
        &mut self,
        key: DocKey<'_>,
        commit: bool,
    ) -> Result<Written, DocumentError> {
        if self.durable.next() != Some(key) {
            return Err(DocumentError::NotPrepared);
        }
        let identity = Identity::Prepared(key.collection_id, key.key);
        let slot = self.table.find(identity).ok_or(DocumentError::NotPrepared)?;
        let prepare = Item::clone(&slot.newest);
        if self.durable.outcome(prepare.seqno) != Outcome::Outstanding {
            return Err(DocumentError::NotPrepared);
        }
        Ok(self.append(completed(prepare, commit)))
    }

    /// Commits or aborts the next durable write.
    pub(super) fn complete_next(&mut self, commit: bool) -> bool {
        let Some(DocKey { collection_id, key }) = self.durable.next() else { return false };
        let key = Bytes::copy_from_slice(key);
        self.complete(DocKey { collection_id, key: &key }, commit).is_ok()
    }

    /// Seqno of the prepare of a document's durable write, unless there is none to complete.
    pub(super) fn outstanding(&self, key: DocKey<'_>) -> Option<Seqno> {
        let slot = self.table.find(Identity::Prepared(key.collection_id, key.key))?;
        Some(slot.newest.seqno).filter(|&prepared| self.durable.is_outstanding(prepared))
    }

    /// Refuses changes to a document whose durable write is not completed.
    pub(super) fn check_not_prepared(&self, key: DocKey<'_>) -> Result<(), DocumentError> {
        if self.outstanding(key).is_some() {
            return Err(DocumentError::SyncWriteInProgress);
        }
        Ok(())
    }

    /// Refuses to read a document whose durable write is being committed again: neither the old
    /// version nor the new one is known to be the visible one.
    pub(crate) fn check_visible(&self, key: DocKey<'_>) -> Result<(), DocumentError> {
        if self.outstanding(key).is_some_and(|prepared| self.durable.may_be_visible(prepared)) {
            return Err(DocumentError::SyncWriteReCommitInProgress);
        }
        Ok(())
    }
}

impl VBucket {
    /// Locks a document; returns it with a new CAS, which is required to write it.
    pub(crate) fn lock(
        &mut self,
        now: Now,
        key: DocKey<'_>,
        time: Duration,
    ) -> Result<Arc<Item>, DocumentError> {
        self.check_collection(key)?;
        self.check_writable(now, key, Cas(0))?;
        let item = self.live_as_stored(now, key).ok_or(DocumentError::NotFound)?;
        let cas = self.clock.tick(now);
        let locked = Arc::new(Item { cas, ..Item::clone(&item) });
        // Not a change: neither replicas nor streams are notified.
        let slot = self.table.find_mut(Identity::Document(key.collection_id, key.key));
        slot.ok_or(DocumentError::NotFound)?.newest = Arc::clone(&locked);
        self.locks.lock(now, key, time);
        Ok(locked)
    }

    /// Unlocks a document that was locked with `cas`.
    pub(crate) fn unlock(
        &mut self,
        now: Now,
        key: DocKey<'_>,
        cas: Cas,
    ) -> Result<(), DocumentError> {
        self.check_collection(key)?;
        self.check_not_prepared(key)?;
        let item = self.live_as_stored(now, key).ok_or(DocumentError::NotFound)?;
        if !self.is_locked(now, key) {
            return Err(DocumentError::NotLocked);
        }
        if item.cas != cas {
            return Err(DocumentError::Locked);
        }
        self.locks.release(key);
        Ok(())
    }

    /// Whether a document is locked.
    pub(crate) fn is_locked(&self, now: Now, key: DocKey<'_>) -> bool {
        self.locks.hold(now, key)
    }

    /// Refuses to write a document whose durable write is not completed, or which is locked with
    /// another CAS than `cas`. A write with the lock's CAS unlocks it.
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
        self.locks.release(key);
        Ok(())
    }
}

impl MetaWrite<'_> {
    /// Conflict resolution by rev seqno, then by the rest of the metadata.
    fn wins_over(&self, item: &Item) -> bool {
        let time = if item.kind == ItemKind::Mutation { item.expiry } else { item.delete_time };
        (self.rev_seqno, self.cas, self.time, self.flags)
            > (item.rev_seqno, item.cas, time, item.flags)
    }
}
