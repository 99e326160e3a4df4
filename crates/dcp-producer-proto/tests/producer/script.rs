//! Scenarios as data: a vBucket, a connection, and what is said on it step by step.
//!
//! A scenario names what the vBucket holds (`disk`, `memory`), how the connection was opened
//! (`collections`, `flags`, `controls`) and its first stream request (`request`). Its steps are
//! lists of messages the client must have received by then, and actions in between. Items and
//! messages are words: `1-3` are three documents, `4@9` is one of collection 9, `DEL 5` removes
//! one, `BEGIN 2@9` creates a collection; `MUT 1-3` are three mutations.

use core::time::Duration;
use std::sync::Arc;

use bytes::Bytes;
use dcp_producer_proto::{
    Connection, ConnectionConfig, Disconnect, Features, Item, ItemKind, MemoryPressure,
    OsoBackfill, StuckClients, VBucketState,
};
use dcp_test::conformance::{Outcome, note};
use dcp_wire::message::{
    DurabilityLevel, OpenFlags, StreamEndReason, StreamRequest, StreamRequestFlags, SystemEventId,
};
use dcp_wire::{Datatype, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};
use serde_json::Value;

use crate::client::{COLLECTIONS, Client, LEGACY, from_scratch};
use crate::rows::version;
use dcp_test::bucket::{Bucket, VBucket, doc, event};

/// Plays every scenario of `rows` whose row is `id`, with or without words after it.
pub(crate) fn play(rows: &str, id: &str) {
    let rows: Vec<Value> = serde_json::from_str(rows).expect("rows");
    let is_meant = |row: &&Value| {
        let name = row["row"].as_str().expect("a name");
        name == id || name.strip_prefix(id).is_some_and(|rest| rest.starts_with(' '))
    };
    let mut scenarios = rows.iter().filter(is_meant).peekable();
    assert!(scenarios.peek().is_some(), "no row {id}");
    for scenario in scenarios {
        Script::new(scenario).play();
    }
    note("producer", id, Outcome::Held);
}

/// The ids of the rows of a file that are scenarios.
pub(crate) fn ids(rows: &str) -> Vec<String> {
    let rows: Vec<Value> = serde_json::from_str(rows).expect("rows");
    let id = |row: &Value| row["row"].as_str().unwrap().split(' ').next().unwrap().to_owned();
    let mut ids: Vec<_> = rows.iter().map(id).collect();
    ids.dedup();
    ids
}

/// Makes a test of each row of a file, and one that no row lacks a test.
macro_rules! rows {
    ($module:ident, $file:literal: $($row:ident)*) => {
        mod $module {
            const ROWS: &str = include_str!(concat!("../../../../tests/rows/", $file));

            $(#[test]
            fn $row() {
                let id = stringify!($row).to_uppercase().replace('_', "-");
                $crate::script::play(ROWS, &id);
            })*

            #[test]
            fn rows_of_the_file_each_have_a_test() {
                let tests: Vec<_> =
                    [$(stringify!($row)),*].map(|row| row.to_uppercase().replace('_', "-")).into();
                assert_eq!($crate::script::ids(ROWS), tests);
            }
        }
    };
}
pub(crate) use rows;

fn number(value: &Value) -> u64 {
    value.as_u64().unwrap_or_default()
}

fn words(value: &Value) -> impl Iterator<Item = &str> {
    value.as_array().into_iter().flatten().map(|word| word.as_str().expect("words"))
}

fn status(name: &Value) -> Status {
    let name = name.as_str().unwrap_or("SUCCESS");
    *Status::KNOWN.iter().find(|status| status.name() == Some(name)).expect("a known status")
}

fn opcode(name: &str) -> Opcode {
    *Opcode::KNOWN.iter().find(|opcode| opcode.name() == Some(name)).expect("a known opcode")
}

/// `1-3` or `7`.
fn range(text: &str) -> core::ops::RangeInclusive<u64> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    first.parse().expect("a seqno")..=last.parse().expect("a seqno")
}

