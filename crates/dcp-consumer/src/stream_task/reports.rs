//! What follows from the reports of a stream's connections.

use std::sync::Arc;
use std::time::Instant;

use dcp_proto::BatchSink;
use dcp_proto::consumer::{CollectionSeqnos, EndCause, StreamPosition};
use dcp_proto::topology::Address;
use dcp_wire::{Vbid, Vbuuid};

use super::log::CLUSTER;
use super::placement::Verdict;
use super::shared_stats::Outdated;
use super::{StreamTask, lag_watch};
use crate::connect::ConnectionId;
use crate::connection::now;
use crate::driver::{Command, Report, VbucketProgress};
use crate::error::Seconds;
use crate::events::{StreamEvent, end_code};
use crate::{Chain, Error, ErrorKind};

impl<S: BatchSink> StreamTask<S> {
    pub(super) fn reported(&mut self, id: ConnectionId, report: Report) -> Result<(), Error> {
        let now = now();
        match &report {
            Report::Opened { vbid, .. }
            | Report::Ended { vbid, .. }
            | Report::Unpersisted(vbid, _) => self.outdated.add(*vbid),
            Report::CaughtUp(_) | Report::RolledBack(_) => {}
            _ => self.outdated = Outdated::All,
        }
        match report {
            Report::Opened { vbid, persists_on } => self.opened(id, vbid, persists_on, now),
            Report::CaughtUp(caught_up) => {
                self.stats.events.push(StreamEvent::CaughtUp(caught_up));
            }
            Report::RolledBack(rollback) => {
                self.stats.events.push(StreamEvent::RolledBack(rollback));
            }
            Report::Unpersisted(vbid, Some(vbuuid)) => {
                let copies = self.copies_of(vbid);
                self.persistence.unpersisted(vbid, (id, vbuuid), copies, now);
            }
            Report::Unpersisted(vbid, None) => self.persistence.all_persisted(vbid, id),
            Report::HighSeqnos(streaming) => self.high_seqnos(&streaming, now)?,
            Report::CollectionSeqnos(answers, streaming) => {
                self.collection_seqnos(&answers, &streaming, now);
            }
            Report::Ended { vbid, cause, from } => self.ended(id, vbid, cause, from, now)?,
            Report::Exclusions(exclusions) => {
                self.config.exclude(&exclusions);
                self.exclude(&exclusions);
            }
            Report::Map(shared) => {
                if let Some(json) = shared.take_map()
                    && let Some(address) = self.connections.address_of(id)
                {
                    self.bucket.apply_json(address, &json);
                    self.bucket.check_identity()?;
                }
            }
            Report::Lost { streams, error } => self.lost(id, streams, error, now)?,
            Report::SinkFailed(error) => {
                return Err(Error::new(ErrorKind::Sink, error.to_string()).with_source(error));
            }
        }
        Ok(())
    }

    /// A stream was opened. With `persists_on`, its changes wait until they are persisted.
    fn opened(&mut self, on: ConnectionId, vbid: Vbid, persists_on: Option<Vbuuid>, now: Instant) {
        self.placement.opened(vbid, on, now);
        self.connections.serves(on, now);
        self.lag.opened(now);
        if let Some(vbuuid) = persists_on {
            let copies = self.copies_of(vbid);
            self.persistence.watch(vbid, (on, vbuuid), copies, now);
        }
        let node = self.connections.node_name(on);
        self.stats.events.push(StreamEvent::Opened { vbid, node });
    }

    fn copies_of(&self, vbid: Vbid) -> Vec<Option<Address>> {
        self.bucket.copies_of(&self.bucket.config(), vbid)
    }

    /// A stream ended.
    fn ended(
        &mut self,
        on: ConnectionId,
        vbid: Vbid,
        cause: EndCause,
        from: Box<StreamPosition>,
        now: Instant,
    ) -> Result<(), Error> {
        self.persistence.forget(vbid, on);
        let (code, reason) = (end_code(&cause), cause.to_string());
        let ended = StreamEvent::Ended { vbid, reason, cause: code.clone() };
        self.stats.events.push(ended);
        match self.placement.ended(vbid, on, cause, from, now) {
            Verdict::Fatal(error) => return Err(error),
            Verdict::Retry { fetch_map } => {
                if fetch_map {
                    self.map.poll_by(now);
                }
                self.lag.interrupted(now);
            }
            // The filter's scope or collections were dropped, or the node is behind. The newest
            // manifest decides; until it changes, the request is repeated.
            Verdict::FilterRefused => {
                if !self.drop_from_filter()? {
                    self.fetch_map();
                }
            }
            Verdict::Complete => {}
        }
        if let Some(wait) = self.placement.wait_of(vbid, now) {
            self.stats.events.push(StreamEvent::BackingOff { vbid, wait, cause: code });
        }
        Ok(())
    }

