//! The watch of persistence: what all copies of vBuckets have persisted, and when nodes are asked.
//!
//! Observed once for each vBucket whose stream is opened, so that persisted changes need not wait,
//! and then only for those with unpersisted changes; for each node in one request and at its own
//! pace, so that a slow node delays only vBuckets of which it has a copy.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use dcp_proto::topology::Address;
use dcp_wire::{Seqno, Vbid, Vbuuid};

use super::log::PERSISTENCE;
use crate::connect::ConnectionId;
use crate::driver::PersistedTo;
use crate::observe::{Answer, on_all_disks};
use crate::{Chain, Error};

/// Shortest pause between two requests to a node, while unpersisted changes are being written.
const SHORTEST: Duration = Duration::from_millis(10);

/// Longest pause, after a while without progress.
const LONGEST: Duration = Duration::from_secs(1);

/// How long changes may stay unpersisted although the active copy has left their branch. The server
/// ends the stream of such a vBucket by itself, unless it has already ended it at its end.
const LEFT_BEHIND: Duration = Duration::from_secs(1);

/// How long changes may stay unpersisted before an event reports it.
const OVERDUE: Duration = Duration::from_secs(60);

/// A vBucket whose stream is open.
#[derive(Debug)]
struct Watched {
    on: ConnectionId,
    /// Newest branch of its stream.
    vbuuid: Vbuuid,
    /// Addresses of the present copies; `None` for a node without an address.
    copies: Vec<Option<Address>>,
    answers: Vec<Answer>,
    /// Which copies to observe even if no changes are unpersisted: those that have not answered
    /// since the stream was opened, or the map changed.
    unheard: Vec<bool>,
    /// The last seqno passed on to the connection.
    persisted_to: Seqno,
    /// Since when changes are unpersisted; `None` if none are.
    since: Option<Instant>,
    /// Whether an event has reported that this takes too long.
    is_overdue: bool,
}

impl Watched {
    /// Seqno that every copy has persisted.
    fn persisted(&self) -> Seqno {
        on_all_disks(self.vbuuid, self.answers.iter().copied())
    }

    /// Whether changes are unpersisted because copies have diverged: one of them is on another branch
    /// than the stream, or does not know that one yet.
    fn is_diverged(&self) -> bool {
        let differs = |(vbuuid, _): &(Vbuuid, Seqno)| *vbuuid != self.vbuuid;
        self.since.is_some() && self.answers.iter().flatten().any(differs)
    }

    /// The new persisted seqno, if the connection does not know it yet.
    fn advance(&mut self, vbid: Vbid) -> Option<PersistedTo> {
        let seqno = self.persisted();
        if seqno == self.persisted_to {
            return None;
        }
        self.persisted_to = seqno;
        Some(PersistedTo { on: self.on, vbid, vbuuid: self.vbuuid, seqno })
    }
}

/// When a node is observed next.
#[derive(Debug)]
struct Node {
    due: Instant,
    pause: Duration,
    /// Whether a request is in progress.
    is_asked: bool,
}

/// What a node is asked about: vBuckets and their branches.
pub(super) type Branches = Vec<(Vbid, Vbuuid)>;

/// Result of a request to a node.
#[derive(Debug)]
pub(super) enum Polled {
    /// The node answered about its copies.
    Answers { answers: Vec<(Vbid, Answer)>, is_map_old: bool },
    /// The node could not be reached; a retry may help.
    Lost(Error),
    /// The node refuses such requests.
    Refused(Error),
}

impl Polled {
    /// Whether the map may be old: a copy is not where it should be, or its node has gone.
    pub(super) const fn is_map_doubtful(&self) -> bool {
        match self {
            Self::Answers { is_map_old, .. } => *is_map_old,
            Self::Lost(_) => true,
            Self::Refused(_) => false,
        }
    }
}

/// Persisted seqnos of all copies of all vBuckets.
#[derive(Debug, Default)]
pub(super) struct PersistenceWatch {
    vbuckets: BTreeMap<Vbid, Watched>,
    nodes: BTreeMap<Address, Node>,
    /// Whether any node has reported persisted seqnos.
    has_answered: bool,
    /// Since when nodes have refused to, without an answer in between.
    refused_since: Option<Instant>,
}

impl PersistenceWatch {
    /// The stream of a vBucket is open on this connection and branch.
    pub(super) fn watch(
        &mut self,
        vbid: Vbid,
        (on, vbuuid): (ConnectionId, Vbuuid),
        copies: Vec<Option<Address>>,
        now: Instant,
    ) {
        self.ask_soon(&copies, now);
        let answers = vec![None; copies.len()];
        let unheard = copies.iter().map(Option::is_some).collect();
        let (persisted_to, since) = (Seqno::ZERO, None);
        let is_overdue = false;
        let watched =
            Watched { on, vbuuid, copies, answers, unheard, persisted_to, since, is_overdue };
        self.vbuckets.insert(vbid, watched);
    }

