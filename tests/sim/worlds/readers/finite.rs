//! Streams with an end, one after the other.

use dcp_test::with;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use dcp_consumer::{ChangeStream, End, ErrorKind, Start};
use dcp_proto::checkpoint::Checkpoint;
use dcp_proto::{Op, Position};
use dcp_wire::{Seqno, Vbid};
use rand::Rng;
use rand::rngs::StdRng;
use tokio::time::sleep;

use super::watched::Watched;
use super::{Process, Stop, Wanted, compare, compare_up_to};
use crate::plan::FilterPlan;
use crate::rows::{Item, Rows, Table};
use crate::storage::Pair;

impl Process {
    /// Reads up to some end, from what was stored, from something older, or from the beginning.
    pub(super) async fn read_finite(self: &Rc<Self>, rng: &mut StdRng) -> Result<(), Stop> {
        let stored = match rng.random_range(0..10) {
            0 => None,
            1 | 2 => self.storage.borrow().any(rng).cloned(),
            _ => self.storage.borrow_mut().load(),
        };
        let mut wanted = self.prepare(stored, rng).await?;
        let end = match rng.random_bool(0.5) {
            true => End::Now,
            false => End::At(self.some_ends(&wanted, rng).await?),
        };
        let clamp = rng.random_bool(0.5);
        if self.seed.is_multiple_of(3) {
            self.check_read_once(&wanted, rng).await?;
        }
        let options = &mut wanted.options;
        options.end_exists = matches!(end, End::At(_)) && rng.random_bool(0.4);
        options.end_persisted = options.persisted_only && rng.random_bool(0.5);
        if options.end_exists {
            self.end_existed.set(Some(wanted.losses));
            self.shared.count(format!("end that exists, clamped {clamp}"));
            // As between a plan and the task that reads it.
            sleep(Duration::from_millis(rng.random_range(0..2000))).await;
        }
        if options.end_persisted {
            self.shared.count(format!("end that is persisted, clamped {clamp}"));
        }
        let pair = Box::pin(self.read_to(&wanted, end, clamp, rng)).await?;
        self.storage.borrow_mut().store(pair);
        Ok(())
    }

    /// What a job has that goes on from the same place is the cluster's history too.
    async fn check_read_once(
        self: &Rc<Self>,
        wanted: &Wanted,
        rng: &mut StdRng,
    ) -> Result<(), Stop> {
        let branches = self.shared.world.borrow().branches();
        let table = match Box::pin(self.read_once(wanted, rng)).await {
            Ok(table) => table,
            // Its end was lost meanwhile; or it is run again.
            Err(Stop::Opening(error) | Stop::Running(error))
                if error.kind() == ErrorKind::Rollback =>
            {
                return Ok(());
            }
            Err(Stop::Again) => return Ok(()),
            Err(stop) => return Err(stop),
        };
        self.check_history(&table, &branches)
    }

    /// What was read where a vBucket stayed on the branch it was on before is that branch.
    fn check_history(&self, table: &Table, before: &BTreeMap<Vbid, u64>) -> Result<(), Stop> {
        let world = self.shared.world.borrow();
        if world.lives != self.life.get() || self.is_foreign.get() {
            return Ok(());
        }
        let branches = world.branches();
        for row in table.rows() {
            let branch = before.get(&row.vbid);
            if let Some(&branch) = branch.filter(|branch| branches.get(&row.vbid) == Some(branch))
                && world.truth.knows(row.vbid, branch)
            {
                let checked = world.truth.check_on(row, branch);
                checked
                    .map_err(|wrong| Stop::Violation(format!("a rollback was missed: {wrong}")))?;
            }
        }
        Ok(())
    }

    /// Seqnos that were there a moment ago.
    async fn some_ends(
        &self,
        wanted: &Wanted,
        rng: &mut StdRng,
    ) -> Result<BTreeMap<Vbid, Seqno>, Stop> {
        let asking = Box::pin(wanted.client.high_seqnos());
        let mut ends = self.unless_cancelled(asking, rng).await?.map_err(Stop::Opening)?;
        for end in ends.values_mut() {
            if rng.random_bool(0.6) {
                end.0 = rng.random_range(0..=end.0);
            }
        }
        Ok(ends)
    }

