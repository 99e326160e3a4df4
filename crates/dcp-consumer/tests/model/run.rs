//! One seed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::runtime::Builder;
use tokio::task::{JoinHandle, LocalSet};
use tokio::time::{Instant, sleep, timeout};

use crate::consumer::{Consumer, Setup, Storage, read_until_now};
use crate::network::Network;
use crate::panics;
use crate::table::Table;
use crate::world::World;

/// Simulated time in which everything must have arrived once all faults are over.
const PATIENCE: Duration = Duration::from_secs(900);
/// Pause after which what has arrived is looked at once more.
const AFTER: Duration = Duration::from_secs(20);

/// What happened, with its simulated time.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    lines: Arc<Mutex<Vec<String>>>,
    begin: Instant,
}

impl Trace {
    pub(crate) fn add(&self, what: impl Into<String>) {
        let line = format!("{:>9.3} {}", self.begin.elapsed().as_secs_f64(), what.into());
        if std::env::var_os("DCP_MODEL_SEED").is_some() {
            eprintln!("{line}");
        }
        self.lines.lock().unwrap().push(line);
    }
}

/// How a run went.
pub(crate) struct Report {
    pub(crate) outcome: Result<(), String>,
    pub(crate) trace: Vec<String>,
}

/// Runs one seed.
pub(crate) fn run(seed: u64) -> Report {
    panics::watch();
    panics::take();
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    let local = LocalSet::new();
    runtime.expect("a runtime").block_on(local.run_until(async {
        let trace = Trace { lines: Arc::default(), begin: Instant::now() };
        let run = Run::new(seed, trace.clone()).await;
        let steps = run.network.steps.clone();
        let outcome = tokio::select! {
            biased;
            outcome = Box::pin(run.play()) => outcome,
            round = steps.exhausted() => Err(round),
        };
        // Whatever came of it: a task that is gone may have been one of many.
        let outcome = panics::take().map_or(outcome, |panic| Err(format!("a panic: {panic}")));
        trace.add(format!("{} packets", steps.taken()));
        let trace = std::mem::take(&mut *trace.lines.lock().unwrap());
        Report { outcome, trace }
    }))
}

struct Run {
    rng: StdRng,
    world: World,
    network: Arc<Network>,
    setup: Setup,
    storage: Arc<Mutex<Storage>>,
    trace: Trace,
    alive: Option<JoinHandle<()>>,
    lives: u64,
}

