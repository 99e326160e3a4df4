//! Rollback mitigation: changes wait until every copy of their vBucket has them on disk.

use dcp_wire::{Frame, MAX_BODY_LEN, Seqno, Vbid, Vbuuid};

use super::connection::{Connection, Limit, Walk};
use super::gate::Toll;
use super::stream::{Settles, State, Stream};
use super::walk::over;
use super::{ConnectionError, EndCause, Event};
use crate::ChangeSink;

/// What waits to be on the disks of all copies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Rows.
    pub rows: u64,
    /// Bytes that count towards the window.
    pub bytes: u64,
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
        if stream.gate.has_passed() {
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
    pub(super) fn hold(&mut self, frame: &Frame<'_>, counted: u64) -> bool {
        let header = frame.header;
        if header.magic.is_response() {
            return false;
        }
        let vbid = header.vbid();
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return false };
        if stream.opaque != header.opaque || stream.state != State::Streaming {
            return false;
        }
        let (seqno, is_row) = match Toll::of(frame) {
            Toll::None => return false,
            Toll::Abandon => {
                self.discard(vbid);
                return false;
            }
            Toll::Seqno { seqno, .. } if stream.gate.lets_pass(seqno) => return false,
            Toll::Seqno { seqno, is_row } => (seqno, is_row),
        };
        if stream.gate.is_empty()
            && let Some(vbuuid) = stream.newest_branch()
        {
            self.events.push_back(Event::Waiting { vbid, vbuuid: Some(vbuuid) });
        }
        stream.gate.push(frame, seqno, is_row, counted);
        self.waiting.rows += u64::from(is_row);
        self.waiting.bytes += counted;
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
            let stream = self.streams.get_mut(vbid.index()).and_then(Option::as_mut);
            let Some(passed) = stream.and_then(|stream| stream.gate.pop()) else {
                self.passed.pop_front();
                self.may_have_emptied(vbid);
                continue;
            };
            self.waiting.rows -= u64::from(passed.is_row);
            self.waiting.bytes -= passed.counted;
            self.held += passed.counted;
            // It was parsed before, and encoded again as it was.
            let parsed = Frame::parse(&passed.packet, MAX_BODY_LEN);
            let Some((frame, used)) = parsed.map_err(ConnectionError::Framing)? else { continue };
            let rows = self.deliver(frame, sink).map_err(|fault| over(&passed.packet, fault))?;
            if rows == 0 {
                continue;
            }
            walk.rows += rows;
            *row_bytes += used;
            if walk.rows >= limit.rows || *row_bytes >= limit.bytes {
                walk.limited = true;
                break;
            }
        }
        Ok(())
    }

    #[inline(never)]
    fn deliver<S: ChangeSink>(
        &mut self,
        frame: Frame<'_>,
        sink: &mut S,
    ) -> Result<usize, super::stream::Fault> {
        self.dispatch(frame, sink)
    }

    /// Tells that nothing of a vBucket waits any more, if so.
    fn may_have_emptied(&mut self, vbid: Vbid) {
        let Some(Some(stream)) = self.streams.get(vbid.index()) else { return };
        if stream.state == State::Streaming && stream.gate.is_empty() {
            self.events.push_back(Event::Waiting { vbid, vbuuid: None });
        }
    }

    /// Drops what a stream holds back: it comes again, or is not wanted. Its bytes go back like
    /// those of everything that is dropped.
    pub(super) fn discard(&mut self, vbid: Vbid) {
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        if stream.gate.is_empty() {
            return;
        }
        let (rows, bytes) = stream.gate.clear();
        self.waiting.rows -= rows;
        self.waiting.bytes -= bytes;
        self.held += bytes;
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
