//! The disk image: the newest persisted version of everything, in seqno order.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dcp_producer_proto::{Item, ItemKind};
use dcp_wire::{CollectionId, Seqno, leb128};

/// Items of a full chunk.
const CHUNK_ITEMS: usize = 512;

type Chunk = Vec<Arc<Item>>;

/// Items in seqno order, in chunks that are shared with open images until they change.
///
/// Opening an image copies one pointer per 512 items; changing a chunk that an image still shares
/// copies that chunk.
#[derive(Clone, Debug)]
pub(crate) struct DiskImage {
    /// No chunk is empty.
    chunks: Vec<Arc<Chunk>>,
    /// Changes whenever something other than a newer version is stored.
    generation: u64,
}

impl Default for DiskImage {
    fn default() -> Self {
        Self { chunks: Vec::new(), generation: next_generation() }
    }
}

fn next_generation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl DiskImage {
    /// As long as this number is the same, items were only added, or removed because of additions.
    pub(crate) const fn generation(&self) -> u64 {
        self.generation
    }

    /// Notes that items were removed, or that the image has another meaning.
    pub(crate) fn begin_generation(&mut self) {
        self.generation = next_generation();
    }

    /// The image of `items`, which are in seqno order.
    pub(crate) fn from_sorted(items: Vec<Arc<Item>>) -> Self {
        let mut image = Self::default();
        for item in items {
            image.push(item);
        }
        image
    }

    /// Adds an item above all others.
    pub(crate) fn push(&mut self, item: Arc<Item>) {
        match self.chunks.last_mut() {
            Some(last) if last.len() < CHUNK_ITEMS => Arc::make_mut(last).push(item),
            _ => {
                let mut chunk = Chunk::with_capacity(CHUNK_ITEMS);
                chunk.push(item);
                self.chunks.push(Arc::new(chunk));
            }
        }
    }

    /// Removes the item of `seqno` if there is one.
    pub(crate) fn remove(&mut self, seqno: Seqno) {
        let index = self.chunk_of(seqno);
        let Some(shared) = self.chunks.get_mut(index) else {
            return;
        };
        let Ok(at) = shared.binary_search_by_key(&seqno, |item| item.seqno) else {
            return;
        };
        let chunk = Arc::make_mut(shared);
        chunk.remove(at);
        if chunk.is_empty() {
            self.chunks.remove(index);
        } else if chunk.len() < CHUNK_ITEMS / 4 {
            self.merge_with_next(index);
        }
    }

    /// Keeps chunks of a vBucket with many overwrites from staying nearly empty.
    fn merge_with_next(&mut self, index: usize) {
        let Some(next) = self.chunks.get(index + 1) else {
            return;
        };
        // The last chunk is the one that grows: if merged early, it would be split at once.
        if index + 2 == self.chunks.len() || next.len() > CHUNK_ITEMS / 2 {
            return;
        }
        let next = self.chunks.remove(index + 1);
        if let Some(chunk) = self.chunks.get_mut(index) {
            Arc::make_mut(chunk).extend(next.iter().cloned());
        }
    }

    /// Index of the chunk that holds `seqno` if any does.
    fn chunk_of(&self, seqno: Seqno) -> usize {
        self.chunks.partition_point(|chunk| chunk.last().is_some_and(|last| last.seqno < seqno))
    }

    /// The items above `after`, as they are now.
    pub(crate) fn items_above(&self, after: Seqno) -> ImageItems {
        let first = self.chunk_of(Seqno(after.0.saturating_add(1)));
        let chunks: Vec<_> = self.chunks.get(first..).unwrap_or_default().to_vec();
        let next =
            chunks.first().map_or(0, |chunk| chunk.partition_point(|item| item.seqno <= after));
        ImageItems { chunks: chunks.into_iter(), current: None, next, counted: 0 }
    }

    /// The system events in seqno order, then the documents of `collections` by collection and
    /// key, as they are now.
    pub(crate) fn by_key(&self, collections: &[CollectionId]) -> Vec<Arc<Item>> {
        let is_event = |item: &Item| matches!(item.kind, ItemKind::SystemEvent { .. });
        let is_wanted =
            |item: &Arc<Item>| is_event(item) || collections.contains(&item.collection_id);
        let mut items: Vec<_> = self.items_above(Seqno::ZERO).filter(is_wanted).collect();
        items.sort_unstable_by(|one, other| match (is_event(one), is_event(other)) {
            (false, false) => {
                let place = |item: &Item| leb128::encode(item.collection_id.0);
                let collections = place(one).as_slice().cmp(place(other).as_slice());
                collections.then_with(|| one.key.cmp(&other.key))
            }
            (true, true) => one.seqno.cmp(&other.seqno),
            (one, other) => other.cmp(&one),
        });
        items
    }

    /// Seqno of the last item that `is_wanted`; 0 if there is none.
    pub(crate) fn last_seqno_where(&self, is_wanted: impl Fn(&Item) -> bool) -> Seqno {
        let mut items = self.chunks.iter().rev().flat_map(|chunk| chunk.iter().rev());
        items.find(|item| is_wanted(item)).map_or(Seqno::ZERO, |item| item.seqno)
    }

    /// Removes every item for which `keep` returns false, because of an item that is added.
    pub(crate) fn retain(&mut self, keep: impl Fn(&Item) -> bool) {
        let kept: Vec<_> = self.items_above(Seqno::ZERO).filter(|item| keep(item)).collect();
        self.chunks = Self::from_sorted(kept).chunks;
    }
}