impl Run {
    async fn new(seed: u64, trace: Trace) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let world = World::new(&mut rng).await;
        let network = Network::new(Arc::clone(&world.producer), seed);
        let setup = Setup::new(&mut rng);
        let (vbuckets, is_calm) = (world.producer.num_vbuckets(), world.is_calm);
        trace.add(format!("{setup:?}, {vbuckets} vBuckets, calm {is_calm}"));
        let storage = Arc::default();
        Self { rng, world, network, setup, storage, trace, alive: None, lives: 0 }
    }

    fn start_consumer(&mut self) {
        self.lives += 1;
        let consumer = Consumer {
            setup: self.setup.clone(),
            network: Arc::clone(&self.network),
            connection_string: self.world.producer.connection_string(),
            storage: Arc::clone(&self.storage),
            trace: self.trace.clone(),
            seed: self.lives,
        };
        self.alive = Some(tokio::task::spawn_local(consumer.live()));
    }

    /// Ends the consumer without a word; what it had not stored is gone.
    async fn kill_consumer(&mut self) {
        if let Some(alive) = self.alive.take() {
            alive.abort();
            // Ends with being cancelled.
            let _ = alive.await;
        }
    }

    async fn play(mut self) -> Result<(), String> {
        let before = self.rng.random_range(0..60);
        self.world.write(before, &mut self.rng);
        if self.rng.random_bool(0.3) {
            self.world.purge();
        }
        self.start_consumer();
        for _ in 0..self.rng.random_range(10..60) {
            self.step().await;
            let pause = if self.rng.random_bool(0.1) { 5000 } else { 300 };
            sleep(Duration::from_millis(self.rng.random_range(0..pause))).await;
            self.check_storage()?;
        }
        self.trace.add("heal");
        self.network.set_latency(2);
        self.world.heal().await;
        self.settle().await?;
        sleep(AFTER).await;
        self.check_storage()?;
        self.compare()?;
        self.kill_consumer().await;
        let (_, table) = self.storage.lock().unwrap().load();
        if self.world.is_calm && table.rollbacks() > 0 {
            return Err("a rollback though nothing was lost".into());
        }
        self.read_finite().await
    }

    async fn step(&mut self) {
        let rng = &mut self.rng;
        let what = match rng.random_range(0..25) {
            0..7 => {
                let count = rng.random_range(1..30);
                self.world.write(count, rng);
                format!("write {count}")
            }
            7..14 => self.world.befall(rng).await,
            14 => {
                self.network.cut(0, rng);
                "cut a connection".into()
            }
            15 => {
                let bytes = rng.random_range(1..5000);
                self.network.cut(bytes, rng);
                format!("cut a connection after {bytes} bytes")
            }
            16 => {
                self.network.freeze(rng);
                "freeze a connection".into()
            }
            17 if rng.random_bool(0.5) => {
                let faults = self.world.misbehave(rng);
                format!("the nodes misbehave: {faults}")
            }
            17 => {
                let latency = *[0, 2, 20, 300].get(rng.random_range(0..4)).unwrap_or(&0);
                self.network.set_latency(latency);
                format!("latency of new connections {latency} ms")
            }
            20..23 => return self.interrupt_backfill().await,
            23 => {
                self.network.repeat(rng);
                "repeat a change".into()
            }
            24 if self.world.is_calm => "calm".into(),
            24 => return self.purge_while_away().await,
            kind => {
                self.kill_consumer().await;
                let torn = kind == 18 && self.rng.random_bool(0.5);
                if torn {
                    self.storage.lock().unwrap().tear(&mut self.rng);
                }
                self.start_consumer();
                format!("kill the consumer, checkpoint torn {torn}")
            }
        };
        self.trace.add(what);
    }

    /// A consumer that is far behind is sent a snapshot from disk, loses its connection inside of
    /// it, and goes on after the vBucket has lost the end of that snapshot.
    async fn interrupt_backfill(&mut self) {
        self.kill_consumer().await;
        self.world.write(80, &mut self.rng);
        self.world.producer.persist();
        self.start_consumer();
        sleep(Duration::from_millis(self.rng.random_range(5..60))).await;
        let bytes = self.rng.random_range(1..20_000);
        self.network.cut(bytes, &mut self.rng);
        sleep(Duration::from_millis(self.rng.random_range(0..400))).await;
        let what = self.world.lose_tail(&mut self.rng);
        self.trace.add(format!("backfill cut after {bytes} bytes; {what}"));
    }

    /// While no consumer runs, documents are removed and the nodes forget that there were any.
    async fn purge_while_away(&mut self) {
        self.kill_consumer().await;
        self.world.write(40, &mut self.rng);
        self.world.purge();
        self.trace.add("purged while nobody reads");
        self.start_consumer();
    }

    fn check_storage(&self) -> Result<(), String> {
        self.storage.lock().unwrap().violation.take().map_or(Ok(()), Err)
    }

    /// Waits until what is stored is the bucket.
    async fn settle(&self) -> Result<(), String> {
        let begin = Instant::now();
        while self.compare().is_err() {
            if begin.elapsed() > PATIENCE {
                return self.compare();
            }
            sleep(Duration::from_millis(500)).await;
            self.check_storage()?;
        }
        self.trace.add("everything has arrived");
        Ok(())
    }

    fn compare(&self) -> Result<(), String> {
        let storage = self.storage.lock().unwrap();
        let nothing = Table::default();
        let newest = storage.newest();
        let table = newest.map_or(&nothing, |(_, table)| table);
        self.world.check_written(table)?;
        let (has, wants) = (table.documents(), self.world.documents());
        if has != wants {
            let off: Vec<String> = wants
                .iter()
                .filter(|(key, value)| has.get(*key) != Some(value))
                .map(|((collection, key), _)| {
                    format!("{collection}/{} is missing or old", String::from_utf8_lossy(key))
                })
                .chain(has.keys().filter(|key| !wants.contains_key(*key)).map(
                    |(collection, key)| {
                        format!("{collection}/{} should be gone", String::from_utf8_lossy(key))
                    },
                ))
                .collect();
            return Err(off.join(", "));
        }
        for (vbid, high) in self.world.producer.high_seqnos() {
            let position = newest.and_then(|(at, _)| at.position(vbid));
            let seqno = position.map_or_else(Default::default, |position| position.seqno);
            if seqno != high {
                return Err(format!("{vbid} stands at {seqno} of {high}"));
            }
        }
        Ok(())
    }

    /// Finite streams bring the same, from the beginning and from what was stored.
    async fn read_finite(mut self) -> Result<(), String> {
        self.world.write(30, &mut self.rng);
        let (checkpoint, table) = self.storage.lock().unwrap().load();
        let stored = checkpoint.map(|checkpoint| (checkpoint, table));
        let connection_string = self.world.producer.connection_string();
        for from in [None, stored] {
            let read = read_until_now(&self.setup, &self.network, &connection_string, from);
            let read = timeout(PATIENCE, Box::pin(read));
            let (table, ()) = tokio::join!(read, self.world.stir(&mut self.rng));
            let table = table.map_err(|_| "a finite stream does not end".to_owned())??;
            self.world.check_written(&table)?;
            if table.documents() != self.world.documents() {
                return Err("a finite stream brought something else".into());
            }
        }
        Ok(())
    }
}
