//! Rows as Arrow shows them, against what was put in.

mod columns;
mod documents;
mod documents_model;
mod inferred;
mod malformed_fields;
mod masks;
mod model;
mod runs;
mod splits;
mod values;

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch};
use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, Columns, TableOptions, TableSchema};
use dcp_proto::{BatchSink, Change, ChangeSink, Op, Snapshot};
use dcp_test::with;
use dcp_wire::{Cas, CollectionId, Datatype, RevSeqno, Seqno, Vbid, Vbuuid};

/// A mutation in which no two numbers are the same.
pub(crate) const CHANGE: Change<'static> = Change {
    op: Op::Mutation,
    vbid: Vbid(7),
    seqno: Seqno(41),
    vbuuid: Vbuuid(0xbeef_0000_0001),
    epoch: 2,
    snapshot: Snapshot { start: Seqno(40), end: Seqno(50) },
    history: true,
    collection_id: CollectionId::DEFAULT,
    key: b"airline_10",
    value: br#"{"name":"40-Mile Air"}"#,
    datatype: Datatype::JSON,
    cas: Cas(1_700_000_000_123_456_789),
    rev_seqno: RevSeqno(3),
    flags: 0x0200_0006,
    expiry: 0,
    delete_time: 0,
};

pub(crate) fn sink(options: &TableOptions) -> ArrowSink {
    sink_with(options, BatchLimits::default())
}

pub(crate) fn sink_with(options: &TableOptions, limits: BatchLimits) -> ArrowSink {
    ArrowSink::new(TableSchema::new(options).unwrap(), CollectionNames::default(), limits)
}

pub(crate) fn columns(names: &[&str]) -> TableOptions {
    with(TableOptions::default(), |o| {
        o.columns = Columns::Named(names.iter().map(ToString::to_string).collect());
    })
}

pub(crate) fn batch_of(options: &TableOptions, changes: &[Change<'_>]) -> RecordBatch {
    let mut sink = sink(options);
    for change in changes {
        sink.change(change).unwrap();
    }
    sink.take_batch().unwrap().finish().unwrap()
}

/// The cells of a text column.
pub(crate) fn texts(batch: &RecordBatch, column: &str) -> Vec<Option<String>> {
    let array = batch.column_by_name(column).unwrap().as_string::<i32>();
    array.iter().map(|text| text.map(str::to_owned)).collect()
}

/// The cells of a binary column.
pub(crate) fn bytes(batch: &RecordBatch, column: &str) -> Vec<Option<Vec<u8>>> {
    let array = batch.column_by_name(column).unwrap().as_binary::<i32>();
    array.iter().map(|bytes| bytes.map(<[u8]>::to_vec)).collect()
}

/// The cells of a column of numbers or timestamps.
pub(crate) fn numbers(batch: &RecordBatch, column: &str) -> Vec<Option<i64>> {
    use arrow_array::types::{Int32Type, Int64Type, TimestampMicrosecondType};
    let array = batch.column_by_name(column).unwrap();
    if let Some(array) = array.as_primitive_opt::<Int64Type>() {
        return array.iter().collect();
    }
    if let Some(array) = array.as_primitive_opt::<TimestampMicrosecondType>() {
        return array.iter().collect();
    }
    array.as_primitive::<Int32Type>().iter().map(|number| number.map(i64::from)).collect()
}

/// A column of booleans.
pub(crate) fn flags(batch: &RecordBatch, column: &str) -> Vec<Option<bool>> {
    batch.column_by_name(column).unwrap().as_boolean().iter().collect()
}

/// The attributes of each row.
pub(crate) fn maps(batch: &RecordBatch) -> Vec<Option<Vec<(String, String)>>> {
    let array = batch.column_by_name("xattrs").unwrap().as_map();
    (0..array.len())
        .map(|row| {
            array.is_valid(row).then(|| {
                let entries = array.value(row);
                let (names, values) =
                    (entries.column(0).as_string::<i32>(), entries.column(1).as_string::<i32>());
                (0..entries.len())
                    .map(|entry| (names.value(entry).to_owned(), values.value(entry).to_owned()))
                    .collect()
            })
        })
        .collect()
}
