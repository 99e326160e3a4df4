//! Schemas that are inferred and grow: no value is lost.

use arrow_array::cast::AsArray;
use arrow_array::types::{Decimal128Type, Float64Type, Int8Type, Int64Type};
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::DataType;
use dcp_arrow::{
    DocumentDecoder, DocumentSchema, EXTRA, FLAGS, GivenDocuments, GivenKind, HAS_MALFORMED,
    HAS_UNMAPPED, IS_MALFORMED, Names, Nested, Observations, Sightings,
};
use proptest::prelude::*;

/// Documents as a column.
struct Column {
    offsets: Vec<i32>,
    bytes: Vec<u8>,
    kinds: Vec<GivenKind>,
}

impl Column {
    fn new<T: AsRef<[u8]>>(documents: &[T]) -> Self {
        let (mut offsets, mut bytes) = (vec![0], Vec::new());
        for document in documents {
            bytes.extend_from_slice(document.as_ref());
            offsets.push(i32::try_from(bytes.len()).unwrap());
        }
        Self { offsets, bytes, kinds: vec![GivenKind::Json; documents.len()] }
    }

    fn documents(&self) -> GivenDocuments<'_> {
        GivenDocuments { offsets: &self.offsets, bytes: &self.bytes, kinds: &self.kinds }
    }
}

fn names(nested: Nested) -> Names {
    Names::new(nested, ["key".to_owned(), "value".to_owned()])
}

fn decoder(schema: &DocumentSchema, nested: Nested) -> DocumentDecoder {
    let names = names(nested);
    let columns = names.columns(schema);
    DocumentDecoder::new(schema.clone(), names, columns).exact_if(true).extra_if(true)
}

fn inferred<T: AsRef<[u8]>>(documents: &[T], nested: Nested) -> Option<String> {
    let mut seen = Observations::default();
    Column::new(documents).documents().observe(&mut seen);
    names(nested).inferred(&seen).map(|schema| schema.to_ddl())
}

fn decoded<T: AsRef<[u8]>>(ddl: &str, documents: &[T], nested: Nested) -> RecordBatch {
    let schema = DocumentSchema::parse(ddl).unwrap();
    let mut seen = Sightings::default();
    decoder(&schema, nested).decode(Column::new(documents).documents(), &mut seen).unwrap()
}

fn grown<T: AsRef<[u8]>>(ddl: &str, documents: &[T], nested: Nested) -> String {
    let schema = DocumentSchema::parse(ddl).unwrap();
    let column = Column::new(documents);
    decoder(&schema, nested).grown(column.documents(), true, true).to_ddl()
}

fn flags(batch: &RecordBatch) -> Vec<i8> {
    batch.column_by_name(FLAGS).unwrap().as_primitive::<Int8Type>().values().to_vec()
}

fn text(batch: &RecordBatch, column: &str, row: usize) -> Option<String> {
    batch.column_by_name(column).and_then(|column| cell(column, row))
}

fn cell(column: &ArrayRef, row: usize) -> Option<String> {
    if column.is_null(row) {
        return None;
    }
    Some(match column.data_type() {
        DataType::Utf8 => column.as_string::<i32>().value(row).to_owned(),
        DataType::Boolean => column.as_boolean().value(row).to_string(),
        DataType::Int64 => column.as_primitive::<Int64Type>().value(row).to_string(),
        DataType::Float64 => format!("{:e}", column.as_primitive::<Float64Type>().value(row)),
        DataType::Decimal128(..) => column.as_primitive::<Decimal128Type>().value_as_string(row),
        other => panic!("a column of {other}"),
    })
}

