//! The watch of the cluster map: which one the stream follows, and when and whom to ask for another.
//!
//! Nodes push new maps, but one that is cut off from its cluster has none: it streams what it has,
//! and a failover that gave its vBuckets to others stays unknown for as long as the connection
//! lasts. The others know, but several nodes may be cut off together. So a stream that does not use
//! all nodes asks another one from time to time.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dcp_proto::topology::{Address, BucketConfig};
use rand::Rng;
use rand::seq::IteratorRandom;

use super::log::CLUSTER;
use crate::{Chain, Error};

/// How often the map is requested while a vBucket waits and none is pushed.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(2500);

/// How often another node is asked.
const PROBE_INTERVAL: Duration = Duration::from_secs(10);

/// How long to wait after a failure: a node that refuses the user should not be asked often.
const PROBE_AFTER_FAILURE: Duration = Duration::from_secs(60);

/// Whom to ask for the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MapPoll {
    /// A node, over any connection in use.
    pub(super) over_connection: bool,
    /// Any node of the cluster, over a new connection.
    pub(super) any_node: bool,
}

/// The map of a stream. `C` is a connection to a node that the stream does not use.
#[derive(Debug)]
pub(super) struct MapWatch<C> {
    /// The map every stream was last compared with.
    followed: Option<Arc<BucketConfig>>,
    /// The nodes with active vBuckets in that map.
    data_nodes: BTreeSet<Address>,
    /// When the map is requested next, if that is useful.
    poll_at: Instant,
    /// Whether any node of the cluster is being asked.
    is_fetching: bool,
    /// Why no map could be fetched, if so.
    error: Option<Arc<Error>>,
    probe: MapProbe<C>,
}

impl<C> MapWatch<C> {
    pub(super) fn new(now: Instant) -> Self {
        Self {
            followed: None,
            data_nodes: BTreeSet::new(),
            poll_at: now,
            is_fetching: false,
            error: None,
            probe: MapProbe { at: now + PROBE_INTERVAL, is_asking: false, kept: None },
        }
    }

    /// Whether streams were not compared with this map yet.
    pub(super) fn is_new(&self, map: &Arc<BucketConfig>) -> bool {
        !self.followed.as_ref().is_some_and(|followed| Arc::ptr_eq(followed, map))
    }

    /// Streams were compared with this map, whose active vBuckets are on these nodes.
    pub(super) fn follow(&mut self, map: Arc<BucketConfig>, data_nodes: BTreeSet<Address>) {
        (self.followed, self.data_nodes) = (Some(map), data_nodes);
    }

    /// The nodes with active vBuckets.
    pub(super) const fn data_nodes(&self) -> &BTreeSet<Address> {
        &self.data_nodes
    }

    /// The map may be old: it is requested by then if a vBucket waits.
    pub(super) fn poll_by(&mut self, at: Instant) {
        self.poll_at = self.poll_at.min(at);
    }

    /// Whether the map must be requested while a vBucket waits.
    pub(super) fn is_due(&self, now: Instant) -> bool {
        now >= self.poll_at
    }

    /// Whom to ask now, with so many connections in use. If they do not lead to all nodes, they may
    /// lead to those that are cut off from the cluster, so that their maps are old: others are asked
    /// as well once a vBucket `has_waited` for a [`POLL_INTERVAL`].
    pub(super) fn poll(&mut self, connections: usize, has_waited: bool, now: Instant) -> MapPoll {
        self.poll_at = now + POLL_INTERVAL;
        let are_some = connections < self.data_nodes.len().max(2);
        let any_node = connections == 0 || (are_some && has_waited);
        MapPoll { over_connection: connections > 0, any_node }
    }

    /// Any node of the cluster is to be asked; `false` if that is in progress.
    pub(super) const fn begin_fetch(&mut self) -> bool {
        !std::mem::replace(&mut self.is_fetching, true)
    }

    /// Some node has sent its map, or none has.
    pub(super) fn fetched(&mut self, result: Result<(), Error>) {
        self.is_fetching = false;
        self.error = result.err().map(Arc::new);
        if let Some(error) = &self.error {
            let error = Chain(error);
            tracing::debug!(target: CLUSTER, %error, "no cluster map could be fetched");
        }
    }