    /// A vBucket has unpersisted changes; its stream is on this connection and branch.
    pub(super) fn unpersisted(
        &mut self,
        vbid: Vbid,
        (on, vbuuid): (ConnectionId, Vbuuid),
        copies: Vec<Option<Address>>,
        now: Instant,
    ) {
        let is_watched = self.vbuckets.get(&vbid).is_some_and(|watched| {
            (watched.on, watched.vbuuid) == (on, vbuuid) && watched.copies == copies
        });
        if is_watched {
            self.ask_soon(&copies, now);
        } else {
            self.watch(vbid, (on, vbuuid), copies, now);
        }
        if let Some(watched) = self.vbuckets.get_mut(&vbid) {
            watched.since.get_or_insert(now);
        }
    }

    /// Resets the pause of nodes that were observed rarely because nothing changed.
    fn ask_soon(&mut self, copies: &[Option<Address>], now: Instant) {
        for address in copies.iter().flatten() {
            let new = Node { due: now, pause: SHORTEST, is_asked: false };
            let node = self.nodes.entry(address.clone()).or_insert(new);
            node.pause = SHORTEST;
            node.due = node.due.min(now + SHORTEST);
        }
    }

    /// Every change of a vBucket is persisted.
    pub(super) fn all_persisted(&mut self, vbid: Vbid, on: ConnectionId) {
        if let Some(watched) = self.vbuckets.get_mut(&vbid).filter(|watched| watched.on == on) {
            watched.since = None;
            watched.is_overdue = false;
        }
    }

    /// A vBucket's stream ended.
    pub(super) fn forget(&mut self, vbid: Vbid, on: ConnectionId) {
        if self.vbuckets.get(&vbid).is_some_and(|watched| watched.on == on) {
            self.vbuckets.remove(&vbid);
        }
    }

    /// A connection ended, and all streams on it.
    pub(super) fn forget_all(&mut self, on: ConnectionId) {
        self.vbuckets.retain(|_, watched| watched.on != on);
    }

    /// The cluster map has changed: resets vBuckets whose copies have changed.
    pub(super) fn follow(
        &mut self,
        copies_of: impl Fn(Vbid) -> Vec<Option<Address>>,
        now: Instant,
    ) -> Vec<PersistedTo> {
        let mut advanced = Vec::new();
        for (&vbid, watched) in &mut self.vbuckets {
            let copies = copies_of(vbid);
            if copies == watched.copies {
                continue;
            }
            watched.answers = vec![None; copies.len()];
            watched.unheard = copies.iter().map(Option::is_some).collect();
            watched.copies = copies;
            advanced.extend(watched.advance(vbid));
            for address in watched.copies.iter().flatten() {
                let new = Node { due: now, pause: SHORTEST, is_asked: false };
                let node = self.nodes.entry(address.clone()).or_insert(new);
                (node.due, node.pause) = (now, SHORTEST);
            }
        }
        let vbuckets = &self.vbuckets;
        self.nodes.retain(|address, _| {
            vbuckets.values().any(|watched| watched.copies.iter().flatten().any(|a| a == address))
        });
        advanced
    }

    /// Whether a node has a copy of some vBucket that is watched.
    pub(super) fn needs(&self, address: &Address) -> bool {
        self.nodes.contains_key(address)
    }

    /// The requests that are due, by node. Each must be [answered](Self::answered).
    pub(super) fn due(&mut self, now: Instant) -> Vec<(Address, Branches)> {
        let mut requests = Vec::new();
        for (address, node) in &mut self.nodes {
            if node.is_asked || node.due > now {
                continue;
            }
            let branches: Branches = concerning(&self.vbuckets, address).collect();
            if !branches.is_empty() {
                node.is_asked = true;
                requests.push((address.clone(), branches));
            }
        }
        requests
    }

