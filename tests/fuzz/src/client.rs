//! A client's connection, by a hostile server.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bytes::BytesMut;
use dcp_meter::Meter;
use dcp_proto::consumer::{
    Connection, ConnectionConfig, Delivery, Event, Exclusions, Limit, PositionUpdate, StreamFilter,
    StreamPosition,
};
use dcp_proto::{
    Change, ChangeSink, OnRollback, Position, Rollback, RowFilter, SinkError, SystemEventRecord,
};
use dcp_wire::message::{
    BufferAck, Deletion, Expiration, FailoverEntry, Mutation, OsoSnapshot, SeqnoAdvanced,
    SnapshotFlags, SnapshotMarker, StreamAddress, StreamEnd, StreamEndReason, StreamRequest,
    SystemEvent, SystemEventId, encode_failover_log, encode_vb_seqnos,
};
use dcp_wire::{
    Cas, CollectionId, Datatype, Frame, MAX_BODY_LEN, Magic, Opaque, Opcode, Seqno, Status, Vbid,
    Vbuuid,
};

use crate::assert_bounded;
use crate::bytes_in::BytesIn;

const VBUCKETS: u16 = 4;

/// Whatever a server sends, and whatever the application does meanwhile: the client ends the
/// connection with an error, or takes what is sensible, in order, the same however it arrives,
/// acknowledges no more than it received, asks only for what a server could have, and holds no
/// more than it was sent.
pub fn client(data: &[u8]) {
    let mut bytes = BytesIn::new(data);
    let mut play = Play::new(&mut bytes);
    while !bytes.is_empty() && !play.is_over {
        play.step(&mut bytes);
    }
    play.deliver(Pieces { step: usize::MAX, rows: usize::MAX });
}

/// What a sink was given, without keeping it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Seen {
    items: u64,
    /// Of everything, in order.
    hash: u64,
    /// Last seqno of each vBucket.
    last: [u64; VBUCKETS as usize],
    /// Whether seqnos may come in any order.
    is_unordered: bool,
}

impl Seen {
    fn note(&mut self, numbers: &[u64], parts: &[&[u8]]) {
        self.items += 1;
        let bytes = parts.iter().copied().flatten().map(|&byte| u64::from(byte));
        for number in numbers.iter().copied().chain(bytes) {
            self.hash = (self.hash.rotate_left(5) ^ number).wrapping_mul(0x517c_c1b7_2722_0a95);
        }
    }

    fn rise(&mut self, vbid: Vbid, seqno: Seqno, repeats: bool) {
        let last = &mut self.last[vbid.index()];
        let rises = seqno.0 > *last || repeats && seqno.0 == *last;
        assert!(rises || self.is_unordered, "{vbid}: seqno {seqno} after {last}");
        *last = seqno.0;
    }
}

impl ChangeSink for Seen {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        let Change { op, vbid, seqno, vbuuid, epoch, snapshot, collection_id, .. } = *change;
        assert!(snapshot.start <= seqno && seqno <= snapshot.end || self.is_unordered);
        self.rise(vbid, seqno, false);
        let numbers = [
            op as u64,
            u64::from(vbid.0),
            seqno.0,
            vbuuid.0,
            u64::from(epoch),
            snapshot.start.0,
            snapshot.end.0,
            u64::from(collection_id.0),
            change.cas.0,
            u64::from(change.delete_time),
        ];
        self.note(&numbers, &[change.key, change.value]);
        Ok(())
    }

    fn rollback(&mut self, rollback: &Rollback) -> Result<(), SinkError> {
        assert!(rollback.seqno <= rollback.from_seqno);
        self.last[rollback.vbid.index()] = rollback.seqno.0;
        self.note(&[u64::MAX, rollback.seqno.0, u64::from(rollback.epoch)], &[]);
        Ok(())
    }

    fn system_event(&mut self, event: &SystemEventRecord<'_>) -> Result<(), SinkError> {
        self.rise(event.vbid, event.seqno, true);
        self.note(&[u64::MAX - 1, event.seqno.0, u64::from(event.id.0)], &[event.key, event.value]);
        Ok(())
    }
}

