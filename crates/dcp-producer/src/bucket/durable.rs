//! Durable writes of a vBucket: prepared, then committed or aborted, in that order.
//!
//! Whoever holds the bucket decides when a write is durable; nothing here waits for replicas.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use dcp_proto::producer::{Item, ItemKind};
use dcp_wire::{CollectionId, DocKey, Seqno};

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
    pub(super) fn next(&self) -> Option<&(CollectionId, Bytes)> {
        self.outstanding.first_key_value().map(|(_, key)| key)
    }

    /// Whether the document has a write that is prepared and no more.
    pub(super) fn is_outstanding(&self, key: DocKey<'_>) -> bool {
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