    /// Why no map could be fetched, if so.
    pub(super) const fn error(&self) -> Option<&Arc<Error>> {
        self.error.as_ref()
    }

    /// Another node to ask for its map, over the connection to it if there is one, if that is due and
    /// the stream does not use them all: `used` are those that it uses.
    pub(super) fn probe(
        &mut self,
        used: &[&Address],
        now: Instant,
        randomness: &mut impl Rng,
    ) -> Option<(Address, Option<C>)> {
        let probe = &mut self.probe;
        if probe.is_asking || now < probe.at {
            return None;
        }
        probe.at = now + PROBE_INTERVAL;
        let kept = probe.kept.take();
        if used.is_empty() {
            return None;
        }
        let others = self.data_nodes.iter().filter(|address| !used.contains(address));
        let address = others.choose(randomness)?.clone();
        probe.is_asking = true;
        match kept.filter(|(kept, _)| !used.contains(&kept) && self.data_nodes.contains(kept)) {
            Some((kept, connection)) => Some((kept, Some(connection))),
            None => Some((address, None)),
        }
    }

    /// Another node has sent its map over this connection, which is kept, or has failed to.
    pub(super) fn probed(&mut self, connection: Option<(Address, C)>, now: Instant) {
        if connection.is_none() {
            self.probe.at = now + PROBE_AFTER_FAILURE;
        }
        (self.probe.is_asking, self.probe.kept) = (false, connection);
    }

    /// The connection to another node, at the end of the stream.
    pub(super) fn into_connection(self) -> Option<C> {
        self.probe.kept.map(|(_, connection)| connection)
    }

    /// When to ask next, if a vBucket waits, or streams.
    pub(super) fn deadline(&self, is_waiting: bool, is_streaming: bool) -> Option<Instant> {
        let poll = is_waiting.then_some(self.poll_at);
        let probe = (is_streaming && !self.probe.is_asking).then_some(self.probe.at);
        poll.into_iter().chain(probe).min()
    }
}

/// Asking another node for the map while a stream does not use them all.
#[derive(Debug)]
struct MapProbe<C> {
    /// When it is asked next.
    at: Instant,
    /// Whether a node is being asked.
    is_asking: bool,
    /// The connection to the node asked last.
    kept: Option<(Address, C)>,
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

