//! A bucket to stream changes from.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use dcp_proto::checkpoint::{Checkpoint, StoredFilter};
use dcp_proto::consumer::{Delivery, StreamFilter};
use dcp_proto::plan::{Ends, ReadPlan, VbucketRange};
use dcp_proto::topology::Manifest;
use dcp_proto::{BatchSink, CaughtUp, FailoverLog, Position, SinkError, Snapshot};
use dcp_wire::message::ObservedSeqno;
use dcp_wire::{CollectionId, Seqno, Vbid, Vbuuid};
use tokio_util::sync::CancellationToken;

use crate::bucket::Bucket;
use crate::connect::Connector;
use crate::connection::NodeConnection;
use crate::observe::Nodes;
use crate::opening::Opening;
use crate::queue::{Credit, Entry, Queue, Queued, SharedState};
use crate::stream_task::{Placement, SharedStats, StreamConfig, StreamTask, check_end};
use crate::{
    Acknowledge, Acknowledger, BatchPolicy, ChangeStream, ConnectOptions, End, Error, ErrorKind,
    Filter, Observer, OnPurge, Start, StreamEvent, StreamOptions,
};
use crate::{filter, options};

/// A bucket to stream changes from. Cheap to clone.
///
/// Belongs to the tokio runtime it was connected on.
#[derive(Clone, Debug)]
pub struct Client {
    bucket: Arc<Bucket>,
    closed: CancellationToken,
}

impl Client {
    /// Connects to the first node of the connection string that answers, and fetches the bucket's
    /// nodes and collections from it.
    ///
    /// # Errors
    /// [`Error`] that says what to check.
    pub async fn connect(options: ConnectOptions) -> Result<Self, Error> {
        let bucket = Box::pin(Bucket::connect(Connector::new(options)?)).await?;
        Ok(Self { bucket: Arc::new(bucket), closed: CancellationToken::new() })
    }

    /// The options of the connection.
    #[must_use]
    pub fn connect_options(&self) -> &ConnectOptions {
        self.bucket.connect_options()
    }

    /// Name of the bucket.
    #[must_use]
    pub fn bucket_name(&self) -> &str {
        self.bucket.name()
    }

    /// Identity of the bucket: another one under the same name means it was recreated.
    #[must_use]
    pub fn bucket_uuid(&self) -> &str {
        self.bucket.uuid()
    }

    /// How many vBuckets the bucket has.
    #[must_use]
    pub fn num_vbuckets(&self) -> u16 {
        self.bucket.num_vbuckets()
    }

    /// Names and ids of the bucket's scopes and collections, as last seen.
    #[must_use]
    pub fn manifest(&self) -> Arc<Manifest> {
        self.bucket.manifest()
    }

    /// The vBuckets by the address of their active node, ascending. Those without an active node at
    /// the moment are left out.
    #[must_use]
    pub fn vbuckets_by_node(&self) -> Vec<(String, Vec<Vbid>)> {
        let by_address = self.bucket.by_address(self.all_vbuckets());
        let named = |(address, vbids): (Option<_>, _)| {
            address.map(|address: dcp_proto::topology::Address| (address.to_string(), vbids))
        };
        by_address.into_iter().filter_map(named).collect()
    }

    /// The highest seqno of every vBucket, requested from every node.
    ///
    /// # Errors
    /// [`Error`] if some vBucket's node did not answer within the connect timeout.
    pub async fn high_seqnos(&self) -> Result<BTreeMap<Vbid, Seqno>, Error> {
        self.check_open()?;
        let mut nodes = Nodes::new(Arc::clone(&self.bucket), None);
        let vbids = self.all_vbuckets().collect();
        Box::pin(nodes.high_seqnos(&vbids)).await.map_err(|error| self.bucket.explain(error))
    }

