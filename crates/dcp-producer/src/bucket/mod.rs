//! A bucket's documents: storage without tasks, IO or a clock.
//!
//! Each vBucket has its own lock. Changes are announced through [`Changes`].

mod apply_manifest;
mod changes;
mod checkpoint_log;
mod clock;
mod collections;
mod copies;
mod disk_image;
mod document;
mod durable;
mod flush;
mod flush_progress;
mod guard;
mod hash_table;
mod history;
mod item;
mod link_faults;
mod locks;
mod manifest;
mod manifest_record;
mod memory;
mod replica;
mod replica_link;
mod rollback;
mod source;
mod vbucket;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dcp_producer_proto::VBucketState;
use dcp_proto::topology::vbucket_of_key;
use dcp_wire::{Seqno, Vbid};

use crate::Error;
use crate::chance::Chance;
pub(crate) use changes::{Changes, Subscriber};
pub(crate) use copies::{Copies, Copy, UNLIMITED_LAG};
pub(crate) use document::{Condition, DocumentWrite, Durability, MetaWrite};
pub(crate) use durable::Outcome;
pub(crate) use flush::VBucketRecord;
pub(crate) use flush_progress::Flushed;
pub(crate) use guard::VBucketGuard;
pub(crate) use item::{MAX_VALUE_LEN, inflated, system_xattrs};
pub(crate) use link_faults::{LinkEffect, LinkFault, LinkFaults};
pub(crate) use manifest::{CollectionSettings, Manifest, Unchanged};
pub(crate) use memory::MemoryUse;
pub(crate) use vbucket::{VBucket, Written};

/// A bucket.
#[derive(Debug)]
pub(crate) struct Bucket {
    vbuckets: Vec<Mutex<Copies>>,
    link_faults: Mutex<Arc<LinkFaults>>,
    memory: Arc<MemoryUse>,
    changes: Changes,
    history_bytes: usize,
    /// Copies of each vBucket that make a write durable.
    majority: usize,
    is_ephemeral: bool,
    keeps_history: bool,
    keeps_compressed: bool,
    has_data_folder: bool,
    chance: Arc<Chance>,
}

impl Bucket {
    /// A bucket of `count` vBuckets that no node has yet.
    pub(crate) fn new(count: u16, memory_quota: usize, history_bytes: usize) -> Self {
        Self {
            vbuckets: (0..count).map(|_| Mutex::default()).collect(),
            link_faults: Mutex::default(),
            memory: Arc::new(MemoryUse::new(memory_quota, count)),
            changes: Changes::new(count),
            history_bytes: history_bytes / usize::from(count.max(1)),
            majority: 1,
            is_ephemeral: false,
            keeps_history: false,
            keeps_compressed: false,
            has_data_folder: false,
            chance: Arc::default(),
        }
    }

    /// The same bucket with another source of random numbers and time.
    pub(crate) fn with_chance(self, chance: Arc<Chance>) -> Self {
        Self { chance, ..self }
    }

    /// The source of random numbers and time.
    pub(crate) const fn chance(&self) -> &Arc<Chance> {
        &self.chance
    }

    /// The same bucket, with `replicas` of each vBucket if there are enough nodes.
    pub(crate) fn replicated(self, replicas: u8) -> Self {
        Self { majority: usize::from(replicas).div_ceil(2) + 1, ..self }
    }

    /// The same bucket, keeping every version of its documents for clients that want them.
    pub(crate) fn with_history(self) -> Self {
        Self { keeps_history: true, ..self }
    }

    pub(crate) const fn keeps_history(&self) -> bool {
        self.keeps_history
    }

    /// The same bucket without a disk.
    pub(crate) fn ephemeral(self) -> Self {
        Self { is_ephemeral: true, ..self }
    }

    /// The same bucket, which keeps compressed values compressed.
    pub(crate) fn passively_compressing(self) -> Self {
        Self { keeps_compressed: true, ..self }
    }

    pub(crate) const fn keeps_compressed(&self) -> bool {
        self.keeps_compressed
    }

