//! Recent changes in memory, divided into checkpoints, and the positions of streams in them.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use dcp_producer_proto::{CheckpointItems, Cursor, Item, ItemKind, MemoryRead, Slots};
use dcp_wire::Seqno;

/// Changes a checkpoint holds before the next one is opened.
const MAX_CHECKPOINT_ITEMS: usize = 10_000;
/// Bytes of keys and values a checkpoint takes before the next one is opened.
const MAX_CHECKPOINT_BYTES: usize = 16 << 20;

/// Changes of a full run.
const RUN_ITEMS: usize = 512;

/// Consecutive seqnos, each with its change unless a later one replaced it.
///
/// The changes are in runs that are shared with readers: reading a checkpoint counts references to
/// runs instead of changes, and modifying a shared run copies it.
#[derive(Debug)]
struct Checkpoint {
    /// Seqno of the first change.
    start: u64,
    /// Where its snapshot begins: at the first change, but after a restart at the change before it.
    snapshot_start: Seqno,
    /// The change of seqno `start + index`; all runs but the last one are full.
    runs: Vec<Arc<Slots>>,
    /// Number of slots.
    len: usize,
    /// Bytes of keys and values added, including replaced ones.
    bytes: usize,
    /// Highest seqno before the checkpoint of anything but a prepare or an abort.
    visible_before: Seqno,
}

impl Checkpoint {
    const fn new(start: u64, visible_before: Seqno) -> Self {
        let snapshot_start = Seqno(start);
        Self { start, snapshot_start, runs: Vec::new(), len: 0, bytes: 0, visible_before }
    }

    /// Highest seqno up to the end of the checkpoint of anything but a prepare or an abort.
    fn max_visible(&self) -> Seqno {
        let mut newest_first = self.runs.iter().rev().flat_map(|run| run.iter().rev()).flatten();
        let visible = newest_first.find(|item| item.kind.is_visible());
        visible.map_or(self.visible_before, |item| item.seqno)
    }

    /// Approximate memory use in bytes.
    const fn footprint(&self) -> usize {
        self.bytes + self.len * size_of::<Option<Arc<Item>>>()
    }

    /// Seqno after the last one.
    const fn end(&self) -> u64 {
        self.start + self.len as u64
    }

    /// Index of the seqno's slot.
    fn index(&self, seqno: Seqno) -> Option<usize> {
        usize::try_from(seqno.0.checked_sub(self.start)?).ok()
    }

    fn get(&self, index: usize) -> Option<&Arc<Item>> {
        self.runs.get(index / RUN_ITEMS)?.get(index % RUN_ITEMS)?.as_ref()
    }

    /// Removes the change from a slot.
    fn clear(&mut self, index: usize) {
        let run = self.runs.get_mut(index / RUN_ITEMS);
        if let Some(slot) = run.and_then(|run| Arc::make_mut(run).get_mut(index % RUN_ITEMS)) {
            *slot = None;
        }
    }

    fn push(&mut self, slot: Option<Arc<Item>>) {
        self.len += 1;
        match self.runs.last_mut() {
            Some(last) if last.len() < RUN_ITEMS => Arc::make_mut(last).push(slot),
            _ => self.runs.push(Arc::new(vec![slot])),
        }
    }

    /// Number of slots up to `after`.
    fn skipped(&self, after: Seqno) -> usize {
        self.index(Seqno(after.0.saturating_add(1))).unwrap_or(0)
    }

    /// The changes above `after`, in order.
    fn above(&self, after: Seqno) -> impl Iterator<Item = &Arc<Item>> {
        let skip = self.skipped(after);
        let runs = self.runs.get(skip / RUN_ITEMS..).unwrap_or_default();
        runs.iter().flat_map(|run| run.iter()).skip(skip % RUN_ITEMS).flatten()
    }

    /// The same, shared. The last run of a checkpoint that `may_grow` will change, so the reader
    /// gets a copy of it.
    fn share(&self, after: Seqno, may_grow: bool) -> CheckpointItems {
        let skip = self.skipped(after);
        let runs = self.runs.get(skip / RUN_ITEMS..).unwrap_or_default();
        let skip = skip % RUN_ITEMS;
        let Some((last, full)) = runs.split_last().filter(|_| may_grow) else {
            return CheckpointItems::new(runs.to_vec(), skip);
        };
        let taken = if full.is_empty() { skip } else { 0 };
        let own = last.get(taken..).unwrap_or_default().iter().flatten().cloned();
        let own = Arc::new(own.map(Some).collect());
        let runs = full.iter().cloned().chain([own]).collect();
        CheckpointItems::new(runs, if full.is_empty() { 0 } else { skip })
    }
}