    /// A filter by ids, as checkpoints and offsets store it. Every node's manifest is fetched
    /// first, so that [`manifest`](Self::manifest) returns the newest one afterwards.
    ///
    /// # Errors
    /// [`ErrorKind::Config`] if there is no such scope or collection; [`Error`] if a node cannot be
    /// reached within the connect timeout.
    pub async fn stored_filter(
        &self,
        filter: &Filter,
        system_documents: bool,
    ) -> Result<StoredFilter, Error> {
        self.check_open()?;
        let mut nodes = Nodes::new(Arc::clone(&self.bucket), None);
        Box::pin(nodes.connect(&self.all_vbuckets().collect())).await?;
        filter::resolve(filter, system_documents, &self.manifest())
    }

    /// The collections that a filter chooses, as `scope.collection`, from the newest manifest of
    /// the nodes.
    ///
    /// # Errors
    /// As [`Client::stored_filter`].
    pub async fn collections(
        &self,
        filter: &Filter,
    ) -> Result<BTreeMap<String, CollectionId>, Error> {
        let filter = self.stored_filter(filter, false).await?;
        Ok(filter::delivered(&filter, &self.manifest()))
    }

    /// An observer of the vBuckets' seqnos, for repeated use.
    ///
    /// # Errors
    /// [`Error`] if the client is closed.
    pub fn observer(&self) -> Result<Observer, Error> {
        self.check_open()?;
        Observer::new(Arc::clone(&self.bucket))
    }

    /// Opens a stream of changes. `make_sink` makes one sink for each connection to a node.
    ///
    /// # Errors
    /// [`Error`] if the options contradict each other, the checkpoint does not belong to this
    /// bucket and filter or is ahead of the server, or the server refuses.
    pub async fn stream<S: BatchSink>(
        &self,
        options: StreamOptions,
        make_sink: impl Fn() -> S + Send + Sync + 'static,
    ) -> Result<ChangeStream<S::Batch>, Error> {
        self.check_open()?;
        let resolved = Box::pin(self.resolve(&options)).await;
        let (plan, opened) = resolved.map_err(|error| self.bucket.explain(error))?;
        self.start(&plan, opened, &options, make_sink)
    }

    /// Plans what a stream with these options would read, without reading it. The plan can be sent
    /// elsewhere and [run](Self::run) there; with [`End::Now`], it ends with what there is now.
    ///
    /// # Errors
    /// As [`Client::stream`].
    pub async fn plan(&self, options: &StreamOptions) -> Result<ReadPlan, Error> {
        self.check_open()?;
        let resolved = Box::pin(self.resolve(options)).await;
        Ok(resolved.map_err(|error| self.bucket.explain(error))?.0)
    }

    /// Opens the stream of a plan. `options` only say how its changes are delivered: what is read is
    /// the plan's. Each stream of it has the same bounds, and begins with the rollbacks of the plan.
    ///
    /// # Errors
    /// As [`Client::stream`]; [`ErrorKind::Checkpoint`] if the plan is of another bucket.
    pub async fn run<S: BatchSink>(
        &self,
        plan: &ReadPlan,
        options: &StreamOptions,
        make_sink: impl Fn() -> S + Send + Sync + 'static,
    ) -> Result<ChangeStream<S::Batch>, Error> {
        self.check_open()?;
        plan.check(self.bucket_uuid())?;
        let opened = Box::pin(self.open(plan, options)).await;
        let opened = opened.map_err(|error| self.bucket.explain(error))?;
        self.start(plan, opened, options, make_sink)
    }

    /// Closes the client and the streams it has opened: each ends with an error of kind
    /// [`ErrorKind::Closed`].
    pub async fn close(&self) {
        self.closed.cancel();
        self.bucket.pool().close();
        // Lets the tasks notice, so that sockets are closed soon.
        tokio::task::yield_now().await;
    }

    fn check_open(&self) -> Result<(), Error> {
        if self.closed.is_cancelled() {
            return Err(Error::new(ErrorKind::Closed, "the client is closed"));
        }
        self.bucket.check_identity()
    }

    fn all_vbuckets(&self) -> impl Iterator<Item = Vbid> + use<> {
        (0..self.num_vbuckets()).map(Vbid)
    }

