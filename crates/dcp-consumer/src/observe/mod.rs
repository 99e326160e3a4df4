//! Observation of vBuckets outside of any stream: once for a stream to be opened, or repeatedly
//! over the same connections.

mod nodes;
mod persisted;
mod requests;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use dcp_proto::consumer::StreamFilter;
use dcp_proto::topology::Address;
use dcp_proto::{FailoverLog, Position};
use dcp_wire::message::ObservedSeqno;
use dcp_wire::{CollectionId, Seqno, Vbid, Vbuuid};
use tokio::time::{Instant, sleep};

pub(crate) use self::nodes::Nodes;
use self::nodes::Visited;
pub(crate) use self::persisted::{Answer, observed_seqnos, on_all_disks, to_answer};
use crate::bucket::Bucket;
use crate::connection::NodeConnection;
use crate::opening::Opening;
use crate::{Chain, Error, ErrorKind, StreamOptions};

/// Longest time for the replicas of one call: seqnos that they do not report count as not
/// persisted.
const REPLICA_TIMEOUT: Duration = Duration::from_secs(2);

/// Pause before a vBucket whose history changed between two requests is observed again.
const PAUSE: Duration = Duration::from_millis(20);

/// Noop interval, the longest that servers accept: the connection does not answer noops between two
/// calls, and the server would drop it.
const QUIET: Duration = Duration::from_secs(3 * 60 * 60);

/// The observed state of one vBucket at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The history of the active copy.
    pub log: FailoverLog,
    /// Its highest seqno, on the newest branch of that history.
    pub high_seqno: Seqno,
    /// The highest seqno that the server reports to streams; at most `high_seqno`. Before Couchbase
    /// Server 7.1, or without collections, it does not count prepared and aborted durable writes.
    pub reported_seqno: Seqno,
    /// Seqno that is persisted on the active copy and on every replica in the cluster map, all on
    /// the same branch; 0 if one of them does not answer or is on another branch. `None` if it was
    /// not requested.
    pub persisted_seqno: Option<Seqno>,
    /// Seqno up to which the active copy may have purged deletions; `None` if its node does not
    /// report it, for example because the user may not read statistics.
    pub purge_seqno: Option<Seqno>,
}

/// Observes the vBuckets of a bucket. Created by [`Client::observer`](crate::Client::observer).
///
/// It keeps one connection per node between calls, without a task: a connection that has died
/// meanwhile is replaced, and one to a node that no longer has a copy is closed.
#[derive(Debug)]
pub struct Observer {
    bucket: Arc<Bucket>,
    opening: Opening,
    connections: BTreeMap<Address, NodeConnection>,
    /// Histories as last observed. An answer about a branch shows whether it is still the newest,
    /// and a history does not change without a new branch.
    logs: BTreeMap<Vbid, FailoverLog>,
}

impl Observer {
    pub(crate) fn new(bucket: Arc<Bucket>) -> Result<Self, Error> {
        let options = StreamOptions {
            noop_interval: QUIET,
            buffer_size: StreamOptions::MIN_BUFFER_SIZE,
            ..StreamOptions::default()
        };
        let (opening, connections) = (Opening::new(&options)?, BTreeMap::new());
        Ok(Self { bucket, opening, connections, logs: BTreeMap::new() })
    }

    /// Whether the bucket is ephemeral, so that nothing is ever persisted.
    #[must_use]
    pub fn is_ephemeral(&self) -> bool {
        self.bucket.config().is_ephemeral()
    }

    /// Whether reads can resume below the purge seqnos of its vBuckets.
    #[must_use]
    pub fn ignores_purges(&self) -> bool {
        self.bucket.config().ignores_purges()
    }

