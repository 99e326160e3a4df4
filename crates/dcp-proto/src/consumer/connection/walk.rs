//! The walk over the read buffer: each packet to its stream, each change to the sink.
//!
//! The code for mutations is inlined into one loop and takes packets by value: a packet's view
//! passed by reference is written to memory and read back, which costs more than everything else
//! here. Rare cases are kept out of the loop.

use std::time::Instant;

use dcp_wire::message::{MutationView, StreamEnd, StreamEndReason};
use dcp_wire::{DecodeError, Frame, Header, Magic, Opcode, Seqno, Status, Vbid};

use super::run::{self, Origin};
use super::{Connection, Limit, Walk, send};
use crate::ChangeSink;
use crate::consumer::noop;
use crate::consumer::opaque::vbid_of;
use crate::consumer::stream::{Fault, ItemEffects, State};
use crate::consumer::{ConnectionError, EndCause, Event, Misbehaviour, ProtocolError};
use crate::flow_control::counted_bytes;

/// This many bytes of an incomplete packet prove that the peer is alive: more than noops and
/// occasional answers, and little even for the slowest network.
const ALIVE_BYTES: usize = 64 * 1024;

impl Connection {
    /// Input: bytes that arrived, from the first one not consumed before. Handles whole packets and
    /// gives changes to `sink` until no whole packet is left or `limit` is reached.
    ///
    /// # Errors
    /// [`ConnectionError`]: the connection has ended. Changes given to the sink before remain
    /// valid.
    pub fn handle_input<S: ChangeSink>(
        &mut self,
        now: Instant,
        input: &[u8],
        limit: Limit,
        sink: &mut S,
    ) -> Result<Walk, ConnectionError> {
        let mut walk = Walk::default();
        self.handled_at = now;
        let (mut packets, mut row_bytes) = (0, 0);
        if !self.newly_persisted.is_empty() {
            self.deliver_persisted(limit, &mut walk, &mut row_bytes, sink)?;
            if walk.limited {
                self.stats.changes += walk.rows as u64;
                return Ok(walk);
            }
        }
        let mut rest = input;
        let max_body_len = self.config.max_body_len;
        let mut staged = [MutationView::EMPTY; run::MAX_LEN];
        loop {
            let left = limit.less(walk.rows, row_bytes);
            let ran = self.run(rest, left, Origin::Arrived, &mut staged, sink)?;
            if ran.rows > 0 {
                (_, rest) = rest.split_at(ran.bytes);
                packets += ran.rows as u64;
                walk.rows += ran.rows;
                row_bytes += ran.bytes;
                if walk.rows >= limit.rows || row_bytes >= limit.bytes {
                    walk.limited = true;
                    break;
                }
                if ran.rows == run::MAX_LEN {
                    continue;
                }
            }
            let Some((frame, used)) =
                Frame::parse(rest, max_body_len).map_err(|error| framing(rest, error))?
            else {
                break;
            };
            let (packet, after) = rest.split_at(used);
            let rows = match self.handle_frame(frame, packet, sink) {
                Ok(rows) => rows,
                Err(fault) => return Err(over(rest, fault)),
            };
            rest = after;
            packets += 1;
            if rows == 0 {
                continue;
            }
            walk.rows += rows;
            row_bytes += used;
            if walk.rows >= limit.rows || row_bytes >= limit.bytes {
                walk.limited = true;
                break;
            }
        }
        walk.consumed = input.len() - rest.len();
        self.stats.packets += packets;
        self.stats.bytes += walk.consumed as u64;
        self.stats.changes += walk.rows as u64;
        // Bytes that were here before do not prove that the peer is alive, and neither do a few
        // that complete no packet: if a server truncated a packet, its later packets could fill it
        // up for hours.
        if walk.consumed > 0 || rest.len() >= self.incomplete.saturating_add(ALIVE_BYTES) {
            (self.heard_at, self.incomplete) = (now, rest.len());
        }
        self.advance_login(now)?;
        Ok(walk)
    }

    /// Handles one packet; returns how many rows the sink was given.
    #[inline(always)]
    fn handle_frame<S: ChangeSink>(
        &mut self,
        frame: Frame<'_>,
        packet: &[u8],
        sink: &mut S,
    ) -> Result<usize, Fault> {
        let counted = counted_bytes(&frame.header);
        if !self.window.receive(counted) {
            return Err(Misbehaviour::WindowOverrun.into());
        }
        if self.config.delivery.persisted_only && self.keep_unpersisted(&frame, packet, counted) {
            return Ok(0);
        }
        self.held += counted;
        self.dispatch(frame, sink)
    }

