//! A complete batch, to be checked and converted to Arrow arrays.

use std::sync::Arc;

use arrow_array::{
    ArrayRef, BinaryArray, BooleanArray, Int32Array, Int64Array, RecordBatch, StringArray,
    TimestampMicrosecondArray,
};
use arrow_buffer::{NullBuffer, OffsetBuffer, ScalarBuffer};
use dcp_proto::SinkError;
use dcp_wire::CollectionId;

use crate::columns::{Columns, NO_COLLECTION, scope_of};
use crate::document::{self, Decoded, TIMESTAMP};
use crate::rows::{Places, RowKind};
use crate::table::Slot;
use crate::values::nulls;
use crate::{BufferPool, CollectionNames, Column, DocumentTally, KeyType, TableSchema};

/// The contents of an [`ArrowSink`](crate::ArrowSink), not yet checked.
///
/// [`finish`](Self::finish) does the work that would delay the reading task.
#[derive(Debug)]
pub struct PendingBatch {
    schema: TableSchema,
    names: CollectionNames,
    pool: BufferPool,
    columns: Columns,
}

impl PendingBatch {
    pub(crate) const fn new(
        schema: TableSchema,
        names: CollectionNames,
        pool: BufferPool,
        columns: Columns,
    ) -> Self {
        Self { schema, names, pool, columns }
    }

    /// Number of rows.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.columns.rows()
    }

    /// Approximate memory held, in bytes.
    #[must_use]
    pub fn size_bytes(&self) -> usize {
        self.columns.size_bytes()
    }

    /// Inflates compressed documents, decodes them if the table has columns for that, checks that
    /// keys are UTF-8, looks up collection names and makes the record batch.
    ///
    /// Plain documents are not copied. The batch's memory returns to the sink's pool when its last
    /// user drops it.
    ///
    /// # Errors
    /// [`SinkError`] with the vBucket and seqno of the row, if a document cannot be inflated, a key
    /// of a `string` column is not UTF-8, or a document is malformed and that is an error.
    pub fn finish(self) -> Result<RecordBatch, SinkError> {
        self.finish_counting(&mut DocumentTally::default())
    }

    /// Like [`finish`](Self::finish), and says what the documents were found to be.
    ///
    /// # Errors
    /// Those of [`finish`](Self::finish).
    pub fn finish_counting(self, tally: &mut DocumentTally) -> Result<RecordBatch, SinkError> {
        let Self { schema, names, pool, mut columns } = self;
        let places = Places {
            vbuckets: std::mem::take(&mut columns.vbuckets).into(),
            seqnos: std::mem::take(&mut columns.seqnos).into(),
        };
        columns.fill_in_deferred(&places, &pool)?;
        let kinds = std::mem::take(&mut columns.kinds);
        let decoded = columns.decode(&schema, &kinds, &places, &pool, tally)?;
        let cas = columns.cas.take().unwrap_or_default().into();
        let mut rows = Rows {
            documents: validity(&kinds, RowKind::is_document),
            mutations: validity(&kinds, |kind| kind == RowKind::Mutation),
            kinds,
            cas,
            names: CollectionColumns::default(),
            decoded,
            places,
        };
        let mut arrays = Vec::with_capacity(schema.slots().len());
        for slot in schema.slots() {
            arrays.push(match slot {
                Slot::Change(column) => {
                    columns.array(*column, &mut rows, schema.key_type(), &names, &pool)?
                }
                Slot::Document(index) => rows.document(*index)?,
                Slot::Malformed => rows.taken(|decoded| decoded.malformed.take())?,
                Slot::MalformedFields => rows.taken(|decoded| decoded.malformed_fields.take())?,
            });
        }
        RecordBatch::try_new(schema.arrow(), arrays).map_err(|error| {
            rows.places.error(0, format!("columns do not match the schema: {error}"))
        })
    }
}

/// State shared by the arrays of one batch.
struct Rows {
    kinds: Vec<RowKind>,
    documents: Option<NullBuffer>,
    mutations: Option<NullBuffer>,
    cas: ScalarBuffer<i64>,
    names: CollectionColumns,
    decoded: Decoded,
    places: Places,
}

