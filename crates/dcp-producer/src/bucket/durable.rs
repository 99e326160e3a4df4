//! Durable writes of a vBucket: prepared, then committed or aborted, in that order.
//!
//! Whether a write is durable is decided where all copies are known, or by the owner of the bucket.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use dcp_producer_proto::{Item, ItemKind};
use dcp_wire::message::DurabilityLevel;
use dcp_wire::{CollectionId, Datatype, DocKey, Seqno};

use crate::chance::Now;

/// Completions to keep, so that a rollback can undo them.
const MAX_COMPLETIONS: usize = 10_000;

/// The durable writes of a vBucket.
#[derive(Clone, Debug, Default)]
pub(crate) struct DurableWrites {
    /// Writes that are prepared but not completed, by the seqno of the prepare.
    outstanding: BTreeMap<Seqno, Outstanding>,
    /// Writes that were committed or aborted; their seqnos and those of the prepares ascend.
    completions: Vec<Completion>,
    high_prepared: Seqno,
}

/// A write that is prepared but not completed.
#[derive(Clone, Debug)]
struct Outstanding {
    collection_id: CollectionId,
    key: Bytes,
    level: DurabilityLevel,
    /// When it is aborted unless enough copies have it; `None` if the bucket's owner decides.
    deadline: Option<Now>,
    /// Whether clients may have seen it: it was prepared on another node or before a restart, and
    /// may have been committed there.
    may_be_visible: bool,
}

impl Outstanding {
    fn of(item: &Item) -> Option<Self> {
        let ItemKind::Prepare { level, .. } = item.kind else { return None };
        let (collection_id, key) = (item.collection_id, item.key.clone());
        Some(Self { collection_id, key, level, deadline: None, may_be_visible: false })
    }
}

/// The end of a durable write.
#[derive(Clone, Copy, Debug)]
struct Completion {
    at: Seqno,
    prepared: Seqno,
    /// Whether it is known to be a commit.
    is_commit: bool,
}

/// Outcome of a durable write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// Nothing yet.
    Outstanding,
    /// It was committed.
    Committed,
    /// It was aborted or lost, or this copy did not receive how it ended.
    Ambiguous,
}

/// A write that copies decide on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Undecided {
    pub(super) prepared: Seqno,
    pub(super) level: DurabilityLevel,
    pub(super) deadline: Now,
}

impl DurableWrites {
    /// Follows a change.
    pub(super) fn note(&mut self, item: &Item) {
        match item.kind {
            ItemKind::Prepare { .. } => {
                self.high_prepared = item.seqno;
                self.outstanding.extend(Outstanding::of(item).map(|write| (item.seqno, write)));
            }
            ItemKind::Commit { prepared, .. } | ItemKind::Abort { prepared } => {
                self.end_up_to(prepared);
                let is_commit = matches!(item.kind, ItemKind::Commit { .. });
                self.complete(Completion { at: item.seqno, prepared, is_commit });
            }
            _ => {}
        }
    }

    /// A backfill may show the end of a write whose prepare it leaves out.
    fn complete(&mut self, completion: Completion) {
        self.high_prepared = self.high_prepared.max(completion.prepared);
        if self.completions.len() >= MAX_COMPLETIONS {
            self.completions.drain(..MAX_COMPLETIONS / 2);
        }
        self.completions.push(completion);
    }

    /// Lets the copies decide on a write, until `deadline`.
    pub(crate) fn decide_by_copies(&mut self, prepared: Seqno, deadline: Now) {
        if let Some(write) = self.outstanding.get_mut(&prepared) {
            write.deadline = Some(deadline);
        }
    }

    /// Lets the copies decide on every write, without a deadline: when a copy becomes active, its
    /// writes may have been committed already.
    pub(super) fn decide_all_by_copies(&mut self) {
        for write in self.outstanding.values_mut() {
            write.deadline = Some(Now::NEVER);
            write.may_be_visible = true;
        }
    }

    /// Whether the write that was prepared at a seqno is not completed.
    pub(super) fn is_outstanding(&self, prepared: Seqno) -> bool {
        self.outstanding.contains_key(&prepared)
    }

    /// Whether it is not completed, and clients may have seen it.
    pub(super) fn may_be_visible(&self, prepared: Seqno) -> bool {
        self.outstanding.get(&prepared).is_some_and(|write| write.may_be_visible)
    }

