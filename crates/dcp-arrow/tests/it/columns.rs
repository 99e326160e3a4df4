//! Every column, for every kind of row.

use dcp_test::with;
use std::sync::Arc;

use dcp_arrow::{
    ArrowSink, BatchLimits, COLUMNS, CollectionName, CollectionNames, Columns, KeyType,
    TableOptions, TableSchema,
};
use dcp_proto::{BatchSink, Change, ChangeSink, Op, Rollback, SystemEventRecord};
use dcp_wire::message::{SystemEventId, SystemEventPayload};
use dcp_wire::{Cas, CollectionId, Datatype, ManifestUid, RevSeqno, ScopeId, Seqno, Vbid, Vbuuid};

use crate::{CHANGE, batch_of, bytes, columns, flags, maps, numbers, sink, texts};

fn every_column() -> TableOptions {
    columns(&COLUMNS.iter().map(|spec| spec.name).collect::<Vec<_>>())
}

fn number(column: &str, change: Change<'_>) -> Option<i64> {
    numbers(&batch_of(&every_column(), &[change]), column)[0]
}

#[test]
fn mutation_fills_every_column() {
    let change = Change { expiry: 1_800_000_000, ..CHANGE };
    let batch = batch_of(&every_column(), &[change]);
    let text = |column| texts(&batch, column)[0].clone().unwrap();
    let number = |column| numbers(&batch, column)[0].unwrap();
    assert_eq!(batch.num_rows(), 1);
    assert_eq!(text("op"), "mutation");
    assert_eq!(text("key"), "airline_10");
    assert_eq!(bytes(&batch, "value")[0].as_deref(), Some(CHANGE.value));
    assert_eq!((text("scope"), text("collection")), ("_default".into(), "_default".into()));
    assert_eq!(number("vbucket"), 7);
    assert_eq!(number("seqno"), 41);
    assert_eq!(number("epoch"), 2);
    assert_eq!(number("cas"), 1_700_000_000_123_456_789);
    assert_eq!(number("rev"), 3);
    assert_eq!(number("expiry"), 1_800_000_000_000_000);
    assert_eq!(number("flags"), 0x0200_0006);
    assert_eq!(text("datatype"), "json");
    assert_eq!(number("vbuuid"), 0xbeef_0000_0001);
    assert_eq!((number("snapshot_start"), number("snapshot_end")), (40, 50));
    assert_eq!(flags(&batch, "history"), [Some(true)]);
    assert_eq!(number("collection_id"), 0);
    assert_eq!(numbers(&batch, "deleted_at"), [None]);
    assert_eq!(maps(&batch), [None]);
}

#[test]
fn timestamp_is_the_clock_of_the_cas() {
    // 2023-11-14T22:13:20.123456Z with a count of 3 in the low 16 bits.
    let nanos = 1_700_000_000_123_456_000_u64 & !0xffff;
    let at = |cas| number("timestamp", Change { cas: Cas(cas), ..CHANGE });
    let expected = i64::try_from(nanos / 1000).unwrap();
    assert_eq!(at(nanos), Some(expected));
    assert_eq!(at(nanos | 3), Some(expected), "the count is not time");
    assert_eq!(at(0), None);
    assert_eq!(at(u64::MAX), Some(18_446_744_073_709_486), "beyond 2^63 nanoseconds");
}

#[test]
fn unsigned_numbers_beyond_the_signed_range_are_twos_complement() {
    let change = Change { cas: Cas(u64::MAX), rev_seqno: RevSeqno(1 << 63), ..CHANGE };
    assert_eq!(number("cas", change), Some(-1));
    assert_eq!(number("rev", change), Some(i64::MIN));
    assert_eq!(number("flags", Change { flags: u32::MAX, ..CHANGE }), Some(0xffff_ffff));
    let latest = Change { expiry: u32::MAX, ..CHANGE };
    assert_eq!(number("expiry", latest), Some(4_294_967_295_000_000));
}

