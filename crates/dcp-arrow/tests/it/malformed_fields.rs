//! Values that do not fit their columns, while the rest of their document is kept.

use dcp_arrow::{
    DocumentSchema, DocumentTally, FieldMasks, MALFORMED_FIELDS, MalformedTally, OnMalformed,
    TableOptions, ValueFormat,
};
use dcp_proto::{BatchSink, Change, ChangeSink, Op};
use dcp_test::with;
use dcp_wire::{Datatype, Seqno, Vbid};
use serde_json::{Value, json};

use crate::documents::{cells, decoded, document};
use crate::{CHANGE, batch_of, columns, sink, texts};

pub(crate) fn keeping(schema: &str) -> TableOptions {
    let document_schema = Some(DocumentSchema::parse(schema).unwrap());
    with(TableOptions::default(), |o| o.document_schema = document_schema)
}

/// The notes of each row as JSON.
pub(crate) fn notes(batch: &arrow_array::RecordBatch) -> Vec<Option<Value>> {
    let texts = texts(batch, MALFORMED_FIELDS);
    texts.iter().map(|text| Some(serde_json::from_str(text.as_ref()?).unwrap())).collect()
}

fn note(path: &str, reason: &str, text: &str) -> Value {
    json!({"path": path, "reason": reason, "text": text})
}

