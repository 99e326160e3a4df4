//! Worlds that do not come to an end.

use std::collections::BTreeMap;
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tokio_util::sync::CancellationToken;

/// Packets of the network a seed may take: a hundred times as many as most do.
const MAX_STEPS: u64 = 1_000_000;

/// Real time a seed may take, where one of them takes less than a second: for loops that send no
/// packet and let no other task run, so that nothing inside of the run could end it.
const MAX_TIME: Duration = Duration::from_secs(600);

/// Counts the steps of one seed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Steps {
    taken: Arc<AtomicU64>,
    exhausted: CancellationToken,
}

impl Steps {
    /// One more.
    pub(crate) fn take(&self) {
        if self.taken.fetch_add(1, Ordering::Relaxed) >= MAX_STEPS {
            self.exhausted.cancel();
        }
    }

    pub(crate) fn taken(&self) -> u64 {
        self.taken.load(Ordering::Relaxed)
    }

    /// Waits until there were too many.
    pub(crate) async fn exhausted(&self) -> String {
        self.exhausted.cancelled().await;
        format!("goes round: more than {MAX_STEPS} packets")
    }
}

/// Ends the process if a seed takes far too long.
#[derive(Debug)]
pub(crate) struct Watchdog {
    running: Arc<Mutex<BTreeMap<u64, Instant>>>,
}

impl Watchdog {
    pub(crate) fn start() -> Self {
        let running = Arc::<Mutex<BTreeMap<u64, Instant>>>::default();
        let watched = Arc::downgrade(&running);
        std::thread::spawn(move || {
            while let Some(running) = watched.upgrade() {
                let running = running.lock().unwrap().clone();
                if let Some((seed, _)) =
                    running.iter().find(|(_, since)| since.elapsed() > MAX_TIME)
                {
                    // Not by a macro: what those print is kept for the end of the test.
                    let told = format!("seed {seed} does not end: DCP_SIM_SEED={seed}\n");
                    let _ = std::io::stderr().write_all(told.as_bytes());
                    std::process::exit(101);
                }
                std::thread::sleep(Duration::from_secs(1));
            }
        });
        Self { running }
    }

    /// Runs a seed.
    pub(crate) fn watch<T>(&self, seed: u64, run: impl FnOnce() -> T) -> T {
        self.running.lock().unwrap().insert(seed, Instant::now());
        let done = run();
        self.running.lock().unwrap().remove(&seed);
        done
    }
}
