//! Faults of the connections between nodes, over which replicas are fed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dcp_wire::Vbid;

/// What a fault does to a connection between two nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkEffect {
    /// It is closed and cannot be opened.
    Close,
    /// Its packets wait.
    Stall,
    /// The replica leaves this many changes unapplied.
    Lag(u64),
    /// The flow-control window, in bytes.
    Window(u32),
}

/// A fault of connections between nodes.
#[derive(Clone, Debug)]
pub(crate) struct LinkFault {
    /// Groups of nodes: connections between nodes of different groups are affected.
    pub(crate) between: Vec<Vec<usize>>,
    /// Nodes whose packets are affected; empty for all.
    pub(crate) from: Vec<usize>,
    /// vBuckets affected; empty for all.
    pub(crate) vbuckets: Vec<Vbid>,
    pub(crate) effect: LinkEffect,
    /// Connections affected so far.
    pub(crate) fired: Arc<AtomicU64>,
}

impl LinkFault {
    fn separates(&self, one: usize, other: usize) -> bool {
        let group = |node| self.between.iter().position(|group| group.contains(&node));
        group(one).zip(group(other)).is_some_and(|(one, other)| one != other)
    }

    /// Whether it affects packets that `from` sends to `to`.
    fn affects(&self, from: usize, to: usize, vbid: Vbid) -> bool {
        self.separates(from, to)
            && (self.from.is_empty() || self.from.contains(&from))
            && (self.vbuckets.is_empty() || self.vbuckets.contains(&vbid))
    }
}

/// The faults of all connections between nodes.
#[derive(Clone, Debug, Default)]
pub(crate) struct LinkFaults(Vec<LinkFault>);

impl LinkFaults {
    pub(crate) const fn new(faults: Vec<LinkFault>) -> Self {
        Self(faults)
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Two of `nodes` that cannot exchange all their packets.
    pub(crate) fn cut_among(&self, nodes: &[usize]) -> Option<(usize, usize)> {
        let is_cut = |one, other| {
            let cuts = |fault: &LinkFault| {
                matches!(fault.effect, LinkEffect::Close | LinkEffect::Stall)
                    && fault.separates(one, other)
            };
            self.0.iter().any(cuts)
        };
        let others = |&one: &usize| nodes.iter().map(move |&other| (one, other));
        nodes.iter().flat_map(others).find(|&(one, other)| is_cut(one, other))
    }

    /// The faults of the connection that feeds a vBucket's replica. Of those with the same effect,
    /// the first counts.
    pub(super) fn of(&self, active: usize, replica: usize, vbid: Vbid) -> LinkState {
        let mut state = LinkState::default();
        for (index, fault) in self.0.iter().enumerate() {
            let to_replica = fault.affects(active, replica, vbid);
            let to_active = fault.affects(replica, active, vbid);
            match fault.effect {
                // A connection needs both directions.
                LinkEffect::Close if to_replica || to_active => {
                    state.closed_by.get_or_insert(index);
                }
                LinkEffect::Stall => {
                    if to_replica {
                        state.to_replica_stalled_by.get_or_insert(index);
                    }
                    if to_active {
                        state.to_active_stalled_by.get_or_insert(index);
                    }
                }
                LinkEffect::Lag(changes) if to_replica => {
                    state.lag.get_or_insert((index, changes));
                }
                LinkEffect::Window(bytes) if to_replica => {
                    state.window.get_or_insert((index, bytes));
                }
                _ => {}
            }
        }
        state
    }

    /// Counts the faults of a connection in `now` that were not in `before`.
    pub(super) fn count(&self, before: &LinkState, now: &LinkState) {
        for index in now.faults().filter(|&index| before.faults().all(|known| known != index)) {
            if let Some(fault) = self.0.get(index) {
                fault.fired.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// The faults of one connection, with their positions among all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LinkState {
    closed_by: Option<usize>,
    to_replica_stalled_by: Option<usize>,
    to_active_stalled_by: Option<usize>,
    lag: Option<(usize, u64)>,
    window: Option<(usize, u32)>,
}

impl LinkState {
    pub(super) const NONE: Self = Self {
        closed_by: None,
        to_replica_stalled_by: None,
        to_active_stalled_by: None,
        lag: None,
        window: None,
    };

    /// Positions of the faults, each once.
    fn faults(&self) -> impl Iterator<Item = usize> {
        let to_active = self.to_active_stalled_by;
        let to_active = to_active.filter(|_| to_active != self.to_replica_stalled_by);
        let (lag, window) = (self.lag.map(|(at, _)| at), self.window.map(|(at, _)| at));
        [self.closed_by, self.to_replica_stalled_by, to_active, lag, window].into_iter().flatten()
    }

    pub(super) const fn is_closed(&self) -> bool {
        self.closed_by.is_some()
    }

    /// Whether packets to the replica wait.
    pub(super) const fn stalls_changes(&self) -> bool {
        self.to_replica_stalled_by.is_some()
    }

    /// Whether packets to the active copy wait.
    pub(super) const fn stalls_answers(&self) -> bool {
        self.to_active_stalled_by.is_some()
    }

    /// Changes the replica leaves unapplied.
    pub(super) fn lag(&self) -> u64 {
        self.lag.map_or(0, |(_, changes)| changes)
    }

    /// The flow-control window, if it is not the usual one.
    pub(super) fn window(&self) -> Option<u32> {
        self.window.map(|(_, bytes)| bytes)
    }
}
