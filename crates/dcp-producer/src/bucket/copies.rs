//! The copies of one vBucket on the nodes of the cluster, and how replicas follow the active one.

use std::collections::VecDeque;
use std::sync::Arc;

use dcp_proto::Snapshot;
use dcp_proto::producer::rollback::{self, RollbackQuery, Verdict};
use dcp_proto::producer::{Item, MemoryRead, VBucketState};
use dcp_wire::message::DurabilityLevel;
use dcp_wire::{Seqno, Vbuuid};

use super::durable::Undecided;
use super::item::footprint;
use super::vbucket::VBucket;
use crate::chance::Now;

/// A lag no replica ever makes up for: it receives nothing.
pub(crate) const HELD: u64 = u64::MAX;

/// Bytes of changes that wait in a replica's inbox, at most; a lag that would take more is cut.
const INBOX_BYTES: usize = 32 << 20;

/// What is on its way to a replica.
#[derive(Debug)]
enum Incoming {
    /// A snapshot begins.
    Marker {
        snapshot: Snapshot,
        /// Whether it leaves out versions that later ones of it replace.
        is_thinned: bool,
        /// Whether it is read from the active copy's disk.
        from_disk: bool,
    },
    /// A change of it.
    Change(Arc<Item>),
    /// It ends above its last change, which was purged.
    End(Seqno),
}

/// One copy of a vBucket.
#[derive(Debug)]
pub(crate) struct Copy {
    /// Node it lies on.
    pub(crate) node: usize,
    /// Whether that node runs.
    pub(crate) is_up: bool,
    pub(crate) vbucket: VBucket,
    /// Changes a replica leaves unapplied.
    pub(crate) lag: u64,
    inbox: VecDeque<Incoming>,
    /// Changes in the inbox.
    waiting: u64,
    /// What they amount to.
    pub(super) waiting_bytes: usize,
    pub(super) max_waiting_bytes: usize,
    /// Up to where changes were put into the inbox.
    fetched: Seqno,
}

impl Copy {
    /// A copy that holds nothing but what `vbucket` has.
    pub(super) fn new(node: usize, vbucket: VBucket) -> Self {
        let fetched = vbucket.high_seqno;
        let inbox = VecDeque::new();
        Self {
            node,
            is_up: true,
            vbucket,
            lag: 0,
            inbox,
            waiting: 0,
            waiting_bytes: 0,
            max_waiting_bytes: INBOX_BYTES,
            fetched,
        }
    }

    /// Makes the copy a replica, which shares the items of the active one.
    pub(super) fn make_replica(&mut self) {
        self.vbucket.set_state(VBucketState::Replica);
        self.vbucket.charge(false);
        self.vbucket.begin_storing_anew();
        self.forget_incoming();
    }

    /// Loses what was on its way.
    pub(super) fn forget_incoming(&mut self) {
        self.inbox.clear();
        self.waiting = 0;
        self.waiting_bytes = 0;
        self.fetched = self.vbucket.high_seqno;
    }

    /// Receives what `active` has and applies all of it but the last `lag` changes.
    fn follow(&mut self, active: &VBucket, lag: u64) {
        if !self.is_up || lag == HELD {
            return;
        }
        if self.vbucket.vbuuid() != active.vbuuid() {
            self.agree(active);
        }
        self.fetch(active);
        while self.has_due(lag)
            && let Some(incoming) = self.inbox.pop_front()
        {
            match incoming {
                Incoming::Marker { snapshot, is_thinned, from_disk } => {
                    if from_disk && self.vbucket.high_seqno == Seqno::ZERO {
                        self.vbucket.initial_snapshot_end = snapshot.end;
                    }
                    self.vbucket.begin_snapshot(snapshot, is_thinned);
                }
                Incoming::End(seqno) => self.vbucket.end_snapshot_at(seqno),
                Incoming::Change(item) => {
                    self.waiting -= 1;
                    self.waiting_bytes -= footprint(&item);
                    self.vbucket.clock.observe(item.cas);
                    self.vbucket.take_in(item);
                }
            }
        }
    }

    /// Whether what comes next in the inbox is to be applied.
    fn has_due(&self, lag: u64) -> bool {
        self.waiting > lag
            || self.waiting_bytes > self.max_waiting_bytes
            || matches!(self.inbox.front(), Some(Incoming::End(_)))
    }

