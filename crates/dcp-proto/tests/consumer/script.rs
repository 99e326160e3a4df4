//! A consumer's connection, driven by the words of a row.

use std::time::{Duration, Instant};

use bytes::BytesMut;
use dcp_proto::OnRollback;
use dcp_proto::consumer::{
    Connection, ConnectionConfig, Delivery, Event, Limit, StreamFilter, StreamPosition,
};
use dcp_proto::{
    Change, ChangeSink, FailoverLog, Position, Rollback, SinkError, Snapshot, SystemEventRecord,
};
use dcp_wire::message::{
    Deletion, Expiration, FailoverEntry, Mutation, OsoSnapshot, SeqnoAdvanced, SnapshotFlags,
    SnapshotMarker, StreamAddress, StreamEnd, StreamEndReason, StreamRequest, SystemEvent,
    SystemEventId, encode_failover_log,
};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};
use serde_json::Value;

const VB: Vbid = Vbid(7);

/// Seqnos in the order they came; of a rollback the restart point.
#[derive(Default)]
struct Seqnos(Vec<u64>);

impl ChangeSink for Seqnos {
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        self.0.push(change.seqno.0);
        Ok(())
    }

    fn rollback(&mut self, rollback: &Rollback) -> Result<(), SinkError> {
        self.0.push(rollback.seqno.0);
        Ok(())
    }

    fn system_event(&mut self, event: &SystemEventRecord<'_>) -> Result<(), SinkError> {
        self.0.push(event.seqno.0);
        Ok(())
    }
}

/// A consumer's connection with the stream of one vBucket.
pub(crate) struct Script {
    machine: Connection,
    sink: Seqnos,
    now: Instant,
    end: Seqno,
    opaque: Opaque,
    requested: Option<(u64, (u64, u64), u64)>,
    position: Option<Position>,
    counted: u64,
    ended: Option<String>,
    answers: u64,
    maps: u64,
}

impl Script {
    /// With the stream the row asks for; accepted by the server unless the row says otherwise.
    pub(crate) fn open(row: &Value) -> Self {
        let now = start();
        let end = row["end"].as_u64().map_or(Seqno::MAX, Seqno);
        let collections = row["collections"].as_bool().unwrap_or_default();
        let mut script = Self {
            machine: machine(now, collections),
            sink: Seqnos::default(),
            now,
            end,
            opaque: Opaque(0),
            requested: None,
            position: None,
            counted: 0,
            ended: None,
            answers: 0,
            maps: 0,
        };
        let own = log(row.get("log"));
        let position = match row["position"].as_array() {
            None => Position::EARLIEST,
            Some(numbers) => {
                let number = |at: usize| Seqno(numbers[at].as_u64().expect("a seqno"));
                let snapshot = Snapshot { start: number(1), end: number(2) };
                let failover_log = Some(FailoverLog::new(own.clone()).expect("a log"));
                Position { seqno: number(0), snapshot, failover_log, ..Position::EARLIEST }
            }
        };
        script.request(StreamPosition::new(position));
        if row["opened"].as_bool() != Some(false) {
            script.accept(row.get("opens").map_or(own, |opens| log(Some(opens))));
        }
        script
    }

    fn request(&mut self, resume: StreamPosition) {
        self.machine.open_stream(VB, self.end, resume).expect("no stream yet");
        self.take_requests();
    }

    fn accept(&mut self, log: Vec<FailoverEntry>) {
        let mut value = Vec::new();
        encode_failover_log(log, &mut value);
        self.answer(Status::SUCCESS, &value).expect("a good answer");
    }

    fn answer(&mut self, status: Status, value: &[u8]) -> Result<(), String> {
        let answer = Frame::response(Opcode::DCP_STREAM_REQ, status).with_opaque(self.opaque);
        let mut wire = Vec::new();
        answer.with_value(value).encode(&mut wire).expect("it fits");
        self.feed(&wire)
    }