    fn map() -> Arc<BucketConfig> {
        let json = br#"{"rev":1,"name":"b","uuid":"u","nodeLocator":"vbucket","nodesExt":[],
            "vBucketServerMap":{"numReplicas":0,"serverList":["n:1"],"vBucketMap":[[0]]}}"#;
        Arc::new(BucketConfig::parse(json, "node").unwrap())
    }

    fn watch(nodes: &[u16], now: Instant) -> MapWatch<u8> {
        let mut watch = MapWatch::new(now);
        watch.follow(map(), nodes.iter().map(|&port| node(port)).collect());
        watch
    }

    fn randomness() -> StdRng {
        StdRng::seed_from_u64(7)
    }

    #[test]
    fn map_is_new_until_streams_were_compared_with_it() {
        let (mut watch, map, other) = (MapWatch::<u8>::new(Instant::now()), map(), map());
        assert!(watch.is_new(&map));
        watch.follow(Arc::clone(&map), BTreeSet::new());
        assert!(!watch.is_new(&map) && watch.is_new(&other));
    }

    #[test]
    fn map_is_polled_at_intervals_while_a_vbucket_waits() {
        let now = Instant::now();
        let mut watch = watch(&[1], now);
        assert!(watch.is_due(now), "at once, in the beginning");
        watch.poll(1, false, now);
        let next = now + POLL_INTERVAL;
        assert!(!watch.is_due(next - Duration::from_millis(1)) && watch.is_due(next));
        assert_eq!(watch.deadline(true, false), Some(next));
        assert_eq!(watch.deadline(false, false), None);
        watch.poll_by(now + Duration::from_secs(1));
        watch.poll_by(now + Duration::from_secs(2));
        assert_eq!(watch.deadline(true, true), Some(now + Duration::from_secs(1)));
    }

    #[test]
    fn map_fetch_asks_any_node_if_those_in_use_may_be_cut_off() {
        let now = Instant::now();
        let mut watch = watch(&[1, 2], now);
        let mut poll = |connections, has_waited| {
            let MapPoll { over_connection, any_node } = watch.poll(connections, has_waited, now);
            (over_connection, any_node)
        };
        assert_eq!(poll(0, false), (false, true));
        assert_eq!(poll(1, false), (true, false));
        assert_eq!(poll(1, true), (true, true));
        assert_eq!(poll(2, true), (true, false));
        // Two of three may be cut off together.
        let mut of_three = self::watch(&[1, 2, 3], now);
        assert!(of_three.poll(2, true, now).any_node && !of_three.poll(2, false, now).any_node);
        assert!(!of_three.poll(3, true, now).any_node);
    }

    #[test]
    fn map_fetch_is_one_at_a_time_and_its_failure_is_kept_until_the_next() {
        let mut watch = watch(&[1], Instant::now());
        assert!(watch.begin_fetch() && !watch.begin_fetch());
        watch.fetched(Err(Error::new(ErrorKind::Connect, "no route to host")));
        assert_eq!(watch.error().unwrap().kind(), ErrorKind::Connect);
        assert!(watch.begin_fetch());
        watch.fetched(Ok(()));
        assert!(watch.error().is_none());
    }

    #[test]
    fn sv_12_map_probe_asks_another_node_only_while_the_stream_does_not_use_all() {
        let now = Instant::now();
        let mut watch = watch(&[1, 2], now);
        let mut randomness = randomness();
        let one = node(1);
        assert_eq!(watch.probe(&[&one], now, &mut randomness), None, "not due");
        let mut at = now + PROBE_INTERVAL;
        assert_eq!(watch.deadline(false, true), Some(at));
        assert_eq!(watch.probe(&[&one, &node(2)], at, &mut randomness), None, "it uses both");
        at += PROBE_INTERVAL;
        assert_eq!(watch.probe(&[], at, &mut randomness), None, "it uses none");
        at += PROBE_INTERVAL;
        assert_eq!(watch.probe(&[&one], at, &mut randomness), Some((node(2), None)));
        assert_eq!(watch.deadline(false, true), None, "it is being asked");
        assert_eq!(watch.probe(&[&one], at + PROBE_INTERVAL, &mut randomness), None);

        watch.probed(Some((node(2), 5)), at);
        at += PROBE_INTERVAL;
        assert_eq!(watch.probe(&[&one], at, &mut randomness), Some((node(2), Some(5))));
        watch.probed(Some((node(2), 5)), at);
        assert_eq!(watch.into_connection(), Some(5));

        // Two of three may be cut off together.
        let mut of_three = self::watch(&[1, 2, 3], now);
        let (used, at) = ([&one, &node(2)], now + PROBE_INTERVAL);
        assert_eq!(of_three.probe(&used, at, &mut randomness), Some((node(3), None)));
    }

    #[test]
    fn connection_to_a_removed_or_used_node_is_not_pooled() {
        let (now, mut randomness) = (Instant::now(), randomness());
        for (used, nodes) in [(1, [1, 3]), (2, [2, 3])] {
            let mut watch = watch(&[1, 2], now);
            watch.probed(Some((node(2), 5)), now);
            watch.follow(map(), nodes.map(node).into());
            let probed = watch.probe(&[&node(used)], now + PROBE_INTERVAL, &mut randomness);
            assert_eq!(probed, Some((node(3), None)));
        }
    }

    #[test]
    fn node_that_fails_is_probed_rarely_and_a_cluster_of_one_never() {
        let (now, mut randomness) = (Instant::now(), randomness());
        let mut watch_of_two = watch(&[1, 2], now);
        watch_of_two.probed(None, now);
        let one = node(1);
        let early = now + PROBE_AFTER_FAILURE - Duration::from_millis(1);
        assert_eq!(watch_of_two.probe(&[&one], early, &mut randomness), None);
        let late = now + PROBE_AFTER_FAILURE;
        assert!(watch_of_two.probe(&[&one], late, &mut randomness).is_some());
        assert_eq!(watch(&[1], now).probe(&[&one], late, &mut randomness), None);
    }
}