    /// Observes these vBuckets, optionally with the seqnos persisted on all their copies.
    ///
    /// # Errors
    /// [`Error`] if the nodes the vBuckets are active on do not all answer within the connect
    /// timeout.
    pub async fn observe(
        &mut self,
        vbids: &BTreeSet<Vbid>,
        persisted: bool,
    ) -> Result<BTreeMap<Vbid, Observation>, Error> {
        let mut nodes = self.nodes();
        let observed = self.observe_over(&mut nodes, vbids, persisted).await;
        self.keep(nodes);
        observed
    }

    /// Whether streams with a filter could resume from these positions; if not, the seqno that each
    /// is rolled back to.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers within the connect timeout.
    pub(crate) async fn rollbacks(
        &mut self,
        positions: &BTreeMap<Vbid, Position>,
        filter: &StreamFilter,
    ) -> Result<BTreeMap<Vbid, Option<Seqno>>, Error> {
        let mut nodes = self.nodes();
        let verdicts = nodes.rollbacks(positions, filter).await;
        self.keep(nodes);
        verdicts
    }

    /// Highest seqnos that any of these collections has in these vBuckets.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers within the connect timeout.
    pub(crate) async fn collection_seqnos(
        &mut self,
        vbids: &BTreeSet<Vbid>,
        collections: &[CollectionId],
    ) -> Result<BTreeMap<Vbid, Seqno>, Error> {
        let mut nodes = self.nodes();
        let seqnos = nodes.collection_seqnos(vbids, collections).await;
        self.keep(nodes);
        seqnos
    }

    /// Updates the client to the newest manifest that the nodes send in time.
    ///
    /// # Errors
    /// [`Error`] if the bucket was recreated.
    pub(crate) async fn refresh_manifest(&mut self) -> Result<(), Error> {
        let mut nodes = self.nodes();
        let refreshed = nodes.refresh_map(REPLICA_TIMEOUT).await;
        self.keep(nodes);
        refreshed
    }

    fn nodes(&mut self) -> Nodes {
        let connections = std::mem::take(&mut self.connections);
        Nodes::with_connections(Arc::clone(&self.bucket), self.opening.clone(), connections)
    }

    /// Keeps the connections to nodes that have a copy of some vBucket.
    fn keep(&mut self, nodes: Nodes) {
        let copies = self.copies();
        let connections = nodes.into_connections().into_iter();
        let named = connections.filter(|each| copies.contains(&each.address));
        self.connections = named.map(|each| (each.address.clone(), each)).collect();
    }

    async fn observe_over(
        &mut self,
        nodes: &mut Nodes,
        vbids: &BTreeSet<Vbid>,
        persisted: bool,
    ) -> Result<BTreeMap<Vbid, Observation>, Error> {
        let mut observed = observe_active(nodes, vbids, &mut self.logs).await?;
        let replicas = self.replicas(vbids.iter().copied());
        if !persisted {
            observed.values_mut().for_each(|seen| seen.persisted_seqno = None);
        } else if !observe_replicas(nodes, replicas, &mut observed).await {
            // The map may list copies that no longer exist.
            nodes.refresh_map(REPLICA_TIMEOUT).await?;
        }
        Ok(observed)
    }

    /// The nodes that have a copy of some vBucket.
    fn copies(&self) -> BTreeSet<Address> {
        let map = self.bucket.config();
        let vbids = (0..self.bucket.num_vbuckets()).map(Vbid);
        vbids.flat_map(|vbid| self.bucket.copies_of(&map, vbid)).flatten().collect()
    }

    /// The replicas in the map, by node.
    fn replicas(&self, vbids: impl Iterator<Item = Vbid>) -> BTreeMap<Address, Vec<Vbid>> {
        let map = self.bucket.config();
        let mut by_node = BTreeMap::<_, Vec<Vbid>>::new();
        for vbid in vbids {
            for node in map.replicas(vbid).flatten() {
                if let Some(address) = self.bucket.address_of_node(&map, node) {
                    by_node.entry(address).or_default().push(vbid);
                }
            }
        }
        by_node
    }
}

