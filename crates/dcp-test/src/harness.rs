//! A consumer's connection machine under simulated time, with a scripted server.
#![expect(missing_docs, reason = "fields are called what the protocol calls them")]

use std::time::{Duration, Instant};

use bytes::BytesMut;
use dcp_proto::consumer::{
    Connection, ConnectionConfig, ConnectionError, Delivery, EndCause, Event, Limit, Misbehaviour,
    ProtocolErrorKind, StreamFilter, StreamPosition, Walk,
};
use dcp_proto::{
    CaughtUp, Change, ChangeSink, FailoverLog, OnRollback, Op, Position, Rollback, SinkError,
    Snapshot, SystemEventRecord,
};
use dcp_wire::message::{
    FailoverEntry, OsoSnapshot, SnapshotMarker, StreamAddress, StreamEndReason, StreamRequest,
    StreamRequestFlags, encode_failover_log, encode_vb_seqnos,
};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};

use crate::packet::{Packet, packets};
use crate::words;

/// The vBucket of the stream.
pub const VB: Vbid = Vbid(7);

/// An item received by the sink.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Item {
    Change { op: Op, vbid: Vbid, seqno: u64, vbuuid: u64, epoch: u32, snapshot: (u64, u64) },
    Rollback(Rollback),
    SystemEvent(u64),
    CaughtUp(u64),
}

/// A document as the sink was given it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Document {
    pub op: Op,
    pub seqno: u64,
    pub vbuuid: u64,
    pub snapshot: (u64, u64),
    pub history: bool,
    pub collection: u32,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
    pub datatype: u8,
}

/// A system event as the sink was given it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    pub seqno: u64,
    pub id: u32,
    pub version: u8,
    pub key: Vec<u8>,
    pub value: Vec<u8>,
}

#[derive(Debug, Default)]
pub struct Sink {
    pub items: Vec<Item>,
    /// The changes among them in full.
    pub documents: Vec<Document>,
    /// The system events among them in full.
    pub told: Vec<Told>,
    /// Seqnos of changes in snapshots with history.
    pub history: Vec<u64>,
    /// The sink refuses the change with this seqno.
    pub refuse: Option<Seqno>,
}

impl ChangeSink for Sink {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        if self.refuse == Some(change.seqno) {
            let (vbid, seqno, what) = (change.vbid, change.seqno, "refused".to_owned());
            return Err(SinkError::Unrepresentable { vbid, seqno, what });
        }
        self.history.extend(change.history.then_some(change.seqno.0));
        self.documents.push(Document {
            op: change.op,
            seqno: change.seqno.0,
            vbuuid: change.vbuuid.0,
            snapshot: (change.snapshot.start.0, change.snapshot.end.0),
            history: change.history,
            collection: change.collection_id.0,
            key: change.key.to_vec(),
            value: change.value.to_vec(),
            datatype: change.datatype.0,
        });
        self.items.push(Item::Change {
            op: change.op,
            vbid: change.vbid,
            seqno: change.seqno.0,
            vbuuid: change.vbuuid.0,
            epoch: change.epoch,
            snapshot: (change.snapshot.start.0, change.snapshot.end.0),
        });
        Ok(())
    }

    fn rollback(&mut self, rollback: &Rollback) -> Result<(), SinkError> {
        self.items.push(Item::Rollback(*rollback));
        Ok(())
    }

    fn caught_up(&mut self, caught_up: &CaughtUp) -> Result<(), SinkError> {
        self.items.push(Item::CaughtUp(caught_up.seqno.0));
        Ok(())
    }

    fn system_event(&mut self, event: &SystemEventRecord<'_>) -> Result<(), SinkError> {
        self.items.push(Item::SystemEvent(event.seqno.0));
        self.told.push(Told {
            seqno: event.seqno.0,
            id: event.id.0,
            version: event.version,
            key: event.key.to_vec(),
            value: event.value.to_vec(),
        });
        Ok(())
    }
}

