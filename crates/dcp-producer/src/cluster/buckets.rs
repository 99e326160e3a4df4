//! The buckets of the cluster: finding, creating, flushing and dropping them.

use std::sync::{Arc, PoisonError};

use dcp_wire::Vbid;
use dcp_wire::message::ConfigVersion;

use super::{BucketSettings, Cluster, ServedBucket, new_uuid};
use crate::Error;
use crate::bucket::{Copies, LinkFaults, Manifest, UNLIMITED_LAG, Unchanged};
use crate::chance::Now;

/// Most buckets at a time, as in servers.
const MAX_BUCKETS: usize = 30;

/// The buckets of a cluster.
#[derive(Debug)]
pub(super) struct Buckets {
    /// The one of the options: it stays while it is dropped, until it is created again.
    first: Arc<ServedBucket>,
    others: Vec<Arc<ServedBucket>>,
}

impl Buckets {
    pub(super) fn new(first: ServedBucket) -> Self {
        Self { first: Arc::new(first), others: Vec::new() }
    }
}

/// A bucket of an earlier process, whose copies are in place already.
pub(crate) struct Resumed {
    pub(crate) served: Arc<ServedBucket>,
    /// `None` if it is dropped.
    pub(crate) uuid: Option<Arc<str>>,
    pub(crate) manifest: Manifest,
}

impl Cluster {
    /// All buckets, the one of the options first, even while it is dropped.
    pub(crate) fn buckets(&self) -> Vec<Arc<ServedBucket>> {
        let buckets = self.buckets.read().unwrap_or_else(PoisonError::into_inner);
        std::iter::once(&buckets.first).chain(&buckets.others).cloned().collect()
    }

    /// The bucket of the options, even while it is dropped.
    pub(crate) fn first(&self) -> Arc<ServedBucket> {
        let buckets = self.buckets.read().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(&buckets.first)
    }

    /// The bucket of a name, unless there is none or it is dropped.
    pub(crate) fn bucket_named(&self, name: &[u8]) -> Option<Arc<ServedBucket>> {
        let mut buckets = self.buckets().into_iter();
        buckets.find(|served| served.name().as_bytes() == name && served.exists())
    }

    /// Whether a bucket is still the cluster's: another may have its name.
    pub(crate) fn has(&self, served: &Arc<ServedBucket>) -> bool {
        self.buckets().iter().any(|known| Arc::ptr_eq(known, served))
    }

    /// What a bucket is created as unless a request says otherwise: as the cluster was started.
    pub(crate) fn default_settings(&self) -> &BucketSettings {
        &self.defaults.settings
    }

    /// A bucket with these settings, which is not the cluster's yet.
    pub(crate) fn new_bucket(&self, settings: &BucketSettings) -> Arc<ServedBucket> {
        Arc::new(ServedBucket::new(settings, &self.defaults, &self.chance, self.map()))
    }

    /// Creates a bucket.
    pub(crate) fn create_bucket(&self, settings: &BucketSettings) -> Result<(), Error> {
        let _turn = self.take_turn();
        let existing: Vec<_> = self.buckets().into_iter().filter(|known| known.exists()).collect();
        // Files are named by identities, but names that differ in case are the same in servers.
        if existing.iter().any(|known| known.name().eq_ignore_ascii_case(&settings.name)) {
            return Err(Error::BucketExists);
        }
        if existing.len() >= MAX_BUCKETS {
            return Err(Error::TooManyBuckets { max: MAX_BUCKETS });
        }
        let served = self.new_bucket(settings);
        served.bucket.set_link_faults(LinkFaults::clone(&self.first().bucket.link_faults()));
        // Listed first, so that a node that is stopped meanwhile has no running copies.
        self.list(&served);
        let usable = self.usable(&self.map().nodes);
        self.change_bucket(&served, |change| {
            change.bucket_uuid = Some(new_uuid(&self.chance).into());
            served.lay_out(&usable)
        })
    }

    /// Adds a bucket; the first one is replaced by another of its name.
    fn list(&self, served: &Arc<ServedBucket>) {
        let mut buckets = self.buckets.write().unwrap_or_else(PoisonError::into_inner);
        if served.name() == buckets.first.name() {
            buckets.first = Arc::clone(served);
        } else {
            buckets.others.push(Arc::clone(served));
        }
    }

