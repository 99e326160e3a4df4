//! A planner's requests to the cluster, and how it waits for an unavailable one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dcp_proto::consumer::StreamFilter;
use dcp_proto::plan::{Answer, Limits, Observed, Offsets, Start, VbucketRange, rollback_probes};
use dcp_wire::{CollectionId, Vbid};
use tokio::time::{Instant, sleep, timeout};

use super::{Connected, Planner};
use crate::plan::PlannerError;
use crate::retry::Backoff;
use crate::{Client, ConnectOptions, Error, ErrorKind, Filter, Observation, dial, filter};

/// Longest time to request the seqnos of a filter's collections: no read depends on them.
const COLLECTION_SEQNOS_TIMEOUT: Duration = Duration::from_secs(2);

/// How long a call has failed.
pub(super) struct Outage {
    since: Instant,
    attempts: u32,
}

impl Outage {
    pub(super) fn new() -> Self {
        Self { since: Instant::now(), attempts: 0 }
    }
}

/// The wait before the next request to an unavailable cluster.
pub(in crate::plan) fn pause(connect: &ConnectOptions, attempts: u32) -> Duration {
    let mut randomness = dial::randomness(connect.dialer.as_deref());
    Backoff::SHORT.wait(attempts.saturating_add(2), &mut randomness)
}

impl Planner {
    /// Continues with a client.
    pub(super) fn adopt(&mut self, client: Client) -> Result<&mut Connected, PlannerError> {
        let num_vbuckets = client.num_vbuckets();
        let wanted = self.options.vbuckets.iter().flatten().max();
        if let Some(vbid) = wanted.filter(|vbid| vbid.0 >= num_vbuckets) {
            let problem = format!("there is no vBucket {}, the bucket has {num_vbuckets}", vbid.0);
            let error = Error::option(&["vbuckets"], problem).with_value(vbid.0.to_string());
            return Err(error.with_vbid(*vbid).into());
        }
        let observer = client.observer()?;
        client.bucket_uuid().clone_into(&mut self.bucket_uuid);
        self.num_vbuckets = num_vbuckets;
        self.is_ephemeral = observer.is_ephemeral();
        Ok(self.connected.insert(Connected { client, observer }))
    }

    /// The client and its observer; connects if there are none.
    async fn ready(&mut self) -> Result<&mut Connected, PlannerError> {
        if self.connected.is_none() {
            let client = Client::connect(self.connect.clone()).await?;
            self.adopt(client)?;
        }
        let closed = || Error::new(ErrorKind::Closed, "the planner has no connection").into();
        self.connected.as_mut().ok_or_else(closed)
    }

    /// Observes the vBuckets, and resolves the filter's names again.
    pub(super) async fn try_observe(&mut self, persisted: bool) -> Result<(), PlannerError> {
        let options = self.options.clone();
        let connected = self.ready().await?;
        if options.filter != Filter::All {
            connected.observer.refresh_manifest().await?;
        }
        let filter = filter::of(&options, &connected.client.manifest())?;
        let vbids: BTreeSet<Vbid> = match options.vbuckets {
            Some(wanted) => wanted.into_iter().collect(),
            None => (0..connected.client.num_vbuckets()).map(Vbid).collect(),
        };
        let seen = connected.observer.observe(&vbids, persisted).await?;
        (self.filter, self.seen, self.was_open) = (filter, seen, true);
        self.answers.clear();
        let is_kept_secret = self.seen.values().any(|seen| seen.purge_seqno.is_none());
        if is_kept_secret && !std::mem::replace(&mut self.has_warned, true) {
            tracing::warn!(
                name: "statistics_denied",
                "the user may not read statistics: purged deletions are detected only where a read \
                 would resume below the purge seqno"
            );
        }
        Ok(())
    }

    /// The last observation, with the answers to its rollback probes.
    pub(super) async fn probe_rollbacks(
        &mut self,
        start: &Start,
        limits: &Limits,
    ) -> Result<BTreeMap<Vbid, Observed>, PlannerError> {
        let (begun, mut was_asked) = (Instant::now(), false);
        loop {
            let observed = self.observed(start.offsets());
            let asked = rollback_probes(start, &observed, limits);
            let Some(&vbid) = asked.keys().next() else { return Ok(observed) };
            if was_asked && begun.elapsed() > self.options.retry_timeout {
                let message = format!("the history of {vbid} keeps changing");
                return Err(Error::new(ErrorKind::Timeout, message).with_vbid(vbid).into());
            }
            let filter = self.filter.documents().clone();
            let verdicts = self.ready().await?.observer.rollbacks(&asked, &filter).await?;
            let mut answers = std::mem::take(&mut self.answers);
            for (vbid, position) in &asked {
                let Some(&rollback) = verdicts.get(vbid) else { continue };
                let (vbuuid, seqno) = (position.vbuuid(), position.seqno);
                answers.entry(*vbid).or_default().push(Answer { vbuuid, seqno, rollback });
            }
            if verdicts.values().any(Option::is_some) {
                // A history that has changed since the observation is a better explanation than a
                // purge.
                self.try_observe(limits.persisted_only && !limits.is_last).await?;
            }
            self.answers = answers;
            was_asked = true;
        }
    }

