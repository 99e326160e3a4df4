//! Rollback mitigation: changes wait until every copy of their vBucket has them on disk.

use bytes::{Buf, BytesMut};
use dcp_wire::message::MutationView;
use dcp_wire::{Frame, MAX_BODY_LEN, Opcode, Seqno, Vbid, Vbuuid};

use super::run::{self, Origin};
use super::walk::over;
use super::{Connection, Limit, Walk, send_close};
use crate::ChangeSink;
use crate::consumer::stream::{EndPersisted, State, Stream};
use crate::consumer::unpersisted::{Needs, Packets, Unpersisted};
use crate::consumer::{ConnectionError, EndCause, Event};
use crate::flow_control::counted_bytes;

impl Connection {
    /// Command: every present copy of the vBucket has persisted the branch `vbuuid` up to `seqno`.
    /// A lower seqno than before is accepted as well: copies may have joined.
    ///
    /// Changes that are persisted by it are delivered by the next
    /// [`handle_input`](Self::handle_input). Has no effect unless the vBucket's stream was opened
    /// on that branch.
    pub fn persisted(&mut self, vbid: Vbid, vbuuid: Vbuuid, seqno: Seqno) {
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        if stream.newest_branch() != Some(vbuuid) {
            return;
        }
        stream.unpersisted.persisted_to = seqno;
        // Queued only once, however often it is reported while the application takes no batch.
        if stream.unpersisted.is_first_persisted() && !self.newly_persisted.contains(&vbid) {
            self.newly_persisted.push_back(vbid);
        }
        if stream.state == State::Persisting && stream.is_end_persisted() {
            self.complete(vbid);
        }
    }

    /// Changes that are not yet persisted on all copies; part of
    /// [`unacknowledged`](Self::unacknowledged).
    #[must_use]
    pub const fn unpersisted(&self) -> Unpersisted {
        self.unpersisted
    }

