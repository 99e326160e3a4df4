//! Bounded reads that follow each other, as Spark's micro-batches: a driver that plans and writes
//! down what it planned, tasks side by side, and a process that dies between any two steps.
//!
//! In worlds where they read only what is persisted no vBucket is taken back by hand below that
//! ([`Kind::BY_HAND`](crate::plan::Kind::BY_HAND)), which is outside of what that promises.

use dcp_test::with;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use dcp_consumer::plan::{Planner, PlannerError};
use dcp_consumer::{Client, Filter, OnPurge, OnRollback, StreamOptions};
use dcp_proto::checkpoint::{Checkpoint, CheckpointError, StoredFilter};
use dcp_proto::consumer::StreamFilter;
use dcp_proto::plan::{Limits, Offsets, PlanError, ReadPlan, Start};
use dcp_wire::Vbid;
use rand::Rng;
use rand::rngs::StdRng;
use tokio::time::sleep;

use super::tasks::Tasks;
use super::verdict::wanted_ids;
use super::{Process, RETRY_TIMEOUT, Stop, Wanted};
use crate::plan::{FilterPlan, ReaderKind};
use crate::rows::{Item, Table, shown};
use crate::storage::Pair;

/// What is kept of micro-batches: the offsets that were written down, and the rows of batches that
/// were committed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Log {
    /// As text, by batch; the last one may not be committed.
    offsets: Vec<String>,
    committed: usize,
    pub(crate) table: Table,
    /// Collections that the newest offsets were planned for, where the filter names any.
    ids: Option<BTreeSet<u32>>,
    /// Of all batches that were committed, in that order.
    rows: Vec<Item>,
}

impl Log {
    /// What was committed, as far as it can be held against the cluster.
    pub(crate) fn as_pair(&self) -> Option<Pair> {
        let offsets = self.offsets(0)?;
        let checkpoint = Checkpoint::new(offsets.bucket_uuid(), StoredFilter::default());
        Some(Pair { checkpoint, table: self.table.clone(), ids: self.ids.clone(), since: 0 })
    }

    /// The offsets that everything up to is committed.
    pub(super) fn committed_end(&self) -> Option<Offsets> {
        self.offsets(self.committed.checked_sub(1)?)
    }

    pub(super) fn rows(&self) -> &[Item] {
        &self.rows
    }

    /// Offsets that were written down, of a batch or of the beginning.
    fn offsets(&self, batch: usize) -> Option<Offsets> {
        let json = self.offsets.get(batch)?;
        Some(Offsets::from_json(json).expect("what was written"))
    }
}

impl Process {
    /// Runs micro-batches until the process is killed.
    pub(super) async fn read_batches(self: &Rc<Self>, rng: &mut StdRng) -> Result<(), Stop> {
        let client = self.client(rng).await?;
        let (filter, _) = self.filter(&self.names_for_batches(rng))?;
        let mut planner = self.planner(&client, &filter).await?;
        let tasks = self.tasks(filter);
        let available_now = rng.random_bool(0.3);
        if available_now {
            planner.fix_target(&self.limits(rng)).await.map_err(|error| self.planning(error))?;
            self.shared.count("micro-batches of what is available now");
        }
        for _ in 0..rng.random_range(1..12) {
            if self.stops.get() {
                return Ok(());
            }
            self.rest().await;
            if !self.batch(&mut planner, &tasks, rng).await? {
                if available_now {
                    return Ok(());
                }
                sleep(Duration::from_millis(rng.random_range(1..300))).await;
            }
        }
        Ok(())
    }

    /// Collections of a job that is started again: those it had, or, because somebody has changed
    /// its options, all there are or but one.
    fn names_for_batches(&self, rng: &mut StdRng) -> BTreeMap<String, u32> {
        let Log { offsets, committed, ids: had, .. } = self.storage.borrow().batches.clone();
        // A batch that is under way keeps the filter that its offsets name.
        let is_under_way = offsets.len() > committed;
        let is_well = self.shared.healed.get().is_some();
        if self.plan.filter != FilterPlan::Collections || is_under_way || is_well {
            return self.names(had.as_ref());
        }
        let is_widened = had.is_some() && rng.random_bool(0.3);
        let mut names = self.names(if is_widened { None } else { had.as_ref() });
        let is_narrowed = rng.random_bool(if had.is_some() { 0.1 } else { 0.4 });
        if is_narrowed && names.len() > 1 {
            names.pop_first();
        }
        names
    }