    /// What a stream with these options reads, and what was found out for it.
    async fn resolve(&self, options: &StreamOptions) -> Result<(ReadPlan, Opened), Error> {
        options.check()?;
        let vbids = self.vbuckets(options)?;
        let mut nodes = self.nodes(options, options.retry_timeout, &vbids).await?;
        // Each connection has fetched the manifest of its node: this is the newest of them.
        let manifest = self.manifest();
        let filter = filter::of(options, &manifest)?;
        let given = self.given(&options.start, &filter, &manifest)?;
        let mut opened = Opened::new(&mut nodes, &vbids, filter.documents(), &manifest).await?;
        let start = self.start_at(options, given, &vbids, &opened.high, &mut nodes).await?;
        let (ends, to): (_, BTreeMap<Vbid, Seqno>) = match &options.end {
            End::Never => (Ends::Never, vbids.iter().map(|&vbid| (vbid, Seqno::MAX)).collect()),
            End::Now => (Ends::Now, vbids.iter().map(|&vbid| (vbid, opened.high(vbid))).collect()),
            End::At(seqnos) => {
                (if options.end_exists { Ends::Exist } else { Ends::Given }, seqnos.clone())
            }
        };
        let plan = ReadPlan {
            start,
            to: to.into_iter().filter(|(vbid, _)| vbids.contains(vbid)).collect(),
            ends,
            rolled_back: Vec::new(),
            past_purge: options.on_purge == OnPurge::Ignore,
            clamp: options.clamp,
            persisted_only: options.persisted_only,
            end_persisted: options.end_persisted,
            on_rollback: options.on_rollback,
            node: None,
            retry_timeout: options.retry_timeout,
        };
        opened.connections = nodes.into_connections();
        Ok((plan, opened))
    }

    /// What has to be found out to run a plan that was made before.
    async fn open(&self, plan: &ReadPlan, options: &StreamOptions) -> Result<Opened, Error> {
        options::check_batch(&options.batch)?;
        options.check_initial_deletions()?;
        let vbids: BTreeSet<Vbid> = plan.streamed().map(|range| range.vbid).collect();
        self.check_vbuckets(&["vbuckets"], &vbids)?;
        let mut nodes = self.nodes(options, plan.retry_timeout, &vbids).await?;
        let filter = plan.filter();
        let manifest = self.manifest();
        let mut opened = Opened::new(&mut nodes, &vbids, filter.documents(), &manifest).await?;
        check_not_ahead(&plan.start, &vbids, &opened.high, &mut nodes).await?;
        opened.connections = nodes.into_connections();
        Ok(opened)
    }

    async fn nodes(
        &self,
        options: &StreamOptions,
        retry_timeout: Duration,
        vbids: &BTreeSet<Vbid>,
    ) -> Result<Nodes, Error> {
        let opening = Opening::new(options)?;
        let mut nodes = Nodes::for_stream(Arc::clone(&self.bucket), opening, retry_timeout);
        nodes.connect(vbids).await?;
        Ok(nodes)
    }

    /// Starts the task of a stream.
    fn start<S: BatchSink>(
        &self,
        plan: &ReadPlan,
        opened: Opened,
        options: &StreamOptions,
        make_sink: impl Fn() -> S + Send + Sync + 'static,
    ) -> Result<ChangeStream<S::Batch>, Error> {
        let (ranges, empty) = self.ranges(plan, &opened, options)?;
        let is_first_load = ranges.iter().all(|range| range.start_seqno() == Seqno::ZERO);
        let first_load = (is_first_load && options.priority.is_none())
            .then(|| self.bucket.first_load(tokio::time::Instant::now()));
        let config = self.stream_config(plan, options)?;
        let now = tokio::time::Instant::now().into_std();
        // Time to connect, and to get an answer.
        let attempt = self.bucket.connect_timeout().saturating_mul(2);
        let retry_timeout = (plan.retry_timeout, attempt);
        let mut placement = Placement::new(ranges, retry_timeout, now, self.bucket.randomness());
        placement.add_complete(empty.iter().copied());
        let queue = Arc::new(Queue::new());
        let stats = Arc::new(SharedStats::default());
        if plan.persisted_only && !config.delivery.persisted_only {
            tracing::warn!(
                name: "nothing_persisted",
                "the bucket has no disk: changes are delivered although no copy has persisted them"
            );
            stats.events.push(StreamEvent::NothingPersisted);
        }
        deliver_rollbacks(plan, options.batch, &mut make_sink(), &queue, &stats)?;
        for vbid in empty {
            let caught_up = CaughtUp { vbid, seqno: Seqno::ZERO, epoch: 0 };
            stats.events.push(StreamEvent::CaughtUp(caught_up));
        }
        let cancel = self.closed.child_token();
        let task = StreamTask::new(
            Arc::clone(&self.bucket),
            config,
            placement,
            Box::new(make_sink),
            Arc::clone(&queue),
            Arc::clone(&stats),
            cancel.clone(),
        );
        tokio::spawn(task.run(opened.connections));
        let is_manual = options.acknowledge == Acknowledge::Manual;
        let acks = Acknowledger::new(is_manual, &plan.start);
        Ok(ChangeStream::new(queue, plan.start.clone(), acks, stats, first_load, cancel))
    }

