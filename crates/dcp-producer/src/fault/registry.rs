//! The rules of a cluster, and how often each fired.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::watch;

use super::error::RuleError;
use super::reaction::Reaction;
use super::rule::{Condition, Rule};
use crate::bucket::{LinkEffect, LinkFault, LinkFaults};

/// A rule in force.
#[derive(Debug)]
pub(super) struct Armed {
    pub(super) rule: Rule,
    /// Packets that matched everything but the count.
    pub(super) met: AtomicU64,
    /// Packets it reacted to.
    pub(super) fired: Arc<AtomicU64>,
}

/// The rules in force, in the order in which they are checked.
pub(super) type Rules = Arc<[Arc<Armed>]>;

/// The rules of a cluster.
#[derive(Debug)]
pub(crate) struct Faults {
    rules: watch::Sender<Rules>,
    connections: AtomicU64,
}

impl Default for Faults {
    fn default() -> Self {
        Self { rules: watch::Sender::new(Arc::new([])), connections: AtomicU64::new(0) }
    }
}

impl Faults {
    /// Most rules: each is checked for each packet.
    const MAX_RULES: usize = 1000;

    /// Replaces all rules and resets counts.
    pub(crate) fn set(&self, rules: Vec<Rule>) -> Result<(), RuleError> {
        if rules.len() > Self::MAX_RULES {
            let expected = format!("at most {} rules", Self::MAX_RULES);
            return Err(RuleError::invalid("rules", expected));
        }
        for (index, rule) in rules.iter().enumerate() {
            rule.check(&format!("[{index}]"))?;
        }
        let armed = |rule| Arc::new(Armed { rule, met: AtomicU64::new(0), fired: Arc::default() });
        self.rules.send_replace(rules.into_iter().map(armed).collect());
        Ok(())
    }

    /// The faults of connections between nodes.
    pub(crate) fn of_links(&self) -> LinkFaults {
        let fault = |armed: &Arc<Armed>| {
            let Rule { condition: Condition { between, from, vbuckets, .. }, reaction, .. } =
                &armed.rule;
            let effect = match *reaction {
                _ if between.is_empty() => return None,
                Reaction::Disconnect => LinkEffect::Close,
                Reaction::HalfOpen => LinkEffect::Stall,
                Reaction::Lag(changes) => LinkEffect::Lag(changes),
                Reaction::Window(bytes) => LinkEffect::Window(bytes.get()),
                _ => return None,
            };
            let (between, from, vbuckets) = (between.clone(), from.clone(), vbuckets.clone());
            Some(LinkFault { between, from, vbuckets, effect, fired: Arc::clone(&armed.fired) })
        };
        LinkFaults::new(self.rules.borrow().iter().filter_map(fault).collect())
    }

    /// The rules in force.
    pub(crate) fn rules(&self) -> Vec<Rule> {
        self.rules.borrow().iter().map(|armed| armed.rule.clone()).collect()
    }

    /// How often each rule fired, in their order.
    pub(crate) fn counts(&self) -> Vec<u64> {
        self.rules.borrow().iter().map(|armed| armed.fired.load(Ordering::Relaxed)).collect()
    }

    pub(super) fn follow(&self) -> watch::Receiver<Rules> {
        let mut rules = self.rules.subscribe();
        // A new connection has not seen the current rules.
        rules.mark_changed();
        rules
    }

    /// The number of a new connection, from 1.
    pub(super) fn number_connection(&self) -> u64 {
        self.connections.fetch_add(1, Ordering::Relaxed) + 1
    }
}
