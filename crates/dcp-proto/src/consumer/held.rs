//! Rollback mitigation: changes wait until every copy of their vBucket has them on disk.

use std::ops::{AddAssign, SubAssign};

use bytes::{Buf, BytesMut};
use dcp_wire::message::MutationView;
use dcp_wire::{Frame, MAX_BODY_LEN, Opcode, Seqno, Vbid, Vbuuid};

use super::connection::{Connection, Limit, Walk};
use super::gate::{Toll, Waiting};
use super::run::{self, Origin};
use super::stream::{Settles, State, Stream};
use super::walk::over;
use super::{ConnectionError, EndCause, Event};
use crate::ChangeSink;
use crate::flow_control::counted_bytes;

/// What waits to be on the disks of all copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Rows.
    pub rows: u64,
    /// Bytes that count towards the window.
    pub bytes: u64,
}

impl AddAssign for Held {
    fn add_assign(&mut self, other: Self) {
        self.rows += other.rows;
        self.bytes += other.bytes;
    }
}

impl SubAssign for Held {
    fn sub_assign(&mut self, other: Self) {
        self.rows -= other.rows;
        self.bytes -= other.bytes;
    }
}

impl Connection {
    /// Command: up to `seqno` of the branch `vbuuid`, every copy of a vBucket that is present has
    /// everything on disk. A lower seqno than before is taken too: copies may have joined.
    ///
    /// What that sets free comes with the next [`handle_input`](Self::handle_input). Of no effect
    /// unless the vBucket's stream was opened on that branch.
    pub fn persisted(&mut self, vbid: Vbid, vbuuid: Vbuuid, seqno: Seqno) {
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        if stream.newest_branch() != Some(vbuuid) {
            return;
        }
        stream.gate.open_to = seqno;
        // Told again and again while the application takes nothing, it stands there once.
        if stream.gate.has_passed() && !self.passed.contains(&vbid) {
            self.passed.push_back(vbid);
        }
        if stream.state == State::Settling && stream.is_settled() {
            self.complete(vbid);
        }
    }

    /// What waits to be on the disks of all copies; part of what is
    /// [unacknowledged](Self::unacknowledged).
    #[must_use]
    pub const fn waiting(&self) -> Held {
        self.waiting
    }