    /// Forgets the writes to collections that were dropped: nothing can complete them.
    pub(super) fn drop_documents(&mut self, is_dropped: impl Fn(CollectionId) -> bool) {
        self.outstanding.retain(|_, write| !is_dropped(write.collection_id));
    }

    /// The next write to be committed or aborted, if the copies decide on it.
    pub(super) fn undecided(&self) -> Option<Undecided> {
        let (&prepared, write) = self.outstanding.first_key_value()?;
        Some(Undecided { prepared, level: write.level, deadline: write.deadline? })
    }

    /// Outcome of the write that was prepared at a seqno.
    pub(crate) fn outcome(&self, prepared: Seqno) -> Outcome {
        if self.is_outstanding(prepared) {
            return Outcome::Outstanding;
        }
        let up_to = self.completions.partition_point(|each| each.prepared <= prepared);
        let last = self.completions.get(..up_to).and_then(<[_]>::last);
        let committed = last.filter(|each| each.prepared == prepared && each.is_commit);
        committed.map_or(Outcome::Ambiguous, |_| Outcome::Committed)
    }

    /// Notes that in data read from disk up to `end`, the writes up to `completed` are committed or
    /// aborted; the data do not say which.
    pub(super) fn catch_up(&mut self, completed: Seqno, end: Seqno) {
        if completed > self.high_completed(Seqno::MAX) {
            self.complete(Completion { at: end, prepared: completed, is_commit: false });
        }
        self.end_up_to(completed);
    }

    /// Writes are completed in order, but data from disk leave out how earlier ones ended.
    fn end_up_to(&mut self, completed: Seqno) {
        while let Some(next) = self.outstanding.first_entry().filter(|it| *it.key() <= completed) {
            next.remove();
        }
    }

    /// The writes that are prepared but not completed.
    pub(super) fn prepared(&self) -> impl Iterator<Item = (Seqno, DurabilityLevel)> {
        self.outstanding.iter().map(|(&seqno, write)| (seqno, write.level))
    }

    /// Seqno of the prepare of the last write completed up to `seqno`.
    pub(super) fn high_completed(&self, seqno: Seqno) -> Seqno {
        let known = self.completions.partition_point(|each| each.at <= seqno);
        let last = self.completions.get(..known).and_then(<[_]>::last);
        last.map_or(Seqno::ZERO, |last| last.prepared)
    }

    /// Seqno of the last prepare.
    pub(super) const fn high_prepared(&self) -> Seqno {
        self.high_prepared
    }

    /// Whether there was never a durable write.
    pub(super) fn is_unused(&self) -> bool {
        self.high_prepared == Seqno::ZERO
    }

    /// The next write to be committed or aborted.
    pub(super) fn next(&self) -> Option<DocKey<'_>> {
        let (_, write) = self.outstanding.first_key_value()?;
        Some(DocKey { collection_id: write.collection_id, key: &write.key })
    }

    /// Rolls back to `to`, where `items` are the newest versions.
    pub(super) fn roll_back<'a>(&mut self, to: Seqno, items: impl Iterator<Item = &'a Item>) {
        if self.is_unused() {
            return;
        }
        self.completions.retain(|each| each.at <= to);
        let completed = self.high_completed(to);
        self.outstanding.clear();
        self.high_prepared = completed;
        for item in items.filter(|item| matches!(item.kind, ItemKind::Prepare { .. })) {
            if item.seqno > completed {
                self.high_prepared = self.high_prepared.max(item.seqno);
                self.outstanding.extend(Outstanding::of(item).map(|write| (item.seqno, write)));
            }
        }
    }
}

/// The commit or abort that completes the durable write `prepare`, to store in its place.
pub(super) fn completed(prepare: Item, is_commit: bool) -> Item {
    let prepared = prepare.seqno;
    match prepare.kind {
        ItemKind::Prepare { is_deletion, .. } if is_commit => {
            Item { kind: ItemKind::Commit { prepared, is_deletion }, ..prepare }
        }
        _ => Item {
            kind: ItemKind::Abort { prepared },
            value: Bytes::new(),
            datatype: Datatype::RAW,
            ..prepare
        },
    }
}

/// The document version that a change results in: itself, unless it is a commit.
pub(super) fn newest_version(item: &Arc<Item>) -> Arc<Item> {
    match item.kind {
        ItemKind::Commit { is_deletion, .. } => {
            let kind = if is_deletion { ItemKind::Deletion } else { ItemKind::Mutation };
            Arc::new(Item { kind, ..Item::clone(item) })
        }
        _ => Arc::clone(item),
    }
}
