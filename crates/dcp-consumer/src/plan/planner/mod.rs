//! Planning of bounded reads.

mod cluster;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use dcp_proto::checkpoint::{Positions, StoredFilter};
use dcp_proto::consumer::StreamFilter;
use dcp_proto::plan::{Answer, Limits, Offset, Offsets, ReadPlan, Start, plan_end, plan_ranges};
use dcp_proto::topology::Manifest;
use dcp_proto::{OnPurge, OnRollback};
use dcp_wire::{Seqno, Vbid};
use tokio::time::Instant;

use self::cluster::Outage;
pub(super) use self::cluster::pause;
use super::PlannerError;
use crate::{Client, ConnectOptions, Error, Filter, Observation, Observer, StreamOptions};

/// A batch whose end was chosen at most this long ago is planned without another observation: its
/// tasks detect later changes anyway.
const FRESH: Duration = Duration::from_secs(2);

/// Tasks per node for a read that no other read follows: enough that an uneven bucket still uses
/// all cores, few enough that the overhead of a task is negligible.
const LAST_TASKS_PER_NODE: usize = 4;

/// Plans consecutive bounded reads of one bucket, over connections that it keeps.
///
/// Once the nodes have answered for the first time, it waits up to [`StreamOptions::retry_timeout`] for
/// a cluster that is unavailable, and reconnects.
#[derive(Debug)]
pub struct Planner {
    connect: ConnectOptions,
    options: StreamOptions,
    connected: Option<Connected>,
    /// As last observed.
    bucket_uuid: String,
    num_vbuckets: u16,
    is_ephemeral: bool,
    /// Whether the nodes have ever answered.
    was_open: bool,
    /// Whether a warning was logged that purge seqnos are not visible.
    has_warned: bool,
    /// The filter's names as ids, at the last observation.
    filter: StoredFilter,
    seen: BTreeMap<Vbid, Observation>,
    /// The server's answers since the last observation.
    answers: BTreeMap<Vbid, Vec<Answer>>,
    /// High seqnos of the filter's collections, if that is not the whole bucket.
    collection_seqnos: Option<BTreeMap<Vbid, Seqno>>,
    /// Offsets from which a batch was planned, so that everything before has been read, and the
    /// high seqno at that time.
    read: BTreeMap<Vbid, (Offset, Seqno)>,
    /// When the last end was planned, its start, and the end.
    planned: Option<(Instant, Start, Offsets)>,
    /// Offsets not to pass, since [`Planner::fix_target`].
    target: Option<Offsets>,
}

/// A client, and the observer of its bucket.
#[derive(Debug)]
struct Connected {
    client: Client,
    observer: Observer,
}

impl Planner {
    /// A planner of a client's bucket. Reconnects with the client's options if necessary. Of the
    /// stream's options, it uses those of what is read and the retry timeout.
    ///
    /// # Errors
    /// Error of kind [`ErrorKind::Config`](crate::ErrorKind::Config) if there is no such vBucket,
    /// scope or collection; others if the nodes cannot be observed.
    pub async fn new(client: &Client, options: StreamOptions) -> Result<Self, PlannerError> {
        let filter = match &options.filter {
            Filter::All => StoredFilter::new(StreamFilter::All, options.system_documents),
            names => client.stored_filter(names, options.system_documents).await?,
        };
        let filter = filter.with_rows(options.rows.clone());
        let mut planner = Self {
            connect: client.connect_options().clone(),
            connected: None,
            bucket_uuid: String::new(),
            num_vbuckets: 0,
            is_ephemeral: false,
            was_open: false,
            has_warned: false,
            filter,
            seen: BTreeMap::new(),
            answers: BTreeMap::new(),
            collection_seqnos: None,
            read: BTreeMap::new(),
            planned: None,
            target: None,
            options,
        };
        planner.adopt(client.clone())?;
        Ok(planner)
    }

    /// Whether the bucket is ephemeral, so that nothing is ever persisted.
    #[must_use]
    pub const fn is_ephemeral(&self) -> bool {
        self.is_ephemeral
    }

    /// The highest seqnos of the last observation.
    #[must_use]
    pub fn high_seqnos(&self) -> BTreeMap<Vbid, Seqno> {
        self.seen.iter().map(|(&vbid, seen)| (vbid, seen.high_seqno)).collect()
    }