impl Rows {
    fn document(&self, index: usize) -> Result<ArrayRef, SinkError> {
        let column = self.decoded.documents.get(index).cloned();
        column.ok_or_else(|| self.places.error(0, "documents were not decoded".to_owned()))
    }

    fn taken(
        &mut self,
        take: impl FnOnce(&mut Decoded) -> Option<ArrayRef>,
    ) -> Result<ArrayRef, SinkError> {
        take(&mut self.decoded)
            .ok_or_else(|| self.places.error(0, "documents were not decoded".to_owned()))
    }
}

fn validity(kinds: &[RowKind], is_valid: impl Fn(RowKind) -> bool) -> Option<NullBuffer> {
    // Most batches have no nulls. Checking every row is faster than stopping early.
    if kinds.iter().fold(true, |all, kind| all & is_valid(*kind)) {
        return None;
    }
    Some(kinds.iter().map(|kind| is_valid(*kind)).collect())
}

fn longs(values: Option<Vec<i64>>, nulls: Option<NullBuffer>) -> ArrayRef {
    Arc::new(Int64Array::new(values.unwrap_or_default().into(), nulls))
}

/// Converts seconds since 1970 to microseconds; 0 is null.
fn seconds(values: Option<Vec<i64>>) -> ArrayRef {
    let mut values = values.unwrap_or_default();
    let valid: Vec<bool> = values.iter().map(|seconds| *seconds != 0).collect();
    for seconds in &mut values {
        *seconds *= 1_000_000;
    }
    timestamps(values, nulls(&valid))
}

fn timestamps(values: Vec<i64>, nulls: Option<NullBuffer>) -> ArrayRef {
    Arc::new(TimestampMicrosecondArray::new(values.into(), nulls).with_data_type(TIMESTAMP.clone()))
}

/// The time of a CAS in microseconds: its low 16 bits are a counter, the rest nanoseconds.
const fn cas_micros(cas: i64) -> i64 {
    const LOGICAL_BITS: u64 = 0xffff;
    ((cas.cast_unsigned() & !LOGICAL_BITS) / 1000).cast_signed()
}

fn cas_timestamps(cas: &[i64]) -> ArrayRef {
    let nulls = cas.contains(&0).then(|| cas.iter().map(|cas| *cas != 0).collect());
    timestamps(cas.iter().map(|cas| cas_micros(*cas)).collect(), nulls)
}

impl Columns {
    /// Decodes documents as the table requires.
    fn decode(
        &mut self,
        schema: &TableSchema,
        kinds: &[RowKind],
        places: &Places,
        pool: &BufferPool,
        tally: &mut DocumentTally,
    ) -> Result<Decoded, SinkError> {
        let formats = schema.formats();
        let Some(values) = self.values.as_mut().filter(|_| formats.decodes()) else {
            return Ok(Decoded::default());
        };
        values.inflate().map_err(|bad| places.error(bad.row, bad.error.to_string()))?;
        let json = self.json.as_deref().unwrap_or_default();
        let rows = document::Rows { kinds, json, places };
        document::decode(formats, values, &rows, pool, tally)
    }

