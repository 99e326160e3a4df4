//! The nodes of a stream and their connections.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use dcp_proto::topology::Address;
use rand::Rng;
use rand::seq::IteratorRandom;
use tokio::sync::mpsc;

use super::backlog::Backlog;
use super::log::CLUSTER;
use super::placement::SETTLED;
use crate::connect::ConnectionId;
use crate::driver::{Command, PersistedTo};
use crate::queue::SharedState;
use crate::retry::Backoff;
use crate::{Chain, Error};

/// A connection in use.
pub(super) struct Up {
    pub(super) id: ConnectionId,
    shared: Arc<SharedState>,
    commands: mpsc::UnboundedSender<Command>,
}

impl Up {
    /// Sends a command to the connection's task.
    ///
    /// # Errors
    /// The command, if the task has ended; it reports that itself.
    pub(super) fn send(&self, command: Command) -> Result<(), Command> {
        self.commands.send(command).map_err(|refused| refused.0)
    }
}

/// A node's connection.
enum Slot {
    /// Being made.
    Connecting(ConnectionId),
    Up(Up),
    /// Not to be tried before this time.
    Waiting(Instant),
}

struct Node {
    slot: Slot,
    /// Failures in a row, for the wait before the next attempt: connections that could not be made,
    /// or did not serve streams for a while.
    failures: u32,
    /// Since when a stream was open on the connection.
    serves_since: Option<Instant>,
    /// The last failure.
    error: Option<Arc<Error>>,
}

impl Node {
    const fn connecting(id: ConnectionId) -> Self {
        Self { slot: Slot::Connecting(id), failures: 0, serves_since: None, error: None }
    }

    const fn id(&self) -> Option<ConnectionId> {
        match self.slot {
            Slot::Connecting(id) | Slot::Up(Up { id, .. }) => Some(id),
            Slot::Waiting(_) => None,
        }
    }

    const fn up(&self) -> Option<&Up> {
        match &self.slot {
            Slot::Up(up) => Some(up),
            Slot::Connecting(_) | Slot::Waiting(_) => None,
        }
    }
}

/// Which connection serves a node's vBuckets.
#[derive(Debug)]
pub(super) enum Assignment {
    /// The one that it has, or that is being made.
    Existing(ConnectionId),
    /// One to be made now.
    New(ConnectionId),
    /// None for now, because of the last failure.
    Later(Option<Arc<Error>>),
}

/// A connection that was lost.
pub(super) struct Lost {
    pub(super) shared: Arc<SharedState>,
    /// Whether this begins an outage, rather than being another failure in one.
    pub(super) is_outage: bool,
}

/// The nodes of a stream, each with at most one connection.
#[derive(Default)]
pub(super) struct Connections {
    nodes: BTreeMap<Address, Node>,
    last_id: u64,
    /// Ended connections whose changes the application has not taken.
    backlog: Backlog,
}

impl Connections {
    /// The connection for a vBucket that is active on a node.
    pub(super) fn assign(&mut self, address: &Address, now: Instant) -> Assignment {
        match self.nodes.get(address).map(|node| (&node.slot, &node.error)) {
            Some((Slot::Connecting(id) | Slot::Up(Up { id, .. }), _)) => Assignment::Existing(*id),
            Some((Slot::Waiting(until), error)) if *until > now => Assignment::Later(error.clone()),
            _ => Assignment::New(self.begin(address)),
        }
    }

    /// A connection to a node is being made.
    pub(super) fn begin(&mut self, address: &Address) -> ConnectionId {
        self.last_id += 1;
        let id = ConnectionId(self.last_id);
        let known = self.nodes.entry(address.clone());
        known.or_insert_with(|| Node::connecting(id)).slot = Slot::Connecting(id);
        id
    }

    /// Whether a connection that was being made is still wanted.
    pub(super) fn awaits(&self, address: &Address, id: ConnectionId) -> bool {
        self.nodes.get(address).is_some_and(|node| node.id() == Some(id))
    }

    /// A connection was made, and its task takes commands.
    pub(super) fn opened(
        &mut self,
        address: &Address,
        id: ConnectionId,
        shared: Arc<SharedState>,
        commands: mpsc::UnboundedSender<Command>,
    ) {
        if let Some(node) = self.nodes.get_mut(address) {
            node.slot = Slot::Up(Up { id, shared, commands });
        }
    }

