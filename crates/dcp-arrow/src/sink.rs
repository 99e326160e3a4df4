//! The sink: changes in, columns out.

use dcp_proto::{
    BatchSink, Change, ChangeSink, MutationRun, Op, Rollback, RunError, SinkError,
    SystemEventRecord,
};
use dcp_wire::{Datatype, DecodeError, Seqno, Vbid, snappy, xattr};

use crate::columns::{Columns, RowKind};
use crate::system_event;
use crate::values::Full;
use crate::{BatchLimits, BufferPool, CollectionNames, Column, PendingBatch, TableSchema};

/// Collects changes as the columns of a [`TableSchema`].
///
/// A value is copied once, from the read buffer to where Arrow will read it. Only compressed ones
/// cost more: they are kept as they are and inflated by [`PendingBatch::finish`].
#[derive(Debug)]
pub struct ArrowSink {
    schema: TableSchema,
    names: CollectionNames,
    limits: BatchLimits,
    pool: BufferPool,
    wants: Wants,
    /// Made with the first change: a stream that waits holds no memory.
    columns: Option<Columns>,
}

/// What of a value is looked at.
#[derive(Clone, Copy, Debug)]
struct Wants {
    value: bool,
    xattrs: bool,
    system_events: bool,
}

/// The columns being filled, made where there are none; the sink's other fields stay free to borrow.
#[inline]
fn columns<'a>(
    columns: &'a mut Option<Columns>,
    schema: &TableSchema,
    limits: BatchLimits,
    pool: &BufferPool,
) -> &'a mut Columns {
    columns.get_or_insert_with(|| Columns::new(schema, limits, pool))
}

impl ArrowSink {
    /// A sink with a pool of its own.
    #[must_use]
    pub fn new(schema: TableSchema, names: CollectionNames, limits: BatchLimits) -> Self {
        Self::with_pool(schema, names, limits, BufferPool::default())
    }

    /// A sink that takes its memory from `pool`, which several sinks of one stream can share.
    #[must_use]
    pub fn with_pool(
        schema: TableSchema,
        names: CollectionNames,
        limits: BatchLimits,
        pool: BufferPool,
    ) -> Self {
        let wants = Wants {
            value: schema.needs(Column::Value),
            xattrs: schema.has(Column::Xattrs),
            system_events: schema.system_events(),
        };
        Self { schema, names, limits, pool, wants, columns: None }
    }

    /// The schema of every batch.
    #[must_use]
    pub const fn schema(&self) -> &TableSchema {
        &self.schema
    }

    fn columns(&mut self) -> &mut Columns {
        columns(&mut self.columns, &self.schema, self.limits, &self.pool)
    }

    /// Appends one change of whatever kind.
    #[inline(never)]
    fn push_any(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        self.check_key(change.vbid, change.seqno, change.key)?;
        self.push_value(change).map_err(|error| error.at(change.vbid, change.seqno))?;
        self.columns().push_change(change);
        Ok(())
    }

    /// Appends the parts of `value` that the table shows.
    fn push_value(&mut self, change: &Change<'_>) -> Result<(), ValueError> {
        let wants = self.wants;
        if !wants.value && !wants.xattrs {
            return Ok(());
        }
        // Of a tombstone only the attributes are shown: without them its value is not looked at.
        let is_shown = change.op == Op::Mutation || wants.xattrs;
        let has_xattrs =
            change.datatype.contains(Datatype::XATTR) && !change.value.is_empty() && is_shown;
        let compressed = change.datatype.contains(Datatype::SNAPPY) && !change.value.is_empty();
        match (has_xattrs, compressed) {
            (false, false) => self.push_plain(change, change.value),
            (true, false) => self.push_with_xattrs(change, change.value),
            (false, true) => self.push_compressed(change),
            (true, true) => {
                // A server that strips documents may leave the section inflated and the bit set
                // (flag "no value with underlying datatype"): the bit is a hint there.
                if !wants.value && is_bare_section(change.value) {
                    return self.push_with_xattrs(change, change.value);
                }
                self.push_late(change)
            }
        }
    }