#[test]
fn value_that_does_not_fit_is_null_and_no_other() {
    for (kind, json, kept, path, reason, text) in [
        ("BOOLEAN", "\"true\"", Value::Null, "f", "expected true or false", "\"true\""),
        ("TINYINT", "128", Value::Null, "f", "expected a TINYINT", "128"),
        ("SMALLINT", "-32769", Value::Null, "f", "expected a SMALLINT", "-32769"),
        ("INT", "1e3", Value::Null, "f", "expected an INT", "1e3"),
        ("BIGINT", "10.5", Value::Null, "f", "expected a whole number that fits a BIGINT", "10.5"),
        (
            "BIGINT",
            "{\"a\": [1, {}]}",
            Value::Null,
            "f",
            "expected a whole number that fits a BIGINT",
            "{\"a\": [1, {}]}",
        ),
        ("FLOAT", "1e39", Value::Null, "f", "expected a number that fits a FLOAT", "1e39"),
        ("DOUBLE", "1e309", Value::Null, "f", "expected a number that fits a DOUBLE", "1e309"),
        (
            "DECIMAL(4, 1)",
            "\"1,5\"",
            Value::Null,
            "f",
            "expected a number that fits the DECIMAL",
            "\"1,5\"",
        ),
        (
            "DECIMAL(4, 1)",
            "12345",
            Value::Null,
            "f",
            "expected a number that fits the DECIMAL",
            "12345",
        ),
        ("DATE", "\"20240229\"", Value::Null, "f", "expected a date", "\"20240229\""),
        (
            "TIMESTAMP",
            "\"2024-02-29T24:00\"",
            Value::Null,
            "f",
            "expected a time or whole seconds",
            "\"2024-02-29T24:00\"",
        ),
        ("TIMESTAMP_NTZ", "86400", Value::Null, "f", "expected a time without an offset", "86400"),
        ("BINARY", "\"AAAA-\"", Value::Null, "f", "expected a base64 string", "\"AAAA-\""),
        ("STRING", r#""\ud800""#, Value::Null, "f", "half a surrogate pair", r#""\ud800""#),
        ("VARIANT", "[1e999]", Value::Null, "f", "expected a number that fits a DOUBLE", "[1e999]"),
        (
            "VARIANT",
            r#"{"a": 1, "a": 1}"#,
            Value::Null,
            "f",
            "duplicate key",
            r#"{"a": 1, "a": 1}"#,
        ),
        ("ARRAY<INT>", "{}", Value::Null, "f", "expected an array", "{}"),
        (
            "ARRAY<INT>",
            "[1, \"2\", null, 3]",
            json!([1, null, null, 3]),
            "f[1]",
            "expected an INT",
            "\"2\"",
        ),
        (
            "ARRAY<ARRAY<BINARY>>",
            r#"[["AA==", "A-"], []]"#,
            json!([[[0], null], []]),
            "f[0][1]",
            "expected a base64 string",
            "\"A-\"",
        ),
        ("MAP<STRING, INT>", "[]", Value::Null, "f", "expected an object", "[]"),
        (
            "MAP<STRING, INT>",
            r#"{"a": 1, "b c": 2.5, "d": 3}"#,
            json!({"a": 1, "b c": null, "d": 3}),
            "f[\"b c\"]",
            "expected an INT",
            "2.5",
        ),
        (
            "MAP<STRING, INT>",
            r#"{"a": 1, "b": 2, "a": 3}"#,
            json!({"a": null, "b": 2}),
            "f.a",
            "duplicate key",
            "3",
        ),
        (
            "MAP<STRING, INT>",
            r#"{"a": 1, "\ud800": 2, "\u0062": 3}"#,
            json!({"a": 1, "b": 3}),
            "f",
            "half a surrogate pair",
            "2",
        ),
        ("STRUCT<a: INT, b: STRING>", "\"x\"", Value::Null, "f", "expected an object", "\"x\""),
        (
            "STRUCT<a: INT, b: STRING>",
            r#"{"b": "x", "a": true}"#,
            json!({"a": null, "b": "x"}),
            "f.a",
            "expected an INT",
            "true",
        ),
        (
            "STRUCT<a: INT, b: STRING>",
            r#"{"a": 1, "b": "x", "a": [2]}"#,
            json!({"a": null, "b": "x"}),
            "f.a",
            "duplicate key",
            "[2]",
        ),
        (
            "STRUCT<a: STRUCT<b: INT, c: ARRAY<INT>>>",
            r#"{"a": {"b": 1, "c": [1]}, "a": 1}"#,
            json!({"a": null}),
            "f.a",
            "duplicate key",
            "1",
        ),
        (
            "MAP<STRING, ARRAY<STRUCT<`x y`: INT>>>",
            r#"{"k": [{}, {"x y": ""}]}"#,
            json!({"k": [{"x y": null}, {"x y": null}]}),
            "f.k[1][\"x y\"]",
            "expected an INT",
            "\"\"",
        ),
    ] {
        let text = (text, format!(r#"{{"before": 1, "f": {json}, "after": "z"}}"#));
        let options = keeping(&format!("before INT, f {kind}, after STRING"));
        let batch = decoded(&options, &[text.1.as_bytes()]);
        let found = ["before", "f", "after"].map(|name| cells(&batch, name).remove(0));
        assert_eq!(found, [json!(1), kept, json!("z")], "{kind} {json}");
        assert_eq!(notes(&batch), [Some(json!([note(path, reason, text.0)]))], "{kind} {json}");
    }
}

#[test]
fn document_that_is_no_object_has_no_columns() {
    let good: &[u8] = br#"{"n": 1}"#;
    let long = format!("[{}]", "1,".repeat(1000));
    // The parser takes no number of more than 4300 digits.
    let digits = format!("{{\"n\": 1, \"x\": {}}}", "1".repeat(5000));
    let documents: [(&[u8], &str, &str); 9] = [
        (br#"{"n": 1, "m": [1, 2}"#, "expected `,` or `]` at byte 19", r#"{"n": 1, "m": [1, 2}"#),
        (br#"{"n": "x", "x" 1}"#, "expected `:` at byte 15", r#"{"n": "x", "x" 1}"#),
        (b"{\"n\": 1, \"x\": \"\xff\"}", "not UTF-8 at byte 15", "{\"n\": 1, \"x\": \"…"),
        (b"[1]", "expected an object at byte 0", "[1]"),
        (b"null", "expected an object at byte 0", "null"),
        (b"", "EOF while parsing a value at byte 0", ""),
        (br#"{"n": "x"} {}"#, "trailing characters at byte 11", r#"{"n": "x"} {}"#),
        (long.as_bytes(), "expected an object at byte 0", &format!("{}…", &long[..256])),
        (digits.as_bytes(), "number out of range at byte 4315", &format!("{}…", &digits[..256])),
    ];
    let all: Vec<&[u8]> = documents.iter().map(|(document, ..)| *document).chain([good]).collect();
    let batch = decoded(&keeping("n INT"), &all);
    assert_eq!(cells(&batch, "n"), [vec![Value::Null; 9], vec![json!(1)]].concat());
    let expected = documents.map(|(_, reason, text)| Some(json!([note("", reason, text)])));
    assert_eq!(notes(&batch), [&expected[..], &[None]].concat());
}

#[test]
fn document_that_is_no_json_is_noted_only_if_it_is_binary() {
    let binary = Change { datatype: Datatype::RAW, value: b"\x00\xff", ..CHANGE };
    let removed = Change { op: Op::Deletion, value: b"no document", ..CHANGE };
    let batch = batch_of(&keeping("name STRING"), &[CHANGE, binary, removed]);
    assert_eq!(cells(&batch, "name"), [json!("40-Mile Air"), Value::Null, Value::Null]);
    assert_eq!(notes(&batch), [None, Some(json!([note("", "not JSON", "\0…")])), None]);
}

#[test]
fn values_nested_deeply_are_ignored_or_null_by_themselves() {
    let deep = |open: &str, close: &str| {
        let depth = 100_000;
        let (open, close) = (open.repeat(depth), close.repeat(depth));
        format!("{{\"f\": {open}0{close}, \"n\": 1}}").into_bytes()
    };
    let documents = [deep("[", "]"), deep("{\"f\":", "}")];
    let documents: Vec<&[u8]> = documents.iter().map(Vec::as_slice).collect();
    for (schema, path, reason) in [
        ("n INT", None, ""),
        ("n INT, f BIGINT", Some("f"), "expected a whole number that fits a BIGINT"),
        ("n INT, f STRING", Some("f"), "nested too deep"),
        ("n INT, f VARIANT", Some("f"), "nested too deep"),
    ] {
        let batch = decoded(&keeping(schema), &documents);
        assert_eq!(cells(&batch, "n"), [json!(1), json!(1)], "{schema}");
        for (row, notes) in notes(&batch).into_iter().enumerate() {
            let first = notes.map(|notes| notes[0].clone());
            assert_eq!(first.as_ref().map(|note| &note["path"]), path.map(Value::from).as_ref());
            if let Some(note) = first {
                assert_eq!(note["reason"], reason, "{schema}");
                assert_eq!(note["text"].as_str().unwrap().len(), 256 + "…".len(), "{row}");
            }
        }
    }
    let batch = decoded(&keeping("n INT, f ARRAY<ARRAY<INT>>"), &documents);
    assert_eq!(cells(&batch, "f"), [json!([[null]]), Value::Null]);
    assert_eq!(notes(&batch)[0].as_ref().unwrap()[0]["path"], "f[0][0]");
}

#[test]
fn document_that_becomes_large_has_no_columns() {
    let fields: Vec<String> = (0..300).map(|number| format!("f{number} BIGINT")).collect();
    let schema = format!("n INT, a ARRAY<STRUCT<{}>>", fields.join(", "));
    let hostile = format!("{{\"n\": 1, \"a\": [{}{{}}]}}", "{},".repeat(100_000));
    let batch = decoded(&keeping(&schema), &[hostile.as_bytes(), b"{\"n\": 2, \"a\": [{}]}"]);
    assert_eq!(cells(&batch, "n"), [Value::Null, json!(2)]);
    let note = notes(&batch).remove(0).unwrap().as_array_mut().unwrap().remove(0);
    assert_eq!(note["path"], "");
    assert!(note["reason"].as_str().unwrap().starts_with("takes too much memory at byte"));
}

#[test]
fn values_that_do_not_fit_are_noted_up_to_a_bound() {
    let values = "\"\\\"\",".repeat(1000);
    let hostile = format!("{{\"a\": [{values}1], \"n\": 1}}");
    let batch = decoded(&keeping("a ARRAY<INT>, n INT"), &[hostile.as_bytes()]);
    assert_eq!(cells(&batch, "n"), [json!(1)]);
    let notes = notes(&batch).remove(0).unwrap();
    assert_eq!(notes.as_array().unwrap().len(), 17);
    assert_eq!(notes[15], note("a[15]", "expected an INT", "\"\\\"\""));
    let more = json!({"path": null, "reason": "984 more values do not fit", "text": null});
    assert_eq!(notes[16], more);
    assert!(texts(&batch, MALFORMED_FIELDS)[0].as_ref().unwrap().len() < 1500);
}

#[test]
fn value_as_variant_or_text_is_judged_by_itself() {
    let options = |schema: Option<&str>, format| {
        let named: &[&str] =
            if schema.is_some() { &["value", "a", MALFORMED_FIELDS] } else { &["value"] };
        with(columns(named), |o| {
            o.document_schema = schema.map(|schema| DocumentSchema::parse(schema).unwrap());
            o.value_format = format;
        })
    };
    let documents: [&[u8]; 3] = [br#"{"a": "x", "b": 1}"#, br#"{"a": 1, "b": 1e999}"#, b"[1]"];
    let batch = decoded(&options(Some("a INT"), ValueFormat::Variant), &documents);
    assert_eq!(cells(&batch, "a"), [Value::Null, json!(1), Value::Null]);
    assert_eq!(batch.column(0).null_count(), 1);
    let paths = notes(&batch).map_each(|notes| notes.unwrap()[0]["path"].clone());
    assert_eq!(paths, ["a", "", ""]);
    let batch = decoded(&options(None, ValueFormat::String), &[b"\xff", b"x"]);
    assert_eq!(texts(&batch, "value"), [None, Some("x".to_owned())]);
}

/// `into_iter().map().collect()`, which reads better at the end.
trait MapEach<T> {
    fn map_each<U>(self, f: impl FnMut(T) -> U) -> Vec<U>;
}

impl<T> MapEach<T> for Vec<T> {
    fn map_each<U>(self, f: impl FnMut(T) -> U) -> Vec<U> {
        self.into_iter().map(f).collect()
    }
}

fn tally(options: &TableOptions, changes: &[Change<'_>]) -> MalformedTally {
    let mut sink = sink(options);
    changes.iter().for_each(|change| sink.change(change).unwrap());
    let mut tally = DocumentTally::default();
    sink.take_batch().unwrap().finish_counting(&mut tally).unwrap();
    tally.malformed
}

#[test]
fn documents_are_counted_and_each_kind_is_new_once() {
    let at = |seqno, value| Change { seqno: Seqno(seqno), ..document(value) };
    let changes = [
        at(1, br#"{"n": 1, "a": []}"#),
        at(2, br#"{"n": "secret", "a": [{"p": "secret"}, {"p": 1.5}]}"#),
        at(3, br#"{"n": 1, "a": [{}, {"p": "secret"}]}"#),
        at(4, b"[]"),
        Change { datatype: Datatype::RAW, ..at(5, b"{}") },
        Change { op: Op::Deletion, ..at(6, b"") },
        at(7, b"secret"),
        at(8, b"{secret"),
    ];
    let options = keeping("n INT, a ARRAY<STRUCT<p: INT>>");
    // The count does not depend on which columns are read.
    for options in [options.clone(), with(options.clone(), |o| o.columns = columns(&["n"]).columns)]
    {
        let mut all = MalformedTally::default();
        let new = all.add(tally(&options, &changes));
        assert_eq!((all.whole, all.partial), (4, 2));
        let new = new.map_each(|kind| (kind.field, kind.reason, kind.vbid, kind.seqno.0));
        let kind = |field: &str, reason: &str, seqno| {
            (field.to_owned(), reason.to_owned(), Vbid(7), seqno)
        };
        assert_eq!(
            new,
            [
                kind("", "expected an object", 4),
                kind("", "key must be a string", 8),
                kind("", "not JSON", 5),
                kind("a[].p", "expected an INT", 2),
                kind("n", "expected an INT", 2),
            ]
        );
        assert_eq!(all.add(tally(&options, &changes)), []);
        assert_eq!((all.whole, all.partial), (8, 4));
    }
    let column = with(options, |o| o.on_malformed = OnMalformed::Column);
    let mut all = MalformedTally::default();
    assert_eq!(all.add(tally(&column, &changes)), [], "the column says why");
    assert_eq!((all.whole, all.partial), (6, 0));
}

#[test]
fn fields_that_documents_have_are_noted_apart_from_their_values() {
    let schema = "name STRING, nmae STRING, gone INT, wrong INT, dropped STRING, o STRUCT<x: INT>";
    let masks = FieldMasks::new(&["dropped"], &[] as &[&str], None).unwrap();
    for on_malformed in [OnMalformed::Null, OnMalformed::Column] {
        let options = with(keeping(schema), |o| {
            (o.on_malformed, o.masks) = (on_malformed, masks.clone());
        });
        let mut sink = sink(&options);
        for value in [r#"{"gone": null}"#, r#"{"wrong": "x"}"#, r#"{"name": ""}"#, "[]", "{"] {
            sink.change(&document(value.as_bytes())).unwrap();
        }
        let mut tally = DocumentTally::default();
        sink.take_batch().unwrap().finish_counting(&mut tally).unwrap();
        let unseen = |(index, name)| (!tally.decoded.has_seen(index)).then_some(name);
        let unseen: Vec<_> = sink.schema().decoded_fields().filter_map(unseen).collect();
        assert_eq!(unseen, ["nmae", "o"], "{on_malformed:?}");
        let expected = if on_malformed == OnMalformed::Null { 3 } else { 2 };
        assert_eq!(tally.decoded.documents, expected);
    }
}