/// Histories and seqnos of the active copies. `logs` are the known ones; a vBucket whose history
/// has changed is observed again.
async fn observe_active(
    nodes: &mut Nodes,
    vbids: &BTreeSet<Vbid>,
    logs: &mut BTreeMap<Vbid, FailoverLog>,
) -> Result<BTreeMap<Vbid, Observation>, Error> {
    let mut observed = BTreeMap::new();
    let mut missing = vbids.clone();
    // First, so that later purges are after the observed moment.
    let purged = nodes.purge_seqnos(vbids).await?;
    while let Some(&first) = missing.first() {
        let unknown = missing.iter().copied().filter(|vbid| !logs.contains_key(vbid)).collect();
        logs.extend(nodes.failover_logs(&unknown).await?);
        let branch = |&vbid: &Vbid| Some((vbid, logs.get(&vbid)?.newest().vbuuid));
        let branches: BTreeMap<Vbid, Vbuuid> = missing.iter().filter_map(branch).collect();
        // Requested before the branches are confirmed, so that these seqnos are on them too.
        let reported = nodes.high_seqnos(&missing).await?;
        let seqnos = nodes.observe(&branches).await?;
        for (vbid, vbuuid) in branches {
            let seen = seqnos.get(&vbid).filter(|seen| is_on(seen, vbuuid));
            let (Some(seen), Some(log)) = (seen, logs.get(&vbid)) else {
                logs.remove(&vbid);
                continue;
            };
            let (high_seqno, persisted) = (seen.current_seqno, seen.persisted_seqno);
            let reported_seqno = reported.get(&vbid).copied().unwrap_or_default().min(high_seqno);
            let persisted_seqno = Some(persisted.min(high_seqno));
            let purge_seqno = purged.get(&vbid).copied().flatten();
            let log = log.clone();
            let seen =
                Observation { log, high_seqno, reported_seqno, persisted_seqno, purge_seqno };
            observed.insert(vbid, seen);
            missing.remove(&vbid);
        }
        // A history that was known from an earlier observation is fetched at once.
        if missing.is_disjoint(&unknown) {
            continue;
        }
        if Instant::now() + PAUSE >= nodes.deadline() {
            let message = format!("the history of {first} keeps changing: try again later");
            return Err(Error::new(ErrorKind::Timeout, message).with_vbid(first));
        }
        sleep(PAUSE).await;
    }
    Ok(observed)
}

/// Lowers the persisted seqno to the minimum of all replicas; `false` if one did not answer.
async fn observe_replicas(
    nodes: &mut Nodes,
    replicas: BTreeMap<Address, Vec<Vbid>>,
    observed: &mut BTreeMap<Vbid, Observation>,
) -> bool {
    let newest = |(&vbid, seen): (&Vbid, &Observation)| (vbid, seen.log.newest().vbuuid);
    let branches: BTreeMap<Vbid, Vbuuid> = observed.iter().map(newest).collect();
    let request = Arc::new(requests::observed_seqnos(branches));
    let mut all = true;
    for visited in nodes.visit(replicas, &request, REPLICA_TIMEOUT).await {
        let Visited { address, vbids, answers } = visited;
        let answers = answers.unwrap_or_else(|error| {
            tracing::warn!(name: "replica_unreachable", node = %address, error = %Chain(&error), "a replica does not answer");
            BTreeMap::new()
        });
        for vbid in vbids {
            let Some(seen) = observed.get_mut(&vbid) else { continue };
            let answer = answers.get(&vbid);
            all &= answer.is_some();
            let persisted = on_all_disks(seen.log.newest().vbuuid, [answer.map(to_answer)]);
            seen.persisted_seqno = seen.persisted_seqno.map(|least| least.min(persisted));
        }
    }
    all
}

/// Whether the answer is about the requested branch, and that is the copy's newest.
fn is_on(answer: &ObservedSeqno, vbuuid: Vbuuid) -> bool {
    answer.vbuuid == vbuuid && answer.failover.is_none()
}
