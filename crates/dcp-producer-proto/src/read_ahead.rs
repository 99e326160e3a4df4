//! Items to be sent, whose memory is prefetched.

use std::collections::VecDeque;
use std::sync::Arc;

use super::filter::{Filter, Passage};
use super::{BackfillFailed, CheckpointItems, Item, Slots, prefetch};

/// How many filtered-out items are read before other streams get a turn.
const SCAN_LIMIT: usize = 4096;

/// How many items ahead the memory of keys and values is prefetched.
const CONTENTS_AHEAD: usize = 4;

/// How many items ahead the items themselves are prefetched, which contain the addresses of those.
const ITEM_AHEAD: usize = 12;

/// Items of a disk image that are filtered together.
const AHEAD: usize = 32;

/// The items of an image of the disk.
type ImageItems = Box<dyn Iterator<Item = Result<Arc<Item>, BackfillFailed>> + Send>;

/// The items of a checkpoint that are still to be sent.
#[derive(Debug)]
pub(super) struct CheckpointRest {
    /// The run that is being sent.
    current: Arc<Slots>,
    /// Index of the next slot in it.
    next: usize,
    /// The runs after it.
    rest: std::vec::IntoIter<Arc<Slots>>,
    /// Whether all of it passes the stream's filter.
    is_filtered: bool,
}

impl CheckpointRest {
    /// All of `items`, or those that pass a filter whose state no item changes.
    pub(super) fn new(items: CheckpointItems, is_filtered: bool) -> Self {
        let (runs, next) = items.into_parts();
        let mut rest = runs.into_iter();
        let new = Self { current: rest.next().unwrap_or_default(), next, rest, is_filtered };
        new.ask_for_first();
        new
    }

    /// The next item that passes `filter`, which stays the next one until it is
    /// [`passed`](Self::pass).
    #[inline]
    pub(super) fn peek(&mut self, filter: &mut Filter) -> Option<&Item> {
        let is_filtered = self.is_filtered;
        let mut passes = |item: &Item| is_filtered || filter.check(item) == Passage::Passes;
        loop {
            match self.current.get(self.next) {
                Some(Some(item)) if passes(item) => break,
                Some(_) => self.pass(),
                None => {
                    self.current = self.rest.next()?;
                    self.next = 0;
                    self.ask_for_first();
                }
            }
        }
        self.current.get(self.next)?.as_deref()
    }

    /// Moves past the item that was returned.
    #[inline]
    pub(super) fn pass(&mut self) {
        self.next += 1;
        ask_for(&self.current, self.next);
    }

    fn ask_for_first(&self) {
        let first = self.current.get(self.next..).unwrap_or_default();
        first.iter().take(ITEM_AHEAD).flatten().for_each(|item| prefetch::item(item));
        first.iter().take(CONTENTS_AHEAD).flatten().for_each(|item| prefetch::contents(item));
    }
}

/// Prefetches the items after the one at `next`.
#[inline]
fn ask_for(slots: &[Option<Arc<Item>>], next: usize) {
    if let Some(Some(item)) = slots.get(next + ITEM_AHEAD) {
        prefetch::item(item);
    }
    if let Some(Some(item)) = slots.get(next + CONTENTS_AHEAD) {
        prefetch::contents(item);
    }
}

/// The next item of an image of the disk.
pub(super) enum Next {
    Item(Arc<Item>),
    /// Many items were read and none passed; there may be more.
    Scanned,
    None,
}

/// The rest of a disk image, filtered some items ahead of sending.
pub(super) struct DiskItems {
    image: ImageItems,
    /// Items that passed, the next one first.
    ready: VecDeque<Arc<Item>>,
    /// What follows the ready items, if it is not an item.
    end: Option<Result<(), BackfillFailed>>,
}

impl DiskItems {
    pub(super) fn new(image: ImageItems) -> Self {
        Self { image, ready: VecDeque::new(), end: None }
    }

    /// The next item that passes `filter`.
    pub(super) fn next(&mut self, filter: &mut Filter) -> Result<Next, BackfillFailed> {
        if self.ready.len() <= CONTENTS_AHEAD && self.end.is_none() {
            self.read_ahead(filter);
        }
        if let Some(item) = self.ready.get(CONTENTS_AHEAD) {
            prefetch::contents(item);
        }
        match (self.ready.pop_front(), self.end) {
            (Some(item), _) => Ok(Next::Item(item)),
            (None, None) => Ok(Next::Scanned),
            (None, Some(Ok(()))) => Ok(Next::None),
            (None, Some(Err(failed))) => Err(failed),
        }
    }

    fn read_ahead(&mut self, filter: &mut Filter) {
        let before = self.ready.len();
        for _ in 0..SCAN_LIMIT {
            match self.image.next() {
                Some(Ok(item)) => {
                    if filter.check(&item) == Passage::Passes {
                        self.ready.push_back(item);
                    }
                }
                Some(Err(failed)) => self.end = Some(Err(failed)),
                None => self.end = Some(Ok(())),
            }
            if self.end.is_some() || self.ready.len() == before + AHEAD {
                break;
            }
        }
        self.ready.iter().take(CONTENTS_AHEAD).for_each(|item| prefetch::contents(item));
    }
}