/// What a word of an item, such as `DEL 5@9 key`, stands for.
fn items(word: &str) -> Vec<Item> {
    let mut parts: Vec<_> = word.split(' ').collect();
    let kind =
        if parts[0].starts_with(|c: char| c.is_ascii_digit()) { "" } else { parts.remove(0) };
    let (seqnos, place) = parts[0].split_once('@').unwrap_or((parts[0], "0"));
    let place: u32 = place.parse().expect("a collection");
    let made = |seqno: u64| {
        let tombstone = |kind| Item {
            kind,
            value: Bytes::new(),
            datatype: Datatype::RAW,
            delete_time: 1,
            ..doc(seqno, place)
        };
        let event = |id, scope, collection| event(seqno, id, scope, collection);
        match kind {
            "" => doc(seqno, place),
            "DEL" => tombstone(ItemKind::Deletion),
            "EXP" => tombstone(ItemKind::Expiration),
            "BEGIN" => event(SystemEventId::BEGIN_COLLECTION, 0, place),
            "MODIFY" => event(SystemEventId::MODIFY_COLLECTION, 0, place),
            "END" => event(SystemEventId::END_COLLECTION, 0, place),
            "PREPARE" => {
                let level = DurabilityLevel::MAJORITY;
                Item { kind: ItemKind::Prepare { level, is_deletion: false }, ..doc(seqno, place) }
            }
            // The write began right before.
            "COMMIT" => {
                let prepared = Seqno(seqno - 1);
                Item {
                    kind: ItemKind::Commit { prepared, is_deletion: false },
                    ..doc(seqno, place)
                }
            }
            "ABORT" => tombstone(ItemKind::Abort { prepared: Seqno(seqno - 1) }),
            "SCOPE" => event(SystemEventId::CREATE_SCOPE, place, 0),
            other => panic!("no such item: {other}"),
        }
    };
    let named = |item: Item| match parts.get(1) {
        Some(key) => Item { key: Bytes::from(key.replace("ff", "\u{ff}")), ..item },
        None => item,
    };
    range(seqnos).map(made).map(named).collect()
}

fn all_items(value: &Value) -> Vec<Item> {
    words(value).flat_map(items).collect()
}

/// The messages a word such as `MUT 1-3` stands for.
fn messages(word: &str) -> Vec<String> {
    let (message, rest) = word.split_once(' ').unwrap_or((word, ""));
    let (seqnos, after) = rest
        .split_once(' ')
        .map_or((rest, String::new()), |(seqnos, after)| (seqnos, format!(" {after}")));
    if message == "MARK" || !seqnos.contains('-') {
        return vec![word.to_owned()];
    }
    range(seqnos).map(|seqno| format!("{message} {seqno}{after}")).collect()
}

struct Script<'a> {
    row: &'a Value,
    client: Client,
}

impl<'a> Script<'a> {
    fn new(row: &'a Value) -> Self {
        let features =
            if row["collections"].as_bool() == Some(true) { COLLECTIONS } else { LEGACY };
        let features = Features { snappy: row["snappy"].as_bool() == Some(true), ..features };
        let mut bucket = Bucket::with(vbucket(row));
        bucket.scopes.insert(8, words(&row["scope 8"]).map(|id| id.parse().unwrap()).collect());
        let mut client = Client::new(bucket, features);
        let mut config =
            ConnectionConfig { oso_backfill: OsoBackfill::Enabled, ..Default::default() };
        match row["oso"].as_str() {
            Some("disabled") => config.oso_backfill = OsoBackfill::Disabled,
            Some("auto") => config.oso_backfill = OsoBackfill::Auto,
            _ => {}
        }
        config.server_version = version(&row["server"]).unwrap_or(config.server_version);
        if let Some(count) = row["oso_max_collections"].as_u64() {
            config.oso_max_collections = count as usize;
        }
        if let Some(name) = row["stuck"]["name"].as_str() {
            let timeout = Duration::from_secs(number(&row["stuck"]["seconds"]));
            config.stuck = Some(StuckClients { name_contains: name.to_owned(), timeout });
        }
        client.connection = Connection::new(config);
        let node = &row["node"];
        client.bucket.node.hidden =
            node["hidden"].as_array().into_iter().flatten().map(|id| number(id) as u32).collect();
        client.bucket.node.is_warming_up = node["warming_up"].as_bool() == Some(true);
        client.bucket.node.may_not_produce = node["may_not_produce"].as_bool() == Some(true);
        client.bucket.node.memory_pressure = match node["memory"].as_str() {
            Some("high") => MemoryPressure::High,
            Some(_) => MemoryPressure::Full,
            None => MemoryPressure::None,
        };
        client.bucket.vb().is_receiving_initial_snapshot = node["initial"].as_bool() == Some(true);
        client.bucket.node.keeps_history = row["history"].as_bool() == Some(true);
        let flags = OpenFlags::from_bits_retain(row["flags"].as_u64().unwrap_or(1) as u32);
        let opened = client.send_open(flags);
        assert_eq!(opened, status(&row["opens"]), "{}", row["row"]);
        if opened != Status::SUCCESS {
            return Self { row, client };
        }
        if row["noop"].as_bool() != Some(false) {
            assert_eq!(client.control("enable_noop", "true"), Status::SUCCESS);
        }
        for control in row["controls"].as_array().into_iter().flatten() {
            let (key, value) = (control[0].as_str().unwrap(), control[1].as_str().unwrap());
            assert_eq!(client.control(key, value), status(&control[2]), "{key}={value}");
        }
        Self { row, client }
    }

