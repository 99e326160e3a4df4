//! Adding, failing, restarting and removing nodes, and dropping the bucket.

use std::sync::{Arc, MutexGuard, PoisonError};

use dcp_wire::Vbid;
use dcp_wire::message::ConfigVersion;
use tokio_util::sync::CancellationToken;

use super::map::{ClusterMap, MapNode};
use super::{Cluster, Node, NodePower};
use crate::Error;
use crate::bucket::{Copies, HELD, LinkFaults, Manifest, Unchanged};
use crate::chance::Now;

/// Contents of the next map version that do not follow from the copies.
struct Change {
    /// Version before; the next one is one rev above, unless it is a new epoch's first.
    version: ConfigVersion,
    nodes: Vec<MapNode>,
    bucket_uuid: Option<Arc<str>>,
    manifest: Arc<Manifest>,
}

impl Cluster {
    /// Changes the cluster and publishes the result as the next version of the map. The map cannot
    /// be read while it is being changed.
    fn change<T>(&self, op: impl FnOnce(&mut Change) -> Result<T, Error>) -> Result<T, Error> {
        let mut map = self.write_map();
        let mut change = Change {
            version: map.version,
            nodes: map.nodes.clone(),
            bucket_uuid: map.bucket_uuid.clone(),
            manifest: Arc::clone(&map.manifest),
        };
        let result = op(&mut change)?;
        let Change { version, nodes, bucket_uuid, manifest } = change;
        let version = ConfigVersion { rev: version.rev + 1, ..version };
        let (facts, chains) = (Arc::clone(&self.facts), self.bucket.chains());
        let next = ClusterMap::new(version, nodes, bucket_uuid, manifest, facts, chains);
        *map = Arc::new(next);
        drop(map);
        self.versions.announce();
        Ok(result)
    }

    pub(crate) fn known_power(&self, node: usize) -> Result<Arc<NodePower>, Error> {
        self.power(node).ok_or_else(|| {
            let reason = format!("must be below {}, the number of nodes", self.nodes().len());
            Error::InvalidOption { option: "node", reason }
        })
    }

    /// A node that belongs to the cluster.
    fn member_power(&self, node: usize) -> Result<Arc<NodePower>, Error> {
        let power = self.known_power(node)?;
        if self.map().is_member(node) {
            return Ok(power);
        }
        Err(Error::NotAMember { node })
    }

    /// Moves a vBucket to another node, as a rebalance does.
    pub(crate) fn move_vbucket(&self, vbid: Vbid, node: usize) -> Result<(), Error> {
        if !self.member_power(node)?.is_on() {
            return Err(Error::NodeDown { node });
        }
        let _turn = self.take_turn();
        let active = self.bucket.nodes_of(vbid).first().copied();
        if active == Some(node) {
            return Ok(());
        }
        self.check_links(&[active.unwrap_or(node), node])?;
        self.change(|_| {
            let moved = self.bucket.rearrange(vbid, |copies| {
                if copies.hand_over(node)? {
                    return Ok(());
                }
                copies.move_to(self.bucket.new_copy(node, vbid))
            });
            moved.unwrap_or(Ok(()))
        })
    }

    /// Takes a node out of the cluster and promotes replicas of its active vBuckets. If `graceful`,
    /// they take its vBuckets over first; if one of them fails to, the node stays, without those that
    /// were taken over.
    pub(crate) fn fail_over(&self, node: usize, graceful: bool) -> Result<(), Error> {
        let power = self.member_power(node)?;
        if graceful && !power.is_on() {
            return Err(Error::NodeDown { node });
        }
        let _turn = self.take_turn();
        if self.members().len() < 2 {
            return Err(Error::LastNode { node });
        }
        if graceful {
            self.check_links(&self.usable(&self.map().nodes))?;
        } else {
            power.switch_off();
        }
        // Published in either case: some vBuckets may have been taken over.
        let done = self.change(|change| {
            let handed_over = if graceful { self.hand_over_from(node) } else { Ok(()) };
            if handed_over.is_ok() {
                self.leave(change, node);
            }
            Ok(handed_over)
        })?;
        self.bring_forward();
        done
    }

    /// Lets replicas take over the active vBuckets of a node.
    fn hand_over_from(&self, node: usize) -> Result<(), Error> {
        self.bucket.vbids().try_for_each(|vbid| {
            self.bucket.rearrange(vbid, |copies| copies.hand_over_from(node)).unwrap_or(Ok(()))
        })
    }

