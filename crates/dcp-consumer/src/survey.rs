//! What is asked of all nodes before streams are opened: highest seqnos and failover logs.

mod streams;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use dcp_proto::FailoverLog;
use dcp_proto::topology::{Address, BucketConfig};
use dcp_wire::message::ObservedSeqno;
use dcp_wire::{Seqno, Vbid, Vbuuid};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, timeout_at};

use crate::bucket::{Bucket, Opening};
use crate::connect::Connected;
use crate::{Error, ErrorKind, probe};

/// Pause before nodes are asked again for what they did not answer.
const PAUSE: Duration = Duration::from_millis(100);

/// What nodes are asked. A trait and no closure, so that the futures can be sent between threads.
trait Question: Sync {
    /// What there is to say of one vBucket.
    type Answer: Send;

    /// Asks one node.
    fn ask(
        &self,
        connected: &mut Connected,
        vbids: &[Vbid],
    ) -> impl Future<Output = Result<BTreeMap<Vbid, Self::Answer>, Error>> + Send;
}

struct HighSeqnos;

impl Question for HighSeqnos {
    type Answer = Seqno;

    async fn ask(
        &self,
        connected: &mut Connected,
        _: &[Vbid],
    ) -> Result<BTreeMap<Vbid, Seqno>, Error> {
        probe::high_seqnos(&mut connected.socket, &mut connected.leftover).await
    }
}

struct FailoverLogs;

impl Question for FailoverLogs {
    type Answer = FailoverLog;

    async fn ask(
        &self,
        connected: &mut Connected,
        vbids: &[Vbid],
    ) -> Result<BTreeMap<Vbid, FailoverLog>, Error> {
        probe::failover_logs(&mut connected.socket, &mut connected.leftover, vbids).await
    }
}

struct Seqnos<'a> {
    branches: &'a BTreeMap<Vbid, Vbuuid>,
}

impl Question for Seqnos<'_> {
    type Answer = ObservedSeqno;

    async fn ask(
        &self,
        connected: &mut Connected,
        vbids: &[Vbid],
    ) -> Result<BTreeMap<Vbid, ObservedSeqno>, Error> {
        let branch = |vbid: &Vbid| Some((*vbid, *self.branches.get(vbid)?));
        let asked: Vec<_> = vbids.iter().filter_map(branch).collect();
        probe::observe(&mut connected.socket, &mut connected.leftover, &asked).await
    }
}

struct PurgeSeqnos;

impl Question for PurgeSeqnos {
    /// `None` if the node does not tell.
    type Answer = Option<Seqno>;

    async fn ask(
        &self,
        connected: &mut Connected,
        vbids: &[Vbid],
    ) -> Result<BTreeMap<Vbid, Option<Seqno>>, Error> {
        let told = probe::purge_seqnos(&mut connected.socket, &mut connected.leftover).await?;
        let Some(told) = told else { return Ok(vbids.iter().map(|&vbid| (vbid, None)).collect()) };
        // One it has no copy of has moved.
        let seqno = |&vbid: &Vbid| Some((vbid, Some(*told.get(&vbid)?)));
        Ok(vbids.iter().filter_map(seqno).collect())
    }
}

/// Connections to nodes, and how to make more of them.
pub(crate) struct Survey {
    bucket: Arc<Bucket>,
    /// With DCP opened so, or plain ones.
    opening: Option<Opening>,
    connections: BTreeMap<Address, Connected>,
    deadline: Instant,
}

impl Survey {
    /// Connections are made as `opening` says; everything together may take as long as one
    /// connection.
    pub(crate) fn new(bucket: Arc<Bucket>, opening: Option<Opening>) -> Self {
        let deadline = Instant::now() + bucket.connect_timeout();
        Self { bucket, opening, connections: BTreeMap::new(), deadline }
    }

    /// Goes on with connections that were made before.
    pub(crate) fn with_connections(
        bucket: Arc<Bucket>,
        opening: Opening,
        connections: BTreeMap<Address, Connected>,
    ) -> Self {
        Self { connections, ..Self::new(bucket, Some(opening)) }
    }

    /// When everything has to be answered.
    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The connections made.
    pub(crate) fn into_connections(self) -> Vec<Connected> {
        self.connections.into_values().collect()
    }

    /// Connects to the nodes of these vBuckets.
    ///
    /// # Errors
    /// [`Error`] of a node that cannot be reached before the deadline.
    pub(crate) async fn connect(&mut self, vbids: &BTreeSet<Vbid>) -> Result<(), Error> {
        loop {
            let by_address = self.bucket.by_address(vbids.iter().copied());
            let attempt = self.connect_to(by_address.into_keys().flatten()).await;
            match attempt {
                Err(error) if may_pass(&error) && Instant::now() + PAUSE < self.deadline => {
                    tracing::debug!(%error, "a node cannot be reached, trying again");
                    self.find_out_who_is_left().await?;
                    sleep(PAUSE).await;
                }
                other => return other,
            }
        }
    }

