//! Recent changes in memory, cut into checkpoints.

use std::collections::VecDeque;
use std::sync::Arc;

use dcp_proto::producer::{Item, ItemKind, MemoryRead};
use dcp_wire::Seqno;

/// Changes a checkpoint holds before the next one is opened.
const MAX_CHECKPOINT_ITEMS: usize = 10_000;
/// Bytes of keys and values a checkpoint takes before the next one is opened.
const MAX_CHECKPOINT_BYTES: usize = 16 << 20;

/// A run of consecutive seqnos, each with its change unless a later one replaced it.
#[derive(Debug)]
struct Checkpoint {
    /// Seqno of the first change.
    start: u64,
    /// The change of seqno `start + index`.
    items: Vec<Option<Arc<Item>>>,
    /// Bytes of keys and values taken in, replaced ones counted.
    bytes: usize,
    /// Highest seqno before the checkpoint of anything but a prepare or an abort.
    visible_before: Seqno,
}

impl Checkpoint {
    const fn new(start: u64, visible_before: Seqno) -> Self {
        Self { start, items: Vec::new(), bytes: 0, visible_before }
    }

    /// Highest seqno up to the end of the checkpoint of anything but a prepare or an abort.
    fn max_visible(&self) -> Seqno {
        let mut newest_first = self.items.iter().rev().flatten();
        let visible = newest_first.find(|item| item.kind.is_visible());
        visible.map_or(self.visible_before, |item| item.seqno)
    }

    /// Bytes it takes, about.
    fn footprint(&self) -> usize {
        self.bytes + self.items.len() * size_of::<Option<Arc<Item>>>()
    }

    /// Seqno after the last one.
    const fn end(&self) -> u64 {
        self.start + self.items.len() as u64
    }

    /// What there is for each seqno above `after`, in order.
    fn slots_above(&self, after: Seqno) -> &[Option<Arc<Item>>] {
        let skip = (after.0 + 1).saturating_sub(self.start);
        let skip = usize::try_from(skip).unwrap_or(usize::MAX);
        self.items.get(skip..).unwrap_or_default()
    }

    /// The changes above `after`, in order.
    fn above(&self, after: Seqno) -> impl Iterator<Item = &Arc<Item>> {
        self.slots_above(after).iter().flatten()
    }
}

/// The checkpoints of a vBucket: closed ones and one open, never none, without gaps between them.
///
/// Only the open one de-duplicates, so the last change of each is always present. A replica may
/// receive fewer changes than there were: seqnos it never saw have no change.
#[derive(Debug)]
pub(crate) struct CheckpointLog {
    closed: VecDeque<Checkpoint>,
    open: Checkpoint,
    /// Bytes of the closed ones.
    closed_bytes: usize,
    /// Whether no version is left out (change history).
    pub(super) is_historical: bool,
}

impl CheckpointLog {
    /// A log whose first change will be the one after `high_seqno`.
    pub(crate) const fn after(high_seqno: Seqno) -> Self {
        let open = Checkpoint::new(high_seqno.0 + 1, high_seqno);
        Self { closed: VecDeque::new(), open, closed_bytes: 0, is_historical: false }
    }

    /// Takes in a change above all others, which replaces `replaced`. One that replaces an event of
    /// a collection or scope begins another checkpoint, so that those who follow see both.
    pub(crate) fn push(&mut self, item: Arc<Item>, replaced: Option<Seqno>) {
        debug_assert!(item.seqno.0 >= self.open.end(), "seqnos ascend");
        if self.open.items.len() >= MAX_CHECKPOINT_ITEMS || self.open.bytes >= MAX_CHECKPOINT_BYTES
        {
            self.close_open();
        }
        if replaced.is_some_and(|replaced| self.must_keep(replaced, &item)) {
            self.close_open();
        }
        if let Some(replaced) = replaced
            && let Some(index) = replaced.0.checked_sub(self.open.start)
            && let Some(slot) =
                self.open.items.get_mut(usize::try_from(index).unwrap_or(usize::MAX))
        {
            *slot = None;
        }
        self.open.bytes += item.key.len() + item.value.len();
        let index = item.seqno.0.saturating_sub(self.open.start);
        self.open.items.resize(usize::try_from(index).unwrap_or(usize::MAX), None);
        self.open.items.push(Some(item));
    }

    /// Whether the change at `replaced` has to stay although `item` replaces it: durable writes are
    /// never left out, nor are events; with history nothing is.
    fn must_keep(&self, replaced: Seqno, item: &Item) -> bool {
        let index = replaced.0.checked_sub(self.open.start).map(usize::try_from);
        let Some(Ok(index)) = index else {
            return false;
        };
        let Some(Some(old)) = self.open.items.get(index) else {
            return false;
        };
        let is_kept =
            |item: &Item| !item.kind.is_visible() || matches!(item.kind, ItemKind::Commit { .. });
        let is_event = matches!(item.kind, ItemKind::SystemEvent { .. });
        is_event || self.is_historical || is_kept(old) || is_kept(item)
    }

    /// Closes the open checkpoint, unless it is empty.
    pub(crate) fn close_open(&mut self) {
        if self.open.items.is_empty() {
            return;
        }
        let next = Checkpoint::new(self.open.end(), self.open.max_visible());
        self.closed_bytes += self.open.footprint();
        self.closed.push_back(std::mem::replace(&mut self.open, next));
    }

    /// Drops closed checkpoints that are on disk and that nobody needs: what lies above `needed` is
    /// kept unless the closed ones take more than `limit` bytes, what lies above `held` unless they
    /// take four times as much.
    pub(crate) fn drop_persisted(
        &mut self,
        persisted: Seqno,
        needed: Seqno,
        held: Seqno,
        limit: usize,
    ) {
        while let Some(oldest) = self.closed.front() {
            let last = oldest.end() - 1;
            let is_kept = (last > needed.0 && self.closed_bytes <= limit)
                || (last > held.0 && self.closed_bytes <= limit.saturating_mul(4));
            if last > persisted.0 || is_kept {
                return;
            }
            self.closed_bytes -= oldest.footprint();
            self.closed.pop_front();
        }
    }

    /// Whether any closed checkpoint is held.
    pub(crate) fn has_closed(&self) -> bool {
        !self.closed.is_empty()
    }

    /// The changes above `after`, replaced ones left out within each checkpoint.
    pub(crate) fn above(&self, after: Seqno) -> impl Iterator<Item = &Arc<Item>> {
        let passed = self.closed.partition_point(|checkpoint| checkpoint.end() <= after.0 + 1);
        self.closed
            .range(passed..)
            .chain(std::iter::once(&self.open))
            .flat_map(move |checkpoint| checkpoint.above(after))
    }

    /// The rest of the checkpoint that holds the change after `after`.
    pub(crate) fn read(&self, after: Seqno) -> MemoryRead {
        let next = after.0.saturating_add(1);
        if next >= self.open.end() {
            return MemoryRead::UpToDate;
        }
        if next < self.closed.front().unwrap_or(&self.open).start {
            return MemoryRead::NeedsBackfill;
        }
        let index = self.closed.partition_point(|checkpoint| checkpoint.end() <= next);
        let checkpoint = self.closed.get(index).unwrap_or(&self.open);
        MemoryRead::Items {
            checkpoint_start: Seqno(checkpoint.start),
            begins_checkpoint: next <= checkpoint.start,
            is_historical: self.is_historical,
            max_visible_seqno: checkpoint.max_visible(),
            items: super::shared(checkpoint.slots_above(after)),
        }
    }
}
