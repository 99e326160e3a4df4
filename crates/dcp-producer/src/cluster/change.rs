//! New versions of the maps.

use std::sync::{Arc, PoisonError};

use dcp_wire::message::ConfigVersion;

use super::map::MapNode;
use super::{Cluster, ServedBucket};
use crate::Error;
use crate::bucket::Manifest;

/// Contents of the next version of all maps that do not follow from the copies.
pub(super) struct Change {
    /// Version before; the next one is one rev above, unless it is a new epoch's first.
    pub(super) version: ConfigVersion,
    pub(super) nodes: Vec<MapNode>,
    pub(super) buckets: Vec<Arc<ServedBucket>>,
}

/// Contents of the next version of a bucket's map that do not follow from the copies.
pub(super) struct BucketChange {
    pub(super) bucket_uuid: Option<Arc<str>>,
    pub(super) manifest: Arc<Manifest>,
}

impl Cluster {
    /// Changes the nodes, and publishes the result as the next version of all maps. No map can be
    /// read while it is being changed.
    pub(super) fn change<T>(
        &self,
        op: impl FnOnce(&mut Change) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut map = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let buckets = self.buckets();
        let maps: Vec<_> = buckets.iter().map(|served| served.write_map()).collect();
        let (version, nodes) = (map.version, map.nodes.to_vec());
        let mut change = Change { version, nodes, buckets: buckets.clone() };
        let result = op(&mut change)?;
        let next = Arc::new(map.next(after(change.version), change.nodes.into()));
        for (served, mut map) in buckets.iter().zip(maps) {
            let (uuid, manifest) = (map.bucket_uuid.clone(), Arc::clone(&map.manifest));
            *map = served.next_map(&next, uuid, manifest);
        }
        *map = next;
        drop(map);
        self.versions.announce();
        Ok(result)
    }

    /// Changes a bucket, and publishes the result as the next version of its map. The version of the
    /// map of the nodes increases with it, the other buckets' maps stay.
    pub(super) fn change_bucket<T>(
        &self,
        served: &ServedBucket,
        op: impl FnOnce(&mut BucketChange) -> Result<T, Error>,
    ) -> Result<T, Error> {
        let mut nodes = self.map.write().unwrap_or_else(PoisonError::into_inner);
        let mut map = served.write_map();
        let (bucket_uuid, manifest) = (map.bucket_uuid.clone(), Arc::clone(&map.manifest));
        let mut change = BucketChange { bucket_uuid, manifest };
        let result = op(&mut change)?;
        let next = Arc::new(nodes.next(after(nodes.version), Arc::clone(&nodes.nodes)));
        *map = served.next_map(&next, change.bucket_uuid, change.manifest);
        *nodes = next;
        drop(map);
        drop(nodes);
        self.versions.announce();
        Ok(result)
    }
}

fn after(version: ConfigVersion) -> ConfigVersion {
    ConfigVersion { rev: version.rev + 1, ..version }
}
