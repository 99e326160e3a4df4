//! One world, from its plan to the last comparison.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Builder;
use tokio::task::LocalSet;
use tokio::time::{Instant, sleep};

use crate::faults::has_two_of_each;
use crate::network::Network;
use crate::panics;
use crate::plan::{Kind, Plan, ReaderKind, Step};
use crate::readers::{Reader, Shared};
use crate::report::Report;
use crate::trace::Trace;
use crate::world::World;

/// Time without events after which all is quiet.
const QUIET: Duration = Duration::from_secs(20);
/// Simulated time without a packet that counts after which nothing is on its way: the slowest link
/// takes a second and a half, and what is acknowledged late a second.
const STILL: Duration = Duration::from_secs(5);
/// Simulated time in which a write must have arrived where nothing is broken any more: a dead
/// connection is known after two noop intervals, of nine seconds at most.
const SOON: Duration = Duration::from_secs(30);

/// How a world went.
pub(crate) struct Outcome {
    pub(crate) result: Result<(), String>,
    pub(crate) trace: Vec<String>,
    /// Of everything that happened.
    pub(crate) hash: u64,
    pub(crate) report: Report,
}

/// A world under way.
pub(crate) struct Run {
    pub(crate) plan: Plan,
    pub(crate) shared: Shared,
    pub(crate) readers: Vec<Reader>,
}

/// Runs a plan in simulated time.
pub(crate) fn run(plan: &Plan) -> Outcome {
    panics::watch();
    panics::take();
    std::panic::catch_unwind(|| run_in_simulated_time(plan)).unwrap_or_else(|_| Outcome {
        result: Err(panics::take().unwrap_or_default()),
        trace: Vec::new(),
        hash: 0,
        report: Report::default(),
    })
}

fn run_in_simulated_time(plan: &Plan) -> Outcome {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let local = LocalSet::new();
    runtime.expect("a runtime").block_on(local.run_until(async {
        let trace = Trace::new();
        let run = Run::new(plan.clone(), trace.clone()).await;
        let (shared, steps) = (run.shared.clone(), run.shared.network.steps.clone());
        let result = tokio::select! {
            biased;
            result = Box::pin(run.play()) => result,
            round = steps.exhausted() => Err(round),
        };
        // Whatever came of it: a task that is gone may have been one of many.
        let result = panics::take().map_or(result, |panic| Err(format!("a panic: {panic}")));
        trace.add(format!("{} packets", steps.taken()));
        let trace = trace.take();
        for line in &trace {
            shared.network.event(line.as_bytes());
        }
        let mut report = shared.report.borrow().clone();
        report.add("branch of history", shared.world.borrow().truth.branches);
        for (given, times) in shared.world.borrow().vault.given() {
            report.add(format!("given: {given}"), times);
        }
        Outcome { result, trace, hash: shared.network.hash(), report }
    }))
}

impl Run {
    async fn new(plan: Plan, trace: Trace) -> Self {
        let world = World::new(&plan).await;
        let network = Network::new(Arc::clone(&world.producer), plan.seed);
        trace.add(format!(
            "{} nodes, {} vBuckets, {} replicas, ephemeral {}, calm {}",
            plan.nodes, plan.vbuckets, plan.replicas, plan.ephemeral, plan.calm
        ));
        for reader in &plan.readers {
            trace.add(format!("{reader:?}"));
        }
        let world = Rc::new(RefCell::new(world));
        let shared = Shared::new(&plan, world, network, trace);
        let readers = plan.readers.iter().cloned();
        let readers = readers.map(|reader| Reader::new(reader, shared.clone())).collect();
        Self { plan, shared, readers }
    }

