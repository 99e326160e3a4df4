//! The server's answers to requests.

use bytes::Bytes;
use dcp_wire::message::{ObservedSeqno, VbSeqnos, rollback_seqno};
use dcp_wire::{DecodeError, Frame, Header, ManifestUid, Opcode, Seqno, Status, Vbid, Vbuuid};
use serde::Deserialize;

use super::requests::Asked;
use super::{Connection, send_close};
use crate::consumer::inflated::inflated;
use crate::consumer::opaque::vbid_of;
use crate::consumer::stream::{Fault, State};
use crate::consumer::{
    CollectionSeqnos, EndCause, Event, Misbehaviour, OpenStreamError, Reaction, Step,
};
use crate::{ChangeSink, FailoverLog, OnRollback};

impl Connection {
    pub(super) fn handle_response<S: ChangeSink>(
        &mut self,
        frame: &Frame<'_>,
        sink: &mut S,
    ) -> Result<(), Fault> {
        let Header { opcode, .. } = frame.header;
        let status = frame.header.status();
        if opcode == Opcode::SASL_AUTH && self.token_answered(frame) {
            return Ok(());
        }
        if status == Status::AUTH_STALE && self.refused_as_stale(frame) {
            return Ok(());
        }
        if Reaction::is_to_reconnect(status) {
            return Err(Fault::Invalidated { opcode, status });
        }
        match opcode {
            Opcode::DCP_STREAM_REQ => self.stream_answered(frame, sink),
            Opcode::DCP_CLOSE_STREAM => {
                self.stream_closed(frame);
                Ok(())
            }
            Opcode::DCP_GET_FAILOVER_LOG
            | Opcode::GET_ALL_VB_SEQNOS
            | Opcode::GET_CLUSTER_CONFIG
            | Opcode::GET_COLLECTIONS_MANIFEST
            | Opcode::OBSERVE_SEQNO
            | Opcode::STAT => self.request_answered(frame, sink),
            // A server answers only malformed acknowledgements, which are never sent here.
            _ => Err(Misbehaviour::UnexpectedPacket.into()),
        }
    }

    /// Handles the answer to a request outside of any stream.
    fn request_answered<S: ChangeSink>(
        &mut self,
        frame: &Frame<'_>,
        sink: &mut S,
    ) -> Result<(), Fault> {
        let Header { opcode, opaque, .. } = frame.header;
        let Some(asked) = self.requests.take(opaque, opcode) else {
            self.stats.stale_responses += 1;
            return Ok(());
        };
        match (asked, frame.header.status()) {
            (Asked::ClusterMap, Status::SUCCESS)
            // The vBucket has moved.
            | (Asked::FailoverLog(_) | Asked::ObservedSeqno(..), Status::NOT_MY_VBUCKET) => {
                self.cluster_map(frame);
            }
            (Asked::Manifest, Status::SUCCESS) => {
                let json = Bytes::from(inflated(frame)?.into_owned());
                self.events.push_back(Event::Manifest(Some(json)));
            }
            (Asked::Manifest, status)
                if Reaction::to(Step::Manifest, status) == Reaction::GoWithout =>
            {
                self.events.push_back(Event::Manifest(None));
            }
            (Asked::HighSeqnos { number }, Status::SUCCESS) => {
                let seqnos: Vec<_> = VbSeqnos::decode(frame.value)?.collect();
                self.heard_high_seqnos(number, &seqnos);
                for &(vbid, high) in &seqnos {
                    self.lower_catch_up(vbid, high, sink)?;
                }
                self.events.push_back(Event::HighSeqnos(seqnos));
            }
            (Asked::CollectionSeqnos(collection), status) => {
                let seqnos = self.collection_seqnos(frame.value, status)?;
                self.requests.collections.push(CollectionSeqnos { collection, seqnos });
                if !self.requests.awaits_collections() {
                    let answers = std::mem::take(&mut self.requests.collections);
                    self.events.push_back(Event::CollectionSeqnos(answers));
                }
            }
            (Asked::FailoverLog(vbid), Status::SUCCESS) => {
                let log = FailoverLog::decode(frame.value);
                let log = log.map_err(|_| Misbehaviour::InvalidFailoverLog)?;
                self.events.push_back(Event::FailoverLog(vbid, log));
            }
            (Asked::ObservedSeqno(vbid, _), Status::SUCCESS) => {
                let observed = ObservedSeqno::decode(frame.value)?;
                self.events.push_back(Event::ObservedSeqno(ObservedSeqno { vbid, ..observed }));
            }
            (Asked::ObservedSeqno(vbid, _), Status::KEY_ENOENT) => {
                self.events.push_back(Event::ObservedSeqno(ObservedSeqno {
                    vbid,
                    vbuuid: Vbuuid(0),
                    persisted_seqno: Seqno::ZERO,
                    current_seqno: Seqno::ZERO,
                    failover: None,
                }));
            }
            // One answer for each statistic, then one without a key.
            (Asked::PurgeSeqnos(mut seqnos), Status::SUCCESS) if !frame.key.is_empty() => {
                let there = purge_seqno(frame.key, frame.value)
                    .filter(|(vbid, _)| vbid.index() < self.streams.len());
                seqnos.extend(there);
                self.requests.put_back(opaque, Asked::PurgeSeqnos(seqnos));
            }
            (Asked::PurgeSeqnos(seqnos), Status::SUCCESS) => {
                self.events.push_back(Event::PurgeSeqnos(Some(seqnos)));
            }
            // The user may not read them.
            (Asked::PurgeSeqnos(_), status)
                if Reaction::to(Step::PurgeSeqnos, status) == Reaction::GoWithout =>
            {
                tracing::debug!(%status, "a node does not report its purge seqnos");
                self.events.push_back(Event::PurgeSeqnos(None));
            }
            (asked, status) => {
                if let Asked::HighSeqnos { number } = asked {
                    self.high_seqnos_refused(number, status);
                }
                self.events.push_back(Event::Refused { opcode, status });
            }
        }
        Ok(())
    }

