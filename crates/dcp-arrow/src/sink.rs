//! The sink, which collects changes into columns.

use dcp_proto::{
    BatchSink, CaughtUp, Change, ChangeSink, MutationRun, Op, Rollback, RunError, SinkError,
    SystemEventRecord,
};
use dcp_wire::message::{SystemEvent, SystemEventId, SystemEventPayload};
use dcp_wire::{Datatype, DecodeError, ManifestUid, snappy, xattr};
use serde_json::json;

use crate::columns::{Columns, Content, NO_CHANGE, NO_COLLECTION, only_scope};
use crate::pool::MOSTLY_USED;
use crate::rows::{RowKind, unrepresentable};
use crate::values::Full;
use crate::xattrs::check;
use crate::{BatchLimits, BufferPool, CollectionNames, Column, PendingBatch, TableSchema};

/// Collects changes as the columns of a [`TableSchema`].
///
/// A value is copied once, from the read buffer to its final place. Only compressed values cost
/// more: they are stored as received and inflated by [`PendingBatch::finish`].
#[derive(Debug)]
pub struct ArrowSink {
    schema: TableSchema,
    names: CollectionNames,
    limits: BatchLimits,
    pool: BufferPool,
    wants: Wants,
    /// Allocated with the first change, so that an idle stream holds no memory.
    columns: Option<Columns>,
}

/// Datatype bits of values that are more than a plain document.
const SPECIAL: Datatype = Datatype::SNAPPY.with(Datatype::XATTR);

/// The parts of a value that are used.
#[derive(Clone, Copy, Debug)]
struct Wants {
    value: bool,
    xattrs: bool,
    system_events: bool,
}

impl ArrowSink {
    /// A sink with its own pool.
    #[must_use]
    pub fn new(schema: TableSchema, names: CollectionNames, limits: BatchLimits) -> Self {
        Self::with_pool(schema, names, limits, BufferPool::default())
    }

    /// A sink that takes its memory from `pool`, which the sinks of a stream can share.
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

    /// The columns being filled, allocated if necessary.
    #[inline]
    fn columns(&mut self) -> &mut Columns {
        self.columns.get_or_insert_with(|| Columns::new(&self.schema, self.limits, &self.pool))
    }

    /// Appends a row of any kind, or nothing if it does not fit.
    #[inline(always)]
    fn push(
        &mut self,
        place: (RowKind, i64),
        change: &Change<'_>,
        content: &Content<'_>,
    ) -> Result<(), SinkError> {
        self.columns().push_row(place, change, content).map_err(|_: Full| {
            let what = "the batch is full: lower batch_bytes, so that it ends earlier";
            unrepresentable(change.vbid, change.seqno, what.to_owned())
        })
    }

    /// Appends a change whose value is compressed or has attributes.
    #[inline(never)]
    fn push_special(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        let content = self
            .special_content(change)
            .map_err(|error| unrepresentable(change.vbid, change.seqno, error.to_string()))?;
        self.push(place(change), change, &content)
    }

    /// The shown parts of a value that is compressed or has attributes.
    fn special_content<'a>(&self, change: &Change<'a>) -> Result<Content<'a>, DecodeError> {
        let Change { op, value, datatype, .. } = *change;
        let shows_document = op == Op::Mutation && self.wants.value;
        // Of a tombstone only the attributes are shown: without them its value is ignored.
        let is_shown = shows_document || self.wants.xattrs;
        if value.is_empty() || !is_shown {
            return Ok(Content::Plain(&[], None));
        }
        let is_compressed = datatype.contains(Datatype::SNAPPY);
        let inflated_len = || snappy::decompressed_len(value, self.limits.max_value_bytes);
        if !datatype.contains(Datatype::XATTR) {
            return Ok(match shows_document {
                true => Content::Compressed(value, inflated_len()?),
                false => Content::Plain(&[], None),
            });
        }
        // A server that strips documents may leave the section inflated and the bit set (flag "no
        // value with underlying datatype"), so the bit is only a hint there.
        if is_compressed && (self.wants.value || !is_bare_section(value)) {
            return Ok(Content::Late(value, inflated_len()?));
        }
        let (section, document) = xattr::split(value)?;
        if self.wants.xattrs {
            check(section)?;
        }
        Ok(Content::Plain(if shows_document { document } else { &[] }, Some(section)))
    }
}

/// Whether a value is a well-formed section without a document.
fn is_bare_section(value: &[u8]) -> bool {
    xattr::split(value).is_ok_and(|(section, body)| body.is_empty() && check(section).is_ok())
}

