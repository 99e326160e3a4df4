//! Couchbase changes as Arrow record batches.
//!
//! A [`TableSchema`] is a selection of columns from the change table ([`COLUMNS`]). An
//! [`ArrowSink`] of that schema takes changes borrowed from the read buffer and copies each value
//! once, to its final place. It produces a [`PendingBatch`], whose columns are complete but not yet
//! checked. [`PendingBatch::finish`] inflates, checks UTF-8, decodes documents to the columns of a
//! [`DocumentSchema`], resolves collection names and makes the `RecordBatch`. The task that takes
//! the batch calls it, so that this work does not delay the task that reads the socket.
//!
//! ```
//! use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, TableOptions, TableSchema};
//! use dcp_proto::{BatchSink, Change, ChangeSink, Op, Snapshot};
//! use dcp_wire::{Cas, CollectionId, Datatype, RevSeqno, Seqno, Vbid, Vbuuid};
//!
//! let schema = TableSchema::new(&TableOptions::default())?;
//! let mut sink = ArrowSink::new(schema, CollectionNames::default(), BatchLimits::default());
//! sink.change(&Change {
//!     op: Op::Mutation,
//!     vbid: Vbid(7),
//!     seqno: Seqno(1),
//!     vbuuid: Vbuuid(0xabc),
//!     epoch: 0,
//!     snapshot: Snapshot { start: Seqno(0), end: Seqno(1) },
//!     history: false,
//!     collection_id: CollectionId::DEFAULT,
//!     key: b"airline_10",
//!     value: br#"{"name":"40-Mile Air"}"#,
//!     datatype: Datatype::JSON,
//!     cas: Cas(1_700_000_000_000_000_000),
//!     rev_seqno: RevSeqno(1),
//!     flags: 0,
//!     expiry: 0,
//!     delete_time: 0,
//! })?;
//! let batch = sink.take_batch()?.finish()?;
//! assert_eq!((batch.num_rows(), batch.num_columns()), (1, 10));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(not(test), deny(clippy::expect_used, clippy::panic, clippy::unwrap_used))]

mod columns;
mod document;
mod limits;
mod names;
mod pending;
mod pool;
mod repeated;
mod rows;
mod schema;
mod sink;
mod split;
mod table;
mod values;
mod xattrs;

pub use document::{
    DdlError, DocumentDecoder, DocumentSchema, DocumentTally, EXTRA, FLAGS, FieldMasks,
    GivenDocuments, GivenKind, HAS_MALFORMED, HAS_UNMAPPED, IS_MALFORMED, MALFORMED,
    MALFORMED_FIELDS, MalformedKind, MalformedTally, MaskError, Names, Nested, Observations,
    ObservedField, OnMalformed, Sightings, ValueFormat, json_depth,
};
pub use limits::BatchLimits;
pub use names::{CollectionName, CollectionNames};
pub use pending::PendingBatch;
pub use pool::BufferPool;
pub use schema::{COLUMNS, Column, ColumnSet, ColumnSpec, KeyType, SchemaError};
pub use sink::ArrowSink;
pub use split::{Part, by_collection, sliced_bytes};
pub use table::{Columns, TableOptions, TableSchema};

/// The most similar of `names` by edit distance, comparing the first 64 characters; `None` if none
/// has half of them in common.
fn nearest<'a>(name: &str, names: impl Iterator<Item = &'a str>) -> Option<String> {
    let name: String = name.chars().take(64).collect::<String>().to_lowercase();
    let similarity = |known: &str| strsim::normalized_levenshtein(&name, &known.to_lowercase());
    let best = names.map(|known| (similarity(known), known)).max_by(|a, b| a.0.total_cmp(&b.0));
    best.filter(|(similarity, _)| *similarity >= 0.5).map(|(_, known)| known.to_owned())
}
