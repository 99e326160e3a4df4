//! What remains to be sent to a connection from memory, the room in its flow-control buffer, and
//! the order of responses: clients expect them in the order of their requests, from either source.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use dcp_proto::flow_control::counted_bytes;
use dcp_wire::message::{StreamAddress, StreamEnd, StreamEndReason};
use dcp_wire::{Frame, Header, MAX_BODY_LEN, Opaque, Opcode, Status, Vbid};

use super::recordings::{Recording, set_opaque};
use crate::Error;
use crate::sender::WRITE_LEN;

/// A recorded stream being replayed.
#[derive(Debug)]
struct Playback {
    vbid: Vbid,
    recording: Arc<Recording>,
    opaque: Opaque,
    at: usize,
}

/// A client's request about a stream from memory.
#[derive(Debug)]
enum Request {
    Open(Playback),
    Close {
        vbid: Vbid,
        opaque: Opaque,
        /// Whether the client wants STREAM_END too.
        with_end: bool,
    },
}

/// A request that is not answered yet.
#[derive(Debug)]
struct Asked {
    request: Request,
    /// Number of forwarded requests to be answered before this one.
    after: u64,
}

/// The flow-control buffer of a connection and the streams sent to it from memory.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// 0 for no flow control.
    limit: u64,
    outstanding: u64,
    closed: bool,
    /// Requests about streams from memory, in their order.
    asked: VecDeque<Asked>,
    /// Numbers of requests about streams from memory and of their responses.
    asked_in_all: u64,
    answered: u64,
    /// Numbers of forwarded requests and of their responses.
    passed_on: u64,
    answers_passed_on: u64,
    /// For each pending forwarded request, the number of such requests before it.
    before: VecDeque<u64>,
}

/// What may be sent next.
#[derive(Debug)]
struct Turn {
    asked: Vec<Request>,
    /// Bytes that may be sent, already counted as outstanding.
    room: u64,
}

impl State {
    /// Reserves some of the available room; 0 if there is none.
    fn reserve(&mut self) -> u64 {
        let room = match self.limit {
            0 => u64::MAX,
            limit => limit.saturating_sub(self.outstanding),
        };
        let room = room.min(WRITE_LEN as u64);
        self.outstanding += room;
        room
    }

    /// Replaces a reservation with the number of bytes sent.
    fn settle(&mut self, reserved: u64, sent: u64) {
        self.outstanding = (self.outstanding + sent).saturating_sub(reserved);
    }

    fn give_back(&mut self, bytes: u64) {
        self.outstanding = self.outstanding.saturating_sub(bytes);
    }

    fn is_turn_of_answer(&self) -> bool {
        self.before.front().is_none_or(|&before| before <= self.answered)
    }

    fn turn(&mut self, has_more: bool) -> Option<Turn> {
        let in_turn = |asked: &Asked| asked.after <= self.answers_passed_on;
        let many = self.asked.iter().take_while(|&asked| in_turn(asked)).count();
        let asked: Vec<_> = self.asked.drain(..many).map(|asked| asked.request).collect();
        let room = if has_more || !asked.is_empty() { self.reserve() } else { 0 };
        // Responses do not depend on flow control.
        (room > 0 || !asked.is_empty()).then_some(Turn { asked, room })
    }
}

impl Outbox {
    pub(super) fn set_limit(&self, limit: u64) {
        self.change(|state| state.limit = limit);
    }

    pub(super) fn give_back(&self, bytes: u64) {
        self.change(|state| state.give_back(bytes));
    }

    pub(super) fn settle(&self, reserved: u64, sent: u64) {
        self.change(|state| state.settle(reserved, sent));
    }

    pub(super) fn close(&self) {
        self.change(|state| state.closed = true);
    }

    /// Queues a stream, with `opaque` for its packets.
    pub(super) fn ask(&self, vbid: Vbid, recording: Arc<Recording>, opaque: Opaque) {
        self.request(Request::Open(Playback { vbid, recording, opaque, at: 0 }));
    }

    /// Queues the end of a stream that was requested before; the answer has `opaque`.
    pub(super) fn ask_to_close(&self, vbid: Vbid, opaque: Opaque, with_end: bool) {
        self.request(Request::Close { vbid, opaque, with_end });
    }

    fn request(&self, request: Request) {
        self.change(|state| {
            let after = state.passed_on;
            state.asked.push_back(Asked { request, after });
            state.asked_in_all += 1;
        });
    }

    /// Records that a request is about to be forwarded.
    pub(super) fn pass_on(&self) {
        self.change(|state| {
            state.passed_on += 1;
            state.before.push_back(state.asked_in_all);
        });
    }

    /// Waits until the response to a forwarded request is the next one the client expects.
    ///
    /// # Errors
    /// Once the connection is closed.
    pub(super) fn await_turn(&self) -> Result<(), Error> {
        self.wait(|state| state.is_turn_of_answer().then_some(()))
    }

