//! What a producer sends in its own rows, as a consumer takes it. Each message says what must come of
//! it: a document or an event in full, the snapshot and branch it is in, where the stream stands and
//! goes on, what counts towards the window, why the stream ends, and that nothing is sent back.

use dcp_proto::Op;
use dcp_test::harness::{Document, Told};
use dcp_test::words::number;
use dcp_wire::message::{SnapshotFlags, StreamEndReason, StreamRequestFlags, SystemEvent};
use dcp_wire::{Seqno, message::SystemEventId};
use serde_json::{Value, json};

use crate::script::{Script, branch};

/// What a row may send: which of its members says that the client has collections, and the rows.
const TABLES: [(&str, &str); 4] = [
    ("legacy", include_str!("../../../../tests/rows/collections.json")),
    ("collections", include_str!("../../../../tests/rows/oso.json")),
    ("collections", include_str!("../../../../tests/rows/snapshots.json")),
    ("collections", include_str!("../../../../tests/rows/stream_end.json")),
];

/// Messages that come only to who has asked for what this consumer never does: stream ids and
/// synchronous replication.
const UNASKED: [&str; 4] = [" sid ", "PREPARE", "COMMIT", "ABORT"];

/// Steps of a row that are about more than what is sent: those rows are in `consumer.json`.
const MORE: [&str; 2] = ["close", "seconds"];

/// Flag of a request for a take-over.
const TAKEOVER: u64 = 1;

/// The rows, with what is sent in each; none of those that send something unasked for.
pub(crate) fn rows() -> Vec<(String, Value)> {
    let mut found = Vec::new();
    for (says_collections, table) in TABLES {
        let rows: Vec<Value> = serde_json::from_str(table).expect("rows");
        for row in rows {
            let sent = sent(&row);
            let is_unasked = |message: &String| UNASKED.iter().any(|word| message.contains(word));
            if sent.is_empty() || sent.iter().any(is_unasked) || is_about_more(&row) {
                continue;
            }
            let collections = match says_collections {
                "legacy" => row["legacy"] != true,
                _ => row["collections"] == true,
            };
            let name = row["row"].as_str().expect("a name").to_owned();
            found.push((name, script(&row, &sent, collections)));
        }
    }
    found
}

fn is_about_more(row: &Value) -> bool {
    let mut steps = row["steps"].as_array().into_iter().flatten();
    row["request"]["flags"] == TAKEOVER
        || steps.any(|step| MORE.iter().any(|more| step.get(more).is_some()))
}

/// All messages of a row, in order.
fn sent(row: &Value) -> Vec<String> {
    let then = row["then"].as_array().into_iter().flatten().map(|then| &then["expect"]);
    let steps = row["steps"].as_array().into_iter().flatten();
    let lists = std::iter::once(&row["expect"]).chain(then).chain(steps);
    let texts = lists.filter_map(Value::as_array).flatten();
    texts.filter_map(Value::as_str).map(ToOwned::to_owned).collect()
}

/// The row as one of a consumer: what it asks for, where it starts, what it is sent.
fn script(row: &Value, sent: &[String], collections: bool) -> Value {
    let request = if row["request"].is_object() { &row["request"] } else { row };
    let start = request["start"].as_u64().unwrap_or_default();
    let bound = |at: usize| request["snapshot"][at].as_u64().unwrap_or(start);
    let controls = row["controls"].as_array().into_iter().flatten();
    let flatbuffers = controls.clone().any(|control| control[0] == "flatbuffers_system_events");
    let mut script = json!({ "collections": collections });
    let filter = match (&row["filter"], &request["value"]) {
        (Value::String(filter), _) => Some(filter.clone()),
        (_, value) if value.is_object() => Some(value.to_string()),
        _ => None,
    };
    let of = if collections { Some(first_collection(filter.as_deref())) } else { None };
    let steps: Vec<String> = sent.iter().flat_map(|text| steps(text, of, flatbuffers)).collect();
    script["steps"] = steps.into();
    script["filter"] = filter.into();
    if start > 0 {
        script["position"] = json!([start, bound(0), bound(1)]);
    }
    if let Some(end) = request["end"].as_u64() {
        script["end"] = end.into();
    }
    script
}

/// The collection that documents of a filtered stream are given: one of the filter's.
fn first_collection(filter: Option<&str>) -> char {
    let filter: Value =
        filter.map_or(Value::Null, |json| serde_json::from_str(json).expect("JSON"));
    let id = filter["collections"][0].as_str().unwrap_or("0");
    char::from(u8::from_str_radix(id, 16).expect("an id of one byte"))
}

/// A message as steps of a script: of several one after the other. Keys begin with their collection,
/// if there are any, and events have the form the client has asked for.
fn steps(message: &str, of: Option<char>, flatbuffers: bool) -> Vec<String> {
    let collection = of.map_or(String::new(), String::from);
    let words: Vec<&str> = message.split(' ').collect();
    let (what, at) = (words[0], words[1]);
    let seqnos = match at.split_once('-') {
        Some((first, last)) if what != "MARK" => number(first)..=number(last),
        _ => return vec![complete(message, &collection, flatbuffers)],
    };
    seqnos.map(|seqno| complete(&format!("{what} {seqno}"), &collection, flatbuffers)).collect()
}