    /// Offsets at the server's high seqnos of the last observation, for the filter's collections as
    /// far as known; `None` before the first. The distance to them is what is left to read.
    #[must_use]
    pub fn head(&self) -> Option<Offsets> {
        let mut head = self.planned.as_ref()?.2.clone();
        for (&vbid, seen) in &self.seen {
            let seqnos = self.collection_seqnos.as_ref();
            let known = seqnos.and_then(|seqnos| seqnos.get(&vbid)).copied();
            let seqno = known.unwrap_or(seen.reported_seqno).min(seen.reported_seqno);
            head.set(vbid, Offset { seqno, vbuuid: seen.log.newest().vbuuid, ..head.get(vbid) });
        }
        Some(head)
    }

    /// Offsets before the first change of every vBucket.
    #[must_use]
    pub fn earliest(&self) -> Offsets {
        Offsets::new(&self.bucket_uuid, self.filter.clone(), self.num_vbuckets)
    }

    /// A start at stored positions. The bucket and the filter are checked when it is used.
    #[must_use]
    pub fn start_at(&self, positions: impl Into<Positions>) -> Start {
        Start::new(positions.into(), self.filter.clone(), self.num_vbuckets)
    }

    /// Offsets at the end of what may be read now.
    ///
    /// # Errors
    /// [`PlannerError`] if the cluster cannot be observed.
    pub async fn latest(&mut self, limits: &Limits) -> Result<Offsets, PlannerError> {
        let mut limits = limits.clone();
        (limits.max_seqnos, limits.until) = (None, None);
        let mut outage = Outage::new();
        loop {
            let start = Start::from(self.earliest());
            match Box::pin(self.try_end(&start, &limits)).await {
                Err(error) => self.wait_or_fail(error, &mut outage).await?,
                end => return end,
            }
        }
    }

    /// Limits all later batches to what may be read now.
    ///
    /// # Errors
    /// [`PlannerError`] if the cluster cannot be observed.
    pub async fn fix_target(&mut self, limits: &Limits) -> Result<(), PlannerError> {
        self.target = Some(self.latest(limits).await?);
        Ok(())
    }

    /// Observes the vBuckets.
    ///
    /// # Errors
    /// [`PlannerError`] if the cluster cannot be observed.
    pub async fn observe(&mut self, persisted: bool) -> Result<(), PlannerError> {
        let mut outage = Outage::new();
        loop {
            match Box::pin(self.try_observe(persisted)).await {
                Err(error) => self.wait_or_fail(error, &mut outage).await?,
                done => return done,
            }
        }
    }

    /// The end of the read that begins at `start`; `start` itself if there is nothing to do.
    ///
    /// # Errors
    /// [`PlannerError`] if the start belongs to another bucket or filter, was rolled back, has lost
    /// deletions, or the cluster cannot be observed.
    pub async fn end(&mut self, start: &Start, limits: &Limits) -> Result<Offsets, PlannerError> {
        let until = limits.until.clone().or_else(|| self.target.clone());
        let mut limits = limits.clone();
        limits.until = until;
        let mut outage = Outage::new();
        let end = loop {
            match Box::pin(self.try_end(start, &limits)).await {
                Err(error) => self.wait_or_fail(error, &mut outage).await?,
                end => break end?,
            }
        };
        self.note_read(start.offsets());
        self.planned = Some((Instant::now(), start.clone(), end.clone()));
        Ok(end)
    }

    /// What to read from `start` to `end`, as at most `tasks` plans, but at least one per node. By
    /// default one per node, or four if no other read follows.
    ///
    /// # Errors
    /// As [`Planner::end`].
    pub async fn partitions(
        &mut self,
        start: &Start,
        end: &Offsets,
        tasks: Option<usize>,
        limits: &Limits,
    ) -> Result<Vec<ReadPlan>, PlannerError> {
        let mut outage = Outage::new();
        loop {
            match Box::pin(self.try_partitions(start, end, tasks, limits)).await {
                Err(error) => self.wait_or_fail(error, &mut outage).await?,
                partitions => return partitions,
            }
        }
    }