    /// Records that this response was sent.
    pub(super) fn pass_answer_on(&self) {
        self.change(|state| {
            state.before.pop_front();
            state.answers_passed_on += 1;
        });
    }

    /// Waits until something may be sent; returns how much, already counted as outstanding.
    ///
    /// # Errors
    /// Once the connection is closed.
    pub(super) fn reserve(&self) -> Result<u64, Error> {
        self.wait(|state| Some(state.reserve()).filter(|&room| room > 0))
    }

    /// Sends requested streams until the connection is closed.
    ///
    /// # Errors
    /// Once it is closed, or if `write` fails.
    pub(super) fn play(
        &self,
        mut write: impl FnMut(&[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let mut playing = VecDeque::new();
        let mut chunk = Vec::with_capacity(2 * WRITE_LEN);
        loop {
            let turn = self.wait(|state| state.turn(!playing.is_empty()))?;
            chunk.clear();
            let answers = turn.asked.len() as u64;
            for request in turn.asked {
                answer(request, &mut playing, &mut chunk)?;
            }
            let sent = fill(&mut playing, turn.room, &mut chunk)?;
            self.change(|state| state.settle(turn.room, sent));
            write(&chunk)?;
            if answers > 0 {
                self.change(|state| state.answered += answers);
            }
        }
    }

    fn wait<T>(&self, mut ready: impl FnMut(&mut State) -> Option<T>) -> Result<T, Error> {
        let mut state = self.state();
        loop {
            if state.closed {
                return Err(io::Error::from(io::ErrorKind::ConnectionAborted).into());
            }
            if let Some(result) = ready(&mut state) {
                return Ok(result);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state());
        self.changed.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Appends the response to a request, and begins or ends its stream.
fn answer(
    request: Request,
    playing: &mut VecDeque<Playback>,
    chunk: &mut Vec<u8>,
) -> Result<(), Error> {
    match request {
        Request::Open(playback) => {
            let start = chunk.len();
            chunk.extend_from_slice(&playback.recording.response);
            set_opaque(&mut chunk[start..], playback.opaque);
            playing.push_back(playback);
        }
        Request::Close { vbid, opaque, with_end } => {
            let at = playing.iter().position(|playback| playback.vbid == vbid);
            if let Some(at) = at
                && let Some(closed) = playing.remove(at)
                && with_end
            {
                playing.push_front(closed.end()?);
            }
            let status = if at.is_some() { Status::SUCCESS } else { Status::KEY_ENOENT };
            let response = Frame::response(Opcode::DCP_CLOSE_STREAM, status);
            response.with_opaque(opaque).encode(chunk)?;
        }
    }
    Ok(())
}

/// Appends the next packets of the streams, one stream after the other, as `room` allows; a packet
/// larger than the whole buffer goes by itself. Returns the counted size.
fn fill(playing: &mut VecDeque<Playback>, room: u64, chunk: &mut Vec<u8>) -> Result<u64, Error> {
    let mut sent = 0;
    while sent < room
        && let Some(playback) = playing.front_mut()
    {
        let counted = playback.copy(room - sent, chunk)?;
        if counted == 0 && sent > 0 {
            break;
        }
        sent += if counted > 0 { counted } else { playback.copy_one(chunk)? };
        if playback.at == playback.recording.stream.len() {
            playing.pop_front();
        }
    }
    Ok(sent)
}

impl Playback {
    /// What remains of a stream that is closed.
    fn end(self) -> Result<Self, Error> {
        let to = StreamAddress { vbid: self.vbid, opaque: self.opaque, stream_id: None };
        let mut stream = Vec::new();
        StreamEnd { reason: StreamEndReason::CLOSED }.encode(to, &mut stream)?;
        let recording = Arc::new(Recording { response: Vec::new(), stream });
        Ok(Self { recording, at: 0, ..self })
    }

    /// Appends packets of at most `room` counted bytes; returns the counted size.
    fn copy(&mut self, room: u64, chunk: &mut Vec<u8>) -> Result<u64, Error> {
        let rest = &self.recording.stream[self.at..];
        let start = chunk.len();
        // Copy once and truncate the excess: the packets are then read from cache.
        chunk.extend_from_slice(&rest[..rest.len().min(usize::try_from(room)?)]);
        let front = front(&mut chunk[start..], room, Some(self.opaque))?;
        chunk.truncate(start + front.len);
        self.at += front.len;
        Ok(front.counted)
    }

    /// Appends the next packet of any length; returns its counted size.
    fn copy_one(&mut self, chunk: &mut Vec<u8>) -> Result<u64, Error> {
        let rest = &self.recording.stream[self.at..];
        let len = Frame::wanted(rest, MAX_BODY_LEN)?;
        let start = chunk.len();
        chunk.extend_from_slice(rest.get(..len).ok_or("a recording ends within a packet")?);
        self.at += len;
        Ok(front(&mut chunk[start..], u64::MAX, Some(self.opaque))?.counted)
    }
}

/// The whole packets at the front of a buffer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Front {
    /// Length in bytes.
    pub(super) len: usize,
    /// Size counted by flow control.
    pub(super) counted: u64,
}

/// Finds the whole packets at the front of `bytes` with a counted size of at most `room`, and sets
/// `opaque` in them if given.
pub(super) fn front(bytes: &mut [u8], room: u64, opaque: Option<Opaque>) -> Result<Front, Error> {
    let mut front = Front::default();
    while let Some(head) = bytes[front.len..].first_chunk::<{ Header::LEN }>() {
        let header = Header::decode(head)?;
        let counted = front.counted + counted_bytes(&header);
        if header.packet_len() > bytes.len() - front.len || counted > room {
            break;
        }
        if let Some(opaque) = opaque {
            set_opaque(&mut bytes[front.len..], opaque);
        }
        front = Front { len: front.len + header.packet_len(), counted };
    }
    Ok(front)
}

/// Length of the packets at the front of `bytes` before the first response, whose turn may not have
/// come.
pub(super) fn before_response(bytes: &[u8]) -> Result<usize, Error> {
    let mut len = 0;
    while let Some(head) = bytes.get(len..).and_then(|rest| rest.first_chunk()) {
        let header = Header::decode(head)?;
        if header.magic.is_response() {
            break;
        }
        len += header.packet_len();
    }
    Ok(len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::{Frames, Shape};

    fn recording(value_len: usize) -> (Arc<Recording>, Vec<usize>) {
        let shape = Shape { value_len, vbuckets: 1, pass_bytes: 4000 };
        let mut frames = Frames::new(shape).unwrap();
        frames.set_opaque(Vbid(0), Opaque(0));
        let stream = [frames.bytes(), &frames.stream_ends().unwrap()].concat();
        let mut response = Vec::new();
        Frame::request(Opcode::DCP_STREAM_REQ).encode(&mut response).unwrap();
        let lens = packets(&stream).iter().map(|packet| packet.len()).collect();
        (Arc::new(Recording { response, stream }), lens)
    }

    fn packets(mut bytes: &[u8]) -> Vec<&[u8]> {
        let mut packets = Vec::new();
        while let Some((_, len)) = Frame::parse(bytes, MAX_BODY_LEN).unwrap() {
            let packet;
            (packet, bytes) = bytes.split_at(len);
            packets.push(packet);
        }
        assert!(bytes.is_empty(), "whole packets");
        packets
    }

    fn playback(recording: &Arc<Recording>, opaque: u32) -> Playback {
        let recording = Arc::clone(recording);
        Playback { vbid: Vbid(0), recording, opaque: Opaque(opaque), at: 0 }
    }

    /// The stream with another opaque in every packet, made by the encoder's own means.
    fn with_opaque(stream: &[u8], opaque: u32) -> Vec<u8> {
        let mut expected = Vec::new();
        for packet in packets(stream) {
            let (frame, _) = Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap();
            frame.with_opaque(Opaque(opaque)).encode(&mut expected).unwrap();
        }
        expected
    }

    #[test]
    fn streams_come_whole_with_their_own_opaques_whatever_the_room() {
        let (first, lens) = recording(64);
        let (second, _) = recording(300);
        let expected =
            [with_opaque(&first.stream, 0xabcd_1234), with_opaque(&second.stream, 7)].concat();
        for room in [1, 23, 24, 25, 100, 999, 5000, 1 << 20] {
            let mut playing = VecDeque::from([playback(&first, 0xabcd_1234), playback(&second, 7)]);
            let mut all = Vec::new();
            while !playing.is_empty() {
                let mut chunk = Vec::new();
                let sent = fill(&mut playing, room, &mut chunk).unwrap();
                assert_eq!(sent, chunk.len() as u64, "every packet of a stream counts");
                assert!(sent <= room || packets(&chunk).len() == 1, "{sent} in a room of {room}");
                all.extend_from_slice(&chunk);
            }
            assert_eq!(all, expected, "room of {room}");
        }
        assert!(lens.len() > 10, "of more than a few packets");
    }

    #[test]
    fn nothing_is_sent_beyond_the_window_until_it_is_acknowledged() {
        let (recording, lens) = recording(64);
        let limit = (lens[0] + lens[1] + 10) as u64;
        let outbox = Outbox::default();
        outbox.set_limit(limit);
        outbox.ask(Vbid(0), recording, Opaque(1));
        let turn = outbox.state().turn(false).unwrap();
        assert_eq!((turn.asked.len(), turn.room), (1, limit));
        let (mut playing, mut chunk) = (VecDeque::new(), Vec::new());
        for request in turn.asked {
            answer(request, &mut playing, &mut chunk).unwrap();
        }
        chunk.clear();
        let sent = fill(&mut playing, turn.room, &mut chunk).unwrap();
        assert_eq!(sent, limit - 10);
        assert_eq!(outbox.state().turn(true).map(|turn| turn.room), None, "reserved already");
        outbox.settle(turn.room, sent);
        // What is left takes a packet that is too long, as a producer's window does.
        assert_eq!(outbox.state().turn(true).map(|turn| turn.room), Some(10));
        chunk.clear();
        let sent = fill(&mut playing, 10, &mut chunk).unwrap();
        assert_eq!(sent, lens[2] as u64);
        outbox.settle(10, sent);
        assert!(outbox.state().turn(true).is_none(), "the window is full");
        outbox.give_back(sent - 10);
        assert!(outbox.state().turn(true).is_none(), "and still is");
        outbox.give_back(1);
        assert_eq!(outbox.state().turn(true).map(|turn| turn.room), Some(1));
    }

    #[test]
    fn requests_are_answered_while_the_window_is_full() {
        let (recording, _) = recording(64);
        let outbox = Outbox::default();
        outbox.set_limit(100);
        assert_eq!(outbox.reserve().unwrap(), 100);
        outbox.ask(Vbid(0), recording, Opaque(1));
        let turn = outbox.state().turn(true).unwrap();
        assert_eq!((turn.asked.len(), turn.room), (1, 0));
        outbox.close();
        assert!(outbox.reserve().is_err());
    }

    #[test]
    fn a_stream_that_is_closed_sends_no_more_changes() {
        let (recording, lens) = recording(64);
        let close = |with_end| Request::Close { vbid: Vbid(0), opaque: Opaque(8), with_end };
        for with_end in [true, false] {
            let mut playing = VecDeque::from([playback(&recording, 7)]);
            let mut chunk = Vec::new();
            fill(&mut playing, lens[0] as u64, &mut chunk).unwrap();
            chunk.clear();
            answer(close(with_end), &mut playing, &mut chunk).unwrap();
            let sent = fill(&mut playing, 1 << 20, &mut chunk).unwrap();
            let (mut expected, mut end) = (Vec::new(), Vec::new());
            let response = Frame::response(Opcode::DCP_CLOSE_STREAM, Status::SUCCESS);
            response.with_opaque(Opaque(8)).encode(&mut expected).unwrap();
            if with_end {
                let to = StreamAddress { vbid: Vbid(0), opaque: Opaque(7), stream_id: None };
                StreamEnd { reason: StreamEndReason::CLOSED }.encode(to, &mut end).unwrap();
            }
            assert_eq!((sent, chunk), (end.len() as u64, [expected, end].concat()));
            assert!(playing.is_empty());
            // There is none any more.
            let mut refusal = Vec::new();
            answer(close(with_end), &mut playing, &mut refusal).unwrap();
            let (frame, _) = Frame::parse(&refusal, MAX_BODY_LEN).unwrap().unwrap();
            assert_eq!(frame.header.status(), Status::KEY_ENOENT);
        }
    }

    #[test]
    fn answers_come_in_the_order_of_the_requests() {
        let (recording, _) = recording(64);
        let outbox = Outbox::default();
        let begun = |has_more| outbox.state().turn(has_more).map_or(0, |turn| turn.asked.len());
        outbox.ask(Vbid(0), Arc::clone(&recording), Opaque(1));
        outbox.pass_on();
        outbox.ask(Vbid(1), recording, Opaque(2));
        assert!(!outbox.state().is_turn_of_answer(), "the stream was asked for before");
        assert_eq!(begun(false), 1);
        assert!(!outbox.state().is_turn_of_answer(), "it is not answered yet");
        outbox.change(|state| state.answered += 1);
        outbox.await_turn().unwrap();
        assert_eq!(begun(true), 0, "the producer has not answered");
        outbox.pass_answer_on();
        assert_eq!(begun(true), 1);
        assert!(outbox.state().is_turn_of_answer(), "nothing else was passed on");
    }

    #[test]
    fn packets_that_do_not_count_need_no_room() {
        let (recording, lens) = recording(64);
        let mut noop = Vec::new();
        Frame::request(Opcode::DCP_NOOP).encode(&mut noop).unwrap();
        let mut bytes = [noop.as_slice(), &recording.stream].concat();
        let before = bytes.clone();
        let alone = Front { len: noop.len(), counted: 0 };
        assert_eq!(front(&mut bytes, 0, None).unwrap(), alone);
        let room = lens[0] as u64;
        let with_next = Front { len: noop.len() + lens[0], counted: room };
        assert_eq!(front(&mut bytes, room, None).unwrap(), with_next);
        assert_eq!(bytes, before);
    }
}