/// A stream request as received by the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    pub opaque: Opaque,
    pub start: u64,
    pub end: u64,
    pub vbuuid: u64,
    pub snapshot: (u64, u64),
    pub value: String,
    pub flags: StreamRequestFlags,
}

/// A packet sent by the machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sent {
    StreamRequest(Request),
    Close(Opaque),
    HighSeqnos(u32),
    Ack(u32),
    Response { opcode: Opcode, opaque: Opaque, status: Status },
    Other(Opcode),
}

/// A connection with one current stream.
#[derive(Debug)]
pub struct Harness {
    pub machine: Connection,
    pub sink: Sink,
    pub now: Instant,
    pub opaque: Opaque,
    /// Encoded packets that the server sends next.
    pub wire: Vec<u8>,
}

/// An arbitrary time to start from.
pub fn start() -> Instant {
    Instant::now()
}

pub fn config() -> ConnectionConfig {
    ConnectionConfig {
        num_vbuckets: 16,
        collections: false,
        window: 0,
        noop_interval: Some(Duration::from_secs(20)),
        filter: StreamFilter::All,
        purge_seqno: true,
        stream_end_on_close: true,
        ignore_purged_tombstones: false,
        on_rollback: OnRollback::Emit,
        delivery: Delivery::default(),
        max_body_len: MAX_BODY_LEN,
    }
}

pub fn is_complete(event: &Event) -> bool {
    matches!(event, Event::StreamEnded { cause: EndCause::Complete, .. })
}

pub fn log(entries: &[(u64, u64)]) -> FailoverLog {
    let entry = |&(vbuuid, seqno)| FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno(seqno) };
    FailoverLog::new(entries.iter().map(entry).collect()).unwrap()
}

pub fn position(seqno: u64, snapshot: (u64, u64), entries: &[(u64, u64)]) -> Position {
    Position {
        seqno: Seqno(seqno),
        snapshot: Snapshot { start: Seqno(snapshot.0), end: Seqno(snapshot.1) },
        failover_log: Some(log(entries)),
        ..Position::EARLIEST
    }
}

impl Harness {
    pub fn new(config: ConnectionConfig) -> Self {
        let now = start();
        Self {
            machine: Connection::new(config, now),
            sink: Sink::default(),
            now,
            opaque: Opaque(0),
            wire: Vec::new(),
        }
    }

    /// A harness with an accepted stream from the beginning.
    pub fn streaming(config: ConnectionConfig) -> Self {
        let mut harness = Self::new(config);
        harness.open(StreamPosition::new(Position::EARLIEST));
        harness.accept(&[(1, 0)]);
        harness
    }

    pub fn open(&mut self, resume: StreamPosition) -> Request {
        self.open_until(resume, Seqno::MAX)
    }

    pub fn open_until(&mut self, resume: StreamPosition, end: Seqno) -> Request {
        self.machine.open_stream(VB, end, resume).unwrap();
        self.requested()
    }

    /// Expects a request for high seqnos, answers it, and expects the stream request that follows.
    pub fn requested_up_to(&mut self, high: u64) -> Request {
        let sent = self.sent();
        let [Sent::HighSeqnos(number)] = sent[..] else { panic!("{sent:?}") };
        self.high_seqno(number, high);
        self.requested()
    }

    /// Answers a request for high seqnos.
    pub fn high_seqno(&mut self, number: u32, high: u64) {
        let mut value = Vec::new();
        encode_vb_seqnos([(VB, Seqno(high))], &mut value);
        let answer = Frame::response(Opcode::GET_ALL_VB_SEQNOS, Status::SUCCESS);
        answer.with_opaque(Opaque(number)).with_value(&value).encode(&mut self.wire).unwrap();
        self.play();
    }

    /// Expects a stream request as the only packet sent; its opaque is used from now on.
    pub fn requested(&mut self) -> Request {
        let sent = self.sent();
        let [Sent::StreamRequest(request)] = &sent[..] else { panic!("{sent:?}") };
        self.opaque = request.opaque;
        request.clone()
    }

