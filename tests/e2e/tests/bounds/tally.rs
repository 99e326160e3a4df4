//! What came of a table of layouts, and what must hold of each.

use std::fmt::Debug;
use std::time::{Duration, Instant};

use dcp_meter::Meter;
use dcp_wire::Opaque;

/// How long a peer may take to answer or to close, nearly always and at most: the machine is shared
/// with other tests.
pub(crate) const SOON: Duration = Duration::from_millis(10);
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
        let (meter, began) = (Meter::start(), Instant::now());
        let outcome = probe(&layout).await;
        let (most, took) = (meter.most(), began.elapsed());
        Self { layout, outcome, most, took }
    }
}

/// What came of all layouts.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    layouts: usize,
    tolerated: usize,
    closed: usize,
    waited: usize,
    late: usize,
    most: usize,
    beyond: Vec<String>,
}

impl Tally {
    /// Adds a layout of `packet`, which may hold so many bytes beyond itself.
    pub(crate) fn add(&mut self, packet: impl Debug, report: &Report, beyond: usize) {
        self.layouts += 1;
        match report.outcome {
            Outcome::Tolerated => self.tolerated += 1,
            Outcome::Closed => self.closed += 1,
            Outcome::Waited => self.waited += 1,
        }
        self.late += usize::from(report.outcome != Outcome::Waited && report.took > SOON);
        self.most = self.most.max(report.most);
        if report.most > report.layout.len() + beyond {
            let (held, layout) = (report.most >> 10, &report.layout);
            self.beyond.push(format!("{packet:?}: {held} KiB, {layout:02x?}"));
        }
    }

    /// Fails if one held too much, if more than one of fifty took long, or if there were fewer than
    /// `least`: layouts, tolerated and closed.
    #[track_caller]
    pub(crate) fn judge(&self, least: [usize; 3]) {
        let Self { layouts, tolerated, closed, waited, late, most, beyond } = self;
        eprintln!(
            "{layouts} layouts: {tolerated} tolerated, {closed} closed, {waited} waited, {late} \
             late, {} KiB at most",
            most >> 10
        );
        let first = &beyond[..beyond.len().min(9)];
        assert!(first.is_empty(), "{} held too much: {first:#?}", beyond.len());
        assert!(late * 50 <= *layouts, "{late} of {layouts} took longer than {SOON:?}");
        let reached = [*layouts, *tolerated, *closed];
        let is_enough = reached.iter().zip(least).all(|(reached, least)| *reached >= least);
        assert!(is_enough, "the table does not reach far: {reached:?} of {least:?}");
    }
}