/// Iterates over an image; drops each chunk once it is done.
#[derive(Debug)]
pub(crate) struct ImageItems {
    chunks: std::vec::IntoIter<Arc<Chunk>>,
    current: Option<Arc<Chunk>>,
    /// Index of the next item in the current chunk.
    next: usize,
    /// Index of the first item of the current chunk whose reference count was not incremented yet.
    counted: usize,
}

impl ImageItems {
    /// Items whose reference counts are incremented together: each increment waits for the counter,
    /// which is rarely in the caches.
    const TOGETHER: usize = 16;

    fn look_at_counters(&mut self, chunk: &Chunk) {
        let end = chunk.len().min(self.next + Self::TOGETHER);
        let items = chunk.get(self.next..end).unwrap_or_default();
        let users = items.iter().map(Arc::strong_count).fold(0, usize::wrapping_add);
        std::hint::black_box(users);
        self.counted = end;
    }
}

impl Iterator for ImageItems {
    type Item = Arc<Item>;

    fn next(&mut self) -> Option<Arc<Item>> {
        loop {
            if self.current.is_none() {
                self.current = Some(self.chunks.next()?);
            }
            let chunk = self.current.take()?;
            if self.next >= self.counted {
                self.look_at_counters(&chunk);
            }
            if let Some(item) = chunk.get(self.next).cloned() {
                self.next += 1;
                self.current = Some(chunk);
                return Some(item);
            }
            self.next = 0;
            self.counted = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::bucket::tests::item;

    proptest! {
        #[test]
        fn disk_image_is_its_items_in_order_whatever_is_removed(
            count in 1u64..3000,
            removed in prop::collection::vec(1u64..3000, 0..2500),
            after in 0u64..3100,
        ) {
            let mut image = DiskImage::default();
            let mut expected: std::collections::BTreeSet<u64> = (1..=count).collect();
            for seqno in 1..=count {
                image.push(Arc::new(item(seqno)));
            }
            let opened = image.items_above(Seqno(after));
            for seqno in removed {
                image.remove(Seqno(seqno));
                expected.remove(&seqno);
            }
            let seqnos: Vec<u64> =
                image.items_above(Seqno::ZERO).map(|item| item.seqno.0).collect();
            prop_assert_eq!(seqnos, expected.into_iter().collect::<Vec<_>>());
            prop_assert!(image.chunks.iter().all(|chunk| !chunk.is_empty()));
            let seen: Vec<u64> = opened.map(|item| item.seqno.0).collect();
            prop_assert_eq!(seen, (after + 1..=count).collect::<Vec<_>>());
        }
    }
}
