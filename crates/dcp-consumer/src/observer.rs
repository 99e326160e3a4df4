//! What the cluster says of its vBuckets, asked again and again over connections that are kept.

mod streams;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use dcp_proto::FailoverLog;
use dcp_proto::topology::Address;
use dcp_wire::message::ObservedSeqno;
use dcp_wire::{Seqno, Vbid, Vbuuid};
use tokio::time::{Instant, sleep, timeout_at};

use crate::bucket::{Bucket, Opening};
use crate::connect::Connected;
use crate::survey::Survey;
use crate::{Error, ErrorKind, StreamOptions, probe};

/// Longest time for the replicas of one call: what they do not say is taken for "not persisted".
const REPLICA_PATIENCE: Duration = Duration::from_secs(2);

/// Pause before a vBucket is asked for again whose history changed between two questions.
const PAUSE: Duration = Duration::from_millis(20);

/// Interval in which the server would drop a connection that answers no signs of life: it is quiet
/// between two calls. The longest that servers accept.
const QUIET: Duration = Duration::from_secs(3 * 60 * 60);

/// What the cluster says of one vBucket, all of one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The history of the active copy.
    pub log: FailoverLog,
    /// Its highest seqno, on the newest branch of that history.
    pub high_seqno: Seqno,
    /// Seqno that is on disk on the active copy and on every replica that the cluster map names,
    /// all on the same branch; 0 if one of them does not answer or is on another branch. `None` if
    /// it was not asked for.
    pub persisted_seqno: Option<Seqno>,
    /// Seqno up to which the active copy may have purged deletions; `None` if its node does not
    /// tell, as a server that keeps its statistics from the user.
    pub purge_seqno: Option<Seqno>,
}

/// Asks the nodes of a bucket where its vBuckets are. Made by
/// [`Client::observer`](crate::Client::observer).
///
/// It keeps one connection per node between calls, without a task: a connection that has died
/// meanwhile is made anew.
#[derive(Debug)]
pub struct Observer {
    bucket: Arc<Bucket>,
    opening: Opening,
    connections: BTreeMap<Address, Connected>,
    /// Histories as last seen. The answer to what is asked of a branch tells if it is still the
    /// newest, and a history does not change without a new branch.
    logs: BTreeMap<Vbid, FailoverLog>,
}

/// vBuckets, and the branch they were last seen on, by the nodes that hold copies of them.
type ByNode = BTreeMap<Address, Vec<(Vbid, Vbuuid)>>;

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

    /// Whether the bucket is kept in memory only, so that nothing of it is ever persisted.
    #[must_use]
    pub fn is_ephemeral(&self) -> bool {
        self.bucket.config().is_ephemeral()
    }

    /// Looks at these vBuckets; at what is persisted on all their copies too, if wanted.
    ///
    /// # Errors
    /// [`Error`] if the nodes the vBuckets are active on do not all answer within the connect
    /// timeout.
    pub async fn observe(
        &mut self,
        vbids: &BTreeSet<Vbid>,
        persisted: bool,
    ) -> Result<BTreeMap<Vbid, Observation>, Error> {
        let mut survey = self.survey();
        let observed = observe_active(&mut survey, vbids, &mut self.logs).await;
        self.keep(survey);
        let mut observed = observed?;
        if !persisted {
            observed.values_mut().for_each(|seen| seen.persisted_seqno = None);
        } else if !self.observe_replicas(&mut observed).await {
            // The map may name copies that are there no more.
            let mut survey = self.survey();
            let refreshed = timeout_at(Instant::now() + REPLICA_PATIENCE, survey.refresh_map());
            match refreshed.await {
                Ok(Ok(())) => self.keep(survey),
                // A late answer would be taken for that of the next call.
                Ok(Err(error)) if !error.is_retryable() => return Err(error),
                _ => tracing::debug!("no cluster map could be fetched"),
            }
        }
        Ok(observed)
    }

    fn survey(&mut self) -> Survey {
        let connections = std::mem::take(&mut self.connections);
        Survey::with_connections(Arc::clone(&self.bucket), self.opening.clone(), connections)
    }

    fn keep(&mut self, survey: Survey) {
        let connections = survey.into_connections().into_iter();
        self.connections = connections.map(|each| (each.address.clone(), each)).collect();
    }

    /// Lowers what is persisted to what it is on every replica; `false` if one did not answer.
    async fn observe_replicas(&mut self, observed: &mut BTreeMap<Vbid, Observation>) -> bool {
        let deadline = Instant::now() + REPLICA_PATIENCE;
        let mut all = true;
        for (address, asked) in self.replicas(observed) {
            let answers = timeout_at(deadline, self.ask_replica(&address, &asked)).await;
            let answers = match answers {
                Ok(Ok(answers)) => answers,
                Ok(Err(error)) => {
                    tracing::warn!(%address, %error, "a replica does not answer");
                    BTreeMap::new()
                }
                Err(_) => {
                    tracing::warn!(%address, "a replica does not answer in time");
                    BTreeMap::new()
                }
            };
            for (vbid, vbuuid) in asked {
                all &= answers.contains_key(&vbid);
                let same = answers.get(&vbid).filter(|answer| is_on(answer, vbuuid));
                let persisted = same.map_or(Seqno::ZERO, |answer| answer.persisted_seqno);
                if let Some(seen) = observed.get_mut(&vbid) {
                    seen.persisted_seqno = seen.persisted_seqno.map(|least| least.min(persisted));
                }
            }
        }
        all
    }

    /// The replicas the map names, by node.
    fn replicas(&self, observed: &BTreeMap<Vbid, Observation>) -> ByNode {
        let map = self.bucket.config();
        let mut by_node = ByNode::new();
        for (&vbid, seen) in observed {
            for node in map.replicas(vbid).flatten() {
                if let Some(address) = self.bucket.address_of_node(&map, node) {
                    by_node.entry(address).or_default().push((vbid, seen.log.newest().vbuuid));
                }
            }
        }
        by_node
    }

    async fn ask_replica(
        &mut self,
        address: &Address,
        asked: &[(Vbid, Vbuuid)],
    ) -> Result<BTreeMap<Vbid, ObservedSeqno>, Error> {
        // Kept again only if it answered: a late answer would be taken for that of the next call.
        let kept = self.connections.remove(address);
        let was_kept = kept.is_some();
        let mut connected = match kept {
            Some(connected) => connected,
            None => self.bucket.connect_dcp(address, &self.opening).await?,
        };
        let mut answers =
            probe::observe(&mut connected.socket, &mut connected.leftover, asked).await;
        if was_kept && answers.is_err() {
            connected = self.bucket.connect_dcp(address, &self.opening).await?;
            answers = probe::observe(&mut connected.socket, &mut connected.leftover, asked).await;
        }
        let answers = answers?;
        self.connections.insert(address.clone(), connected);
        Ok(answers)
    }
}