/// How packets arrive: in pieces of so many bytes, so many rows taken at a time.
#[derive(Clone, Copy, Debug)]
struct Pieces {
    step: usize,
    rows: usize,
}

/// A machine, and what came of it.
struct Side {
    machine: Connection,
    seen: Seen,
    /// Bytes that have arrived and were not consumed.
    unread: Vec<u8>,
    sent: BytesMut,
    events: u64,
    /// Sum of what was acknowledged.
    acknowledged: u64,
}

/// What came of feeding a machine.
#[derive(Debug, PartialEq)]
struct Fed {
    sent: Vec<u8>,
    events: Vec<Event>,
    positions: Vec<PositionUpdate>,
    held: u64,
    error: Option<String>,
}

impl Side {
    fn new(config: ConnectionConfig, now: Instant, is_unordered: bool) -> Self {
        Self {
            machine: Connection::new(config, now),
            seen: Seen { is_unordered, ..Seen::default() },
            unread: Vec::new(),
            sent: BytesMut::new(),
            events: 0,
            acknowledged: 0,
        }
    }

    /// Lets bytes arrive; `most` is raised to what was held at any moment.
    fn feed(&mut self, now: Instant, arriving: &[u8], how: Pieces) -> Option<String> {
        let limit = Limit { rows: how.rows, ..Limit::NONE };
        for piece in arriving.chunks(how.step.clamp(1, arriving.len().max(1))) {
            self.unread.extend_from_slice(piece);
            loop {
                match self.machine.handle_input(now, &self.unread, limit, &mut self.seen) {
                    Err(error) => return Some(error.to_string()),
                    Ok(walk) => {
                        assert!(walk.consumed <= self.unread.len());
                        self.unread.drain(..walk.consumed);
                        if !walk.limited {
                            break;
                        }
                    }
                }
            }
        }
        None
    }

    fn drain(&mut self, error: Option<String>) -> Fed {
        self.sent.clear();
        self.machine.poll_transmit(&mut self.sent);
        let events: Vec<_> = std::iter::from_fn(|| self.machine.poll_event()).collect();
        self.events += events.len() as u64;
        let mut positions = self.machine.take_positions();
        positions.sort_by_key(|moved| moved.vbid);
        let held = self.machine.take_held();
        Fed { sent: self.sent.to_vec(), events, positions, held, error }
    }
}

/// A server's packets on their way to two clients that must agree.
struct Play {
    config: ConnectionConfig,
    now: Instant,
    /// Gets what is sent at once.
    whole: Side,
    /// Gets it in pieces.
    split: Side,
    /// Opaque and next seqno of each stream asked for, by vBucket.
    streams: BTreeMap<u16, (Opaque, u64)>,
    asked_high_seqnos: Vec<u32>,
    /// Other requests outside of streams.
    asked: Vec<(Opcode, Opaque)>,
    wire: Vec<u8>,
    /// Held back by the application.
    unreleased: u64,
    received: usize,
    /// Most bytes that lay in the read buffer, of which one packet may be.
    longest: usize,
    counted: u64,
    is_over: bool,
}

