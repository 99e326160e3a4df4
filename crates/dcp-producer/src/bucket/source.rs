//! A vBucket as the DCP machines see it.

use std::sync::MutexGuard;

use dcp_proto::producer::{
    Backfill, FailoverTable, ItemKind, MemoryRead, VBucketSource, VBucketState,
};
use dcp_wire::{CollectionId, Seqno};

use super::vbucket::VBucket;

/// Access to one vBucket, which stays locked while this lives.
#[derive(Debug)]
pub(crate) struct VBucketGuard<'a>(pub(super) MutexGuard<'a, VBucket>);

impl core::ops::Deref for VBucketGuard<'_> {
    type Target = VBucket;

    fn deref(&self) -> &VBucket {
        &self.0
    }
}

impl VBucketSource for VBucketGuard<'_> {
    fn state(&self) -> VBucketState {
        self.0.state
    }

    fn failover_table(&self) -> &FailoverTable {
        &self.0.failover
    }

    fn high_seqno(&self) -> Seqno {
        self.0.high_seqno
    }

    fn persisted_seqno(&self) -> Seqno {
        self.0.persisted_seqno
    }

    fn purge_seqno(&self) -> Seqno {
        self.0.purge_seqno
    }

    fn collection_high_seqno(&self, collection: CollectionId) -> Option<Seqno> {
        self.0.collections.get(&collection).copied()
    }

    fn read_memory(&self, after: Seqno) -> MemoryRead {
        self.0.checkpoints.read(after)
    }

    fn open_backfill(&self, after: Seqno) -> Backfill {
        Backfill {
            end_seqno: self.0.persisted_seqno,
            default_end_seqno: self.0.disk.last_seqno_where(|item| {
                item.collection_id == CollectionId::DEFAULT
                    && !matches!(item.kind, ItemKind::SystemEvent { .. })
            }),
            purge_seqno: self.0.purge_seqno,
            items: Box::new(self.0.disk.items_above(after).map(Ok)),
        }
    }
}