    /// The ranges to request, and the vBuckets that are at their ends without a request.
    fn ranges(
        &self,
        plan: &ReadPlan,
        opened: &Opened,
        options: &StreamOptions,
    ) -> Result<(Vec<VbucketRange>, Vec<Vbid>), Error> {
        let (mut ranges, mut empty) = (Vec::with_capacity(plan.to.len()), Vec::new());
        for mut range in plan.streamed() {
            let (vbid, high) = (range.vbid, opened.high(range.vbid));
            if plan.ends == Ends::Exist {
                check_end(vbid, range.to, high).map_err(|error| self.bucket.explain(error))?;
            }
            if (range.start_seqno(), range.to) == (Seqno::ZERO, Seqno::ZERO) && !options.caught_up {
                empty.push(vbid);
                continue;
            }
            // An out-of-order initial load was not completed, as the epoch shows.
            range.from.begins_again =
                options.out_of_order && range.start_seqno() == Seqno::ZERO && range.epoch() > 0;
            let was_seen = self.bucket.has_seen(vbid, range.to);
            let kind = plan.end_kind(&range, high, was_seen);
            range.from = range.from.with_end(kind).with_catch_up(opened.head(vbid));
            ranges.push(range);
        }
        Ok((ranges, empty))
    }

    fn stream_config(
        &self,
        plan: &ReadPlan,
        options: &StreamOptions,
    ) -> Result<StreamConfig, Error> {
        let (filter, manifest) = (plan.filter(), self.manifest());
        let config = self.bucket.config();
        let ignore_purged_tombstones = plan.past_purge && config.ignores_purges();
        if plan.past_purge && !ignore_purged_tombstones {
            tracing::warn!(
                name: "no_resume_after_purge",
                "this server cannot resume where deletions were purged, as Couchbase Server 7.2 \
                 can: such vBuckets start from the beginning"
            );
        }
        let persisted_only = plan.persisted_only && !self.bucket.config().is_ephemeral();
        Ok(StreamConfig {
            opening: Opening::new(options)?,
            filter: filter.documents().clone(),
            on_rollback: plan.on_rollback,
            ignore_purged_tombstones,
            delivery: Delivery {
                clamp: plan.clamp,
                persisted_only,
                end_persisted: plan.end_persisted,
                exclusions: filter::exclusions_of(&filter, &manifest),
                rows: filter.rows().clone(),
            },
            end_exists: plan.ends == Ends::Exist,
            batch: BatchPolicy {
                max_bytes: options.batch.max_bytes.min(BatchPolicy::MAX_BYTES),
                ..options.batch
            },
        })
    }

    /// The vBuckets to stream.
    fn vbuckets(&self, options: &StreamOptions) -> Result<BTreeSet<Vbid>, Error> {
        let mut vbids: BTreeSet<Vbid> = match &options.vbuckets {
            None => self.all_vbuckets().collect(),
            Some(vbids) => vbids.iter().copied().collect(),
        };
        let ends = match &options.end {
            End::At(seqnos) => Some(seqnos),
            _ => None,
        };
        self.check_vbuckets(&["vbuckets"], &vbids)?;
        self.check_vbuckets(&["end"], ends.into_iter().flat_map(BTreeMap::keys))?;
        if let Some(seqnos) = ends {
            vbids.retain(|vbid| seqnos.contains_key(vbid));
        }
        Ok(vbids)
    }