    /// A planner for what the filter names, as long as it names what it did.
    async fn planner(&self, client: &Client, filter: &Filter) -> Result<Planner, Stop> {
        let options = with(StreamOptions::default(), |o| {
            o.filter = filter.clone();
            o.system_documents = self.plan.system_documents;
            o.retry_timeout = RETRY_TIMEOUT;
        });
        let planner = Planner::new(client, options).await.map_err(|error| self.planning(error))?;
        let ids = match planner.earliest().filter().map(StoredFilter::documents) {
            Some(StreamFilter::Collections(ids)) => Some(ids.iter().map(|id| id.0).collect()),
            _ => None,
        };
        if *self.ids.borrow() == ids { Ok(planner) } else { Err(Stop::Again) }
    }

    /// The tasks of a job, and what their streams have in common.
    fn tasks(self: &Rc<Self>, filter: Filter) -> Rc<Tasks> {
        let base = with(StreamOptions::default(), |o| {
            o.filter = filter;
            o.batch = self.plan.batch;
            o.noop_interval = self.plan.noop_interval;
            o.compressed = self.plan.compressed;
            o.system_documents = self.plan.system_documents;
            o.buffer_size = StreamOptions::MIN_BUFFER_SIZE;
        });
        Rc::new(Tasks::new(Rc::clone(self), self.connect_options(), base))
    }

    /// Reads all there is from where a stream stood, as a job that nothing follows. Tasks tell
    /// rows and no positions, so that nothing of it is stored.
    pub(super) async fn read_once(
        self: &Rc<Self>,
        wanted: &Wanted,
        rng: &mut StdRng,
    ) -> Result<Table, Stop> {
        let filter = &wanted.options.filter;
        let mut planner = self.planner(&wanted.client, filter).await?;
        let tasks = self.tasks(filter.clone());
        let limits = with(self.limits(rng), |o| {
            o.max_seqnos = None;
            // Where deletions were purged all comes again.
            o.on_purge = OnPurge::Resync;
            o.is_last = true;
        });
        let (start, mut table) = match &wanted.pair {
            Some(pair) => (planner.start_at(pair.checkpoint.clone()), pair.table.clone()),
            None => (planner.earliest().into(), Table::default()),
        };
        let end = planner.end(&start, &limits).await.map_err(|error| self.planning(error))?;
        let losses = self.shared.world.borrow().losses;
        let partitions = planner.partitions(&start, &end, None, &limits).await;
        let partitions = partitions.map_err(|error| self.planning(error))?;
        for item in tasks.run(partitions, losses, rng).await? {
            table.apply(&item).map_err(Stop::Violation)?;
        }
        self.shared.count("read once");
        Ok(table)
    }

    fn limits(&self, rng: &mut StdRng) -> Limits {
        with(Limits::default(), |o| {
            o.max_seqnos = rng.random_bool(0.6).then(|| rng.random_range(1..30));
            o.persisted_only = self.plan.persisted_only;
            o.on_rollback = match self.plan.on_rollback {
                OnRollback::Resync => OnRollback::Resync,
                _ => OnRollback::Emit,
            };
        })
    }

    /// Plans, reads and commits one batch, or repeats the one that was not committed; `false` if
    /// there was nothing to read.
    async fn batch(
        &self,
        planner: &mut Planner,
        tasks: &Rc<Tasks>,
        rng: &mut StdRng,
    ) -> Result<bool, Stop> {
        let limits = self.limits(rng);
        let mut log = self.storage.borrow().batches.clone();
        if log.offsets.is_empty() {
            log.offsets.push(planner.earliest().to_json());
            log.ids.clone_from(&self.ids.borrow());
            log.committed = 1;
            self.storage.borrow_mut().batches = log.clone();
        }
        let start: Start = log.offsets(log.committed - 1).expect("the last one committed").into();
        if log.offsets.len() == log.committed {
            let branches = self.shared.world.borrow().branches();
            let end = planner.end(&start, &limits).await.map_err(|error| self.planning(error))?;
            self.check_read(&log, start.offsets(), &end, &branches).map_err(Stop::Violation)?;
            if end == *start.offsets() {
                return Ok(false);
            }
            // Written down before anything of it is read.
            log.offsets.push(end.to_json());
            log.ids.clone_from(&self.ids.borrow());
            self.storage.borrow_mut().batches = log.clone();
        } else {
            self.shared.count("micro-batch repeated");
        }
        self.die_now_and_then(rng)?;
        if rng.random_bool(0.4) {
            // Those that run the tasks are busy.
            sleep(Duration::from_millis(rng.random_range(0..800))).await;
        }
        let end = log.offsets(log.committed).expect("the one written down");
        let losses = self.shared.world.borrow().losses;
        let partitions = planner
            .partitions(&start, &end, Some(rng.random_range(1..4)), &limits)
            .await
            .map_err(|error| self.planning(error))?;
        // As they come to tasks on other machines.
        let sent = partitions.iter().map(|partition| ReadPlan::from_json(&partition.to_json()));
        let sent: Result<Vec<_>, _> = sent.collect();
        let sent = sent.map_err(|error| Stop::Violation(error.to_string()))?;
        let items = tasks.run(sent, losses, rng).await?;
        for item in &items {
            log.table
                .apply(item)
                .map_err(|wrong| Stop::Violation(format!("batch {}: {wrong}", log.committed)))?;
        }
        let told = format!("reader {}: batch {}", self.plan.number, log.committed);
        self.shared.trace.add(format!("{told}, {} rows, to {end:?}", items.len()));
        log.rows.extend(items);
        log.committed += 1;
        self.storage.borrow_mut().batches = log;
        self.shared.count("micro-batch committed");
        Ok(true)
    }