    /// Goes back until the history is one with that of `active`, and takes its failover table.
    fn agree(&mut self, active: &VBucket) {
        self.forget_incoming();
        loop {
            let at = self.vbucket.high_seqno;
            let snapshot = Snapshot {
                start: self.vbucket.snapshot.start.min(at),
                end: self.vbucket.snapshot.end.max(at),
            };
            let verdict = rollback::decide(&RollbackQuery {
                table: &active.failover,
                high_seqno: active.high_seqno,
                purge_seqno: active.purge_seqno,
                start_seqno: at,
                vbuuid: self.vbucket.vbuuid(),
                snapshot,
                strict_vbuuid: false,
                client_purge_seqno: Seqno::ZERO,
                collection_high_seqno: None,
            });
            let Verdict::Rollback { seqno, .. } = verdict else {
                break;
            };
            let seqno = self.vbucket.last_restorable(seqno);
            if seqno == Seqno::ZERO || seqno >= at || self.vbucket.go_back(seqno).is_err() {
                self.vbucket.start_over(active.vbuuid());
            }
        }
        self.vbucket.failover = active.failover.clone();
        self.fetched = self.vbucket.high_seqno;
    }

    /// Puts what the active copy has above what was fetched into the inbox.
    fn fetch(&mut self, active: &VBucket) {
        if self.fetched != Seqno::ZERO && self.fetched < active.purge_seqno {
            // Deletions it never saw are gone: only a new copy is right.
            self.vbucket.start_over(active.vbuuid());
            self.vbucket.failover = active.failover.clone();
            self.forget_incoming();
        }
        if self.fetched < active.purge_seqno {
            // The active copy's memory may lack the deletions too, if it was a copy from disk.
            self.vbucket.purge_seqno = active.purge_seqno;
            let purged = active.collections.purged_up_to(active.purge_seqno);
            self.vbucket.collections.have_purged(&purged);
        }
        loop {
            match active.checkpoints.read(self.fetched) {
                MemoryRead::UpToDate => return,
                MemoryRead::Items { items, .. } => {
                    self.receive(items.iter().cloned().collect(), false);
                }
                MemoryRead::NeedsBackfill => {
                    let end = active.persisted_seqno;
                    if end <= self.fetched {
                        return;
                    }
                    self.vbucket.purge_seqno = active.purge_seqno;
                    let purged = active.collections.purged_up_to(end);
                    self.vbucket.collections.have_purged(&purged);
                    self.receive(active.disk.items_above(self.fetched).collect(), true);
                    self.vbucket.durable.catch_up(&active.durable, end);
                    if self.fetched < end {
                        self.inbox.push_back(Incoming::End(end));
                        self.fetched = end;
                    }
                }
            }
        }
    }

    /// Puts one snapshot into the inbox.
    fn receive(&mut self, items: Vec<Arc<Item>>, from_disk: bool) {
        let (Some(first), Some(last)) = (items.first(), items.last()) else {
            return;
        };
        let is_thinned = items.len() as u64 != last.seqno.0 - self.fetched.0;
        // The first snapshot begins before its first change, later ones at theirs; unless versions
        // are left out, without which the history is not the others' from there on.
        let begins_before = self.fetched == Seqno::ZERO || is_thinned;
        let start = if begins_before { self.fetched } else { first.seqno };
        self.fetched = last.seqno;
        let snapshot = Snapshot { start, end: last.seqno };
        self.inbox.push_back(Incoming::Marker { snapshot, is_thinned, from_disk });
        self.waiting += items.len() as u64;
        self.waiting_bytes += items.iter().map(|item| footprint(item)).sum::<usize>();
        self.inbox.extend(items.into_iter().map(Incoming::Change));
    }
}

/// The copies of one vBucket: the active one first, unless it is lost.
#[derive(Debug, Default)]
pub(crate) struct Copies(Vec<Copy>);

impl Copies {
    /// The copies of nodes that run.
    pub(super) fn running(&mut self) -> impl Iterator<Item = &mut Copy> {
        self.0.iter_mut().filter(|copy| copy.is_up)
    }

    /// Nodes of the copies, the active one's first.
    pub(crate) fn nodes(&self) -> Vec<usize> {
        self.0.iter().map(|copy| copy.node).collect()
    }

