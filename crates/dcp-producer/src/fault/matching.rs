//! Matching of packets and conditions.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dcp_wire::{Frame, Vbid};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::reaction::{Direction, Reaction};
use super::registry::Armed;
use super::rule::{Condition, ConnectionIs};

/// Properties of a connection that conditions refer to.
#[derive(Debug)]
pub(super) struct ConnectionFacts {
    pub(super) number: u64,
    pub(super) node: usize,
    /// Its name once it is opened for DCP.
    pub(super) name: Option<Vec<u8>>,
}

impl Condition {
    /// Whether everything but the counts holds.
    fn holds(&self, frame: &Frame<'_>, connection: &ConnectionFacts) -> bool {
        let header = &frame.header;
        let about = |vbuckets: &[Vbid]| {
            !header.magic.is_response() && vbuckets.contains(&Vbid(header.vbid_or_status))
        };
        (self.opcodes.is_empty() || self.opcodes.contains(&header.opcode))
            && (self.vbuckets.is_empty() || about(&self.vbuckets))
            && self.node.is_none_or(|node| node == connection.node)
            && self.connection.as_ref().is_none_or(|wanted| wanted.is(connection))
            && (self.any.is_empty() || self.any.iter().any(|any| any.holds(frame, connection)))
            && !self.not.as_ref().is_some_and(|not| not.holds(frame, connection))
    }
}

impl ConnectionIs {
    fn is(&self, connection: &ConnectionFacts) -> bool {
        match (self, &connection.name) {
            (Self::Nth(number), _) => *number == connection.number,
            (Self::Named(_), None) => false,
            (Self::Named(wanted), Some(name)) => match wanted.strip_suffix('*') {
                Some(start) => name.starts_with(start.as_bytes()),
                None => name == wanted.as_bytes(),
            },
        }
    }
}

/// A rule on one connection.
#[derive(Debug)]
pub(super) struct Asked {
    armed: Arc<Armed>,
    /// Random numbers of this connection, independent of other connections.
    random: StdRng,
}

impl Asked {
    pub(super) fn new(armed: Arc<Armed>, connection: u64) -> Self {
        let seed = armed.rule.condition.probability.map_or(0, |chance| chance.seed);
        // Connections with the same seed differ: odd multiples of a number do not repeat.
        let seed = seed ^ connection.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Self { armed, random: StdRng::seed_from_u64(seed) }
    }

    /// The reaction to a packet, if there is one.
    pub(super) fn reaction(
        &mut self,
        direction: Direction,
        frame: &Frame<'_>,
        connection: &ConnectionFacts,
    ) -> Option<Reaction> {
        let rule = &self.armed.rule;
        let reaction = rule.reaction;
        let suits = |opcodes: &[_]| opcodes.contains(&frame.header.opcode);
        // A response has the opcode of its request, which is what these reactions refer to.
        let response = frame.header.magic.is_response();
        if rule.direction() != direction
            || !reaction.opcodes().is_none_or(|opcodes| suits(opcodes) && !response)
            || !rule.condition.holds(frame, connection)
        {
            return None;
        }
        let count = self.armed.met.fetch_add(1, Ordering::Relaxed) + 1;
        let condition = &rule.condition;
        let counted = condition.nth.is_none_or(|nth| nth.get() == count)
            && condition.every.is_none_or(|every| count % every == 0);
        let chance = condition.probability;
        // Drawn regardless of the counts, so that a draw depends only on the packet.
        let drawn = chance.is_none_or(|chance| self.random.random_bool(chance.of));
        if !(counted && drawn) {
            return None;
        }
        self.armed.fired.fetch_add(1, Ordering::Relaxed);
        Some(reaction)
    }

    /// A number below `end`, which is not 0.
    pub(super) fn draw(&mut self, end: usize) -> usize {
        self.random.random_range(0..end)
    }
}
