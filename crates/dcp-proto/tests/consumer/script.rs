//! A consumer's connection, driven by the words of a row.

use std::time::Duration;

use dcp_proto::Position;
use dcp_proto::consumer::{Connection, ConnectionConfig, Event, StreamPosition};
use dcp_test::harness::{Harness, Item, Request, Sent, VB, config, position};
use dcp_test::packet::encoded;
use dcp_test::words::{message, number};
use dcp_wire::message::{Mutation, StreamAddress};
use dcp_wire::{Frame, Opaque, Opcode, Seqno, Status, Vbid};
use serde_json::Value;

/// A consumer's connection with the stream of one vBucket.
pub(crate) struct Script {
    server: Harness,
    end: Seqno,
    requested: Option<Request>,
    position: Option<Position>,
    counted: u64,
    ended: Option<String>,
    answers: u64,
    maps: u64,
}

impl Script {
    /// With the stream the row asks for; accepted by the server unless the row says otherwise.
    pub(crate) fn open(row: &Value) -> Self {
        let collections = row["collections"].as_bool().unwrap_or_default();
        let mut script = Self {
            server: Harness::new(ConnectionConfig { collections, ..config() }),
            end: row["end"].as_u64().map_or(Seqno::MAX, Seqno),
            requested: None,
            position: None,
            counted: 0,
            ended: None,
            answers: 0,
            maps: 0,
        };
        let own = entries(row.get("log"));
        let start = row["position"].as_array().map_or(Position::EARLIEST, |numbers| {
            let number = |at: usize| numbers[at].as_u64().expect("a seqno");
            position(number(0), (number(1), number(2)), &own)
        });
        script.request(StreamPosition::new(start));
        if row["opened"].as_bool() != Some(false) {
            script.server.accept(&row.get("opens").map_or(own, |opens| entries(Some(opens))));
        }
        script
    }

    fn request(&mut self, resume: StreamPosition) {
        self.server.machine.open_stream(VB, self.end, resume).expect("no stream yet");
        self.take_sent();
    }

    /// Does what a step of a row says.
    pub(crate) fn step(&mut self, step: &str) -> Result<(), String> {
        let words: Vec<&str> = step.split(' ').collect();
        let to = self.server.to();
        let wire = match words[..] {
            ["LOST"] => {
                let next = Connection::new(config(), self.server.now);
                let old = std::mem::replace(&mut self.server.machine, next);
                let (_, resume) = old.into_streams().pop().expect("a stream");
                self.request(resume);
                return Ok(());
            }
            ["WAIT", seconds] => {
                self.server.now += Duration::from_secs(number(seconds));
                let timeout = self.server.machine.handle_timeout(self.server.now);
                return timeout.map_err(|error| error.to_string());
            }
            ["ROLLBACK", to] => self.answer(Status::ROLLBACK, &number(to).to_be_bytes()),
            ["ANSWER", status, len] => {
                let known = Status::KNOWN.iter().find(|known| known.name() == Some(status));
                let len = usize::try_from(number(len)).expect("a length");
                self.answer(*known.expect("a status"), &vec![0; len])
            }
            ["PUSH", map] => {
                let push = Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_key(b"default");
                encoded(&push.with_extras(&[0; 16]).with_value(map.as_bytes()))
            }
            ["MAP"] => encoded(&Frame::response(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS)),
            ["MAP", map] => {
                let answer = Frame::response(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS);
                encoded(&answer.with_value(map.as_bytes()))
            }
            ["KEY", seqno, digits] => {
                let (seqno, key, mut wire) = (Seqno(number(seqno)), hex(digits), Vec::new());
                let mutation = Mutation { seqno, key: &key, ..Default::default() };
                mutation.encode(to, &mut wire).expect("it fits");
                wire
            }
            // A message of which one byte is another.
            ["BYTE", at, byte, ..] => {
                let mut wire = message(&words[3..].join(" "), to);
                wire[usize::try_from(number(at)).expect("a place")] = hex(byte)[0];
                wire
            }
            // A message without its last bytes, and lengths that say so.
            ["SHORT", bytes, ..] => {
                let mut wire = message(&words[2..].join(" "), to);
                let bytes = u8::try_from(number(bytes)).expect("a few");
                wire.truncate(wire.len() - usize::from(bytes));
                wire[4] -= bytes;
                wire[11] -= bytes;
                wire
            }
            ["STALE", ..] => {
                message(&words[1..].join(" "), StreamAddress { opaque: Opaque(0xdead), ..to })
            }
            ["OTHER", ..] => {
                message(&words[1..].join(" "), StreamAddress { vbid: Vbid(VB.0 + 1), ..to })
            }
            _ => message(step, to),
        };
        self.server.wire.extend(wire);
        self.play()
    }

