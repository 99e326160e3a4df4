//! A consumer's connection, driven by the words of a row.

use std::time::Duration;

use dcp_proto::Position;
use dcp_proto::consumer::{
    Connection, ConnectionConfig, EndCause, Event, OpenStreamError, StreamFilter, StreamPosition,
};
use dcp_test::harness::{Document, Harness, Request, Sent, Told, VB, config, log, position};
use dcp_test::packet::encoded;
use dcp_test::words::{message, number};
use dcp_wire::message::{Deletion, Expiration, Mutation, StreamAddress, encode_failover_log};
use dcp_wire::{
    CollectionId, Datatype, Frame, ManifestUid, Opaque, Opcode, ScopeId, Seqno, Status, Vbid,
};
use serde_json::Value;

/// Opaque of a request for the vBucket that another one has replaced.
const STALE: Opaque = Opaque(0xdead << 16 | VB.0 as u32);

/// A consumer's connection with the stream of one vBucket.
pub(crate) struct Script {
    server: Harness,
    config: ConnectionConfig,
    end: Seqno,
    requested: Option<Request>,
    sent: Vec<String>,
    position: Option<Position>,
    counted: u64,
    ended: Option<EndCause>,
    again: Option<StreamPosition>,
    maps: u64,
}

impl Script {
    /// With the stream the row asks for; accepted by the server unless the row says otherwise.
    pub(crate) fn open(row: &Value) -> Self {
        let config = config_of(row);
        let mut script = Self {
            server: Harness::new(config.clone()),
            config,
            end: row["end"].as_u64().map_or(Seqno::MAX, Seqno),
            requested: None,
            sent: Vec::new(),
            position: None,
            counted: 0,
            ended: None,
            again: None,
            maps: 0,
        };
        let own = entries(row.get("log"));
        let mut from = row["position"].as_array().map_or(Position::EARLIEST, |numbers| {
            let number = |at: usize| numbers[at].as_u64().expect("a seqno");
            position(number(0), (number(1), number(2)), &own)
        });
        from.manifest_uid = ManifestUid(row["uid"].as_u64().unwrap_or_default());
        from.purge_seqno = Seqno(row["purge"].as_u64().unwrap_or_default());
        script.request(StreamPosition::new(from));
        script.sent.clear();
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
                let next = Connection::new(self.config.clone(), self.server.now);
                let old = std::mem::replace(&mut self.server.machine, next);
                let (_, resume) = old.into_streams().pop().expect("a stream");
                self.request(resume);
                return Ok(());
            }
            ["WAIT", seconds] => {
                self.server.now += Duration::from_secs(number(seconds));
                let timeout = self.server.machine.handle_timeout(self.server.now);
                self.take_sent();
                return timeout.map_err(|error| error.to_string());
            }
            ["RELEASE", bytes] => {
                self.server.machine.release(self.server.now, number(bytes));
                self.take_sent();
                return Ok(());
            }
            ["CLOSE"] => {
                self.server.machine.close_stream(self.server.now, VB);
                Vec::new()
            }
            ["AGAIN"] => {
                let resume = self.again.take().ok_or("the stream has not ended")?;
                self.ended = None;
                self.request(resume);
                return Ok(());
            }
            ["CLOSED", name] => {
                let answer = Frame::response(Opcode::DCP_CLOSE_STREAM, status(name));
                encoded(&answer.with_opaque(self.server.opaque))
            }
            ["ACCEPT", ..] => accepted(self.server.opaque, &words[1..]),
            ["STALE", "ACCEPT", ..] => accepted(STALE, &words[2..]),
            ["REFUSE", name] => self.answer(status(name), b""),
            ["REFUSE", name, body] => self.answer(status(name), body.as_bytes()),
            // A packet as it is, but for the opaque.
            ["BYTES", digits] => {
                let mut wire = hex(digits);
                wire[12..16].copy_from_slice(&self.server.opaque.0.to_be_bytes());
                wire
            }
            ["NOOP", opaque] => {
                let opaque = Opaque(u32::try_from(number(opaque)).expect("an opaque"));
                encoded(&Frame::request(Opcode::DCP_NOOP).with_opaque(opaque))
            }
            ["LARGE", at, bytes] => {
                let value = vec![b'x'; usize::try_from(number(bytes)).expect("a size")];
                let (seqno, mut wire) = (Seqno(number(at)), Vec::new());
                let mutation = Mutation { seqno, key: b"key", value: &value, ..Default::default() };
                mutation.encode(to, &mut wire).expect("it fits");
                wire
            }
            ["DOC", what, at, datatype, digits] => document(what, at, datatype, &hex(digits), to),
            ["ROLLBACK", to] => self.answer(Status::ROLLBACK, &number(to).to_be_bytes()),
            ["ANSWER", status, len] => {
                let len = usize::try_from(number(len)).expect("a length");
                self.answer(self::status(status), &vec![0; len])
            }
            ["PUSH", map] => {
                let push = Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_key(b"default");
                encoded(&push.with_extras(&[0; 16]).with_value(map.as_bytes()))
            }
            ["MAP", ..] => {
                self.server.machine.request_cluster_map();
                let asked = self.server.packets();
                let answer = Frame::response(Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS);
                let answer = answer.with_opaque(asked[0].opaque());
                encoded(&answer.with_value(words[1..].concat().as_bytes()))
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
            ["STALE", ..] => message(&words[1..].join(" "), StreamAddress { opaque: STALE, ..to }),
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
                Event::StreamEnded { cause, from, .. } => {
                    assert!(self.ended.is_none(), "a stream ends once");
                    self.ended = Some(cause);
                    self.again = Some(*from);
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
            self.sent.push(match &sent {
                Sent::Response { opcode, opaque, status } => {
                    format!("ANSWER {opcode} {} {status}", opaque.0)
                }
                Sent::StreamRequest(request) => {
                    let (from, to) = request.snapshot;
                    format!("REQUEST {} [{from}-{to}]", request.start)
                }
                Sent::Close(_) => "CLOSE".to_owned(),
                Sent::Ack(bytes) => format!("ACK {bytes}"),
                other => format!("{other:?}"),
            });
            if let Sent::StreamRequest(request) = sent {
                self.server.opaque = request.opaque;
                self.requested = Some(request);
            }
        }
    }

