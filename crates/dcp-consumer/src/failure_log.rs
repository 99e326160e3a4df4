//! The log of nodes that fail while something waits for them.

use std::collections::BTreeMap;
use std::time::Duration;

use dcp_proto::topology::Address;
use dcp_wire::{Status, Vbid};
use tokio::time::Instant;

use crate::{Chain, Error, ErrorKind};

/// The log target of everything about connecting.
pub(crate) const LOG: &str = "dcp_consumer::connect";

/// Pause before the same failure of a node is logged again; it doubles.
const PAUSE: Duration = Duration::from_secs(1);

/// Longest such pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(60);

/// Logs each new failure of a node at once and repeated ones after pauses that double, so that an
/// outage is not silent and does not fill the log.
#[derive(Debug, Default)]
pub(crate) struct FailureLog {
    /// By the text of a node's address or a vBucket.
    logged: BTreeMap<String, Logged>,
}

/// What was logged about a node or vBucket.
#[derive(Debug)]
struct Logged {
    reasons: Vec<(ErrorKind, Option<Status>)>,
    next: Instant,
    pause: Duration,
}

impl FailureLog {
    /// A node has failed, and is tried again.
    pub(crate) fn failed(&mut self, address: &Address, error: &Error) {
        if self.is_due(address.to_string(), error) {
            let error = Chain(error);
            tracing::warn!(name: "node_unreachable", target: LOG, node = %address, %error, "a node cannot be reached");
        }
    }

    /// No node serves a vBucket, and all are asked again.
    pub(crate) fn unplaced(&mut self, vbid: Vbid, error: &Error) {
        if self.is_due(vbid.to_string(), error) {
            tracing::warn!(name: "vbucket_without_node", vbucket = vbid.0, error = %Chain(error), "a vBucket has no node");
        }
    }

    /// A node has answered: its next failure is a new one.
    pub(crate) fn answered(&mut self, address: &Address) {
        self.logged.remove(&address.to_string());
    }

    fn is_due(&mut self, about: String, error: &Error) -> bool {
        let (now, reason) = (Instant::now(), (error.kind(), error.status()));
        let Some(logged) = self.logged.get_mut(&about) else {
            let logged = Logged { reasons: vec![reason], next: now + PAUSE, pause: PAUSE };
            self.logged.insert(about, logged);
            return true;
        };
        if !logged.reasons.contains(&reason) {
            logged.reasons.push(reason);
            return true;
        }
        if now < logged.next {
            return false;
        }
        logged.pause = (logged.pause * 2).min(LONGEST_PAUSE);
        logged.next = now + logged.pause;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn failure_log_repeats_a_failure_ever_less_often_and_a_new_one_at_once() {
        let mut log = FailureLog::default();
        let mut is_due = |node: &str, kind| log.is_due(node.to_owned(), &Error::new(kind, "x"));
        let begun = Instant::now();
        let mut logged = Vec::new();
        while begun.elapsed() < Duration::from_secs(300) {
            if is_due("n1:11210", ErrorKind::Connect) {
                logged.push(begun.elapsed().as_secs());
            }
            tokio::time::advance(Duration::from_secs(1)).await;
        }
        assert_eq!(logged, [0, 1, 3, 7, 15, 31, 63, 123, 183, 243]);
        assert!(is_due("n1:11210", ErrorKind::Authentication));
        assert!(is_due("n2", ErrorKind::Connect));
        assert!(!is_due("n1:11210", ErrorKind::Connect));
        log.answered(&Address::new("n1", 11210));
        assert!(log.is_due("n1:11210".to_owned(), &Error::new(ErrorKind::Connect, "x")));
    }
}