    /// Packets sent by the machine.
    pub fn packets(&mut self) -> Vec<Packet> {
        let mut bytes = BytesMut::new();
        self.machine.poll_transmit(&mut bytes);
        packets(&bytes)
    }

    /// The same, decoded.
    pub fn sent(&mut self) -> Vec<Sent> {
        self.packets().iter().map(decode_sent).collect()
    }

    pub fn events(&mut self) -> Vec<Event> {
        std::iter::from_fn(|| self.machine.poll_event()).collect()
    }

    /// Address of the stream's messages.
    #[must_use]
    pub const fn to(&self) -> StreamAddress {
        StreamAddress { vbid: VB, opaque: self.opaque, stream_id: None }
    }

    /// Queues a message of the stream, in the notation of [`words`].
    pub fn say(&mut self, words: &str) -> &mut Self {
        self.wire.extend(words::message(words, self.to()));
        self
    }

    /// A snapshot marker from memory.
    pub fn marker(&mut self, start: u64, end: u64) -> &mut Self {
        self.say(&format!("MARK [{start}-{end}] 0x1"))
    }

    /// Any snapshot marker.
    pub fn marker_of(&mut self, marker: &SnapshotMarker) -> &mut Self {
        marker.encode(self.to(), &mut self.wire).unwrap();
        self
    }

    /// A mutation.
    pub fn mutation(&mut self, seqno: u64) -> &mut Self {
        self.say(&format!("MUT {seqno}"))
    }

    /// Mutations.
    pub fn mutations(&mut self, seqnos: impl IntoIterator<Item = u64>) -> &mut Self {
        seqnos.into_iter().fold(self, Self::mutation)
    }

    /// A deletion, in the layout with or without a delete time.
    pub fn deletion(&mut self, seqno: u64, delete_time: Option<u32>) -> &mut Self {
        match delete_time {
            Some(time) => self.say(&format!("DEL2 {seqno} key {time}")),
            None => self.say(&format!("DEL {seqno}")),
        }
    }

    /// An expiration.
    pub fn expiration(&mut self, seqno: u64) -> &mut Self {
        self.say(&format!("EXP {seqno}"))
    }

    /// Seqno advanced.
    pub fn advanced(&mut self, seqno: u64) -> &mut Self {
        self.say(&format!("ADV {seqno}"))
    }

    /// A created collection.
    pub fn system_event(&mut self, seqno: u64, manifest_uid: u64) -> &mut Self {
        self.say(&format!("SYS {seqno} begin 9 v0 key=fruit uid={manifest_uid}"))
    }

    /// Start or end of an OSO snapshot.
    pub fn oso(&mut self, oso: OsoSnapshot) -> &mut Self {
        self.say(if oso == OsoSnapshot::Start { "OSO start" } else { "OSO end" })
    }

    /// A stream end.
    pub fn end(&mut self, reason: StreamEndReason) -> &mut Self {
        self.say(&format!("END {}", reason.0))
    }

    /// The response to the current stream request.
    pub fn answer(&mut self, status: Status, value: &[u8]) -> &mut Self {
        let answer = Frame::response(Opcode::DCP_STREAM_REQ, status);
        answer.with_opaque(self.opaque).with_value(value).encode(&mut self.wire).unwrap();
        self
    }

    /// Accepts the current request; returns the events after `StreamOpened`.
    pub fn accept_with(&mut self, entries: &[(u64, u64)]) -> Vec<Event> {
        let mut value = Vec::new();
        encode_failover_log(log(entries).entries().iter().copied(), &mut value);
        self.answer(Status::SUCCESS, &value).play();
        let mut events = self.events();
        assert!(matches!(events[0], Event::StreamOpened { vbid: VB, .. }), "{events:?}");
        events.split_off(1)
    }

