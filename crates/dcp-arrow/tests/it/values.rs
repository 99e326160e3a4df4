//! Values that are more than plain bytes, and bounds.

use dcp_arrow::{ArrowSink, BatchLimits, BufferPool, CollectionNames, TableOptions, TableSchema};
use dcp_proto::{BatchSink, Change, ChangeSink, Op};
use dcp_test::with;
use dcp_wire::xattr::Xattr;
use dcp_wire::{Datatype, Seqno, snappy, xattr};

use crate::{CHANGE, batch_of, bytes, columns, maps, sink, sink_with, texts};

const BODY: &[u8] = br#"{"a":"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}"#;

fn section(pairs: &[(&str, &str)], body: &[u8]) -> Vec<u8> {
    let pairs: Vec<_> = pairs
        .iter()
        .map(|(name, value)| Xattr { name: name.as_bytes(), value: value.as_bytes() })
        .collect();
    let mut value = Vec::new();
    xattr::encode(pairs, &mut value).unwrap();
    value.extend_from_slice(body);
    value
}

const BOTH: Datatype = Datatype::SNAPPY.with(Datatype::XATTR);

fn document(value: &[u8], datatype: Datatype) -> Change<'_> {
    Change { value, datatype: datatype.with(Datatype::JSON), ..CHANGE }
}

fn pairs(expected: &[(&str, &str)]) -> Option<Vec<(String, String)>> {
    Some(expected.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect())
}

#[test]
fn document_is_the_same_in_every_encoding() {
    let attributes = section(&[("_sync", "{\"rev\":1}"), ("x", "1")], BODY);
    let (packed, packed_both) =
        (snappy::compress(BODY).unwrap(), snappy::compress(&attributes).unwrap());
    let changes = [
        document(BODY, Datatype::RAW),
        document(&packed, Datatype::SNAPPY),
        document(&attributes, Datatype::XATTR),
        document(&packed_both, BOTH),
        document(&packed, Datatype::SNAPPY),
        document(BODY, Datatype::RAW),
    ];
    let both = with(TableOptions::default(), |o| o.include_xattrs = true);
    let batch = batch_of(&both, &changes);
    assert_eq!(bytes(&batch, "value"), vec![Some(BODY.to_vec()); 6]);
    let attributes = pairs(&[("_sync", "{\"rev\":1}"), ("x", "1")]);
    assert_eq!(maps(&batch), [None, None, attributes.clone(), attributes.clone(), None, None]);

    let values_only = batch_of(&TableOptions::default(), &changes);
    assert_eq!(bytes(&values_only, "value"), vec![Some(BODY.to_vec()); 6]);
    let attributes_only = batch_of(&columns(&["xattrs"]), &changes);
    assert_eq!(maps(&attributes_only), maps(&batch));
}

#[test]
fn tombstone_keeps_its_xattrs() {
    let value = section(&[("_sync", "{}")], b"");
    let change = Change { op: Op::Deletion, ..document(&value, Datatype::XATTR) };
    let batch = batch_of(&columns(&["value", "xattrs"]), &[change]);
    assert_eq!(bytes(&batch, "value"), [None]);
    assert_eq!(maps(&batch), [pairs(&[("_sync", "{}")])]);
}

