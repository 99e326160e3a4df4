//! Durable writes of a vBucket: prepared, then committed or aborted, in that order.
//!
//! Whoever holds the bucket decides when a write is durable; nothing here waits for replicas.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use dcp_proto::producer::{Item, ItemKind};
use dcp_wire::message::DurabilityLevel;
use dcp_wire::{CollectionId, Datatype, DocKey, Seqno};

use super::clock::Now;
use super::document::{DocumentWrite, check_key};
use super::hash_table::Identity;
use super::system_xattrs;
use super::vbucket::{VBucket, Written};
use crate::DocumentError;

/// Completions kept so that a rollback knows what it undoes.
const MAX_COMPLETIONS: usize = 10_000;

/// How far the durable writes of a vBucket are.
#[derive(Clone, Debug, Default)]
pub(crate) struct DurableWrites {
    /// What is prepared and no more: by the seqno of the prepare.
    outstanding: BTreeMap<Seqno, (CollectionId, Bytes)>,
    /// Where writes were committed or aborted, and where each had begun; both ascend.
    completions: Vec<(Seqno, Seqno)>,
    high_prepared: Seqno,
}

impl DurableWrites {
    /// Follows a change.
    pub(super) fn note(&mut self, item: &Item) {
        match item.kind {
            ItemKind::Prepare { .. } => {
                self.high_prepared = item.seqno;
                self.outstanding.insert(item.seqno, (item.collection_id, item.key.clone()));
            }
            ItemKind::Commit { prepared, .. } | ItemKind::Abort { prepared } => {
                self.outstanding.remove(&prepared);
                self.complete(item.seqno, prepared);
            }
            _ => {}
        }
    }

    fn complete(&mut self, at: Seqno, prepared: Seqno) {
        if self.completions.len() >= MAX_COMPLETIONS {
            self.completions.drain(..MAX_COMPLETIONS / 2);
        }
        self.completions.push((at, prepared));
    }

    /// Takes over from a copy whose image was received, and with it everything up to `end`.
    pub(super) fn catch_up(&mut self, other: &Self, end: Seqno) {
        let completed = other.high_completed(end);
        if completed > self.high_completed(Seqno::MAX) {
            self.complete(end, completed);
        }
    }

    /// Goes on in another process at `at`, where `items` are the newest versions. `completed` is
    /// where the last write began that was committed or aborted.
    pub(super) fn resume<'a>(
        &mut self,
        at: Seqno,
        completed: Seqno,
        mut items: impl Iterator<Item = &'a Item> + Clone,
    ) {
        if completed != Seqno::ZERO {
            self.complete(at, completed);
        }
        if completed != Seqno::ZERO
            || items.clone().any(|item| matches!(item.kind, ItemKind::Prepare { .. }))
        {
            self.high_prepared = Seqno::MAX;
            self.go_back(at, items.by_ref());
        }
    }

    /// Where the last write began that was committed or aborted up to `seqno`.
    pub(super) fn high_completed(&self, seqno: Seqno) -> Seqno {
        let known = self.completions.partition_point(|&(at, _)| at <= seqno);
        let (_, prepared) = self.completions.get(..known).and_then(<[_]>::last).copied().unzip();
        prepared.unwrap_or_default()
    }

    /// Where the last write began that is prepared.
    pub(super) const fn high_prepared(&self) -> Seqno {
        self.high_prepared
    }

    /// Whether there ever was one.
    pub(super) fn is_unused(&self) -> bool {
        self.high_prepared == Seqno::ZERO
    }

    /// The write that is next to be committed or aborted.
    fn next(&self) -> Option<&(CollectionId, Bytes)> {
        self.outstanding.first_key_value().map(|(_, key)| key)
    }

    /// Whether the document has a write that is prepared and no more.
    fn is_outstanding(&self, key: DocKey<'_>) -> bool {
        let same =
            |(id, other): &(CollectionId, Bytes)| (*id, &other[..]) == (key.collection_id, key.key);
        !self.outstanding.is_empty() && self.outstanding.values().any(same)
    }

    /// Goes back to `to`, where `items` are the newest versions.
    pub(super) fn go_back<'a>(&mut self, to: Seqno, items: impl Iterator<Item = &'a Item>) {
        if self.is_unused() {
            return;
        }
        self.completions.retain(|&(at, _)| at <= to);
        let completed = self.high_completed(to);
        self.outstanding.clear();
        self.high_prepared = completed;
        for item in items.filter(|item| matches!(item.kind, ItemKind::Prepare { .. })) {
            if item.seqno > completed {
                self.high_prepared = self.high_prepared.max(item.seqno);
                self.outstanding.insert(item.seqno, (item.collection_id, item.key.clone()));
            }
        }
    }
}