/// The row kind and collection of a change.
#[inline]
fn place(change: &Change<'_>) -> (RowKind, i64) {
    (change.op.into(), i64::from(change.collection_id.0))
}

impl ChangeSink for ArrowSink {
    /// Appends one row, or nothing if it cannot be represented.
    #[inline(always)]
    fn change(&mut self, change: &Change<'_>) -> Result<(), SinkError> {
        if change.datatype.intersects(SPECIAL) {
            return self.push_special(change);
        }
        // A tombstone has no document; ignore a body.
        let value = if change.op == Op::Mutation { change.value } else { &[] };
        self.push(place(change), change, &Content::Plain(value, None))
    }

    fn mutations(&mut self, run: &MutationRun<'_, '_>) -> Result<(), RunError> {
        let all = run.mutations.iter().fold(0, |all, mutation| all | mutation.datatype().0);
        let all = Datatype(all);
        // If not all of them can be appended, some can.
        if !all.contains(Datatype::XATTR)
            && self.columns().push_run(run, all.contains(Datatype::SNAPPY)).is_some()
        {
            return Ok(());
        }
        run.give_each(self)
    }

    fn rollback(&mut self, rollback: &Rollback) -> Result<(), SinkError> {
        let Rollback { vbid, seqno, new_vbuuid: vbuuid, epoch, .. } = *rollback;
        let change = Change { vbid, seqno, vbuuid, epoch, ..NO_CHANGE };
        self.push((RowKind::Rollback, NO_COLLECTION), &change, &Content::Plain(&[], None))
    }

    fn caught_up(&mut self, caught_up: &CaughtUp) -> Result<(), SinkError> {
        if !self.wants.system_events {
            return Ok(());
        }
        let CaughtUp { vbid, seqno, epoch } = *caught_up;
        let change = Change { vbid, seqno, epoch, ..NO_CHANGE };
        self.push((RowKind::CaughtUp, NO_COLLECTION), &change, &Content::Plain(&[], None))
    }

    fn system_event(&mut self, event: &SystemEventRecord<'_>) -> Result<(), SinkError> {
        let SystemEventRecord { vbid, seqno, epoch, id, key, .. } = *event;
        let payload = payload(event);
        if let Ok(Some(payload)) = &payload {
            self.names.learn(id, payload);
        }
        if !self.wants.system_events {
            return Ok(());
        }
        let payload = payload.map_err(|error| unrepresentable(vbid, seqno, error.to_string()))?;
        let about = payload.as_ref().map_or(NO_COLLECTION, |payload| {
            payload.collection_id.map_or(only_scope(payload.scope_id), |id| i64::from(id.0))
        });
        let text = event_json(id, payload.as_ref());
        let change = Change { vbid, seqno, epoch, key, ..NO_CHANGE };
        self.push((RowKind::SystemEvent, about), &change, &Content::Plain(text.as_bytes(), None))
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
        let mut columns = columns;
        // The batch may wait for long, along with many others.
        columns.shrink_bytes(&self.pool);
        if columns.rows() < self.limits.expected_rows / MOSTLY_USED {
            columns.shrink(&self.pool);
        }
        self.limits.expect_like(columns.rows(), columns.value_bytes());
        Ok(PendingBatch::new(self.schema.clone(), self.names.clone(), self.pool.clone(), columns))
    }
}

/// The event's payload; `None` if its kind or version is unknown.
fn payload<'a>(
    event: &SystemEventRecord<'a>,
) -> Result<Option<SystemEventPayload<'a>>, DecodeError> {
    let SystemEventRecord { seqno, id, version, key, value, .. } = *event;
    SystemEvent { seqno, id, version, key, value }.payload()
}

/// The payload as JSON for the row's `value`; ids are hexadecimal, as in a manifest.
fn event_json(id: SystemEventId, payload: Option<&SystemEventPayload<'_>>) -> String {
    let mut text = json!({"event": id.to_string()});
    let Some(payload) = payload else {
        return text.to_string();
    };
    text["manifest_uid"] = json!(payload.manifest_uid.to_string());
    text["scope_id"] = json!(payload.scope_id.to_string());
    if let Some(collection_id) = payload.collection_id {
        text["collection_id"] = json!(collection_id.to_string());
    }
    if let Some(max_ttl) = payload.max_ttl {
        text["max_ttl"] = json!(max_ttl);
    }
    if payload.history {
        text["history"] = json!(true);
    }
    if payload.flush_uid != ManifestUid(0) {
        text["flush_uid"] = json!(payload.flush_uid.to_string());
    }
    text.to_string()
}
