//! A client's connection to the scripted server.

use std::collections::VecDeque;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

use bytes::{Buf, BytesMut};
use dcp_wire::message::{Control, Message, Request, StreamRequest};
use dcp_wire::{Datatype, Frame, Magic, Opaque, Opcode, Status, StreamId, Vbid};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Shared;
use super::answers::{Answers, encode};

/// Maximum body of a client's packet in bytes: requests are small.
const MAX_REQUEST_LEN: usize = 1024 * 1024;

/// One connection.
pub(super) struct Conversation {
    shared: Arc<Shared>,
    answers: Answers,
    /// Number of the recorded connection to replay.
    recorded: u32,
    outbox: VecDeque<Outgoing>,
    /// Size of the client's flow-control buffer in bytes; 0 for no limit.
    window: usize,
    unacknowledged: usize,
    /// Open streams, with the messages to send after a close.
    open: Vec<OpenStream>,
    /// Whether the client enabled stream ids.
    stream_ids: bool,
    /// The recorded connection was closed by the server at this point.
    closing: bool,
}

struct OpenStream {
    vbid: Vbid,
    stream_id: Option<StreamId>,
    opaque: Opaque,
    after_close: Vec<Vec<u8>>,
}

struct Outgoing {
    bytes: Vec<u8>,
    /// Whether flow control counts it.
    counted: bool,
}

impl Conversation {
    pub(super) fn new(addr: SocketAddr, shared: Arc<Shared>) -> Self {
        let recorded = shared.script().current_connection();
        let answers = Answers::new(addr, recorded, Arc::clone(&shared));
        Self {
            shared,
            answers,
            recorded,
            outbox: VecDeque::new(),
            window: 0,
            unacknowledged: 0,
            open: Vec::new(),
            stream_ids: false,
            closing: false,
        }
    }

    /// Serves the connection until either side closes it.
    pub(super) async fn run(mut self, mut socket: TcpStream) {
        if let Err(error) = self.converse(&mut socket).await
            && error.kind() == io::ErrorKind::InvalidData
        {
            self.shared.script().problems.push(error.to_string());
        }
    }

    async fn converse(&mut self, socket: &mut TcpStream) -> io::Result<()> {
        let mut input = BytesMut::new();
        loop {
            self.flush(socket).await?;
            if self.closing && self.outbox.is_empty() {
                return socket.shutdown().await;
            }
            if socket.read_buf(&mut input).await? == 0 {
                return Ok(());
            }
            loop {
                let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
                let Some((frame, used)) = Frame::parse(&input, MAX_REQUEST_LEN).map_err(invalid)?
                else {
                    break;
                };
                self.packet(&frame);
                input.advance(used);
            }
        }
    }

    /// Sends as much as the client's flow-control buffer allows.
    async fn flush(&mut self, socket: &mut TcpStream) -> io::Result<()> {
        while let Some(next) = self.outbox.front() {
            if next.counted && self.window > 0 && self.unacknowledged >= self.window {
                return Ok(());
            }
            if next.counted {
                self.unacknowledged = self.unacknowledged.saturating_add(next.bytes.len());
                self.shared.script().messages_sent += 1;
            }
            socket.write_all(&next.bytes).await?;
            self.outbox.pop_front();
        }
        Ok(())
    }

    fn packet(&mut self, frame: &Frame<'_>) {
        let message = match Message::decode(frame) {
            Ok(message) => message,
            Err(error) => {
                let opcode = frame.header.opcode;
                self.shared.script().problems.push(format!("{opcode}: {error}"));
                return self.respond(frame, Status::EINVAL, &[]);
            }
        };
        match message {
            Message::Request(Request::StreamRequest(request, _)) => {
                self.start_stream(frame, &request);
            }
            Message::Request(Request::CloseStream(_)) => self.close_stream(frame),
            Message::Request(Request::BufferAck(ack)) => {
                let bytes = usize::try_from(ack.bytes).unwrap_or(usize::MAX);
                self.unacknowledged = self.unacknowledged.saturating_sub(bytes);
            }
            Message::Request(Request::Control(control)) => self.control(frame, control),
            Message::Request(request) => {
                if let Some(answer) = self.answers.answer(frame, &request) {
                    self.send(answer);
                }
                if frame.header.opcode == Opcode::DCP_OPEN {
                    let pushes = self.shared.script().take_pushes(self.recorded);
                    pushes.into_iter().for_each(|push| self.send(push));
                }
            }
            Message::Raw(_) => self.respond(frame, Status::UNKNOWN_COMMAND, &[]),
            // Responses to noops and snapshot markers need no response themselves.
            _ => {}
        }
    }