    async fn try_end(&mut self, start: &Start, limits: &Limits) -> Result<Offsets, PlannerError> {
        let limits = self.effective(limits)?;
        self.try_observe(limits.persisted_only && !limits.is_last).await?;
        let start = &self.narrowed(start, &self.filter)?;
        let observed = self.probe_rollbacks(start, &limits).await?;
        if let Some(until) = &limits.until {
            until.check(&self.bucket_uuid, self.num_vbuckets.into())?;
        }
        self.request_collection_seqnos().await;
        Ok(plan_end(start, &observed, &limits)?)
    }

    async fn try_partitions(
        &mut self,
        start: &Start,
        end: &Offsets,
        tasks: Option<usize>,
        limits: &Limits,
    ) -> Result<Vec<ReadPlan>, PlannerError> {
        let limits = self.effective(limits)?;
        let is_planned = |(at, from, to): &(Instant, Start, Offsets)| {
            at.elapsed() < FRESH && (from, to) == (start, end)
        };
        // Observes again if the end was planned long ago: it may have been rolled back since.
        if self.connected.is_none() || !self.planned.as_ref().is_some_and(is_planned) {
            self.try_observe(limits.persisted_only && !limits.is_last).await?;
        }
        // The bucket's capabilities are known by now.
        let limits = self.effective(&limits)?;
        // Uses the filter of the plan, even if a narrower one was configured since: the end implies
        // that everything in it was read.
        let filter = end.filter().unwrap_or(&self.filter).clone();
        let start = &self.narrowed(start, &filter)?;
        let end = &self.narrowed(&end.clone().into(), &self.filter)?;
        let observed = self.probe_rollbacks(start, &limits).await?;
        let ranges = plan_ranges(start, end.offsets(), &observed, &limits)?;
        let nodes = self.nodes_of(&ranges)?;
        let count = nodes.values().collect::<BTreeSet<_>>().len();
        let per_node = if limits.is_last { LAST_TASKS_PER_NODE } else { 1 };
        let is_followed = !limits.is_last;
        let persisted_only = is_followed && limits.persisted_only;
        let on_rollback = if is_followed { OnRollback::Fail } else { limits.on_rollback };
        let plan = ReadPlan {
            persisted_only,
            end_persisted: persisted_only,
            on_rollback,
            retry_timeout: self.options.retry_timeout,
            ..ReadPlan::of_ranges(&self.bucket_uuid, filter, ranges, is_followed)
        };
        Ok(plan.split(&nodes, tasks.unwrap_or(count * per_node)))
    }

    /// A bucket without a disk has nothing persisted.
    fn effective(&self, limits: &Limits) -> Result<Limits, Error> {
        if limits.on_purge == OnPurge::Ignore {
            let problem = "only a stream can skip purged deletions: choose 'fail' or 'resync'";
            return Err(Error::option(&["on_purge"], problem).with_value("ignore"));
        }
        let persisted_only = limits.persisted_only && !self.is_ephemeral;
        let mut limits = limits.clone();
        limits.persisted_only = persisted_only;
        limits.ignores_purges =
            self.connected.as_ref().is_some_and(|connected| connected.observer.ignores_purges());
        Ok(limits)
    }

    /// The newest manifest known.
    fn manifest(&self) -> Arc<Manifest> {
        self.connected.as_ref().map(|connected| connected.client.manifest()).unwrap_or_default()
    }

    /// A start with this filter, if it is valid for it.
    fn narrowed(&self, start: &Start, filter: &StoredFilter) -> Result<Start, PlannerError> {
        let (uuid, num_vbuckets) = (&self.bucket_uuid, self.num_vbuckets);
        Ok(start.narrowed_to(uuid, num_vbuckets, filter, &self.manifest())?)
    }

    /// Notes what has been read: a batch is planned after the previous one has run.
    fn note_read(&mut self, start: &Offsets) {
        for (&vbid, seen) in &self.seen {
            let offset = start.get(vbid);
            let is_noted = self.read.get(&vbid).is_some_and(|(known, _)| *known == offset);
            if offset.vbuuid == seen.log.newest().vbuuid && !is_noted {
                self.read.insert(vbid, (offset, seen.high_seqno));
            }
        }
    }
}
