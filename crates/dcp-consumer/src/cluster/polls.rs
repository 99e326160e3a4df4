//! Polling of the cluster map and of the nodes' high seqnos.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use dcp_proto::BatchSink;
use dcp_wire::Vbid;
use rand::seq::IteratorRandom;

use super::nodes::Slot;
use super::{Cluster, Event};
use crate::Error;
use crate::connect::ConnectionId;
use crate::driver::{Command, Progress};
use crate::error::Seconds;
use crate::events::StreamEvent;

/// How often the map is requested while a vBucket waits and none is pushed.
pub(super) const POLL_MAP: Duration = Duration::from_millis(2500);

/// How often high seqnos are requested.
pub(super) const POLL_PROGRESS: Duration = Duration::from_secs(10);

/// How soon they are requested after a stream was opened, so that its lag is known: thousands may
/// be opened at once.
const POLL_OPENED: Duration = Duration::from_millis(100);

/// How soon they are requested after a stream was interrupted, if ends may have been rolled back.
const POLL_END: Duration = Duration::from_millis(500);

impl<S: BatchSink> Cluster<S> {
    pub(super) fn apply_map(&mut self, from: ConnectionId, json: &Bytes) -> Result<(), Error> {
        let from = self.nodes.iter().find(|(_, node)| node.id() == Some(from));
        let Some((address, _)) = from else { return Ok(()) };
        self.bucket.apply_json(address, json);
        self.bucket.check_identity()
    }

    /// Requests the map over some connection, or, if there is none, from any node.
    ///
    /// If there is only one, other nodes are asked as well once a vBucket has waited for a while:
    /// the node may be cut off from its cluster, so that its map is old.
    pub(super) fn poll_map(&mut self, now: Instant) {
        self.poll_map_at = now + POLL_MAP;
        let up = || {
            self.nodes.values().filter_map(|node| match &node.slot {
                Slot::Up { commands, .. } => Some(commands),
                _ => None,
            })
        };
        let may_be_old = up().count() == 1 && self.reconciler.has_waited(now, POLL_MAP);
        // A random one: a fixed choice might be dead without being detected.
        let asked = up().choose(&mut self.randomness);
        if asked.is_none_or(|commands| commands.send(Command::FetchMap).is_err()) || may_be_old {
            self.fetch_map();
        }
    }

    /// Requests the map and the manifest from any node, unless a request is in progress.
    pub(super) fn fetch_map(&mut self) {
        if !std::mem::replace(&mut self.fetching_map, true) {
            let (bucket, outcomes) = (Arc::clone(&self.bucket), self.outcomes.sender.clone());
            self.errands.spawn(async move {
                let _ = outcomes.send(Event::Fetched(bucket.fetch_map().await));
            });
        }
    }

    /// Requests high seqnos over every connection.
    pub(super) fn poll_progress(&mut self, now: Instant) {
        let question = self.collection_question();
        let interval = Self::poll_interval(question.as_ref());
        self.poll_progress_at = now + interval;
        self.stats.asked(now, interval);
        for node in self.nodes.values() {
            if let Slot::Up { commands, .. } = &node.slot {
                let _ = commands.send(Command::FetchHighSeqnos);
                if let Some(Command::FetchCollectionSeqnos(ids)) = &question {
                    let _ = commands.send(Command::FetchCollectionSeqnos(Arc::clone(ids)));
                }
            }
        }
    }

    /// Closes a stream on a connection; it is reported as ended and opened again.
    pub(super) fn close(&self, vbid: Vbid, on: ConnectionId) {
        let node = self.nodes.values().find(|node| node.id() == Some(on));
        if let Some(Slot::Up { commands, .. }) = node.map(|node| &node.slot) {
            let _ = commands.send(Command::Close(vbid));
        }
    }

    /// Schedules a request for high seqnos after a stream was opened.
    pub(super) fn ask_for_lag(&mut self, now: Instant) {
        self.poll_progress_at = self.poll_progress_at.min(now + POLL_OPENED);
    }

    /// Schedules a check that the ends still exist: streams that resume on another node may be on
    /// another history.
    pub(super) fn doubt_ends(&mut self, now: Instant) {
        if self.config.end_exists {
            self.poll_progress_at = self.poll_progress_at.min(now + POLL_END);
        }
    }

    pub(super) fn progressed(&mut self, progress: &[Progress], now: Instant) -> Result<(), Error> {
        for &progress in progress {
            if self.config.end_exists {
                self.reconciler.check_end(progress)?;
            }
            let Progress { vbid, high_seqno, .. } = progress;
            if progress.has_lost_end
                && let Some(on) = self.reconciler.connection_of(vbid)
            {
                tracing::warn!(%vbid, %high_seqno, "the end of the read was lost in a failover");
                self.close(vbid, on);
            }
            if !self.is_filtered() {
                self.compare(progress, now);
            }
        }
        Ok(())
    }

    /// Compares a vBucket's position with the highest seqno that its stream can deliver.
    pub(super) fn compare(&mut self, progress: Progress, now: Instant) {
        let Progress { vbid, seqno, high_seqno, .. } = progress;
        let Some(still) = self.reconciler.progressed(progress, now) else { return };
        let event = StreamEvent::Lagging { vbid, seqno, high_seqno, still };
        let still = Seconds(still);
        tracing::warn!(%vbid, %seqno, %high_seqno, %still, "a vBucket lags without progress");
        self.stats.events.push(event);
    }
}
