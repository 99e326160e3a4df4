//! What a stream of some history carries, told as data: the history, the request, the messages.
//!
//! An item is written as its seqno, what it is and the collection or scope it is about, both ids
//! hexadecimal: `3 doc c`, `1 begin c in 8 ttl=60`, `4 scope 8`.

use bytes::Bytes;
use dcp_producer_proto::{Item, ItemKind, VBucketState};
use dcp_test::conformance::{Outcome, note};
use dcp_wire::message::{
    OpenFlags, StreamRequest, StreamRequestFlags, SystemEvent, SystemEventId, SystemEventPayload,
};
use dcp_wire::{CollectionId, Datatype, ManifestUid, Opcode, ScopeId, Seqno, Status};
use serde_json::Value;

use crate::client::{COLLECTIONS, Client, LEGACY, describe, frame, from_scratch, resume};
use dcp_test::bucket::{Bucket, VBucket, doc};

const ROWS: &str = include_str!("../../../../tests/rows/collections.json");

fn rows() -> Vec<Value> {
    serde_json::from_str(ROWS).expect("rows")
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().into_iter().flatten().map(|text| text.as_str().expect("a text")).collect()
}

fn items(value: &Value) -> Vec<Item> {
    texts(value).into_iter().map(item).collect()
}

fn hex(digits: &str) -> u32 {
    u32::from_str_radix(digits, 16).expect("a hexadecimal id")
}

fn item(text: &str) -> Item {
    let words: Vec<_> = text.split(' ').collect();
    let (seqno, kind, id) = (words[0].parse().expect("a seqno"), words[1], hex(words[2]));
    match kind {
        "doc" => doc(seqno, id),
        "del" => Item { kind: ItemKind::Deletion, value: Bytes::new(), ..doc(seqno, id) },
        _ => event(seqno, kind, id, &words[3..]),
    }
}

/// An event as storage has it, in the form that says everything.
fn event(seqno: u64, kind: &str, id: u32, words: &[&str]) -> Item {
    let of_scope = matches!(kind, "scope" | "dropscope");
    let scope = words.iter().position(|&word| word == "in").map_or(0, |at| hex(words[at + 1]));
    let scope_id = ScopeId(if of_scope { id } else { scope });
    let number = |name: &str| -> Option<u64> {
        let value = words.iter().find_map(|word| word.strip_prefix(name)?.strip_prefix('='));
        value.map(|digits| digits.parse().expect("a number"))
    };
    let event_id = match kind {
        "begin" | "flush" => SystemEventId::BEGIN_COLLECTION,
        "end" => SystemEventId::END_COLLECTION,
        "scope" => SystemEventId::CREATE_SCOPE,
        "dropscope" => SystemEventId::DROP_SCOPE,
        "modify" => SystemEventId::MODIFY_COLLECTION,
        other => panic!("no such event: {other}"),
    };
    let name = match kind {
        "end" | "dropscope" => String::new(),
        "scope" => format!("s{id:x}"),
        _ => format!("c{id:x}"),
    };
    let payload = SystemEventPayload {
        manifest_uid: ManifestUid(number("uid").unwrap_or(1)),
        scope_id,
        collection_id: (!of_scope).then_some(CollectionId(id)),
        name: name.as_bytes(),
        max_ttl: number("ttl").map(|ttl| ttl as u32),
        history: number("history").is_some(),
        flush_uid: ManifestUid(number("flush").unwrap_or_default()),
    };
    Item {
        kind: ItemKind::SystemEvent { id: event_id, version: 2, scope_id },
        value: payload.to_flatbuffers(event_id).into(),
        key: name.clone().into(),
        datatype: Datatype::RAW,
        ..doc(seqno, if of_scope { 0 } else { id })
    }
}