/// The checkpoints of a vBucket: closed ones and always one open, without gaps between them.
///
/// Only the open one de-duplicates, so the last change of each is always present. A replica may
/// receive fewer changes than there were: seqnos it never saw have no change.
#[derive(Debug)]
pub(crate) struct CheckpointLog {
    closed: VecDeque<Checkpoint>,
    open: Checkpoint,
    /// Bytes of the closed checkpoints.
    closed_bytes: usize,
    /// Whether every version is kept (change history).
    pub(super) is_historical: bool,
}

impl CheckpointLog {
    /// A log whose first change will be the one after `high_seqno`; `visible` is the highest seqno
    /// up to there of anything but a prepare or an abort.
    pub(crate) const fn after(high_seqno: Seqno, visible: Seqno) -> Self {
        let mut open = Checkpoint::new(high_seqno.0 + 1, visible);
        open.snapshot_start = high_seqno;
        Self { closed: VecDeque::new(), open, closed_bytes: 0, is_historical: false }
    }

    /// Lets the snapshot of an empty log begin where it does after a restart.
    pub(crate) fn begin_as_after_restart(&mut self) {
        if self.closed.is_empty() && self.open.len == 0 {
            self.open.snapshot_start = Seqno(self.open.start.saturating_sub(1));
        }
    }

    /// Adds a change above all others, which replaces `replaced`. A change that replaces an event
    /// of a collection or scope begins a new checkpoint, so that streams see both. No checkpoint
    /// ends before a change that `is_inside` a snapshot: the versions that the snapshot leaves out
    /// are missing there.
    pub(crate) fn push(&mut self, item: Arc<Item>, replaced: Option<Seqno>, is_inside: bool) {
        debug_assert!(item.seqno.0 >= self.open.end(), "seqnos ascend");
        let is_full =
            self.open.len >= MAX_CHECKPOINT_ITEMS || self.open.bytes >= MAX_CHECKPOINT_BYTES;
        let keeps = replaced.is_some_and(|replaced| self.must_keep(replaced, &item));
        if (is_full || keeps) && !is_inside {
            self.close_open();
        }
        if let Some(index) = replaced.filter(|_| !keeps).and_then(|it| self.open.index(it)) {
            self.open.clear(index);
        }
        self.open.bytes += item.key.len() + item.value.len();
        while self.open.end() < item.seqno.0 {
            self.open.push(None);
        }
        self.open.push(Some(item));
    }

    /// Whether the change at `replaced` must stay although `item` replaces it: durable writes and
    /// events are never removed, and with history nothing is.
    fn must_keep(&self, replaced: Seqno, item: &Item) -> bool {
        let Some(old) = self.open.index(replaced).and_then(|index| self.open.get(index)) else {
            return false;
        };
        let is_kept =
            |item: &Item| !item.kind.is_visible() || matches!(item.kind, ItemKind::Commit { .. });
        let is_event = matches!(item.kind, ItemKind::SystemEvent { .. });
        is_event || self.is_historical || is_kept(old) || is_kept(item)
    }

    /// Begins a checkpoint, whose snapshot begins at `start`.
    pub(crate) fn begin(&mut self, start: Seqno) {
        self.close_open();
        self.open.snapshot_start = start;
    }

    /// Closes the open checkpoint, unless it is empty.
    pub(crate) fn close_open(&mut self) {
        if self.open.len == 0 {
            return;
        }
        let next = Checkpoint::new(self.open.end(), self.open.max_visible());
        self.closed_bytes += self.open.footprint();
        self.closed.push_back(std::mem::replace(&mut self.open, next));
    }

    /// Drops closed checkpoints that are on disk and not needed: changes above `needed` are kept
    /// unless the closed checkpoints take more than `limit` bytes, those above `held` unless they
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
        let closed = self.closed.get(index);
        let checkpoint = closed.unwrap_or(&self.open);
        MemoryRead::Items {
            checkpoint_start: checkpoint.snapshot_start,
            begins_checkpoint: next <= checkpoint.start,
            is_historical: self.is_historical,
            max_visible_seqno: checkpoint.max_visible(),
            items: checkpoint.share(after, closed.is_none()),
        }
    }
}

/// The cursors of the streams of one copy of a vBucket; each is dropped with its stream.
#[derive(Debug, Default)]
pub(crate) struct Cursors(Mutex<Vec<Weak<Cursor>>>);

impl Cursors {
    pub(super) fn register(&self, cursor: &Arc<Cursor>) {
        let mut cursors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        cursors.retain(|cursor| cursor.strong_count() > 0);
        cursors.push(Arc::downgrade(cursor));
    }

    /// Position of the cursor that has read least; [`Seqno::MAX`] without any. With
    /// `only_undroppable`, only those count that must not be dropped.
    pub(super) fn slowest(&self, only_undroppable: bool) -> Seqno {
        let cursors = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let live = cursors.iter().filter_map(Weak::upgrade);
        let counted = live.filter(|cursor| !only_undroppable || !cursor.is_droppable());
        counted.map(|cursor| cursor.position()).min().unwrap_or(Seqno::MAX)
    }
}
