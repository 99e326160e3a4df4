//! Fault rules and their conditions.

use core::num::NonZeroU64;

use dcp_wire::{Opcode, Vbid};

use super::error::RuleError;
use super::reaction::{Direction, Reaction};

/// One fault: what happens to which packets.
///
/// The first rule in force whose condition matches a packet reacts to it; the others do not see the
/// packet.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Name for identification; may be empty.
    pub name: String,
    /// Which packets.
    pub condition: Condition,
    /// What happens to the packets.
    pub reaction: Reaction,
}

impl Rule {
    /// A rule without a name.
    #[must_use]
    pub const fn new(condition: Condition, reaction: Reaction) -> Self {
        Self { name: String::new(), condition, reaction }
    }

    /// Direction of the packets it applies to.
    #[must_use]
    pub fn direction(&self) -> Direction {
        self.condition.direction.unwrap_or_else(|| self.reaction.direction())
    }

    /// Checks that condition and reaction go together.
    pub(super) fn check(&self, path: &str) -> Result<(), RuleError> {
        let direction = self.reaction.direction();
        if self.direction() != direction && !self.reaction.goes_both_ways() {
            let expected = format!("{:?} for this reaction", direction.name());
            return Err(RuleError::invalid(format!("{path}.condition.direction"), expected));
        }
        if !self.condition.between.is_empty() && !self.reaction.is_between_nodes() {
            let expected = "disconnect, half_open, lag or window with between";
            return Err(RuleError::invalid(format!("{path}.reaction"), expected));
        }
        if self.condition.between.is_empty() && self.reaction.is_only_between_nodes() {
            let expected = "with between for this reaction";
            return Err(RuleError::invalid(format!("{path}.condition"), expected));
        }
        self.condition.check(&format!("{path}.condition"), 0)?;
        self.reaction.check(&format!("{path}.reaction"))
    }
}

/// Which packets a rule applies to: all given properties must match.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Condition {
    /// The packet has one of these opcodes; empty for any.
    pub opcodes: Vec<Opcode>,
    /// The packet is about one of these vBuckets; empty for any. Responses name none.
    pub vbuckets: Vec<Vbid>,
    /// Connection of the packet.
    pub connection: Option<ConnectionIs>,
    /// Node of the packet, numbered from 0.
    pub node: Option<usize>,
    /// Groups of nodes. With them, the rule is about the DCP connections over which nodes of different
    /// groups feed replicas; without, about clients.
    pub between: Vec<Vec<usize>>,
    /// Only packets that these nodes send to other nodes; empty for both directions.
    pub from: Vec<usize>,
    /// Direction of the packet; by default that of the reaction.
    pub direction: Option<Direction>,
    /// Conditions of which at least one must match as well, if there are any. They have no counts.
    pub any: Vec<Self>,
    /// A condition that must not match. It has no counts.
    pub not: Option<Box<Self>>,
    /// Only the n-th packet, counted from 1 over all connections, that meets all of the above.
    pub nth: Option<NonZeroU64>,
    /// Only every n-th such packet.
    pub every: Option<NonZeroU64>,
    /// Only some of such packets.
    pub probability: Option<Probability>,
}

impl Condition {
    /// How deep conditions may be nested.
    const MAX_DEPTH: usize = 8;

    /// Packets with an opcode.
    #[must_use]
    pub fn opcode(opcode: Opcode) -> Self {
        Self { opcodes: vec![opcode], ..Self::default() }
    }

    /// Replication between nodes of different groups.
    #[must_use]
    pub fn between(groups: impl IntoIterator<Item = Vec<usize>>) -> Self {
        Self { between: groups.into_iter().collect(), ..Self::default() }
    }

    /// This condition for packets that a node sends to other nodes.
    #[must_use]
    pub fn from(mut self, node: usize) -> Self {
        self.from.push(node);
        self
    }

    /// This condition for the n-th packet only.
    #[must_use]
    pub const fn nth(mut self, n: NonZeroU64) -> Self {
        self.nth = Some(n);
        self
    }

    /// Checks a condition about connections between nodes.
    fn check_between(&self, path: &str) -> Result<(), RuleError> {
        let alone = Self {
            between: self.between.clone(),
            from: self.from.clone(),
            vbuckets: self.vbuckets.clone(),
            ..Self::default()
        };
        if *self != alone {
            let expected = "without members other than from and vbucket beside between";
            return Err(RuleError::invalid(path, expected));
        }
        let mut nodes: Vec<_> = self.between.iter().flatten().collect();
        nodes.sort_unstable();
        let once = nodes.windows(2).all(|pair| pair[0] != pair[1]);
        if self.between.len() < 2 || self.between.iter().any(Vec::is_empty) || !once {
            let expected = "two or more groups of nodes, each node in one of them";
            return Err(RuleError::invalid(format!("{path}.between"), expected));
        }
        Ok(())
    }

    fn check(&self, path: &str, depth: usize) -> Result<(), RuleError> {
        if depth > Self::MAX_DEPTH {
            let expected = format!("at most {} conditions deep", Self::MAX_DEPTH);
            return Err(RuleError::invalid(path, expected));
        }
        let counts = self.nth.is_some() || self.every.is_some() || self.probability.is_some();
        if depth > 0 && (counts || self.direction.is_some() || !self.between.is_empty()) {
            let expected = "without nth, every, probability, direction and between, which apply to \
                            the whole rule";
            return Err(RuleError::invalid(path, expected));
        }
        if self.probability.is_some_and(|chance| !(0.0..=1.0).contains(&chance.of)) {
            return Err(RuleError::invalid(format!("{path}.probability"), "a number from 0 to 1"));
        }
        if !self.between.is_empty() {
            return self.check_between(path);
        }
        if !self.from.is_empty() {
            return Err(RuleError::invalid(format!("{path}.from"), "left out without between"));
        }
        for (index, condition) in self.any.iter().enumerate() {
            condition.check(&format!("{path}.any[{index}]"), depth + 1)?;
        }
        match &self.not {
            Some(condition) => condition.check(&format!("{path}.not"), depth + 1),
            None => Ok(()),
        }
    }
}

/// Which connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionIs {
    /// The n-th that the cluster accepted, counted from 1.
    Nth(u64),
    /// The one opened for DCP with this name. A `*` at the end matches anything.
    Named(String),
}

/// A fraction of packets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probability {
    /// From 0, none, to 1, all.
    pub of: f64,
    /// Seed of the choice: the same seed chooses the same packets of the n-th connection.
    pub seed: u64,
}
