//! An in-memory bucket with exactly the contents, on disk and in memory, that a test specifies.
#![expect(missing_docs, reason = "fields are called what the protocol calls them")]

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;

use bytes::Bytes;
use dcp_producer_proto::replica::{NoReplicas, ReplicaStore};
use dcp_producer_proto::{
    Backfill, BackfillFailed, BucketSource, Cursor, DiskShare, DurableSeqnos, FailoverTable, Item,
    ItemKind, MemoryPressure, MemoryRead, Privilege, VBucketSource, VBucketState,
};
use dcp_wire::message::{FailoverEntry, SystemEventId};
use dcp_wire::{Cas, CollectionId, Datatype, ManifestUid, RevSeqno, ScopeId, Seqno, Vbid, Vbuuid};

/// The first branch of every vBucket.
pub const BRANCH: Vbuuid = Vbuuid(0xabc);

#[derive(Debug)]
pub struct Checkpoint {
    pub start: u64,
    pub items: Vec<Arc<Item>>,
}

#[derive(Debug)]
pub struct VBucket {
    pub state: VBucketState,
    pub table: FailoverTable,
    pub high: u64,
    pub persisted: u64,
    pub purge: u64,
    /// Initial collections, in addition to those with system events.
    pub collections: BTreeMap<u32, u64>,
    pub dropped: BTreeSet<u32>,
    pub disk: Vec<Arc<Item>>,
    pub checkpoints: Vec<Checkpoint>,
    /// Seqno from which on memory is complete.
    pub memory_from: u64,
    pub fail_disk_after: Option<usize>,
    pub incarnation: u64,
    pub is_ephemeral: bool,
    /// The first checkpoint begins at the change before it, as after a restart.
    pub is_restarted: bool,
    /// Set when the vBucket is handed over: it is dead, with a new incarnation.
    pub is_retired: Cell<bool>,
    pub is_receiving_initial_snapshot: bool,
    /// End of the snapshot a replica is receiving.
    pub open_snapshot_end: Option<u64>,
    /// Seqno from which the disk keeps every version.
    pub history_start: Option<u64>,
    pub completed: u64,
    pub prepared: u64,
    pub cursors: RefCell<Vec<Arc<Cursor>>>,
}

impl Default for VBucket {
    fn default() -> Self {
        Self::new()
    }
}

impl VBucket {
    pub fn new() -> Self {
        Self {
            state: VBucketState::Active,
            table: FailoverTable::new(BRANCH),
            high: 0,
            persisted: 0,
            purge: 0,
            collections: BTreeMap::from([(0, 0)]),
            dropped: BTreeSet::new(),
            disk: Vec::new(),
            checkpoints: Vec::new(),
            memory_from: u64::MAX,
            fail_disk_after: None,
            incarnation: 1,
            is_ephemeral: false,
            is_restarted: false,
            is_retired: Cell::new(false),
            is_receiving_initial_snapshot: false,
            open_snapshot_end: None,
            history_start: None,
            completed: 0,
            prepared: 0,
            cursors: RefCell::default(),
        }
    }

    /// A vBucket of which only the seqnos matter.
    pub fn at(high: u64) -> Self {
        Self { high, persisted: high, memory_from: high + 1, ..Self::new() }
    }

