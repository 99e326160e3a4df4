//! Implements the storage interface of the DCP machines.

use core::ops::Deref;
use std::sync::Arc;

use dcp_producer_proto::{
    Backfill, BackfillFailed, Cursor, DiskShare, DurableSeqnos, FailoverTable, Item, ItemKind,
    MemoryRead, VBucketSource, VBucketState,
};
use dcp_wire::{CollectionId, Seqno};

use super::item::compressed;
use super::vbucket::VBucket;

/// Access to one copy of a vBucket, locked or borrowed.
#[derive(Debug)]
pub(crate) struct VBucketView<D>(pub(super) D);

impl<D: Deref<Target = VBucket>> Deref for VBucketView<D> {
    type Target = VBucket;

    fn deref(&self) -> &VBucket {
        &self.0
    }
}

/// The items of a backfill.
type Items = Box<dyn Iterator<Item = Result<Arc<Item>, BackfillFailed>> + Send>;

impl<D: Deref<Target = VBucket>> VBucketView<D> {
    /// Items in the form in which they are stored on disk.
    fn as_stored(&self, items: impl Iterator<Item = Arc<Item>> + Send + 'static) -> Items {
        if self.settings.compresses_disk {
            return Box::new(items.map(compressed).map(Ok));
        }
        Box::new(items.map(Ok))
    }
}

impl<D: Deref<Target = VBucket>> VBucketSource for VBucketView<D> {
    fn state(&self) -> VBucketState {
        self.state
    }

    fn incarnation(&self) -> u64 {
        self.incarnation
    }

    fn failover_table(&self) -> &FailoverTable {
        &self.failover
    }

    fn high_seqno(&self) -> Seqno {
        self.high_seqno
    }

    fn persisted_seqno(&self) -> Seqno {
        self.persisted_seqno
    }

    fn purge_seqno(&self) -> Seqno {
        self.purge_seqno
    }

    fn collection_high_seqno(&self, collection: CollectionId) -> Option<Seqno> {
        self.collections.high_seqno(collection)
    }

    fn read_memory(&self, after: Seqno) -> MemoryRead {
        self.checkpoints.read(after)
    }

    fn open_backfill(&self, after: Seqno) -> Backfill {
        let items = self.disk.items_above(after);
        let persisted = self.persisted_seqno;
        let is_default = |item: &Item| {
            item.collection_id == CollectionId::DEFAULT
                && !matches!(item.kind, ItemKind::SystemEvent { .. })
        };
        let default_end_seqno =
            self.disk.last_seqno_where(|item| item.kind.is_visible() && is_default(item));
        let high_completed = self.durable.high_completed(persisted);
        Backfill {
            end_seqno: persisted,
            default_end_seqno,
            default_high_seqno: self.disk.last_seqno_where(is_default),
            purge_seqno: self.purge_seqno,
            durable: DurableSeqnos {
                max_visible: self.visible_seqno(),
                high_completed,
                high_prepared: self.durable.high_prepared().min(persisted),
            },
            superseded: self.superseded(),
            items: if self.durable.is_unused() {
                self.as_stored(items)
            } else {
                // Leaves out the prepares of completed writes, whose results are in the image.
                let is_left = move |item: &Arc<Item>| {
                    item.seqno > high_completed || !matches!(item.kind, ItemKind::Prepare { .. })
                };
                self.as_stored(items.filter(is_left))
            },
        }
    }

    fn history_start(&self) -> Option<Seqno> {
        VBucket::history_start(self)
    }

    fn open_history(&self, after: Seqno) -> Backfill {
        let image = self.open_backfill(after);
        let mut replaced =
            self.history.replaced_above(after, image.end_seqno).into_iter().peekable();
        let mut newest = image.items.peekable();
        let merged = core::iter::from_fn(move || match (replaced.peek(), newest.peek()) {
            (Some(old), Some(Ok(new))) if old.seqno < new.seqno => replaced.next().map(Ok),
            (Some(old), Some(Ok(new))) if old.seqno == new.seqno => {
                // Replaced in memory, and still the newest version on disk.
                replaced.next();
                newest.next()
            }
            (Some(_), None) => replaced.next().map(Ok),
            _ => newest.next(),
        });
        Backfill { items: Box::new(merged), ..image }
    }

    fn register_cursor(&self, cursor: &Arc<Cursor>) {
        self.cursors.register(cursor);
    }

    fn is_receiving_initial_snapshot(&self) -> bool {
        self.state == VBucketState::Replica && self.high_seqno < self.initial_snapshot_end
    }

    fn open_snapshot_end(&self) -> Option<Seqno> {
        let end = self.snapshot.end;
        (self.state == VBucketState::Replica && self.persisted_seqno < end).then_some(end)
    }

    fn open_key_order_backfill(&self, collections: &[CollectionId]) -> Option<Backfill> {
        if self.settings.is_ephemeral {
            return None;
        }
        let items = self.disk.by_key(collections).into_iter();
        Some(Backfill { items: self.as_stored(items), ..self.open_backfill(Seqno::MAX) })
    }

    fn disk_share(&self, collections: &[CollectionId]) -> (DiskShare, DiskShare) {
        let (mut wanted, mut all) = (DiskShare::default(), DiskShare::default());
        for item in self.disk.items_above(Seqno::ZERO) {
            let bytes = (item.key.len() + item.value.len()) as u64;
            let is_wanted = collections.contains(&item.collection_id);
            for share in core::iter::once(&mut all).chain(is_wanted.then_some(&mut wanted)) {
                share.items += 1;
                share.bytes += bytes;
            }
        }
        (wanted, all)
    }
}
