//! A bucket to stream changes from.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dcp_proto::checkpoint::{Checkpoint, StoredFilter};
use dcp_proto::consumer::{Delivery, EndKind, Exclusions, StreamFilter, StreamPosition};
use dcp_proto::topology::Manifest;
use dcp_proto::{BatchSink, CaughtUp, FailoverLog, Position, Snapshot};
use dcp_wire::message::ObservedSeqno;
use dcp_wire::{Seqno, Vbid, Vbuuid};
use tokio_util::sync::CancellationToken;

use crate::bucket::Bucket;
use crate::connect::Connector;
use crate::connection::NodeConnection;
use crate::observe::Nodes;
use crate::opening::Opening;
use crate::queue::Queue;
use crate::stream_task::{Placement, SharedStats, StreamConfig, StreamTask, check_end};
use crate::{
    Acknowledge, Acknowledger, BatchPolicy, ChangeStream, ConnectOptions, End, Error, ErrorKind,
    Filter, Observer, Start, StreamEvent, StreamOptions,
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
        let plan = Box::pin(self.plan(&options)).await;
        let plan = plan.map_err(|error| self.bucket.explain(error))?;
        let Plan { config, checkpoint, vbuckets, complete, connections } = plan;
        let now = tokio::time::Instant::now().into_std();
        // Time to connect, and to get an answer.
        let attempt = self.bucket.connect_timeout().saturating_mul(2);
        let patience = (options.retry_timeout, attempt);
        let mut placement = Placement::new(vbuckets, patience, now, self.bucket.randomness());
        let empty = complete.clone();
        placement.add_complete(complete);
        let queue = Arc::new(Queue::new());
        let stats = Arc::new(SharedStats::default());
        if options.persisted_only && !config.delivery.persisted_only {
            tracing::warn!("persisted_only has no effect on an ephemeral bucket");
            stats.events.push(StreamEvent::NothingPersisted);
        }
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
        tokio::spawn(task.run(connections));
        let is_manual = options.acknowledge == Acknowledge::Manual;
        let acks = Acknowledger::new(is_manual, &checkpoint);
        Ok(ChangeStream::new(queue, checkpoint, acks, stats, cancel))
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

    /// Determines where each vBucket begins and ends, with requests to the nodes if necessary.
    async fn plan(&self, options: &StreamOptions) -> Result<Plan, Error> {
        options::check(options)?;
        let opening = Opening::new(options)?;
        let vbids = self.vbuckets(options)?;
        let (bucket, patience) = (Arc::clone(&self.bucket), options.retry_timeout);
        let mut nodes = Nodes::for_stream(bucket, opening.clone(), patience);
        nodes.connect(&vbids).await?;
        // Each connection has fetched the manifest of its node: this is the newest of them.
        let manifest = self.manifest();
        let filter = filter::resolve(&options.filter, options.system_documents, &manifest)?
            .with_rows(options.rows.clone());
        let given = self.given(&options.start, &filter, &manifest)?;
        let high = nodes.high_seqnos(&vbids).await?;
        let heads = heads(&mut nodes, &vbids, filter.documents(), &manifest).await;
        let heads = heads.as_ref().unwrap_or(&high);
        let checkpoint = self.start(options, given, &vbids, &high, &mut nodes).await?;
        let (mut vbuckets, mut complete) = (Vec::with_capacity(vbids.len()), Vec::new());
        for &vbid in &vbids {
            let mut from = checkpoint.stream_position(vbid);
            let position = &from.position;
            // An out-of-order initial load was not completed, as the epoch shows.
            from.begins_again =
                options.out_of_order && position.seqno == Seqno::ZERO && position.epoch > 0;
            let head = heads.get(&vbid).copied().unwrap_or_default();
            let high = high.get(&vbid).copied().unwrap_or_default();
            let (end, kind) = match &options.end {
                End::Never => (Seqno::MAX, EndKind::Awaited),
                End::Now => (high, EndKind::Latest),
                End::At(seqnos) => {
                    let end = seqnos.get(&vbid).copied().unwrap_or_default();
                    if options.end_exists {
                        check_end(vbid, end, high)?;
                    }
                    let was_there = position.seqno >= end || self.bucket.has_seen(vbid, end);
                    let kind = match was_there {
                        _ if options.end_exists => EndKind::Required,
                        _ if high >= end => EndKind::Seen,
                        true => EndKind::Latest,
                        false => EndKind::Awaited,
                    };
                    (end, kind)
                }
            };
            // Any other vBucket is requested even if nothing is left to read: only the server can
            // detect that the position is no longer on its history.
            if (position.seqno, end) == (Seqno::ZERO, Seqno::ZERO) && !options.caught_up {
                complete.push(vbid);
                continue;
            }
            vbuckets.push((vbid, end, from.with_end(kind).with_catch_up(head)));
        }
        let exclusions = match (options.system_documents, filter.patterns().is_all()) {
            (true, _) => Exclusions::default(),
            (false, true) => filter::exclusions(filter.documents(), &manifest),
            // Patterns that do not name scope `_system` leave it out.
            (false, false) => Exclusions::default().with_transactions(),
        };
        let exclusions = exclusions.with_patterns(filter.patterns(), &manifest);
        let config = self.bucket.config();
        let ignore_purged_tombstones = options.ignore_purged_tombstones && config.ignores_purges();
        if options.ignore_purged_tombstones && !ignore_purged_tombstones {
            tracing::warn!(
                "ignore_purged_tombstones needs Couchbase Server 7.2: vBuckets with purged \
                 deletions start from the beginning"
            );
        }
        let persisted_only = options.persisted_only && !self.bucket.config().is_ephemeral();
        let config = StreamConfig {
            opening,
            filter: filter.documents().clone(),
            on_rollback: options.on_rollback,
            ignore_purged_tombstones,
            delivery: Delivery {
                clamp: options.clamp,
                persisted_only,
                end_persisted: options.end_persisted,
                exclusions,
                rows: options.rows.clone(),
            },
            end_exists: options.end_exists,
            batch: BatchPolicy {
                max_bytes: options.batch.max_bytes.min(BatchPolicy::MAX_BYTES),
                ..options.batch
            },
        };
        let connections = nodes.into_connections();
        Ok(Plan { config, checkpoint, vbuckets, complete, connections })
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
        let num_vbuckets = self.num_vbuckets();
        let mut named = vbids.iter().chain(ends.into_iter().flat_map(BTreeMap::keys));
        if let Some(vbid) = named.find(|vbid| vbid.0 >= num_vbuckets) {
            let message = format!("{vbid} does not exist: the bucket has {num_vbuckets} vBuckets");
            return Err(Error::new(ErrorKind::Config, message).with_vbid(*vbid));
        }
        if let Some(seqnos) = ends {
            vbids.retain(|vbid| seqnos.contains_key(vbid));
        }
        Ok(vbids)
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
                Ok(given.narrowed_to(self.bucket_uuid(), filter, manifest)?)
            }
            _ => Ok(Checkpoint::new(self.bucket_uuid(), filter.clone())),
        }
    }

    /// Start positions of the stream.
    async fn start(
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

/// Parameters of a stream to be opened.
struct Plan {
    config: StreamConfig,
    checkpoint: Checkpoint,
    vbuckets: Vec<(Vbid, Seqno, StreamPosition)>,
    /// vBuckets that are already at their ends.
    complete: Vec<Vbid>,
    connections: Vec<NodeConnection>,
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