    pub fn with_table(mut self, entries: &[(u64, u64)]) -> Self {
        let entries = entries
            .iter()
            .map(|&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) });
        let (table, dropped) = FailoverTable::load(entries, Vbuuid(1), Seqno::ZERO);
        assert_eq!(dropped, 0, "the fixture is a sound table");
        self.table = table;
        self
    }

    pub fn with_collection(mut self, id: u32, high: u64) -> Self {
        self.collections.insert(id, high);
        self
    }

    /// Puts `items` on disk.
    pub fn on_disk(mut self, items: impl IntoIterator<Item = Item>) -> Self {
        for item in items {
            self.note(&item);
            self.persisted = item.seqno.0;
            self.disk.push(Arc::new(item));
        }
        self
    }

    /// Puts a checkpoint that begins at `start` in memory.
    pub fn checkpoint(mut self, start: u64, items: impl IntoIterator<Item = Item>) -> Self {
        self.checkpoints.push(Checkpoint { start, items: Vec::new() });
        for item in items {
            self.write(item);
        }
        self
    }

    /// Appends to the newest checkpoint, replacing an older item with the same key.
    pub fn write(&mut self, item: Item) {
        self.note(&item);
        if self.checkpoints.is_empty() {
            self.checkpoints.push(Checkpoint { start: item.seqno.0, items: Vec::new() });
        }
        self.memory_from = self.memory_from.min(item.seqno.0);
        let items = &mut self.checkpoints.last_mut().unwrap().items;
        let is_durable =
            |item: &Item| !item.kind.is_visible() || matches!(item.kind, ItemKind::Commit { .. });
        let is_event = matches!(item.kind, ItemKind::SystemEvent { .. });
        items.retain(|old| {
            is_event
                || is_durable(&item)
                || is_durable(old)
                || (old.collection_id, &old.key) != (item.collection_id, &item.key)
        });
        items.push(Arc::new(item));
    }

    fn collection_seqno(&self, collection: CollectionId) -> Option<Seqno> {
        if self.dropped.contains(&collection.0) {
            return None;
        }
        self.collections.get(&collection.0).copied().map(Seqno)
    }

    fn note(&mut self, item: &Item) {
        self.high = self.high.max(item.seqno.0);
        let id = item.collection_id.0;
        match item.kind {
            ItemKind::SystemEvent { id: SystemEventId::CREATE_SCOPE, .. }
            | ItemKind::SystemEvent { id: SystemEventId::DROP_SCOPE, .. } => {}
            ItemKind::SystemEvent { id: SystemEventId::END_COLLECTION, .. } => {
                self.dropped.insert(id);
            }
            _ => _ = self.collections.insert(id, item.seqno.0),
        }
    }
}

impl VBucket {
    /// Highest seqno up to `end`, except of prepares and aborts.
    fn max_visible(&self, end: Seqno) -> Seqno {
        let in_memory = self.checkpoints.iter().flat_map(|checkpoint| &checkpoint.items);
        let visible = self.disk.iter().chain(in_memory).filter(|item| item.kind.is_visible());
        visible.map(|item| item.seqno).filter(|&seqno| seqno <= end).max().unwrap_or_default()
    }
}

impl VBucketSource for &VBucket {
    fn state(&self) -> VBucketState {
        if self.is_retired.get() { VBucketState::Dead } else { self.state }
    }

    fn incarnation(&self) -> u64 {
        self.incarnation + u64::from(self.is_retired.get())
    }

    fn failover_table(&self) -> &FailoverTable {
        &self.table
    }

    fn high_seqno(&self) -> Seqno {
        Seqno(self.high)
    }

    fn persisted_seqno(&self) -> Seqno {
        Seqno(self.persisted)
    }

    fn purge_seqno(&self) -> Seqno {
        Seqno(self.purge)
    }

    fn collection_high_seqno(&self, collection: CollectionId) -> Option<Seqno> {
        self.collection_seqno(collection)
    }

    fn read_memory(&self, after: Seqno) -> MemoryRead {
        if after.0 >= self.high {
            return MemoryRead::UpToDate;
        }
        if after.0 + 1 < self.memory_from {
            return MemoryRead::NeedsBackfill;
        }
        for checkpoint in &self.checkpoints {
            let items: Vec<_> =
                checkpoint.items.iter().filter(|item| item.seqno > after).cloned().collect();
            if !items.is_empty() {
                let is_first = checkpoint.start == self.persisted + 1;
                let start = checkpoint.start - u64::from(self.is_restarted && is_first);
                return MemoryRead::Items {
                    checkpoint_start: Seqno(start),
                    begins_checkpoint: after.0 < checkpoint.start,
                    is_historical: self.history_start.is_some(),
                    max_visible_seqno: self.max_visible(items.last().unwrap().seqno),
                    items: items.into_iter().collect(),
                };
            }
        }
        MemoryRead::UpToDate
    }