    async fn read_to(
        &self,
        wanted: &Wanted,
        end: End,
        clamp: bool,
        rng: &mut StdRng,
    ) -> Result<Pair, Stop> {
        let kind = if matches!(end, End::Now) { "now" } else { "at" };
        self.shared.count(format!("end {kind}, clamped {clamp}"));
        let (start, mut table) = match &wanted.pair {
            Some(pair) => (Start::Checkpoint(pair.checkpoint.clone()), pair.table.clone()),
            None => (Start::Earliest, Table::default()),
        };
        let options = with(wanted.options.clone(), |o| {
            o.start = start;
            o.end = end.clone();
            o.clamp = clamp;
        });
        let branches = self.shared.world.borrow().branches();
        let opening = Box::pin(wanted.client.stream(options, Rows::default));
        let stream = self.unless_cancelled(opening, rng).await?.map_err(Stop::Opening)?;
        if !self.is_current(wanted) {
            return Err(Stop::Again);
        }
        let mut watched = Watched::new(self, stream);
        let mut given_back = BTreeSet::new();
        while let Some(delivered) = watched.next().await? {
            self.check(&delivered.batch, wanted)?;
            for item in &delivered.batch {
                table.apply(item).map_err(Stop::Violation)?;
                if let Item::Rollback(rollback) = item {
                    given_back.insert(rollback.vbid);
                }
                check_within(item, &end, clamp).map_err(Stop::Violation)?;
            }
            if self.plan.manual {
                watched.stream.ack(delivered.token).map_err(Stop::Running)?;
            }
            watched.rest(self).await?;
            sleep(Duration::from_millis(rng.random_range(0..=self.plan.slowness))).await;
        }
        self.check_history(&table, &branches)?;
        let checkpoint = self.ended(wanted, &watched.stream, &end, clamp, &given_back)?;
        self.check_all_there(wanted, &checkpoint, &table, &end, clamp)?;
        let (ids, since) = (wanted.ids.clone(), 0);
        Ok(Pair { checkpoint, table, ids, since })
    }

    /// Where a finite stream must stand that has ended.
    fn ended(
        &self,
        wanted: &Wanted,
        stream: &ChangeStream<Vec<Item>>,
        end: &End,
        clamp: bool,
        given_back: &BTreeSet<Vbid>,
    ) -> Result<Checkpoint, Stop> {
        let checkpoint = stream.checkpoint();
        let ends = match end {
            End::At(ends) if self.shared.world.borrow().lives == self.life.get() => ends.clone(),
            _ => BTreeMap::new(),
        };
        for (&vbid, &end) in &ends {
            let at = checkpoint.position(vbid).cloned().unwrap_or(Position::EARLIEST);
            let start = wanted.pair.as_ref().and_then(|pair| pair.checkpoint.position(vbid));
            if start == Some(&at) || given_back.contains(&vbid) {
                continue;
            }
            // An end that was lost is not waited for.
            let is_there = self.shared.world.borrow().losses == wanted.losses;
            let wrong = if clamp && at.seqno > end {
                "beyond its end, at which it was to stop"
            } else if !clamp && is_there && at.seqno < end && self.plan.filter == FilterPlan::All {
                "below its end"
            } else if !clamp && !at.is_snapshot_complete() && self.is_left(vbid, &at) {
                "inside of the snapshot that holds its end"
            } else {
                continue;
            };
            let wrong = format!("a finite stream of {vbid} to {end} ended {wrong}: {at:?}");
            return Err(Stop::Violation(wrong));
        }
        Ok(checkpoint)
    }

    /// Whether the snapshot of a position holds more that the filter asks for. What only others
    /// ask for need not be passed over: a server ends a filtered stream with its newest change. Nor
    /// do deletions that were purged.
    fn is_left(&self, vbid: Vbid, at: &Position) -> bool {
        let world = self.shared.world.borrow();
        let is_left = |seqno: Seqno, op: Op| {
            let is_purged = op != Op::Mutation && seqno <= at.purge_seqno;
            seqno > at.seqno && seqno <= at.snapshot.end && !is_purged
        };
        let newest = world.truth.newest(vbid);
        self.plan.filter == FilterPlan::All
            || newest.iter().any(|((id, _), (seqno, write))| {
                self.asks_for(&world, *id) && is_left(*seqno, write.op)
            })
    }