    /// The same bucket with a data folder.
    pub(crate) fn with_data_folder(self) -> Self {
        Self { has_data_folder: true, ..self }
    }

    pub(crate) const fn is_ephemeral(&self) -> bool {
        self.is_ephemeral
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

    /// The vBucket of `key`.
    pub(crate) fn vbid_of(&self, key: &[u8]) -> Vbid {
        vbucket_of_key(key, self.vbucket_count())
    }

    fn copies(&self, vbid: Vbid) -> Option<MutexGuard<'_, Copies>> {
        let copies = self.vbuckets.get(vbid.index())?;
        // A panic elsewhere is a bug, but it leaves vBuckets no worse than a crash would: every
        // operation checks first and changes afterwards.
        Some(copies.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Locks a vBucket to read its active copy; `None` if no running node has it.
    pub(crate) fn lock(&self, vbid: Vbid) -> Option<VBucketGuard<'_>> {
        let copies = self.copies(vbid)?;
        VBucketGuard::new(copies, Copies::active)
    }

    /// Locks a vBucket to read a node's copy.
    pub(crate) fn lock_on(&self, node: usize, vbid: Vbid) -> Option<VBucketGuard<'_>> {
        let copies = self.copies(vbid)?;
        VBucketGuard::new(copies, |copies| copies.on(node))
    }

    /// Locks the active copy of a vBucket for an operation, and announces a change.
    pub(crate) fn with<T>(&self, vbid: Vbid, op: impl FnOnce(&mut VBucket) -> T) -> Option<T> {
        self.change(self.copies(vbid)?, Copies::active, op)
    }

    /// Locks a node's copy of a vBucket for an operation if it is the active one.
    pub(crate) fn with_active_on<T>(
        &self,
        node: usize,
        vbid: Vbid,
        op: impl FnOnce(&mut VBucket) -> T,
    ) -> Option<T> {
        let here = |copies: &Copies| copies.active().filter(|_| copies.on(node) == Some(0));
        self.change(self.copies(vbid)?, here, op)
    }

    /// Locks a node's copy of a vBucket, active or not, for an operation.
    pub(crate) fn with_on<T>(
        &self,
        node: usize,
        vbid: Vbid,
        op: impl FnOnce(&mut VBucket) -> T,
    ) -> Option<T> {
        self.change(self.copies(vbid)?, |copies| copies.on(node), op)
    }

    /// Reads the copies of a vBucket.
    pub(crate) fn with_copies<T>(
        &self,
        vbid: Vbid,
        op: impl FnOnce(&mut Copies) -> T,
    ) -> Option<T> {
        Some(op(&mut *self.copies(vbid)?))
    }

    /// Notes up to where a data folder has the copy of each node; durable writes may wait for that.
    pub(crate) fn note_flushed(&self, vbid: Vbid, stored: &[(usize, Flushed)]) {
        let Some(mut copies) = self.copies(vbid) else {
            return;
        };
        for &(node, stored) in stored {
            copies.note_flushed(node, stored);
        }
        let settled = self.settle(&mut copies);
        drop(copies);
        if settled {
            self.changes.announce(vbid);
        }
    }

    fn change<T>(
        &self,
        mut copies: MutexGuard<'_, Copies>,
        which: impl FnOnce(&Copies) -> Option<usize>,
        op: impl FnOnce(&mut VBucket) -> T,
    ) -> Option<T> {
        let index = which(&copies)?;
        let vbucket = &mut copies.get_mut(index)?.vbucket;
        let (vbid, before) = (vbucket.vbid(), vbucket.high_seqno);
        let result = op(vbucket);
        let changed = vbucket.high_seqno != before;
        if changed {
            copies.replicate();
        }
        let changed = self.settle(&mut copies) || changed;
        drop(copies);
        if changed {
            self.changes.announce(vbid);
        }
        Some(result)
    }

    /// Completes durable writes that can be decided by now; returns whether there were any.
    fn settle(&self, copies: &mut Copies) -> bool {
        copies.is_undecided() && copies.settle(self.majority, self.chance.now())
    }