impl Play {
    fn new(bytes: &mut BytesIn<'_>) -> Self {
        let how = bytes.u8();
        let exclusions = if how & 1 == 0 {
            Exclusions::default()
        } else {
            Exclusions::default().with_transactions().with_system_scope(None, [])
        };
        let config = ConnectionConfig {
            num_vbuckets: VBUCKETS,
            collections: how & 2 == 0,
            window: if how & 4 == 0 { 600 } else { 0 },
            noop_interval: Some(Duration::from_secs(20)),
            filter: StreamFilter::All,
            purge_seqno: how & 8 == 0,
            stream_end_on_close: true,
            ignore_purged_tombstones: false,
            on_rollback: if how & 16 == 0 { OnRollback::Emit } else { OnRollback::Resync },
            delivery: Delivery {
                clamp: how & 32 != 0,
                persisted_only: how & 64 != 0,
                end_persisted: how & 128 != 0,
                exclusions,
                rows: RowFilter::default(),
            },
            max_body_len: MAX_BODY_LEN,
        };
        let is_unordered = bytes.u8() & 1 != 0;
        let now = some_instant();
        let side = || Side::new(config.clone(), now, is_unordered);
        let mut play = Self {
            now,
            whole: side(),
            split: side(),
            streams: BTreeMap::new(),
            asked_high_seqnos: Vec::new(),
            asked: Vec::new(),
            wire: Vec::new(),
            unreleased: 0,
            received: 0,
            longest: 0,
            counted: 0,
            is_over: false,
            config,
        };
        for vbid in 0..2 {
            play.open(Vbid(vbid), Seqno::MAX, StreamPosition::new(Position::EARLIEST));
            play.deliver(Pieces { step: 1, rows: 1 });
            play.answer(vbid, Status::SUCCESS, &log(1, 1));
        }
        play.deliver(Pieces { step: 1, rows: 1 });
        play
    }

    fn both(&mut self, mut what: impl FnMut(&mut Connection)) {
        what(&mut self.whole.machine);
        what(&mut self.split.machine);
    }

    fn open(&mut self, vbid: Vbid, end: Seqno, from: StreamPosition) {
        let last = from.position.seqno.0;
        let outcome = self.whole.machine.open_stream(vbid, end, from.clone());
        assert_eq!(self.split.machine.open_stream(vbid, end, from), outcome);
        if outcome.is_ok() {
            self.whole.seen.last[vbid.index()] = last;
            self.split.seen.last[vbid.index()] = last;
        }
    }

    /// One thing that the server or the application does.
    fn step(&mut self, bytes: &mut BytesIn<'_>) {
        let what = bytes.u8();
        let vbid = u16::from(what >> 6);
        match what & 0x3f {
            0..40 => self.send(what & 0x3f, vbid, bytes),
            40..44 => {
                let step = usize::from(bytes.u8()) + 1;
                self.deliver(Pieces { step, rows: 1 + step % 5 });
            }
            44..47 => {
                let bytes = self.unreleased / (1 + u64::from(bytes.u8() & 3));
                self.unreleased -= bytes;
                let now = self.now;
                self.both(|machine| machine.release(now, bytes));
            }
            47 => self.mangle(bytes),
            48 => self.wire.extend_from_slice(bytes.part()),
            49 => {
                let now = self.now;
                self.both(|machine| machine.close_stream(now, Vbid(vbid)));
            }
            50 => {
                let end = if bytes.u8() & 1 == 0 { u64::MAX } else { bytes.near(0) };
                self.open(Vbid(vbid), Seqno(end), StreamPosition::new(Position::EARLIEST));
            }
            51 => self.both(Connection::request_high_seqnos),
            52 => {
                let (what, vbid) = (bytes.u8(), Vbid(vbid));
                self.both(|machine| match what & 7 {
                    0 => machine.request_manifest(),
                    1 => machine.request_failover_logs(&[vbid]),
                    2 => machine.request_observed_seqnos(&[(vbid, Vbuuid(1))]),
                    3 => machine.request_purge_seqnos(),
                    4 => machine.request_collection_seqnos(&[CollectionId(0), CollectionId(8)]),
                    _ => machine.request_cluster_map(),
                });
            }
            53..56 => {
                let seqno = bytes.near(self.next(vbid));
                self.both(|machine| machine.persisted(Vbid(vbid), Vbuuid(1), Seqno(seqno)));
            }
            56 => {
                self.now += Duration::from_millis(u64::from(bytes.u16()));
                let now = self.now;
                let outcome = self.whole.machine.handle_timeout(now);
                assert_eq!(
                    self.split.machine.handle_timeout(now).is_err(),
                    outcome.is_err(),
                    "however packets arrive"
                );
                self.is_over |= outcome.is_err();
            }
            57 => self.reconnect(),
            _ => self.deliver(Pieces { step: usize::MAX, rows: usize::MAX }),
        }
    }

