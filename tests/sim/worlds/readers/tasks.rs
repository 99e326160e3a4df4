//! The tasks of one micro-batch, side by side. Each may have several attempts under way, as a task
//! that is run again before its first attempt is known to be gone, or that is slow: the rows of one
//! of them are taken.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use dcp_consumer::plan::open;
use dcp_consumer::{Client, ConnectOptions, ErrorKind, StreamOptions};
use dcp_proto::plan::{ReadPlan, VbucketRange};
use dcp_wire::{Seqno, Vbid};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::task::JoinSet;
use tokio::time::sleep;

use super::watched::Watched;
use super::{Process, Stop};
use crate::rows::{Item, Row, Rows};

/// Failures of one task after which its batch fails.
const FAILURES: usize = 3;

/// What the tasks of a job have in common.
pub(super) struct Tasks {
    pub(super) process: Rc<Process>,
    pub(super) connect: ConnectOptions,
    pub(super) base: StreamOptions,
    /// Clients that earlier tasks have left.
    kept: RefCell<Vec<Client>>,
}

impl Tasks {
    pub(super) fn new(process: Rc<Process>, connect: ConnectOptions, base: StreamOptions) -> Self {
        Self { process, connect, base, kept: RefCell::default() }
    }

    /// Runs one task for each partition, all at the same time; their rows in the partitions' order.
    /// `losses` is how often history may have been lost before they were planned.
    pub(super) async fn run(
        self: &Rc<Self>,
        partitions: Vec<ReadPlan>,
        losses: u32,
        rng: &mut StdRng,
    ) -> Result<Vec<Item>, Stop> {
        let mut tasks = JoinSet::new();
        for (number, partition) in partitions.into_iter().enumerate() {
            let (seed, jobs) = (rng.random(), Rc::clone(self));
            let task = Rc::new(Task { jobs, partition, losses });
            tasks.spawn_local(async move { (number, task.run(seed).await) });
        }
        if tasks.len() > 1 {
            self.process.shared.count("tasks side by side");
        }
        let mut rows = BTreeMap::new();
        while let Some(done) = tasks.join_next().await {
            let (number, items) = done.map_err(panicked)?;
            rows.insert(number, items?);
            self.process.die_now_and_then(rng)?;
        }
        Ok(rows.into_values().flatten().collect())
    }
}

fn panicked(error: tokio::task::JoinError) -> Stop {
    Stop::Violation(format!("a task: {error}"))
}

/// One task.
struct Task {
    jobs: Rc<Tasks>,
    partition: ReadPlan,
    losses: u32,
}

impl Task {
    /// Runs attempts until one has brought its rows, which are taken, or too many have failed. The
    /// others are ended then, or run on; those that come to their end must bring the same.
    async fn run(self: Rc<Self>, seed: u64) -> Result<Vec<Item>, Stop> {
        let rng = &mut StdRng::seed_from_u64(seed);
        let process = &self.jobs.process;
        let mut attempts = JoinSet::new();
        attempts.spawn_local(Rc::clone(&self).attempt(rng.random(), Duration::ZERO));
        if rng.random_bool(0.25) {
            let after = Duration::from_millis(rng.random_range(0..300));
            attempts.spawn_local(Rc::clone(&self).attempt(rng.random(), after));
            process.shared.count("attempts at once");
        }
        let others_run_on = rng.random_bool(0.7);
        let (mut failures, mut taken) = (0, None);
        while let Some(done) = attempts.join_next().await {
            match done.map_err(panicked)? {
                Ok(Some(items)) => match &taken {
                    None if !others_run_on => return Ok(items),
                    None => taken = Some(items),
                    Some(first) => self.compare(first, &items)?,
                },
                Ok(None) => {
                    process.shared.count("task run twice");
                    attempts.spawn_local(Rc::clone(&self).attempt(rng.random(), Duration::ZERO));
                }
                Err(Stop::Running(error))
                    if error.kind() != ErrorKind::Rollback && failures < FAILURES =>
                {
                    failures += 1;
                    process.shared.count("task retried");
                    process.judge(Err(Stop::Running(error))).map_err(Stop::Violation)?;
                    attempts.spawn_local(Rc::clone(&self).attempt(rng.random(), Duration::ZERO));
                }
                Err(Stop::Violation(wrong)) => return Err(Stop::Violation(wrong)),
                // What becomes of the others is of no matter once the rows are there.
                Err(_) if taken.is_some() => {}
                Err(stop) => return Err(stop),
            }
        }
        taken.ok_or(Stop::Again)
    }

