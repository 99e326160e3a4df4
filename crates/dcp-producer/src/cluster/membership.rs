//! Adding, failing, restarting and removing nodes.

use std::sync::{Arc, PoisonError};

use dcp_wire::Vbid;
use dcp_wire::message::ConfigVersion;

use super::change::Change;
use super::map::MapNode;
use super::{Cluster, Node, NodePower, ServedBucket};
use crate::Error;
use crate::bucket::{Copies, LinkFaults};

impl Cluster {
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

    /// Moves a vBucket of a bucket to another node, as a rebalance does.
    pub(crate) fn move_vbucket(
        &self,
        served: &ServedBucket,
        vbid: Vbid,
        node: usize,
    ) -> Result<(), Error> {
        if !self.member_power(node)?.is_on() {
            return Err(Error::NodeDown { node });
        }
        let _turn = self.take_turn();
        let active = served.bucket.nodes_of(vbid).first().copied();
        if active == Some(node) {
            return Ok(());
        }
        self.check_links(&[active.unwrap_or(node), node])?;
        self.change_bucket(served, |_| {
            let moved = served.bucket.rearrange(vbid, |copies| {
                if copies.hand_over(node)? {
                    return Ok(());
                }
                copies.move_to(served.bucket.new_copy(node, vbid))
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
            let handed_over = if graceful { hand_over_from(change, node) } else { Ok(()) };
            if handed_over.is_ok() {
                self.leave(change, node);
            }
            Ok(handed_over)
        })?;
        self.apply_manifest();
        done
    }

    pub(super) fn leave(&self, change: &mut Change, node: usize) {
        for served in &change.buckets {
            each_vbucket(served, |copies| copies.leave(node, self.chance.vbuuid()));
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
            for served in &change.buckets {
                each_vbucket(served, |copies| nodes.iter().for_each(|&node| copies.stop(node)));
            }
            for &node in nodes {
                self.leave(change, node);
            }
            change.version = ConfigVersion { epoch: change.version.epoch + 1, rev: 0 };
            Ok(())
        })?;
        self.apply_manifest();
        Ok(())
    }

    /// Changes the faults of the connections between nodes.
    pub(crate) fn change_link_faults<E>(
        &self,
        faults: impl FnOnce() -> Result<LinkFaults, E>,
    ) -> Result<(), E> {
        let _turn = self.take_turn();
        let faults = faults()?;
        for served in self.buckets() {
            served.bucket.set_link_faults(faults.clone());
        }
        Ok(())
    }

    /// Checks that `nodes` reach each other, as moving vBuckets requires.
    fn check_links(&self, nodes: &[usize]) -> Result<(), Error> {
        let cut = self.first().bucket.link_faults().cut_among(nodes);
        cut.map_or(Ok(()), |(node, other)| Err(Error::NodesCutOff { node, other }))
    }

    /// Stops a node at once.
    pub(crate) fn kill(&self, node: usize) -> Result<(), Error> {
        self.known_power(node)?.switch_off();
        for served in self.buckets() {
            each_vbucket(&served, |copies| copies.stop(node));
        }
        Ok(())
    }

    /// Restores the data of a stopped node, before it accepts connections again.
    pub(crate) fn come_back(&self, node: usize, cleanly: bool) {
        for served in self.buckets() {
            each_vbucket(&served, |copies| copies.come_back(node, cleanly, self.chance.vbuuid()));
        }
        self.apply_manifest();
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
        self.change(|change| {
            for (index, node) in change.nodes.iter_mut().enumerate() {
                let is_on = self.power(index).is_some_and(|power| power.is_on());
                if node.is_member && !is_on {
                    return Err(Error::NodeDown { node: index });
                }
                node.is_member = is_on;
            }
            Ok(())
        })?;
        let usable = self.usable(&self.map().nodes);
        let buckets = self.buckets();
        let done = buckets.iter().filter(|served| served.exists()).try_for_each(|served| {
            let vbids = served.bucket.vbids();
            let mut misplaced = vbids.filter(|&vbid| !served.is_in_place(&usable, vbid));
            misplaced.try_for_each(|vbid| {
                self.change_bucket(served, |_| served.lay_out_one(&usable, vbid))
            })
        });
        self.apply_manifest();
        done
    }

    /// VBuckets that were rolled back may lack collections of their bucket.
    pub(super) fn apply_manifest(&self) {
        let version = self.dcp_config().server_version;
        self.buckets().iter().for_each(|served| served.apply_manifest(version));
    }
}

/// Lets replicas take over the active vBuckets of a node.
fn hand_over_from(change: &Change, node: usize) -> Result<(), Error> {
    change.buckets.iter().try_for_each(|served| {
        let bucket = &served.bucket;
        bucket.vbids().try_for_each(|vbid| {
            bucket.rearrange(vbid, |copies| copies.hand_over_from(node)).unwrap_or(Ok(()))
        })
    })
}

/// Rearranges the copies of each vBucket.
fn each_vbucket(served: &ServedBucket, op: impl Fn(&mut Copies)) {
    for vbid in served.bucket.vbids() {
        served.bucket.rearrange(vbid, &op);
    }
}