    /// Does what a step of a row says.
    pub(crate) fn step(&mut self, step: &str) -> Result<(), String> {
        let words: Vec<&str> = step.split(' ').collect();
        match words[..] {
            ["LOST"] => {
                let old = std::mem::replace(&mut self.machine, machine(self.now, false));
                let (_, resume) = old.into_streams().pop().expect("a stream");
                self.request(resume);
                Ok(())
            }
            ["ROLLBACK", to] => self.answer(Status::ROLLBACK, &number(to).to_be_bytes()),
            ["ANSWER", status, len] => {
                let known = Status::KNOWN.iter().find(|known| known.name() == Some(status));
                let len = usize::try_from(number(len)).expect("a length");
                self.answer(*known.expect("a status"), &vec![0; len])
            }
            ["WAIT", seconds] => {
                self.now += Duration::from_secs(number(seconds));
                self.machine.handle_timeout(self.now).map_err(|error| error.to_string())
            }
            ["PUSH", map] => {
                let push = Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_key(b"default");
                self.frame(push.with_extras(&[0; 16]).with_value(map.as_bytes()))
            }
            ["MAP"] => self.frame(Frame::response(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS)),
            ["MAP", map] => {
                let answer = Frame::response(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS);
                self.frame(answer.with_value(map.as_bytes()))
            }
            ["KEY", seqno, digits] => {
                let key = hex(digits);
                let seqno = Seqno(number(seqno));
                let mut wire = Vec::new();
                let mutation = Mutation { seqno, key: &key, ..Default::default() };
                mutation.encode(self.to(), &mut wire).expect("it fits");
                self.feed(&wire)
            }
            // A message of which one byte is another.
            ["BYTE", at, byte, ..] => {
                let mut wire = Vec::new();
                encode(&words[3..], self.to(), &mut wire);
                wire[usize::try_from(number(at)).expect("a place")] = hex(byte)[0];
                self.feed(&wire)
            }
            // A message without its last bytes, and lengths that say so.
            ["SHORT", bytes, ..] => {
                let mut wire = Vec::new();
                encode(&words[2..], self.to(), &mut wire);
                let bytes = u8::try_from(number(bytes)).expect("a few");
                wire.truncate(wire.len() - usize::from(bytes));
                wire[4] -= bytes;
                wire[11] -= bytes;
                self.feed(&wire)
            }
            ["STALE", ..] => {
                let opaque = Opaque(0xdead);
                self.message(&words[1..], StreamAddress { vbid: VB, opaque, stream_id: None })
            }
            ["OTHER", ..] => {
                let vbid = Vbid(VB.0 + 1);
                let to = StreamAddress { vbid, opaque: self.opaque, stream_id: None };
                self.message(&words[1..], to)
            }
            _ => self.message(&words, self.to()),
        }
    }

    fn to(&self) -> StreamAddress {
        StreamAddress { vbid: VB, opaque: self.opaque, stream_id: None }
    }

    fn frame(&mut self, frame: Frame<'_>) -> Result<(), String> {
        let mut wire = Vec::new();
        frame.encode(&mut wire).expect("it fits");
        self.feed(&wire)
    }

    fn message(&mut self, words: &[&str], to: StreamAddress) -> Result<(), String> {
        let mut wire = Vec::new();
        encode(words, to, &mut wire);
        self.feed(&wire)
    }

    fn feed(&mut self, wire: &[u8]) -> Result<(), String> {
        let fed = self.machine.handle_input(self.now, wire, Limit::NONE, &mut self.sink);
        fed.map_err(|error| error.to_string())?;
        self.counted += self.machine.take_held();
        if let Some(moved) = self.machine.take_positions().pop() {
            self.position = Some(moved.position);
        }
        while let Some(event) = self.machine.poll_event() {
            match event {
                Event::StreamEnded { cause, .. } => {
                    assert!(self.ended.is_none(), "a stream ends once");
                    self.ended = Some(cause.to_string());
                }
                Event::ClusterMap(_) => self.maps += 1,
                _ => {}
            }
        }
        self.take_requests();
        Ok(())
    }

    fn take_requests(&mut self) {
        let mut sent = BytesMut::new();
        self.machine.poll_transmit(&mut sent);
        let mut rest = &sent[..];
        while let Some((frame, used)) = Frame::parse(rest, MAX_BODY_LEN).expect("a packet") {
            rest = &rest[used..];
            self.answers += u64::from(frame.header.magic.is_response());
            if frame.header.opcode == Opcode::DCP_STREAM_REQ {
                let request = StreamRequest::decode(&frame).expect("a stream request");
                self.opaque = request.opaque;
                let snapshot = (request.snapshot_start.0, request.snapshot_end.0);
                self.requested = Some((request.start_seqno.0, snapshot, request.vbuuid.0));
            }
        }
    }

    /// What the sink was given.
    pub(crate) fn delivered(&self) -> &[u64] {
        &self.sink.0
    }

    /// Seqno and snapshot the stream stands at.
    pub(crate) fn position(&self) -> Vec<u64> {
        let at = self.position.as_ref().unwrap_or(&Position::EARLIEST);
        vec![at.seqno.0, at.snapshot.start.0, at.snapshot.end.0]
    }

    /// Bytes received that count towards the window.
    pub(crate) const fn counted(&self) -> u64 {
        self.counted
    }

    /// Packets of the server that were answered.
    pub(crate) const fn answers(&self) -> u64 {
        self.answers
    }