#[test]
fn tombstone_body_is_dropped_whatever_its_datatype_is() {
    let attributes = section(&[("u", "{\"a\":0}")], BODY);
    let (packed, packed_both) =
        (snappy::compress(BODY).unwrap(), snappy::compress(&attributes).unwrap());
    let values = [
        (BODY, Datatype::RAW),
        (&packed, Datatype::SNAPPY),
        (&attributes, Datatype::XATTR),
        (&packed_both, BOTH),
        // Bits that outlived the value they were about.
        (b"", Datatype::RAW),
        (b"", BOTH),
    ];
    let mut changes = Vec::new();
    for op in [Op::Deletion, Op::Expiration] {
        for (value, datatype) in values {
            changes.push(Change { op, ..document(value, datatype) });
            changes.push(Change { op, value, datatype, ..CHANGE });
        }
    }
    let attributes = pairs(&[("u", "{\"a\":0}")]);
    let shown = [None, None, attributes.clone(), attributes, None, None];
    let shown: Vec<_> = shown.into_iter().flat_map(|map| [map.clone(), map]).collect();
    let batch = batch_of(&columns(&["value", "datatype", "xattrs"]), &changes);
    assert_eq!(bytes(&batch, "value"), vec![None; changes.len()]);
    assert_eq!(texts(&batch, "datatype"), vec![None; changes.len()]);
    assert_eq!(maps(&batch), [shown.clone(), shown].concat());

    // Nobody asks for what is in them, so they may be anything.
    let damaged = [Datatype::XATTR, Datatype::SNAPPY, BOTH];
    let damaged = damaged
        .map(|datatype| Change { op: Op::Deletion, ..document(b"\xff\xff\xff\xff", datatype) });
    let batch = batch_of(&columns(&["value"]), &damaged);
    assert_eq!(bytes(&batch, "value"), [None, None, None]);
}

#[test]
fn xattr_section_without_pairs_is_an_empty_map() {
    let value = section(&[], BODY);
    let batch = batch_of(&columns(&["xattrs", "value"]), &[document(&value, Datatype::XATTR)]);
    assert_eq!(maps(&batch), [pairs(&[])]);
    assert_eq!(bytes(&batch, "value"), [Some(BODY.to_vec())]);
}

#[test]
fn document_without_its_body_may_say_snappy_over_a_plain_section() {
    let plain = section(&[("x", "1")], b"");
    let packed = snappy::compress(&section(&[("x", "1")], b"")).unwrap();
    let options = columns(&["xattrs"]);
    let changes = [document(&plain, BOTH), document(&packed, BOTH), document(b"", BOTH)];
    let batch = batch_of(&options, &changes);
    assert_eq!(maps(&batch), [pairs(&[("x", "1")]), pairs(&[("x", "1")]), None]);
}

#[test]
fn value_that_is_damaged_is_named_by_its_place() {
    let mut damaged = snappy::compress(BODY).unwrap();
    damaged.truncate(damaged.len() - 1);
    let mut sink = sink(&TableOptions::default());
    sink.change(&CHANGE).unwrap();
    sink.change(&document(&damaged, Datatype::SNAPPY)).unwrap();
    let error = sink.take_batch().unwrap().finish().unwrap_err().to_string();
    assert_eq!(error, "vb:7 seqno 41: invalid snappy value: damaged block");

    let options = with(TableOptions::default(), |o| o.include_xattrs = true);
    let mut sink = crate::sink(&options);
    let whole = section(&[("x", "1")], BODY);
    for value in [&b"\0\0\0\x09x"[..], b"\xff", &whole[..6], b"\0\0\0\x08\0\0\0\x04\xff\x001\0"] {
        assert!(sink.change(&document(value, Datatype::XATTR)).is_err());
        assert_eq!(sink.rows(), 0, "a refused change leaves nothing behind");
        for damaged in [value.to_vec(), snappy::compress(value).unwrap()] {
            let mut sink = crate::sink(&options);
            sink.change(&CHANGE).unwrap();
            let late = Change { seqno: Seqno(42), ..document(&damaged, BOTH) };
            let error = match sink.change(&late) {
                Ok(()) => sink.take_batch().unwrap().finish().unwrap_err(),
                Err(error) => error,
            };
            assert!(error.to_string().starts_with("vb:7 seqno 42: "), "{error}");
        }
    }
    sink.change(&CHANGE).unwrap();
    assert_eq!(sink.take_batch().unwrap().finish().unwrap().num_rows(), 1);
}

