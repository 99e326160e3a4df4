//! The server's answers to stream requests.

use dcp_wire::message::{VbSeqnos, rollback_seqno};
use dcp_wire::{Frame, ManifestUid, Opcode, Seqno, Status, Vbid};
use serde::Deserialize;

use super::{Connection, send_close};
use crate::consumer::inflated::inflated;
use crate::consumer::opaque::vbid_of;
use crate::consumer::stream::{Fault, State};
use crate::consumer::{EndCause, Event, Misbehaviour, OpenStreamError};
use crate::{ChangeSink, FailoverLog, OnRollback};

impl Connection {
    pub(super) fn handle_response<S: ChangeSink>(
        &mut self,
        frame: &Frame<'_>,
        sink: &mut S,
    ) -> Result<(), Fault> {
        if is_invalidating(frame.header.status()) {
            return Err(Fault::Invalidated(frame.header.status()));
        }
        match frame.header.opcode {
            Opcode::DCP_STREAM_REQ => self.stream_answered(frame, sink),
            Opcode::DCP_CLOSE_STREAM => {
                self.stream_closed(frame);
                Ok(())
            }
            Opcode::GET_CLUSTER_CONFIG => {
                if frame.header.status().is_success() {
                    self.cluster_map(frame);
                }
                Ok(())
            }
            Opcode::GET_ALL_VB_SEQNOS if self.collection_answered(frame)? => Ok(()),
            Opcode::GET_ALL_VB_SEQNOS if self.asked_high_seqnos == 0 => {
                self.stats.stale_responses += 1;
                Ok(())
            }
            Opcode::GET_ALL_VB_SEQNOS => {
                self.asked_high_seqnos -= 1;
                let (number, status) = (frame.header.opaque.0, frame.header.status());
                if !status.is_success() {
                    self.high_seqnos_refused(number, status);
                    return Ok(());
                }
                let seqnos: Vec<_> = VbSeqnos::decode(frame.value)?.collect();
                self.heard_high_seqnos(number, &seqnos);
                for &(vbid, high) in &seqnos {
                    self.lower_catch_up(vbid, high, sink)?;
                }
                self.events.push_back(Event::HighSeqnos(seqnos));
                Ok(())
            }
            // A server answers only malformed acknowledgements, which are never sent here.
            _ => Err(Misbehaviour::UnexpectedPacket.into()),
        }
    }

    /// The server sent a cluster map, or nothing if it has no newer one.
    pub(super) fn cluster_map(&mut self, frame: &Frame<'_>) {
        match inflated(frame) {
            Ok(json) if json.is_empty() => {}
            Ok(json) => self.events.push_back(Event::ClusterMap(json.into_owned().into())),
            Err(error) => tracing::warn!(%error, "a cluster map cannot be used"),
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
        match frame.header.status() {
            Status::SUCCESS => {
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
            Status::ROLLBACK => {
                let to = rollback_seqno(frame)?;
                self.roll_back(vbid, to, sink)
            }
            // Requests are in range unless the position is past the server's high seqno, in which
            // case the server does not name a seqno to roll back to.
            Status::ERANGE if stream.position.seqno != Seqno::ZERO => {
                self.roll_back(vbid, Seqno::ZERO, sink)
            }
            Status::KEY_EEXISTS if !stream.reopened => {
                // Adopting that stream would mean adopting an unknown position: close it, then
                // request a new one.
                stream.state = State::Closing;
                stream.reopen = true;
                stream.reopened = true;
                send_close(stream, &mut self.transmit);
                Ok(())
            }
            status => {
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
        let rollback = stream.roll_back(to, policy == OnRollback::Resync);
        self.stats.rollbacks += 1;
        if policy == OnRollback::Fail {
            // Not delivered, so that the position stays at one the application knows.
            stream.dirty = false;
            self.end(vbid, EndCause::RolledBack(rollback));
            return Ok(());
        }
        sink.rollback(&rollback)?;
        self.events.push_back(Event::RolledBack(rollback));
        self.dirty.push(vbid);
        stream.restart(self.opaques.stream(vbid));
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
        stream.restart(self.opaques.stream(vbid));
        self.request(vbid);
    }
}

/// Whether a refusal concerns the connection and not the request: the server's error map gives these
/// the attribute `conn-state-invalidated`. EINTERNAL has it too, but may concern one vBucket, which
/// must not end the streams of the others.
const fn is_invalidating(status: Status) -> bool {
    matches!(
        status,
        Status::NO_BUCKET | Status::AUTH_STALE | Status::AUTH_ERROR | Status::NOT_INITIALIZED
    )
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
