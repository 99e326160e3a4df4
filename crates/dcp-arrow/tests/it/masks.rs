//! Documents without their masked fields.

use arrow_array::Array;
use dcp_arrow::{
    Columns, DocumentSchema, DocumentTally, FieldMasks, OnMalformed, TableOptions, TableSchema,
    ValueFormat,
};
use dcp_proto::{BatchSink, Change, ChangeSink, Op};
use dcp_test::with;
use dcp_wire::{Datatype, snappy};

use crate::{CHANGE, batch_of, bytes, sink, texts};

fn masking(drop: &[&str], hash: &[&str]) -> TableOptions {
    let masks = FieldMasks::new(drop, hash, None).unwrap();
    with(TableOptions::default(), |o| o.masks = masks)
}

fn masked(options: &TableOptions, document: &str) -> String {
    let changes = [Change { value: document.as_bytes(), ..CHANGE }];
    let cells = bytes(&batch_of(options, &changes), "value");
    String::from_utf8(cells[0].clone().unwrap()).unwrap()
}

#[test]
fn masked_field_is_cut_out_of_the_text_and_nothing_else_changes() {
    let options = masking(&["a", "o.a", "l[]", "m.n"], &[]);
    for (document, expected) in [
        (r#" {"b" : 1.0,  "c":[ ]} "#, r#" {"b" : 1.0,  "c":[ ]} "#),
        (r#"{"a": 1}"#, "{}"),
        (r#"{"a": 1, "b": 2}"#, r#"{"b": 2}"#),
        (r#"{"b": 2 , "a": {"x": [1]}}"#, r#"{"b": 2}"#),
        (r#"{"a":1,"a":2,"b":3,"a":4,"c":5,"a":6}"#, r#"{"b":3,"c":5}"#),
        (r#"{"\u0061": 1, "A": 2, "b": "a"}"#, r#"{"A": 2, "b": "a"}"#),
        (
            r#"{"o": {"a": 1, "b": {"a": 2}}, "x": {"a": 3}}"#,
            r#"{"o": {"b": {"a": 2}}, "x": {"a": 3}}"#,
        ),
        (r#"{"o": [[{"a": 1}], {"a": 2, "c": 3}, 4]}"#, r#"{"o": [[{}], {"c": 3}, 4]}"#),
        (r#"{"o": 1, "l": [1, "x"]}"#, r#"{"o": 1, "l": []}"#),
        (r#"{"l": {"x": 1}, "m": {"n": 1, "n": 2}}"#, r#"{"m": {}}"#),
        (r#"[{"a": 1}, [{"a": 2, "b": 3}]]"#, r#"[{}, [{"b": 3}]]"#),
        ("\"a\"", "\"a\""),
        (r#"{"b": "\ud800", "a": "\ud800"}"#, r#"{"b": "\ud800"}"#),
    ] {
        assert_eq!(masked(&options, document), expected, "{document}");
    }
}

#[test]
fn hashed_field_is_the_hash_of_its_canonical_text() {
    let options = masking(&[], &["h", "t[]"]);
    for same in [r#"{"h": 1}"#, r#"{"h": 1.0}"#, r#"{"\u0068": 10e-1}"#] {
        let hash = "6b86b273ff34fce19d6b804eff5a3f5747ada4eaa22f1d49c01e52ddb7875b4b";
        let expected = same.split_once(' ').unwrap().0.to_owned() + " \"" + hash + "\"}";
        assert_eq!(masked(&options, same), expected);
    }
    assert_eq!(masked(&options, r#"{"h": null, "t": [null]}"#), r#"{"h": null, "t": [null]}"#);
    let hash = "ac8d8342bbb2362d13f0a559a3621bb407011368895164b628a54f7fc33fc43c";
    assert_eq!(masked(&options, r#"{"t": ["a"]}"#), format!("{{\"t\": [\"{hash}\"]}}"));
    assert_eq!(masked(&options, r#"{"t": "a"}"#), format!("{{\"t\": \"{hash}\"}}"));
    let masks = FieldMasks::new(&[] as &[&str], &["h"], Some(b"key of sixteen b")).unwrap();
    let keyed = masked(&with(TableOptions::default(), |o| o.masks = masks), r#"{"h":"a"}"#);
    let mac = "9a72ba898b599cb33444255f55457fa4599ea8d93c4d1220c114cf216c49607b";
    assert_eq!(keyed, format!("{{\"h\":\"{mac}\"}}"));
}

#[test]
fn document_that_cannot_be_masked_is_null_and_counted() {
    let options = masking(&["a"], &["h"]);
    let deep = format!("{{\"h\": {}{}}}", "[".repeat(200), "]".repeat(200));
    let wrong: [&[u8]; 7] = [
        b"{\"a\": 1",
        b"{\"a\": 1} {}",
        b"{\"b\": NaN, \"a\": 1}",
        b"{\"b\": \"\xff\", \"a\": 1}",
        b"",
        b"\x00\x01",
        deep.as_bytes(),
    ];
    let mut changes: Vec<_> = wrong.iter().map(|value| Change { value, ..CHANGE }).collect();
    changes.push(Change { value: br#"{"a":1}"#, datatype: Datatype::RAW, ..CHANGE });
    changes.push(Change { value: br#"{"a":1}"#, ..CHANGE });
    changes.push(Change { op: Op::Deletion, value: b"", ..CHANGE });
    for (format, on_malformed) in [
        (ValueFormat::Binary, OnMalformed::Null),
        (ValueFormat::Binary, OnMalformed::Column),
        (ValueFormat::String, OnMalformed::Column),
        (ValueFormat::Variant, OnMalformed::Column),
    ] {
        let options = with(options.clone(), |o| {
            (o.value_format, o.on_malformed) = (format, on_malformed);
        });
        let mut sink = sink(&options);
        changes.iter().for_each(|change| sink.change(change).unwrap());
        let mut tally = DocumentTally::default();
        let batch = sink.take_batch().unwrap().finish_counting(&mut tally).unwrap();
        let values = batch.column_by_name("value").unwrap();
        let is_valid: Vec<_> = (0..values.len()).map(|row| values.is_valid(row)).collect();
        assert_eq!(is_valid, [vec![false; 8], vec![true, false]].concat(), "{format:?}");
        assert_eq!((tally.malformed.whole, tally.malformed.partial), (8, 0));
        assert_eq!(tally.masked.documents, 1);
        if on_malformed == OnMalformed::Column {
            let empty = Some(Vec::new());
            let noted = [vec![empty; 8], vec![None, None]].concat();
            assert_eq!(bytes(&batch, "_malformed"), noted, "{format:?}");
        }
    }
    let failing = with(options, |o| o.on_malformed = OnMalformed::Fail);
    let mut sink = sink(&failing);
    sink.change(&changes[7]).unwrap();
    let error = sink.take_batch().unwrap().finish().unwrap_err().to_string();
    assert!(error.contains("the document is not JSON"), "{error}");
}

#[test]
fn masked_fields_that_documents_have_are_noted() {
    let paths = ["b", "o.a", "l[]", "o.B", "N", "d"];
    let options = masking(&paths[..3], &paths[3..]);
    let mut sink = sink(&options);
    for value in [r#"{"b": null, "o": [{"a": 1}], "l": [], "n": 1}"#, "[]", "{", "{}"] {
        sink.change(&Change { value: value.as_bytes(), ..CHANGE }).unwrap();
    }
    let mut tally = DocumentTally::default();
    sink.take_batch().unwrap().finish_counting(&mut tally).unwrap();
    assert!(sink.schema().masked_paths().eq(paths.into_iter().enumerate()));
    let seen: Vec<_> = (0..paths.len()).map(|index| tally.masked.has_seen(index)).collect();
    assert_eq!(seen, [true, true, true, false, false, false]);
    assert_eq!(tally.masked.documents, 3);
}

#[test]
fn masked_field_is_in_no_column_note_or_compressed_document() {
    let secret = "s3cret";
    let document =
        format!(r#"{{"a": "{secret}", "b": "{secret}", "n": "x", "c": {{"a": "{secret}"}}}}"#);
    let block = snappy::compress(document.as_bytes()).unwrap();
    let schema = "a STRING, b STRING, n BIGINT, c VARIANT, rest MAP<STRING, STRING>";
    let options = with(masking(&["a", "c.a"], &["b"]), |o| {
        o.document_schema = Some(DocumentSchema::parse(schema).unwrap());
        o.value_format = ValueFormat::String;
    });
    let changes = [
        Change { value: document.as_bytes(), ..CHANGE },
        Change { value: &block, datatype: Datatype::JSON.with(Datatype::SNAPPY), ..CHANGE },
    ];
    let batch = batch_of(&options, &changes);
    assert_eq!(texts(&batch, "a"), [None, None]);
    let hash = texts(&batch, "b")[1].clone().unwrap();
    assert_eq!(hash.len(), 64);
    assert!(texts(&batch, "_malformed_fields")[0].as_ref().unwrap().contains("\"n\""));
    assert_eq!(
        texts(&batch, "value")[1].as_deref(),
        Some(&*format!(r#"{{"b": "{hash}", "n": "x", "c": {{}}}}"#))
    );
    assert!(!format!("{batch:?}").contains(secret));
}

#[test]
fn mask_options_are_checked_and_no_key_is_shown() {
    let none: &[&str] = &[];
    for (drop, hash, key, option, said) in [
        (&["a"][..], none, Some(&b"k"[..]), "hash_key", "no field is hashed"),
        (none, &["a"][..], Some(b""), "hash_key", "shorter than 16"),
        (none, &["a"], Some(b"fifteen bytes k"), "hash_key", "shorter than 16"),
        (&["a"], &["a"], None, "hash_fields", "twice"),
        (&["a.b", "a"], none, None, "drop_fields", "within another"),
        (&["a"], &["a.b"], None, "hash_fields", "within another"),
        (&["a", "a[]"], none, None, "drop_fields", "within another"),
        (&["a b"], none, None, "drop_fields", "no path"),
    ] {
        let error = FieldMasks::new(drop, hash, key).unwrap_err();
        assert_eq!(error.options, [option]);
        assert!(error.to_string().contains(said), "{error}");
    }
    let many: Vec<_> = (0..1001).map(|n| format!("f{n}")).collect();
    assert!(FieldMasks::new(&many, none, None).is_err());
    let masks = |key: &str| FieldMasks::new(&["b", "a"], &["c"], Some(key.as_bytes())).unwrap();
    let key = "k3y of 16 bytes.";
    assert_eq!(masks(key), masks(key));
    assert_ne!(masks(key), masks("other of 16 byte"));
    assert!(!format!("{:?}", masks(key)).contains("k3y"));
    for columns in [Columns::Basic, Columns::Named(vec!["key".into(), "xattrs".into()])] {
        let options = with(masking(&["a"], &[]), |o| {
            (o.columns, o.include_xattrs) = (columns, true);
        });
        assert!(TableSchema::new(&options).unwrap_err().to_string().contains("leave xattrs out"));
    }
}

#[test]
fn hashed_field_needs_a_column_of_text() {
    for (path, schema, unfit) in [
        ("a", "a INT", Some("not INT")),
        ("a", "b INT, a STRING", None),
        ("a", "a VARIANT", None),
        ("a", "a BINARY", Some("not BINARY")),
        ("a", "a ARRAY<STRING>", Some("not ARRAY")),
        ("a[]", "a ARRAY<STRING>", None),
        ("a[]", "a STRING", None),
        ("a[]", "a ARRAY<DATE>", Some("not DATE")),
        ("a.b", "a STRING, b INT", None),
        ("a.b", "a STRUCT<b: INT>", Some("not INT")),
        ("a.b", "a ARRAY<STRUCT<c: INT, b: STRUCT<d: INT>>>", Some("not STRUCT")),
        ("a.b", "a MAP<STRING, BIGINT>", Some("not BIGINT")),
        ("A", "a INT", None),
    ] {
        let options = with(masking(&["d"], &[path]), |o| {
            o.document_schema = Some(DocumentSchema::parse(schema).unwrap());
        });
        let error = TableSchema::new(&options).err();
        assert_eq!(error.is_some(), unfit.is_some(), "{path} in {schema}");
        if let (Some(error), Some(said)) = (error, unfit) {
            assert_eq!(error.options(), ["hash_fields", "document_schema"]);
            assert!(error.to_string().contains(said), "{error}");
        }
    }
}