/// A message in a few words; of an event also its kind, and if `fully` all it says.
fn tell(packet: &[u8], fully: bool) -> String {
    let text = describe(packet);
    let frame = frame(packet);
    if frame.header.opcode != Opcode::DCP_SYSTEM_EVENT {
        return text;
    }
    let event = SystemEvent::decode(&frame).unwrap();
    let payload = event.payload().unwrap().expect("a known form");
    let (kind, id) = match event.id {
        SystemEventId::BEGIN_COLLECTION => ("begin", payload.collection_id.unwrap().0),
        SystemEventId::END_COLLECTION => ("end", payload.collection_id.unwrap().0),
        SystemEventId::MODIFY_COLLECTION => ("modify", payload.collection_id.unwrap().0),
        SystemEventId::CREATE_SCOPE => ("scope", payload.scope_id.0),
        _ => ("dropscope", payload.scope_id.0),
    };
    let seqno = format!("SYS {}", event.seqno);
    let (head, tail) = text.split_at(seqno.len());
    let mut told = format!("{head} {kind} {id:x}");
    if fully {
        let (key, len) = (String::from_utf8_lossy(event.key), event.value.len());
        told += &format!(" v{} key={key} uid={}", event.version, payload.manifest_uid);
        if event.version != 2 {
            told += &format!(" len={len}");
        }
        if let Some(ttl) = payload.max_ttl {
            told += &format!(" ttl={ttl}");
        }
        if payload.flush_uid != ManifestUid(0) {
            told += &format!(" flush={}", payload.flush_uid);
        }
    }
    told + tail
}

/// Everything the connection has to say; streams take turns, so they are told one after another.
fn received(client: &mut Client, row: &Value) -> Vec<String> {
    let fully = row["full"].as_bool().unwrap_or_default();
    let packets = client.receive_packets();
    let mut told: Vec<_> = packets.iter().map(|packet| tell(packet, fully)).collect();
    told.sort_by_key(|text| text.split_once(" sid ").map(|(_, sid)| sid.to_owned()));
    told
}

fn vbucket(row: &Value) -> VBucket {
    let mut vbucket = VBucket::new().on_disk(items(&row["disk"]));
    for checkpoint in row["memory"].as_array().into_iter().flatten() {
        let items = items(checkpoint);
        vbucket = vbucket.checkpoint(items[0].seqno.0, items);
    }
    for id in texts(&row["collections"]) {
        vbucket = vbucket.with_collection(hex(id), 0);
    }
    vbucket.high = row["high"].as_u64().unwrap_or(vbucket.high);
    vbucket.purge = row["purge"].as_u64().unwrap_or_default();
    if row["replica"] == true {
        vbucket.state = VBucketState::Replica;
    }
    vbucket
}

fn open(row: &Value) -> Client {
    let mut bucket = Bucket::with(vbucket(row));
    bucket.scopes.insert(8, Vec::new());
    let features = if row["legacy"] == true { LEGACY } else { COLLECTIONS };
    let mut controls = vec![("enable_noop", "true")];
    for control in row["controls"].as_array().into_iter().flatten() {
        controls.push((control[0].as_str().unwrap(), control[1].as_str().unwrap()));
    }
    Client::open_with(bucket, features, OpenFlags::PRODUCER, &controls)
}

fn request<'a>(row: &'a Value, filter: &'a Value) -> StreamRequest<'a> {
    let start = row["start"].as_u64().unwrap_or_default();
    let bound = |index: usize| row["snapshot"][index].as_u64().unwrap_or(start);
    let mut flags = StreamRequestFlags::empty();
    flags.set(StreamRequestFlags::TO_LATEST, row["to_latest"] == true);
    flags.set(StreamRequestFlags::DISK_ONLY, row["disk_only"] == true);
    StreamRequest {
        flags,
        end_seqno: row["end"].as_u64().map_or(from_scratch().end_seqno, Seqno),
        value: filter.as_str().unwrap_or_default().as_bytes(),
        ..resume(start, (bound(0), bound(1)))
    }
}

fn run(name: &str) {
    let rows = rows();
    let row = rows.iter().find(|row| row["row"] == name).expect("a row of that name");
    let mut client = open(row);
    let one = [row["filter"].clone()];
    for filter in row["filters"].as_array().map_or(&one[..], Vec::as_slice) {
        assert_eq!(client.request(&request(row, filter)), Status::SUCCESS, "{name}");
    }
    if row["meanwhile"].is_array() {
        *client.bucket.vb() = VBucket::new().on_disk(items(&row["meanwhile"]));
    }
    assert_eq!(received(&mut client, row), texts(&row["expect"]), "{name}");
    for (step, then) in row["then"].as_array().into_iter().flatten().enumerate() {
        client.write(items(&then["write"]));
        let wanted = texts(&then["expect"]);
        assert_eq!(received(&mut client, row), wanted, "{name}, step {step}");
    }
    note("producer", name, Outcome::Held);
}