    fn check_vbuckets<'a>(
        &self,
        option: &'static [&'static str],
        vbids: impl IntoIterator<Item = &'a Vbid>,
    ) -> Result<(), Error> {
        let num_vbuckets = self.num_vbuckets();
        let Some(vbid) = vbids.into_iter().find(|vbid| vbid.0 >= num_vbuckets) else {
            return Ok(());
        };
        let problem = format!("{vbid} does not exist: the bucket has {num_vbuckets} vBuckets");
        let error = Error::option(option, problem).with_value(vbid.0.to_string());
        Err(error.with_vbid(*vbid))
    }

    /// The checkpoint to start from; an empty one if none is given.
    fn given(
        &self,
        start: &Start,
        filter: &StoredFilter,
        manifest: &Manifest,
    ) -> Result<Checkpoint, Error> {
        match start {
            Start::Checkpoint(given) => {
                let given = given.narrowed_to(self.bucket_uuid(), filter, manifest)?;
                let num_vbuckets = self.num_vbuckets();
                let beyond = given.positions().map(|(vbid, _)| vbid).find(|v| v.0 >= num_vbuckets);
                match beyond {
                    None => Ok(given),
                    Some(vbid) => {
                        let message = format!(
                            "the checkpoint has a position of {vbid}, and the bucket has \
                             {num_vbuckets} vBuckets: start without a checkpoint"
                        );
                        Err(Error::new(ErrorKind::Checkpoint, message).with_vbid(vbid))
                    }
                }
            }
            _ => Ok(Checkpoint::new(self.bucket_uuid(), filter.clone())),
        }
    }

    /// Start positions of the stream.
    async fn start_at(
        &self,
        options: &StreamOptions,
        mut checkpoint: Checkpoint,
        vbids: &BTreeSet<Vbid>,
        high: &BTreeMap<Vbid, Seqno>,
        nodes: &mut Nodes,
    ) -> Result<Checkpoint, Error> {
        match &options.start {
            Start::Earliest => {}
            Start::Latest => {
                let (written, empty): (Vec<_>, Vec<_>) =
                    high.iter().partition(|(_, seqno)| **seqno != Seqno::ZERO);
                // Empty vBuckets have positions as well, so that a later stream resumes there and
                // not after newer changes.
                for (vbid, _) in empty {
                    checkpoint.set(*vbid, Position::EARLIEST);
                }
                let written = written.into_iter().map(|(vbid, _)| *vbid).collect();
                for (vbid, (seqno, log)) in nodes.newest(written).await? {
                    checkpoint.set(vbid, latest(seqno, log));
                }
            }
            Start::Checkpoint(_) => check_not_ahead(&checkpoint, vbids, high, nodes).await?,
        }
        Ok(checkpoint)
    }
}

/// Delivers the rollbacks that a plan begins with, before any connection has changes. The positions of
/// the plan are already those after them.
fn deliver_rollbacks<S: BatchSink>(
    plan: &ReadPlan,
    policy: BatchPolicy,
    sink: &mut S,
    queue: &Queue<S::Batch>,
    stats: &SharedStats,
) -> Result<(), Error> {
    let shared = Arc::new(SharedState::default());
    let failed =
        |error: SinkError| Error::new(ErrorKind::Sink, error.to_string()).with_source(error);
    let push = |sink: &mut S| {
        let (rows, positions) = (sink.rows(), Vec::new());
        let credit = Credit::new(Arc::clone(&shared), 0);
        let batch = sink.take_batch().map_err(failed)?;
        queue.push(Entry::Batch(Queued { batch, rows, positions, credit }));
        Ok(())
    };
    for rollback in plan.ranges().filter_map(|range| range.rollback()) {
        sink.rollback(&rollback).map_err(failed)?;
        stats.events.push(StreamEvent::RolledBack(rollback));
        if sink.rows() >= policy.max_rows || sink.size_bytes() >= policy.max_bytes {
            push(sink)?;
        }
    }
    if sink.rows() > 0 { push(sink) } else { Ok(()) }
}