    fn start_stream(&mut self, frame: &Frame<'_>, request: &StreamRequest<'_>) {
        let (vbid, opaque) = (request.vbid, request.opaque);
        let shared = Arc::clone(&self.shared);
        let mut script = shared.script();
        let Some(stream) = script.take(request) else {
            let log = script.failover_log(vbid);
            drop(script);
            self.respond(frame, Status::SUCCESS, &log);
            if request.start_seqno >= request.end_seqno {
                let end = Frame::request(Opcode::DCP_STREAM_END).with_vbid(vbid);
                self.count(encode(&end.with_opaque(opaque).with_extras(&[0; 4])));
            }
            return;
        };
        // Close when the recorded connection is exhausted, or when it has no response.
        self.closing |= script.is_over(stream.conn) || stream.response.is_none();
        drop(script);
        if let Some(response) = stream.response {
            let response = self.with_own_map(frame, response);
            self.send(with_opaque(response, opaque));
        }
        let stream_id = stream.messages.iter().find_map(|bytes| stream_id(bytes));
        for message in stream.messages {
            if message.get(1) == Some(&Opcode::DCP_NOOP.0) {
                self.send(message);
            } else {
                let message = if self.stream_ids { message } else { without_stream_id(message) };
                self.count(with_opaque(message, opaque));
            }
        }
        let after_close = stream.after_close;
        self.open.push(OpenStream { vbid, stream_id, opaque, after_close });
    }

    /// Replaces the cluster map in a refusal with this server's, with a new revision.
    fn with_own_map(&self, request: &Frame<'_>, response: Vec<u8>) -> Vec<u8> {
        const HEADER_LEN: usize = 24;
        let moved = Status::NOT_MY_VBUCKET.0.to_be_bytes();
        if response.len() <= HEADER_LEN || response.get(6..8) != Some(&moved[..]) {
            return response;
        }
        self.shared.script().revision += 1;
        let map = self.answers.config().to_string();
        let response = Frame::response(request.header.opcode, Status::NOT_MY_VBUCKET);
        encode(&response.with_datatype(Datatype::JSON).with_value(map.as_bytes()))
    }

    fn close_stream(&mut self, request: &Frame<'_>) {
        let vbid = request.header.vbid();
        let stream_id = request.stream_id().ok().flatten();
        let mut streams = self.open.iter();
        let position = streams.rposition(|stream| {
            // The stream id of a recorded stream without messages is unknown.
            stream.vbid == vbid && (stream.stream_id == stream_id || stream.stream_id.is_none())
        });
        let Some(position) = position else {
            return self.respond(request, Status::KEY_ENOENT, &[]);
        };
        let stream = self.open.remove(position);
        // Drop messages that were not sent yet.
        let opaque = stream.opaque.0.to_be_bytes();
        self.outbox.retain(|next| !next.counted || next.bytes.get(12..16) != Some(&opaque[..]));
        self.respond(request, Status::SUCCESS, &[]);
        for message in stream.after_close {
            self.count(with_opaque(message, stream.opaque));
        }
    }

    fn control(&mut self, request: &Frame<'_>, control: Control<'_>) {
        let opaque = request.header.opaque;
        let script = self.shared.script();
        let answer = script.control_answer(self.recorded, control.key, control.value);
        let answer = answer.map(|bytes| with_opaque(bytes.to_vec(), opaque));
        drop(script);
        if control.key == Control::CONNECTION_BUFFER_SIZE.as_bytes() {
            let size = str::from_utf8(control.value).ok().and_then(|text| text.parse().ok());
            let Some(size) = size else {
                return self.respond(request, Status::EINVAL, &[]);
            };
            self.window = size;
        }
        if control.key == Control::ENABLE_STREAM_ID.as_bytes() {
            self.stream_ids = control.value == b"true";
        }
        match answer {
            Some(answer) => self.send(answer),
            None => self.respond(request, Status::SUCCESS, &[]),
        }
    }

    fn respond(&mut self, request: &Frame<'_>, status: Status, value: &[u8]) {
        let response = Frame::response(request.header.opcode, status)
            .with_opaque(request.header.opaque)
            .with_datatype(Datatype::RAW)
            .with_value(value);
        self.send(encode(&response));
    }

    fn send(&mut self, bytes: Vec<u8>) {
        self.outbox.push_back(Outgoing { bytes, counted: false });
    }

    fn count(&mut self, bytes: Vec<u8>) {
        self.outbox.push_back(Outgoing { bytes, counted: true });
    }
}

/// Changes the opaque of a recorded packet.
fn with_opaque(mut bytes: Vec<u8>, opaque: Opaque) -> Vec<u8> {
    if let Some(slot) = bytes.get_mut(12..16) {
        slot.copy_from_slice(&opaque.0.to_be_bytes());
    }
    bytes
}

/// Removes the stream id from a recorded message.
fn without_stream_id(bytes: Vec<u8>) -> Vec<u8> {
    let Ok(Some((mut frame, _))) = Frame::parse(&bytes, dcp_wire::MAX_BODY_LEN) else {
        return bytes;
    };
    if frame.stream_id().ok().flatten().is_none() {
        return bytes;
    }
    frame.framing_extras = &[];
    frame.header.magic = Magic::CLIENT_REQUEST;
    encode(&frame)
}

/// The stream id of a recorded message.
fn stream_id(bytes: &[u8]) -> Option<StreamId> {
    let (frame, _) = Frame::parse(bytes, dcp_wire::MAX_BODY_LEN).ok()??;
    frame.stream_id().ok()?
}