    /// Where no rollback is told, what was read up to the offsets is all the cluster has up to
    /// there. Branches are those before the plan was made.
    fn check_read(
        &self,
        log: &Log,
        from: &Offsets,
        to: &Offsets,
        branches: &BTreeMap<Vbid, u64>,
    ) -> Result<(), String> {
        let world = self.shared.world.borrow();
        if from.bucket_uuid() != world.producer.bucket_uuid() {
            return Ok(());
        }
        let after = world.branches();
        let is_told = |vbid| to.get(vbid).epoch > from.get(vbid).epoch;
        let is_same =
            |vbid| branches.contains_key(&vbid) && branches.get(&vbid) == after.get(&vbid);
        let end = |vbid| (is_same(vbid) && !is_told(vbid)).then(|| from.get(vbid).seqno.0);
        let ids = wanted_ids(&self.plan, &world, log.as_pair().as_ref());
        let wants = world.documents_up_to(&ids, self.plan.system_documents, end)?;
        let has = log.table.documents(None);
        let passed = wants.iter().find(|(key, value)| has.get(key) != Some(value));
        passed.map_or(Ok(()), |((id, key), value)| {
            let (key, value) = (String::from_utf8_lossy(key), shown(value));
            Err(format!("the offsets have passed {id}/{key} = {value}: {from:?}"))
        })
    }

    /// The driver's process may die between any two steps.
    pub(super) fn die_now_and_then(&self, rng: &mut StdRng) -> Result<(), Stop> {
        if rng.random_bool(0.05) {
            self.shared.count("driver died");
            return Err(Stop::Again);
        }
        Ok(())
    }

    /// What a failure of the planner means.
    pub(super) fn planning(&self, error: PlannerError) -> Stop {
        match error {
            PlannerError::Cluster(error) => Stop::Opening(error),
            // Planned again from what is written down.
            PlannerError::Plan(PlanError::NotPersisted { .. }) => Stop::Again,
            PlannerError::Plan(PlanError::Purged { .. }) => {
                self.storage.borrow_mut().lose();
                self.shared.count("began anew after a purge");
                Stop::Again
            }
            PlannerError::Checkpoint(CheckpointError::OtherBucket { .. })
                if self.is_of_old_bucket() =>
            {
                if self.plan.kind == ReaderKind::Batches {
                    self.storage.borrow_mut().lose();
                }
                Stop::Again
            }
            PlannerError::Checkpoint(CheckpointError::OtherBucket { .. })
                if self.is_foreign.get() =>
            {
                Stop::Again
            }
            PlannerError::Checkpoint(CheckpointError::OtherFilter(_)) => self.other_filter(error),
            error => Stop::Violation(format!("planning: {error:?}")),
        }
    }

    /// Offsets are refused for another filter: only where it names more, or what is gone.
    fn other_filter(&self, error: PlannerError) -> Stop {
        let had = self.storage.borrow().batches.ids.clone();
        let (asked, world) = (self.ids.borrow(), self.shared.world.borrow());
        match (&*asked, &had) {
            (Some(asked), Some(had)) if !asked.is_subset(had) => {
                self.storage.borrow_mut().lose();
                self.shared.count("began anew with a wider filter");
                Stop::Again
            }
            _ if self.names_dropped(&world) => Stop::Again,
            _ => Stop::Violation(format!("a part of the filter is refused: {error}")),
        }
    }

    /// Whether what is written down, or the client, is of a bucket that is gone.
    pub(super) fn is_of_old_bucket(&self) -> bool {
        let world = self.shared.world.borrow();
        let storage = self.storage.borrow();
        let offsets = storage.batches.offsets(0);
        let uuid = world.producer.bucket_uuid();
        self.life.get() != world.lives
            || offsets.is_some_and(|offsets| offsets.bucket_uuid() != uuid)
    }
}