    fn open_backfill(&self, after: Seqno) -> Backfill {
        let rest: Vec<_> =
            self.disk.iter().filter(|item| item.seqno > after).cloned().map(Ok).collect();
        let is_default = |item: &&Arc<Item>| {
            item.collection_id == CollectionId::DEFAULT
                && !matches!(item.kind, ItemKind::SystemEvent { .. })
        };
        let default = || self.disk.iter().filter(is_default);
        let visible = default().filter(|item| item.kind.is_visible());
        let good = self.fail_disk_after.unwrap_or(rest.len());
        let failure = self.fail_disk_after.map(|_| Err(BackfillFailed));
        Backfill {
            end_seqno: Seqno(self.persisted),
            default_end_seqno: visible.map(|item| item.seqno).max().unwrap_or_default(),
            default_high_seqno: default().map(|item| item.seqno).max().unwrap_or_default(),
            durable: DurableSeqnos {
                max_visible: self.max_visible(Seqno(self.persisted)),
                high_completed: Seqno(self.completed),
                high_prepared: Seqno(self.prepared),
            },
            purge_seqno: Seqno(self.purge),
            superseded: BTreeSet::new(),
            items: Box::new(rest.into_iter().take(good).chain(failure)),
        }
    }

    fn open_snapshot_end(&self) -> Option<Seqno> {
        self.open_snapshot_end.map(Seqno)
    }

    fn open_key_order_backfill(&self, collections: &[CollectionId]) -> Option<Backfill> {
        if self.is_ephemeral {
            return None;
        }
        let is_event = |item: &Arc<Item>| matches!(item.kind, ItemKind::SystemEvent { .. });
        let (events, mut documents): (Vec<_>, Vec<_>) =
            self.disk.iter().cloned().partition(is_event);
        documents.retain(|item| collections.contains(&item.collection_id));
        documents.sort_by_key(|item| (item.collection_id, item.key.clone()));
        let items = events.into_iter().chain(documents).map(Ok);
        Some(Backfill { items: Box::new(items), ..self.open_backfill(Seqno::MAX) })
    }

    fn history_start(&self) -> Option<Seqno> {
        self.history_start.map(Seqno)
    }

    fn open_history(&self, after: Seqno) -> Backfill {
        self.open_backfill(after)
    }

    fn register_cursor(&self, cursor: &Arc<Cursor>) {
        self.cursors.borrow_mut().push(Arc::clone(cursor));
    }

    fn is_receiving_initial_snapshot(&self) -> bool {
        self.is_receiving_initial_snapshot
    }

    fn disk_share(&self, collections: &[CollectionId]) -> (DiskShare, DiskShare) {
        let share = |is_wanted: &dyn Fn(&Item) -> bool| {
            let items = || self.disk.iter().filter(|item| is_wanted(item));
            let bytes = items().map(|item| item.key.len() + item.value.len()).sum::<usize>();
            DiskShare { items: items().count() as u64, bytes: bytes as u64 }
        };
        (share(&|item| collections.contains(&item.collection_id)), share(&|_| true))
    }
}

#[derive(Debug)]
pub struct Bucket {
    pub vbuckets: BTreeMap<u16, VBucket>,
    pub scopes: BTreeMap<u32, Vec<u32>>,
    pub cluster_map: Option<&'static [u8]>,
    pub node: Node,
}

/// State of the node.
#[derive(Clone, Debug, Default)]
pub struct Node {
    pub may_not_produce: bool,
    /// Collections the client's user may not stream.
    pub hidden: BTreeSet<u32>,
    pub is_warming_up: bool,
    pub memory_pressure: MemoryPressure,
    pub disk_usage_percent: u8,
    pub keeps_history: bool,
    pub copies: Copies,
}