    fn next(&self, vbid: u16) -> u64 {
        self.streams.get(&vbid).map_or(1, |&(_, next)| next)
    }

    /// Puts a well-formed packet on the wire, of a stream that is there or nearly.
    fn send(&mut self, kind: u8, vbid: u16, bytes: &mut BytesIn<'_>) {
        let (opaque, next) = self.streams.get(&vbid).copied().unwrap_or((Opaque(1), 1));
        let to = StreamAddress { vbid: Vbid(vbid), opaque, stream_id: None };
        let out = &mut self.wire;
        let key: &[u8] = if kind & 1 == 0 { b"\0key" } else { b"\x08_txn:k" };
        let value: &[u8] = if kind & 2 == 0 { b"{}" } else { bytes.part() };
        let mut to_seqno = None;
        match kind {
            // The usual: the next seqno, or one near it.
            0..12 => {
                let seqno = if kind < 8 { next } else { bytes.near(next) };
                to_seqno = Some(seqno);
                let (seqno, cas) = (Seqno(seqno), Cas(1));
                let datatype = Datatype::JSON;
                let mutation = Mutation { seqno, cas, key, value, datatype, ..Default::default() };
                mutation.encode(to, out)
            }
            12..14 => {
                let seqno = bytes.near(next);
                to_seqno = Some(seqno);
                let delete_time = (kind == 12).then_some(3);
                let deletion =
                    Deletion { seqno: Seqno(seqno), key, delete_time, ..Default::default() };
                deletion.encode(to, out)
            }
            14 => {
                to_seqno = Some(next);
                Expiration { seqno: Seqno(next), key, ..Default::default() }.encode(to, out)
            }
            15..17 => {
                let seqno = bytes.near(next);
                to_seqno = Some(seqno);
                SeqnoAdvanced { seqno: Seqno(seqno) }.encode(to, out)
            }
            17..22 => {
                let start = bytes.near(next);
                let end = bytes.near(start);
                let mut marker = SnapshotMarker::new(
                    Seqno(start),
                    Seqno(end),
                    SnapshotFlags::from_bits_retain(u32::from(bytes.u8())),
                );
                if kind == 21 {
                    marker.max_visible_seqno = Some(Seqno(bytes.near(end)));
                    marker.purge_seqno = Some(Seqno(bytes.near(0)));
                }
                marker.encode(to, out)
            }
            22..25 => {
                let seqno = bytes.near(next);
                to_seqno = Some(seqno);
                let id = bytes.one_of(SystemEventId::KNOWN);
                let (version, value) = (bytes.u8() & 3, bytes.part());
                SystemEvent { seqno: Seqno(seqno), id, version, key: b"_system", value }
                    .encode(to, out)
            }
            25 => OsoSnapshot::Start.encode(to, out),
            26 => OsoSnapshot::End.encode(to, out),
            27 => StreamEnd { reason: StreamEndReason(u32::from(bytes.u8() & 15)) }.encode(to, out),
            28..31 => {
                let (count, vbuuid) = (bytes.u8(), u64::from(bytes.u8()));
                let value = log(vbuuid, count);
                return self.answer(vbid, Status::SUCCESS, &value);
            }
            31..33 => {
                let to = bytes.near(next.saturating_sub(8));
                return self.answer(vbid, Status::ROLLBACK, &to.to_be_bytes());
            }
            33 => {
                let status = Status(u16::from(bytes.u8()));
                return self.answer(vbid, status, value);
            }
            34 => Frame::request(Opcode::DCP_NOOP).with_opaque(Opaque(bytes.u32())).encode(out),
            35 => Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_value(value).encode(out),
            36 => {
                let mut seqnos = Vec::new();
                encode_vb_seqnos([(Vbid(vbid), Seqno(bytes.near(next)))], &mut seqnos);
                let number = self.asked_high_seqnos.pop().unwrap_or(0);
                let answer = Frame::response(Opcode::GET_ALL_VB_SEQNOS, Status::SUCCESS);
                answer.with_opaque(Opaque(number)).with_value(&seqnos).encode(out)
            }
            37 => Frame::response(Opcode::DCP_CLOSE_STREAM, Status::SUCCESS)
                .with_opaque(opaque)
                .encode(out),
            38 => {
                let last = self.asked.pop().unwrap_or((Opcode::GET_CLUSTER_CONFIG, Opaque(0)));
                let status = Status(u16::from(bytes.u8() & 1));
                let name: &[u8] = if bytes.u8() & 1 == 0 { b"vb_1:purge_seqno" } else { b"" };
                let answer = Frame::response(last.0, status).with_opaque(last.1);
                answer.with_key(name).with_value(value).encode(out)
            }
            _ => {
                let mut frame = Frame::request(Opcode(bytes.u8())).with_opaque(opaque);
                frame.header.magic = bytes.one_of(Magic::KNOWN);
                frame.header.vbid_or_status = vbid;
                let (extras, key) = (bytes.part(), bytes.part());
                frame.with_extras(extras).with_key(key).with_value(value).encode(out)
            }
        }
        .expect("short parts");
        if let (Some(seqno), Some((_, next))) = (to_seqno, self.streams.get_mut(&vbid)) {
            *next = seqno.saturating_add(1);
        }
    }

