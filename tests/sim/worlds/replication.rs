//! Faults of the connections over which nodes feed replicas.

use core::num::NonZeroU32;
use std::time::Duration;

use dcp_producer::{Condition, Reaction, Rule};
use dcp_wire::Vbid;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;

use crate::plan::Kind;
use crate::run::Run;

/// Nodes a cluster has at most.
const NODES: usize = 8;
/// Flow-control windows, in bytes, from one that is full after each change.
const WINDOWS: [u32; 3] = [1, 300, 5000];

impl Run {
    /// Disturbs replication between two groups of nodes for a while.
    pub(crate) fn disturb_replication(&self, kind: Kind, rng: &mut StdRng) -> String {
        let mut nodes: Vec<usize> = (0..NODES).collect();
        // Each group has a node of the cluster as it is now.
        let members = self.shared.world.borrow().producer.num_nodes().max(2);
        nodes[..members].shuffle(rng);
        let others = nodes.split_off(rng.random_range(1..members));
        let mut condition = Condition::between([nodes.clone(), others]);
        let one_way = rng.random_bool(0.5);
        if one_way {
            condition.from = nodes;
        }
        if rng.random_bool(0.3) {
            let vbuckets = (0..self.plan.vbuckets).map(Vbid);
            condition.vbuckets = vbuckets.filter(|_| rng.random_bool(0.5)).collect();
        }
        let reaction = match kind {
            Kind::ReplicationCut => Reaction::Disconnect,
            Kind::ReplicationSilent => Reaction::HalfOpen,
            Kind::ReplicationLag => Reaction::Lag(rng.random_range(1..20)),
            _ => {
                let bytes = WINDOWS[rng.random_range(0..WINDOWS.len())];
                Reaction::Window(NonZeroU32::new(bytes).unwrap_or(NonZeroU32::MIN))
            }
        };
        let lasts = Duration::from_millis(match rng.random_bool(0.5) {
            true => rng.random_range(10..1000),
            false => rng.random_range(1000..60_000),
        });
        let rule = Rule::new(condition, reaction);
        let told = format!("{rule:?} for {lasts:?}");
        let mut world = self.shared.world.borrow_mut();
        let index = world.producer.fault_counts().len();
        world.add_rules(vec![rule], lasts);
        let met = world.producer.fault_counts().get(index).copied().unwrap_or_default();
        self.shared.count(format!("{kind:?} of a connection: {}", met > 0));
        format!("{told}, {met} connections")
    }
}