    /// Cluster maps there were.
    pub(crate) const fn maps(&self) -> u64 {
        self.maps
    }

    /// Why the stream has ended.
    pub(crate) fn end(&self) -> Option<&str> {
        self.ended.as_deref()
    }

    /// Start, snapshot and branch of the newest stream request.
    pub(crate) const fn requested(&self) -> Option<(u64, (u64, u64), u64)> {
        self.requested
    }
}

fn encode(words: &[&str], to: StreamAddress, wire: &mut Vec<u8>) {
    let key = words.get(2).copied().unwrap_or("key").as_bytes();
    let seqno = || Seqno(number(words[1]));
    let encoded = match words[0] {
        "MARK" | "MARK2" => marker(words).encode(to, wire),
        "MUT" => {
            let value = words.get(3).copied().unwrap_or("value").as_bytes();
            Mutation { seqno: seqno(), key, value, ..Default::default() }.encode(to, wire)
        }
        "DEL" => Deletion { seqno: seqno(), key, ..Default::default() }.encode(to, wire),
        "DEL2" => {
            let delete_time = Some(5);
            Deletion { seqno: seqno(), key, delete_time, ..Default::default() }.encode(to, wire)
        }
        "EXP" => Expiration { seqno: seqno(), key, ..Default::default() }.encode(to, wire),
        "SYS" => {
            let id = SystemEventId::BEGIN_COLLECTION;
            SystemEvent { seqno: seqno(), id, version: 0, key, value: &[0; 16] }.encode(to, wire)
        }
        "ADV" => SeqnoAdvanced { seqno: seqno() }.encode(to, wire),
        "OSO" if words[1] == "1" => OsoSnapshot::Start.encode(to, wire),
        "OSO" => OsoSnapshot::End.encode(to, wire),
        "END" => {
            let reason = StreamEndReason(u32::try_from(number(words[1])).expect("a reason"));
            StreamEnd { reason }.encode(to, wire)
        }
        "NOOP" => Frame::request(Opcode::DCP_NOOP).encode(wire),
        word => panic!("no step is called {word}"),
    };
    encoded.expect("it fits");
}

/// `MARK a-b`, or `MARK2 a-b` and optionally max visible, purge and high prepared seqno.
fn marker(words: &[&str]) -> SnapshotMarker {
    let (start, end) = words[1].split_once('-').expect("a range");
    let (start, end) = (Seqno(number(start)), Seqno(number(end)));
    let further: Vec<Seqno> = words[2..].iter().map(|word| Seqno(number(word))).collect();
    let marker = SnapshotMarker::new(start, end, SnapshotFlags::DISK);
    SnapshotMarker {
        max_visible_seqno: further.first().copied(),
        purge_seqno: further.get(1).copied(),
        high_prepared_seqno: further.get(2).copied(),
        ..marker
    }
}

/// Bytes of hexadecimal digits; `61*250` is 250 of the last one.
fn hex(digits: &str) -> Vec<u8> {
    let (digits, times) = digits.split_once('*').unwrap_or((digits, "1"));
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16).expect("hexadecimal digits");
    let mut bytes: Vec<u8> = (0..digits.len()).step_by(2).map(byte).collect();
    if let Some(&last) = bytes.last() {
        bytes.extend((1..number(times)).map(|_| last));
    }
    bytes
}

fn number(word: &str) -> u64 {
    word.parse().expect("a number")
}

/// The branch a row calls by name.
pub(crate) fn branch(name: &str) -> u64 {
    match name {
        "0" => 0,
        _ => name.bytes().fold(7, |hash, byte| hash << 8 | u64::from(byte)),
    }
}

fn log(entries: Option<&Value>) -> Vec<FailoverEntry> {
    let one = [Value::from(vec![Value::from("I"), Value::from(0)])];
    let entries = entries.and_then(Value::as_array).map_or(&one[..], Vec::as_slice);
    let entry = |entry: &Value| FailoverEntry {
        vbuuid: Vbuuid(branch(entry[0].as_str().expect("a branch"))),
        seqno: Seqno(entry[1].as_u64().expect("a seqno")),
    };
    entries.iter().map(entry).collect()
}

fn machine(now: Instant, collections: bool) -> Connection {
    let config = ConnectionConfig {
        num_vbuckets: 16,
        collections,
        window: 0,
        noop_interval: Some(Duration::from_secs(20)),
        filter: StreamFilter::All,
        purge_seqno: true,
        on_rollback: OnRollback::Emit,
        delivery: Delivery::default(),
        max_body_len: MAX_BODY_LEN,
    };
    Connection::new(config, now)
}

#[expect(clippy::disallowed_methods, reason = "some moment to count from")]
fn start() -> Instant {
    Instant::now()
}