    async fn play(mut self) -> Result<(), String> {
        self.readers.iter_mut().for_each(Reader::start);
        for step in self.plan.steps.clone() {
            let told = self.step(step).await;
            self.shared.count(format!("step {:?}", step.kind));
            self.shared.trace.add(told);
            sleep(step.pause).await;
            self.check()?;
            self.check_accounts_if_still()?;
        }
        self.heal().await;
        self.arrive(Reader::patience).await?;
        for reader in &mut self.readers {
            let patience = reader.patience();
            reader.finish(patience).await?;
        }
        // Where nothing is broken what is written arrives soon, whatever happened before.
        let mut rng = <rand::rngs::StdRng as rand::SeedableRng>::seed_from_u64(!self.plan.seed);
        self.shared.world.borrow_mut().write(20, 24, &mut rng);
        self.shared.world.borrow_mut().write_system(4, &mut rng);
        self.arrive(|_| SOON).await?;
        sleep(QUIET).await;
        self.check()?;
        self.compare()?;
        self.readers.iter().try_for_each(Reader::check_ledger)?;
        self.check_accounts()?;
        self.check_calm()?;
        self.check_history()?;
        for reader in &mut self.readers {
            reader.kill().await;
            // From the beginning, and from what was stored.
            let patience = reader.patience() * 2;
            reader.read_all(patience).await?;
        }
        self.check_replicas()?;
        self.check()
    }

    /// The end of all faults.
    async fn heal(&self) {
        self.shared.trace.add("heal");
        self.shared.network.heal();
        self.shared.world.borrow_mut().end_rules();
        self.shared.world.borrow().vault.settle();
        let producer = Arc::clone(&self.shared.world.borrow().producer);
        let broken = std::mem::take(&mut self.shared.world.borrow_mut().broken);
        // What had no other copy is made anew.
        self.shared.world.borrow_mut().losses += u32::from(!broken.is_empty());
        for node in broken {
            // Refused for one there is not.
            let _ = producer.restart(node, true).await;
            self.shared.world.borrow_mut().observe(true);
        }
        self.shared.world.borrow_mut().settle();
        self.shared.world.borrow_mut().losses += u32::from(!self.plan.calm);
        self.shared.healed.set(Some(Instant::now()));
    }

    /// Nothing that must not be has been seen so far.
    fn check(&self) -> Result<(), String> {
        if let Some(violation) = self.readers.iter().find_map(Reader::take_violation) {
            return Err(violation);
        }
        if let Some(wrong) = self.shared.network.take_wrong() {
            return Err(wrong);
        }
        self.shared.world.borrow_mut().truth.broken.take().map_or(Ok(()), Err)
    }

    /// Waits until every reader has what the cluster has, each as long as it may take.
    async fn arrive(&self, patience: impl Fn(&Reader) -> Duration) -> Result<(), String> {
        let begin = Instant::now();
        let mut there = vec![false; self.readers.len()];
        // All at the same time: one may begin anew that had arrived.
        loop {
            self.check()?;
            let mut is_late = false;
            for (reader, was_there) in self.readers.iter().zip(&mut there) {
                let (took, may_take) = (begin.elapsed(), patience(reader));
                match reader.compare() {
                    Ok(()) if *was_there => {}
                    Ok(()) => {
                        *was_there = true;
                        self.count_arrival(took, may_take);
                    }
                    Err(wrong) if took > may_take => {
                        return Err(format!("{took:?} after the last fault: {wrong}"));
                    }
                    Err(_) => is_late = true,
                }
            }
            if !is_late {
                break;
            }
            sleep(Duration::from_millis(200)).await;
        }
        self.shared.trace.add("everything has arrived");
        self.check()
    }

    /// Counts by how much of its time a reader took, so that a bound that is too wide is seen.
    fn count_arrival(&self, took: Duration, may_take: Duration) {
        let tenth = (took.as_secs_f64() / may_take.as_secs_f64() * 10.0).floor();
        self.shared.count(format!("arrived in {}0 % of its time", tenth + 1.0));
    }

    fn compare(&self) -> Result<(), String> {
        self.readers.iter().try_for_each(Reader::compare)
    }