macro_rules! tests {
    ($($test:ident: $row:literal,)*) => {
        $(#[test] fn $test() { run($row); })*

        #[test]
        fn rows_of_the_file_each_have_a_test() {
            for row in rows() {
                let name = row["row"].as_str().expect("a name");
                assert!([$($row),*].contains(&name), "{name} has no test");
            }
        }
    };
}

tests! {
    co_01_a_filter_from_memory: "CO-01",
    co_02_a_filter_from_disk: "CO-02",
    co_03_a_scope: "CO-03",
    co_04_a_scope_that_was_empty: "CO-04",
    co_05_a_scope_that_grows: "CO-05",
    co_06_a_scope_that_shrinks: "CO-06",
    co_08_memory_does_not_tell_of_items_of_others: "CO-08",
    co_09_nor_does_a_replica: "CO-09",
    co_10_the_disk_tells_where_it_ends: "CO-10",
    co_11_the_disk_tells_where_it_ends_after_a_document: "CO-11",
    co_13_from_disk_to_memory: "CO-13",
    co_14_everything_for_a_client_with_durable_writes: "CO-14",
    co_15_the_rest_of_a_snapshot_is_not_the_clients: "CO-15",
    co_15_the_rest_of_a_snapshot_from_disk_is_not_the_clients: "CO-15 from disk",
    co_16_a_snapshot_that_grew_meanwhile: "CO-16",
    co_16_a_snapshot_from_disk_that_grew_meanwhile: "CO-16 from disk",
    co_18_items_of_others_cost_nothing: "CO-18",
    co_26_a_resume_begins_where_the_client_is: "CO-26",
    co_27_a_disk_without_anything_of_the_filter: "CO-27",
    co_30_a_legacy_disk_snapshot_ends_with_its_last_document: "CO-30",
    co_31_latest_for_a_legacy_stream: "CO-31",
    co_32_a_disk_without_default_documents: "CO-32",
    co_33_the_default_collection_is_dropped_before_the_backfill: "CO-33",
    co_34_latest_for_a_filter: "CO-34",
    co_36_two_streams_of_one_vbucket: "CO-36",
    co_37_a_legacy_stream_has_the_default_collection_only: "CO-37",
    co_38_a_filters_first_marker_begins_at_0_wherever_its_items_do: "CO-38",
    co_39_what_was_purged_elsewhere_does_not_matter: "CO-39",
    co_44_a_collection_with_an_expiry: "CO-44",
    co_45_a_collection_without_one: "CO-45",
    co_46_a_dropped_collection: "CO-46",
    co_48_events_as_flatbuffers: "CO-48",
    co_49_a_modified_collection_is_only_a_seqno: "CO-49",
    co_50_a_modified_collection_as_flatbuffers: "CO-50",
    co_53_a_flushed_collection: "CO-53",
    co_53_a_flushed_collection_as_flatbuffers: "CO-53 FlatBuffers",
    modified_collection_among_others: "a modified collection among documents",
    modified_collection_of_a_scope: "a modified collection of a scope",
    modified_collection_of_others: "a modified collection of others",
    snapshot_end_of_the_client_is_waited_for: "the end of the client's snapshot is waited for",
    collection_of_two_is_dropped: "one of two collections is dropped",
    se_05_an_end_without_an_item: "SE-05",
    se_22_the_last_collection_is_dropped: "SE-22",
    se_23_the_scope_is_dropped: "SE-23",
    se_25_the_default_collection_is_dropped: "SE-25",
    sr_38_a_filter_that_names_nothing: "SR-38",
    sr_38_a_filter_that_names_nothing_in_memory: "SR-38 memory",
    sr_38_a_filter_that_names_nothing_on_disk: "SR-38 disk",
    rb_33_a_snapshot_end_never_reached: "RB-33",
    streams_of_which_one_ends: "two streams, one of which ends",
}