impl VBucket {
    /// Begins a durable write, of a document or (without `write`) of its removal.
    pub(crate) fn prepare(
        &mut self,
        now: Now,
        key: DocKey<'_>,
        write: Option<DocumentWrite<'_>>,
        level: DurabilityLevel,
    ) -> Result<Written, DocumentError> {
        check_key(key)?;
        self.check_collection(key)?;
        self.check_not_prepared(key)?;
        let previous = self.newest_now(now, key);
        let live = previous.as_ref().filter(|item| item.kind == ItemKind::Mutation);
        let is_deletion = write.is_none();
        if is_deletion && live.is_none() {
            return Err(DocumentError::NotFound);
        }
        let rev_seqno = dcp_wire::RevSeqno(self.next_rev(previous.as_ref()));
        let kept = live.map(|item| system_xattrs(item)).unwrap_or_default();
        let (value, datatype, flags, expiry) = match write {
            Some(write) => (write.value, write.datatype, write.flags, write.expiry),
            None if kept.is_empty() => (Bytes::new(), Datatype::RAW, 0, 0),
            None => (kept, Datatype::XATTR, 0, 0),
        };
        self.memory().check(value.len())?;
        let cas = self.next_cas(now);
        Ok(self.append(Item {
            kind: ItemKind::Prepare { level, is_deletion },
            seqno: Seqno::ZERO,
            rev_seqno,
            cas,
            collection_id: key.collection_id,
            key: Bytes::copy_from_slice(key.key),
            value,
            datatype,
            flags,
            expiry,
            delete_time: if is_deletion { now.seconds() } else { 0 },
        }))
    }

    /// Commits the durable write of a document, or aborts it. Writes are completed in the order in
    /// which they were prepared.
    pub(crate) fn complete(
        &mut self,
        key: DocKey<'_>,
        commit: bool,
    ) -> Result<Written, DocumentError> {
        let is_next =
            |(id, next): &(CollectionId, Bytes)| (*id, &next[..]) == (key.collection_id, key.key);
        if !self.durable.next().is_some_and(is_next) {
            return Err(DocumentError::NotPrepared);
        }
        let identity = Identity::Prepared(key.collection_id, key.key);
        let slot = self.table.find(identity).ok_or(DocumentError::NotPrepared)?;
        let prepare = Item::clone(&slot.newest);
        let ItemKind::Prepare { is_deletion, .. } = prepare.kind else {
            return Err(DocumentError::NotPrepared);
        };
        let prepared = prepare.seqno;
        Ok(self.append(if commit {
            Item { kind: ItemKind::Commit { prepared, is_deletion }, ..prepare }
        } else {
            Item {
                kind: ItemKind::Abort { prepared },
                value: Bytes::new(),
                datatype: Datatype::RAW,
                ..prepare
            }
        }))
    }

    /// Refuses to touch a document whose durable write is not completed.
    pub(super) fn check_not_prepared(&self, key: DocKey<'_>) -> Result<(), DocumentError> {
        if self.durable.is_outstanding(key) {
            return Err(DocumentError::SyncWriteInProgress);
        }
        Ok(())
    }
}

/// The version of the document that a change amounts to: itself, unless it is a commit.
pub(super) fn newest_version(item: &Arc<Item>) -> Arc<Item> {
    match item.kind {
        ItemKind::Commit { is_deletion, .. } => {
            let kind = if is_deletion { ItemKind::Deletion } else { ItemKind::Mutation };
            Arc::new(Item { kind, ..Item::clone(item) })
        }
        _ => Arc::clone(item),
    }
}
