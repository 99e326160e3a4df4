//! Random histories and faults in simulated time: whatever happens to the cluster, the network and
//! the consumer, the consumer's table is the bucket in the end.
//!
//! One seed makes one run: a cluster without ports, a network that delays, cuts and freezes
//! connections, a consumer that is killed at any moment and goes on from what it had stored, and a
//! plan of what happens when. All of it runs on one thread whose clock is simulated, so that a
//! seed does the same every time.
//!
//! A seed that goes round and round fails once it has taken more steps than any seed needs. One
//! that takes no step at all, in a loop without end, is told by its number before the process ends.
//!
//! `DCP_MODEL_SEEDS` is how many seeds are run (500 unless given), `DCP_MODEL_SEED` runs that one.

mod consumer;
mod network;
mod panics;
mod run;
mod table;
mod watchdog;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::watchdog::Watchdog;

/// Seeds of an ordinary run.
const SEEDS: u64 = 500;
/// Failures after which no further seed is begun.
const FAILURES: usize = 5;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

#[test]
fn whatever_happens_the_table_is_the_bucket_in_the_end() {
    let (first, end) = match number("DCP_MODEL_SEED") {
        Some(seed) => (seed, seed + 1),
        None => (0, number("DCP_MODEL_SEEDS").unwrap_or(SEEDS)),
    };
    let (next, failures) = (AtomicU64::new(first), Mutex::new(Vec::new()));
    let watchdog = Watchdog::start();
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || failures.lock().unwrap().len() >= FAILURES {
                        return;
                    }
                    let report = watchdog.watch(seed, || run::run(seed));
                    if let Err(failure) = report.outcome {
                        failures.lock().unwrap().push((seed, failure));
                    }
                }
            });
        }
    });
    let mut failures = failures.into_inner().unwrap();
    failures.sort();
    let told: Vec<String> = failures
        .iter()
        .map(|(seed, failure)| {
            format!(
                "seed {seed}: {failure}\n  repeat: DCP_MODEL_SEED={seed} cargo test -p \
                 dcp-consumer --test model whatever -- --nocapture"
            )
        })
        .collect();
    assert!(failures.is_empty(), "seeds failed\n{}", told.join("\n"));
}

#[test]
fn a_seed_does_the_same_every_time() {
    for seed in [3, 7, 11] {
        let (first, second) = (run::run(seed), run::run(seed));
        assert!(first.trace.len() > 10, "{} lines", first.trace.len());
        for (one, other) in first.trace.iter().zip(&second.trace) {
            assert_eq!(one, other, "seed {seed}");
        }
        assert_eq!(first.trace.len(), second.trace.len(), "seed {seed}");
    }
}
