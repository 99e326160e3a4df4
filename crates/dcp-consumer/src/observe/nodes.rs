//! Requests to all nodes of some vBuckets at once: their seqnos, histories, and where streams could
//! resume.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use dcp_proto::consumer::StreamFilter;
use dcp_proto::topology::Address;
use dcp_proto::{FailoverLog, Position};
use dcp_wire::message::ObservedSeqno;
use dcp_wire::{CollectionId, Seqno, Vbid, Vbuuid};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::requests::{self, NodeRequest};
use crate::bucket::Bucket;
use crate::config::YEARS;
use crate::connection::NodeConnection;
use crate::error::Seconds;
use crate::failure_log::FailureLog;
use crate::opening::Opening;
use crate::{Chain, Error, ErrorKind};

/// Pause before requests that were not answered are repeated; it doubles.
const PAUSE: Duration = Duration::from_millis(100);

/// Longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// Connections to nodes, and the means to make more.
pub(crate) struct Nodes {
    bucket: Arc<Bucket>,
    /// How DCP is opened; `None` for plain connections.
    opening: Option<Opening>,
    connections: BTreeMap<Address, NodeConnection>,
    begun: Instant,
    /// Requests are not repeated after this time.
    deadline: Instant,
    /// Whether a first attempt may take longer.
    is_for_stream: bool,
    failures: FailureLog,
}

/// Result of a request to one node about some vBuckets.
pub(super) struct Visited<A> {
    pub(super) address: Address,
    pub(super) vbids: Vec<Vbid>,
    pub(super) answers: Result<BTreeMap<Vbid, A>, Error>,
}

impl Nodes {
    /// Connections are opened according to `opening`; everything together may take as long as one
    /// connection.
    pub(crate) fn new(bucket: Arc<Bucket>, opening: Option<Opening>) -> Self {
        let begun = Instant::now();
        let deadline = begun + bucket.connect_timeout();
        let (connections, failures) = (BTreeMap::new(), FailureLog::default());
        Self { bucket, opening, connections, begun, deadline, is_for_stream: false, failures }
    }

    /// For a stream to be opened: failures are retried as long as the stream would.
    pub(crate) fn for_stream(
        bucket: Arc<Bucket>,
        opening: Opening,
        retry_timeout: Duration,
    ) -> Self {
        let nodes = Self::new(bucket, Some(opening));
        let deadline = nodes.begun.checked_add(retry_timeout.min(YEARS)).unwrap_or(nodes.deadline);
        Self { deadline, is_for_stream: true, ..nodes }
    }

    /// Continues with existing connections.
    pub(crate) fn with_connections(
        bucket: Arc<Bucket>,
        opening: Opening,
        connections: BTreeMap<Address, NodeConnection>,
    ) -> Self {
        Self { connections, ..Self::new(bucket, Some(opening)) }
    }

    /// Time by which everything must be answered.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The connections made.
    pub(crate) fn into_connections(self) -> Vec<NodeConnection> {
        self.connections.into_values().collect()
    }

    /// Connects to the nodes of these vBuckets, or to any other node if there are none, so that the
    /// manifest comes from a node and is up to date.
    ///
    /// # Errors
    /// [`Error`] of a node that cannot be reached before the deadline.
    pub(crate) async fn connect(&mut self, vbids: &BTreeSet<Vbid>) -> Result<(), Error> {
        if self.placed(vbids).is_empty() {
            self.refresh_topology().await?;
        }
        self.ask(&self.placed(vbids), requests::nothing()).await.map(drop)
    }

    /// Those of these vBuckets that the map assigns to a node.
    fn placed(&self, vbids: &BTreeSet<Vbid>) -> BTreeSet<Vbid> {
        let by_address = self.bucket.by_address(vbids.iter().copied());
        let placed = by_address.into_iter().filter(|(address, _)| address.is_some());
        placed.flat_map(|(_, vbids)| vbids).collect()
    }

