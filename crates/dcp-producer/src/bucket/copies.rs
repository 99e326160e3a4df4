//! The copies of one vBucket on the nodes of the cluster, and how replicas follow the active one.

use core::cmp::Reverse;
use std::sync::Arc;

use dcp_producer_proto::VBucketState;
use dcp_wire::Vbuuid;
use dcp_wire::message::{DurabilityLevel, StreamRequestFlags};

use super::durable::Undecided;
use super::flush::{FlushBatch, VBucketRecord};
use super::flush_progress::Flushed;
use super::link_faults::{LinkFaults, LinkState};
use super::replica_link::ReplicaLink;
use super::vbucket::VBucket;
use crate::Error;
use crate::chance::Now;

/// A lag that keeps a replica from receiving anything.
pub(crate) const UNLIMITED_LAG: u64 = u64::MAX;

/// One copy of a vBucket.
#[derive(Debug)]
pub(crate) struct Copy {
    /// Its node.
    pub(crate) node: usize,
    /// Whether that node runs.
    pub(crate) is_up: bool,
    pub(crate) vbucket: VBucket,
    /// How many changes a replica leaves unapplied.
    pub(crate) lag: u64,
    /// Connection that feeds the replica; `None` before it is first fed.
    pub(super) link: Option<ReplicaLink>,
    /// Faults of this connection when it was last used.
    faults: LinkState,
}

impl Copy {
    /// A copy with the contents of `vbucket`.
    pub(super) const fn new(node: usize, vbucket: VBucket) -> Self {
        let faults = LinkState::NONE;
        Self { node, is_up: true, vbucket, lag: 0, link: None, faults }
    }

    /// Makes the copy a replica.
    pub(crate) fn make_replica(&mut self) {
        self.vbucket.set_state(VBucketState::Replica);
        self.vbucket.charge(false);
        self.link = None;
    }

    /// Receives the changes of `active`, a copy on another node, and applies all but the last `lag`.
    fn follow(&mut self, active: &mut VBucket, node: usize, faults: &LinkFaults) {
        if !self.is_up {
            return;
        }
        let now = faults.of(node, self.node, active.vbid());
        faults.count(&self.faults, &now);
        self.faults = now;
        if now.is_closed() || self.link.as_ref().is_some_and(|link| !link.suits(&now)) {
            self.link = None;
        }
        // It takes packets in both directions to open a connection.
        let is_cut = match self.link {
            Some(_) => now.stalls_changes() && now.stalls_answers(),
            None => now.is_closed() || now.stalls_changes() || now.stalls_answers(),
        };
        if self.lag != UNLIMITED_LAG && !is_cut {
            self.stream(active, now, StreamRequestFlags::empty());
        }
    }

    /// Takes the vBucket over from `active`, which becomes dead. If that fails, the states of both
    /// copies are those from before.
    fn take_over(&mut self, active: &mut Self) -> Result<(), Error> {
        if !active.is_up {
            return Err(Error::NodeDown { node: active.node });
        }
        let active = &mut active.vbucket;
        let before = active.state;
        self.link = None;
        self.stream(active, LinkState::NONE, StreamRequestFlags::TAKE_OVER);
        self.link = None;
        if self.vbucket.state == VBucketState::Active {
            return Ok(());
        }
        for (copy, state) in [(active, before), (&mut self.vbucket, VBucketState::Replica)] {
            if copy.state != state {
                copy.set_state(state);
            }
        }
        Err(Error::TakeoverFailed { vbid: self.vbucket.vbid(), node: self.node })
    }

    /// Transfers what the link has; a closed one is reopened next time.
    fn stream(&mut self, active: &mut VBucket, faults: LinkState, flags: StreamRequestFlags) {
        let link = self.link.get_or_insert_with(|| ReplicaLink::new(&faults));
        let lag = if flags == StreamRequestFlags::TAKE_OVER { 0 } else { self.lag };
        if let Err(reason) = link.carry(active, &mut self.vbucket, lag, &faults, flags) {
            tracing::warn!(name: "replica_stopped", vbucket = active.vbid().0, node = self.node, %reason, "replication stopped");
            self.link = None;
        }
    }
}

