//! Items read from memory some at a time, before they are sent one by one.

use std::sync::Arc;

use super::filter::{Filter, Passage};
use super::snapshot::Next;
use super::{BackfillFailed, Item};

/// How many items of other collections are read before other streams have a turn.
const SCAN_LIMIT: usize = 4096;

/// How many items are looked at together before they are sent.
const AHEAD: usize = 16;

/// Bytes of each value that are looked at ahead; the processor foresees the rest by itself.
const AHEAD_BYTES: usize = 2048;

/// Distance of two places in memory that are fetched together.
const CACHE_LINE: usize = 64;

/// The items of an image of the disk.
type ImageItems = Box<dyn Iterator<Item = Result<Arc<Item>, BackfillFailed>> + Send>;

/// Items that are fetched from memory some at a time.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    items: std::vec::IntoIter<Arc<Item>>,
    /// How many of them have been fetched.
    fetched: usize,
}

impl Ahead {
    pub(super) fn new(items: Vec<Arc<Item>>) -> Self {
        Self { items: items.into_iter(), fetched: 0 }
    }

    /// Items that are left.
    pub(super) fn len(&self) -> usize {
        self.items.len()
    }

    pub(super) fn next(&mut self) -> Option<Arc<Item>> {
        if self.fetched == 0 {
            let next = self.items.as_slice();
            let next = next.get(..AHEAD).unwrap_or(next);
            fetch(next);
            self.fetched = next.len();
        }
        self.fetched = self.fetched.saturating_sub(1);
        self.items.next()
    }
}

/// Reads one byte of each place the items will be read from.
///
/// Documents lie scattered over more memory than the caches hold. Read one after the other, each
/// waits for its item, then its key, then its value; read together they wait at the same time.
fn fetch(items: &[Arc<Item>]) {
    let mut lengths = 0;
    for item in items {
        lengths ^= item.key.len() ^ item.value.len() ^ item.delete_time as usize;
    }
    let mut bytes = 0;
    for item in items {
        bytes ^= item.key.first().copied().unwrap_or_default();
        let value = item.value.get(..AHEAD_BYTES).unwrap_or(&item.value);
        for line in value.iter().step_by(CACHE_LINE).chain(value.last()) {
            bytes ^= line;
        }
    }
    core::hint::black_box((lengths, bytes));
}

/// What is left of a disk image, filtered some items ahead of what is sent.
pub(super) struct DiskItems {
    image: ImageItems,
    ready: Ahead,
    /// What came after the ready ones, if that was no item.
    end: Option<Result<(), BackfillFailed>>,
}

impl DiskItems {
    pub(super) fn new(image: ImageItems) -> Self {
        Self { image, ready: Ahead::default(), end: None }
    }

    /// The next item that passes `filter`.
    pub(super) fn next(&mut self, filter: &mut Filter) -> Result<Next, BackfillFailed> {
        if let Some(item) = self.ready.next() {
            return Ok(Next::Item(item));
        }
        if self.end.is_none() {
            self.read_ahead(filter);
        }
        match (self.ready.next(), self.end) {
            (Some(item), _) => Ok(Next::Item(item)),
            (None, None) => Ok(Next::Scanned),
            (None, Some(Ok(()))) => Ok(Next::None),
            (None, Some(Err(failed))) => Err(failed),
        }
    }

    fn read_ahead(&mut self, filter: &mut Filter) {
        let mut ready = Vec::with_capacity(AHEAD);
        for _ in 0..SCAN_LIMIT {
            match self.image.next() {
                Some(Ok(item)) => {
                    if filter.check(&item) == Passage::Passes {
                        ready.push(item);
                    }
                }
                Some(Err(failed)) => self.end = Some(Err(failed)),
                None => self.end = Some(Ok(())),
            }
            if self.end.is_some() || ready.len() == AHEAD {
                break;
            }
        }
        self.ready = Ahead::new(ready);
    }
}