    fn leave(&self, change: &mut Change, node: usize) {
        for vbid in self.bucket.vbids() {
            self.bucket.rearrange(vbid, |copies| {
                copies.leave(node, self.bucket.chance().vbuuid());
            });
        }
        if let Some(failed) = change.nodes.get_mut(node) {
            failed.is_member = false;
        }
    }

    /// Takes a majority of nodes out of the cluster. The remaining ones cannot know which map
    /// versions were used, so they begin a new epoch.
    pub(crate) fn fail_over_unsafely(&self, nodes: &[usize]) -> Result<(), Error> {
        let powers: Vec<_> =
            nodes.iter().map(|&node| self.member_power(node)).collect::<Result<_, _>>()?;
        let _turn = self.take_turn();
        let map = self.map();
        let stays = |node: &usize| map.is_member(*node) && !nodes.contains(node);
        if let (Some(&node), false) = (nodes.first(), (0..map.nodes.len()).any(|node| stays(&node)))
        {
            return Err(Error::LastNode { node });
        }
        for power in &powers {
            power.switch_off();
        }
        self.change(|change| {
            for vbid in self.bucket.vbids() {
                for &node in nodes {
                    self.bucket.rearrange(vbid, |copies| copies.stop(node));
                }
            }
            for &node in nodes {
                self.leave(change, node);
            }
            change.version = ConfigVersion { epoch: change.version.epoch + 1, rev: 0 };
            Ok(())
        })?;
        self.bring_forward();
        Ok(())
    }

    /// Waits until no other operation moves copies.
    fn take_turn(&self) -> MutexGuard<'_, ()> {
        self.operation.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the faults of the connections between nodes.
    pub(crate) fn change_link_faults<E>(
        &self,
        faults: impl FnOnce() -> Result<LinkFaults, E>,
    ) -> Result<(), E> {
        let _turn = self.take_turn();
        self.bucket.set_link_faults(faults()?);
        Ok(())
    }

    /// Checks that `nodes` reach each other, as moving vBuckets requires.
    fn check_links(&self, nodes: &[usize]) -> Result<(), Error> {
        let cut = self.bucket.link_faults().cut_among(nodes);
        cut.map_or(Ok(()), |(node, other)| Err(Error::NodesCutOff { node, other }))
    }

    /// Stops a node at once.
    pub(crate) fn kill(&self, node: usize) -> Result<(), Error> {
        self.known_power(node)?.switch_off();
        for vbid in self.bucket.vbids() {
            self.bucket.rearrange(vbid, |copies| copies.stop(node));
        }
        Ok(())
    }

    /// Restores the data of a stopped node, before it accepts connections again.
    pub(crate) fn come_back(&self, node: usize, cleanly: bool) {
        for vbid in self.bucket.vbids() {
            self.bucket.rearrange(vbid, |copies| {
                copies.come_back(node, cleanly, self.bucket.chance().vbuuid());
            });
        }
        self.bring_forward();
    }

    /// Adds a node, which has no vBuckets before the next rebalance; returns its number.
    pub(crate) fn add_node(&self, addresses: Node) -> Result<usize, Error> {
        self.change(|change| {
            let mut power = self.power.write().unwrap_or_else(PoisonError::into_inner);
            power.push(Arc::new(NodePower::new(self.stop.clone())));
            change.nodes.push(MapNode { addresses, is_member: true });
            Ok(change.nodes.len() - 1)
        })
    }

    /// Distributes the copies evenly over the running nodes, including those that were failed over,
    /// one vBucket and one map version at a time.
    pub(crate) fn rebalance(&self) -> Result<(), Error> {
        let _turn = self.take_turn();
        let runs = |&node: &usize| self.power(node).is_some_and(|power| power.is_on());
        let running: Vec<_> = (0..self.nodes().len()).filter(runs).collect();
        self.check_links(&running)?;
        let exists = self.change(|change| {
            for (index, node) in change.nodes.iter_mut().enumerate() {
                let is_on = self.power(index).is_some_and(|power| power.is_on());
                if node.is_member && !is_on {
                    return Err(Error::NodeDown { node: index });
                }
                node.is_member = is_on;
            }
            Ok(change.bucket_uuid.is_some())
        })?;
        let mut done = Ok(());
        if exists {
            let usable = self.usable(&self.map().nodes);
            let mut misplaced =
                self.bucket.vbids().filter(|&vbid| !self.is_in_place(&usable, vbid));
            done = misplaced.try_for_each(|vbid| self.change(|_| self.lay_out_one(&usable, vbid)));
        }
        self.bring_forward();
        done
    }

