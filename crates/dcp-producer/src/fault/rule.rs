//! What goes wrong and when.

use core::num::NonZeroU64;

use dcp_wire::{Opcode, Vbid};

use super::error::RuleError;
use super::reaction::{Direction, Reaction};

/// One fault: what happens to which packets.
///
/// Of the rules that are in force the first whose condition a packet meets reacts to it; the
/// others do not see the packet.
#[derive(Clone, Debug, PartialEq)]
pub struct Rule {
    /// Name to recognize it by; may be empty.
    pub name: String,
    /// Which packets.
    pub condition: Condition,
    /// What happens to them.
    pub reaction: Reaction,
}

impl Rule {
    /// A rule without a name.
    #[must_use]
    pub const fn new(condition: Condition, reaction: Reaction) -> Self {
        Self { name: String::new(), condition, reaction }
    }

    /// Which way the packets go that it is about.
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
        self.condition.check(&format!("{path}.condition"), 0)?;
        self.reaction.check(&format!("{path}.reaction"))
    }
}

/// Which packets a rule is about. What is left out does not matter; everything else must hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Condition {
    /// Opcodes, of which the packet has one; empty for any.
    pub opcodes: Vec<Opcode>,
    /// vBuckets, of which it is about one; empty for any. A response names none.
    pub vbuckets: Vec<Vbid>,
    /// The connection it is on.
    pub connection: Option<ConnectionIs>,
    /// The node it is to or from, numbered from 0.
    pub node: Option<usize>,
    /// Which way it goes; what suits the reaction if left out.
    pub direction: Option<Direction>,
    /// Conditions of which one must hold as well, if there are any. They count nothing.
    pub any: Vec<Self>,
    /// A condition that must not hold. It counts nothing.
    pub not: Option<Box<Self>>,
    /// Only the n-th packet, counted from 1 over all connections, that meets all of the above.
    pub nth: Option<NonZeroU64>,
    /// Only every n-th such packet.
    pub every: Option<NonZeroU64>,
    /// Only some of such packets.
    pub probability: Option<Probability>,
}

impl Condition {
    /// How deep conditions may lie in one another.
    const MAX_DEPTH: usize = 8;

    /// Packets with an opcode.
    #[must_use]
    pub fn opcode(opcode: Opcode) -> Self {
        Self { opcodes: vec![opcode], ..Self::default() }
    }

    /// This condition for the n-th packet only.
    #[must_use]
    pub const fn nth(mut self, n: NonZeroU64) -> Self {
        self.nth = Some(n);
        self
    }

    fn check(&self, path: &str, depth: usize) -> Result<(), RuleError> {
        if depth > Self::MAX_DEPTH {
            let expected = format!("at most {} conditions deep", Self::MAX_DEPTH);
            return Err(RuleError::invalid(path, expected));
        }
        let counts = self.nth.is_some() || self.every.is_some() || self.probability.is_some();
        if depth > 0 && (counts || self.direction.is_some()) {
            let expected = "without nth, every, probability and direction, which apply to the \
                            whole rule";
            return Err(RuleError::invalid(path, expected));
        }
        if self.probability.is_some_and(|chance| !(0.0..=1.0).contains(&chance.of)) {
            return Err(RuleError::invalid(format!("{path}.probability"), "a number from 0 to 1"));
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
    /// The one opened for DCP with this name. A `*` at the end stands for anything.
    Named(String),
}

/// A share of packets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Probability {
    /// From 0, none, to 1, all.
    pub of: f64,
    /// Which of them: the same seed on the same packets of the n-th connection chooses the same.
    pub seed: u64,
}