    /// The seqnos of a collection: at most one per vBucket, however long the answer is. A collection
    /// that the node does not have has none.
    fn collection_seqnos(
        &self,
        value: &[u8],
        status: Status,
    ) -> Result<Result<Vec<(Vbid, Seqno)>, Status>, DecodeError> {
        Ok(match status {
            Status::SUCCESS => {
                let entries = VbSeqnos::decode(value)?;
                let there = entries.filter(|(vbid, _)| vbid.index() < self.streams.len());
                Ok(there.take(self.streams.len()).collect())
            }
            Status::UNKNOWN_COLLECTION => Ok(Vec::new()),
            status => Err(status),
        })
    }

    /// The server sent a cluster map, or nothing if it has no newer one.
    pub(super) fn cluster_map(&mut self, frame: &Frame<'_>) {
        match inflated(frame) {
            Ok(json) if json.is_empty() => {}
            Ok(json) => self.events.push_back(Event::ClusterMap(json.into_owned().into())),
            Err(error) => {
                tracing::warn!(name: "cluster_map_unusable", %error, "a cluster map cannot be used");
            }
        }
    }

    fn stream_answered<S: ChangeSink>(
        &mut self,
        frame: &Frame<'_>,
        sink: &mut S,
    ) -> Result<(), Fault> {
        let vbid = vbid_of(frame.header.opaque);
        let current = self.streams.get_mut(vbid.index()).and_then(Option::as_mut);
        let Some(stream) = current.filter(|stream| {
            stream.opaque == frame.header.opaque && stream.state == State::Requested
        }) else {
            self.stats.stale_responses += 1;
            return Ok(());
        };
        let status = frame.header.status();
        match Reaction::to(Step::StreamRequest, status) {
            Reaction::Use => {
                let log = FailoverLog::decode(frame.value)
                    .map_err(|_| Misbehaviour::InvalidFailoverLog)?;
                stream.opened(log);
                let persists = self.config.delivery.persisted_only;
                let persists_on = stream.newest_branch().filter(|_| persists);
                let (begins_again, caught_up) = (stream.begin_again(), stream.is_caught_up());
                self.events.push_back(Event::StreamOpened { vbid, persists_on });
                if let Some(void) = begins_again {
                    sink.rollback(&void)?;
                    self.events.push_back(Event::RolledBack(void));
                    self.dirty.push(vbid);
                }
                if caught_up {
                    self.tell_caught_up(vbid, sink)?;
                }
                Ok(())
            }
            Reaction::RollBack => {
                let to = rollback_seqno(frame)?;
                self.roll_back(vbid, to, sink)
            }
            Reaction::BeginAgain if stream.position.seqno != Seqno::ZERO => {
                self.roll_back(vbid, Seqno::ZERO, sink)
            }
            Reaction::CloseFirst if !stream.reopened => {
                // Adopting that stream would mean adopting an unknown position: close it, then
                // request a new one.
                stream.state = State::Closing;
                stream.reopen = true;
                stream.reopened = true;
                send_close(stream, &mut self.transmit);
                let opaque = stream.opaque;
                self.await_close(self.handled_at, vbid, opaque);
                Ok(())
            }
            _ => {
                self.refused(vbid, status, frame);
                Ok(())
            }
        }
    }