    /// Sets how many changes a replica leaves unapplied; `None` for all.
    pub(crate) fn set_replica_lag(
        &self,
        vbid: Vbid,
        replica: usize,
        lag: Option<u64>,
    ) -> Option<()> {
        let set = |copies: &mut Copies| {
            copies.get_mut(replica)?.lag = lag.unwrap_or(HELD);
            copies.replicate();
            Some(())
        };
        self.bucket.rearrange(vbid, set)?
    }

    /// Drops the bucket and all that is in it; connections to it end.
    pub(crate) fn drop_bucket(&self) -> Result<(), Error> {
        let _turn = self.take_turn();
        self.change(|change| {
            if change.bucket_uuid.take().is_none() {
                return Err(Error::NoBucket);
            }
            // First, so that no stream notices the removal of its vBucket and sends an end.
            self.bucket_life().cancel();
            for vbid in self.bucket.vbids() {
                self.bucket.rearrange(vbid, Copies::clear);
            }
            change.manifest = Arc::default();
            Ok(())
        })?;
        let mut life = self.bucket_life.write().unwrap_or_else(PoisonError::into_inner);
        *life = CancellationToken::new();
        Ok(())
    }

    /// Creates the bucket again after it was dropped.
    pub(crate) fn create_bucket(&self) -> Result<(), Error> {
        let _turn = self.take_turn();
        self.change(|change| {
            if change.bucket_uuid.is_some() {
                return Err(Error::BucketExists);
            }
            change.bucket_uuid = Some(self.new_uuid());
            self.allow_flush(true);
            self.lay_out(&change.nodes)
        })
    }

    /// Empties the bucket: its vBuckets start over, with collections but without documents.
    pub(crate) fn flush_bucket(&self) -> Result<(), Error> {
        let _turn = self.take_turn();
        if self.map().bucket_uuid.is_none() {
            return Err(Error::NoBucket);
        }
        for vbid in self.bucket.vbids() {
            self.bucket.rearrange(vbid, |copies| {
                let nodes = copies.nodes();
                copies.clear();
                let mut nodes = nodes.into_iter().map(|node| self.bucket.new_copy(node, vbid));
                if let Some(active) = nodes.next() {
                    copies.set_active(active);
                }
                nodes.for_each(|replica| copies.add_replica(replica));
            });
        }
        self.bring_forward();
        Ok(())
    }

    /// Resumes the bucket of an earlier process, whose copies are in place already. If they do not
    /// match the present nodes, they move as in a rebalance. Nodes that were `failed_over` run, but
    /// do not belong to the cluster. The map's versions are above all of that process.
    pub(crate) fn resume(
        &self,
        uuid: Option<Arc<str>>,
        manifest: Manifest,
        epoch: i64,
        failed_over: &[usize],
    ) {
        let resumed = self.change(|change| {
            // If there are fewer nodes now, none of the members may be left.
            if (0..change.nodes.len()).any(|node| !failed_over.contains(&node)) {
                for &node in failed_over {
                    // The process may have ended before it stored the copies without the node.
                    self.leave(change, node);
                }
            }
            let usable = self.usable(&change.nodes);
            for vbid in self.bucket.vbids() {
                if uuid.is_none() {
                    self.bucket.rearrange(vbid, Copies::clear);
                } else if !self.is_complete(&usable, vbid)
                    && let Err(error) = self.lay_out_one(&usable, vbid)
                {
                    tracing::warn!(%error, "a vBucket is not in its place");
                }
                self.bucket.rearrange(vbid, Copies::replicate);
            }
            change.bucket_uuid = uuid;
            change.manifest = Arc::new(manifest);
            change.version = ConfigVersion { epoch, rev: 0 };
            Ok(())
        });
        debug_assert!(resumed.is_ok(), "the update cannot fail");
        self.bring_forward();
    }

    /// Changes the collections manifest and lets every vBucket follow.
    pub(crate) fn update_manifest<T>(
        &self,
        now: Now,
        op: impl FnOnce(&mut Manifest) -> Result<T, Unchanged>,
    ) -> Result<T, Error> {
        self.change(|change| {
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
            self.bring_all_forward(now, &change.manifest);
            Ok(result)
        })
    }

    /// A vBucket that was rolled back may lack collections of the bucket.
    pub(crate) fn bring_forward(&self) {
        self.bring_all_forward(self.bucket.chance().now(), &self.manifest());
    }

    fn bring_all_forward(&self, now: Now, manifest: &Manifest) {
        for vbid in self.bucket.vbids() {
            self.bucket.with(vbid, |vbucket| vbucket.bring_forward(now, manifest));
        }
    }
}