/// Histories and seqnos of the active copies. `logs` are those known; a vBucket whose history is
/// another one by now is asked for again.
async fn observe_active(
    survey: &mut Survey,
    vbids: &BTreeSet<Vbid>,
    logs: &mut BTreeMap<Vbid, FailoverLog>,
) -> Result<BTreeMap<Vbid, Observation>, Error> {
    let mut observed = BTreeMap::new();
    let mut missing = vbids.clone();
    // First: what is purged later is purged after the moment that is looked at.
    let purged = survey.purge_seqnos(vbids).await?;
    while let Some(&first) = missing.first() {
        let unknown = missing.iter().copied().filter(|vbid| !logs.contains_key(vbid)).collect();
        logs.extend(survey.failover_logs(&unknown).await?);
        let branch = |&vbid: &Vbid| Some((vbid, logs.get(&vbid)?.newest().vbuuid));
        let branches: BTreeMap<Vbid, Vbuuid> = missing.iter().filter_map(branch).collect();
        let seqnos = survey.observe(&branches).await?;
        for (vbid, vbuuid) in branches {
            let seen = seqnos.get(&vbid).filter(|seen| is_on(seen, vbuuid));
            let (Some(seen), Some(log)) = (seen, logs.get(&vbid)) else {
                logs.remove(&vbid);
                continue;
            };
            let (high_seqno, persisted) = (seen.current_seqno, seen.persisted_seqno);
            let persisted_seqno = Some(persisted.min(high_seqno));
            let purge_seqno = purged.get(&vbid).copied().flatten();
            let log = log.clone();
            let seen = Observation { log, high_seqno, persisted_seqno, purge_seqno };
            observed.insert(vbid, seen);
            missing.remove(&vbid);
        }
        // A history that was known from an earlier look is fetched at once.
        if missing.is_disjoint(&unknown) {
            continue;
        }
        if Instant::now() + PAUSE >= survey.deadline() {
            let message = format!("the history of {first} keeps changing: try again later");
            return Err(Error::new(ErrorKind::Timeout, message).with_vbid(first));
        }
        sleep(PAUSE).await;
    }
    Ok(observed)
}

/// Whether the answer is of the branch that was asked for, and that branch the copy's newest.
fn is_on(answer: &ObservedSeqno, vbuuid: Vbuuid) -> bool {
    answer.vbuuid == vbuuid && answer.failover.is_none()
}