/// The digits of a number and the exponent of the first, whichever way it is written.
fn number(text: &str) -> Option<(bool, String, i64)> {
    let (sign, rest) = text.strip_prefix('-').map_or((false, text), |rest| (true, rest));
    let (mantissa, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    let exponent: i64 = exponent.parse().ok()?;
    let zeros = digits.len() - digits.trim_start_matches('0').len();
    let significant = digits.trim_matches('0').to_owned();
    if significant.is_empty() {
        return Some((false, significant, 0));
    }
    let first = i64::try_from(whole.len()).unwrap() - i64::try_from(zeros).unwrap() + exponent;
    Some((sign, significant, first))
}

fn holds(cell: Option<&str>, value: &str) -> bool {
    let Some(cell) = cell else { return value == "null" };
    if let Ok(serde_json::Value::String(text)) = serde_json::from_str(value) {
        return cell == text;
    }
    cell == value || number(value).is_some_and(|value| number(cell) == Some(value))
}

fn value() -> impl Strategy<Value = String> {
    prop_oneof![
        Just("null".to_owned()),
        any::<bool>().prop_map(|flag| flag.to_string()),
        any::<i8>().prop_map(|number| number.to_string()),
        any::<i64>().prop_map(|number| number.to_string()),
        any::<u64>().prop_map(|number| number.to_string()),
        any::<f64>().prop_filter("finite", |n| n.is_finite()).prop_map(|n| format!("{n:e}")),
        "-?(0|[1-9][0-9]{0,40})\\.[0-9]{1,25}",
        "[1-9](\\.[0-9]{1,3})?[eE]-?[0-9]{1,3}",
        "\"[a-z0-9]{0,6}\"",
        Just("[1,{\"x\":2}]".to_owned()),
        Just("{}".to_owned()),
        Just("{\"x\":1,\"y\":{\"z\":\"é\"}}".to_owned()),
    ]
}

type Fields = Vec<(String, String)>;

fn fields() -> impl Strategy<Value = Fields> {
    prop::collection::btree_map("[a-d]|key|A", value(), 0..5)
        .prop_map(|fields| fields.into_iter().collect())
}

fn document(fields: &Fields) -> String {
    let members = fields.iter().map(|(name, value)| format!("\"{name}\":{value}"));
    format!("{{{}}}", members.collect::<Vec<_>>().join(","))
}

/// Asserts that each value is in its column, or in what no column holds.
fn assert_holds(batch: &RecordBatch, documents: &[Fields]) {
    let flags = flags(batch);
    for (row, fields) in documents.iter().enumerate() {
        let extra = text(batch, EXTRA, row).unwrap_or_default();
        for (name, value) in fields {
            let column = if name == "key" { "doc_key" } else { name };
            let in_extra = extra.contains(&format!("\"{name}\":{value}"));
            let is_held = batch.column_by_name(column).is_some()
                && holds(text(batch, column, row).as_deref(), value);
            assert!(is_held || in_extra || value == "null", "{name} {value}: {batch:?}");
            // Names that differ in case only share no column.
            assert!(name.eq_ignore_ascii_case("a") || !in_extra, "{name} {value} has a column");
        }
        assert_eq!(flags[row] & (HAS_MALFORMED | IS_MALFORMED), 0);
    }
}

proptest! {
    #[test]
    fn schema_that_is_inferred_holds_every_value(documents in prop::collection::vec(fields(), 1..8)) {
        let texts: Vec<_> = documents.iter().map(document).collect();
        if let Some(ddl) = inferred(&texts, Nested::Json) {
            prop_assert_eq!(DocumentSchema::parse(&ddl).unwrap().to_ddl(), ddl.clone());
            assert_holds(&decoded(&ddl, &texts, Nested::Json), &documents);
        }
    }

    #[test]
    fn schema_that_grows_holds_every_value_of_before(
        before in prop::collection::vec(fields(), 1..6),
        after in prop::collection::vec(fields(), 1..6),
    ) {
        let (old, new): (Vec<_>, Vec<_>) =
            (before.iter().map(document).collect(), after.iter().map(document).collect());
        if let Some(ddl) = inferred(&old, Nested::Json) {
            let ddl = grown(&ddl, &new, Nested::Json);
            assert_holds(&decoded(&ddl, &old, Nested::Json), &before);
            assert_holds(&decoded(&ddl, &new, Nested::Json), &after);
            // What holds everything stays as it is.
            prop_assert_eq!(grown(&ddl, &new, Nested::Json), ddl.clone());
            prop_assert_eq!(grown(&ddl, &old, Nested::Json), ddl);
        }
    }
}

/// Bytes that are seldom JSON, and text that nearly is.
fn anything() -> impl Strategy<Value = Vec<u8>> {
    let like_json = r#"(\{("[ab]{1,2}|\\u[0-9d]{4}"|[{}\[\],:"\\ 0-9.eu-]|true|null){0,12}\}?)"#;
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40),
        like_json.prop_map(String::into_bytes),
        fields().prop_map(|fields| document(&fields).into_bytes()),
    ]
}

