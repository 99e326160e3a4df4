//! Whole worlds in simulated time: clusters, networks, clients and applications from one seed, held
//! against what really happened.
//!
//! One seed makes one [plan](plan::Plan): a cluster without ports, readers as applications have them,
//! and what is written and goes wrong when. All of it runs on one thread whose clock is simulated, so
//! that a seed does the same every time, to the byte.
//!
//! What must be true of every world:
//!
//! * a log with rollbacks applied, and a table read again on rollback, are the cluster's documents
//!   in the end ([`run`]);
//! * every row was written so, at its seqno, on the branch it names ([`truth`]);
//! * no checkpoint passes a change that was not delivered and acknowledged ([`readers`]);
//! * nothing waits while nothing is broken, and finite streams end;
//! * what was delivered as persisted is not taken back by a copy that was there ([`truth`]);
//! * an end that is not clamped is the end of a snapshot, a clamped one has nothing above it;
//! * no outage ends a stream that has time to wait, nor does a password that is changed;
//! * replicas have every document once nothing is broken any more ([`run`]);
//! * buffers stay within their bounds, and flow control's accounts agree to the byte ([`packets`]).
//!
//! `DCP_SIM_WORLDS` is how many worlds are run (500 unless given), `DCP_SIM_SEED` runs that one,
//! `DCP_SIM_WITHOUT` leaves out kinds of steps (`Cut,Kill`),
//! `DCP_SIM_VERBOSE` shows what happens, `DCP_SIM_PACKETS` every packet, `DCP_SIM_REPORT` how often
//! what happened.

mod faults;
mod network;
mod packets;
mod panics;
mod plan;
mod readers;
mod replication;
mod report;
mod rows;
mod run;
mod shrink;
mod storage;
mod trace;
mod truth;
mod vault;
mod watchdog;
mod world;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::plan::{Kind, Plan};
use crate::report::Report;
use crate::watchdog::Watchdog;

/// Worlds of an ordinary run.
const WORLDS: u64 = 500;
/// Failures after which no further world is begun.
const FAILURES: usize = 5;
/// Worlds that are run twice.
const TWICE: u64 = 10;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok()?.parse().ok()
}

/// The plan of a seed, without the steps that are to be left out.
fn plan_of(seed: u64) -> Plan {
    let without = std::env::var("DCP_SIM_WITHOUT").unwrap_or_default();
    Plan::new(seed).without(&without)
}

/// Runs worlds on all processors; what failed, and how often what happened.
fn run_worlds(first: u64, end: u64) -> (Vec<(u64, String)>, Report) {
    let (next, failures) = (AtomicU64::new(first), Mutex::new(Vec::new()));
    let (report, watchdog) = (Mutex::new(Report::default()), Watchdog::start());
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    let most = usize::try_from(number("DCP_SIM_FAILURES").unwrap_or(FAILURES as u64)).unwrap_or(1);
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || failures.lock().unwrap().len() >= most {
                        return;
                    }
                    let outcome = watchdog.watch(seed, || run::run(&plan_of(seed)));
                    report.lock().unwrap().merge(&outcome.report);
                    if let Err(failure) = outcome.result {
                        failures.lock().unwrap().push((seed, failure));
                    }
                }
            });
        }
    });
    let mut failures = failures.into_inner().unwrap();
    failures.sort();
    (failures, report.into_inner().unwrap())
}

/// What to say of a world that failed, cut down to a short history.
fn tell(seed: u64, failure: &str) -> String {
    let commit = std::process::Command::new("git").args(["rev-parse", "--short", "HEAD"]).output();
    let commit = commit.map(|out| String::from_utf8_lossy(&out.stdout).trim().to_owned());
    let commit = commit.unwrap_or_default();
    let (plan, outcome) = shrink::shrink(&plan_of(seed));
    let steps: Vec<String> = plan.steps.iter().map(|step| format!("{:?}", step.kind)).collect();
    let shrunk = outcome.result.err().unwrap_or_default();
    format!(
        "world {seed} at {commit}: {failure}\n  repeat: DCP_SIM_SEED={seed} DCP_SIM_VERBOSE=1 \
         cargo test -p dcp-sim worlds_hold\n  in short: {} readers, {} steps: {}\n  {shrunk}\n    \
         {}",
        plan.readers.len(),
        steps.len(),
        steps.join(", "),
        outcome.trace.join("\n    "),
    )
}

#[test]
fn worlds_hold() {
    let seed = number("DCP_SIM_SEED");
    let (first, end) = match seed {
        Some(seed) => (seed, seed + 1),
        None => {
            let first = number("DCP_SIM_FIRST").unwrap_or(0);
            (first, first + number("DCP_SIM_WORLDS").unwrap_or(WORLDS))
        }
    };
    let (failures, report) = run_worlds(first, end);
    if std::env::var_os("DCP_SIM_REPORT").is_some() {
        use std::io::Write;
        let _ = writeln!(std::io::stderr(), "{report}");
    }
    let brief = std::env::var_os("DCP_SIM_BRIEF").is_some();
    let told = failures.iter().enumerate().map(|(index, (seed, failure))| {
        // One history is enough to begin with.
        if index == 0 && !brief { tell(*seed, failure) } else { format!("world {seed}: {failure}") }
    });
    let told: Vec<String> = told.collect();
    assert!(failures.is_empty(), "worlds failed\n{}", told.join("\n"));
    if seed.is_none() && end - first >= WORLDS {
        let missing = report.missing();
        assert!(missing.is_empty(), "in {} worlds there was no {missing:?}", end - first);
    }
}

#[test]
fn plans_have_every_fault() {
    let plans: Vec<Plan> = (0..WORLDS).map(Plan::new).collect();
    for (kind, ..) in Kind::ALL {
        let has = |plan: &&Plan| plan.steps.iter().any(|step| step.kind == *kind);
        let worlds = plans.iter().filter(has).count();
        assert!(worlds >= 5, "{kind:?} in {worlds} of {WORLDS} worlds");
    }
}

#[test]
fn a_world_does_the_same_every_time() {
    for seed in 0..TWICE {
        let plan = Plan::new(seed);
        let (first, second) = (run::run(&plan), run::run(&plan));
        for (one, other) in first.trace.iter().zip(&second.trace) {
            assert_eq!(one, other, "world {seed}");
        }
        assert_eq!(first.hash, second.hash, "world {seed}: the traces agree, the bytes do not");
    }
}