    fn play(mut self) {
        let name = self.row["row"].as_str().unwrap_or_default();
        if !self.row["request"].is_null() {
            self.request(&self.row["request"]);
        }
        for step in self.row["steps"].as_array().expect("steps") {
            if step.is_array() {
                let wanted: Vec<_> = words(step).flat_map(messages).collect();
                assert_eq!(self.client.receive(), wanted, "{name}");
                continue;
            }
            for (action, value) in step.as_object().expect("a list or an action") {
                self.act(action, value);
            }
        }
    }

    fn act(&mut self, action: &str, value: &Value) {
        let client = &mut self.client;
        match action {
            "request" => self.request(value),
            "write" => client.write(all_items(value)),
            // What memory held is gone from it, and this is on disk.
            "disk" => {
                let vb = client.bucket.vb();
                let old = core::mem::replace(vb, VBucket::new());
                *vb = VBucket { checkpoints: Vec::new(), ..old.on_disk(all_items(value)) };
                vb.memory_from = vb.high + 1;
                client.connection.notify(Vbid(0));
            }
            // This is all that is on disk.
            "compacted disk" => {
                client.bucket.vb().disk = all_items(value).into_iter().map(Arc::new).collect();
                for item in all_items(value) {
                    client.bucket.vb().write(item);
                }
                let vb = client.bucket.vb();
                vb.checkpoints.clear();
                (vb.persisted, vb.memory_from) = (vb.high, vb.high + 1);
                client.connection.notify(Vbid(0));
            }
            "control" => {
                let (key, text) = (value[0].as_str().unwrap(), value[1].as_str().unwrap());
                assert_eq!(client.control(key, text), status(&value[2]), "{key}={text}");
            }
            "close" => {
                let stream_id = value["sid"].as_u64().map(|id| id as u16);
                assert_eq!(client.close(stream_id), status(&value["status"]));
            }
            "ack" => client.ack(number(value) as u32),
            "unacked" => assert_eq!(client.connection.unacked_bytes(), number(value)),
            "purge" => client.bucket.vb().purge = number(value),
            "fail disk after" => {
                client.bucket.vb().fail_disk_after = Some(number(value) as usize);
            }
            "branch" => {
                client.bucket.vb().table.create_entry(Vbuuid(number(value)), Seqno(0));
                client.connection.notify(Vbid(0));
            }
            "state" => {
                client.bucket.vb().state = state(value);
                client.bucket.vb().incarnation += 1;
                client.connection.notify(Vbid(0));
            }
            "remove vbucket" => {
                client.bucket.vbuckets.clear();
                client.connection.notify(Vbid(0));
            }
            "end streams" => {
                client.connection.end_streams(Vbid(0), StreamEndReason(number(value) as u32));
            }
            "snapshot arrives up to" => {
                client.bucket.vb().open_snapshot_end = Some(number(value));
            }
            "timeout" => {
                let timeout = client.connection.handle_timeout(client.now);
                let is_stuck = matches!(timeout, Err(Disconnect::Stuck(_)));
                assert_eq!(is_stuck, value == "disconnects", "{timeout:?}");
            }
            "timer in seconds" => {
                let timer = client.connection.poll_timeout().map(|timer| timer - client.now);
                assert_eq!(timer, value.as_u64().map(Duration::from_secs));
            }
            "seqno ack" => {
                let acknowledged = client.seqno_ack(Seqno(number(&value["seqno"])));
                let wanted = match value["disconnects"].as_bool() {
                    Some(true) => {
                        Err(Disconnect::AcknowledgedUnsent(Seqno(number(&value["seqno"]))))
                    }
                    _ => Ok(()),
                };
                assert_eq!(acknowledged, wanted);
            }
            "seconds" => client.pass(Duration::from_secs(number(value))),
            "respond" => self.respond(value),
            "lose privileges" => {
                client.bucket.node.hidden =
                    value.as_array().into_iter().flatten().map(|id| number(id) as u32).collect();
            }
            "disk usage" => client.bucket.node.disk_usage_percent = number(value) as u8,
            "is dead" => {
                let is_dead = client.bucket.vb().is_retired.get();
                assert_eq!(is_dead, value.as_bool().unwrap());
            }
            "incarnation" => {
                client.bucket.vb().incarnation = number(value);
                client.connection.notify(Vbid(0));
            }
            "cursor at" => {
                let cursors = client.bucket.vb().cursors.borrow();
                let live = cursors.iter().filter(|cursor| Arc::strong_count(cursor) > 1);
                let positions: Vec<_> = live.map(|cursor| cursor.position().0).collect();
                assert_eq!(positions, [number(value)]);
            }
            "streams" => assert_eq!(client.connection.stream_count() as u64, number(value)),
            other => panic!("no such action: {other}"),
        }
    }