    /// A connection could not be made; the node is tried again after a while. Returns whether this
    /// begins an outage: a connection that was lost before was counted then.
    pub(super) fn failed(
        &mut self,
        address: &Address,
        error: Arc<Error>,
        now: Instant,
        randomness: &mut impl Rng,
    ) -> bool {
        let cause = Chain(&error);
        tracing::warn!(name: "node_unreachable", target: CLUSTER, node = %address, error = %cause, "a node cannot be reached");
        let Some(node) = self.nodes.get_mut(address) else { return false };
        let is_outage = node.failures == 0;
        node.slot = Slot::Waiting(now + Backoff::SHORT.wait(node.failures, randomness));
        node.failures = node.failures.saturating_add(1);
        node.error = Some(error);
        is_outage
    }

    /// A stream was opened on a connection.
    pub(super) fn serves(&mut self, id: ConnectionId, now: Instant) {
        if let Some(node) = self.nodes.values_mut().find(|node| node.id() == Some(id)) {
            node.serves_since.get_or_insert(now);
            node.error = None;
        }
    }

    /// A connection was lost. It is replaced at once if it had served streams for a while: otherwise
    /// a node that accepts connections and nothing else would get one for each vBucket.
    pub(super) fn lost(
        &mut self,
        id: ConnectionId,
        cause: Arc<Error>,
        now: Instant,
        randomness: &mut impl Rng,
    ) -> Option<Lost> {
        let node = self.nodes.values_mut().find(|node| node.id() == Some(id))?;
        let served = node.serves_since.take().map(|since| now.saturating_duration_since(since));
        if served.is_some_and(|served| served >= SETTLED) {
            node.failures = 0;
        }
        let is_outage = node.failures == 0 || served.is_some();
        let wait = match node.failures {
            0 => Duration::ZERO,
            failures => Backoff::SHORT.wait(failures, randomness),
        };
        node.failures = node.failures.saturating_add(1);
        node.error = Some(cause);
        let slot = std::mem::replace(&mut node.slot, Slot::Waiting(now + wait));
        let Slot::Up(Up { shared, .. }) = slot else { return None };
        self.backlog.add(Arc::clone(&shared));
        Some(Lost { shared, is_outage })
    }

    /// Drops idle connections to nodes without active vBuckets, which may have left the cluster, and
    /// returns them; `used` are those that have vBuckets.
    pub(super) fn retire(
        &mut self,
        data_nodes: &BTreeSet<Address>,
        used: impl FnOnce() -> HashSet<ConnectionId>,
    ) -> Vec<Arc<SharedState>> {
        let mut retired = Vec::new();
        if self.nodes.keys().all(|address| data_nodes.contains(address)) {
            return retired;
        }
        let used = used();
        self.nodes.retain(|address, node| {
            let keep =
                data_nodes.contains(address) || node.id().is_some_and(|id| used.contains(&id));
            if !keep && let Slot::Up(Up { shared, .. }) = &node.slot {
                // Its task ends when the sender of its commands is dropped.
                retired.push(Arc::clone(shared));
            }
            keep
        });
        retired.iter().for_each(|shared| self.backlog.add(Arc::clone(shared)));
        retired
    }

    /// Closes all connections at the end of the stream.
    pub(super) fn close(&mut self) {
        for node in std::mem::take(&mut self.nodes).into_values() {
            if let Slot::Up(Up { shared, .. }) = node.slot {
                shared.close();
            }
        }
    }

    /// Whether streams must not be reopened before the application has taken changes of ended
    /// connections; connections have flow-control buffers of this size.
    pub(super) fn is_backlogged(&mut self, buffer_size: u32) -> bool {
        let open = self.nodes.values().filter_map(Node::up).map(|up| &up.shared);
        self.backlog.is_full(open, buffer_size)
    }

    /// The connections in use, with the addresses of their nodes.
    pub(super) fn up(&self) -> impl Iterator<Item = (&Address, &Up)> {
        self.nodes.iter().filter_map(|(address, node)| Some((address, node.up()?)))
    }

    /// A random connection in use.
    pub(super) fn any_up(&self, randomness: &mut impl Rng) -> Option<&Up> {
        self.nodes.values().filter_map(Node::up).choose(randomness)
    }

    /// Connections in use or being made.
    pub(super) fn ids(&self) -> BTreeSet<ConnectionId> {
        self.nodes.values().filter_map(Node::id).collect()
    }