/// The copies of one vBucket.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    /// The active one first, unless it is lost.
    all: Vec<Copy>,
    /// Faults of the connections between nodes.
    link_faults: Arc<LinkFaults>,
}

impl Copies {
    /// The copies of nodes that run.
    pub(super) fn running(&mut self) -> impl Iterator<Item = &mut Copy> {
        self.all.iter_mut().filter(|copy| copy.is_up)
    }

    /// Nodes of the copies, the active one's first.
    pub(crate) fn nodes(&self) -> Vec<usize> {
        self.all.iter().map(|copy| copy.node).collect()
    }

    pub(super) fn get(&self, index: usize) -> Option<&Copy> {
        self.all.get(index)
    }

    /// The vBucket of an existing copy.
    pub(super) fn vbucket(&self, index: usize) -> &VBucket {
        &self.all[index].vbucket
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut Copy> {
        self.all.get_mut(index)
    }

    /// Index of the active copy if its node runs.
    pub(super) fn active(&self) -> Option<usize> {
        let is_active = |copy: &&Copy| copy.is_up && copy.vbucket.state == VBucketState::Active;
        self.all.first().filter(is_active).map(|_| 0)
    }

    /// Changes the state of the active copy; a former replica becomes active on the branch
    /// `vbuuid`, in its open checkpoint if it `keeps_checkpoint`. `false` if there is no copy on a
    /// running node.
    pub(crate) fn set_state(
        &mut self,
        state: VBucketState,
        vbuuid: Vbuuid,
        keeps_checkpoint: bool,
    ) -> bool {
        let Some(Copy { vbucket, .. }) = self.all.first_mut().filter(|copy| copy.is_up) else {
            return false;
        };
        match (vbucket.state, state) {
            (VBucketState::Replica, VBucketState::Active) if keeps_checkpoint => {
                vbucket.become_active(Some(vbuuid));
            }
            (VBucketState::Replica, VBucketState::Active) => vbucket.promote(Some(vbuuid)),
            _ => vbucket.set_state(state),
        }
        true
    }

    /// Index of the copy on a node.
    pub(super) fn on(&self, node: usize) -> Option<usize> {
        self.all.iter().position(|copy| copy.node == node && copy.is_up)
    }

    /// Lets the replicas receive what the active copy has.
    pub(crate) fn replicate(&mut self) {
        if self.active().is_none() {
            return;
        }
        if let Some((active, replicas)) = self.all.split_first_mut() {
            for replica in replicas {
                replica.follow(&mut active.vbucket, active.node, &self.link_faults);
            }
        }
    }

    /// Closes every link: their other end, the active copy, is another one now or went back. What
    /// replicas acknowledged to the former one says nothing about the present one.
    pub(super) fn disconnect(&mut self) {
        for copy in &mut self.all {
            copy.link = None;
        }
    }

    /// Closes the links of a node: all if it has the active copy.
    fn disconnect_node(&mut self, node: usize) {
        let is_active = self.all.first().is_some_and(|active| active.node == node);
        for copy in self.all.iter_mut().filter(|copy| is_active || copy.node == node) {
            copy.link = None;
        }
    }

    /// Changes the faults of the connections between nodes.
    pub(super) fn set_link_faults(&mut self, faults: &Arc<LinkFaults>) {
        self.link_faults = Arc::clone(faults);
        for copy in &mut self.all {
            copy.faults = LinkState::NONE;
        }
        self.replicate();
    }

    /// Whether there are `majority` copies to make a write durable.
    pub(super) fn can_be_durable(&self, majority: usize) -> bool {
        self.all.len() >= majority
    }

    /// Whether a durable write waits for copies.
    pub(super) fn is_undecided(&self) -> bool {
        self.active().is_some_and(|active| self.all[active].vbucket.durable.undecided().is_some())
    }

    /// Commits the durable writes that enough copies have, and aborts those past their deadline;
    /// returns whether there were any.
    pub(super) fn settle(&mut self, majority: usize, now: Now) -> bool {
        let mut any = false;
        loop {
            let Some(active) = self.active().and_then(|active| self.all.get_mut(active)) else {
                return any;
            };
            let Some(write) = active.vbucket.durable.undecided() else {
                return any;
            };
            let commit = self.is_durable(&write, majority);
            let completed = (commit || now > write.deadline)
                && self.all.first_mut().is_some_and(|active| active.vbucket.complete_next(commit));
            if !completed {
                return any;
            }
            any = true;
            self.replicate();
        }
    }

    /// Whether enough copies have a write, on disk if the level requires it: replicas acknowledge
    /// what they have. If persistence is required, their flushers are woken.
    fn is_durable(&mut self, write: &Undecided, majority: usize) -> bool {
        let on_disk = write.level != DurabilityLevel::MAJORITY;
        let Some((active, replicas)) = self.all.split_first_mut() else {
            return false;
        };
        if on_disk {
            active.vbucket.persist();
        }
        for replica in replicas.iter_mut().filter(|copy| copy.is_up) {
            if write.level == DurabilityLevel::PERSIST_TO_MAJORITY {
                replica.vbucket.persist();
                replica.follow(&mut active.vbucket, active.node, &self.link_faults);
            }
        }
        let active = &active.vbucket;
        let has = if on_disk { active.safe_seqno() } else { active.high_seqno };
        if has < write.prepared {
            return false;
        }
        let acknowledged = |copy: &&mut Copy| {
            let link = copy.link.as_ref().filter(|_| copy.is_up);
            link.is_some_and(|link| link.acknowledged() >= write.prepared)
        };
        1 + replicas.iter_mut().filter(acknowledged).count() >= majority
    }

    /// After the active copy's node failed, makes a running replica the active copy, on the branch
    /// `vbuuid`, with only what it received: the one with the most durable writes and, among those,
    /// the most changes. Without a running replica, the vBucket waits for the node of the first one.
    fn promote(&mut self, vbuuid: Vbuuid) {
        if self.all.is_empty() {
            return;
        }
        let has = |(index, copy): &(usize, &Copy)| {
            let VBucket { durable, high_seqno, .. } = &copy.vbucket;
            // The first of equals.
            (durable.high_prepared(), *high_seqno, Reverse(*index))
        };
        let running = self.all.iter().enumerate().filter(|(_, copy)| copy.is_up);
        let best = running.max_by_key(has).map(|(index, _)| index);
        let mut copy = self.all.remove(best.unwrap_or_default());
        copy.vbucket.charge(true);
        copy.vbucket.promote(Some(vbuuid));
        self.all.insert(0, copy);
        self.disconnect();
    }

    /// What is missing from the data folder for each copy, by node.
    pub(crate) fn next_flush(&mut self) -> Vec<(usize, FlushBatch)> {
        self.all.iter_mut().map(|copy| (copy.node, copy.vbucket.next_flush())).collect()
    }

    /// Notes up to where a data folder has the copy of a node.
    pub(super) fn note_flushed(&mut self, node: usize, stored: Flushed) {
        for copy in self.all.iter_mut().filter(|copy| copy.node == node) {
            copy.vbucket.note_flushed(stored);
        }
    }

    /// The record of each copy for the data folder, when the cluster stops cleanly.
    pub(crate) fn last_records(&self) -> Vec<(usize, VBucketRecord)> {
        self.all.iter().map(|copy| (copy.node, copy.vbucket.record(copy.is_up))).collect()
    }

    /// Replaces the copies by `copies`, the active one first.
    pub(crate) fn restore(&mut self, copies: Vec<Copy>) {
        self.clear();
        self.all = copies;
    }

    /// Drops all copies.
    pub(crate) fn clear(&mut self) {
        for copy in &mut self.all {
            copy.vbucket.charge(false);
        }
        self.all.clear();
    }

    /// Drops the copy of a node that leaves the cluster. If it is the active one, a replica is
    /// promoted, without the changes that it lacks.
    pub(crate) fn leave(&mut self, node: usize, vbuuid: Vbuuid) {
        let Some(index) = self.all.iter().position(|copy| copy.node == node) else {
            return;
        };
        self.all.remove(index).vbucket.charge(false);
        if index == 0 {
            self.promote(vbuuid);
        }
        self.replicate();
    }

    /// If the active copy is on `node`, makes the first running replica take the vBucket over.
    pub(crate) fn hand_over_from(&mut self, node: usize) -> Result<(), Error> {
        let Some((active, replicas)) = self.all.split_first() else {
            return Ok(());
        };
        if active.node != node {
            return Ok(());
        }
        let vbid = active.vbucket.vbid();
        let to = replicas.iter().find(|copy| copy.is_up).ok_or(Error::NoRunningReplica { vbid })?;
        self.hand_over(to.node).map(drop)
    }

    /// Makes the copy of a node take the vBucket over from the active one, which becomes a replica,
    /// as in a rebalance; `false` if the node has no copy.
    pub(crate) fn hand_over(&mut self, node: usize) -> Result<bool, Error> {
        let Some(index) = self.all.iter().position(|copy| copy.node == node) else {
            return Ok(false);
        };
        if let Some((active, replicas)) = self.all.split_first_mut()
            && let Some(successor) = index.checked_sub(1).and_then(|at| replicas.get_mut(at))
        {
            if let Err(error) = successor.take_over(active) {
                self.replicate();
                return Err(error);
            }
            successor.vbucket.charge(true);
            active.make_replica();
            self.all.swap(0, index);
            // The others are fed by the new active copy from now on.
            self.disconnect();
        }
        Ok(true)
    }

    /// Makes a new copy take the vBucket over from the active one, which is dropped.
    pub(crate) fn move_to(&mut self, mut copy: Copy) -> Result<(), Error> {
        let Some(active) = self.all.first_mut() else {
            return Ok(());
        };
        copy.vbucket.settings.holds_persistence = active.vbucket.settings.holds_persistence;
        copy.vbucket.set_state(VBucketState::Replica);
        if let Err(error) = copy.take_over(active) {
            copy.vbucket.charge(false);
            return Err(error);
        }
        active.vbucket.charge(false);
        *active = copy;
        self.disconnect();
        Ok(())
    }

    /// Adds a new replica after the others.
    pub(crate) fn add_replica(&mut self, mut copy: Copy) {
        copy.make_replica();
        self.all.push(copy);
        self.replicate();
    }

    /// Drops the replica on a node.
    pub(crate) fn drop_replica(&mut self, node: usize) {
        let active = self.all.first().map(|copy| copy.node);
        self.all.retain(|copy| copy.node != node || Some(copy.node) == active);
    }

    /// Puts the replicas in the order of `nodes`.
    pub(crate) fn arrange(&mut self, nodes: &[usize]) {
        if let Some((_, replicas)) = self.all.split_first_mut() {
            replicas.sort_by_key(|copy| nodes.iter().position(|&node| node == copy.node));
        }
    }

    /// Creates a lost vBucket again.
    pub(crate) fn set_active(&mut self, copy: Copy) {
        self.all.insert(0, copy);
    }

    /// The node stops at once: packets on their way to it are lost.
    pub(crate) fn stop(&mut self, node: usize) {
        for copy in self.all.iter_mut().filter(|copy| copy.node == node) {
            copy.is_up = false;
        }
        self.disconnect_node(node);
    }

    /// The node restarts, with everything if it was stopped cleanly, otherwise with what is on its
    /// disk; an active copy then continues on the branch `vbuuid`.
    pub(crate) fn come_back(&mut self, node: usize, cleanly: bool, vbuuid: Vbuuid) {
        for copy in self.all.iter_mut().filter(|copy| copy.node == node) {
            copy.is_up = true;
            if cleanly {
                copy.vbucket.stop_cleanly(vbuuid);
            } else {
                copy.vbucket.recover(vbuuid);
            }
        }
        self.disconnect_node(node);
        self.replicate();
    }
}
