//! Documents as typed columns, and what becomes of those that do not fit.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::DataType;
use dcp_arrow::{
    ArrowSink, BatchLimits, CollectionNames, DocumentSchema, OnMalformed, TableOptions,
    TableSchema, ValueFormat,
};
use dcp_proto::{BatchSink, Change, ChangeSink, Op, SinkError};
use dcp_test::with;
use dcp_wire::xattr::Xattr;
use dcp_wire::{Datatype, Seqno, snappy, xattr};
use serde_json::{Value, json};

use crate::{CHANGE, batch_of, bytes, columns, texts};

pub(crate) fn decoding(schema: &str) -> TableOptions {
    let document_schema = Some(DocumentSchema::parse(schema).unwrap());
    with(TableOptions::default(), |o| {
        o.document_schema = document_schema;
        o.on_malformed = OnMalformed::Column;
    })
}

pub(crate) fn document(value: &[u8]) -> Change<'_> {
    Change { value, ..CHANGE }
}

pub(crate) fn decoded(options: &TableOptions, documents: &[&[u8]]) -> RecordBatch {
    let changes: Vec<Change<'_>> = documents.iter().map(|value| document(value)).collect();
    batch_of(options, &changes)
}

/// A cell as JSON; dates, times and decimals as the numbers they are stored as.
pub(crate) fn cell(column: &ArrayRef, row: usize) -> Value {
    use arrow_array::types::*;
    if column.is_null(row) {
        return Value::Null;
    }
    let all = |elements: &ArrayRef| (0..elements.len()).map(|row| cell(elements, row)).collect();
    match column.data_type() {
        DataType::Boolean => json!(column.as_boolean().value(row)),
        DataType::Int8 => json!(column.as_primitive::<Int8Type>().value(row)),
        DataType::Int16 => json!(column.as_primitive::<Int16Type>().value(row)),
        DataType::Int32 => json!(column.as_primitive::<Int32Type>().value(row)),
        DataType::Int64 => json!(column.as_primitive::<Int64Type>().value(row)),
        DataType::Float32 => json!(column.as_primitive::<Float32Type>().value(row)),
        DataType::Float64 => json!(column.as_primitive::<Float64Type>().value(row)),
        DataType::Decimal128(..) => {
            json!(column.as_primitive::<Decimal128Type>().value(row).to_string())
        }
        DataType::Date32 => json!(column.as_primitive::<Date32Type>().value(row)),
        DataType::Timestamp(..) => {
            json!(column.as_primitive::<TimestampMicrosecondType>().value(row))
        }
        DataType::Utf8 => json!(column.as_string::<i32>().value(row)),
        DataType::Binary => json!(column.as_binary::<i32>().value(row)),
        DataType::List(_) => Value::Array(all(&column.as_list::<i32>().value(row))),
        DataType::Map(..) => {
            let entries = column.as_map().value(row);
            let keys = entries.column(0).as_string::<i32>();
            (0..entries.len())
                .map(|entry| (keys.value(entry).to_owned(), cell(entries.column(1), entry)))
                .collect()
        }
        DataType::Struct(fields) => fields
            .iter()
            .zip(column.as_struct().columns())
            .map(|(field, column)| (field.name().clone(), cell(column, row)))
            .collect(),
        other => panic!("{other}"),
    }
}

/// The cells of one column.
pub(crate) fn cells(batch: &RecordBatch, column: &str) -> Vec<Value> {
    let column = batch.column_by_name(column).unwrap();
    (0..column.len()).map(|row| cell(column, row)).collect()
}

/// What a document `{"f": json}` has in a column of this type; none if it is malformed.
fn field(kind: &str, json: &str) -> Option<Value> {
    let text = format!("{{\"f\": {json}}}");
    let batch = decoded(&decoding(&format!("f {kind}")), &[text.as_bytes()]);
    let is_malformed = bytes(&batch, "_malformed")[0].is_some();
    let value = cells(&batch, "f").remove(0);
    assert!(!is_malformed || value.is_null());
    (!is_malformed).then_some(value)
}