    /// Answers the stream request of a vBucket.
    fn answer(&mut self, vbid: u16, status: Status, value: &[u8]) {
        let opaque = self.streams.get(&vbid).map_or(Opaque(0), |&(opaque, _)| opaque);
        let answer = Frame::response(Opcode::DCP_STREAM_REQ, status).with_opaque(opaque);
        answer.with_value(value).encode(&mut self.wire).expect("short parts");
    }

    /// Damages what is on the wire.
    fn mangle(&mut self, bytes: &mut BytesIn<'_>) {
        let (from_end, byte) = (usize::from(bytes.u8()), bytes.u8());
        let at = self.wire.len().checked_sub(1 + from_end);
        if let Some(place) = at.and_then(|at| self.wire.get_mut(at)) {
            *place = byte;
        }
    }

    /// Lets what is on the wire arrive at both, at one of them in pieces.
    fn deliver(&mut self, how: Pieces) {
        if self.is_over {
            return;
        }
        let mut wire = std::mem::take(&mut self.wire);
        // Out of order on purpose is what only some plays are.
        if !self.whole.seen.is_unordered && has_oso(&[&self.whole.unread[..], &wire].concat()) {
            wire.clear();
        }
        self.received += wire.len();
        self.longest = self.longest.max(self.whole.unread.len() + wire.len());
        let at_once = Pieces { step: usize::MAX, rows: usize::MAX };
        let meter = Meter::start();
        let error = self.whole.feed(self.now, &wire, at_once);
        assert_bounded(meter.most(), self.received);
        let whole = self.whole.drain(error);
        let error = self.split.feed(self.now, &wire, how);
        let split = self.split.drain(error);
        assert_eq!(whole, split, "however packets arrive");
        assert_eq!(self.whole.seen, self.split.seen, "however packets arrive");
        self.counted += whole.held;
        self.unreleased += whole.held;
        self.take_sent(&whole.sent);
        check_positions(&whole);
        self.is_over |= whole.error.is_some();
        let window = u64::from(self.config.window);
        let unacknowledged = self.whole.machine.unacknowledged();
        let bound = window + self.longest as u64;
        assert!(window == 0 || self.is_over || unacknowledged <= bound, "{unacknowledged}");
    }