    /// Whether writes to a vBucket can become durable.
    pub(crate) fn can_be_durable(&self, vbid: Vbid) -> bool {
        self.copies(vbid).is_some_and(|copies| copies.can_be_durable(self.majority))
    }

    /// Applies `op` to every copy of a vBucket on a running node; returns whether it returned
    /// `true` for any.
    pub(crate) fn each_copy(&self, vbid: Vbid, op: impl Fn(&mut VBucket) -> bool) -> bool {
        let Some(mut copies) = self.copies(vbid) else {
            return false;
        };
        let any = copies.running().fold(false, |any, copy| op(&mut copy.vbucket) | any);
        let settled = self.settle(&mut copies);
        drop(copies);
        if settled {
            self.changes.announce(vbid);
        }
        any
    }

    /// Rearranges the copies of a vBucket and notifies its streams.
    pub(crate) fn rearrange<T>(&self, vbid: Vbid, op: impl FnOnce(&mut Copies) -> T) -> Option<T> {
        let mut copies = self.copies(vbid)?;
        let result = op(&mut copies);
        self.settle(&mut copies);
        drop(copies);
        self.changes.announce(vbid);
        Some(result)
    }

    /// Changes the faults of the connections between nodes.
    pub(crate) fn set_link_faults(&self, faults: LinkFaults) {
        let before = core::mem::replace(&mut *self.lock_link_faults(), Arc::new(faults));
        let faults = self.link_faults();
        if before.is_empty() && faults.is_empty() {
            return;
        }
        for vbid in self.vbids() {
            self.rearrange(vbid, |copies| copies.set_link_faults(&faults));
        }
    }

    /// The faults of the connections between nodes.
    pub(crate) fn link_faults(&self) -> Arc<LinkFaults> {
        Arc::clone(&self.lock_link_faults())
    }

    fn lock_link_faults(&self) -> MutexGuard<'_, Arc<LinkFaults>> {
        self.link_faults.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets a node's copy to dead: its vBucket was taken over by another server.
    pub(crate) fn retire(&self, node: usize, vbid: Vbid) {
        self.with_on(node, vbid, |vbucket| vbucket.set_state(VBucketState::Dead));
        self.changes.announce(vbid);
    }

    /// Nodes of the copies of each vBucket, the active one's first.
    pub(crate) fn chains(&self) -> Vec<Vec<usize>> {
        self.vbids().map(|vbid| self.nodes_of(vbid)).collect()
    }

    /// Nodes of the copies of a vBucket, the active one's first.
    pub(crate) fn nodes_of(&self, vbid: Vbid) -> Vec<usize> {
        self.copies(vbid).map(|copies| copies.nodes()).unwrap_or_default()
    }

    /// A new, empty copy for a node.
    pub(crate) fn new_copy(&self, node: usize, vbid: Vbid) -> Copy {
        let memory = Arc::clone(&self.memory);
        let mut vbucket = VBucket::new(vbid, self.chance.vbuuid(), self.history_bytes, memory);
        vbucket.settings.is_ephemeral = self.is_ephemeral;
        vbucket.keep_history(self.keeps_history);
        vbucket.settings.compresses_disk = self.keeps_compressed;
        vbucket.settings.has_data_folder = self.has_data_folder;
        Copy::new(node, vbucket)
    }

    /// Rolls a vBucket back to `to`; its streams end, and its replicas roll back with it. `None` if
    /// no running node has the vBucket.
    pub(crate) fn roll_back(&self, vbid: Vbid, to: Seqno) -> Option<Result<(), Error>> {
        let mut copies = self.copies(vbid)?;
        let active = copies.active()?;
        let result = copies.get_mut(active)?.vbucket.roll_back(to, self.chance.vbuuid());
        copies.disconnect();
        copies.replicate();
        drop(copies);
        if result.is_ok() {
            self.changes.announce(vbid);
        }
        Some(result)
    }
}

#[cfg(test)]
mod tests;
