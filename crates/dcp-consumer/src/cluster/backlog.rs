//! Changes from ended connections that the application has not taken yet.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dcp_proto::BatchSink;

use super::Cluster;
use super::nodes::Slot;
use crate::queue::Link;

/// Bytes up to which streams are still reopened, so that a reader that is merely slower than the
/// server does not wait whenever a connection is lost; half a window if that is less.
const ROOM: u64 = 4 * 1024 * 1024;

/// Fixed size of a batch regardless of its changes: small ones are delivered when streams end.
const BATCH: u64 = 4 * 1024;

/// How soon it is checked again.
const RECHECK: Duration = Duration::from_millis(50);

/// Every connection has its own flow-control window: without this limit, each one lost while the
/// application pauses would leave another window full of changes in memory.
#[derive(Debug, Default)]
pub(super) struct Backlog(Vec<Arc<Link>>);

impl Backlog {
    /// Adds an ended connection.
    pub(super) fn add(&mut self, link: Arc<Link>) {
        self.0.push(link);
    }

    /// Whether streams must not be reopened; `open` are the connections that have not ended.
    fn is_full<'a>(&mut self, open: impl Iterator<Item = &'a Arc<Link>>, room: u64) -> bool {
        self.0.retain(|link| link.has_queued());
        let left: u64 = self.0.iter().map(|link| link.queued_bytes()).sum();
        let batches = self.0.iter().map(|link| link.queued()).sum::<usize>()
            + open.map(|link| link.queued()).sum::<usize>();
        left.saturating_add(batches as u64 * BATCH) > room
    }
}

impl<S: BatchSink> Cluster<S> {
    /// Makes vBuckets wait for the application, which does not count towards the time they may be
    /// without a stream.
    pub(super) fn wait_for_application(&mut self, now: Instant) {
        let open = self.nodes.values().filter_map(|node| match &node.slot {
            Slot::Up { link, .. } => Some(link),
            _ => None,
        });
        let room = ROOM.min(u64::from(self.config.opening.buffer_size) / 2);
        if self.reconciler.has_idle() && self.backlog.is_full(open, room) {
            self.reconciler.hold_up(now, now + RECHECK);
        }
    }
}