    pub fn accept(&mut self, entries: &[(u64, u64)]) {
        let mut value = Vec::new();
        encode_failover_log(log(entries).entries().iter().copied(), &mut value);
        self.answer(Status::SUCCESS, &value).play();
        let mut events = self.events();
        events.retain(|event| !matches!(event, Event::RolledBack(_) | Event::HighSeqnos(_)));
        assert!(matches!(events[..], [Event::StreamOpened { vbid: VB, .. }]), "{events:?}");
    }

    /// Feeds the queued bytes to the machine.
    pub fn try_play(&mut self) -> Result<Walk, ConnectionError> {
        let wire = std::mem::take(&mut self.wire);
        let walk = self.machine.handle_input(self.now, &wire, Limit::NONE, &mut self.sink)?;
        assert_eq!(walk.consumed, wire.len(), "whole packets are consumed");
        Ok(walk)
    }

    pub fn play(&mut self) -> Walk {
        self.try_play().unwrap()
    }

    /// Feeds the queued bytes and returns the server's violation of the protocol.
    pub fn misbehaves(&mut self) -> Misbehaviour {
        match self.try_play() {
            Err(ConnectionError::Protocol(error)) => match error.kind {
                ProtocolErrorKind::PeerMisbehaved(misbehaviour) => misbehaviour,
                kind => panic!("{kind}"),
            },
            other => panic!("{other:?}"),
        }
    }

    /// Position of the stream as delivered by the driver; `None` if it has not changed.
    pub fn moved(&mut self) -> Option<Position> {
        let mut positions = self.machine.take_positions();
        assert!(positions.iter().all(|moved| moved.vbid == VB));
        positions.pop().map(|moved| moved.position)
    }

    /// Replaces the connection with a new one and returns its stream request.
    pub fn reconnect(&mut self, config: ConnectionConfig) -> Request {
        let old = std::mem::replace(&mut self.machine, Connection::new(config, self.now));
        self.wire.clear();
        let [(_, from)] = &old.into_streams()[..] else { panic!("one stream") };
        self.open(from.clone())
    }

    /// The same for a stream with an end.
    pub fn reconnect_until(&mut self, config: ConnectionConfig, end: Seqno) -> Request {
        self.reopen_until(config, end);
        self.requested()
    }

    /// The same, but without expecting the stream request.
    pub fn reopen_until(&mut self, config: ConnectionConfig, end: Seqno) {
        let old = std::mem::replace(&mut self.machine, Connection::new(config, self.now));
        self.wire.clear();
        let [(_, from)] = &old.into_streams()[..] else { panic!("one stream") };
        self.machine.open_stream(VB, end, from.clone()).unwrap();
    }

    pub fn seqnos(&self) -> Vec<u64> {
        let seqno = |item: &Item| match item {
            Item::Change { seqno, .. } | Item::SystemEvent(seqno) | Item::CaughtUp(seqno) => *seqno,
            Item::Rollback(rollback) => rollback.seqno.0,
        };
        self.sink.items.iter().map(seqno).collect()
    }
}

fn decode_sent(packet: &Packet) -> Sent {
    let frame = &packet.frame();
    let header = frame.header;
    if header.magic.is_response() {
        let status = header.status();
        return Sent::Response { opcode: header.opcode, opaque: header.opaque, status };
    }
    match header.opcode {
        Opcode::DCP_STREAM_REQ => {
            let request = StreamRequest::decode(frame).unwrap();
            Sent::StreamRequest(Request {
                opaque: request.opaque,
                start: request.start_seqno.0,
                end: request.end_seqno.0,
                vbuuid: request.vbuuid.0,
                snapshot: (request.snapshot_start.0, request.snapshot_end.0),
                value: String::from_utf8(request.value.to_vec()).unwrap(),
                flags: request.flags,
            })
        }
        Opcode::DCP_CLOSE_STREAM => Sent::Close(header.opaque),
        Opcode::GET_ALL_VB_SEQNOS => Sent::HighSeqnos(header.opaque.0),
        Opcode::DCP_BUFFER_ACK => Sent::Ack(u32::from_be_bytes(frame.extras.try_into().unwrap())),
        opcode => Sent::Other(opcode),
    }
}