    #[inline]
    fn push_plain(&mut self, change: &Change<'_>, body: &[u8]) -> Result<(), ValueError> {
        // A tombstone has no document; a body on one is not shown.
        let body = if change.op == Op::Mutation { body } else { &[] };
        let columns = self.columns();
        if let Some(values) = &mut columns.values {
            values.check_room(body.len())?;
            values.push(body);
        }
        if let Some(xattrs) = &mut columns.xattrs {
            xattrs.push_none();
        }
        Ok(())
    }

    fn push_with_xattrs(&mut self, change: &Change<'_>, value: &[u8]) -> Result<(), ValueError> {
        let (section, body) = xattr::split(value)?;
        let body = if change.op == Op::Mutation { body } else { &[] };
        let columns = self.columns();
        if let Some(values) = &columns.values {
            values.check_room(body.len())?;
        }
        if let Some(xattrs) = &mut columns.xattrs {
            xattrs.check_room(value.len() - body.len())?;
            xattrs.push(section)?;
        }
        if let Some(values) = &mut columns.values {
            values.push(body);
        }
        Ok(())
    }

    fn push_compressed(&mut self, change: &Change<'_>) -> Result<(), ValueError> {
        if change.op != Op::Mutation || !self.wants.value {
            return self.push_plain(change, &[]);
        }
        let len = snappy::decompressed_len(change.value, self.limits.max_value_bytes)?;
        let columns = columns(&mut self.columns, &self.schema, self.limits, &self.pool);
        let row = columns.rows();
        if let Some(values) = &mut columns.values {
            values.check_room(len)?;
            values.push_compressed(row, change.value, len, (&self.pool, self.limits));
        }
        if let Some(xattrs) = &mut columns.xattrs {
            xattrs.push_none();
        }
        Ok(())
    }

    /// Appends a row whose value is inflated and taken apart when the batch is finished.
    fn push_late(&mut self, change: &Change<'_>) -> Result<(), ValueError> {
        let len = snappy::decompressed_len(change.value, self.limits.max_value_bytes)?;
        let columns = self.columns();
        if let Some(values) = &columns.values {
            values.check_room(len)?;
        }
        if let Some(xattrs) = &mut columns.xattrs {
            xattrs.check_room(len)?;
            xattrs.reserve(len);
            xattrs.push_none();
        }
        if let Some(values) = &mut columns.values {
            values.plain.reserve(len);
            values.push(&[]);
        }
        let row = columns.rows();
        columns.late.push(row, change.value, len, change.op == Op::Mutation);
        Ok(())
    }

    /// Refuses a row whose key does not fit.
    #[inline]
    fn check_key(&mut self, vbid: Vbid, seqno: Seqno, key: &[u8]) -> Result<(), SinkError> {
        match &self.columns().keys {
            Some(keys) => keys.check_room(key.len()).map_err(|full| full.at(vbid, seqno)),
            None => Ok(()),
        }
    }
}

/// Whether a value is a well-formed section with no document behind it.
fn is_bare_section(value: &[u8]) -> bool {
    xattr::split(value)
        .is_ok_and(|(section, body)| body.is_empty() && crate::xattrs::check(section).is_ok())
}

/// Why a value was not appended.
#[derive(Debug)]
enum ValueError {
    Decode(DecodeError),
    Full(Full),
}

impl From<DecodeError> for ValueError {
    fn from(error: DecodeError) -> Self {
        Self::Decode(error)
    }
}

impl From<Full> for ValueError {
    fn from(full: Full) -> Self {
        Self::Full(full)
    }
}

impl ValueError {
    #[cold]
    fn at(self, vbid: Vbid, seqno: Seqno) -> SinkError {
        match self {
            Self::Decode(error) => unrepresentable(vbid, seqno, error.to_string()),
            Self::Full(full) => full.at(vbid, seqno),
        }
    }
}

impl Full {
    #[cold]
    fn at(self, vbid: Vbid, seqno: Seqno) -> SinkError {
        let what = "the batch is full: lower batch_bytes, so that it is cut before";
        unrepresentable(vbid, seqno, what.to_owned())
    }
}

pub(crate) const fn unrepresentable(vbid: Vbid, seqno: Seqno, what: String) -> SinkError {
    SinkError::Unrepresentable { vbid, seqno, what }
}