    /// Everything at or below the ends must be there that nothing above them has replaced.
    fn check_all_there(
        &self,
        wanted: &Wanted,
        checkpoint: &Checkpoint,
        table: &Table,
        end: &End,
        clamp: bool,
    ) -> Result<(), Stop> {
        let End::At(ends) = end else { return Ok(()) };
        let world = self.shared.world.borrow();
        let was_lost = world.lives != self.life.get() || world.losses != wanted.losses;
        if was_lost {
            // Neither was the end what it was.
            return Ok(());
        }
        let mut ends = ends.clone();
        // One that was not streamed may be on a branch that is gone.
        let start = |vbid| wanted.pair.as_ref().and_then(|pair| pair.checkpoint.position(vbid));
        ends.retain(|&vbid, _| start(vbid) != checkpoint.position(vbid));
        for (&vbid, end) in ends.iter_mut().filter(|_| !clamp) {
            // A filtered stream may end below the end of its snapshot, if nothing of its filter is
            // left there.
            *end = checkpoint.position(vbid).map_or(*end, |at| at.snapshot.end.max(*end));
        }
        let pair = Pair {
            checkpoint: checkpoint.clone(),
            table: table.clone(),
            ids: wanted.ids.clone(),
            since: 0,
        };
        self.shared.count("all below an end is there");
        compare_up_to(&self.plan, &world, &pair, &ends)
            .map_err(|wrong| Stop::Violation(format!("a finite stream to {ends:?}: {wrong}")))
    }

    /// Reads what there is, when nothing is broken any more.
    pub(super) async fn read_all(self) -> Result<(), String> {
        let mut rng = <StdRng as rand::SeedableRng>::seed_from_u64(self.seed);
        let stored = self.storage.borrow_mut().load();
        let froms = if stored.is_some() { vec![None, stored] } else { vec![None] };
        for mut from in froms {
            let pair = loop {
                match self.read_what_there_is(from.clone(), &mut rng).await {
                    Ok(pair) => break pair,
                    Err(stop) => self.judge(Err(stop))?,
                }
                // A stored checkpoint may turn out to be another bucket's.
                if self.storage.borrow().newest().is_none() {
                    from = None;
                }
                let collections = self.shared.world.borrow().live(|of| of.scope == "shop");
                if self.plan.filter == FilterPlan::Collections && collections.is_empty() {
                    return Ok(());
                }
                sleep(Duration::from_millis(200)).await;
            };
            let world = self.shared.world.borrow();
            compare(&self.plan, &world, Some(&pair))
                .map_err(|wrong| format!("a finite stream brought something else: {wrong}"))?;
        }
        Ok(())
    }

    async fn read_what_there_is(&self, from: Option<Pair>, rng: &mut StdRng) -> Result<Pair, Stop> {
        let mut wanted = self.prepare(from, rng).await?;
        if self.seed % 8 == 3 {
            // Nothing is broken: nothing needs to be tried again.
            wanted.options.retry_timeout = Duration::ZERO;
            self.shared.count("retry_timeout zero");
        }
        let since = wanted.pair.as_ref().map_or(0, |pair| pair.since);
        let pair = Box::pin(self.read_to(&wanted, End::Now, false, rng)).await?;
        Ok(Pair { since, ..pair })
    }
}

/// A clamped stream brings nothing above its end.
fn check_within(item: &Item, end: &End, clamp: bool) -> Result<(), String> {
    let (End::At(ends), true, Item::Change(row)) = (end, clamp, item) else { return Ok(()) };
    match ends.get(&row.vbid) {
        Some(end) if row.seqno > *end => Err(format!("a row above the end {end}: {row:?}")),
        Some(_) => Ok(()),
        None => Err(format!("a row of a vBucket that was not asked for: {row:?}")),
    }
}