    /// Handles one packet that is in some way special; returns how many rows the sink was given.
    #[inline(never)]
    pub(super) fn dispatch<S: ChangeSink>(
        &mut self,
        frame: Frame<'_>,
        sink: &mut S,
    ) -> Result<usize, Fault> {
        match frame.header.magic {
            Magic::CLIENT_REQUEST | Magic::ALT_CLIENT_REQUEST => self.handle_request(&frame, sink),
            Magic::CLIENT_RESPONSE | Magic::ALT_CLIENT_RESPONSE => {
                self.handle_response(&frame, sink)?;
                Ok(0)
            }
            Magic::SERVER_REQUEST => {
                self.handle_server_request(&frame);
                Ok(0)
            }
            _ => Err(Misbehaviour::UnexpectedPacket.into()),
        }
    }

    fn handle_request<S: ChangeSink>(
        &mut self,
        frame: &Frame<'_>,
        sink: &mut S,
    ) -> Result<usize, Fault> {
        let vbid = frame.header.vbid();
        if frame.header.opcode == Opcode::DCP_NOOP {
            let answer = noop::answer_to(frame)?;
            self.stats.noops += 1;
            send(&answer, &mut self.transmit);
            return Ok(0);
        }
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else {
            return self.stale(frame);
        };
        if stream.opaque != frame.header.opaque || stream.state != State::Streaming {
            return self.not_streaming(frame);
        }
        let (collections, exclusions) =
            (self.config.collections, &mut self.config.delivery.exclusions);
        let (effects, may_be_row) = match frame.header.opcode {
            Opcode::DCP_MUTATION | Opcode::DCP_DELETION | Opcode::DCP_EXPIRATION => {
                let rows = &self.config.delivery.rows;
                (stream.document(frame, collections, exclusions, rows, sink)?, true)
            }
            Opcode::DCP_SYSTEM_EVENT => (stream.system_event(frame, exclusions, sink)?, false),
            Opcode::DCP_SEQNO_ADVANCED => (stream.seqno_advanced(frame)?, false),
            Opcode::DCP_OSO_SNAPSHOT => (stream.oso_snapshot(frame)?, false),
            Opcode::DCP_SNAPSHOT_MARKER => {
                stream.snapshot_marker(frame)?;
                return Ok(0);
            }
            Opcode::DCP_STREAM_END => {
                let reason = StreamEnd::decode(frame)?.reason;
                if reason == StreamEndReason::OK && stream.is_caught_up_at_end() {
                    self.tell_caught_up(vbid, sink)?;
                }
                self.stream_ended(vbid, reason);
                return Ok(0);
            }
            _ => return Err(Misbehaviour::UnexpectedPacket.into()),
        };
        if !stream.dirty {
            stream.dirty = true;
            self.dirty.push(vbid);
        }
        if effects.is_notable() {
            self.note(vbid, effects, sink)?;
        }
        Ok(if may_be_row { effects.rows() } else { 0 })
    }

