//! A recording as a queue of streams to replay.

use std::collections::{BTreeMap, VecDeque};

use dcp_wire::message::{Message, Request, Response, StreamRequest, rollback_seqno};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, StreamId, Vbid};

use super::{Asked, Report};
use crate::traces::{EventKind, Scenario};

/// The part of a recording to replay.
#[derive(Clone, Copy, Debug)]
pub(super) enum Part {
    All,
    /// One connection.
    Connection(u32),
    /// One stream request of a connection, counted from 0, with its response and messages.
    Request(u32, usize),
}

/// Remaining streams and observed problems.
#[derive(Debug)]
pub(super) struct Script {
    part: Part,
    waiting: BTreeMap<Vbid, VecDeque<RecordedStream>>,
    /// Streams that are replayed only for the same request as recorded.
    others: Vec<RecordedStream>,
    /// vBucket and high seqno, if only one request is replayed.
    known_high: Option<(Vbid, Seqno)>,
    /// Failover log of each vBucket as last replayed, initially that of its first stream.
    failover_logs: BTreeMap<Vbid, Vec<u8>>,
    recorded: BTreeMap<u32, RecordedConnection>,
    pub(super) manifest: serde_json::Value,
    pub(super) connections: usize,
    pub(super) messages_sent: usize,
    pub(super) problems: Vec<String>,
    /// Revision of the cluster map.
    pub(super) revision: u64,
    asked: Vec<Asked>,
    played: Vec<(u32, usize)>,
}

/// One recorded stream.
#[derive(Clone, Debug)]
pub(super) struct RecordedStream {
    pub(super) conn: u32,
    /// Index of the stream request on its connection, from 0.
    number: usize,
    asked: Asked,
    vbid: Vbid,
    opaque: Opaque,
    stream_id: Option<StreamId>,
    /// `None` if the server closed the connection instead of answering.
    pub(super) response: Option<Vec<u8>>,
    /// Messages before the client closed the stream.
    pub(super) messages: Vec<Vec<u8>>,
    /// Messages after the client closed the stream.
    pub(super) after_close: Vec<Vec<u8>>,
    closed: bool,
}

/// A recorded connection without its streams.
#[derive(Clone, Debug, Default)]
struct RecordedConnection {
    /// Value of the response to HELLO.
    features: Vec<u8>,
    /// Responses by control key and value.
    controls: BTreeMap<(Vec<u8>, Vec<u8>), Vec<u8>>,
    /// Noops sent before any stream request.
    pushes: Vec<Vec<u8>>,
    closed_by_server: bool,
}

impl Script {
    pub(super) fn new(scenario: &Scenario, part: Part) -> Self {
        let mut recorder = Recorder::default();
        for event in &scenario.events {
            if matches!(part, Part::Connection(conn) if conn != event.conn) {
                continue;
            }
            match &event.kind {
                EventKind::ServerClosed => recorder.connection(event.conn).closed_by_server = true,
                EventKind::ClientPacket(bytes) => recorder.client_packet(event.conn, bytes),
                EventKind::ServerPacket(bytes) => recorder.server_packet(event.conn, bytes),
            }
        }
        let Recorder { mut streams, connections, .. } = recorder;
        let (mut others, mut known_high, mut failover_logs) = (Vec::new(), None, BTreeMap::new());
        if let Part::Request(conn, number) = part {
            let at = streams.iter().position(|s| (s.conn, s.number) == (conn, number));
            let at = at.expect("the recording has the request");
            let vbid = streams[at].vbid;
            let (before, from) = streams.split_at(at);
            // The data that the server had is known from the messages that follow.
            let from = from.iter().filter(|stream| stream.vbid == vbid);
            let before = before.iter().rev().filter(|stream| stream.vbid == vbid);
            let high = from.clone().map(RecordedStream::high_seqno).max().unwrap_or_default();
            let older = before.clone().map(RecordedStream::high_seqno).max().unwrap_or_default();
            known_high = Some((vbid, if high > Seqno::ZERO { high } else { older }));
            failover_logs.extend(from.chain(before).find_map(|s| Some((vbid, s.failover_log()?))));
            let chosen = streams.remove(at);
            others = core::mem::replace(&mut streams, vec![chosen]);
        }
        let mut waiting: BTreeMap<Vbid, VecDeque<RecordedStream>> = BTreeMap::new();
        for stream in streams {
            if let Some(log) = stream.failover_log() {
                failover_logs.entry(stream.vbid).or_insert(log);
            }
            waiting.entry(stream.vbid).or_default().push_back(stream);
        }
        Self {
            part,
            waiting,
            others,
            known_high,
            failover_logs,
            recorded: connections,
            manifest: manifest(&scenario.expected),
            connections: 0,
            messages_sent: 0,
            problems: Vec::new(),
            revision: 1,
            asked: Vec::new(),
            played: Vec::new(),
        }
    }

    pub(super) fn vbids(&self) -> Vec<Vbid> {
        self.waiting.keys().copied().collect()
    }