    fn roll_back<S: ChangeSink>(
        &mut self,
        vbid: Vbid,
        to: Seqno,
        sink: &mut S,
    ) -> Result<(), Fault> {
        let policy = self.config.on_rollback;
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return Ok(()) };
        if stream.position.seqno == Seqno::ZERO {
            self.end(vbid, EndCause::Refused(OpenStreamError::RollbackAtZero));
            return Ok(());
        }
        if let Some(times) = stream.is_overtaken(to) {
            self.end(vbid, EndCause::Overtaken(times));
            return Ok(());
        }
        let rollback = stream.roll_back(to, policy == OnRollback::Resync);
        self.stats.rollbacks += 1;
        if policy == OnRollback::Fail {
            // Not delivered, so that the position stays at one the application knows.
            stream.dirty = false;
            self.end(vbid, EndCause::RolledBack { rollback, to });
            return Ok(());
        }
        sink.rollback(&rollback)?;
        self.events.push_back(Event::RolledBack(rollback));
        self.dirty.push(vbid);
        stream.restart(self.opaques.vbucket(vbid));
        self.request(vbid);
        Ok(())
    }

    /// The seqno at which a vBucket is caught up may have been lost in a failover.
    fn lower_catch_up<S: ChangeSink>(
        &mut self,
        vbid: Vbid,
        high: Seqno,
        sink: &mut S,
    ) -> Result<(), Fault> {
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return Ok(()) };
        stream.lower_catch_up(high);
        if stream.state == State::Streaming && stream.is_caught_up() {
            self.tell_caught_up(vbid, sink)?;
        }
        Ok(())
    }

    fn refused(&mut self, vbid: Vbid, status: Status, frame: &Frame<'_>) {
        let mut manifest_uid = None;
        match status {
            Status::NOT_MY_VBUCKET => self.cluster_map(frame),
            Status::UNKNOWN_COLLECTION | Status::UNKNOWN_SCOPE => {
                manifest_uid = manifest_uid_of(frame.value);
            }
            _ => {}
        }
        self.end(vbid, EndCause::Refused(OpenStreamError::Refused { status, manifest_uid }));
    }

    fn stream_closed(&mut self, frame: &Frame<'_>) {
        let vbid = vbid_of(frame.header.opaque);
        let current = self.streams.get_mut(vbid.index()).and_then(Option::as_mut);
        let closing =
            |state| matches!(state, State::Closing | State::Finished { awaits_answer: true });
        let Some(stream) =
            current.filter(|stream| stream.opaque == frame.header.opaque && closing(stream.state))
        else {
            self.stats.stale_responses += 1;
            return;
        };
        if stream.is_finished() {
            stream.state = State::Finished { awaits_answer: false };
            // A stream that the server had ended by itself has its STREAM_END, which comes before
            // this refusal, or after it if the window was full.
            stream.ended |= frame.header.status().is_success() && !self.config.stream_end_on_close;
            self.leave(vbid);
            return;
        }
        if !std::mem::take(&mut stream.reopen) {
            self.end(vbid, EndCause::Closed);
            return;
        }
        stream.restart(self.opaques.vbucket(vbid));
        self.request(vbid);
    }
}

/// Reads `vb_17:purge_seqno` and ignores the other statistics.
fn purge_seqno(name: &[u8], value: &[u8]) -> Option<(Vbid, Seqno)> {
    let vbid = std::str::from_utf8(name).ok()?.strip_prefix("vb_")?.strip_suffix(":purge_seqno")?;
    let seqno = std::str::from_utf8(value).ok()?;
    Some((Vbid(vbid.parse().ok()?), Seqno(seqno.parse().ok()?)))
}

/// The manifest uid in the JSON body of a refusal, if it names one.
fn manifest_uid_of(body: &[u8]) -> Option<ManifestUid> {
    #[derive(Deserialize)]
    struct Body {
        manifest_uid: String,
    }
    let body: Body = serde_json::from_slice(body).ok()?;
    u64::from_str_radix(&body.manifest_uid, 16).ok().map(ManifestUid)
}