fn complete(message: &str, collection: &str, flatbuffers: bool) -> String {
    match message.split(' ').collect::<Vec<_>>()[..] {
        [what @ ("MUT" | "DEL" | "EXP"), at] => format!("{what} {at} {collection}key"),
        ["SYS", at] if flatbuffers => format!("SYS {at} begin 9 v2 key=c9 uid={at}"),
        ["SYS", at] => format!("SYS {at} begin 9 v0 key=c9 uid={at}"),
        ["SYS", _, "begin" | "scope", id] if flatbuffers => format!("{message} v2 key=c{id} uid=1"),
        ["SYS", _, "begin" | "scope", id] => format!("{message} v0 key=c{id} uid=1"),
        ["SYS", _, _, _] if flatbuffers => format!("{message} v2 uid=1"),
        ["SYS", _, _, _] => format!("{message} v0 uid=1"),
        _ => message.to_owned(),
    }
}

/// What has come of the messages so far.
#[derive(Default)]
struct Wanted {
    documents: Vec<Document>,
    events: Vec<(String, u64)>,
    /// Where the stream stands: seqno, snapshot, purge seqno, manifest.
    at: u64,
    snapshot: (u64, u64),
    purge_seqno: u64,
    manifest: u64,
    /// The last marker, until an item has come in it.
    marker: Option<(u64, u64)>,
    marker_purge: Option<u64>,
    history: bool,
    /// Highest seqno of a snapshot in the order of keys.
    highest: Option<u64>,
    counted: u64,
    end: Option<String>,
}

impl Wanted {
    /// An item has come.
    fn item(&mut self, seqno: u64) {
        if let Some(highest) = &mut self.highest {
            *highest = seqno.max(*highest);
            return;
        }
        self.snapshot = self.marker.take().unwrap_or(self.snapshot);
        self.purge_seqno = self.marker_purge.take().unwrap_or(self.purge_seqno);
        self.at = seqno;
    }

    fn take(&mut self, step: &str, asked_end: Option<u64>) {
        let words: Vec<&str> = step.split(' ').collect();
        let named = |name: &str| words.iter().find_map(|word| word.strip_prefix(name));
        match words[..] {
            ["MARK", range, flags, ..] => {
                let (first, last) =
                    range.trim_matches(['[', ']']).split_once('-').expect("a range");
                self.marker = Some((number(first), number(last)));
                let pair = words[3..].chunks(2).find(|pair| pair[0] == "purge");
                self.marker_purge = pair.map(|pair| number(pair[1]));
                self.history = number(flags) & u64::from(SnapshotFlags::HISTORY.bits()) != 0;
                self.counted += if self.marker_purge.is_some() { 77 } else { 44 };
            }
            [what @ ("MUT" | "DEL" | "EXP"), at, key] => {
                let seqno = number(at);
                self.item(seqno);
                self.document(what, seqno, key.as_bytes());
            }
            ["SYS", at, ..] => {
                self.item(number(at));
                self.manifest = named("uid=").map_or(0, number);
                self.events.push((step.to_owned(), number(at)));
            }
            ["ADV", at] => {
                self.item(number(at));
                self.counted += 32;
            }
            ["OSO", "start"] => (self.highest, self.counted) = (Some(self.at), self.counted + 28),
            ["OSO", _] => {
                self.at = self.highest.take().expect("it began");
                (self.snapshot, self.marker) = ((self.at, self.at), None);
                self.counted += 28;
            }
            ["END", reason] => {
                self.counted += 28;
                let reason = StreamEndReason(u32::try_from(number(reason)).expect("a reason"));
                self.end = Some(match asked_end {
                    Some(_) if reason == StreamEndReason::OK => "its end was reached".to_owned(),
                    _ => format!("the server ended it ({reason})"),
                });
            }
            _ => panic!("no message of a row: {step}"),
        }
    }

    fn document(&mut self, what: &str, seqno: u64, key: &[u8]) {
        let (op, fixed, value) = match what {
            "MUT" => (Op::Mutation, 55, &b"value"[..]),
            "DEL" => (Op::Deletion, 42, &b""[..]),
            _ => (Op::Expiration, 44, &b""[..]),
        };
        self.counted += fixed + (key.len() + value.len()) as u64;
        let (collection, key) = key.split_at(key.len() - b"key".len());
        let in_key_order = (self.at, seqno);
        self.documents.push(Document {
            op,
            seqno,
            vbuuid: branch("I"),
            snapshot: if self.highest.is_some() { in_key_order } else { self.snapshot },
            history: self.history && self.highest.is_none(),
            collection: collection.first().map_or(0, |&id| id.into()),
            key: key.to_vec(),
            value: value.to_vec(),
            datatype: 0,
        });
    }
}