/// What the node stores as a consumer.
#[derive(Clone)]
pub struct Copies(pub Rc<dyn ReplicaStore>);

impl Default for Copies {
    fn default() -> Self {
        Self(Rc::new(NoReplicas))
    }
}

impl fmt::Debug for Copies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Copies")
    }
}

impl Bucket {
    pub fn with(vbucket: VBucket) -> Self {
        Self {
            vbuckets: BTreeMap::from([(0, vbucket)]),
            scopes: BTreeMap::from([(0, vec![0])]),
            cluster_map: None,
            node: Node::default(),
        }
    }

    pub fn vb(&mut self) -> &mut VBucket {
        self.vbuckets.get_mut(&0).unwrap()
    }
}

impl BucketSource for Bucket {
    type VBucket<'a> = &'a VBucket;

    fn vbucket(&self, vbid: Vbid) -> Option<&VBucket> {
        self.vbuckets.get(&vbid.0)
    }

    fn cluster_map(&self) -> Option<Bytes> {
        self.cluster_map.map(Bytes::from_static)
    }

    fn manifest_uid(&self) -> ManifestUid {
        ManifestUid(0x1f)
    }

    fn has_collection(&self, collection: CollectionId) -> bool {
        let has = |vbucket: &VBucket| vbucket.collection_seqno(collection).is_some();
        self.vbuckets.values().any(has)
    }

    fn scope_collections(&self, scope: ScopeId) -> Option<Vec<CollectionId>> {
        self.scopes.get(&scope.0).map(|ids| ids.iter().copied().map(CollectionId).collect())
    }

    fn has_privilege(&self, privilege: Privilege) -> bool {
        match privilege {
            Privilege::Produce => !self.node.may_not_produce,
            Privilege::Consume => true,
            Privilege::StreamBucket => self.node.hidden.is_empty(),
            Privilege::StreamCollection(id) => !self.node.hidden.contains(&id.0),
        }
    }

    fn is_warming_up(&self) -> bool {
        self.node.is_warming_up
    }

    fn memory_pressure(&self) -> MemoryPressure {
        self.node.memory_pressure
    }

    fn disk_usage_percent(&self) -> u8 {
        self.node.disk_usage_percent
    }

    fn keeps_history(&self) -> bool {
        self.node.keeps_history
    }

    fn retire(&self, vbid: Vbid) {
        self.vbuckets[&vbid.0].is_retired.set(true);
    }

    fn replicas(&self) -> &dyn ReplicaStore {
        &*self.node.copies.0
    }
}

/// A document in a collection, with a different key per seqno.
pub fn doc(seqno: u64, collection: u32) -> Item {
    Item {
        kind: ItemKind::Mutation,
        seqno: Seqno(seqno),
        rev_seqno: RevSeqno(1),
        cas: Cas(1000 + seqno),
        collection_id: CollectionId(collection),
        key: Bytes::from(format!("k{seqno}")),
        value: Bytes::from_static(b"{}"),
        datatype: Datatype::JSON,
        flags: 0,
        expiry: 0,
        delete_time: 0,
    }
}

/// Documents in the default collection.
pub fn docs(seqnos: impl IntoIterator<Item = u64>) -> Vec<Item> {
    seqnos.into_iter().map(|seqno| doc(seqno, 0)).collect()
}

pub fn event(seqno: u64, id: SystemEventId, scope: u32, collection: u32) -> Item {
    Item {
        kind: ItemKind::SystemEvent { id, version: 0, scope_id: ScopeId(scope) },
        key: Bytes::from(format!("event{seqno}")),
        value: Bytes::from_static(&[0; 16]),
        datatype: Datatype::RAW,
        ..doc(seqno, collection)
    }
}

pub fn begin(seqno: u64, collection: u32) -> Item {
    event(seqno, SystemEventId::BEGIN_COLLECTION, 0, collection)
}

pub fn end(seqno: u64, collection: u32) -> Item {
    event(seqno, SystemEventId::END_COLLECTION, 0, collection)
}