    /// Drops a bucket and all that is in it; connections to it end.
    pub(crate) fn drop_bucket(&self, served: &Arc<ServedBucket>) -> Result<(), Error> {
        let _turn = self.take_turn();
        self.change_bucket(served, |change| {
            if change.bucket_uuid.take().is_none() {
                return Err(Error::NoBucket);
            }
            // First, so that no stream notices the removal of its vBucket and sends an end.
            served.life().cancel();
            for vbid in served.bucket.vbids() {
                served.bucket.rearrange(vbid, Copies::clear);
            }
            change.manifest = Arc::default();
            let mut buckets = self.buckets.write().unwrap_or_else(PoisonError::into_inner);
            buckets.others.retain(|known| !Arc::ptr_eq(known, served));
            Ok(())
        })
    }

    /// Empties a bucket: its vBuckets start over, with collections but without documents.
    pub(crate) fn flush_bucket(&self, served: &ServedBucket) -> Result<(), Error> {
        let _turn = self.take_turn();
        if !served.exists() {
            return Err(Error::NoBucket);
        }
        let bucket = &served.bucket;
        for vbid in bucket.vbids() {
            bucket.rearrange(vbid, |copies| {
                let nodes = copies.nodes();
                copies.clear();
                let mut nodes = nodes.into_iter().map(|node| bucket.new_copy(node, vbid));
                if let Some(active) = nodes.next() {
                    copies.set_active(active);
                }
                nodes.for_each(|replica| copies.add_replica(replica));
            });
        }
        served.apply_manifest(self.dcp_config().server_version);
        Ok(())
    }

    /// Resumes the buckets of an earlier process. Where their copies do not match the present nodes,
    /// they move as in a rebalance. Nodes that were `failed_over` run, but do not belong to the
    /// cluster. The map's versions are above all of that process.
    pub(crate) fn resume(&self, resumed: Vec<Resumed>, epoch: i64, failed_over: &[usize]) {
        for Resumed { served, uuid, manifest } in resumed {
            if !self.has(&served) {
                self.list(&served);
            }
            let changed = self.change_bucket(&served, |change| {
                change.bucket_uuid = uuid;
                change.manifest = Arc::new(manifest);
                Ok(())
            });
            debug_assert!(changed.is_ok(), "the change cannot fail");
        }
        // Their maps cannot be read during the change.
        let exists: Vec<_> = self.buckets().iter().map(|served| served.exists()).collect();
        let changed = self.change(|change| {
            // If there are fewer nodes now, none of the members may be left.
            if (0..change.nodes.len()).any(|node| !failed_over.contains(&node)) {
                for &node in failed_over {
                    // The process may have ended before it stored the copies without the node.
                    self.leave(change, node);
                }
            }
            let usable = self.usable(&change.nodes);
            for (served, exists) in change.buckets.iter().zip(exists) {
                let bucket = &served.bucket;
                for vbid in bucket.vbids() {
                    if !exists {
                        bucket.rearrange(vbid, Copies::clear);
                    } else if !served.is_complete(&usable, vbid)
                        && let Err(error) = served.lay_out_one(&usable, vbid)
                    {
                        tracing::warn!(name: "vbucket_misplaced", %error, "a vBucket is not in its place");
                    }
                    bucket.rearrange(vbid, Copies::replicate);
                }
            }
            change.version = ConfigVersion { epoch, rev: 0 };
            Ok(())
        });
        debug_assert!(changed.is_ok(), "the change cannot fail");
        self.apply_manifest();
    }

    /// Changes the collections manifest of a bucket and lets every vBucket follow.
    pub(crate) fn update_manifest<T>(
        &self,
        served: &ServedBucket,
        now: Now,
        op: impl FnOnce(&mut Manifest) -> Result<T, Unchanged>,
    ) -> Result<T, Error> {
        self.change_bucket(served, |change| {
            if change.bucket_uuid.is_none() {
                return Err(Error::NoBucket);
            }
            let result = op(Arc::make_mut(&mut change.manifest)).map_err(|unchanged| {
                Error::Manifest(match unchanged {
                    Unchanged::Exists => "the scope or collection exists already",
                    Unchanged::Missing => "there is no such scope or collection",
                    Unchanged::Refused => {
                        "the default scope cannot be dropped; a name has 1 to 251 letters, \
                         digits, `_`, `-` or `%` and does not begin with `_` or `%`"
                    }
                })
            })?;
            let version = self.dcp_config().server_version;
            served.bring_all_forward(now, &change.manifest, version);
            Ok(result)
        })
    }
}

impl ServedBucket {
    /// Sets how many changes a replica leaves unapplied; `None` for all.
    pub(crate) fn set_replica_lag(
        &self,
        vbid: Vbid,
        replica: usize,
        lag: Option<u64>,
    ) -> Option<()> {
        let set = |copies: &mut Copies| {
            copies.get_mut(replica)?.lag = lag.unwrap_or(UNLIMITED_LAG);
            copies.replicate();
            Some(())
        };
        self.bucket.rearrange(vbid, set)?
    }
}