    /// Effects that only some items have.
    #[cold]
    fn note<S: ChangeSink>(
        &mut self,
        vbid: Vbid,
        effects: ItemEffects,
        sink: &mut S,
    ) -> Result<(), Fault> {
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return Ok(()) };
        self.stats.repeated_seqnos += u64::from(effects.repeated_seqno);
        if effects.learned {
            self.events
                .push_back(Event::Exclusions(self.config.delivery.exclusions.learned_last()));
        }
        if effects.acknowledge_marker {
            let answer = Frame::response(Opcode::DCP_SNAPSHOT_MARKER, Status::SUCCESS);
            send(&answer.with_opaque(stream.opaque), &mut self.transmit);
        }
        if effects.caught_up {
            self.tell_caught_up(vbid, sink)?;
        }
        if effects.reached_end {
            self.reached_end(vbid, false);
        }
        Ok(())
    }

    /// Reports, once, that everything a vBucket had when it was first streamed has been delivered.
    pub(super) fn tell_caught_up<S: ChangeSink>(
        &mut self,
        vbid: Vbid,
        sink: &mut S,
    ) -> Result<(), Fault> {
        let stream = self.streams.get_mut(vbid.index()).and_then(Option::as_mut);
        if let Some(caught_up) = stream.and_then(|stream| stream.take_caught_up()) {
            sink.caught_up(&caught_up)?;
            self.events.push_back(Event::CaughtUp(caught_up));
        }
        Ok(())
    }

    /// A message for a stream that does not accept any: too late, or too early.
    #[cold]
    fn not_streaming(&mut self, frame: &Frame<'_>) -> Result<usize, Fault> {
        let vbid = frame.header.vbid();
        let Some(Some(stream)) = self.streams.get(vbid.index()) else { return self.stale(frame) };
        if stream.opaque != frame.header.opaque {
            return self.stale(frame);
        }
        match (stream.state, frame.header.opcode) {
            (State::Asking { .. } | State::Requested, _) => {
                return Err(Misbehaviour::UnexpectedPacket.into());
            }
            (State::Finished { .. }, Opcode::DCP_STREAM_END) => {
                self.mark_ended(vbid);
                self.leave(vbid);
            }
            (State::Persisting, Opcode::DCP_STREAM_END) => {
                let reason = StreamEnd::decode(frame)?.reason;
                if reason == StreamEndReason::OK {
                    self.mark_ended(vbid);
                } else {
                    self.end(vbid, EndCause::Ended(reason));
                }
            }
            // The answer to the close is still to come.
            (State::Closing, Opcode::DCP_STREAM_END) => {}
            _ => return self.stale(frame),
        }
        Ok(0)
    }

    /// A message of a stream that does not, or no longer, exist: dropped, its bytes are held.
    #[cold]
    fn stale(&mut self, frame: &Frame<'_>) -> Result<usize, Fault> {
        if !frame.header.opcode.is_dcp() {
            return Err(Misbehaviour::UnexpectedPacket.into());
        }
        self.stats.stale_packets += 1;
        Ok(0)
    }

    fn handle_server_request(&mut self, frame: &Frame<'_>) {
        // Other requests (authentication changes) are irrelevant here and need no answer.
        if frame.header.opcode != Opcode::CLUSTER_MAP_CHANGE {
            return;
        }
        if frame.value.is_empty() {
            self.request_cluster_map();
        } else {
            self.cluster_map(frame);
        }
    }
}

/// The error for the packet at the front of `input`, which is parsed again: its view is not kept
/// for this rare case.
#[cold]
pub(super) fn over(input: &[u8], fault: Fault) -> ConnectionError {
    let kind = match fault {
        Fault::Sink(error) => return error.into(),
        Fault::Invalidated { opcode, status } => {
            return ConnectionError::Invalidated { opcode, status };
        }
        Fault::Protocol(kind) => kind,
    };
    match Frame::parse(input, usize::MAX) {
        Ok(Some((frame, _))) => {
            let Header { opcode, opaque, magic, .. } = frame.header;
            // An answer has its status where a request has the vBucket.
            let is_answer = magic.is_response();
            let vbid = if is_answer { vbid_of(opaque) } else { frame.header.vbid() };
            let seqno = if is_answer { None } else { seqno_of(&frame) };
            ProtocolError { kind, opcode, vbid, seqno, opaque }.into()
        }
        Ok(None) => ConnectionError::Framing(DecodeError::UnexpectedEnd { what: "packet" }),
        Err(error) => ConnectionError::Framing(error),
    }
}

/// The error for bytes that are not a packet, or for a packet that is too long.
#[cold]
fn framing(input: &[u8], error: DecodeError) -> ConnectionError {
    let head = input.first_chunk().filter(|_| matches!(error, DecodeError::FrameTooLarge { .. }));
    let Some(Ok(header)) = head.map(Header::decode) else { return ConnectionError::Framing(error) };
    let Header { opcode, opaque, .. } = header;
    let vbid = if header.magic.is_response() { vbid_of(opaque) } else { header.vbid() };
    ProtocolError { kind: error.into(), opcode, vbid, seqno: None, opaque }.into()
}

/// The seqno of a packet, as far as it can be read.
fn seqno_of(frame: &Frame<'_>) -> Option<Seqno> {
    let fields = match frame.header.opcode {
        // Later layouts of the marker are in the value.
        Opcode::DCP_SNAPSHOT_MARKER if frame.extras.len() == 1 => frame.value,
        Opcode::DCP_SNAPSHOT_MARKER
        | Opcode::DCP_MUTATION
        | Opcode::DCP_DELETION
        | Opcode::DCP_EXPIRATION
        | Opcode::DCP_SYSTEM_EVENT
        | Opcode::DCP_SEQNO_ADVANCED => frame.extras,
        _ => return None,
    };
    fields.first_chunk().map(|bytes| Seqno(u64::from_be_bytes(*bytes)))
}