    pub(super) fn report(&self) -> Report {
        Report {
            connections: self.connections,
            streams_played: self.played.len(),
            streams_left: self.waiting.values().map(VecDeque::len).sum(),
            messages_sent: self.messages_sent,
            asked: self.asked.clone(),
            played: self.played.clone(),
            problems: self.problems.clone(),
        }
    }

    /// The recorded connection to replay to the next client.
    pub(super) fn current_connection(&self) -> u32 {
        if let Part::Request(conn, _) = self.part {
            return conn;
        }
        let next = self.waiting.values().flatten().map(|stream| stream.conn).min();
        next.or_else(|| self.recorded.keys().next_back().copied()).unwrap_or_default()
    }

    /// Features granted on a recorded connection.
    pub(super) fn features(&self, conn: u32) -> &[u8] {
        self.recorded.get(&conn).map_or(&[], |recorded| &recorded.features)
    }

    /// The recorded response to a control.
    pub(super) fn control_answer(&self, conn: u32, key: &[u8], value: &[u8]) -> Option<&[u8]> {
        let answers = &self.recorded.get(&conn)?.controls;
        answers.get(&(key.to_vec(), value.to_vec())).map(Vec::as_slice)
    }

    /// Noops sent before any stream; each is replayed once.
    pub(super) fn take_pushes(&mut self, conn: u32) -> Vec<Vec<u8>> {
        self.recorded
            .get_mut(&conn)
            .map(|recorded| core::mem::take(&mut recorded.pushes))
            .unwrap_or_default()
    }

    /// The recorded stream for a request: the next of its vBucket, or one whose recorded request
    /// was equal and granted.
    pub(super) fn take(&mut self, request: &StreamRequest<'_>) -> Option<RecordedStream> {
        let asked = Asked::new(request);
        let next = self.waiting.get_mut(&request.vbid).and_then(VecDeque::pop_front);
        let stream = next.or_else(|| {
            let same = |other: &RecordedStream| {
                other.failover_log().is_some()
                    && other.asked.is_same_range(&asked)
                    && other.asked.filter() == asked.filter()
            };
            let at = self.others.iter().position(same)?;
            Some(self.others.remove(at))
        });
        self.asked.push(asked);
        let stream = stream?;
        self.played.push((stream.conn, stream.number));
        if let Some(log) = stream.failover_log() {
            self.failover_logs.insert(stream.vbid, log);
        }
        Some(stream)
    }

    /// Whether the server closed recorded connection `conn` and all of it was replayed.
    pub(super) fn is_over(&self, conn: u32) -> bool {
        if matches!(self.part, Part::Request(..)) {
            return false;
        }
        self.recorded.get(&conn).is_some_and(|recorded| recorded.closed_by_server)
            && !self.waiting.values().flatten().any(|stream| stream.conn == conn)
    }

    /// The failover log of `vbid` as the value of a response.
    pub(super) fn failover_log(&self, vbid: Vbid) -> Vec<u8> {
        self.failover_logs.get(&vbid).cloned().unwrap_or_else(|| {
            // A vBucket without a recording has one branch from the beginning.
            let mut log = (0x5c21_0000_0000 | u64::from(vbid.0)).to_be_bytes().to_vec();
            log.extend_from_slice(&[0; 8]);
            log
        })
    }

    /// Current high seqnos: those reached by the next recorded stream.
    pub(super) fn high_seqno(&self, vbid: Vbid) -> Seqno {
        if let Some((known, high)) = self.known_high {
            return if known == vbid { high } else { Seqno::ZERO };
        }
        let streams = self.waiting.get(&vbid).into_iter().flatten();
        let mut seqnos = streams.map(RecordedStream::high_seqno);
        seqnos.find(|seqno| *seqno > Seqno::ZERO).unwrap_or_default()
    }
}

impl RecordedStream {
    /// The failover log of the response, if the request was granted.
    fn failover_log(&self) -> Option<Vec<u8>> {
        let (frame, message) = decode(self.response.as_deref()?)?;
        matches!(message, Message::Response(Response::FailoverLog(_))).then(|| frame.value.to_vec())
    }

    /// Highest seqno of the stream, including the start seqno that the server accepted.
    fn high_seqno(&self) -> Seqno {
        let response = self.response.as_deref().and_then(decode);
        let answered = response.map_or(Seqno::ZERO, |(frame, _)| match frame.header.status() {
            Status::SUCCESS => self.asked.start_seqno,
            Status::ROLLBACK => rollback_seqno(&frame).unwrap_or_default(),
            _ => Seqno::ZERO,
        });
        let seqnos = self.messages.iter().filter_map(|bytes| match decode(bytes)?.1 {
            Message::Request(request) => match request {
                Request::SnapshotMarker(marker) => Some(marker.end_seqno),
                Request::Mutation(mutation) => Some(mutation.seqno),
                Request::Deletion(deletion) => Some(deletion.seqno),
                Request::Expiration(expiration) => Some(expiration.seqno),
                Request::SeqnoAdvanced(advanced) => Some(advanced.seqno),
                _ => None,
            },
            _ => None,
        });
        seqnos.max().unwrap_or_default().max(answered)
    }
}