    /// What was sent since the first stream request.
    pub(crate) fn sent(&self) -> &[String] {
        &self.sent
    }

    /// Bytes that are not acknowledged, and whether the window is full of them.
    pub(crate) fn unacknowledged(&self) -> (u64, bool) {
        (self.server.machine.unacknowledged(), self.server.machine.is_window_full())
    }

    /// The documents the sink was given.
    pub(crate) fn documents(&self) -> &[Document] {
        &self.server.sink.documents
    }

    /// The system events the sink was given.
    pub(crate) fn told(&self) -> &[Told] {
        &self.server.sink.told
    }

    /// What the sink was given; of a rollback the restart point.
    pub(crate) fn delivered(&self) -> Vec<u64> {
        self.server.seqnos()
    }

    /// Seqno and snapshot the stream stands at.
    pub(crate) fn position(&self) -> Vec<u64> {
        let at = self.position.as_ref().unwrap_or(&Position::EARLIEST);
        vec![at.seqno.0, at.snapshot.start.0, at.snapshot.end.0]
    }

    /// The purge seqno that goes with it.
    pub(crate) fn purge_seqno(&self) -> u64 {
        self.position.as_ref().map_or(0, |at| at.purge_seqno.0)
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
    pub(crate) fn answers(&self) -> usize {
        self.sent.iter().filter(|sent| sent.starts_with("ANSWER")).count()
    }

    /// Cluster maps there were.
    pub(crate) const fn maps(&self) -> u64 {
        self.maps
    }

    /// Why the stream has ended.
    pub(crate) fn end(&self) -> Option<String> {
        self.ended.as_ref().map(ToString::to_string)
    }

    /// The collections manifest that a refusal names.
    pub(crate) const fn refused_for(&self) -> Option<u64> {
        match self.ended {
            Some(EndCause::Refused(OpenStreamError::Refused {
                manifest_uid: Some(uid), ..
            })) => Some(uid.0),
            _ => None,
        }
    }

    /// The newest stream request.
    pub(crate) const fn requested(&self) -> &Request {
        self.requested.as_ref().expect("a stream request")
    }
}

/// The connection a row needs.
fn config_of(row: &Value) -> ConnectionConfig {
    let ids = |list: &Value| -> Vec<CollectionId> {
        let ids = list.as_array().into_iter().flatten();
        ids.map(|id| CollectionId(hex_number(id))).collect()
    };
    let filter = match row["filter"].as_str().map(|json| serde_json::from_str(json).expect("JSON"))
    {
        None => StreamFilter::All,
        Some(Value::Object(filter)) if filter.contains_key("scope") => {
            StreamFilter::Scope(ScopeId(hex_number(&filter["scope"])))
        }
        Some(filter) => StreamFilter::Collections(ids(&filter["collections"])),
    };
    let noops = config().noop_interval.filter(|_| row["noops"] != false);
    ConnectionConfig {
        collections: row["collections"] == true,
        filter,
        window: row["window"].as_u64().map_or(0, |size| u32::try_from(size).expect("a size")),
        noop_interval: noops,
        ..config()
    }
}

fn hex_number(digits: &Value) -> u32 {
    u32::from_str_radix(digits.as_str().expect("digits"), 16).expect("an id")
}

/// The status a row calls by name.
fn status(name: &str) -> Status {
    let known = Status::KNOWN.iter().find(|known| known.name() == Some(name));
    *known.unwrap_or_else(|| panic!("no status {name}"))
}

/// The answer to a stream request that has the log `W:50 I:0`.
fn accepted(opaque: Opaque, entries: &[&str]) -> Vec<u8> {
    let entry = |entry: &&str| {
        let (name, seqno) = entry.split_once(':').expect("a branch and a seqno");
        (branch(name), number(seqno))
    };
    let entries: Vec<(u64, u64)> = entries.iter().map(entry).collect();
    let mut value = Vec::new();
    encode_failover_log(log(&entries).entries().iter().copied(), &mut value);
    let answer = Frame::response(Opcode::DCP_STREAM_REQ, Status::SUCCESS);
    encoded(&answer.with_opaque(opaque).with_value(&value))
}

/// A document with any value.
fn document(what: &str, at: &str, datatype: &str, value: &[u8], to: StreamAddress) -> Vec<u8> {
    let (seqno, key, datatype) = (Seqno(number(at)), &b"key"[..], Datatype(hex(datatype)[0]));
    let mut wire = Vec::new();
    match what {
        "MUT" => {
            Mutation { seqno, key, value, datatype, ..Default::default() }.encode(to, &mut wire)
        }
        "DEL" => {
            Deletion { seqno, key, value, datatype, ..Default::default() }.encode(to, &mut wire)
        }
        _ => Expiration { seqno, key, value, datatype, ..Default::default() }.encode(to, &mut wire),
    }
    .expect("it fits");
    wire
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

/// The name of a branch.
pub(crate) fn name_of(vbuuid: u64) -> String {
    let bytes = vbuuid.to_be_bytes();
    let name = bytes.iter().skip_while(|&&byte| byte == 0).skip(1);
    name.map(|&byte| char::from(byte)).collect()
}

pub(crate) fn entries(log: Option<&Value>) -> Vec<(u64, u64)> {
    let Some(log) = log.and_then(Value::as_array) else { return vec![(branch("I"), 0)] };
    let entry = |entry: &Value| {
        (branch(entry[0].as_str().expect("a branch")), entry[1].as_u64().expect("a seqno"))
    };
    log.iter().map(entry).collect()
}