    /// Highest seqnos of these vBuckets.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline.
    pub(crate) async fn high_seqnos(
        &mut self,
        vbids: &BTreeSet<Vbid>,
    ) -> Result<BTreeMap<Vbid, Seqno>, Error> {
        let mut seqnos = self.ask(vbids, requests::high_seqnos()).await?;
        seqnos.retain(|vbid, _| vbids.contains(vbid));
        self.bucket.saw(&seqnos);
        Ok(seqnos)
    }

    /// Failover logs of these vBuckets.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline.
    pub(crate) async fn failover_logs(
        &mut self,
        vbids: &BTreeSet<Vbid>,
    ) -> Result<BTreeMap<Vbid, FailoverLog>, Error> {
        self.ask(vbids, requests::failover_logs()).await
    }

    /// Highest seqnos of these vBuckets, each with the failover log of its history: both are
    /// requested until no failover happened in between.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline, or histories keep
    /// changing until then.
    pub(crate) async fn newest(
        &mut self,
        mut vbids: BTreeSet<Vbid>,
    ) -> Result<BTreeMap<Vbid, (Seqno, FailoverLog)>, Error> {
        let (mut newest, mut before) = (BTreeMap::new(), self.failover_logs(&vbids).await?);
        loop {
            let (seqnos, after) =
                (self.high_seqnos(&vbids).await?, self.failover_logs(&vbids).await?);
            for (&vbid, log) in &after {
                if let (Some(before), Some(&seqno)) = (before.get(&vbid), seqnos.get(&vbid))
                    && before.newest() == log.newest()
                {
                    newest.insert(vbid, (seqno, log.clone()));
                }
            }
            vbids.retain(|vbid| !newest.contains_key(vbid));
            let Some(&vbid) = vbids.first() else { return Ok(newest) };
            self.check_deadline(vbid)?;
            before = after;
        }
    }

    /// Checks that there is time to observe a vBucket again whose history has just changed.
    ///
    /// # Errors
    /// [`ErrorKind::Timeout`] after the deadline.
    pub(crate) fn check_deadline(&self, vbid: Vbid) -> Result<(), Error> {
        if Instant::now() < self.deadline {
            return Ok(());
        }
        let message = format!("the history of {vbid} keeps changing");
        let cause = Arc::new(Error::new(ErrorKind::Timeout, message));
        Err(Error::out_of_reach(vbid, self.begun.elapsed(), Some(cause)))
    }

    /// Seqnos in memory and on disk of these vBuckets, which were last observed on these branches.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline.
    pub(crate) async fn observe(
        &mut self,
        branches: &BTreeMap<Vbid, Vbuuid>,
    ) -> Result<BTreeMap<Vbid, ObservedSeqno>, Error> {
        let vbids = branches.keys().copied().collect();
        self.ask(&vbids, requests::observed_seqnos(branches.clone())).await
    }

    /// Purge seqnos of these vBuckets; `None` if the node does not report them.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline.
    pub(crate) async fn purge_seqnos(
        &mut self,
        vbids: &BTreeSet<Vbid>,
    ) -> Result<BTreeMap<Vbid, Option<Seqno>>, Error> {
        self.ask(vbids, requests::purge_seqnos()).await
    }

    /// Whether streams could resume from these positions; if not, the seqnos they are rolled back
    /// to.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline.
    pub(crate) async fn rollbacks(
        &mut self,
        positions: &BTreeMap<Vbid, Position>,
        filter: &StreamFilter,
    ) -> Result<BTreeMap<Vbid, Option<Seqno>>, Error> {
        let vbids = positions.keys().copied().collect();
        self.ask(&vbids, requests::rollbacks(positions.clone(), filter.clone())).await
    }

