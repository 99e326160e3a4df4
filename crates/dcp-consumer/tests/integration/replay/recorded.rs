//! The streams of a recording, read with these tests' own bookkeeping.

use std::collections::{BTreeMap, BTreeSet};

use dcp_proto::Op;
use dcp_test::scripted_server::Asked;
use dcp_test::traces::{EventKind, Scenario};
use dcp_wire::message::{
    Control, Deletion, Expiration, Message, Mutation, Open, OpenFlags, Request, StreamEnd,
    StreamEndReason, StreamRequest, StreamRequestFlags, rollback_seqno,
};
use dcp_wire::{
    CollectionId, DocKey, Feature, Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, StreamId,
    Vbid,
};

use crate::rows::Row;

/// A recorded stream, taken out of its connection.
#[derive(Clone, Debug)]
pub(super) struct Recorded {
    pub(super) conn: u32,
    /// Which of the stream requests of its connection, counted from 0.
    pub(super) number: usize,
    pub(super) vbid: Vbid,
    pub(super) asked: Asked,
    pub(super) on: Connection,
    /// `None` if the server closed the connection instead.
    pub(super) status: Option<Status>,
    /// Where the server wants it to begin instead.
    pub(super) rollback_to: Option<Seqno>,
    /// The failover log, if it was granted.
    pub(super) log: Vec<u8>,
    pub(super) rows: Vec<Row>,
    /// Opcodes of its messages.
    opcodes: BTreeSet<u8>,
    pub(super) stream_id: Option<StreamId>,
    pub(super) end: Option<StreamEndReason>,
}

/// What is known of a recorded connection when a stream is asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Connection {
    /// Whether the server has opened it for DCP, as a producer.
    pub(super) is_open: bool,
    /// Whether keys carry collection ids.
    pub(super) collections: bool,
    /// Whether bodies are left out.
    pub(super) no_value: bool,
    flags: OpenFlags,
    /// Whether the server answers for the liveness of the connection, which this consumer asks for
    /// and servers demand of clients that want xattrs or collections.
    noop: bool,
    /// Whether it takes part in durable writes, or names its streams.
    replicates: bool,
    names_streams: bool,
    /// Stream requests so far.
    requests: usize,
}

/// What was asked for in a recording.
#[derive(Clone, Debug, Default)]
pub(super) struct Requests {
    pub(super) streams: Vec<Recorded>,
    /// Stream requests that are none.
    pub(super) malformed: usize,
}

/// Reads the streams out of a recording.
pub(super) fn recorded(scenario: &Scenario) -> Requests {
    let mut requests = Requests::default();
    let mut opaques: Vec<Opaque> = Vec::new();
    let mut connections: BTreeMap<u32, Connection> = BTreeMap::new();
    for event in &scenario.events {
        let (EventKind::ClientPacket(bytes) | EventKind::ServerPacket(bytes)) = &event.kind else {
            continue;
        };
        let connection = connections.entry(event.conn).or_default();
        // Some recordings send garbage on purpose.
        let Ok(Some((frame, _))) = Frame::parse(bytes, MAX_BODY_LEN) else { continue };
        let opaque = frame.header.opaque;
        if matches!(event.kind, EventKind::ClientPacket(_)) {
            if let Ok(open) = Open::decode(&frame) {
                connection.flags = open.flags;
            }
            if let Ok(control) = Control::decode(&frame) {
                connection.set(&control);
            }
            if frame.header.opcode != Opcode::DCP_STREAM_REQ {
                continue;
            }
            match StreamRequest::decode(&frame) {
                Ok(request) => {
                    opaques.push(opaque);
                    requests.streams.push(Recorded::new(event.conn, *connection, &request));
                    connection.requests += 1;
                }
                Err(_) => requests.malformed += 1,
            }
            continue;
        }
        connection.answered(&frame);
        let streams = requests.streams.iter_mut().zip(&opaques).rev();
        let mut streams =
            streams.filter(|(stream, of)| **of == opaque && stream.conn == event.conn);
        if let Some((stream, _)) = streams.next() {
            stream.take(&frame);
        }
    }
    requests
}

impl Connection {
    /// Takes a setting. One that the server refuses makes no difference to what is asked of it.
    fn set(&mut self, control: &Control<'_>) {
        let on = control.value == b"true";
        match control.key {
            b"enable_noop" => self.noop = on,
            b"enable_sync_writes" => self.replicates = on,
            b"enable_stream_id" => self.names_streams = on,
            _ => {}
        }
    }

    /// Whether the server refuses `status` what it would grant this consumer, which has collections
    /// and noops always, and neither durable writes nor stream ids.
    fn is_why(&self, status: Status, asked: &Asked) -> bool {
        let wants_noop = self.collections || self.flags.contains(OpenFlags::INCLUDE_XATTRS);
        let is_ours = (self.noop || !wants_noop) && !self.replicates && !self.names_streams;
        let filters_nothing = !self.collections && !asked.value.is_empty();
        match status {
            Status::NOT_SUPPORTED => !is_ours || filters_nothing,
            Status::EINVAL => filters_nothing,
            _ => false,
        }
    }