    /// A connection was lost, with these streams.
    fn lost(
        &mut self,
        id: ConnectionId,
        streams: Vec<(Vbid, StreamPosition)>,
        error: Error,
        now: Instant,
    ) -> Result<(), Error> {
        let (node, text) = (self.connections.node_name(id), Chain(&error).to_string());
        tracing::warn!(name: "connection_lost", target: CLUSTER, %node, streams = streams.len(), error = %text,
            "connection lost");
        let cause = error.kind();
        self.stats.events.push(StreamEvent::ConnectionLost { node, error: text, cause });
        let address = self.connections.address_of(id);
        if let Some(error) = self.poison_packets.lost(address, &error, &streams) {
            return Err(error);
        }
        self.persistence.forget_all(id);
        let error = Arc::new(error);
        self.placement.lost(id, streams, &error, now);
        self.lag.interrupted(now);
        if let Some(lost) = self.connections.lost(id, error, now, &mut self.randomness) {
            if lost.is_outage {
                self.stats.update(|stats, _| stats.reconnects += 1);
            }
            self.stats.fold(&lost.shared);
        }
        Ok(())
    }

    /// A node has reported its high seqnos.
    fn high_seqnos(&mut self, streaming: &[VbucketProgress], now: Instant) -> Result<(), Error> {
        for &progress in streaming {
            let VbucketProgress { vbid, high_seqno, .. } = progress;
            if self.config.end_exists {
                self.placement.check_end(vbid, high_seqno)?;
            }
            if progress.has_lost_end
                && let Some(on) = self.placement.connection_of(vbid)
            {
                tracing::warn!(name: "end_lost", target: CLUSTER, vbucket = vbid.0, high_seqno = high_seqno.0,
                    "the end of the read was lost in a failover");
                // It is reported as ended and opened again.
                self.connections.send(on, Command::Close(vbid));
            }
            if !self.config.is_filtered() {
                self.compare(progress, now);
            }
        }
        Ok(())
    }

    /// A node has reported the seqnos of collections; `streaming` are the vBuckets that stream from
    /// it.
    fn collection_seqnos(
        &mut self,
        answers: &[CollectionSeqnos],
        streaming: &[VbucketProgress],
        now: Instant,
    ) {
        if self.config.is_filtered() {
            for progress in lag_watch::in_collections(answers, streaming) {
                self.compare(progress, now);
            }
        }
        let manifest = self.bucket.manifest();
        self.stats.update_collections(|known| {
            lag_watch::update_collections(known, answers, streaming, &manifest);
        });
    }

    /// Compares a vBucket's position with the highest seqno that its stream can deliver.
    fn compare(&mut self, progress: VbucketProgress, now: Instant) {
        let VbucketProgress { vbid, seqno, high_seqno, .. } = progress;
        let end_seqno = self.placement.end_seqno(vbid);
        let lags = self.lag.compare(progress, end_seqno, now);
        if self.lag.is_left_open(progress, now)
            && let Some(on) = self.placement.connection_of(vbid)
        {
            tracing::info!(name: "snapshot_stalled", target: CLUSTER, vbucket = vbid.0, seqno = seqno.0,
                "the rest of a snapshot does not come: the stream is opened again");
            // It is reported as ended and opened again.
            self.connections.send(on, Command::Close(vbid));
        }
        let Some(still) = lags else { return };
        let event = StreamEvent::Lagging { vbid, seqno, high_seqno, still };
        let still = Seconds(still);
        tracing::warn!(name: "lagging", target: CLUSTER, vbucket = vbid.0, seqno = seqno.0, high_seqno = high_seqno.0, %still,
            "a vBucket lags without progress");
        self.stats.events.push(event);
    }
}
