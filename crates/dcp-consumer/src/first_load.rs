//! Whether a first load waited for the nodes, which a higher priority may change.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// The log target of everything about plans and loads.
const LOG: &str = "dcp_consumer::plan";

/// A shorter load is quick enough.
const LONG: Duration = Duration::from_secs(5);

/// How long the application of a first load has waited for changes.
#[derive(Debug)]
pub(crate) struct FirstLoad {
    begun: Instant,
    /// Since when it waits.
    waits_since: Option<Instant>,
    waited: Duration,
    /// Whether the log of this client says so already.
    is_logged: Arc<AtomicBool>,
}

impl FirstLoad {
    pub(crate) const fn new(now: Instant, is_logged: Arc<AtomicBool>) -> Self {
        Self { begun: now, waits_since: None, waited: Duration::ZERO, is_logged }
    }

    /// The application asked for the next changes, which are there or not.
    pub(crate) fn asked(&mut self, now: Instant, is_there: bool) {
        if !is_there {
            self.waits_since.get_or_insert(now);
        } else if let Some(since) = self.waits_since.take() {
            self.waited += now.saturating_duration_since(since);
        }
    }

    /// Whether the load took long, and most of it waiting for the nodes.
    fn is_slowed_by_nodes(&self, now: Instant) -> bool {
        let took = now.saturating_duration_since(self.begun);
        took >= LONG && self.waited * 2 >= took
    }

    /// The load is complete: logs what might make the next one quicker, once for a client.
    pub(crate) fn finished(&self, now: Instant, rows: u64) {
        if self.is_slowed_by_nodes(now) && !self.is_logged.swap(true, Ordering::Relaxed) {
            let seconds = now.saturating_duration_since(self.begun).as_secs();
            tracing::info!(
                name: "first_load_waited",
                target: LOG, rows, seconds,
                "a first load mostly waited for the nodes: with the priority 'high' it may take \
                 about half the time, and the slowest requests of other clients take longer"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A load of this many seconds, of which the application waits some in each.
    fn load(seconds: u32, waits_ms: u64) -> bool {
        let begun = Instant::now();
        let mut load = FirstLoad::new(begun, Arc::default());
        let mut now = begun;
        for _ in 0..seconds {
            load.asked(now, false);
            now += Duration::from_millis(waits_ms / 2);
            load.asked(now, false);
            now += Duration::from_millis(waits_ms - waits_ms / 2);
            load.asked(now, true);
            now += Duration::from_millis(1000 - waits_ms);
            load.asked(now, true);
        }
        load.is_slowed_by_nodes(now)
    }

    #[test]
    fn first_load_is_slowed_by_nodes_if_it_is_long_and_mostly_waits() {
        assert!(load(5, 600));
        assert!(!load(4, 1000), "too short");
        assert!(!load(60, 400), "the application is the slower one");
    }
}