#[test]
fn column_types_take_their_json_and_no_other() {
    const DAY: i64 = 86_400_000_000;
    for (kind, json, expected) in [
        ("STRING", r#""a\u00e9\n\ud83d\ude00""#, json!("aé\n😀")),
        ("STRING", "12.50", json!("12.50")),
        ("STRING", r#"{"a" :[1 , true]}"#, json!(r#"{"a" :[1 , true]}"#)),
        ("BOOLEAN", "true", json!(true)),
        ("BOOLEAN", "false", json!(false)),
        ("TINYINT", "-128", json!(-128)),
        ("SMALLINT", "32767", json!(32767)),
        ("INT", "-2147483648", json!(i32::MIN)),
        ("BIGINT", "9223372036854775807", json!(i64::MAX)),
        ("BIGINT", "-0", json!(0)),
        ("FLOAT", "0.1", json!(0.1_f32)),
        ("DOUBLE", "1e-7", json!(1e-7)),
        ("DOUBLE", "18446744073709551616", json!(18_446_744_073_709_551_616_f64)),
        ("DECIMAL(6, 2)", "1234.565", json!("123457")),
        ("DECIMAL(6, 2)", "\"-1.5\"", json!("-150")),
        ("DATE", "\"1970-01-02\"", json!(1)),
        ("TIMESTAMP", "\"1970-01-02T01:00:00+01:00\"", json!(DAY)),
        ("TIMESTAMP", "\"1970-01-02\"", json!(DAY)),
        ("TIMESTAMP", "86400", json!(DAY)),
        ("TIMESTAMP_NTZ", "\"1970-01-02 00:00:00.000001\"", json!(DAY + 1)),
        ("BINARY", "\"AAH/\"", json!([0, 1, 255])),
        ("BINARY", "\"AA\"", json!([0])),
        ("ARRAY<INT>", "[1, null, 3]", json!([1, null, 3])),
        ("ARRAY<ARRAY<STRING>>", "[[], null, [\"a\"]]", json!([[], null, ["a"]])),
        ("MAP<STRING, INT>", r#"{"b": 1, "a": null}"#, json!({"b": 1, "a": null})),
        ("STRUCT<a: INT, b: STRING>", r#"{"x": [1], "a": 1}"#, json!({"a": 1, "b": null})),
        ("STRUCT<a: INT>", "null", Value::Null),
        ("VARIANT", "null", Value::Null),
        ("VARIANT", "-1", json!({"value": [12, 255], "metadata": [1, 0, 0]})),
        (
            "VARIANT",
            r#"{"b": null}"#,
            json!({"value": [2, 1, 0, 0, 1, 0], "metadata": [1, 1, 0, 1, 98]}),
        ),
        ("ARRAY<VARIANT>", "[1, null]", json!([{"value": [12, 1], "metadata": [1, 0, 0]}, null])),
    ] {
        assert_eq!(field(kind, json), Some(expected), "{kind} {json}");
    }
    for (kind, json) in [
        ("BOOLEAN", "\"true\""),
        ("BOOLEAN", "1"),
        ("TINYINT", "128"),
        ("SMALLINT", "-32769"),
        ("INT", "2147483648"),
        ("INT", "1.0"),
        ("INT", "1e3"),
        ("INT", "\"1\""),
        ("INT", "true"),
        ("BIGINT", "9223372036854775808"),
        ("FLOAT", "1e39"),
        ("DOUBLE", "1e309"),
        ("DOUBLE", "NaN"),
        ("DOUBLE", "\"1\""),
        ("DECIMAL(6, 2)", "12345.67"),
        ("DECIMAL(6, 2)", "\"1,5\""),
        ("DECIMAL(6, 2)", "\"1 2\""),
        ("DATE", "\"1970-02-30\""),
        ("DATE", "1"),
        ("TIMESTAMP", "\"yesterday\""),
        ("TIMESTAMP", "1.5"),
        ("TIMESTAMP", "9223372036854775807"),
        ("TIMESTAMP_NTZ", "\"1970-01-02T00:00:00Z\""),
        ("TIMESTAMP_NTZ", "86400"),
        ("BINARY", "\"A-\""),
        ("ARRAY<INT>", "{}"),
        ("ARRAY<INT>", "[1, \"2\"]"),
        ("MAP<STRING, INT>", "[]"),
        ("MAP<STRING, INT>", r#"{"a": 1, "b": 2, "a": 3}"#),
        ("STRUCT<a: INT>", r#"{"a": 1, "a": 1}"#),
        ("STRUCT<a: INT>", "[]"),
        ("STRING", r#""\ud800""#),
        ("VARIANT", r#"{"a": 1, "a": 1}"#),
        ("VARIANT", "1e999"),
    ] {
        assert_eq!(field(kind, json), None, "{kind} {json}");
    }
}

#[test]
fn document_is_judged_as_a_whole() {
    let good: &[u8] = br#"{"n": 1, "s": "a", "l": [1, 2]}"#;
    let documents: [&[u8]; 9] = [
        good,
        br#"{"n": 2, "s": "b", "l": [3, "x"]}"#,
        br#"{"n": 3, "s": "c", "l": [4]"#,
        br#"{"n": 4, "n": 5}"#,
        b"{\"n\": 6, \"extra\": \"\xff\"}",
        br#"{"n": 7} {}"#,
        b"[]",
        b"",
        good,
    ];
    let batch = decoded(&decoding("n INT, s STRING, l ARRAY<INT>"), &documents);
    let ones = |value: Value| [vec![value.clone()], vec![Value::Null; 7], vec![value]].concat();
    assert_eq!(cells(&batch, "n"), ones(json!(1)));
    assert_eq!(cells(&batch, "s"), ones(json!("a")));
    assert_eq!(cells(&batch, "l"), ones(json!([1, 2])));
    let malformed = bytes(&batch, "_malformed");
    for (row, document) in documents.iter().enumerate() {
        let expected = (1..8).contains(&row).then(|| document.to_vec());
        assert_eq!(malformed[row], expected, "{row}");
    }
}

#[test]
fn variant_goes_with_its_document() {
    let documents: [&[u8]; 4] = [
        br#"{"v": {"a": 1}, "n": 1}"#,
        br#"{"v": {"b": 2}, "n": "x"}"#,
        br#"{"n": 3}"#,
        br#"{"v": true, "n": 4}"#,
    ];
    let batch = decoded(&decoding("v VARIANT, n INT"), &documents);
    assert_eq!(cells(&batch, "n"), [json!(1), Value::Null, json!(3), json!(4)]);
    let object = json!({"value": [2, 1, 0, 0, 2, 12, 1], "metadata": [1, 1, 0, 1, 97]});
    let flag = json!({"value": [4], "metadata": [1, 0, 0]});
    assert_eq!(cells(&batch, "v"), [object, Value::Null, Value::Null, flag]);
}

#[test]
fn document_cut_anywhere_is_malformed() {
    let whole = br#"{"a": [{"b": "\u00e9x"}, null], "c": {"d": -1.5e3}, "e": true}"#;
    let schema = "a ARRAY<STRUCT<b: STRING>>, c MAP<STRING, DOUBLE>, e BOOLEAN";
    let documents: Vec<&[u8]> = (0..=whole.len()).map(|end| &whole[..end]).collect();
    let batch = decoded(&decoding(schema), &documents);
    let malformed = bytes(&batch, "_malformed");
    assert!(malformed[..whole.len()].iter().all(Option::is_some));
    assert_eq!(malformed[whole.len()], None);
    assert_eq!(cells(&batch, "a")[whole.len()], json!([{"b": "éx"}, null]));
    assert_eq!(cells(&batch, "c")[whole.len()], json!({"d": -1500.0}));
}

#[test]
fn document_that_is_no_json_has_no_columns() {
    let json = document(br#"{"n": 1}"#);
    let binary = Change { datatype: Datatype::RAW, ..json };
    let removed = Change { op: Op::Deletion, value: b"no document", ..json };
    let expired = Change { op: Op::Expiration, value: b"", ..json };
    let batch = batch_of(&decoding("n INT"), &[json, binary, removed, expired]);
    assert_eq!(cells(&batch, "n"), [json!(1), Value::Null, Value::Null, Value::Null]);
    let malformed = bytes(&batch, "_malformed");
    assert_eq!(malformed, [None, Some(binary.value.to_vec()), None, None]);
}

#[test]
fn documents_that_are_compressed_or_have_xattrs_are_decoded() {
    let body = br#"{"n": 12345, "s": "xxxxxxxxxxxxxxxxxxxxxxxxxx"}"#;
    let mut with_attributes = Vec::new();
    xattr::encode([Xattr { name: b"_sync", value: b"{}" }], &mut with_attributes).unwrap();
    with_attributes.extend_from_slice(body);
    let (compressed, both) =
        (snappy::compress(body).unwrap(), snappy::compress(&with_attributes).unwrap());
    let of = |value, more| Change { value, datatype: Datatype::JSON.with(more), ..CHANGE };
    let changes = [
        of(body, Datatype::RAW),
        of(&compressed, Datatype::SNAPPY),
        of(&with_attributes, Datatype::XATTR),
        of(&both, Datatype::XATTR.with(Datatype::SNAPPY)),
    ];
    let batch = batch_of(&decoding("n INT"), &changes);
    assert_eq!(cells(&batch, "n"), vec![json!(12345); 4]);
    let text = with(columns(&["value"]), |o| o.value_format = ValueFormat::String);
    let expected = String::from_utf8(body.to_vec()).unwrap();
    assert_eq!(texts(&batch_of(&text, &changes), "value"), vec![Some(expected); 4]);
}

fn error_of(options: &TableOptions, change: &Change<'_>) -> SinkError {
    let schema = TableSchema::new(options).unwrap();
    let mut sink = ArrowSink::new(schema, CollectionNames::default(), BatchLimits::default());
    sink.change(&document(br#"{"n": 1}"#)).unwrap();
    sink.change(change).unwrap();
    sink.take_batch().unwrap().finish().unwrap_err()
}

#[test]
fn document_that_is_malformed_fails_the_read_by_its_place_not_its_content() {
    let options =
        with(decoding("n INT, o STRUCT<secret: INT>"), |o| o.on_malformed = OnMalformed::Fail);
    for (value, said) in [
        (
            &br#"{"n": "secret"}"#[..],
            "the document is malformed: column \"n\": expected an INT at byte 6",
        ),
        (br#"{"o": {"secret": 99999999999}}"#, "column \"o\": expected an INT at byte"),
        (br#"{"secret": 1, "secret" 2}"#, "expected `:` at byte 23"),
        (b"secret", "expected"),
        (b"\xffsecret", "not UTF-8 at byte 0"),
    ] {
        let error = error_of(&options, &Change { value, seqno: Seqno(77), ..CHANGE });
        let text = error.to_string();
        assert!(matches!(error, SinkError::Malformed { seqno: Seqno(77), .. }), "{text}");
        assert!(text.contains("77") && text.contains(said), "{text}");
        let key = std::str::from_utf8(CHANGE.key).unwrap();
        assert!(!text.contains("secret") && !text.contains(key), "{text}");
    }
    let binary = Change { datatype: Datatype::RAW, ..CHANGE };
    assert!(error_of(&options, &binary).to_string().ends_with("the document is not JSON"));
}

#[test]
fn document_of_any_depth_neither_overflows_the_stack_nor_stops_the_read() {
    let nested = |open: &str, close: &str| {
        let depth = 100_000;
        format!("{{\"f\": {}{}, \"n\": 1}}", open.repeat(depth), close.repeat(depth)).into_bytes()
    };
    let documents = [nested("[", "]"), nested("{\"f\":", "}"), b"{\"n\": 1}".to_vec()];
    let documents: Vec<&[u8]> = documents.iter().map(Vec::as_slice).collect();
    for schema in ["n INT", "n INT, f ARRAY<ARRAY<INT>>", "n INT, f STRING"] {
        let batch = decoded(&decoding(schema), &documents);
        assert_eq!(cells(&batch, "n"), [Value::Null, Value::Null, json!(1)], "{schema}");
    }
    let variant = with(columns(&["value", "_malformed"]), |o| {
        o.value_format = ValueFormat::Variant;
        o.on_malformed = OnMalformed::Column;
    });
    let batch = decoded(&variant, &documents);
    assert_eq!(batch.column(0).null_count(), 2);
    assert_eq!(bytes(&batch, "_malformed")[2], None);
}

#[test]
fn document_that_becomes_large_is_malformed() {
    // Three bytes each become a place in three hundred columns.
    let fields: Vec<String> = (0..300).map(|number| format!("f{number} BIGINT")).collect();
    let schema = format!("n INT, a ARRAY<STRUCT<{}>>", fields.join(", "));
    let hostile = format!("{{\"n\": 1, \"a\": [{}{{}}]}}", "{},".repeat(100_000));
    let batch = decoded(&decoding(&schema), &[hostile.as_bytes(), b"{\"n\": 2, \"a\": [{}]}"]);
    assert_eq!(cells(&batch, "n"), [Value::Null, json!(2)]);
    assert_eq!(bytes(&batch, "_malformed")[0].as_deref(), Some(hostile.as_bytes()));
}

#[test]
fn value_may_be_text() {
    let options = with(columns(&["value", "_malformed"]), |o| {
        o.value_format = ValueFormat::String;
        o.on_malformed = OnMalformed::Column;
    });
    // The halves of a character in two rows are not a text together.
    let documents: [&[u8]; 5] = [b"{}", b"a\xc3", b"\xa9b", "é".as_bytes(), b""];
    let batch = decoded(&options, &documents);
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(texts(&batch, "value"), [text("{}"), None, None, text("é"), text("")]);
    let malformed = [None, Some(b"a\xc3".to_vec()), Some(b"\xa9b".to_vec()), None, None];
    assert_eq!(bytes(&batch, "_malformed"), malformed);
    let removed = Change { op: Op::Deletion, value: b"no document", ..CHANGE };
    let batch = batch_of(&options, &[document(b"{}"), removed]);
    assert_eq!(texts(&batch, "value"), [text("{}"), None]);
}

#[test]
fn value_may_be_a_variant() {
    let options = with(columns(&["value", "_malformed"]), |o| {
        o.value_format = ValueFormat::Variant;
        o.on_malformed = OnMalformed::Column;
    });
    let binary = Change { datatype: Datatype::RAW, ..CHANGE };
    let removed = Change { op: Op::Deletion, value: b"no document", ..CHANGE };
    let batch = batch_of(&options, &[document(br#"{"a": 1}"#), binary, removed, document(b"[")]);
    let variants = batch.column(0).as_struct();
    assert_eq!(
        (0..4).map(|row| variants.is_valid(row)).collect::<Vec<_>>(),
        [true, false, false, false]
    );
    assert_eq!(variants.column(0).as_binary::<i32>().value(0), [2, 1, 0, 0, 2, 12, 1]);
    assert_eq!(variants.column(1).as_binary::<i32>().value(0), [1, 1, 0, 1, b'a']);
    let malformed = bytes(&batch, "_malformed");
    assert_eq!(malformed, [None, Some(CHANGE.value.to_vec()), None, Some(b"[".to_vec())]);
    let schema = batch.schema();
    let DataType::Struct(fields) = schema.field(0).data_type() else { panic!() };
    assert_eq!(fields[1].metadata().get("variant").map(String::as_str), Some("true"));
}

#[test]
fn columns_read_do_not_change_what_is_malformed() {
    let options = decoding("a INT, b INT");
    let documents: [&[u8]; 2] = [br#"{"a": 1, "b": "x"}"#, br#"{"a": 2, "b": 3}"#];
    let names = |names: &[&str]| columns(names).columns;
    let one = with(options.clone(), |o| o.columns = names(&["a"]));
    assert_eq!(cells(&decoded(&one, &documents), "a"), [Value::Null, json!(2)]);
    let only = with(options, |o| o.columns = names(&["_malformed"]));
    let malformed = bytes(&decoded(&only, &documents), "_malformed");
    assert_eq!(malformed, [Some(documents[0].to_vec()), None]);
}
