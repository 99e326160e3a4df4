//! A bucket's documents: storage without tasks, IO or a clock of its own.
//!
//! Each vBucket has a lock of its own. What changes is announced through [`Changes`].

mod changes;
mod checkpoint_log;
mod clock;
mod disk_image;
mod document;
mod hash_table;
mod history;
mod memory;
mod source;
mod vbucket;

use std::sync::{Arc, Mutex, PoisonError};

use bytes::{BufMut, Bytes, BytesMut};
use dcp_proto::producer::{Item, ItemKind};
use dcp_proto::topology::vbucket_of_key;
use dcp_wire::{Datatype, DocKey, Seqno, Vbid, Vbuuid, xattr};

use crate::Error;
pub(crate) use changes::{Changes, Subscriber};
pub(crate) use clock::Now;
pub(crate) use document::{Condition, DocumentWrite, MAX_VALUE_LEN, MetaWrite};
pub(crate) use memory::MemoryUse;
pub(crate) use source::VBucketGuard;
pub(crate) use vbucket::{VBucket, Written};

/// A bucket.
#[derive(Debug)]
pub(crate) struct Bucket {
    vbuckets: Vec<Mutex<VBucket>>,
    memory: Arc<MemoryUse>,
    changes: Changes,
}

impl Bucket {
    /// An empty bucket of `count` vBuckets.
    pub(crate) fn new(count: u16, memory_quota: usize, history_bytes: usize) -> Self {
        let memory = Arc::new(MemoryUse::new(memory_quota));
        let history = history_bytes / usize::from(count.max(1));
        let vbucket = |vbid| {
            let memory = Arc::clone(&memory);
            Mutex::new(VBucket::new(Vbid(vbid), random_vbuuid(), history, memory))
        };
        let vbuckets = (0..count).map(vbucket).collect();
        Self { vbuckets, memory, changes: Changes::new(count) }
    }

    pub(crate) fn vbucket_count(&self) -> u16 {
        u16::try_from(self.vbuckets.len()).unwrap_or(u16::MAX)
    }

    /// All vBuckets' ids.
    pub(crate) fn vbids(&self) -> impl Iterator<Item = Vbid> + use<> {
        (0..self.vbucket_count()).map(Vbid)
    }

    pub(crate) fn memory(&self) -> &MemoryUse {
        &self.memory
    }

    pub(crate) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// The vBucket `key` lies in.
    pub(crate) fn vbid_of(&self, key: &[u8]) -> Vbid {
        vbucket_of_key(key, self.vbucket_count())
    }

    /// Locks a vBucket for looking at it.
    pub(crate) fn lock(&self, vbid: Vbid) -> Option<VBucketGuard<'_>> {
        let vbucket = self.vbuckets.get(vbid.index())?;
        // A panic elsewhere is a defect, but it leaves no vBucket that is worse than a crash
        // would: every operation checks first and changes then.
        Some(VBucketGuard(vbucket.lock().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Locks a vBucket for an operation, and tells those who follow it if it changed it.
    pub(crate) fn with<T>(&self, vbid: Vbid, op: impl FnOnce(&mut VBucket) -> T) -> Option<T> {
        let mut guard = self.lock(vbid)?;
        let before = guard.0.high_seqno;
        let result = op(&mut guard.0);
        let changed = guard.0.high_seqno != before;
        drop(guard);
        if changed {
            self.changes.announce(vbid);
        }
        Some(result)
    }

    /// Goes back to how a vBucket was at `to`; its streams are to end. `None` if the bucket lacks
    /// the vBucket.
    pub(crate) fn roll_back(&self, vbid: Vbid, to: Seqno) -> Option<Result<(), Error>> {
        let mut guard = self.lock(vbid)?;
        let result = guard.0.roll_back(to, random_vbuuid());
        drop(guard);
        if result.is_ok() {
            self.changes.announce(vbid);
        }
        Some(result)
    }
}

/// A random branch identity: 48 significant bits, never 0.
fn random_vbuuid() -> Vbuuid {
    Vbuuid(rand::random_range(1..1u64 << 48))
}

/// Bytes an item takes, about: itself, its counters, key and value, its places in table and image.
fn footprint(item: &Item) -> usize {
    const PLACES: usize = 48;
    size_of::<Item>() + PLACES + item.key.len() + item.value.len()
}

/// Whether a live document's time has passed.
fn is_expired(item: &Item, now: Now) -> bool {
    item.kind == ItemKind::Mutation && item.expiry != 0 && item.expiry <= now.seconds()
}

/// The xattr section that outlives a document; empty if there is none.
pub(crate) fn system_xattrs(item: &Item) -> Bytes {
    if !item.datatype.contains(Datatype::XATTR) {
        return Bytes::new();
    }
    let Ok((xattrs, _)) = xattr::split(&item.value) else {
        return Bytes::new();
    };
    let system: Vec<_> = xattrs.flatten().filter(xattr::Xattr::is_system).collect();
    let mut out = BytesMut::new().limit(MAX_VALUE_LEN);
    if system.is_empty() || xattr::encode(system, &mut out).is_err() {
        return Bytes::new();
    }
    out.into_inner().freeze()
}

/// A key in the default collection.
pub(crate) const fn default_key(key: &[u8]) -> DocKey<'_> {
    DocKey { collection_id: dcp_wire::CollectionId::DEFAULT, key }
}

#[cfg(test)]
mod tests;