    fn observed(&self, start: &Offsets) -> BTreeMap<Vbid, Observed> {
        let observed = |(&vbid, seen): (&Vbid, &Observation)| {
            let read = self.read.get(&vbid).filter(|(offset, _)| *offset == start.get(vbid));
            let observed = Observed {
                high: seen.high_seqno,
                reported: seen.reported_seqno,
                persisted: seen.persisted_seqno,
                purge: seen.purge_seqno,
                answers: self.answers.get(&vbid).cloned().unwrap_or_default(),
                log: seen.log.clone(),
                high_after_read: read.map(|(_, high)| *high),
            };
            (vbid, observed)
        };
        self.seen.iter().map(observed).collect()
    }

    /// Requests the seqnos of the filter's collections. They are unknown without an answer.
    pub(super) async fn request_collection_seqnos(&mut self) {
        self.collection_seqnos = None;
        let vbids: BTreeSet<Vbid> = self.seen.keys().copied().collect();
        let Some(connected) = &mut self.connected else { return };
        let collections: Vec<CollectionId> = match self.filter.documents() {
            StreamFilter::All => return,
            StreamFilter::Collections(ids) => ids.clone(),
            StreamFilter::Scope(scope) => {
                let manifest = connected.client.manifest();
                let of_scope = manifest.collections().filter(|entry| entry.scope_id == *scope);
                of_scope.map(|entry| entry.id).collect()
            }
        };
        let asked = connected.observer.collection_seqnos(&vbids, &collections);
        match timeout(COLLECTION_SEQNOS_TIMEOUT, asked).await {
            Ok(Ok(seqnos)) => self.collection_seqnos = Some(seqnos),
            Ok(Err(error)) => tracing::debug!(%error, "the seqnos of collections are unknown"),
            Err(_) => tracing::debug!("no answer in time with the seqnos of collections"),
        }
    }

    /// The nodes of the ranges' vBuckets. Waits for one that no node has at the moment: leaving it
    /// out would lose its changes.
    pub(super) fn nodes_of(
        &self,
        ranges: &[VbucketRange],
    ) -> Result<BTreeMap<Vbid, String>, PlannerError> {
        let by_node = self.connected.as_ref().map(|connected| connected.client.vbuckets_by_node());
        let of_node = |(node, vbids): (String, Vec<Vbid>)| {
            vbids.into_iter().map(move |vbid| (vbid, node.clone()))
        };
        let nodes: BTreeMap<_, _> = by_node.into_iter().flatten().flat_map(of_node).collect();
        let located = ranges.iter().map(|range| match nodes.get(&range.vbid) {
            Some(node) => Ok((range.vbid, node.clone())),
            None => {
                let message =
                    format!("no node has {} at the moment: check the cluster", range.vbid);
                Err(Error::new(ErrorKind::Timeout, message).with_vbid(range.vbid).into())
            }
        });
        located.collect()
    }

    /// Waits before a request is repeated, or returns the error if that is pointless.
    pub(super) async fn wait_or_fail(
        &mut self,
        error: PlannerError,
        outage: &mut Outage,
    ) -> Result<(), PlannerError> {
        let (retry_timeout, connect) = (self.options.retry_timeout, self.connect.connect_timeout);
        let retry_timeout = if self.was_open { retry_timeout } else { connect };
        let pause = pause(&self.connect, outage.attempts);
        let is_over = outage.since.elapsed() + pause >= retry_timeout;
        if is_over || !error.may_pass(self.was_open) {
            return Err(error);
        }
        if matches!(error, PlannerError::Cluster(_)) {
            tracing::warn!(name: "cluster_unreachable", %error, "the cluster does not answer, trying again");
            self.connected = None;
        }
        outage.attempts = outage.attempts.saturating_add(1);
        sleep(pause).await;
        Ok(())
    }
}
