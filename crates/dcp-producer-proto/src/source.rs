//! The storage interface of the producer's machines.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use dcp_wire::{CollectionId, ManifestUid, ScopeId, Seqno, Vbid};
use thiserror::Error;

use super::replica::{NoReplicas, ReplicaStore};
use super::{CheckpointItems, FailoverTable, Item, VBucketState};

/// The items in memory above a seqno.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemoryRead {
    /// Nothing: the reader has everything.
    UpToDate,
    /// The next item is no longer in memory: read the disk.
    NeedsBackfill,
    /// The rest of one checkpoint, in seqno order, with one version per key.
    Items {
        /// First seqno of the checkpoint, including removed items.
        checkpoint_start: Seqno,
        /// Whether these items begin a checkpoint that is new to the reader.
        begins_checkpoint: bool,
        /// Whether the checkpoint has every version (change history).
        is_historical: bool,
        /// Highest seqno, up to the last of the items, of anything but a prepare or an abort.
        max_visible_seqno: Seqno,
        /// The items.
        items: CheckpointItems,
    },
}

/// Reading from the disk failed.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("the disk could not be read")]
pub struct BackfillFailed;

/// State of durable writes when an image of the disk was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DurableSeqnos {
    /// Highest seqno of anything but a prepare or an abort.
    pub max_visible: Seqno,
    /// Seqno of the prepare of the last completed write.
    pub high_completed: Seqno,
    /// Seqno of the last prepare.
    pub high_prepared: Seqno,
}

/// A stream's position in the memory of a vBucket, shared with the storage.
///
/// Storage keeps items that cursors have not read as long as memory allows; a cursor that it can no
/// longer serve gets [`MemoryRead::NeedsBackfill`].
#[derive(Debug)]
pub struct Cursor {
    position: AtomicU64,
    is_droppable: bool,
}

impl Cursor {
    /// A cursor after `position`; one that `is_droppable` must not prevent memory from being freed.
    #[must_use]
    pub const fn new(position: Seqno, is_droppable: bool) -> Self {
        Self { position: AtomicU64::new(position.0), is_droppable }
    }

    /// Last seqno it has read.
    #[must_use]
    pub fn position(&self) -> Seqno {
        Seqno(self.position.load(Ordering::Relaxed))
    }

    /// Whether storage may drop it when memory gets tight.
    #[must_use]
    pub const fn is_droppable(&self) -> bool {
        self.is_droppable
    }

    pub(super) fn advance(&self, to: Seqno) {
        self.position.fetch_max(to.0, Ordering::Relaxed);
    }
}

/// How much memory is left for another backfill.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryPressure {
    /// Enough.
    #[default]
    None,
    /// Too little at the moment.
    High,
    /// None, and none can be freed.
    Full,
}

/// Privileges of a client's user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Privilege {
    /// To open a DCP connection that receives changes.
    Produce,
    /// To open a DCP connection that sends changes.
    Consume,
    /// To stream the whole bucket.
    StreamBucket,
    /// To stream a collection.
    StreamCollection(CollectionId),
}

/// A consistent image of what is on disk, fixed when it was opened.
pub struct Backfill {
    /// Highest seqno in the image.
    pub end_seqno: Seqno,
    /// Seqno of the last visible document of the default collection in the image, including
    /// tombstones; 0 if there is none. The end of a snapshot for clients without collections.
    pub default_end_seqno: Seqno,
    /// The same for clients that take part in durable writes: prepares and aborts count.
    pub default_high_seqno: Seqno,
    /// Seqno up to which tombstones were purged when it was opened.
    pub purge_seqno: Seqno,
    /// State of durable writes.
    pub durable: DurableSeqnos,
    /// Seqnos in the image of documents that have a newer version in memory only: they are not
    /// cached, so nothing is known of how often they are read.
    pub superseded: BTreeSet<Seqno>,
    /// The newest version of each key, including tombstones, in seqno order; not read further after
    /// a failure.
    pub items: Box<dyn Iterator<Item = Result<Arc<Item>, BackfillFailed>> + Send>,
}

impl core::fmt::Debug for Backfill {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Backfill")
            .field("end_seqno", &self.end_seqno)
            .field("default_end_seqno", &self.default_end_seqno)
            .field("default_high_seqno", &self.default_high_seqno)
            .field("purge_seqno", &self.purge_seqno)
            .field("durable", &self.durable)
            .finish_non_exhaustive()
    }
}