/// Groups a recording's packets into streams.
#[derive(Default)]
struct Recorder {
    streams: Vec<RecordedStream>,
    connections: BTreeMap<u32, RecordedConnection>,
    /// Controls and closes awaiting a response, by connection and opaque.
    controls: BTreeMap<(u32, Opaque), (Vec<u8>, Vec<u8>)>,
    closes: BTreeMap<(u32, Opaque), (Vbid, Option<StreamId>)>,
}

impl Recorder {
    fn connection(&mut self, conn: u32) -> &mut RecordedConnection {
        self.connections.entry(conn).or_default()
    }

    /// The newest stream of a connection with this opaque.
    fn stream(&mut self, conn: u32, opaque: Opaque) -> Option<&mut RecordedStream> {
        let mut streams = self.streams.iter_mut().rev();
        streams.find(|stream| stream.conn == conn && stream.opaque == opaque)
    }

    fn client_packet(&mut self, conn: u32, bytes: &[u8]) {
        self.connection(conn);
        let Some((frame, Message::Request(request))) = decode(bytes) else { return };
        let key = (conn, frame.header.opaque);
        match request {
            Request::StreamRequest(request, _) => self.streams.push(RecordedStream {
                conn,
                number: self.streams.iter().filter(|stream| stream.conn == conn).count(),
                asked: Asked::new(&request),
                vbid: request.vbid,
                opaque: request.opaque,
                stream_id: stream_id(request.value),
                response: None,
                messages: Vec::new(),
                after_close: Vec::new(),
                closed: false,
            }),
            Request::CloseStream(_) => {
                let stream_id = frame.stream_id().ok().flatten();
                self.closes.insert(key, (frame.header.vbid(), stream_id));
            }
            Request::Control(control) => {
                self.controls.insert(key, (control.key.to_vec(), control.value.to_vec()));
            }
            _ => {}
        }
    }

    fn server_packet(&mut self, conn: u32, bytes: &[u8]) {
        let Some((frame, message)) = decode(bytes) else { return };
        let opaque = frame.header.opaque;
        match (frame.header.opcode, message) {
            (Opcode::HELLO, Message::Response(Response::Hello(features))) => {
                self.connection(conn).features = features.as_bytes().to_vec();
            }
            (Opcode::DCP_CONTROL, Message::Response(_)) => {
                if let Some(control) = self.controls.remove(&(conn, opaque)) {
                    self.connection(conn).controls.insert(control, bytes.to_vec());
                }
            }
            (Opcode::DCP_STREAM_REQ, Message::Response(_)) => {
                if let Some(stream) = self.stream(conn, opaque) {
                    stream.response = Some(bytes.to_vec());
                }
            }
            (Opcode::DCP_CLOSE_STREAM, Message::Response(Response::Empty)) => {
                if let Some((vbid, stream_id)) = self.closes.remove(&(conn, opaque)) {
                    for stream in &mut self.streams {
                        stream.closed |= stream.conn == conn
                            && stream.vbid == vbid
                            && stream.stream_id == stream_id;
                    }
                }
            }
            (Opcode::DCP_NOOP, Message::Request(_)) => {
                let mut streams = self.streams.iter_mut().rev();
                match streams.find(|stream| stream.conn == conn) {
                    Some(stream) => stream.messages.push(bytes.to_vec()),
                    None => self.connection(conn).pushes.push(bytes.to_vec()),
                }
            }
            (opcode, Message::Request(_)) if opcode.is_dcp() => {
                if let Some(stream) = self.stream(conn, opaque) {
                    let list =
                        if stream.closed { &mut stream.after_close } else { &mut stream.messages };
                    list.push(bytes.to_vec());
                }
            }
            _ => {}
        }
    }
}

/// The stream id of a stream request.
fn stream_id(value: &[u8]) -> Option<StreamId> {
    let value: serde_json::Value = serde_json::from_slice(value).ok()?;
    value.get("sid")?.as_u64()?.try_into().ok().map(StreamId)
}

/// The newest collections manifest in the recording.
fn manifest(expected: &serde_json::Value) -> serde_json::Value {
    let newest = expected.get("manifests").and_then(|manifests| manifests.as_array()?.last());
    newest.or_else(|| expected.get("manifest")).cloned().unwrap_or_else(|| {
        serde_json::json!({"uid": "0", "scopes": [
            {"name": "_default", "uid": "0", "collections": [{"name": "_default", "uid": "0"}]}
        ]})
    })
}

/// Decodes a recorded packet, if valid.
fn decode(bytes: &[u8]) -> Option<(Frame<'_>, Message<'_>)> {
    let (frame, _) = Frame::parse(bytes, MAX_BODY_LEN).ok()??;
    let message = Message::decode(&frame).ok()?;
    Some((frame, message))
}
