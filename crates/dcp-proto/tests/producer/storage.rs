//! A bucket in memory that holds exactly what a test says, where the test says.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bytes::Bytes;
use dcp_proto::producer::{
    Backfill, BackfillFailed, BucketSource, DiskShare, FailoverTable, Item, ItemKind, MemoryRead,
    VBucketSource, VBucketState,
};
use dcp_wire::message::{FailoverEntry, SystemEventId};
use dcp_wire::{Cas, CollectionId, Datatype, ManifestUid, RevSeqno, ScopeId, Seqno, Vbid, Vbuuid};

/// The branch every vBucket begins with.
pub(crate) const BRANCH: Vbuuid = Vbuuid(0xabc);

pub(crate) struct Checkpoint {
    pub(crate) start: u64,
    pub(crate) items: Vec<Arc<Item>>,
}

pub(crate) struct VBucket {
    pub(crate) state: VBucketState,
    pub(crate) table: FailoverTable,
    pub(crate) high: u64,
    pub(crate) persisted: u64,
    pub(crate) purge: u64,
    /// Collections that were there when the test began, besides those with events.
    pub(crate) collections: BTreeMap<u32, u64>,
    pub(crate) dropped: BTreeSet<u32>,
    pub(crate) disk: Vec<Arc<Item>>,
    pub(crate) checkpoints: Vec<Checkpoint>,
    /// Seqno from which on memory has everything.
    pub(crate) memory_from: u64,
    pub(crate) fail_disk_after: Option<usize>,
    pub(crate) incarnation: u64,
    pub(crate) is_ephemeral: bool,
}

impl VBucket {
    pub(crate) fn new() -> Self {
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
        }
    }

    /// A vBucket of which nothing but its numbers matters.
    pub(crate) fn at(high: u64) -> Self {
        Self { high, persisted: high, memory_from: high + 1, ..Self::new() }
    }

    pub(crate) fn with_table(mut self, entries: &[(u64, u64)]) -> Self {
        let entries = entries
            .iter()
            .map(|&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) });
        let (table, dropped) = FailoverTable::load(entries, Vbuuid(1), Seqno::ZERO);
        assert_eq!(dropped, 0, "the fixture is a sound table");
        self.table = table;
        self
    }

    pub(crate) fn with_collection(mut self, id: u32, high: u64) -> Self {
        self.collections.insert(id, high);
        self
    }

    /// The disk holds `items`.
    pub(crate) fn on_disk(mut self, items: impl IntoIterator<Item = Item>) -> Self {
        for item in items {
            self.note(&item);
            self.persisted = item.seqno.0;
            self.disk.push(Arc::new(item));
        }
        self
    }

    /// Memory holds a checkpoint that began at `start`.
    pub(crate) fn checkpoint(mut self, start: u64, items: impl IntoIterator<Item = Item>) -> Self {
        self.checkpoints.push(Checkpoint { start, items: Vec::new() });
        for item in items {
            self.write(item);
        }
        self
    }

    /// Appends to the newest checkpoint; an older item of the same key leaves it.
    pub(crate) fn write(&mut self, item: Item) {
        self.note(&item);
        if self.checkpoints.is_empty() {
            self.checkpoints.push(Checkpoint { start: item.seqno.0, items: Vec::new() });
        }
        self.memory_from = self.memory_from.min(item.seqno.0);
        let items = &mut self.checkpoints.last_mut().unwrap().items;
        let is_event = matches!(item.kind, ItemKind::SystemEvent { .. });
        items.retain(|old| {
            is_event || (old.collection_id, &old.key) != (item.collection_id, &item.key)
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

impl VBucketSource for &VBucket {
    fn state(&self) -> VBucketState {
        self.state
    }

    fn incarnation(&self) -> u64 {
        self.incarnation
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
                return MemoryRead::Items {
                    checkpoint_start: Seqno(checkpoint.start),
                    begins_checkpoint: after.0 < checkpoint.start,
                    items,
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
        let default_end = self.disk.iter().filter(is_default).map(|item| item.seqno).max();
        let good = self.fail_disk_after.unwrap_or(rest.len());
        let failure = self.fail_disk_after.map(|_| Err(BackfillFailed));
        Backfill {
            end_seqno: Seqno(self.persisted),
            default_end_seqno: default_end.unwrap_or_default(),
            purge_seqno: Seqno(self.purge),
            items: Box::new(rest.into_iter().take(good).chain(failure)),
        }
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

    fn disk_share(&self, collections: &[CollectionId]) -> (DiskShare, DiskShare) {
        let share = |is_wanted: &dyn Fn(&Item) -> bool| {
            let items = || self.disk.iter().filter(|item| is_wanted(item));
            let bytes = items().map(|item| item.key.len() + item.value.len()).sum::<usize>();
            DiskShare { items: items().count() as u64, bytes: bytes as u64 }
        };
        (share(&|item| collections.contains(&item.collection_id)), share(&|_| true))
    }
}

pub(crate) struct Bucket {
    pub(crate) vbuckets: BTreeMap<u16, VBucket>,
    pub(crate) scopes: BTreeMap<u32, Vec<u32>>,
    pub(crate) cluster_map: Option<&'static [u8]>,
}

impl Bucket {
    pub(crate) fn with(vbucket: VBucket) -> Self {
        Self {
            vbuckets: BTreeMap::from([(0, vbucket)]),
            scopes: BTreeMap::from([(0, vec![0])]),
            cluster_map: None,
        }
    }

    pub(crate) fn vb(&mut self) -> &mut VBucket {
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
}

/// A document in a collection; each seqno has a key of its own.
pub(crate) fn doc(seqno: u64, collection: u32) -> Item {
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

/// Documents of the default collection.
pub(crate) fn docs(seqnos: impl IntoIterator<Item = u64>) -> Vec<Item> {
    seqnos.into_iter().map(|seqno| doc(seqno, 0)).collect()
}

pub(crate) fn event(seqno: u64, id: SystemEventId, scope: u32, collection: u32) -> Item {
    Item {
        kind: ItemKind::SystemEvent { id, version: 0, scope_id: ScopeId(scope) },
        key: Bytes::from(format!("event{seqno}")),
        value: Bytes::from_static(&[0; 16]),
        datatype: Datatype::RAW,
        ..doc(seqno, collection)
    }
}

pub(crate) fn begin(seqno: u64, collection: u32) -> Item {
    event(seqno, SystemEventId::BEGIN_COLLECTION, 0, collection)
}

pub(crate) fn end(seqno: u64, collection: u32) -> Item {
    event(seqno, SystemEventId::END_COLLECTION, 0, collection)
}