/// What is found out when a stream is opened.
struct Opened {
    high: BTreeMap<Vbid, Seqno>,
    /// High seqnos of the filter's collections, if they are known.
    heads: Option<BTreeMap<Vbid, Seqno>>,
    connections: Vec<NodeConnection>,
}

impl Opened {
    async fn new(
        nodes: &mut Nodes,
        vbids: &BTreeSet<Vbid>,
        filter: &StreamFilter,
        manifest: &Manifest,
    ) -> Result<Self, Error> {
        let high = nodes.high_seqnos(vbids).await?;
        let heads = heads(nodes, vbids, filter, manifest).await;
        Ok(Self { high, heads, connections: Vec::new() })
    }

    fn high(&self, vbid: Vbid) -> Seqno {
        self.high.get(&vbid).copied().unwrap_or_default()
    }

    fn head(&self, vbid: Vbid) -> Seqno {
        self.heads.as_ref().unwrap_or(&self.high).get(&vbid).copied().unwrap_or_default()
    }
}

/// The highest seqnos of a filter's collections; `None` without a filter, or if the server does not
/// report them.
async fn heads(
    nodes: &mut Nodes,
    vbids: &BTreeSet<Vbid>,
    filter: &StreamFilter,
    manifest: &Manifest,
) -> Option<BTreeMap<Vbid, Seqno>> {
    let collections = match filter {
        StreamFilter::All => return None,
        StreamFilter::Collections(ids) => ids.clone(),
        StreamFilter::Scope(scope) => {
            let of_scope = manifest.collections().filter(|entry| entry.scope_id == *scope);
            of_scope.map(|entry| entry.id).collect()
        }
    };
    let asked = nodes.collection_seqnos(vbids, &collections).await;
    asked.inspect_err(|error| tracing::debug!(%error, "the seqnos of collections are unknown")).ok()
}

/// The position after the newest change.
fn latest(seqno: Seqno, log: FailoverLog) -> Position {
    let snapshot = Snapshot::at(seqno);
    Position { seqno, snapshot, failover_log: Some(log), ..Position::EARLIEST }
}

/// Refuses a checkpoint that is ahead of the server without a failover that explains it: resuming
/// would silently skip the next changes.
///
/// `high` may leave out prepared and aborted durable writes, which a position can be at: only the
/// seqno of the history counts.
async fn check_not_ahead(
    checkpoint: &Checkpoint,
    vbids: &BTreeSet<Vbid>,
    high: &BTreeMap<Vbid, Seqno>,
    nodes: &mut Nodes,
) -> Result<(), Error> {
    let ahead: BTreeSet<Vbid> = vbids
        .iter()
        .copied()
        .filter(|vbid| {
            let high = high.get(vbid).copied().unwrap_or_default();
            checkpoint.position(*vbid).is_some_and(|position| position.seqno > high)
        })
        .collect();
    let mut logs = nodes.failover_logs(&ahead).await?;
    logs.retain(|&vbid, log| {
        checkpoint.position(vbid).is_some_and(|it| it.vbuuid() == log.newest().vbuuid)
    });
    let branches: BTreeMap<Vbid, Vbuuid> =
        logs.iter().map(|(&vbid, log)| (vbid, log.newest().vbuuid)).collect();
    let observed = nodes.observe(&branches).await?;
    for (vbid, branch) in branches {
        let Some(position) = checkpoint.position(vbid) else { continue };
        // After a failover in between, the server rolls back.
        let is_ahead = |seen: &ObservedSeqno| {
            seen.vbuuid == branch && seen.failover.is_none() && position.seqno > seen.current_seqno
        };
        if observed.get(&vbid).is_some_and(is_ahead) {
            let message = format!(
                "the checkpoint is ahead of the server ({vbid}: seqno {}, the server has {}): it \
                 belongs to another copy of the bucket, or the bucket was restored; start without \
                 it",
                position.seqno,
                high.get(&vbid).copied().unwrap_or_default()
            );
            return Err(Error::new(ErrorKind::Checkpoint, message).with_vbid(vbid));
        }
    }
    Ok(())
}
