//! What came of a table of layouts, and what must hold of each.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use dcp_meter::Meter;
use dcp_wire::Opaque;

/// How long a peer may take to answer or to close, without the time for which other processes had
/// the processor.
pub(crate) const SOON: Duration = Duration::from_millis(10);
/// How often a layout is tried that took longer: a machine can stand still without its kernel
/// knowing.
const ATTEMPTS: usize = 3;
/// How long a test waits for a peer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(10);

/// Opaque of the noop that follows each packet.
pub(crate) const PROBE: Opaque = Opaque(0x5052_4f42);

/// How a peer took a layout.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Outcome {
    /// The noop after it was answered.
    Tolerated,
    /// The connection was closed.
    Closed,
    /// More is awaited.
    Waited,
}

/// What a layout did.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) layout: Vec<u8>,
    pub(crate) outcome: Outcome,
    most: usize,
    took: Duration,
}

impl Report {
    /// Sends a layout by `probe`, and measures it.
    pub(crate) async fn of(layout: Vec<u8>, probe: impl AsyncFnOnce(&[u8]) -> Outcome) -> Self {
        let (meter, began, preempted) = (Meter::start(), Instant::now(), preempted());
        let outcome = probe(&layout).await;
        let (most, took) = (meter.most(), began.elapsed());
        let took = took.saturating_sub(self::preempted().saturating_sub(preempted));
        Self { layout, outcome, most, took }
    }

    fn is_late(&self) -> bool {
        self.outcome != Outcome::Waited && self.took > SOON
    }
}

/// For how long this thread, on which both ends run, was ready and waited for a processor; zero where
/// the system does not say.
fn preempted() -> Duration {
    let line = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanos = line.split_whitespace().nth(1).and_then(|field| field.parse().ok());
    Duration::from_nanos(nanos.unwrap_or_default())
}

/// What came of all layouts.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    layouts: usize,
    tolerated: usize,
    closed: usize,
    waited: usize,
    slowest: Duration,
    late: Vec<String>,
    /// How often the layout that is tried was late.
    repeated: usize,
    most: usize,
    beyond: Vec<String>,
}

impl Tally {
    /// Adds a layout of `packet`, which may hold so many bytes beyond itself. Returns `false` if it is
    /// to be tried again.
    #[must_use]
    pub(crate) fn add(&mut self, packet: impl Debug, report: &Report, beyond: usize) -> bool {
        let Report { layout, outcome, most, took } = report;
        if report.is_late() && self.repeated + 1 < ATTEMPTS {
            self.repeated += 1;
            return false;
        }
        self.repeated = 0;
        self.layouts += 1;
        match outcome {
            Outcome::Tolerated => self.tolerated += 1,
            Outcome::Closed => self.closed += 1,
            Outcome::Waited => self.waited += 1,
        }
        if report.is_late() {
            self.late.push(format!("{packet:?}: {took:?}, {layout:02x?}"));
        }
        if *outcome != Outcome::Waited {
            self.slowest = self.slowest.max(*took);
        }
        self.most = self.most.max(*most);
        if *most > layout.len() + beyond {
            self.beyond.push(format!("{packet:?}: {} KiB, {layout:02x?}", most >> 10));
        }
        true
    }

    /// Fails if one held too much or took long, or if there were fewer than `least`: layouts,
    /// tolerated and closed.
    #[track_caller]
    pub(crate) fn judge(&self, least: [usize; 3]) {
        let Self { layouts, tolerated, closed, waited, slowest, late, most, beyond, .. } = self;
        eprintln!(
            "{layouts} layouts: {tolerated} tolerated, {closed} closed, {waited} waited, {slowest:?} \
             and {} KiB at most",
            most >> 10
        );
        let first = &beyond[..beyond.len().min(9)];
        assert!(first.is_empty(), "{} held too much: {first:#?}", beyond.len());
        let first = &late[..late.len().min(9)];
        assert!(first.is_empty(), "{} took longer than {SOON:?}: {first:#?}", late.len());
        let reached = [*layouts, *tolerated, *closed];
        let is_enough = reached.iter().zip(least).all(|(reached, least)| *reached >= least);
        assert!(is_enough, "the table does not reach far: {reached:?} of {least:?}");
    }
}