    /// Learns the newest map from whoever can be reached: a node that cannot may have left.
    async fn find_out_who_is_left(&mut self) -> Result<(), Error> {
        let deadline = self.deadline;
        match timeout_at(deadline, Box::pin(self.bucket.fetch_map())).await {
            Ok(Err(error)) if !error.is_retryable() => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// Highest seqnos of these vBuckets.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline.
    pub(crate) async fn high_seqnos(
        &mut self,
        vbids: &BTreeSet<Vbid>,
    ) -> Result<BTreeMap<Vbid, Seqno>, Error> {
        let mut seqnos = self.ask(vbids, &HighSeqnos).await?;
        seqnos.retain(|vbid, _| vbids.contains(vbid));
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
        self.ask(vbids, &FailoverLogs).await
    }

    /// Seqnos in memory and on disk of these vBuckets, which were last seen on these branches.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline.
    pub(crate) async fn observe(
        &mut self,
        branches: &BTreeMap<Vbid, Vbuuid>,
    ) -> Result<BTreeMap<Vbid, ObservedSeqno>, Error> {
        self.ask(&branches.keys().copied().collect(), &Seqnos { branches }).await
    }

    /// Up to where deletions of these vBuckets may be gone; `None` where the node does not tell.
    ///
    /// # Errors
    /// [`Error`] if not every vBucket's node answers before the deadline.
    pub(crate) async fn purge_seqnos(
        &mut self,
        vbids: &BTreeSet<Vbid>,
    ) -> Result<BTreeMap<Vbid, Option<Seqno>>, Error> {
        self.ask(vbids, &PurgeSeqnos).await
    }

    /// Asks the nodes until every vBucket is answered.
    async fn ask<Q: Question>(
        &mut self,
        vbids: &BTreeSet<Vbid>,
        question: &Q,
    ) -> Result<BTreeMap<Vbid, Q::Answer>, Error> {
        let mut answers = BTreeMap::new();
        loop {
            let missing: BTreeSet<Vbid> =
                vbids.iter().copied().filter(|vbid| !answers.contains_key(vbid)).collect();
            let Some(&first) = missing.first() else { return Ok(answers) };
            let deadline = self.deadline;
            let round = Box::pin(self.round(&missing, &mut answers, question));
            let outcome = match timeout_at(deadline, round).await {
                Ok(outcome) => outcome,
                Err(_) => Err(unanswered(first)),
            };
            match outcome {
                Ok(()) if missing.iter().all(|vbid| answers.contains_key(vbid)) => {
                    return Ok(answers);
                }
                Err(error) if !may_pass(&error) => return Err(error),
                outcome if Instant::now() + PAUSE >= deadline => {
                    return Err(outcome.err().unwrap_or_else(|| unanswered(first)));
                }
                _ => sleep(PAUSE).await,
            }
        }
    }

    async fn round<Q: Question>(
        &mut self,
        missing: &BTreeSet<Vbid>,
        answers: &mut BTreeMap<Vbid, Q::Answer>,
        question: &Q,
    ) -> Result<(), Error> {
        let by_address = self.bucket.by_address(missing.iter().copied());
        if let Err(error) = self.connect_to(by_address.keys().flatten().cloned()).await {
            if error.is_retryable() {
                self.find_out_who_is_left().await?;
            }
            return Err(error);
        }
        for (address, vbids) in by_address {
            let Some(address) = address else { continue };
            let Some(mut connected) = self.connections.remove(&address) else { continue };
            // A connection that fails is not put back.
            answers.extend(question.ask(&mut connected, &vbids).await?);
            self.connections.insert(address, connected);
        }
        if missing.iter().any(|vbid| !answers.contains_key(vbid)) {
            if self.connections.is_empty() {
                // The map names no node for any of them.
                self.find_out_who_is_left().await?;
            } else {
                self.refresh_map().await?;
            }
        }
        Ok(())
    }

    /// Connects to the nodes there is no connection to, all at once.
    async fn connect_to(&mut self, addresses: impl Iterator<Item = Address>) -> Result<(), Error> {
        let mut attempts = JoinSet::new();
        for address in addresses.filter(|address| !self.connections.contains_key(address)) {
            let (bucket, opening) = (Arc::clone(&self.bucket), self.opening.clone());
            attempts.spawn(async move {
                match &opening {
                    Some(opening) => bucket.connect_dcp(&address, opening).await,
                    None => bucket.connect_plain(&address).await,
                }
            });
        }
        let mut failed = None;
        while let Some(attempt) = attempts.join_next().await {
            match attempt {
                Ok(Ok(connected)) => {
                    self.connections.insert(connected.address.clone(), connected);
                }
                Ok(Err(error)) => failed = Some(error),
                Err(panic) => {
                    let message = "a connection attempt was ended by the runtime";
                    failed = Some(Error::new(ErrorKind::Closed, message).with_source(panic));
                }
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Learns the newest map from the nodes there are connections to.
    pub(crate) async fn refresh_map(&mut self) -> Result<(), Error> {
        for (address, connected) in &mut self.connections {
            let map = probe::cluster_map(&mut connected.socket, &mut connected.leftover).await?;
            match BucketConfig::parse(&map, &address.host) {
                Ok(map) => self.bucket.apply(map),
                Err(error) => tracing::warn!(%address, %error, "a cluster map cannot be used"),
            }
        }
        self.bucket.check_identity()
    }
}

/// Whether another try may go better. The cluster names the node, so that one which closes without
/// a word is a data service that goes down or comes up.
fn may_pass(error: &Error) -> bool {
    error.is_retryable() || error.kind() == ErrorKind::NotCouchbase
}

fn unanswered(vbid: Vbid) -> Error {
    let message = format!("no node answered for {vbid} in time: check that the cluster is healthy");
    Error::new(ErrorKind::Timeout, message).with_vbid(vbid)
}