    /// Queues a message until it is persisted; `false` if it can be handled at once.
    #[cold]
    pub(super) fn keep_unpersisted(
        &mut self,
        frame: &Frame<'_>,
        packet: &[u8],
        counted: u64,
    ) -> bool {
        let header = frame.header;
        if header.magic.is_response() {
            return false;
        }
        let vbid = header.vbid();
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return false };
        if stream.opaque != header.opaque || stream.state != State::Streaming {
            return false;
        }
        let is_row = match Needs::of(frame) {
            Needs::Nothing => return false,
            Needs::Discard => {
                self.discard(vbid);
                return false;
            }
            Needs::Persisted { seqno, .. } if stream.unpersisted.takes(seqno) => return false,
            Needs::Persisted { is_row, .. } => is_row,
        };
        if stream.unpersisted.is_empty()
            && let Some(vbuuid) = stream.newest_branch()
        {
            self.events.push_back(Event::Unpersisted { vbid, vbuuid: Some(vbuuid) });
        }
        let amount = Unpersisted { rows: u64::from(is_row), bytes: counted };
        stream.unpersisted.push(packet, header.opcode == Opcode::DCP_STREAM_END, amount);
        self.unpersisted += amount;
        true
    }

    /// Gives the sink what has been persisted, until `limit` is reached.
    pub(super) fn deliver_persisted<S: ChangeSink>(
        &mut self,
        limit: Limit,
        walk: &mut Walk,
        row_bytes: &mut usize,
        sink: &mut S,
    ) -> Result<(), ConnectionError> {
        while let Some(&vbid) = self.newly_persisted.front() {
            let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else {
                self.newly_persisted.pop_front();
                continue;
            };
            let (opaque, mut packets) = (stream.opaque, stream.unpersisted.take());
            let walked = self.walk_persisted(vbid, &mut packets, limit, (walk, row_bytes), sink);
            match self.streams.get_mut(vbid.index()) {
                Some(Some(stream))
                    if stream.opaque == opaque && stream.state == State::Streaming =>
                {
                    stream.unpersisted.put_back(packets);
                }
                // The stream has reached its end meanwhile.
                _ => self.count_out(packets.amount),
            }
            walked?;
            if walk.limited {
                return Ok(());
            }
            self.newly_persisted.pop_front();
            self.report_if_emptied(vbid);
        }
        Ok(())
    }

    /// Handles the packets at the front of the queue that are now persisted, in the same way as
    /// packets that arrive.
    fn walk_persisted<S: ChangeSink>(
        &mut self,
        vbid: Vbid,
        unpersisted: &mut Packets,
        limit: Limit,
        (walk, row_bytes): (&mut Walk, &mut usize),
        sink: &mut S,
    ) -> Result<(), ConnectionError> {
        let packets = std::mem::take(&mut unpersisted.bytes);
        let mut rest = &packets[..];
        let mut staged = [MutationView::EMPTY; run::MAX_LEN];
        let walked = loop {
            if walk.rows >= limit.rows || *row_bytes >= limit.bytes {
                walk.limited = true;
                break Ok(());
            }
            let left = limit.less(walk.rows, *row_bytes);
            let ran = match self.run(rest, left, Origin::Unpersisted, &mut staged, sink) {
                Ok(ran) => ran,
                Err(error) => break Err(error.into()),
            };
            let (rows, used) = if ran.rows > 0 {
                unpersisted.amount -=
                    Unpersisted { rows: ran.rows as u64, bytes: ran.bytes as u64 };
                (ran.rows, ran.bytes)
            } else {
                let Ok(Some((frame, used))) = Frame::parse(rest, MAX_BODY_LEN) else {
                    break Ok(());
                };
                let Some(Some(stream)) = self.streams.get(vbid.index()) else { break Ok(()) };
                let needs = Needs::of(&frame);
                if stream.state != State::Streaming
                    || !needs.is_met(stream.unpersisted.persisted_to)
                {
                    break Ok(());
                }
                let is_row = matches!(needs, Needs::Persisted { is_row: true, .. });
                let bytes = counted_bytes(&frame.header);
                let amount = Unpersisted { rows: u64::from(is_row), bytes };
                unpersisted.amount -= amount;
                self.count_out(amount);
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
        unpersisted.bytes = packets;
        unpersisted.bytes.advance(done);
        if unpersisted.bytes.is_empty() {
            // Frees the memory of a burst.
            unpersisted.bytes = BytesMut::new();
        }
        walked
    }

    /// Subtracts what is no longer unpersisted: it was given to the sink, will be sent again, or is
    /// not wanted. Its bytes are released like those of all other packets.
    pub(super) fn count_out(&mut self, amount: Unpersisted) {
        self.unpersisted -= amount;
        self.held += amount.bytes;
    }

    /// Reports a vBucket that no longer has unpersisted changes.
    fn report_if_emptied(&mut self, vbid: Vbid) {
        let Some(Some(stream)) = self.streams.get(vbid.index()) else { return };
        if stream.state == State::Streaming && stream.unpersisted.is_empty() {
            self.events.push_back(Event::Unpersisted { vbid, vbuuid: None });
        }
    }

    /// Drops the unpersisted changes of a stream: they will be sent again, or are not wanted.
    pub(super) fn discard(&mut self, vbid: Vbid) {
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        let Packets { amount, .. } = stream.unpersisted.take();
        stream.unpersisted.put_back(Packets::default());
        self.count_out(amount);
    }

    /// A stream has delivered everything up to its end; it is complete now, or once its end is
    /// persisted ([`EndPersisted`]). `by_server`: the server has ended it.
    pub(super) fn reached_end(&mut self, vbid: Vbid, by_server: bool) {
        let Some(Some(stream)) = self.streams.get(vbid.index()) else { return };
        let has_end = by_server || stream.unpersisted.has_end();
        self.discard(vbid);
        let waits = self.config.delivery.persisted_only && self.config.delivery.end_persisted;
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        stream.ended = has_end;
        if !waits {
            return self.complete(vbid);
        }
        let end_persisted = match stream.replaced_up_to(by_server) {
            Some(seqno) => EndPersisted::At(seqno),
            None => EndPersisted::AtHighSeqno { request: self.next_high_seqnos() },
        };
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        stream.end_persisted = end_persisted;
        match stream.newest_branch() {
            Some(vbuuid) if !stream.is_end_persisted() => {
                stream.state = State::Persisting;
                self.events.push_back(Event::Unpersisted { vbid, vbuuid: Some(vbuuid) });
            }
            _ => self.complete(vbid),
        }
    }

    /// The node has answered request number `request` for its high seqnos: streams that waited for
    /// theirs now know what has to be persisted.
    pub(super) fn heard_high_seqnos(&mut self, request: u32, seqnos: &[(Vbid, Seqno)]) {
        self.ask_up_to(request, seqnos);
        for &(vbid, high) in seqnos {
            let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { continue };
            let EndPersisted::AtHighSeqno { request: asked } = stream.end_persisted else {
                continue;
            };
            if stream.state == State::Persisting && request >= asked {
                stream.end_persisted = EndPersisted::At(high);
                if stream.is_end_persisted() {
                    self.complete(vbid);
                }
            }
        }
    }

    /// The server has ended a stream whose end is not persisted yet.
    pub(super) fn mark_ended(&mut self, vbid: Vbid) {
        if let Some(Some(stream)) = self.streams.get_mut(vbid.index()) {
            stream.ended = true;
        }
    }

    /// The server has ended a finished stream, or answered its close: removes it if nothing else
    /// of it can arrive.
    pub(super) fn leave(&mut self, vbid: Vbid) {
        if let Some(Some(stream)) = self.streams.get(vbid.index())
            && stream.ended
            && stream.state == (State::Finished { awaits_answer: false })
        {
            self.remove(vbid);
        }
    }

    fn complete(&mut self, vbid: Vbid) {
        let Some(Some(stream)) = self.streams.get_mut(vbid.index()) else { return };
        if stream.ended {
            self.end(vbid, EndCause::Complete);
            return;
        }
        // A large snapshot would otherwise be sent to its end, and none of it is wanted.
        let closes = stream.is_inside_snapshot();
        if closes {
            send_close(stream, &mut self.transmit);
        }
        stream.state = State::Finished { awaits_answer: closes };
        let from = Box::new(stream.stream_position());
        self.events.push_back(Event::StreamEnded { vbid, cause: EndCause::Complete, from });
    }
}

impl Stream {
    /// Whether all newer versions that replaced changes up to the end are persisted on all copies.
    fn is_end_persisted(&self) -> bool {
        matches!(self.end_persisted, EndPersisted::At(seqno) if seqno <= self.unpersisted.persisted_to)
    }
}