    /// When the next request is due.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let waits = |address: &Address| concerning(&self.vbuckets, address).next().is_some();
        let idle = self.nodes.iter().filter(|(_, node)| !node.is_asked);
        idle.filter(|(address, _)| waits(address)).map(|(_, node)| node.due).min()
    }

    /// Handles the result of a request. Refusals are tolerated until `retry_timeout` if any node has
    /// answered before: as with streams, it may answer again.
    ///
    /// # Errors
    /// The refusal that ends the stream.
    pub(super) fn polled(
        &mut self,
        address: &Address,
        polled: Polled,
        retry_timeout: Duration,
        now: Instant,
    ) -> Result<Vec<PersistedTo>, Error> {
        match polled {
            Polled::Answers { answers, .. } => {
                (self.has_answered, self.refused_since) = (true, None);
                return Ok(self.answered(address, Some(&answers), now));
            }
            Polled::Lost(error) => {
                let error = Chain(&error);
                tracing::debug!(target: PERSISTENCE, node = %address, %error,
                    "a node did not report its persisted seqnos");
            }
            Polled::Refused(error) => {
                let since = *self.refused_since.get_or_insert(now);
                let refused = now.saturating_duration_since(since);
                if !self.has_answered || refused >= retry_timeout {
                    return Err(error);
                }
                let error = Chain(&error);
                tracing::warn!(name: "persistence_refused", target: PERSISTENCE, node = %address, %error,
                    "a node refuses to report its persisted seqnos");
            }
        }
        Ok(self.answered(address, None, now))
    }

    /// Handles a node's answer; without one, the state of its copies is unknown.
    fn answered(
        &mut self,
        address: &Address,
        answers: Option<&[(Vbid, Answer)]>,
        now: Instant,
    ) -> Vec<PersistedTo> {
        let (mut advanced, mut has_moved) = (Vec::new(), false);
        let mut take = |vbid: Vbid, watched: &mut Watched, answer: Answer| {
            let known = watched.answers.iter_mut().zip(&mut watched.unheard);
            let mut copies = watched.copies.iter().zip(known);
            if let Some((_, (slot, is_unheard))) =
                copies.find(|(copy, _)| copy.as_ref() == Some(address))
            {
                has_moved |= *slot != answer && answer.is_some();
                (*slot, *is_unheard) = (answer, false);
                advanced.extend(watched.advance(vbid));
            }
        };
        match answers {
            Some(answers) => {
                for &(vbid, answer) in answers {
                    if let Some(watched) = self.vbuckets.get_mut(&vbid) {
                        take(vbid, watched, answer);
                    }
                }
            }
            None => {
                for (&vbid, watched) in &mut self.vbuckets {
                    take(vbid, watched, None);
                }
            }
        }
        if let Some(node) = self.nodes.get_mut(address) {
            node.is_asked = false;
            node.pause = match answers {
                Some(_) if has_moved => SHORTEST,
                Some(_) => (node.pause * 2).min(LONGEST),
                None => LONGEST,
            };
            node.due = now + node.pause;
        }
        advanced
    }

    /// Seqno that all copies of a vBucket have persisted; `None` if it is not watched.
    pub(super) fn persisted(&self, vbid: Vbid) -> Option<Seqno> {
        Some(self.vbuckets.get(&vbid)?.persisted_to)
    }

    /// Since when a vBucket has unpersisted changes, if it has, and whether its copies have diverged.
    pub(super) fn unpersisted_since(&self, vbid: Vbid) -> (Option<Instant>, bool) {
        let watched = self.vbuckets.get(&vbid);
        watched.map_or((None, false), |watched| (watched.since, watched.is_diverged()))
    }

    /// vBuckets whose active copy has left the branch of unpersisted changes, so that these will
    /// never be persisted, and their connections. They are removed: their streams must be reopened.
    pub(super) fn left_behind(&mut self, now: Instant) -> Vec<(Vbid, ConnectionId)> {
        let left_behind = |(&vbid, watched): (&Vbid, &Watched)| {
            let waits = now.saturating_duration_since(watched.since?);
            let (vbuuid, _) = watched.answers.first().copied().flatten()?;
            let is_left = waits >= LEFT_BEHIND && vbuuid != watched.vbuuid;
            is_left.then_some((vbid, watched.on))
        };
        let removed: Vec<_> = self.vbuckets.iter().filter_map(left_behind).collect();
        for (vbid, _) in &removed {
            self.vbuckets.remove(vbid);
        }
        removed
    }

    /// vBuckets whose changes stay unpersisted for too long, once each, and for how long.
    pub(super) fn overdue(&mut self, now: Instant) -> Vec<(Vbid, Duration)> {
        let overdue = |(&vbid, watched): (&Vbid, &mut Watched)| {
            let waits = now.saturating_duration_since(watched.since?);
            let is_new = waits >= OVERDUE && !watched.is_overdue;
            watched.is_overdue |= is_new;
            is_new.then_some((vbid, waits))
        };
        self.vbuckets.iter_mut().filter_map(overdue).collect()
    }
}

/// The request to a node: vBuckets with a copy there that have unpersisted changes, or whose copy
/// has not answered yet.
fn concerning<'a>(
    vbuckets: &'a BTreeMap<Vbid, Watched>,
    address: &'a Address,
) -> impl Iterator<Item = (Vbid, Vbuuid)> + 'a {
    let concerns = move |watched: &Watched| {
        let mut copies = watched.copies.iter().zip(&watched.unheard);
        copies.any(|(copy, &is_unheard)| {
            copy.as_ref() == Some(address) && (is_unheard || watched.since.is_some())
        })
    };
    let waiting = vbuckets.iter().filter(move |(_, watched)| concerns(watched));
    waiting.map(|(&vbid, watched)| (vbid, watched.vbuuid))
}

#[cfg(test)]
mod tests;
