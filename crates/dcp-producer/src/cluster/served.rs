//! A bucket of the cluster, and one node's part of it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockWriteGuard};

use bytes::Bytes;
use dcp_producer_proto::replica::ReplicaStore;
use dcp_producer_proto::{BucketSource, MemoryPressure, Privilege, ServerVersion};
use dcp_wire::{CollectionId, ManifestUid, ScopeId, Vbid};
use tokio_util::sync::CancellationToken;

use super::map::{BucketMap, MapFacts, NodeMap};
use crate::ProducerOptions;
use crate::bucket::{Bucket, Manifest, Subscriber, VBucketGuard};
use crate::chance::{Chance, Now};
use crate::rights::Rights;

/// What is decided when a bucket is created.
#[derive(Clone, Debug)]
pub(crate) struct BucketSettings {
    pub(crate) name: String,
    pub(crate) replicas: u8,
    pub(crate) is_ephemeral: bool,
    /// Memory quota, which may change.
    pub(crate) quota_bytes: usize,
    /// Whether clients may flush the bucket, which may change.
    pub(crate) may_flush: bool,
}

/// What all buckets of a cluster have in common, and what they are unless a request says otherwise.
#[derive(Debug)]
pub(super) struct BucketDefaults {
    pub(super) settings: BucketSettings,
    vbuckets: u16,
    history_bytes: usize,
    keeps_history: bool,
    keeps_compressed: bool,
    /// Whether there is a data folder.
    has_data_folder: bool,
}

impl BucketDefaults {
    pub(super) fn new(options: &ProducerOptions) -> Self {
        Self {
            settings: BucketSettings {
                name: options.bucket.clone(),
                replicas: options.replicas,
                is_ephemeral: options.ephemeral,
                quota_bytes: options.memory_quota_bytes,
                may_flush: true,
            },
            vbuckets: options.vbuckets,
            history_bytes: options.history_bytes,
            keeps_history: options.keeps_history,
            keeps_compressed: options.keeps_compressed,
            has_data_folder: options.data.is_some(),
        }
    }

    fn bucket(&self, settings: &BucketSettings, chance: &Arc<Chance>) -> Bucket {
        let bucket = Bucket::new(self.vbuckets, settings.quota_bytes, self.history_bytes);
        let mut bucket = bucket.with_chance(Arc::clone(chance)).replicated(settings.replicas);
        if self.keeps_history {
            bucket = bucket.with_history();
        }
        if self.keeps_compressed {
            bucket = bucket.passively_compressing();
        }
        if settings.is_ephemeral {
            bucket = bucket.ephemeral();
        } else if self.has_data_folder {
            bucket = bucket.with_data_folder();
        }
        bucket
    }
}

/// A bucket of the cluster: its documents, and what clients see of it.
#[derive(Debug)]
pub(crate) struct ServedBucket {
    pub(crate) bucket: Bucket,
    /// Changes that the flusher has not seen.
    pub(crate) unflushed: Arc<Subscriber>,
    facts: Arc<MapFacts>,
    map: RwLock<Arc<BucketMap>>,
    /// Ends the connections that selected the bucket when it is dropped.
    life: CancellationToken,
    /// Whether clients may flush the bucket.
    may_flush: AtomicBool,
}