#[test]
fn tombstone_has_no_document() {
    for (op, name) in [(Op::Deletion, "deletion"), (Op::Expiration, "expiration")] {
        let change = Change {
            op,
            value: b"",
            datatype: Datatype::RAW,
            delete_time: 1_700_000_000,
            ..CHANGE
        };
        let batch = batch_of(&every_column(), &[change, CHANGE]);
        assert_eq!(texts(&batch, "op"), [Some(name.to_owned()), Some("mutation".to_owned())]);
        assert_eq!(bytes(&batch, "value"), [None, Some(CHANGE.value.to_vec())]);
        assert_eq!(numbers(&batch, "deleted_at"), [Some(1_700_000_000_000_000), None]);
        assert_eq!(numbers(&batch, "flags"), [None, Some(0x0200_0006)]);
        assert_eq!(texts(&batch, "datatype"), [None, Some("json".to_owned())]);
        assert_eq!(numbers(&batch, "cas"), [Some(1_700_000_000_123_456_789); 2]);
    }
}

#[test]
fn document_that_is_empty_is_not_null() {
    let change = Change { value: b"", datatype: Datatype::RAW, ..CHANGE };
    let batch = batch_of(&every_column(), &[change]);
    assert_eq!(bytes(&batch, "value"), [Some(Vec::new())]);
    assert_eq!(texts(&batch, "datatype"), [Some("binary".to_owned())]);
}

#[test]
fn rollback_row_says_from_which_seqno_changes_come_again() {
    let mut sink = sink(&every_column());
    sink.change(&CHANGE).unwrap();
    sink.rollback(&Rollback {
        vbid: Vbid(9),
        seqno: Seqno(30),
        from_seqno: Seqno(41),
        old_vbuuid: Vbuuid(0xa),
        new_vbuuid: Vbuuid(0xb),
        epoch: 3,
    })
    .unwrap();
    assert_eq!(sink.rows(), 2);
    let batch = sink.take_batch().unwrap().finish().unwrap();
    assert_eq!(texts(&batch, "op")[1].as_deref(), Some("rollback"));
    for (column, expected) in [("vbucket", 9), ("seqno", 30), ("epoch", 3), ("vbuuid", 0xb)] {
        assert_eq!(numbers(&batch, column)[1], Some(expected), "{column}");
    }
    for column in ["key", "scope", "collection", "datatype"] {
        assert_eq!(texts(&batch, column)[1], None, "{column}");
    }
    for column in [
        "cas",
        "timestamp",
        "rev",
        "expiry",
        "deleted_at",
        "flags",
        "snapshot_start",
        "snapshot_end",
        "collection_id",
    ] {
        assert_eq!(numbers(&batch, column)[1], None, "{column}");
    }
    assert_eq!(flags(&batch, "history"), [Some(true), None]);
    assert_eq!(bytes(&batch, "value")[1], None);
    assert_eq!(maps(&batch)[1], None);
    assert_eq!(texts(&batch, "key")[0].as_deref(), Some("airline_10"), "the row before it");
}

#[test]
fn collection_names_come_from_the_manifest_and_are_looked_up_once() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    let names = CollectionNames::new(move |id| {
        counter.fetch_add(1, Ordering::Relaxed);
        (id.0 == 8).then(|| CollectionName::new("inventory", "airline"))
    });
    let schema = TableSchema::new(&every_column()).unwrap();
    let mut sink = ArrowSink::new(schema, names, BatchLimits::default());
    for id in [8, 8, 9, 8, 9] {
        sink.change(&Change { collection_id: CollectionId(id), ..CHANGE }).unwrap();
    }
    let batch = sink.take_batch().unwrap().finish().unwrap();
    let known = |name: &str| Some(name.to_owned());
    let airline = known("airline");
    let expected = [airline.clone(), airline.clone(), None, airline, None];
    assert_eq!(texts(&batch, "collection"), expected);
    assert_eq!(texts(&batch, "scope")[0], known("inventory"));
    assert_eq!(numbers(&batch, "collection_id"), [8, 8, 9, 8, 9].map(Some));
    assert_eq!(asked.load(Ordering::Relaxed), 2);
}