    /// Holds a message back; `false` if it may pass at once.
    #[cold]
    pub(super) fn hold(&mut self, frame: &Frame<'_>, packet: &[u8], counted: u64) -> bool {
        let header = frame.header;
        if header.magic.is_response() {
            return false;
        }
        let vbid = header.vbid();
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return false };
        if stream.opaque != header.opaque || stream.state != State::Streaming {
            return false;
        }
        let is_row = match Toll::of(frame) {
            Toll::None => return false,
            Toll::Abandon => {
                self.discard(vbid);
                return false;
            }
            Toll::Seqno { seqno, .. } if stream.gate.lets_pass(seqno) => return false,
            Toll::Seqno { is_row, .. } => is_row,
        };
        if stream.gate.is_empty()
            && let Some(vbuuid) = stream.newest_branch()
        {
            self.events.push_back(Event::Waiting { vbid, vbuuid: Some(vbuuid) });
        }
        let held = Held { rows: u64::from(is_row), bytes: counted };
        stream.gate.push(packet, header.opcode == Opcode::DCP_STREAM_END, held);
        self.waiting += held;
        true
    }

    /// Gives what has passed to the sink, until `limit` is reached.
    pub(super) fn deliver_passed<S: ChangeSink>(
        &mut self,
        limit: Limit,
        walk: &mut Walk,
        row_bytes: &mut usize,
        sink: &mut S,
    ) -> Result<(), ConnectionError> {
        while let Some(&vbid) = self.passed.front() {
            let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else {
                self.passed.pop_front();
                continue;
            };
            let (opaque, mut waiting) = (stream.opaque, stream.gate.take());
            let walked = self.walk_waiting(vbid, &mut waiting, limit, (walk, row_bytes), sink);
            match self.streams.get_mut(vbid.index()) {
                Some(Some(stream))
                    if stream.opaque == opaque && stream.state == State::Streaming =>
                {
                    stream.gate.put_back(waiting);
                }
                // It has come to its end meanwhile.
                _ => self.drop_waiting(waiting.held),
            }
            walked?;
            if walk.limited {
                return Ok(());
            }
            self.passed.pop_front();
            self.may_have_emptied(vbid);
        }
        Ok(())
    }

    /// Takes off the front of what waits what does not have to any more, in the same way as what
    /// arrives.
    fn walk_waiting<S: ChangeSink>(
        &mut self,
        vbid: Vbid,
        waiting: &mut Waiting,
        limit: Limit,
        (walk, row_bytes): (&mut Walk, &mut usize),
        sink: &mut S,
    ) -> Result<(), ConnectionError> {
        let packets = std::mem::take(&mut waiting.packets);
        let mut rest = &packets[..];
        let mut staged = [MutationView::EMPTY; run::MAX_LEN];
        let walked = loop {
            if walk.rows >= limit.rows || *row_bytes >= limit.bytes {
                walk.limited = true;
                break Ok(());
            }
            let left = limit.less(walk.rows, *row_bytes);
            let ran = match self.run(rest, left, Origin::Waiting, &mut staged, sink) {
                Ok(ran) => ran,
                Err(error) => break Err(error.into()),
            };
            let (rows, used) = if ran.rows > 0 {
                waiting.held -= Held { rows: ran.rows as u64, bytes: ran.bytes as u64 };
                (ran.rows, ran.bytes)
            } else {
                let Ok(Some((frame, used))) = Frame::parse(rest, MAX_BODY_LEN) else {
                    break Ok(());
                };
                let Some(Some(stream)) = self.streams.get(vbid.index()) else { break Ok(()) };
                let toll = Toll::of(&frame);
                if stream.state != State::Streaming || !toll.is_paid(stream.gate.open_to) {
                    break Ok(());
                }
                let is_row = matches!(toll, Toll::Seqno { is_row: true, .. });
                let held = Held { rows: u64::from(is_row), bytes: counted_bytes(&frame.header) };
                waiting.held -= held;
                self.drop_waiting(held);
                match self.dispatch(frame, sink) {
                    Ok(rows) => (rows, used),
                    Err(fault) => break Err(over(rest, fault)),
                }
            };
            (_, rest) = rest.split_at(used);
            if rows > 0 {
                walk.rows += rows;
                *row_bytes += used;
            }
        };
        let done = packets.len() - rest.len();
        waiting.packets = packets;
        waiting.packets.advance(done);
        if waiting.packets.is_empty() {
            // A burst leaves no memory behind.
            waiting.packets = BytesMut::new();
        }
        walked
    }

    /// What waited waits no more: it was given to the sink, or comes again, or is not wanted. Its
    /// bytes go back like those of everything that has arrived.
    pub(super) fn drop_waiting(&mut self, held: Held) {
        self.waiting -= held;
        self.held += held.bytes;
    }

    /// Tells that nothing of a vBucket waits any more, if so.
    fn may_have_emptied(&mut self, vbid: Vbid) {
        let Some(Some(stream)) = self.streams.get(vbid.index()) else { return };
        if stream.state == State::Streaming && stream.gate.is_empty() {
            self.events.push_back(Event::Waiting { vbid, vbuuid: None });
        }
    }

    /// Drops what a stream holds back: it comes again, or is not wanted.
    pub(super) fn discard(&mut self, vbid: Vbid) {
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        let Waiting { held, .. } = stream.gate.take();
        stream.gate.put_back(Waiting::default());
        self.drop_waiting(held);
    }

    /// A stream has delivered what was asked for; it is complete now, or when it is settled
    /// ([`Settles`]). `by_server`: the server has ended it.
    pub(super) fn reached_end(&mut self, vbid: Vbid, by_server: bool) {
        let Some(Some(stream)) = self.streams.get(vbid.index()) else { return };
        let has_end = by_server || stream.gate.has_end();
        self.discard(vbid);
        let settles = self.config.delivery.persisted_only && self.config.delivery.end_persisted;
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        stream.ended = has_end;
        if !settles {
            return self.complete(vbid);
        }
        let settles = match stream.replaced_up_to(by_server) {
            Some(seqno) => Settles::At(seqno),
            None => Settles::AtHighSeqno { request: self.next_high_seqnos() },
        };
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        stream.settles = settles;
        match stream.newest_branch() {
            Some(vbuuid) if !stream.is_settled() => {
                stream.state = State::Settling;
                self.events.push_back(Event::Waiting { vbid, vbuuid: Some(vbuuid) });
            }
            _ => self.complete(vbid),
        }
    }

    /// The node has answered request number `request` for its high seqnos: streams that waited to
    /// hear of theirs know now when they are settled.
    pub(super) fn heard_high_seqnos(&mut self, request: u32, seqnos: &[(Vbid, Seqno)]) {
        self.ask_up_to(request, seqnos);
        for &(vbid, high) in seqnos {
            let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { continue };
            let Settles::AtHighSeqno { request: asked } = stream.settles else { continue };
            if stream.state == State::Settling && request >= asked {
                stream.settles = Settles::At(high);
                if stream.is_settled() {
                    self.complete(vbid);
                }
            }
        }
    }

    /// The server has ended a stream that settles.
    pub(super) fn mark_ended(&mut self, vbid: Vbid) {
        if let Some(Some(stream)) = self.streams.get_mut(vbid.index()) {
            stream.ended = true;
        }
    }

    fn complete(&mut self, vbid: Vbid) {
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        if stream.ended {
            self.end(vbid, EndCause::Complete);
            return;
        }
        // The server's STREAM_END may never come; what is wanted is there.
        stream.state = State::Finished;
        let resume = Box::new(stream.resume.clone());
        self.events.push_back(Event::StreamEnded { vbid, cause: EndCause::Complete, resume });
    }
}

impl Stream {
    /// Whether whatever took the place of changes up to the end is on the disks of all copies.
    fn is_settled(&self) -> bool {
        matches!(self.settles, Settles::At(seqno) if seqno <= self.gate.open_to)
    }
}