    /// Reads the partition; `None` if that was for nothing, as where the machine of the attempt goes
    /// before its rows were handed over.
    async fn attempt(
        self: Rc<Self>,
        seed: u64,
        after: Duration,
    ) -> Result<Option<Vec<Item>>, Stop> {
        sleep(after).await;
        let rng = &mut StdRng::seed_from_u64(seed);
        let (jobs, process) = (&self.jobs, &self.jobs.process);
        let mut items = Vec::new();
        let ranges: Vec<_> = self.partition.ranges().collect();
        process.shared.trace.add(format!("reader {}: task {ranges:?}", process.plan.number));
        let kept = jobs.kept.borrow_mut().pop();
        let opened =
            open::<Rows, _>(&jobs.connect, kept, &self.partition, &jobs.base, |_| Rows::default);
        let (client, stream) = Box::pin(opened).await.map_err(|error| process.planning(error))?;
        let mut watched = Watched::new(process, stream);
        while let Some(delivered) = watched.next().await? {
            let batch = delivered.batch;
            // One that nothing follows reads what is not on disk, too.
            let persisted_only = process.plan.persisted_only && self.partition.clamp;
            let ids = process.ids.borrow().clone();
            process.check_items(&batch, client.bucket_uuid(), ids.as_ref(), persisted_only)?;
            items.extend(batch);
            watched.rest(process).await?;
        }
        if !items.starts_with(&self.rollbacks()) {
            return Err(Stop::Violation("a task without its rollbacks first".to_owned()));
        }
        self.check_range(&items)?;
        if rng.random_bool(0.7) {
            jobs.kept.borrow_mut().push(client);
        }
        if rng.random_bool(0.1) {
            return Ok(None);
        }
        Ok(Some(items))
    }

    /// What the partition says of rollbacks, as rows.
    fn rollbacks(&self) -> Vec<Item> {
        let rollbacks = self.partition.ranges().filter_map(|range| range.rollback());
        let counted = rollbacks.inspect(|_| {
            self.jobs.process.shared.count("rollback of a micro-batch");
        });
        counted.map(Item::Rollback).collect()
    }

    /// Nothing lies outside of the ranges, and the last change of every document within them is
    /// there that nothing above has replaced.
    fn check_range(&self, items: &[Item]) -> Result<(), Stop> {
        let bounds = |range: VbucketRange| (range.vbid, (range.start_seqno(), range.to));
        let mut ranges: BTreeMap<_, _> = self.partition.ranges().map(bounds).collect();
        let first_snapshot = |range: VbucketRange| {
            let snapshot = range.from.position.snapshot;
            (snapshot.start == Seqno::ZERO).then_some((range.vbid, snapshot.end))
        };
        let mut first_snapshots: BTreeMap<_, _> =
            self.partition.ranges().filter_map(first_snapshot).collect();
        let mut newest: BTreeMap<(Vbid, u32, &[u8]), Seqno> = BTreeMap::new();
        for item in items {
            let row = match item {
                Item::Change(row) => row,
                Item::Emptied { .. } => continue,
                Item::Rollback(rollback) => {
                    // All above comes again, and further below than was planned.
                    let (vbid, seqno) = (rollback.vbid, rollback.seqno);
                    newest.retain(|(of, ..), has| *of != vbid || *has <= seqno);
                    if let Some((from, _)) = ranges.get_mut(&vbid) {
                        *from = seqno.min(*from);
                    }
                    first_snapshots.remove(&vbid);
                    continue;
                }
            };
            let is_of = |&(from, to): &(Seqno, Seqno)| row.seqno > from && row.seqno <= to;
            // One that nothing follows goes on to the end of its snapshot, and back by itself.
            if self.partition.clamp && !ranges.get(&row.vbid).is_some_and(is_of) {
                return Err(Stop::Violation(format!("a row outside of its task: {row:?}")));
            }
            newest.insert((row.vbid, row.collection, row.key.as_slice()), row.seqno);
        }
        let process = &self.jobs.process;
        let world = process.shared.world.borrow();
        if world.losses != self.losses || world.lives != process.life.get() {
            return Ok(());
        }
        for (&vbid, &bounds) in &ranges {
            let first_end = first_snapshots.get(&vbid).copied().unwrap_or_default();
            let sees_system = process.plan.system_documents;
            let wanted = world.wanted_within(vbid, bounds, first_end, sees_system);
            for (collection, key, seqno) in wanted.filter(|(id, ..)| process.asks_for(&world, *id))
            {
                let has = newest.get(&(vbid, collection, key));
                if has != Some(&seqno) {
                    let name = String::from_utf8_lossy(key);
                    let wrong =
                        format!("{vbid} {bounds:?}: {collection}/{name} at {seqno}, not {has:?}");
                    return Err(Stop::Violation(format!("a task has left something out: {wrong}")));
                }
            }
        }
        process.shared.count("all of a task is there");
        Ok(())
    }

    /// Two attempts have read the same. Where one saw a version that has been replaced above the
    /// task's end meanwhile, the other need not have; what both have must agree. Attempts before and
    /// after a failover may read two branches, and must agree where they name the same one.
    fn compare(&self, first: &[Item], second: &[Item]) -> Result<(), Stop> {
        if !self.partition.clamp {
            // One that nothing follows goes back to another history by itself.
            return Ok(());
        }
        let rows = |items: &[Item]| -> BTreeMap<(Vbid, Seqno), _> {
            let rows = items.iter().filter_map(|item| match item {
                Item::Change(row) => Some(((row.vbid, row.seqno), std::sync::Arc::clone(row))),
                _ => None,
            });
            rows.collect()
        };
        let (first, second) = (rows(first), rows(second));
        let is_lost = self.jobs.process.shared.world.borrow().losses != self.losses;
        let differs =
            |row: &Row, other: &Row| row != other && (!is_lost || row.vbuuid == other.vbuuid);
        let off = first.iter().find(|(at, row)| second.get(at).is_some_and(|of| differs(row, of)));
        if let Some((at, row)) = off {
            let wrong = format!("two attempts differ: {row:?}, {:?}", second.get(at));
            return Err(Stop::Violation(wrong));
        }
        self.jobs.process.shared.count("attempts agree");
        Ok(())
    }
}