#[test]
fn value_that_inflates_over_the_limit_is_refused_before_inflating() {
    let limits = with(BatchLimits::default(), |o| o.max_value_bytes = BODY.len() - 1);
    let packed = snappy::compress(BODY).unwrap();
    let mut sink = sink_with(&TableOptions::default(), limits);
    let error = sink.change(&document(&packed, Datatype::SNAPPY)).unwrap_err().to_string();
    assert!(error.contains("declared length exceeds the limit"), "{error}");
    assert!(sink.change(&document(&packed, BOTH)).is_err());
    assert_eq!(sink.rows(), 0);
}

#[test]
fn batch_that_is_full_refuses_the_next_row_whole() {
    let limits = with(BatchLimits::default(), |o| o.max_column_bytes = 2 * BODY.len());
    let mut sink = sink_with(&TableOptions::default(), limits);
    let packed = snappy::compress(BODY).unwrap();
    sink.change(&document(BODY, Datatype::RAW)).unwrap();
    sink.change(&document(&packed, Datatype::SNAPPY)).unwrap();
    for change in [document(BODY, Datatype::RAW), document(&packed, Datatype::SNAPPY)] {
        let error = sink.change(&change).unwrap_err().to_string();
        assert!(error.contains("the batch is full"), "{error}");
    }
    let batch = sink.take_batch().unwrap().finish().unwrap();
    assert_eq!(bytes(&batch, "value"), vec![Some(BODY.to_vec()); 2]);
    sink.change(&document(BODY, Datatype::RAW)).unwrap();
}

#[test]
fn row_without_room_in_one_column_leaves_nothing_in_the_others() {
    let limits = with(BatchLimits::default(), |o| o.max_column_bytes = CHANGE.key.len() + 5);
    let mut sink = sink_with(&columns(&["key", "value", "xattrs"]), limits);
    let attributes = section(&[("x", "1234567890123456")], b"1");
    let change = Change { key: b"k", ..document(&attributes, Datatype::XATTR) };
    assert!(sink.change(&change).unwrap_err().to_string().contains("the batch is full"));
    assert_eq!(sink.rows(), 0);
    sink.change(&document(b"{}", Datatype::RAW)).unwrap();
    // There is no room for another key.
    let error = sink.change(&document(b"[]", Datatype::RAW)).unwrap_err().to_string();
    assert!(error.contains("the batch is full"), "{error}");
    let batch = sink.take_batch().unwrap().finish().unwrap();
    assert_eq!(bytes(&batch, "value"), [Some(b"{}".to_vec())]);
    assert_eq!(maps(&batch), [None]);
}

#[test]
fn documents_that_are_compressed_count_with_their_inflated_length() {
    let zeros = vec![b'0'; 1 << 20];
    let packed = snappy::compress(&zeros).unwrap();
    let mut sink = sink(&columns(&["value"]));
    sink.change(&document(&packed, Datatype::SNAPPY)).unwrap();
    assert!(sink.size_bytes() >= zeros.len() + packed.len(), "{}", sink.size_bytes());
}

#[test]
fn batch_memory_is_used_again_after_it_is_dropped() {
    let pool = BufferPool::new(16 << 20);
    let schema = TableSchema::new(&TableOptions::default()).unwrap();
    let mut sink = ArrowSink::with_pool(
        schema,
        CollectionNames::default(),
        BatchLimits::default(),
        pool.clone(),
    );
    let document = vec![b'x'; 1 << 20];
    let mut fill = || {
        for _ in 0..4 {
            sink.change(&Change { value: &document, ..CHANGE }).unwrap();
        }
        sink.take_batch().unwrap().finish().unwrap()
    };
    let (first, second) = (fill(), fill());
    // The room for keys that was not used is there again.
    let keys = pool.held_bytes();
    assert!(keys < 1 << 20, "{keys}");
    drop(first);
    let held = pool.held_bytes();
    assert!(held >= 4 << 20, "{held}");
    let third = fill();
    let held = pool.held_bytes();
    assert!(held < 1 << 20, "the third batch lies where the first lay: {held}");
    drop((second, third));
    assert!(pool.held_bytes() >= 8 << 20);
}