proptest! {
    #[test]
    fn rest_of_whatever_documents_is_json(documents in prop::collection::vec(anything(), 1..6)) {
        for nested in [Nested::Json, Nested::Struct, Nested::Columns] {
            let Some(ddl) = inferred(&documents, nested) else { continue };
            let batch = decoded(&ddl, &documents, nested);
            for (row, flags) in flags(&batch).into_iter().enumerate() {
                let rest = text(&batch, EXTRA, row);
                prop_assert_eq!(rest.is_some(), flags & (HAS_UNMAPPED | HAS_MALFORMED) > 0);
                let is_json = rest.is_none_or(|rest| dcp_arrow::json_depth(rest.as_bytes()) >= Some(1));
                prop_assert!(is_json);
            }
        }
    }
}

#[test]
fn types_are_the_smallest_that_hold_every_value() {
    for (values, expected) in [
        (&["1", "-9223372036854775808"][..], "BIGINT"),
        (&["1", "0.5"], "DOUBLE"),
        (&["9223372036854775808"], "DECIMAL(38, 0)"),
        (&["0.1234567890123456789"], "DECIMAL(38, 19)"),
        (&["1e300", "12345678901234567890"], "STRING"),
        (&["true", "null"], "BOOLEAN"),
        (&["true", "1"], "STRING"),
        (&["[1]", "[]"], "STRING"),
        (&["{}"], "STRING"),
    ] {
        let documents: Vec<_> = values.iter().map(|value| format!("{{\"a\":{value}}}")).collect();
        assert_eq!(inferred(&documents, Nested::Json), Some(format!("a {expected}")), "{values:?}");
    }
    assert_eq!(inferred(&["{\"a\":null}", "{}"], Nested::Json), None);
    assert_eq!(inferred(&["[1]", "7", "x"], Nested::Json), None);
}

#[test]
fn types_widen_to_the_smallest_that_hold_what_was_there() {
    for (kind, value, expected) in [
        ("TINYINT", "128", "BIGINT"),
        ("INT", "0.5", "DECIMAL(38, 9)"),
        ("BIGINT", "0.5", "DECIMAL(38, 9)"),
        ("BIGINT", "0.12345678901", "DECIMAL(38, 18)"),
        ("BIGINT", "1e-25", "STRING"),
        ("BIGINT", "9223372036854775808", "DECIMAL(38, 0)"),
        ("BIGINT", "\"x\"", "STRING"),
        ("BIGINT", "true", "STRING"),
        ("FLOAT", "1e300", "DOUBLE"),
        ("DOUBLE", "9007199254740993", "STRING"),
        ("DOUBLE", "1e300", "DOUBLE"),
        ("DECIMAL(5, 2)", "0.125", "DECIMAL(38, 9)"),
        ("DECIMAL(38, 9)", "123456789012345678901234567890", "STRING"),
        ("BOOLEAN", "{}", "STRING"),
        ("STRING", "{}", "STRING"),
        // What these hold has another text.
        ("DATE", "1", "DATE"),
        ("TIMESTAMP", "\"x\"", "TIMESTAMP"),
        ("ARRAY<BIGINT>", "1", "ARRAY<BIGINT>"),
    ] {
        let document = format!("{{\"a\":{value}}}");
        let ddl = grown(&format!("a {kind}"), &[document], Nested::Json);
        assert_eq!(ddl, format!("a {expected}"), "{kind} {value}");
    }
}

