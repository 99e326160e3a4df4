//! Overwritten versions, kept so that a vBucket can be rolled back.

use std::collections::VecDeque;
use std::sync::Arc;

use dcp_producer_proto::Item;
use dcp_wire::Seqno;

use super::item::footprint;

/// A version and the change that replaced it.
#[derive(Debug)]
struct Superseded {
    item: Arc<Item>,
    by: Seqno,
}

/// Overwritten versions of a vBucket; the oldest are dropped when there are too many.
#[derive(Debug)]
pub(crate) struct History {
    /// In the order of `by`.
    versions: VecDeque<Superseded>,
    bytes: usize,
    max_bytes: usize,
    /// Lowest seqno whose state can be restored.
    floor: Seqno,
}

impl History {
    pub(crate) const fn new(max_bytes: usize) -> Self {
        Self { versions: VecDeque::new(), bytes: 0, max_bytes, floor: Seqno::ZERO }
    }

    /// Bytes held.
    pub(crate) const fn bytes(&self) -> usize {
        self.bytes
    }

    /// Most bytes held.
    pub(crate) const fn max_bytes(&self) -> usize {
        self.max_bytes
    }

    /// Lowest seqno whose state can be restored.
    pub(crate) const fn floor(&self) -> Seqno {
        self.floor
    }

    /// Keeps `item`, which the change `by` replaced. Returns the seqnos of the versions that had to
    /// make room, each after the one that replaced it.
    pub(crate) fn push(&mut self, item: Arc<Item>, by: Seqno) -> Vec<(Seqno, Seqno)> {
        self.bytes += footprint(&item);
        self.versions.push_back(Superseded { item, by });
        let gone = self.forget_while(|history, _| history.bytes > history.max_bytes);
        if let Some(&(by, _)) = gone.last() {
            self.floor = by;
        }
        gone
    }

    /// The versions above `after` and up to `end` that were replaced since, in seqno order.
    pub(crate) fn replaced_above(&self, after: Seqno, end: Seqno) -> Vec<Arc<Item>> {
        // A version is replaced by an item with a higher seqno.
        let below = self.versions.partition_point(|version| version.by <= after);
        let items = self.versions.range(below..).map(|version| &version.item);
        let mut items: Vec<_> =
            items.filter(|item| after < item.seqno && item.seqno <= end).cloned().collect();
        items.sort_unstable_by_key(|item| item.seqno);
        items
    }

    /// Forgets the states below `seqno`. Returns the seqnos of the versions that this takes, as
    /// [`push`](Self::push) does.
    pub(crate) fn forget_below(&mut self, seqno: Seqno) -> Vec<(Seqno, Seqno)> {
        self.floor = self.floor.max(seqno);
        self.forget_while(|_, oldest| oldest.by <= seqno)
    }

    fn forget_while(
        &mut self,
        is_gone: impl Fn(&Self, &Superseded) -> bool,
    ) -> Vec<(Seqno, Seqno)> {
        let mut gone = Vec::new();
        while self.versions.front().is_some_and(|oldest| is_gone(self, oldest))
            && let Some(oldest) = self.versions.pop_front()
        {
            self.bytes -= footprint(&oldest.item);
            gone.push((oldest.by, oldest.item.seqno));
        }
        gone
    }

    /// Forgets everything: the vBucket starts over.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.max_bytes);
    }

    /// Takes out the versions that were the newest ones at `seqno` but no longer are.
    pub(crate) fn restore(&mut self, seqno: Seqno) -> Vec<Arc<Item>> {
        let mut restored = Vec::new();
        while self.versions.back().is_some_and(|version| version.by > seqno)
            && let Some(version) = self.versions.pop_back()
        {
            self.bytes -= footprint(&version.item);
            if version.item.seqno <= seqno {
                restored.push(version.item);
            }
        }
        // Changes above are removed, so restoring the current state needs no kept versions.
        self.floor = self.floor.min(seqno);
        restored
    }
}