    /// Highest seqnos that any of these collections has in these vBuckets.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline.
    pub(crate) async fn collection_seqnos(
        &mut self,
        vbids: &BTreeSet<Vbid>,
        collections: &[CollectionId],
    ) -> Result<BTreeMap<Vbid, Seqno>, Error> {
        let request = requests::collection_seqnos(collections.to_vec());
        let mut seqnos = self.ask(vbids, request).await?;
        seqnos.retain(|vbid, _| vbids.contains(vbid));
        Ok(seqnos)
    }

    /// Repeats requests until every vBucket is answered.
    async fn ask<A: Send + 'static>(
        &mut self,
        vbids: &BTreeSet<Vbid>,
        request: NodeRequest<A>,
    ) -> Result<BTreeMap<Vbid, A>, Error> {
        let (request, mut answers, mut pause) = (Arc::new(request), BTreeMap::new(), PAUSE);
        loop {
            let missing: BTreeSet<Vbid> =
                vbids.iter().copied().filter(|vbid| !answers.contains_key(vbid)).collect();
            let Some(&first) = missing.first() else { return Ok(answers) };
            let failed = Box::pin(self.round(&missing, &mut answers, &request)).await?;
            if missing.iter().all(|vbid| answers.contains_key(vbid)) {
                return Ok(answers);
            }
            // A single node may be cut off from its cluster, so that its map is old.
            let is_map_doubtful = failed.is_some() || self.connections.len() < 2;
            let (vbid, cause) = failed.unwrap_or_else(|| {
                let cause = unanswered();
                // A vBucket that moves has no node for a moment.
                if pause > PAUSE {
                    self.failures.unplaced(first, &cause);
                }
                (first, cause)
            });
            let remaining = self.deadline.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                let (waited, cause) = (self.begun.elapsed(), Some(Arc::new(cause)));
                return Err(Error::out_of_reach(vbid, waited, cause));
            }
            if is_map_doubtful {
                self.refresh_topology().await?;
            } else {
                self.refresh_map(self.attempt()).await?;
            }
            let remaining = self.deadline.saturating_duration_since(Instant::now());
            sleep(pause.min(remaining)).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Sends one request to each node. Returns a temporary failure, with a vBucket that it
    /// concerns.
    async fn round<A: Send + 'static>(
        &mut self,
        missing: &BTreeSet<Vbid>,
        answers: &mut BTreeMap<Vbid, A>,
        request: &Arc<NodeRequest<A>>,
    ) -> Result<Option<(Vbid, Error)>, Error> {
        let mut by_address = self.bucket.by_address(missing.iter().copied());
        let nowhere = by_address.remove(&None).unwrap_or_default();
        let config = self.bucket.config();
        let why = |vbid: Vbid| Some((vbid, self.bucket.why_no_address(&config, vbid)?));
        let mut failed = nowhere.into_iter().find_map(why);
        if let Some((vbid, error)) = &failed {
            self.failures.unplaced(*vbid, error);
        }
        let nodes = by_address.into_iter().filter_map(|(at, vbids)| Some((at?, vbids))).collect();
        for visited in self.visit(nodes, request, self.attempt()).await {
            match (visited.answers, visited.vbids.first()) {
                (Ok(answered), _) => {
                    self.failures.answered(&visited.address);
                    answers.extend(answered);
                }
                (Err(error), Some(&vbid)) if self.bucket.may_pass(&error) => {
                    self.failures.failed(&visited.address, &error);
                    // The first vBucket, so that errors are deterministic.
                    failed = failed.filter(|(other, _)| *other < vbid).or(Some((vbid, error)));
                }
                (Err(error), _) => return Err(error),
            }
        }
        Ok(failed)
    }

    /// How long one node may take: not all of the time, since another node may take its place
    /// meanwhile.
    fn attempt(&self) -> Duration {
        if self.is_for_stream {
            return self.bucket.connect_timeout();
        }
        let remaining = self.deadline.saturating_duration_since(Instant::now());
        (remaining * 3 / 4).max(PAUSE)
    }

    /// Sends requests to these nodes concurrently, so that none delays the others.
    pub(super) async fn visit<A: Send + 'static>(
        &mut self,
        nodes: BTreeMap<Address, Vec<Vbid>>,
        request: &Arc<NodeRequest<A>>,
        limit: Duration,
    ) -> Vec<Visited<A>> {
        let mut visits = JoinSet::new();
        for (address, vbids) in nodes {
            let (bucket, opening) = (Arc::clone(&self.bucket), self.opening.clone());
            let (request, kept) = (Arc::clone(request), self.connections.remove(&address));
            visits.spawn(async move {
                let connect = bucket.connect_to(&address, opening.as_ref(), limit);
                let asked = ask_node(&bucket, &request, &vbids, kept, connect, limit).await;
                (address, vbids, asked)
            });
        }
        let mut visited = Vec::with_capacity(visits.len());
        while let Some(visit) = visits.join_next().await {
            // A task that was ended by the runtime has no answer.
            let Ok((address, vbids, asked)) = visit else { continue };
            let answers = asked.map(|(connection, answers)| {
                self.connections.insert(address.clone(), connection);
                answers
            });
            visited.push(Visited { address, vbids, answers });
        }
        visited
    }

    /// Fetches the newest map from any reachable node: an unreachable one may have left.
    async fn refresh_topology(&mut self) -> Result<(), Error> {
        match timeout(self.attempt(), Box::pin(self.bucket.fetch_map())).await {
            Ok(Err(error)) if !self.bucket.may_pass(&error) => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Fetches the newest map from connected nodes. Connections that do not answer are dropped.
    ///
    /// # Errors
    /// [`ErrorKind::BucketNotFound`] if another bucket has the name.
    pub(crate) async fn refresh_map(&mut self, limit: Duration) -> Result<(), Error> {
        let mut refreshes = JoinSet::new();
        for (address, mut connection) in std::mem::take(&mut self.connections) {
            let bucket = Arc::clone(&self.bucket);
            refreshes.spawn(async move {
                match timeout(limit, bucket.refresh(&mut connection)).await {
                    Ok(Ok(())) => return Some((address, connection)),
                    Ok(Err(error)) => {
                        tracing::debug!(node = %address, error = %Chain(&error), "a node sent no map");
                    }
                    Err(_) => {
                        tracing::debug!(node = %address, "a node sent no cluster map in time");
                    }
                }
                None
            });
        }
        while let Some(refreshed) = refreshes.join_next().await {
            self.connections.extend(refreshed.ok().flatten());
        }
        self.bucket.check_identity()
    }
}

/// Asks one node over the existing connection or a new one. A failed connection is dropped: it is
/// dead, or busy with an answer that nobody waits for.
async fn ask_node<A>(
    bucket: &Bucket,
    request: &NodeRequest<A>,
    vbids: &[Vbid],
    kept: Option<NodeConnection>,
    connect: impl Future<Output = Result<NodeConnection, Error>>,
    limit: Duration,
) -> Result<(NodeConnection, BTreeMap<Vbid, A>), Error> {
    let deadline = Instant::now() + limit;
    if let Some(mut connection) = kept
        && let asked = request.ask(bucket, &mut connection, vbids)
        && let Ok(Ok(answers)) = timeout(limit / 2, asked).await
    {
        return Ok((connection, answers));
    }
    let connection = timeout_at(deadline, connect).await;
    let mut connection = connection.unwrap_or_else(|_| Err(late(limit)))?;
    let answers = timeout_at(deadline, request.ask(bucket, &mut connection, vbids)).await;
    match answers.unwrap_or_else(|_| Err(late(limit))) {
        Ok(answers) => Ok((connection, answers)),
        Err(error) => Err(error.of_node(&connection.address)),
    }
}

fn late(limit: Duration) -> Error {
    Error::new(ErrorKind::Timeout, format!("the node did not answer within {}", Seconds(limit)))
}

fn unanswered() -> Error {
    Error::new(ErrorKind::Timeout, "no node reports the vBucket as active")
}