#[test]
fn members_of_objects_become_columns_that_are_free() {
    let documents = [r#"{"geo":{"lat":1.5,"city":{"name":"x"}},"key":1}"#, r#"{"geo":null}"#];
    let ddl = inferred(&documents, Nested::Columns).unwrap();
    assert_eq!(ddl, "geo STRUCT<lat: DOUBLE, city: STRUCT<name: STRING>>, key BIGINT");
    let batch = decoded(&ddl, &documents, Nested::Columns);
    assert_eq!(text(&batch, "geo__lat", 0).as_deref(), Some("1.5e0"));
    assert_eq!(text(&batch, "geo__city__name", 0).as_deref(), Some("x"));
    assert_eq!(text(&batch, "doc_key", 0).as_deref(), Some("1"));
    assert_eq!(text(&batch, "geo__lat", 1), None);
    let more = [r#"{"geo":{"lon":2}}"#];
    let ddl = grown(&ddl, &more, Nested::Columns);
    assert_eq!(text(&decoded(&ddl, &more, Nested::Columns), "geo__lon", 0).as_deref(), Some("2"));
    // A path that is a name already: the object has a column of its own.
    let ddl = inferred(&[r#"{"a__b":1,"a":{"b":2}}"#], Nested::Columns).unwrap();
    assert_eq!(ddl, "a__b BIGINT, a STRING");
}

#[test]
fn fields_whose_names_no_column_can_have_stay_in_the_rest() {
    let long = "x".repeat(64);
    let document = format!(r#"{{"":1,"a`b":2,"a\"c":3,"{long}":4,"n":5,"N":6}}"#);
    let ddl = inferred(&[&document], Nested::Json).unwrap();
    assert_eq!(ddl, "n BIGINT");
    let batch = decoded(&ddl, &[&document], Nested::Json);
    let extra = format!(r#"{{"":1,"a`b":2,"a\"c":3,"{long}":4,"N":6}}"#);
    assert_eq!(text(&batch, EXTRA, 0), Some(extra));
    assert_eq!(flags(&batch), [HAS_UNMAPPED]);
}

#[test]
fn rest_has_what_no_column_holds_as_it_was_written() {
    let documents = [
        r#"{"n" : "x", "s": {"a": 1, "b": [ 2 ]}, "o": null}"#,
        r#"{"n": 1, "n": 2, "m": {"z" :1e2}}"#,
        r#"{"s": {"a": 1.5}}"#,
        r#"{"n": 1, "s": {"a": 2}}"#,
        "[1]",
        r#"{"\u0062ig": "\ud83d\ude00"}"#,
    ];
    let batch = decoded("n BIGINT, s STRUCT<a: BIGINT>", &documents, Nested::Struct);
    let found: Vec<_> = (0..documents.len()).map(|row| text(&batch, EXTRA, row)).collect();
    let found: Vec<_> = found.iter().map(Option::as_deref).collect();
    assert_eq!(
        found,
        [
            Some(r#"{"n":"x","s":{"b":[ 2 ]}}"#),
            Some(r#"{"n":1,"n":2,"m":{"z" :1e2}}"#),
            Some(r#"{"s":{"a":1.5}}"#),
            None,
            None,
            Some(r#"{"\u0062ig":"\ud83d\ude00"}"#),
        ]
    );
    assert_eq!(
        flags(&batch),
        [
            HAS_UNMAPPED | HAS_MALFORMED,
            HAS_UNMAPPED | HAS_MALFORMED,
            HAS_MALFORMED,
            0,
            IS_MALFORMED,
            HAS_UNMAPPED,
        ]
    );
}

#[test]
fn observations_are_bounded_in_fields_and_depth() {
    let many: Vec<_> = (0..3000).map(|n| format!("{{\"f{n}\":{{\"g\":1}}}}")).collect();
    let mut seen = Observations::default();
    Column::new(&many).documents().observe(&mut seen);
    assert_eq!(seen.fields(Nested::Struct).len(), 1000);
    let ddl = inferred(&many[..900], Nested::Json).unwrap();
    let ddl = grown(&ddl, &many[900..1500], Nested::Json);
    assert_eq!(DocumentSchema::parse(&ddl).unwrap().names().len(), 1000);
    let deep = format!("{}1{}", "{\"a\":".repeat(5000), "}".repeat(5000));
    let ddl = inferred(&[&deep], Nested::Struct).unwrap();
    assert!(ddl.len() < 1000, "{ddl}");
    let batch = decoded(&ddl, &[&deep], Nested::Struct);
    // Deeper than any text column takes.
    assert_eq!(
        (flags(&batch), text(&batch, EXTRA, 0).as_ref()),
        (vec![HAS_MALFORMED], Some(&deep))
    );
    let less = format!("{}1{}", "{\"a\":".repeat(100), "}".repeat(100));
    assert_eq!(flags(&decoded(&ddl, &[&less], Nested::Struct)), [0]);
    let mut seen = Observations::default();
    for document in [&b"\xff"[..], b"{", b"[1]", b"{\"a\":1", b"{}"] {
        seen.add(document, true);
    }
    seen.add(b"{}", false);
    assert_eq!((seen.objects, seen.others, seen.binary), (1, 1, 4));
}