#[test]
fn key_that_is_not_utf8_is_named_by_its_place_only() {
    let mut sink = sink(&columns(&["op"]));
    sink.change(&Change { key: b"\xff", ..CHANGE }).unwrap();
    assert!(sink.take_batch().unwrap().finish().is_ok(), "keys that are not shown do not matter");

    let mut sink = crate::sink(&TableOptions::default());
    sink.change(&CHANGE).unwrap();
    sink.change(&Change { key: "schlüssel".as_bytes(), seqno: Seqno(42), ..CHANGE }).unwrap();
    sink.change(&Change { key: b"\xc3secret", seqno: Seqno(43), ..CHANGE }).unwrap();
    let error = sink.take_batch().unwrap().finish().unwrap_err().to_string();
    let expected = "vb:7 seqno 43: the key is not UTF-8: read the keys as binary";
    assert_eq!(error, expected);
}

#[test]
fn keys_that_are_only_together_utf8_are_refused() {
    let mut sink = sink(&TableOptions::default());
    sink.change(&Change { key: b"\xc3", ..CHANGE }).unwrap();
    sink.change(&Change { key: b"\xa9", ..CHANGE }).unwrap();
    assert!(sink.take_batch().unwrap().finish().unwrap_err().to_string().contains("seqno 41"));
}

#[test]
fn key_column_of_binary_takes_any_bytes() {
    let options = with(TableOptions::default(), |o| o.key_type = KeyType::Binary);
    let batch = batch_of(&options, &[Change { key: b"\xff\x00", ..CHANGE }]);
    assert_eq!(bytes(&batch, "key"), [Some(b"\xff\x00".to_vec())]);
}

#[test]
fn sink_is_empty_after_its_batch_was_taken() {
    let options = with(TableOptions::default(), |o| o.columns = Columns::Full);
    let mut sink = sink(&options);
    assert_eq!((sink.rows(), sink.size_bytes()), (0, 0));
    let empty = sink.take_batch().unwrap().finish().unwrap();
    assert_eq!((empty.num_rows(), empty.schema()), (0, sink.schema().arrow()));
    for seqno in 1..=3 {
        sink.change(&Change { seqno: Seqno(seqno), ..CHANGE }).unwrap();
        assert_eq!(sink.rows(), 1);
        assert!(sink.size_bytes() > CHANGE.key.len() + CHANGE.value.len());
        let batch = sink.take_batch().unwrap();
        assert_eq!((sink.rows(), sink.size_bytes()), (0, 0));
        let batch = batch.finish().unwrap();
        assert_eq!(numbers(&batch, "seqno"), [Some(seqno.try_into().unwrap())]);
    }
}

fn system_event<'a>(id: SystemEventId, version: u8, value: &'a [u8]) -> SystemEventRecord<'a> {
    SystemEventRecord {
        vbid: Vbid(1),
        seqno: Seqno(4),
        epoch: 0,
        id,
        version,
        key: b"mycollection",
        value,
    }
}

/// Manifest 2, scope 0, collection 8, life of documents 72,000 s.
const BEGIN_COLLECTION_V1: [u8; 20] = *b"\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0\x08\0\x01\x19\x40";

#[test]
fn system_event_is_a_row_only_on_demand() {
    let event = system_event(SystemEventId::BEGIN_COLLECTION, 1, &BEGIN_COLLECTION_V1);
    let mut without = sink(&every_column());
    without.system_event(&event).unwrap();
    assert_eq!(without.rows(), 0);

    let mut asked = sink(&with(every_column(), |o| o.system_events = true));
    asked.system_event(&event).unwrap();
    let batch = asked.take_batch().unwrap().finish().unwrap();
    assert_eq!(texts(&batch, "op"), [Some("system_event".to_owned())]);
    assert_eq!(texts(&batch, "key"), [Some("mycollection".to_owned())]);
    assert_eq!(numbers(&batch, "collection_id"), [Some(8)]);
    let value = bytes(&batch, "value")[0].clone().unwrap();
    let value: serde_json::Value = serde_json::from_slice(&value).unwrap();
    let expected = serde_json::json!({
        "event": "BeginCollection",
        "manifest_uid": "2",
        "scope_id": "0",
        "collection_id": "8",
        "max_ttl": 72_000,
    });
    assert_eq!(value, expected);
    assert_eq!(numbers(&batch, "vbuuid"), [None]);
}

