//! Documents as columns.

use dcp_test::with;

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch};
use dcp_arrow::{
    ArrowSink, BatchLimits, CollectionNames, Columns, DocumentSchema, FieldMasks, KeyType,
    MALFORMED, MALFORMED_FIELDS, OnMalformed, TableOptions, TableSchema, ValueFormat,
};
use dcp_proto::{BatchSink, Change, ChangeSink, Op, SinkError, Snapshot};
use dcp_wire::{Cas, CollectionId, Datatype, RevSeqno, Seqno, Vbid, Vbuuid};

use crate::bytes_in::BytesIn;

/// A column of each type there is, and of each type within others. An input decodes one group or
/// all: what a column costs is mostly the watch that libFuzzer keeps on it.
const GROUPS: [&str; 7] = [
    "b BOOLEAN, t TINYINT, h SMALLINT, i INT, l BIGINT",
    "f FLOAT, d DOUBLE, m DECIMAL(9, 3), w DECIMAL(38, 10)",
    "s STRING, x BINARY",
    "y DATE, z TIMESTAMP, n TIMESTAMP_NTZ",
    "v VARIANT",
    "a ARRAY<BIGINT>, o MAP<STRING, DOUBLE>",
    "r STRUCT<s: STRING, a: ARRAY<STRUCT<i: INT, v: VARIANT>>, o: MAP<STRING, ARRAY<STRING>>>",
];

/// A table that keeps what is malformed, and the same one that fails, or keeps what fits.
type Triple = [TableSchema; 3];

/// Few columns that are not made of documents: other kinds of tables have all.
fn named(columns: &[&str]) -> Columns {
    Columns::Named(["seqno", "key"].iter().chain(columns).map(|&name| name.to_owned()).collect())
}

/// Tables by their kind; those that decode documents, by their group of columns.
fn tables() -> [Vec<Triple>; 4] {
    let all = GROUPS.join(", ");
    let decoded = GROUPS.into_iter().chain([all.as_str()]).map(|columns| {
        let schema = DocumentSchema::parse(columns).expect("a schema");
        with(TableOptions::default(), |o| {
            o.columns = named(&[]);
            o.document_schema = Some(schema);
        })
    });
    let variant = with(TableOptions::default(), |o| {
        o.columns = named(&["value"]);
        o.value_format = ValueFormat::Variant;
    });
    let masked = with(TableOptions::default(), |o| {
        o.columns = named(&["value"]);
        o.masks = FieldMasks::new(&["s", "a.i"], &["l"], Some(b"a key of 16 byte")).expect("masks");
    });
    let text = with(TableOptions::default(), |o| {
        o.columns = Columns::Full;
        o.include_xattrs = true;
        o.value_format = ValueFormat::String;
    });
    let bytes = with(TableOptions::default(), |o| {
        o.columns = Columns::Full;
        o.include_xattrs = true;
        o.key_type = KeyType::Binary;
    });
    let on = |options: &TableOptions, on_malformed| {
        TableSchema::new(&with(options.clone(), |o| o.on_malformed = on_malformed))
            .expect("a table")
    };
    let each = |options| {
        [OnMalformed::Column, OnMalformed::Fail, OnMalformed::Null].map(|how| on(&options, how))
    };
    [
        decoded.map(each).collect(),
        vec![each(variant), each(masked)],
        vec![each(text)],
        // Documents that nobody looks at cannot be malformed.
        vec![[(); 3].map(|()| on(&bytes, OnMalformed::Null))],
    ]
}

/// Whatever documents: each is a row, the columns are what Arrow says they must be, a table fails
/// exactly where another one calls something malformed, one that keeps what fits differs from that
/// one only in the rows that it has a note of, and one that is masked has no masked field.
pub fn documents(data: &[u8]) {
    thread_local! {
        static TABLES: [Vec<Triple>; 4] = tables();
    }
    let mut bytes = BytesIn::new(data);
    let choice = bytes.u8();
    let [keeps, fails, fits] = TABLES.with(|tables| {
        let tables = &tables[usize::from(choice & 3)];
        tables[usize::from(choice >> 2) % tables.len()].clone()
    });
    let kept = batch(keeps, bytes);
    let failed = batch(fails, bytes);
    let fitted = batch(fits, bytes);
    match kept {
        Ok(batch) => {
            check(&batch);
            if choice & 3 == 1 && choice >> 2 & 1 == 1 {
                check_masked(&batch);
            }
            // What fits of a document may take more than all of it that does not.
            if let Ok(fitted) = &fitted {
                check(fitted);
                compare(&batch, fitted);
            }
            let malformed = batch.column_by_name(MALFORMED);
            let is_malformed = malformed.is_some_and(|column| column.null_count() < column.len());
            assert!(malformed.is_none() || failed.is_err() == is_malformed, "{failed:?}");
            if let Ok(other) = failed {
                check(&other);
                assert_eq!(other.num_rows(), batch.num_rows());
            }
        }
        Err(_) => assert!(failed.is_err() && fitted.is_err()),
    }
}