impl ServedBucket {
    /// A bucket without copies, which does not exist for clients yet.
    pub(super) fn new(
        settings: &BucketSettings,
        defaults: &BucketDefaults,
        chance: &Arc<Chance>,
        nodes: Arc<NodeMap>,
    ) -> Self {
        let bucket = defaults.bucket(settings, chance);
        let facts = Arc::new(MapFacts {
            bucket_name: settings.name.clone(),
            replicas: settings.replicas,
            is_ephemeral: settings.is_ephemeral,
        });
        Self {
            unflushed: bucket.changes().subscribe(),
            bucket,
            map: RwLock::new(Arc::new(BucketMap::empty(nodes, Arc::clone(&facts)))),
            facts,
            life: CancellationToken::new(),
            may_flush: AtomicBool::new(settings.may_flush),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.facts.bucket_name
    }

    /// Copies of each vBucket besides the active one, if there are enough nodes.
    pub(super) fn replicas(&self) -> u8 {
        self.facts.replicas
    }

    /// The settings at present.
    pub(crate) fn settings(&self) -> BucketSettings {
        BucketSettings {
            name: self.facts.bucket_name.clone(),
            replicas: self.facts.replicas,
            is_ephemeral: self.facts.is_ephemeral,
            quota_bytes: self.bucket.memory().quota(),
            may_flush: self.may_flush(),
        }
    }

    pub(crate) fn map(&self) -> Arc<BucketMap> {
        Arc::clone(&self.map.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(super) fn write_map(&self) -> RwLockWriteGuard<'_, Arc<BucketMap>> {
        self.map.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next version of the map, of the copies as they are placed now.
    pub(super) fn next_map(
        &self,
        nodes: &Arc<NodeMap>,
        uuid: Option<Arc<str>>,
        manifest: Arc<Manifest>,
    ) -> Arc<BucketMap> {
        let (nodes, facts) = (Arc::clone(nodes), Arc::clone(&self.facts));
        Arc::new(BucketMap::new(nodes, uuid, manifest, facts, self.bucket.chains()))
    }

    /// Whether the bucket was created and is not dropped.
    pub(crate) fn exists(&self) -> bool {
        self.map().bucket_uuid.is_some()
    }

    /// The bucket's identity: 32 hex digits; empty while it is dropped.
    pub(crate) fn uuid(&self) -> String {
        self.map().bucket_uuid.as_deref().unwrap_or_default().to_owned()
    }

    pub(crate) fn manifest(&self) -> Arc<Manifest> {
        Arc::clone(&self.map().manifest)
    }

    /// Token that ends the connections that selected the bucket.
    pub(crate) fn life(&self) -> &CancellationToken {
        &self.life
    }

    /// Whether clients may flush the bucket.
    pub(crate) fn may_flush(&self) -> bool {
        self.may_flush.load(Ordering::Relaxed)
    }

    /// Lets clients flush the bucket, or not.
    pub(crate) fn allow_flush(&self, allow: bool) {
        self.may_flush.store(allow, Ordering::Relaxed);
    }

    /// A vBucket that was rolled back may lack collections of the bucket.
    pub(crate) fn apply_manifest(&self, version: ServerVersion) {
        self.bring_all_forward(self.bucket.chance().now(), &self.manifest(), version);
    }

    pub(super) fn bring_all_forward(&self, now: Now, manifest: &Manifest, version: ServerVersion) {
        for vbid in self.bucket.vbids() {
            self.bucket.with(vbid, |vbucket| vbucket.apply_manifest(now, manifest, version));
        }
    }
}

/// One node's part of a bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeBucket<'a> {
    pub(crate) served: &'a ServedBucket,
    pub(crate) map: &'a BucketMap,
    pub(crate) node: usize,
    /// Rights of the client's user.
    pub(crate) rights: &'a Rights,
}

impl BucketSource for NodeBucket<'_> {
    type VBucket<'a>
        = VBucketGuard<'a>
    where
        Self: 'a;

    fn vbucket(&self, vbid: Vbid) -> Option<VBucketGuard<'_>> {
        self.served.bucket.lock_on(self.node, vbid)
    }

    fn cluster_map(&self) -> Option<Bytes> {
        // Not an earlier map: the vBucket may have been moved since. No vBucket is locked here, so
        // waiting for a map that is being changed is allowed.
        self.served.map().view(self.node).cloned()
    }

    fn manifest_uid(&self) -> ManifestUid {
        self.map.manifest.uid()
    }

    fn has_collection(&self, collection: CollectionId) -> bool {
        self.map.manifest.has_collection(collection)
    }

    fn scope_collections(&self, scope: ScopeId) -> Option<Vec<CollectionId>> {
        let scope = self.map.manifest.scope(scope)?;
        Some(scope.collections.iter().map(|collection| collection.id).collect())
    }

    fn has_privilege(&self, privilege: Privilege) -> bool {
        self.rights.has(privilege, &self.map.manifest)
    }

    fn is_warming_up(&self) -> bool {
        // A restarted node has everything at once.
        false
    }

    fn memory_pressure(&self) -> MemoryPressure {
        /// Percentage of the quota from which backfills are postponed.
        const HIGH: u8 = 96;
        match self.served.bucket.memory().used_percent() {
            100.. => MemoryPressure::Full,
            HIGH.. => MemoryPressure::High,
            _ => MemoryPressure::None,
        }
    }

    fn disk_usage_percent(&self) -> u8 {
        self.served.bucket.memory().used_percent()
    }

    fn keeps_history(&self) -> bool {
        self.served.bucket.keeps_history()
    }

    fn retire(&self, vbid: Vbid) {
        self.served.bucket.retire(self.node, vbid);
    }

    fn replicas(&self) -> &dyn ReplicaStore {
        self
    }
}