    /// Makes the array of one column; each column is made once.
    fn array(
        &mut self,
        column: Column,
        rows: &mut Rows,
        key_type: KeyType,
        names: &CollectionNames,
        pool: &BufferPool,
    ) -> Result<ArrayRef, SinkError> {
        let documents = rows.documents.clone();
        Ok(match column {
            Column::Op => Arc::new(ops(&rows.kinds, pool)),
            Column::Key => self.key_array(rows, key_type, pool)?,
            Column::Value => self.value_array(rows)?,
            Column::Scope | Column::Collection => {
                rows.names.resolve(self.collection_ids.as_deref().unwrap_or_default(), names);
                let is_scope = column == Column::Scope;
                Arc::new(rows.names.array(is_scope, pool))
            }
            Column::CollectionId => collection_ids(self.collection_ids.clone().unwrap_or_default()),
            Column::Vbucket => Arc::new(Int32Array::new(rows.places.vbuckets.clone(), None)),
            Column::Seqno => Arc::new(Int64Array::new(rows.places.seqnos.clone(), None)),
            Column::Epoch => Arc::new(Int32Array::from(self.epochs.take().unwrap_or_default())),
            Column::Cas => Arc::new(Int64Array::new(rows.cas.clone(), documents)),
            Column::Timestamp => cas_timestamps(&rows.cas),
            Column::Rev => longs(self.revs.take(), documents),
            Column::Expiry => seconds(self.expiries.take()),
            Column::DeletedAt => seconds(self.delete_times.take()),
            Column::Flags => longs(self.flags.take(), rows.mutations.clone()),
            Column::Datatype => Arc::new(datatypes(
                self.json.as_deref().unwrap_or_default(),
                rows.mutations.clone(),
            )),
            Column::Vbuuid => longs(
                self.vbuuids.take(),
                validity(&rows.kinds, |kind| {
                    !matches!(kind, RowKind::SystemEvent | RowKind::CaughtUp)
                }),
            ),
            Column::SnapshotStart => longs(self.snapshot_starts.take(), documents),
            Column::SnapshotEnd => longs(self.snapshot_ends.take(), documents),
            Column::History => {
                let history = self.history.take().unwrap_or_default();
                Arc::new(BooleanArray::new(history.into(), documents))
            }
            Column::Xattrs => match self.xattrs.take() {
                Some(xattrs) => xattrs
                    .finish(pool)
                    .map_err(|error| rows.places.error(0, format!("xattrs: {error}")))?,
                None => return Err(rows.places.error(0, "xattrs were not collected".to_owned())),
            },
        })
    }

    fn key_array(
        &mut self,
        rows: &Rows,
        key_type: KeyType,
        pool: &BufferPool,
    ) -> Result<ArrayRef, SinkError> {
        let Some(keys) = self.keys.take() else {
            return Err(rows.places.error(0, "keys were not collected".to_owned()));
        };
        // Documents have keys; of the other rows only a system event may have one, a name.
        let nulls = rows.documents.as_ref().and_then(|_| {
            let valid: Vec<bool> = (0..rows.kinds.len())
                .map(|row| rows.kinds[row].is_document() || !keys.value(row).is_empty())
                .collect();
            nulls(&valid)
        });
        if key_type == KeyType::Binary {
            let (offsets, bytes) = keys.finish(pool);
            return Ok(Arc::new(BinaryArray::new(offsets, bytes, nulls)));
        }
        let (offsets, bytes) = keys.finish(pool);
        // Checks the whole column at once, and that no key begins or ends inside a character.
        match StringArray::try_new(offsets.clone(), bytes.clone(), nulls) {
            Ok(keys) => Ok(Arc::new(keys)),
            Err(error) => Err(match first_invalid_utf8(&BinaryArray::new(offsets, bytes, None)) {
                Some(row) => {
                    let what = "the key is not UTF-8: read the keys as binary";
                    rows.places.error(row, what.to_owned())
                }
                None => rows.places.error(0, format!("keys: {error}")),
            }),
        }
    }

    fn value_array(&mut self, rows: &mut Rows) -> Result<ArrayRef, SinkError> {
        if let Some(decoded) = rows.decoded.value.take() {
            return Ok(decoded);
        }
        let Some(values) = self.values.take() else {
            return Err(rows.places.error(0, "values were not collected".to_owned()));
        };
        let (offsets, bytes) =
            values.finish().map_err(|bad| rows.places.error(bad.row, bad.error.to_string()))?;
        let nulls = rows.mutations.as_ref().and_then(|_| {
            validity(&rows.kinds, |kind| matches!(kind, RowKind::Mutation | RowKind::SystemEvent))
        });
        Ok(Arc::new(BinaryArray::new(offsets, bytes, nulls)))
    }
}

fn ops(kinds: &[RowKind], pool: &BufferPool) -> StringArray {
    // Most batches contain only mutations.
    match all_equal(kinds) {
        Some(kind) => pool.repeated(kind.name(), kinds.len()),
        None => texts(kinds.iter().map(|kind| Some(kind.name())), None),
    }
}