    fn answered(&mut self, frame: &Frame<'_>) {
        match frame.header.opcode {
            Opcode::HELLO => {
                let collections = Feature::COLLECTIONS.0.to_be_bytes();
                self.collections = frame.value.chunks(2).any(|feature| feature == collections);
            }
            Opcode::DCP_OPEN if frame.header.status().is_success() => {
                self.is_open = self.flags.contains(OpenFlags::PRODUCER);
                let without = OpenFlags::NO_VALUE | OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE;
                self.no_value = self.flags.intersects(without);
            }
            _ => {}
        }
    }
}

impl Recorded {
    fn new(conn: u32, on: Connection, request: &StreamRequest<'_>) -> Self {
        Self {
            conn,
            number: on.requests,
            vbid: request.vbid,
            asked: Asked::new(request),
            on,
            status: None,
            rollback_to: None,
            log: Vec::new(),
            rows: Vec::new(),
            opcodes: BTreeSet::new(),
            stream_id: None,
            end: None,
        }
    }

    /// Takes an answer or a message of the stream.
    fn take(&mut self, frame: &Frame<'_>) {
        let header = frame.header;
        if header.magic.is_response() {
            if header.opcode == Opcode::DCP_STREAM_REQ {
                self.status = Some(header.status());
                self.rollback_to = match header.status() {
                    // It names no seqno to go back to.
                    Status::ERANGE => Some(Seqno::ZERO),
                    _ => rollback_seqno(frame).ok(),
                };
                if header.status().is_success() {
                    self.log = frame.value.to_vec();
                }
            }
            return;
        }
        self.opcodes.insert(header.opcode.0);
        self.stream_id = self.stream_id.or(frame.stream_id().unwrap());
        if let Ok(end) = StreamEnd::decode(frame) {
            self.end = Some(end.reason);
        }
        self.rows.extend(row(frame, self.vbid, self.on.collections));
    }

    /// Whether the server sends the client back: it cannot from the beginning.
    pub(super) fn is_rolled_back(&self) -> bool {
        matches!(self.status, Some(Status::ROLLBACK | Status::ERANGE))
            && self.asked.start_seqno != Seqno::ZERO
    }

    /// Whether it was asked for up to an end.
    pub(super) fn is_finite(&self) -> bool {
        self.asked.end_seqno != Seqno::MAX
            || self.asked.flags.contains(StreamRequestFlags::TO_LATEST)
    }

    /// Why this consumer cannot have that stream, in words; `None` if it can.
    pub(super) fn why_not_played(&self) -> Option<&'static str> {
        let Asked { start_seqno, end_seqno, flags, .. } = self.asked;
        let to_latest = flags.contains(StreamRequestFlags::TO_LATEST);
        let replication = [Opcode::DCP_PREPARE, Opcode::DCP_COMMIT, Opcode::DCP_ABORT];
        if replication.iter().any(|opcode| self.opcodes.contains(&opcode.0)) {
            return Some(super::not_played::REPLICATION);
        }
        if !self.on.is_open && self.status != Some(Status::SUCCESS) {
            return Some(super::not_played::NOT_OPEN);
        }
        if self.status.is_some_and(|status| self.on.is_why(status, &self.asked)) {
            return Some(super::not_played::SETTINGS);
        }
        let is_left = end_seqno > Seqno::ZERO && end_seqno >= start_seqno;
        if !is_left && !to_latest {
            return Some(super::not_played::NOTHING_LEFT);
        }
        None
    }

    /// Whether several streams like this can be had at once: from the beginning, accepted.
    pub(super) fn is_ordinary(&self) -> bool {
        self.asked.start_seqno == Seqno::ZERO
            && self.status == Some(Status::SUCCESS)
            && self.stream_id.is_none()
            && self.why_not_played().is_none()
    }
}

/// The row a recorded packet makes.
fn row(frame: &Frame<'_>, vbid: Vbid, collections: bool) -> Option<Row> {
    let Ok(Message::Request(request)) = Message::decode(frame) else { return None };
    let split = |key: &[u8]| {
        if !collections {
            return (CollectionId::DEFAULT, key.to_vec());
        }
        let key = DocKey::decode(key).unwrap();
        (key.collection_id, key.key.to_vec())
    };
    let tombstone = |op, seqno, (collection_id, key), value: &[u8], delete_time| Row {
        op,
        vbid,
        seqno,
        collection_id,
        key,
        value: value.to_vec(),
        datatype: frame.header.datatype,
        cas: frame.header.cas,
        flags: 0,
        expiry: 0,
        delete_time,
    };
    match request {
        Request::Mutation(Mutation { seqno, key, value, flags, expiry, .. }) => {
            Some(Row { flags, expiry, ..tombstone(Op::Mutation, seqno, split(key), value, 0) })
        }
        Request::Deletion(Deletion { seqno, key, value, delete_time, .. }) => {
            let delete_time = delete_time.unwrap_or_default();
            Some(tombstone(Op::Deletion, seqno, split(key), value, delete_time))
        }
        Request::Expiration(Expiration { seqno, key, value, delete_time, .. }) => {
            Some(tombstone(Op::Expiration, seqno, split(key), value, delete_time))
        }
        _ => None,
    }
}