/// Compares a table that keeps malformed documents with one that keeps what fits of them.
fn compare(kept: &RecordBatch, fitted: &RecordBatch) {
    let Some(notes) = fitted.column_by_name(MALFORMED_FIELDS) else { return };
    let Some(malformed) = kept.column_by_name(MALFORMED) else { return };
    let notes = notes.as_string::<i32>();
    for row in 0..kept.num_rows() {
        let note = notes.is_valid(row).then(|| notes.value(row));
        // A document that is nested too deep in what no column shows is kept without a note.
        assert!(note.is_none() || malformed.is_valid(row), "{note:?}");
        let Some(note) = note else { continue };
        let list: serde_json::Value = serde_json::from_str(note).expect("JSON");
        assert!((1..=17).contains(&list.as_array().map_or(0, Vec::len)), "{note}");
    }
    for (index, field) in kept.schema_ref().fields().iter().enumerate() {
        let Some(fitted) = fitted.column_by_name(field.name()) else { continue };
        let kept = kept.column(index);
        for row in (0..kept.len()).filter(|row| malformed.is_null(*row)) {
            assert_eq!(kept.slice(row, 1).to_data(), fitted.slice(row, 1).to_data());
        }
    }
}

/// Checks that values are JSON without what is masked.
fn check_masked(batch: &RecordBatch) {
    let values = batch.column_by_name("value").expect("a column").as_binary::<i32>();
    for value in values.iter().flatten() {
        // What is nested deeper than this parser reads was rewritten in the same way.
        let Ok(value) = serde_json::from_slice::<serde_json::Value>(value) else { continue };
        assert_eq!((value.get("s"), value.pointer("/a/i")), (None, None));
        if let Some(hashed) = value.get("l").filter(|value| !value.is_null()) {
            assert_eq!(hashed.as_str().map_or(0, str::len), 64);
        }
    }
}

/// The documents that `bytes` say, as a table.
fn batch(table: TableSchema, mut bytes: BytesIn<'_>) -> Result<RecordBatch, SinkError> {
    let limits = with(BatchLimits::default(), |o| {
        o.expected_rows = 4;
        o.expected_bytes = 64;
        o.max_value_bytes = 1 << 16;
    });
    let mut sink = ArrowSink::new(table, CollectionNames::default(), limits);
    let mut rows = 0;
    while !bytes.is_empty() && rows < 16 {
        rows += 1;
        let (op, datatype) = (bytes.u8(), Datatype(bytes.u8() & 7));
        let key = bytes.take(usize::from(op >> 4));
        let len = usize::from(bytes.u8());
        // The last one is as long as there are bytes.
        let value = if len < 0xff { bytes.take(len) } else { bytes.take(usize::MAX) };
        sink.change(&Change {
            op: [Op::Mutation, Op::Mutation, Op::Deletion, Op::Expiration][usize::from(op & 3)],
            vbid: Vbid(0),
            seqno: Seqno(rows),
            vbuuid: Vbuuid(1),
            epoch: 0,
            snapshot: Snapshot { start: Seqno(0), end: Seqno(rows) },
            history: false,
            collection_id: CollectionId(u32::from(op >> 2 & 1) * 8),
            key,
            value,
            datatype,
            cas: Cas(u64::from(op) << 56 | 1),
            rev_seqno: RevSeqno(1),
            flags: 0,
            expiry: u32::from(op) << 24,
            delete_time: 0,
        })?;
    }
    assert_eq!(sink.rows() as u64, rows);
    let batch = sink.take_batch()?.finish()?;
    assert_eq!(batch.num_rows() as u64, rows);
    Ok(batch)
}

fn check(batch: &RecordBatch) {
    for (column, field) in batch.columns().iter().zip(batch.schema_ref().fields()) {
        let data = column.to_data();
        assert_eq!(data.len(), batch.num_rows());
        if let Err(error) = data.validate_full() {
            panic!("column {}: {error}", field.name());
        }
    }
}