impl ChangeSink for ArrowSink {
    /// Appends one row, or nothing if it cannot be represented.
    #[inline(always)]
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        // Nearly every row: a plain document into a batch that has begun.
        if change.op == Op::Mutation
            && !change.datatype.intersects(Datatype::SNAPPY.with(Datatype::XATTR))
            && let Some(columns) = &mut self.columns
        {
            return columns
                .push_plain_document(change)
                .map_err(|full| full.at(change.vbid, change.seqno));
        }
        self.push_any(change)
    }

    fn mutations(&mut self, run: &MutationRun<'_, '_>) -> Result<(), RunError> {
        let special = Datatype::SNAPPY.with(Datatype::XATTR);
        let all = run.mutations.iter().fold(0, |all, mutation| all | mutation.datatype().0);
        // Where there is no room for all of them, there may be for some.
        if !Datatype(all).intersects(special) && self.columns().push_run(run).is_ok() {
            return Ok(());
        }
        run.give_each(self)
    }

    fn rollback(&mut self, rollback: &Rollback) -> Result<(), SinkError> {
        let columns = self.columns();
        columns.push_empty_value(rollback.vbid, rollback.seqno, &[])?;
        columns.push_rollback(rollback);
        Ok(())
    }

    fn system_event(&mut self, event: &SystemEventRecord<'_>) -> Result<(), SinkError> {
        let payload = system_event::payload(event);
        if let Ok(Some(payload)) = &payload {
            self.names.learn(event.id, payload);
        }
        if !self.wants.system_events {
            return Ok(());
        }
        self.check_key(event.vbid, event.seqno, event.key)?;
        let payload =
            payload.map_err(|error| unrepresentable(event.vbid, event.seqno, error.to_string()))?;
        let text = system_event::to_json(event.id, payload.as_ref());
        let columns = self.columns();
        columns.push_empty_value(event.vbid, event.seqno, text.as_bytes())?;
        columns.push_system_event(event, payload.as_ref());
        Ok(())
    }
}

impl Columns {
    /// Appends a document whose value is the document and nothing else.
    #[inline(always)]
    fn push_plain_document(&mut self, change: &Change<'_>) -> Result<(), Full> {
        if let Some(keys) = &self.keys {
            keys.check_room(change.key.len())?;
        }
        if let Some(values) = &mut self.values {
            values.check_room(change.value.len())?;
            values.push(change.value);
        }
        if let Some(xattrs) = &mut self.xattrs {
            xattrs.push_none();
        }
        self.push_change(change);
        Ok(())
    }

    /// Appends to value and xattrs what a row that is no document's change has there.
    fn push_empty_value(&mut self, vbid: Vbid, seqno: Seqno, text: &[u8]) -> Result<(), SinkError> {
        if let Some(values) = &mut self.values {
            values.check_room(text.len()).map_err(|full| full.at(vbid, seqno))?;
            values.push(text);
        }
        if let Some(xattrs) = &mut self.xattrs {
            xattrs.push_none();
        }
        Ok(())
    }
}

impl BatchSink for ArrowSink {
    type Batch = PendingBatch;

    fn rows(&self) -> usize {
        self.columns.as_ref().map_or(0, Columns::rows)
    }

    fn size_bytes(&self) -> usize {
        self.columns.as_ref().map_or(0, Columns::size_bytes)
    }

    fn take_batch(&mut self) -> Result<PendingBatch, SinkError> {
        let columns = self.columns.take().unwrap_or_else(|| {
            Columns::new(
                &self.schema,
                BatchLimits { expected_rows: 0, expected_bytes: 0, ..self.limits },
                &self.pool,
            )
        });
        self.limits.expect_like(columns.rows(), columns.value_bytes());
        Ok(PendingBatch::new(self.schema.clone(), self.names.clone(), self.pool.clone(), columns))
    }
}

impl From<Op> for RowKind {
    #[inline]
    fn from(op: Op) -> Self {
        match op {
            Op::Mutation => Self::Mutation,
            Op::Deletion => Self::Deletion,
            Op::Expiration => Self::Expiration,
        }
    }
}