/// The value of all items, if they are equal.
fn all_equal<T: PartialEq>(items: &[T]) -> Option<&T> {
    let first = items.first()?;
    // Checking every item is faster than stopping at the first difference.
    items.iter().fold(true, |all, item| all & (item == first)).then_some(first)
}

fn datatypes(json: &[bool], mutations: Option<NullBuffer>) -> StringArray {
    texts(json.iter().map(|json| Some(if *json { "json" } else { "binary" })), mutations)
}

/// A column of short strings, null for `None` and for rows that are null in `nulls`.
fn texts<'a>(
    texts: impl ExactSizeIterator<Item = Option<&'a str>>,
    nulls: Option<NullBuffer>,
) -> StringArray {
    let mut offsets = Vec::with_capacity(texts.len() + 1);
    let mut bytes = String::with_capacity(texts.len() * 9);
    let mut missing = Vec::new();
    offsets.push(0);
    for (row, text) in texts.enumerate() {
        match text {
            Some(text) => bytes.push_str(text),
            None => missing.push(row),
        }
        offsets.push(i32::try_from(bytes.len()).unwrap_or(i32::MAX));
    }
    let offsets = OffsetBuffer::new(ScalarBuffer::from(offsets));
    let nulls = if missing.is_empty() {
        nulls
    } else {
        let mut valid = vec![true; offsets.len() - 1];
        for row in missing {
            valid[row] = false;
        }
        Some(NullBuffer::from(valid))
    };
    StringArray::new(offsets, bytes.into_bytes().into(), nulls)
}

fn collection_ids(ids: Vec<i64>) -> ArrayRef {
    let valid: Vec<bool> = ids.iter().map(|id| *id > NO_COLLECTION).collect();
    longs(Some(ids), nulls(&valid))
}

/// The first row whose key is not UTF-8.
fn first_invalid_utf8(keys: &BinaryArray) -> Option<usize> {
    keys.iter().position(|key| key.is_some_and(|key| std::str::from_utf8(key).is_err()))
}

/// Names of a row, where known.
struct Names {
    scope: Option<Arc<str>>,
    collection: Option<Arc<str>>,
}

/// The names of each row's collection, looked up once per collection.
#[derive(Default)]
struct CollectionColumns {
    names: Vec<Names>,
    /// Index into `names`, by row; empty while all rows have the first one.
    indexes: Vec<usize>,
    rows: usize,
}

impl CollectionColumns {
    fn resolve(&mut self, ids: &[i64], names: &CollectionNames) {
        if self.rows == ids.len() {
            return;
        }
        self.rows = ids.len();
        let name = |id: i64| match u32::try_from(id) {
            Ok(id) => {
                let name = names.name(CollectionId(id));
                let scope = name.as_ref().map(|name| Arc::clone(&name.scope));
                Names { scope, collection: name.map(|name| name.collection) }
            }
            Err(_) => {
                let scope = scope_of(id).and_then(|id| names.scope_name(id));
                Names { scope, collection: None }
            }
        };
        if let Some(id) = all_equal(ids) {
            self.names.push(name(*id));
            return;
        }
        let mut known = std::collections::HashMap::new();
        let mut last = None;
        for id in ids {
            let index = match last {
                Some((last, index)) if last == id => index,
                _ => *known.entry(*id).or_insert_with(|| {
                    self.names.push(name(*id));
                    self.names.len() - 1
                }),
            };
            last = Some((id, index));
            self.indexes.push(index);
        }
    }

    fn array(&self, is_scope: bool, pool: &BufferPool) -> StringArray {
        let text = |index: usize| {
            let names = self.names.get(index)?;
            if is_scope { names.scope.as_deref() } else { names.collection.as_deref() }
        };
        if self.indexes.is_empty() {
            return match text(0) {
                Some(text) => pool.repeated(text, self.rows),
                None => StringArray::new_null(self.rows),
            };
        }
        texts(self.indexes.iter().map(|index| text(*index)), None)
    }
}