    /// Checks and remembers what the client sent.
    fn take_sent(&mut self, sent: &[u8]) {
        let mut rest = sent;
        while let Some((frame, used)) = Frame::parse(rest, MAX_BODY_LEN).expect("a packet") {
            rest = &rest[used..];
            let header = frame.header;
            match header.opcode {
                Opcode::DCP_STREAM_REQ => {
                    let request = StreamRequest::decode(&frame).expect("a stream request");
                    let StreamRequest { start_seqno, end_seqno, .. } = request;
                    assert!(request.snapshot_start <= start_seqno);
                    assert!(start_seqno <= request.snapshot_end && start_seqno <= end_seqno);
                    let next = start_seqno.0.saturating_add(1);
                    self.streams.insert(request.vbid.0, (request.opaque, next));
                }
                Opcode::DCP_BUFFER_ACK => {
                    let acknowledged = BufferAck::decode(&frame).expect("an acknowledgement").bytes;
                    self.whole.acknowledged += u64::from(acknowledged);
                }
                Opcode::GET_ALL_VB_SEQNOS => self.asked_high_seqnos.push(header.opaque.0),
                Opcode::DCP_GET_FAILOVER_LOG
                | Opcode::GET_CLUSTER_CONFIG
                | Opcode::GET_COLLECTIONS_MANIFEST
                | Opcode::OBSERVE_SEQNO
                | Opcode::STAT => self.asked.push((header.opcode, header.opaque)),
                Opcode::DCP_CLOSE_STREAM | Opcode::DCP_NOOP | Opcode::DCP_SNAPSHOT_MARKER => {}
                other => panic!("a client does not send {other}"),
            }
        }
        assert!(rest.is_empty(), "whole packets only");
        let acknowledged = self.whole.acknowledged;
        let counted = self.counted;
        assert!(acknowledged <= counted, "{acknowledged} acknowledged of {counted}");
    }

    /// Loses the connection and goes on with another one.
    fn reconnect(&mut self) {
        self.wire.clear();
        let make = |now, config: &ConnectionConfig| Connection::new(config.clone(), now);
        let whole = std::mem::replace(&mut self.whole.machine, make(self.now, &self.config));
        let split = std::mem::replace(&mut self.split.machine, make(self.now, &self.config));
        let streams = whole.into_streams();
        assert_eq!(split.into_streams(), streams);
        self.whole.unread.clear();
        self.split.unread.clear();
        self.streams.clear();
        self.asked_high_seqnos.clear();
        self.asked.clear();
        (self.unreleased, self.counted, self.whole.acknowledged) = (0, 0, 0);
        for (vbid, from) in streams {
            self.open(vbid, Seqno::MAX, from);
        }
        self.deliver(Pieces { step: 1, rows: 1 });
    }
}

fn check_positions(fed: &Fed) {
    for PositionUpdate { position, history, .. } in &fed.positions {
        let snapshot = position.request_snapshot();
        assert!(snapshot.start <= position.seqno && position.seqno <= snapshot.end);
        assert!(history.points().iter().all(|point| point.seqno <= position.seqno));
    }
}

/// Whether some packet is a marker of an out-of-sequence-order snapshot.
fn has_oso(mut wire: &[u8]) -> bool {
    while let Ok(Some((frame, used))) = Frame::parse(wire, MAX_BODY_LEN) {
        if frame.header.opcode == Opcode::DCP_OSO_SNAPSHOT {
            return true;
        }
        wire = &wire[used..];
    }
    false
}

/// A failover log of so many entries.
fn log(vbuuid: u64, count: u8) -> Vec<u8> {
    let mut value = Vec::new();
    let entry = |n: u64| FailoverEntry {
        vbuuid: Vbuuid(vbuuid + n),
        seqno: Seqno((u64::from(count) - n) * 4 - 4),
    };
    encode_failover_log((0..u64::from(count)).map(entry), &mut value);
    value
}

/// Where time begins; machines only ever see differences.
fn some_instant() -> Instant {
    thread_local! {
        static BEGIN: RefCell<Option<Instant>> = const { RefCell::new(None) };
    }
    BEGIN.with_borrow_mut(|begin| *begin.get_or_insert_with(Instant::now))
}