    pub(super) fn get(&self, index: usize) -> Option<&Copy> {
        self.0.get(index)
    }

    /// The vBucket of a copy that is there.
    pub(super) fn vbucket(&self, index: usize) -> &VBucket {
        &self.0[index].vbucket
    }

    pub(crate) fn get_mut(&mut self, index: usize) -> Option<&mut Copy> {
        self.0.get_mut(index)
    }

    /// Index of the active copy if its node runs.
    pub(super) fn active(&self) -> Option<usize> {
        let is_active = |copy: &&Copy| copy.is_up && copy.vbucket.state == VBucketState::Active;
        self.0.first().filter(is_active).map(|_| 0)
    }

    /// Changes the state of the active copy; one that was a replica becomes active on the branch
    /// `vbuuid`, in its open checkpoint if it `keeps_checkpoint`. `false` if there is no copy on a
    /// node that runs.
    pub(crate) fn set_state(
        &mut self,
        state: VBucketState,
        vbuuid: Vbuuid,
        keeps_checkpoint: bool,
    ) -> bool {
        let Some(Copy { vbucket, .. }) = self.0.first_mut().filter(|copy| copy.is_up) else {
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
        self.0.iter().position(|copy| copy.node == node && copy.is_up)
    }

    /// Lets the replicas receive what the active copy has.
    pub(crate) fn replicate(&mut self) {
        if self.active().is_none() {
            return;
        }
        if let Some((active, replicas)) = self.0.split_first_mut() {
            for replica in replicas {
                replica.follow(&active.vbucket, replica.lag);
            }
        }
    }

    /// Whether `majority` copies are there to make a write durable.
    pub(super) fn can_be_durable(&self, majority: usize) -> bool {
        self.0.len() >= majority
    }

    /// Whether a durable write waits for copies.
    pub(super) fn is_undecided(&self) -> bool {
        self.active().is_some_and(|active| self.0[active].vbucket.durable.undecided().is_some())
    }

    /// Commits the durable writes that enough copies have, and aborts those whose time is over;
    /// returns whether there were any.
    pub(super) fn settle(&mut self, majority: usize, now: Now) -> bool {
        let mut any = false;
        loop {
            let Some(active) = self.active().and_then(|active| self.0.get_mut(active)) else {
                return any;
            };
            let Some(write) = active.vbucket.durable.undecided() else {
                return any;
            };
            let commit = self.is_durable(&write, majority);
            let completed = (commit || now > write.deadline)
                && self.0.first_mut().is_some_and(|active| active.vbucket.complete_next(commit));
            if !completed {
                return any;
            }
            any = true;
            self.replicate();
        }
    }

    /// Whether enough copies have a write, on disk if it has to be. That hurries their flushers.
    fn is_durable(&mut self, write: &Undecided, majority: usize) -> bool {
        let Some((active, replicas)) = self.0.split_first_mut() else {
            return false;
        };
        let (on_active, on_replicas) = match write.level {
            DurabilityLevel::MAJORITY => (false, false),
            DurabilityLevel::MAJORITY_AND_PERSIST_ON_ACTIVE => (true, false),
            _ => (true, true),
        };
        let has = |vbucket: &mut VBucket, on_disk: bool| {
            if on_disk {
                vbucket.persist();
            }
            let seqno = if on_disk { vbucket.safe_seqno() } else { vbucket.high_seqno };
            seqno >= write.prepared
        };
        if !has(&mut active.vbucket, on_active) {
            return false;
        }
        let branch = active.vbucket.vbuuid();
        let have = replicas
            .iter_mut()
            .filter(|copy| copy.is_up && copy.vbucket.vbuuid() == branch)
            .filter_map(|copy| has(&mut copy.vbucket, on_replicas).then_some(()));
        1 + have.count() >= majority
    }

    /// Makes the first running replica the active copy after the active one's node failed, on the
    /// branch `vbuuid`; it has only what it received. If none runs the vBucket waits for the node
    /// of the first.
    fn promote(&mut self, vbuuid: Vbuuid) {
        if self.0.is_empty() {
            return;
        }
        let index = self.0.iter().position(|copy| copy.is_up).unwrap_or_default();
        let mut copy = self.0.remove(index);
        copy.forget_incoming();
        copy.vbucket.charge(true);
        copy.vbucket.promote(Some(vbuuid));
        self.0.insert(0, copy);
    }

    /// Drops all copies.
    pub(crate) fn clear(&mut self) {
        for copy in &mut self.0 {
            copy.vbucket.charge(false);
        }
        self.0.clear();
    }

    /// Drops the copy of a node, which leaves the cluster. Without
    /// `graceful` the active copy takes what was not replicated with it; otherwise the first
    /// running replica is given everything and goes on with the history.
    pub(crate) fn leave(&mut self, node: usize, graceful: bool, vbuuid: Vbuuid) {
        let Some(index) = self.0.iter().position(|copy| copy.node == node) else {
            return;
        };
        let successor = self.0.iter().find(|copy| copy.node != node && copy.is_up);
        if index == 0
            && graceful
            && let Some(to) = successor.map(|copy| copy.node)
        {
            self.hand_over(to);
        }
        let gone = self.0.iter().position(|copy| copy.node == node);
        let mut gone = gone.map(|at| (at, self.0.remove(at)));
        if let Some((_, copy)) = &mut gone {
            copy.vbucket.charge(false);
        }
        if gone.is_some_and(|(at, _)| at == 0) {
            self.promote(vbuuid);
        }
        self.replicate();
    }

    /// Gives the active role to a node, history and all, as a finished rebalance does. A node
    /// without a copy gets the active one itself.
    pub(crate) fn hand_over(&mut self, node: usize) {
        let Some(index) = self.0.iter().position(|copy| copy.node == node) else {
            if let Some(active) = self.0.first_mut() {
                active.node = node;
                active.is_up = true;
                active.vbucket.begin_life();
            }
            return;
        };
        let Some((active, replicas)) = self.0.split_first_mut() else {
            return;
        };
        let Some(successor) = index.checked_sub(1).and_then(|at| replicas.get_mut(at)) else {
            return;
        };
        successor.follow(&active.vbucket, 0);
        if successor.vbucket.vbuuid() != active.vbucket.vbuuid()
            || successor.vbucket.high_seqno != active.vbucket.high_seqno
        {
            // Replication was held: it is handed everything all the same.
            successor.agree(&active.vbucket);
            successor.follow(&active.vbucket, 0);
        }
        successor.vbucket.charge(true);
        successor.vbucket.promote(None);
        active.make_replica();
        let at = Snapshot { start: active.vbucket.high_seqno, end: active.vbucket.high_seqno };
        active.vbucket.snapshot = at;
        self.0.swap(0, index);
    }

    /// Puts a new copy behind the others.
    pub(crate) fn add_replica(&mut self, mut copy: Copy) {
        copy.make_replica();
        self.0.push(copy);
        self.replicate();
    }

    /// Drops the replica on a node.
    pub(crate) fn drop_replica(&mut self, node: usize) {
        let active = self.0.first().map(|copy| copy.node);
        self.0.retain(|copy| copy.node != node || Some(copy.node) == active);
    }

    /// Puts the replicas in the order of `nodes`.
    pub(crate) fn arrange(&mut self, nodes: &[usize]) {
        if let Some((_, replicas)) = self.0.split_first_mut() {
            replicas.sort_by_key(|copy| nodes.iter().position(|&node| node == copy.node));
        }
    }

    /// Makes a lost vBucket anew.
    pub(crate) fn set_active(&mut self, copy: Copy) {
        self.0.insert(0, copy);
    }

    /// The node stops at once: what is on its way to it is lost.
    pub(crate) fn stop(&mut self, node: usize) {
        for copy in self.0.iter_mut().filter(|copy| copy.node == node) {
            copy.is_up = false;
            copy.forget_incoming();
        }
    }

    /// The node comes back, with everything if it stopped in good order, else with what is on its
    /// disk; an active copy then goes on with the branch `vbuuid`.
    pub(crate) fn come_back(&mut self, node: usize, cleanly: bool, vbuuid: Vbuuid) {
        for copy in self.0.iter_mut().filter(|copy| copy.node == node) {
            copy.is_up = true;
            if cleanly {
                copy.vbucket.stop_cleanly(vbuuid);
            } else {
                copy.vbucket.recover(vbuuid);
            }
            copy.forget_incoming();
        }
        self.replicate();
    }
}