#[test]
fn system_event_that_is_damaged_is_an_error_and_an_unknown_one_is_named() {
    let mut sink = sink(&with(every_column(), |o| o.system_events = true));
    for len in 0..BEGIN_COLLECTION_V1.len() {
        let value = &BEGIN_COLLECTION_V1[..len];
        let damaged = system_event(SystemEventId::BEGIN_COLLECTION, 1, value);
        assert!(sink.system_event(&damaged).is_err(), "{len} bytes");
    }
    assert_eq!(sink.rows(), 0);
    sink.system_event(&system_event(SystemEventId(77), 0, b"?")).unwrap();
    let batch = sink.take_batch().unwrap().finish().unwrap();
    assert_eq!(bytes(&batch, "value")[0].as_deref(), Some(&br#"{"event":"0x4d"}"#[..]));
}

fn payload(event: SystemEventId, uid: u64, scope: u32, id: Option<u32>, name: &str) -> Vec<u8> {
    SystemEventPayload {
        manifest_uid: ManifestUid(uid),
        scope_id: ScopeId(scope),
        collection_id: id.map(CollectionId),
        name: name.as_bytes(),
        max_ttl: None,
        history: event == SystemEventId::MODIFY_COLLECTION,
        flush_uid: ManifestUid(0),
    }
    .to_flatbuffers(event)
}

#[test]
fn system_events_name_what_no_manifest_has_and_tell_reused_names_apart() {
    let known = |id: CollectionId| (id.0 == 8).then(|| CollectionName::new("shop", "carts"));
    let names =
        CollectionNames::new(known).with_scopes(|id| (id == ScopeId(8)).then(|| Arc::from("shop")));
    let schema = TableSchema::new(&with(every_column(), |o| o.system_events = true)).unwrap();
    let mut sink = ArrowSink::new(schema, names, BatchLimits::default());
    let tell = |sink: &mut ArrowSink, event, scope, id, name| {
        let value = payload(event, 2, scope, id, name);
        let record = SystemEventRecord { key: name.as_bytes(), ..system_event(event, 2, &value) };
        sink.system_event(&record).unwrap();
    };
    let change = |id| Change { collection_id: CollectionId(id), ..CHANGE };
    sink.change(&change(8)).unwrap();
    tell(&mut sink, SystemEventId::END_COLLECTION, 8, Some(8), "");
    tell(&mut sink, SystemEventId::BEGIN_COLLECTION, 8, Some(9), "carts");
    sink.change(&change(9)).unwrap();
    tell(&mut sink, SystemEventId::CREATE_SCOPE, 10, None, "stock");
    tell(&mut sink, SystemEventId::BEGIN_COLLECTION, 10, Some(11), "parts");
    tell(&mut sink, SystemEventId::MODIFY_COLLECTION, 10, Some(11), "parts");
    sink.change(&change(11)).unwrap();
    tell(&mut sink, SystemEventId::DROP_SCOPE, 10, None, "");
    tell(&mut sink, SystemEventId::END_COLLECTION, 12, Some(13), "");
    let batch = sink.take_batch().unwrap().finish().unwrap();
    let some = |names: &[&str]| -> Vec<Option<String>> {
        names.iter().map(|name| (*name != "-").then(|| (*name).to_owned())).collect()
    };
    let scopes = ["shop", "shop", "shop", "shop", "stock", "stock", "stock", "stock", "stock", "-"];
    assert_eq!(texts(&batch, "scope"), some(&scopes));
    let names = ["carts", "carts", "carts", "carts", "-", "parts", "parts", "parts", "-", "-"];
    assert_eq!(texts(&batch, "collection"), some(&names));
    let ids = [8, 8, 9, 9, -1, 11, 11, 11, -1, 13];
    let ids: Vec<_> = ids.into_iter().map(|id| Some(id).filter(|id| *id >= 0)).collect();
    assert_eq!(numbers(&batch, "collection_id"), ids);
    let value = bytes(&batch, "value")[6].clone().unwrap();
    let value: serde_json::Value = serde_json::from_slice(&value).unwrap();
    assert_eq!(value["event"], "ModifyCollection");
    assert_eq!(value["history"], true);
}