/// Whether an event was told as its words say; its length on the wire.
fn check_event(words: &str, told: &Told) -> Result<u64, String> {
    let words: Vec<&str> = words.split(' ').collect();
    let named = |name: &str| words.iter().find_map(|word| word.strip_prefix(name));
    let id = match words[2] {
        "begin" => SystemEventId::BEGIN_COLLECTION,
        "end" => SystemEventId::END_COLLECTION,
        "modify" => SystemEventId::MODIFY_COLLECTION,
        "scope" => SystemEventId::CREATE_SCOPE,
        _ => SystemEventId::DROP_SCOPE,
    };
    let version = ["v0", "v1", "v2"].iter().position(|version| words.contains(version));
    let event = SystemEvent {
        seqno: Seqno(told.seqno),
        id: SystemEventId(told.id),
        version: told.version,
        key: &told.key,
        value: &told.value,
    };
    let payload = event.payload().map_err(|error| error.to_string())?.ok_or("no payload")?;
    let of_scope = words[2].ends_with("scope");
    let about = match payload.collection_id {
        Some(collection) => (false, collection.0),
        None => (true, payload.scope_id.0),
    };
    let uid = payload.manifest_uid.0;
    let wanted_about = (of_scope, u32::from_str_radix(words[3], 16).expect("an id"));
    let got = (told.id, Some(usize::from(told.version)), &told.key[..], uid, about);
    let key = named("key=").unwrap_or_default().as_bytes();
    let wanted = (id.0, version, key, named("uid=").map_or(0, number), wanted_about);
    if got != wanted {
        return Err(format!("{words:?} was told as {got:?}"));
    }
    let (ttl, flush) = (payload.max_ttl.map(u64::from), payload.flush_uid.0);
    if (ttl, flush) != (named("ttl=").map(number), named("flush=").map_or(0, number)) {
        return Err(format!("{words:?} was told with ttl {ttl:?} and flush {flush}"));
    }
    match named("len=").map(number) {
        Some(len) if len != told.value.len() as u64 => Err(format!("{words:?}: {told:?}")),
        _ => Ok((37 + told.key.len() + told.value.len()) as u64),
    }
}

fn same<T: PartialEq + core::fmt::Debug>(what: &str, got: T, wanted: T) -> Result<(), String> {
    if got == wanted { Ok(()) } else { Err(format!("{what}: {got:?}, want {wanted:?}")) }
}

/// Plays a row; what is wrong with what came of it.
pub(crate) fn check(row: &Value) -> Result<(), String> {
    let mut script = Script::open(row);
    let bound = |at: usize| row["position"][at].as_u64().unwrap_or_default();
    let mut wanted = Wanted { at: bound(0), snapshot: (bound(1), bound(2)), ..Wanted::default() };
    check_request(row, &script, &wanted)?;
    let end = row["end"].as_u64();
    for step in row["steps"].as_array().expect("steps") {
        let step = step.as_str().expect("a step");
        script.step(step).map_err(|fault| format!("{step}: {fault}"))?;
        wanted.take(step, end);
    }
    same("documents", script.documents(), &wanted.documents[..])?;
    same("events", script.told().len(), wanted.events.len())?;
    for ((words, seqno), told) in wanted.events.iter().zip(script.told()) {
        same("event", told.seqno, *seqno)?;
        wanted.counted += check_event(words, told)?;
    }
    same("counted", script.counted(), wanted.counted)?;
    same("sent back", script.sent(), &[])?;
    if script.position()[0] != 0 || bound(0) == 0 {
        let (from, to) = wanted.snapshot;
        same("stands at", script.position(), vec![wanted.at, from, to])?;
    }
    same("manifest", script.manifest(), wanted.manifest)?;
    same("purge seqno", script.purge_seqno(), wanted.purge_seqno)?;
    same("ends", script.end(), wanted.end.clone())?;
    script.step(if wanted.end.is_some() { "AGAIN" } else { "LOST" })?;
    check_request(row, &script, &wanted)
}

/// The newest stream request goes on where the stream stands, for what the row wants.
fn check_request(row: &Value, script: &Script, wanted: &Wanted) -> Result<(), String> {
    let request = script.requested();
    let (at, (from, to)) = (wanted.at, wanted.snapshot);
    let snapshot = if at == to { (at, at) } else { (from.min(at.saturating_sub(1)), to) };
    same("asks for", (request.start, request.snapshot), (at, snapshot))?;
    let end = row["end"].as_u64().unwrap_or(u64::MAX).max(at);
    same("asks up to", request.end, end)?;
    same("asks with", request.flags, StreamRequestFlags::ACTIVE_VB_ONLY)?;
    same("branch", request.vbuuid, if at == 0 { 0 } else { branch("I") })?;
    let filter = row["filter"].as_str();
    let mut value: Value =
        filter.map_or_else(|| json!({}), |json| serde_json::from_str(json).expect("JSON"));
    if filter.is_some() && wanted.manifest > 0 {
        value["uid"] = format!("{:x}", wanted.manifest).into();
    }
    if row["collections"] == true && wanted.purge_seqno > 0 {
        value["purge_seqno"] = wanted.purge_seqno.to_string().into();
    }
    let asked = if request.value.is_empty() { "{}" } else { &request.value };
    same("filter", serde_json::from_str(asked).expect("JSON"), value)
}
