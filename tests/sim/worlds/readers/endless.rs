//! Streams without an end.

use dcp_test::with;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use dcp_consumer::{AckToken, Delivered, End, Start};
use dcp_proto::checkpoint::Checkpoint;
use rand::Rng;
use rand::rngs::StdRng;
use tokio::time::{sleep, timeout};

use super::watched::Watched;
use super::{Process, Stop, Wanted};
use crate::plan::ReaderKind;
use crate::rows::{Item, Rows, Table};
use crate::storage::Pair;

impl Process {
    /// Streams until it is killed.
    pub(super) async fn read_endless(&self, rng: &mut StdRng) -> Result<(), Stop> {
        if self.share.as_ref().is_some_and(Vec::is_empty) {
            // More members than vBuckets.
            sleep(Duration::from_secs(1)).await;
            return Err(Stop::Again);
        }
        let mut stored = self.storage.borrow_mut().load();
        if let Some(vbids) = &self.share {
            stored = stored.map(|pair| pair.of(vbids));
        }
        let wanted = self.prepare(stored, rng).await?;
        let begins_now = self.plan.kind == ReaderKind::Latest && wanted.pair.is_none();
        let start = match &wanted.pair {
            Some(pair) => Start::Checkpoint(pair.checkpoint.clone()),
            None if begins_now => Start::Latest,
            None => Start::Earliest,
        };
        let options = with(wanted.options.clone(), |o| {
            o.start = start;
            o.end = End::Never;
        });
        let opening = Box::pin(wanted.client.stream(options, Rows::default));
        let stream = self.unless_cancelled(opening, rng).await?.map_err(Stop::Opening)?;
        if !self.is_current(&wanted) {
            return Err(Stop::Again);
        }
        let mut since = wanted.pair.as_ref().map_or(0, |pair| pair.since);
        if begins_now {
            // What was written while it was opened may or may not be the reader's.
            since = self.shared.world.borrow().truth.writes();
        }
        let table = wanted.pair.as_ref().map(|pair| pair.table.clone()).unwrap_or_default();
        let (watched, received) = (Watched::new(self, stream), Received::default());
        let mut reading = Reading { process: self, wanted, watched, table, since, received };
        if begins_now {
            // The place it began is worth keeping before anything has come.
            reading.store()?;
        }
        reading.run(rng).await
    }
}

/// A stream that runs, and what was made of it.
struct Reading<'a> {
    process: &'a Process,
    wanted: Wanted,
    watched: Watched,
    table: Table,
    since: u64,
    received: Received,
}

impl Reading<'_> {
    async fn run(&mut self, rng: &mut StdRng) -> Result<(), Stop> {
        let plan = &self.process.plan;
        let vault = Arc::clone(&self.process.shared.world.borrow().vault);
        let mut passwords = vault.changes();
        loop {
            self.watched.rest(self.process).await?;
            let patience = Duration::from_millis(rng.random_range(1..300));
            let next = timeout(patience, self.watched.stream.next()).await;
            let is_idle = next.is_err();
            self.watched.look()?;
            match next {
                Ok(Some(delivered)) => {
                    let Delivered { batch, token, .. } = delivered.map_err(Stop::Running)?;
                    self.process.check(&batch, &self.wanted)?;
                    if vault.changes() > passwords {
                        passwords = vault.changes();
                        self.process.shared.count("stream outlived a password");
                    }
                    self.received.batch(batch, token, plan.manual);
                }
                Ok(None) => {
                    return Err(Stop::Violation("an endless stream ended without a word".into()));
                }
                Err(_) => {}
            }
            while let Some(token) = self.received.acknowledge(is_idle, rng) {
                self.watched.stream.ack(token).map_err(Stop::Running)?;
            }
            if is_idle || rng.random_bool(plan.commits) {
                self.store()?;
            }
            if plan.slowness > 0 {
                sleep(Duration::from_millis(rng.random_range(0..=plan.slowness))).await;
            }
        }
    }

    fn store(&mut self) -> Result<(), Stop> {
        let checkpoint = self.watched.stream.checkpoint();
        self.received.settle(&checkpoint, &mut self.table).map_err(Stop::Violation)?;
        let (table, ids, since) = (self.table.clone(), self.wanted.ids.clone(), self.since);
        let pair = Pair { checkpoint, table, ids, since };
        let mut storage = self.process.storage.borrow_mut();
        let saved = match &self.process.share {
            Some(vbids) => storage.save_part(pair, vbids),
            None => storage.save(pair),
        };
        let Err(refused) = saved else { return Ok(()) };
        // Another process was faster, or has begun anew on another bucket.
        if matches!(self.process.plan.kind, ReaderKind::Rivals | ReaderKind::Members) {
            self.process.shared.count("save refused");
            return Err(Stop::Again);
        }
        Err(Stop::Violation(format!("its own store refuses a checkpoint: {refused}")))
    }
}

/// What was received and not stored yet.
#[derive(Default)]
struct Received {
    /// In the order it came, with the number of its batch.
    items: VecDeque<(u64, Item)>,
    batches: u64,
    /// Batches that are not acknowledged, by number.
    open: BTreeMap<u64, AckToken>,
}

impl Received {
    fn batch(&mut self, items: Vec<Item>, token: AckToken, is_manual: bool) {
        self.batches += 1;
        let number = self.batches;
        self.items.extend(items.into_iter().map(|item| (number, item)));
        if is_manual {
            self.open.insert(number, token);
        }
    }

    /// Some batch to acknowledge now: any of them, or every one while nothing comes.
    fn acknowledge(&mut self, all: bool, rng: &mut StdRng) -> Option<AckToken> {
        if self.open.is_empty() || !(all || self.open.len() > 8 || rng.random_bool(0.4)) {
            return None;
        }
        let number = *self.open.keys().nth(rng.random_range(0..self.open.len()))?;
        self.open.remove(&number)
    }

    /// Moves what the checkpoint covers into the table.
    fn settle(&mut self, checkpoint: &Checkpoint, table: &mut Table) -> Result<(), String> {
        let mut left = VecDeque::new();
        for (number, item) in self.items.drain(..) {
            if !item.is_covered(checkpoint) {
                left.push_back((number, item));
                continue;
            }
            if self.open.contains_key(&number) {
                return Err(format!("the checkpoint covers what is not acknowledged: {item:?}"));
            }
            table.apply(&item)?;
        }
        self.items = left;
        Ok(())
    }
}