    fn answer(&self, status: Status, value: &[u8]) -> Vec<u8> {
        let answer = Frame::response(Opcode::DCP_STREAM_REQ, status);
        encoded(&answer.with_opaque(self.server.opaque).with_value(value))
    }

    fn play(&mut self) -> Result<(), String> {
        self.server.try_play().map_err(|error| error.to_string())?;
        self.counted += self.server.machine.take_held();
        self.position = self.server.moved().or(self.position.take());
        for event in self.server.events() {
            match event {
                Event::StreamEnded { cause, .. } => {
                    assert!(self.ended.is_none(), "a stream ends once");
                    self.ended = Some(cause.to_string());
                }
                Event::ClusterMap(_) => self.maps += 1,
                _ => {}
            }
        }
        self.take_sent();
        Ok(())
    }

    fn take_sent(&mut self) {
        for sent in self.server.sent() {
            match sent {
                Sent::Response { .. } => self.answers += 1,
                Sent::StreamRequest(request) => {
                    self.server.opaque = request.opaque;
                    self.requested = Some(request);
                }
                _ => {}
            }
        }
    }

    /// What the sink was given; of a rollback the restart point.
    pub(crate) fn delivered(&self) -> Vec<u64> {
        self.server.seqnos()
    }

    /// Changes with the snapshots they were delivered in, and whether that had history.
    pub(crate) fn changes(&self) -> Vec<(u64, (u64, u64), bool)> {
        let sink = &self.server.sink;
        let changes = sink.items.iter().filter_map(|item| match *item {
            Item::Change { seqno, snapshot, .. } => Some((seqno, snapshot)),
            _ => None,
        });
        changes.map(|(seqno, at)| (seqno, at, sink.history.contains(&seqno))).collect()
    }

    /// Seqno and snapshot the stream stands at.
    pub(crate) fn position(&self) -> Vec<u64> {
        let at = self.position.as_ref().unwrap_or(&Position::EARLIEST);
        vec![at.seqno.0, at.snapshot.start.0, at.snapshot.end.0]
    }

    /// The collections manifest that the stream has reached.
    pub(crate) fn manifest(&self) -> u64 {
        self.position.as_ref().map_or(0, |at| at.manifest_uid.0)
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
    pub(crate) fn requested(&self) -> Option<(u64, (u64, u64), u64)> {
        self.requested.as_ref().map(|request| (request.start, request.snapshot, request.vbuuid))
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

/// The branch a row calls by name.
pub(crate) fn branch(name: &str) -> u64 {
    match name {
        "0" => 0,
        _ => name.bytes().fold(7, |hash, byte| hash << 8 | u64::from(byte)),
    }
}

fn entries(log: Option<&Value>) -> Vec<(u64, u64)> {
    let Some(log) = log.and_then(Value::as_array) else { return vec![(branch("I"), 0)] };
    let entry = |entry: &Value| {
        (branch(entry[0].as_str().expect("a branch")), entry[1].as_u64().expect("a seqno"))
    };
    log.iter().map(entry).collect()
}