    /// The connection of a node, in use or being made.
    pub(super) fn id_of(&self, address: &Address) -> Option<ConnectionId> {
        self.nodes.get(address)?.id()
    }

    /// The node of a connection.
    pub(super) fn address_of(&self, id: ConnectionId) -> Option<&Address> {
        self.nodes.iter().find(|(_, node)| node.id() == Some(id)).map(|(address, _)| address)
    }

    /// The address of a connection's node as text; empty if it has none any more.
    pub(super) fn node_name(&self, id: ConnectionId) -> String {
        self.address_of(id).map_or_else(String::new, Address::to_string)
    }

    /// Sends a command to a connection; `false` if it is not in use, or has ended.
    pub(super) fn send(&self, id: ConnectionId, command: Command) -> bool {
        let node = self.nodes.values().find(|node| node.id() == Some(id));
        node.and_then(Node::up).is_some_and(|up| up.send(command).is_ok())
    }

    /// Sends a command to every connection in use. One that has ended does not need it.
    pub(super) fn send_all(&self, command: impl Fn() -> Command) {
        for up in self.nodes.values().filter_map(Node::up) {
            let _ = up.send(command());
        }
    }

    /// Passes persisted seqnos to their connections, to each in one message.
    pub(super) fn send_persisted(&self, mut advanced: Vec<PersistedTo>) {
        for up in self.nodes.values().filter_map(Node::up) {
            let (here, elsewhere): (Vec<_>, Vec<_>) =
                advanced.into_iter().partition(|persisted| persisted.on == up.id);
            advanced = elsewhere;
            if !here.is_empty() {
                let _ = up.send(Command::Persisted(here));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;
    use crate::ErrorKind;

    fn node(port: u16) -> Address {
        Address { host: "node".to_owned(), port }
    }

    fn randomness() -> StdRng {
        StdRng::seed_from_u64(7)
    }

    fn error() -> Arc<Error> {
        Arc::new(Error::new(ErrorKind::ConnectionLost, "the connection broke"))
    }

    fn seconds(number: u64) -> Duration {
        Duration::from_secs(number)
    }

    type Commands = mpsc::UnboundedReceiver<Command>;

    fn open(
        connections: &mut Connections,
        port: u16,
    ) -> (ConnectionId, Arc<SharedState>, Commands) {
        let id = connections.begin(&node(port));
        let (shared, (commands, receiver)) = (Arc::default(), mpsc::unbounded_channel());
        connections.opened(&node(port), id, Arc::clone(&shared), commands);
        (id, shared, receiver)
    }

    /// How long the node is not tried again, to the millisecond.
    fn wait(connections: &mut Connections, now: Instant) -> Duration {
        let mut waits = (0..20_000).map(Duration::from_millis);
        let mut later = |at| matches!(connections.assign(&node(1), at), Assignment::Later(Some(_)));
        waits.find(|&wait| !later(now + wait)).unwrap()
    }

    #[test]
    fn node_has_one_connection_for_all_its_vbuckets() {
        let (mut connections, now) = (Connections::default(), Instant::now());
        let Assignment::New(id) = connections.assign(&node(1), now) else {
            panic!("no connection")
        };
        for _ in 0..2 {
            let assigned = connections.assign(&node(1), now);
            assert!(matches!(assigned, Assignment::Existing(same) if same == id), "{assigned:?}");
        }
        let assigned = connections.assign(&node(2), now);
        assert!(matches!(assigned, Assignment::New(other) if other != id), "{assigned:?}");
        assert!(connections.awaits(&node(1), id) && !connections.awaits(&node(2), id));
    }

    #[test]
    fn node_that_cannot_be_reached_is_retried_ever_less_often() {
        let (mut connections, now, mut randomness) =
            (Connections::default(), Instant::now(), randomness());
        let mut waits = Vec::new();
        for attempt in 0..6 {
            connections.begin(&node(1));
            let is_outage = connections.failed(&node(1), error(), now, &mut randomness);
            assert_eq!(is_outage, attempt == 0, "one outage, however many attempts");
            waits.push(wait(&mut connections, now));
        }
        assert!(waits[0] >= Duration::from_millis(25) && waits[5] > waits[0] * 8, "{waits:?}");
    }

    #[test]
    fn connection_that_is_lost_is_replaced_at_once_only_if_it_had_served() {
        let (mut connections, now, mut randomness) =
            (Connections::default(), Instant::now(), randomness());
        let (first, ..) = open(&mut connections, 1);
        connections.serves(first, now);
        let lost = connections.lost(first, error(), now + SETTLED, &mut randomness).unwrap();
        assert!(lost.is_outage);
        assert_eq!(wait(&mut connections, now + SETTLED), Duration::ZERO);

        // It accepts connections and nothing else.
        let (second, ..) = open(&mut connections, 1);
        let lost = connections.lost(second, error(), now, &mut randomness).unwrap();
        assert!(!lost.is_outage, "nothing was served in between");
        assert!(wait(&mut connections, now) > Duration::ZERO);

        let (third, ..) = open(&mut connections, 1);
        connections.serves(third, now);
        let soon = now + SETTLED - seconds(1);
        assert!(connections.lost(third, error(), soon, &mut randomness).unwrap().is_outage);
        assert!(wait(&mut connections, soon) > Duration::ZERO);
        assert!(connections.lost(third, error(), soon, &mut randomness).is_none(), "once");

        let (fourth, ..) = open(&mut connections, 1);
        connections.serves(fourth, now);
        connections.lost(fourth, error(), now + SETTLED, &mut randomness).unwrap();
        assert_eq!(wait(&mut connections, now + SETTLED), Duration::ZERO, "failures are forgotten");
    }

    #[test]
    fn connections_to_nodes_that_have_left_are_retired_once_they_are_unused() {
        let mut connections = Connections::default();
        let (first, first_shared, _commands) = open(&mut connections, 1);
        let (second, ..) = open(&mut connections, 2);
        let both = BTreeSet::from([node(1), node(2)]);
        let unused = || panic!("nobody has left");
        assert!(connections.retire(&both, unused).is_empty());

        let second_only = BTreeSet::from([node(2)]);
        assert!(connections.retire(&second_only, || HashSet::from([first])).is_empty(), "used");
        let retired = connections.retire(&second_only, HashSet::new);
        assert!(matches!(&retired[..], [shared] if Arc::ptr_eq(shared, &first_shared)));
        assert_eq!(connections.ids(), BTreeSet::from([second]));
    }

    #[test]
    fn persisted_seqnos_reach_each_connection_in_one_message() {
        let mut connections = Connections::default();
        let (first, _, mut first_commands) = open(&mut connections, 1);
        let (second, _, mut second_commands) = open(&mut connections, 2);
        let (.., mut third_commands) = open(&mut connections, 3);
        let persisted = |on, vbid| PersistedTo {
            on,
            vbid: dcp_wire::Vbid(vbid),
            vbuuid: dcp_wire::Vbuuid(7),
            seqno: dcp_wire::Seqno(9),
        };
        let gone = ConnectionId(99);
        connections.send_persisted(vec![
            persisted(first, 1),
            persisted(second, 2),
            persisted(first, 3),
            persisted(gone, 4),
        ]);
        let received = |commands: &mut Commands| match commands.try_recv() {
            Ok(Command::Persisted(all)) => all.iter().map(|each| each.vbid.0).collect(),
            _ => Vec::new(),
        };
        assert_eq!(received(&mut first_commands), [1, 3]);
        assert_eq!(received(&mut second_commands), [2]);
        assert!(received(&mut first_commands).is_empty() && third_commands.try_recv().is_err());
    }

    #[test]
    fn commands_reach_only_connections_in_use() {
        let mut connections = Connections::default();
        assert!(connections.any_up(&mut randomness()).is_none());
        let (first, _, mut commands) = open(&mut connections, 1);
        let made = connections.begin(&node(2));
        let up =
            |connections: &Connections| connections.up().map(|(at, _)| at.port).collect::<Vec<_>>();
        assert_eq!(up(&connections), [1], "the other is only being made");
        assert!(connections.send(first, Command::FetchMap));
        assert!(!connections.send(made, Command::FetchMap));
        connections.send_all(|| Command::FetchHighSeqnos);
        assert!(matches!(commands.try_recv(), Ok(Command::FetchMap)));
        assert!(matches!(commands.try_recv(), Ok(Command::FetchHighSeqnos)));
        drop(commands);
        assert!(!connections.send(first, Command::FetchMap), "its task has ended");
        open(&mut connections, 2);
        assert_eq!(up(&connections), [1, 2]);
    }
}