/// Size of (a part of) a vBucket on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskShare {
    /// Items, tombstones included.
    pub items: u64,
    /// Bytes of their keys and values.
    pub bytes: u64,
}

/// Access to one vBucket in its storage.
pub trait VBucketSource {
    /// State on this node.
    fn state(&self) -> VBucketState;

    /// Number of this incarnation of the copy: it changes when the copy changes its state, is
    /// removed and created again, or loses changes. A stream belongs to one incarnation and ends
    /// with it, even if the change was undone in between.
    fn incarnation(&self) -> u64;

    /// History branches.
    fn failover_table(&self) -> &FailoverTable;

    /// Highest seqno assigned.
    fn high_seqno(&self) -> Seqno;

    /// Highest seqno on disk.
    fn persisted_seqno(&self) -> Seqno;

    /// Seqno up to which tombstones were purged.
    fn purge_seqno(&self) -> Seqno;

    /// Highest seqno of a collection, including its events; `None` if the vBucket lacks it.
    fn collection_high_seqno(&self, collection: CollectionId) -> Option<Seqno>;

    /// The items in memory above `after`: the rest of the checkpoint that contains the next item.
    ///
    /// A snapshot is announced for exactly these items, so they must be all of the checkpoint's
    /// current items; later ones form another snapshot.
    fn read_memory(&self, after: Seqno) -> MemoryRead;

    /// Opens an image of the disk from the item above `after`.
    fn open_backfill(&self, after: Seqno) -> Backfill;

    /// Opens an image of the disk in the order of the keys: system events first, in seqno order,
    /// then the documents of `collections` by collection and key. `None` if storage has no such
    /// order, as without a disk.
    fn open_key_order_backfill(&self, collections: &[CollectionId]) -> Option<Backfill>;

    /// Seqno from which the disk keeps every version of collections with history; `None` if it
    /// keeps none.
    fn history_start(&self) -> Option<Seqno>;

    /// Like [`open_backfill`](Self::open_backfill), with every version of collections with history.
    fn open_history(&self, after: Seqno) -> Backfill;

    /// Lets a cursor hold the items in memory above its position, until it is dropped.
    fn register_cursor(&self, cursor: &Arc<Cursor>);

    /// Whether this is a replica that is still receiving its first snapshot from disk.
    fn is_receiving_initial_snapshot(&self) -> bool;

    /// End of the snapshot that a replica receives or received last; `None` if all of it is on disk,
    /// and for an active copy.
    fn open_snapshot_end(&self) -> Option<Seqno>;

    /// Size on disk of the documents of `collections`, and of the whole vBucket.
    fn disk_share(&self, collections: &[CollectionId]) -> (DiskShare, DiskShare);
}

/// Access to one node's part of a bucket in its storage.
pub trait BucketSource {
    /// Access to one vBucket; storage may hold a lock while it lives.
    type VBucket<'a>: VBucketSource
    where
        Self: 'a;

    /// The vBucket, `None` if this node does not have it.
    fn vbucket(&self, vbid: Vbid) -> Option<Self::VBucket<'_>>;

    /// The cluster map as JSON, sent with NOT_MY_VBUCKET; `None` if none is set.
    fn cluster_map(&self) -> Option<Bytes>;

    /// The collections manifest's uid.
    fn manifest_uid(&self) -> ManifestUid;

    /// Whether the manifest has a collection.
    fn has_collection(&self, collection: CollectionId) -> bool;

    /// The collections of a scope; `None` if there is no such scope.
    fn scope_collections(&self, scope: ScopeId) -> Option<Vec<CollectionId>>;

    /// Whether the client's user has a privilege.
    fn has_privilege(&self, privilege: Privilege) -> bool;

    /// Whether the node is still warming up after a restart.
    fn is_warming_up(&self) -> bool;

    /// How much memory is left for another backfill.
    fn memory_pressure(&self) -> MemoryPressure;

    /// How full the disk is, in percent.
    fn disk_usage_percent(&self) -> u8;

    /// Whether the storage can keep every version of a document.
    fn keeps_history(&self) -> bool;

    /// Sets a vBucket that was taken over by another node to dead here.
    fn retire(&self, vbid: Vbid);

    /// Notes that the client, a replica, has every prepare up to a seqno as the durability levels
    /// demand.
    fn prepares_acknowledged(&self, _vbid: Vbid, _seqno: Seqno) {}

    /// The node's copies, for the consumer's end.
    fn replicas(&self) -> &dyn ReplicaStore {
        &NoReplicas
    }
}