    /// While nothing moves what the network has seen sent and not acknowledged is, to the byte, what
    /// the streams say they hold: for the application, or until it is on all disks.
    fn check_accounts_if_still(&self) -> Result<(), String> {
        let mut clients: Vec<u64> = self.plan.readers.iter().map(|reader| reader.client).collect();
        clients.dedup();
        for client in clients {
            if !self.shared.network.is_still(client, STILL) {
                continue;
            }
            let said = self.shared.streams.borrow().unacknowledged(client);
            let Some(said) = said else { continue };
            let seen = self.shared.network.outstanding(client);
            if i64::try_from(said) != Ok(seen) {
                return Err(format!("client {client} holds {said} bytes, the network says {seen}"));
            }
            let held = if said > 0 { "accounts agree on bytes held" } else { "accounts agree" };
            self.shared.count(held);
        }
        Ok(())
    }

    /// Nothing is outstanding by the accounts of either end while nothing moves.
    fn check_accounts(&self) -> Result<(), String> {
        for reader in &self.readers {
            let outstanding = self.shared.network.outstanding(reader.plan.client);
            if outstanding != 0 {
                return Err(format!("{reader}: {outstanding} bytes are not acknowledged"));
            }
        }
        self.shared.count("accounts even");
        Ok(())
    }

    /// Readers of the history have every version of a vBucket that was always on one branch, where
    /// nothing is purged.
    fn check_history(&self) -> Result<(), String> {
        let forgets = |step: &Step| {
            use Kind::{InterruptBackfill, Purge, PurgeWhileAway, RecreateBucket};
            matches!(step.kind, Purge | PurgeWhileAway | InterruptBackfill | RecreateBucket)
        };
        if self.plan.steps.iter().any(forgets) {
            return Ok(());
        }
        let is_endless = |reader: &&Reader| {
            use ReaderKind::{Endless, Members, Rivals};
            reader.plan.history && matches!(reader.plan.kind, Endless | Members | Rivals)
        };
        for reader in self.readers.iter().filter(is_endless) {
            reader.check_history()?;
            self.shared.count("history that is whole");
        }
        Ok(())
    }

    /// Replicas have everything once nothing is broken: failovers of one node after the other lose no
    /// document.
    fn check_replicas(&self) -> Result<(), String> {
        let mut world = self.shared.world.borrow_mut();
        let producer = Arc::clone(&world.producer);
        let before = (world.contents(), producer.high_seqnos());
        let mut failed = 0;
        for node in 0.. {
            if !has_two_of_each(&producer) || producer.num_nodes() == 1 {
                break;
            }
            match producer.failover(node, false) {
                Ok(()) => {}
                // It was out already.
                Err(dcp_producer::Error::NotAMember { .. }) => continue,
                Err(error) => return Err(format!("the failover of node {node}: {error}")),
            }
            failed += 1;
            world.observe(true);
            let now = (world.contents(), producer.high_seqnos());
            if now != before {
                let mut all = before.0.iter();
                let off = all.find(|(key, document)| now.0.get(*key) != Some(*document));
                let off =
                    off.map(|((id, key), _)| format!("{id}/{}", String::from_utf8_lossy(key)));
                return Err(format!(
                    "after the failover of node {node} {off:?} is another: {:?} instead of {:?}",
                    now.1, before.1
                ));
            }
        }
        if failed > 0 {
            self.shared.count("replicas have everything");
        }
        Ok(())
    }

    /// Where nothing was lost nothing is taken back.
    fn check_calm(&self) -> Result<(), String> {
        let rolled_back = |reader: &&Reader| {
            let storage = reader.storage.borrow();
            storage.newest().is_some_and(|pair| pair.table.rollbacks() > 0)
        };
        match self.readers.iter().find(rolled_back) {
            Some(reader) if self.plan.calm && reader.plan.kind != ReaderKind::Finite => {
                Err(format!("{reader}: a rollback though nothing was lost"))
            }
            _ => Ok(()),
        }
    }
}