    fn respond(&mut self, value: &Value) {
        let opcode = opcode(value["to"].as_str().expect("an opcode"));
        let status = status(&value["status"]);
        let opaque = value["opaque"].as_u64().map_or(crate::client::OPAQUE, |n| Opaque(n as u32));
        let outcome = self.client.respond(opcode, status, opaque);
        let wanted = match value["disconnects"].as_bool() {
            Some(true) => Err(Disconnect::UnexpectedResponse { opcode, status }),
            _ => Ok(()),
        };
        assert_eq!(outcome, wanted, "{opcode} {status}");
    }

    fn request(&mut self, value: &Value) {
        let text = &value["value"];
        let text = if text.is_object() { text.to_string() } else { String::new() };
        let start = number(&value["start"]);
        let bound = |index: usize| value["snapshot"][index].as_u64().unwrap_or(start);
        let request = StreamRequest {
            flags: StreamRequestFlags::from_bits_retain(number(&value["flags"]) as u32),
            start_seqno: Seqno(start),
            end_seqno: Seqno(value["end"].as_u64().unwrap_or(u64::MAX)),
            snapshot_start: Seqno(bound(0)),
            snapshot_end: Seqno(bound(1)),
            vbuuid: value["vbuuid"].as_u64().map_or(dcp_test::bucket::BRANCH, Vbuuid),
            value: text.as_bytes(),
            ..from_scratch()
        };
        let name = &self.row["row"];
        assert_eq!(self.client.request(&request), status(&value["status"]), "{name}");
    }
}

fn state(value: &Value) -> VBucketState {
    match value.as_str() {
        Some("replica") => VBucketState::Replica,
        Some("pending") => VBucketState::Pending,
        Some("dead") => VBucketState::Dead,
        _ => VBucketState::Active,
    }
}

fn vbucket(row: &Value) -> VBucket {
    let mut vbucket = VBucket::new();
    for (id, high) in row["known"].as_object().into_iter().flatten() {
        vbucket = vbucket.with_collection(id.parse().expect("a collection"), number(high));
    }
    vbucket = vbucket.on_disk(all_items(&row["disk"]));
    for checkpoint in row["memory"].as_array().into_iter().flatten() {
        let start = number(&checkpoint["start"]);
        vbucket = vbucket.checkpoint(start, all_items(&checkpoint["items"]));
    }
    vbucket.memory_from = row["memory_from"].as_u64().unwrap_or(vbucket.memory_from);
    vbucket.persisted = row["persisted"].as_u64().unwrap_or(vbucket.persisted);
    vbucket.purge = number(&row["purge"]);
    vbucket.history_start = row["history_start"].as_u64();
    (vbucket.completed, vbucket.prepared) = (number(&row["completed"]), number(&row["prepared"]));
    vbucket.open_snapshot_end = row["open_snapshot_end"].as_u64();
    vbucket.is_ephemeral = row["ephemeral"].as_bool() == Some(true);
    vbucket.state = state(&row["state"]);
    vbucket
}
