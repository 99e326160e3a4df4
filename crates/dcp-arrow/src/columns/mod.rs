//! The columns of a batch being filled.

mod deferred;

use dcp_proto::{Change, MutationRun, Op, Snapshot};
use dcp_wire::message::MutationView;
use dcp_wire::xattr::Xattrs;
use dcp_wire::{Cas, CollectionId, Datatype, RevSeqno, ScopeId, Seqno, Vbid, Vbuuid};

use crate::rows::RowKind;
use crate::values::{BytesColumn, Full, ValueColumn};
use crate::xattrs::XattrsColumn;
use crate::{BatchLimits, BufferPool, Column, TableSchema};

use deferred::DeferredValues;

/// Marks a row without a collection in a column of collection ids, which are 32 bits wide. Smaller
/// numbers stand for a scope without a collection.
pub(crate) const NO_COLLECTION: i64 = -1;

/// The number of a scope without a collection, in the same column.
pub(crate) const fn only_scope(id: ScopeId) -> i64 {
    NO_COLLECTION - 1 - id.0 as i64
}

/// The scope of such a number.
pub(crate) fn scope_of(number: i64) -> Option<ScopeId> {
    u32::try_from(NO_COLLECTION - 1 - number).ok().map(ScopeId)
}

/// Values of a row that is not a document change; [`RowKind`] makes them null.
pub(crate) const NO_CHANGE: Change<'static> = Change {
    op: Op::Mutation,
    vbid: Vbid(0),
    seqno: Seqno(0),
    vbuuid: Vbuuid(0),
    epoch: 0,
    snapshot: Snapshot::at(Seqno(0)),
    history: false,
    collection_id: CollectionId::DEFAULT,
    key: &[],
    value: &[],
    datatype: Datatype::RAW,
    cas: Cas(0),
    rev_seqno: RevSeqno(0),
    flags: 0,
    expiry: 0,
    delete_time: 0,
};

/// What a row has in the `value` and `xattrs` columns.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Content<'a> {
    /// A value as shown, and checked attributes.
    Plain(&'a [u8], Option<Xattrs<'a>>),
    /// A compressed value and its inflated length.
    Compressed(&'a [u8], usize),
    /// The same with attributes, which are split off after inflating.
    Late(&'a [u8], usize),
}

/// The columns of a batch being filled; those not in the table are `None`.
///
/// Rows come in runs of plain documents ([`push_run`](Self::push_run)) or one at a time
/// ([`push_row`](Self::push_row)).
#[derive(Debug)]
pub(crate) struct Columns {
    pub(crate) kinds: Vec<RowKind>,
    /// Always filled, since errors name them.
    pub(crate) vbuckets: Vec<i32>,
    pub(crate) seqnos: Vec<i64>,
    pub(crate) keys: Option<BytesColumn>,
    pub(crate) values: Option<ValueColumn>,
    pub(crate) xattrs: Option<XattrsColumn>,
    /// Rows to be filled in both columns later.
    pub(crate) deferred: DeferredValues,
    pub(crate) collection_ids: Option<Vec<i64>>,
    pub(crate) epochs: Option<Vec<i32>>,
    pub(crate) cas: Option<Vec<i64>>,
    pub(crate) revs: Option<Vec<i64>>,
    pub(crate) expiries: Option<Vec<i64>>,
    pub(crate) delete_times: Option<Vec<i64>>,
    pub(crate) flags: Option<Vec<i64>>,
    pub(crate) json: Option<Vec<bool>>,
    pub(crate) vbuuids: Option<Vec<i64>>,
    pub(crate) snapshot_starts: Option<Vec<i64>>,
    pub(crate) snapshot_ends: Option<Vec<i64>>,
    pub(crate) history: Option<Vec<bool>>,
    bytes_per_row: usize,
}

#[inline]
fn push<T>(column: &mut Option<Vec<T>>, value: impl FnOnce() -> T) {
    if let Some(column) = column {
        column.push(value());
    }
}

#[inline]
fn fill<T: Clone>(column: &mut Option<Vec<T>>, rows: usize, value: T) {
    if let Some(column) = column {
        column.resize(rows, value);
    }
}

#[inline]
fn extend<T>(
    column: &mut Option<Vec<T>>,
    mutations: &[MutationView<'_>],
    field: impl Fn(&MutationView<'_>) -> T,
) {
    if let Some(column) = column {
        column.extend(mutations.iter().map(field));
    }
}

impl Columns {
    #[cold]
    pub(crate) fn new(schema: &TableSchema, limits: BatchLimits, pool: &BufferPool) -> Self {
        let rows = limits.expected_rows;
        let longs = |columns: &[Column]| {
            columns.iter().any(|column| schema.has(*column)).then(|| Vec::with_capacity(rows))
        };
        Self {
            kinds: Vec::with_capacity(rows),
            vbuckets: Vec::with_capacity(rows),
            seqnos: Vec::with_capacity(rows),
            keys: schema.has(Column::Key).then(|| {
                BytesColumn::new(rows, pool.take(rows.saturating_mul(EXPECTED_KEY_BYTES)), limits)
            }),
            values: schema.needs(Column::Value).then(|| ValueColumn::new(rows, pool, limits)),
            xattrs: schema.has(Column::Xattrs).then(|| XattrsColumn::new(rows, limits)),
            deferred: DeferredValues::default(),
            collection_ids: longs(&[Column::Scope, Column::Collection, Column::CollectionId]),
            epochs: schema.has(Column::Epoch).then(|| Vec::with_capacity(rows)),
            cas: longs(&[Column::Cas, Column::Timestamp]),
            revs: longs(&[Column::Rev]),
            expiries: longs(&[Column::Expiry]),
            delete_times: longs(&[Column::DeletedAt]),
            flags: longs(&[Column::Flags]),
            json: schema.needs(Column::Datatype).then(|| Vec::with_capacity(rows)),
            vbuuids: longs(&[Column::Vbuuid]),
            snapshot_starts: longs(&[Column::SnapshotStart]),
            snapshot_ends: longs(&[Column::SnapshotEnd]),
            history: schema.has(Column::History).then(|| Vec::with_capacity(rows)),
            // Eight bytes per fixed-size column is accurate enough to cut batches.
            bytes_per_row: 8 * schema.slots().len(),
        }
    }

    pub(crate) fn rows(&self) -> usize {
        self.kinds.len()
    }

    pub(crate) fn value_bytes(&self) -> usize {
        self.values.as_ref().map_or(0, |values| values.plain.len_bytes())
    }

    pub(crate) fn size_bytes(&self) -> usize {
        self.keys.as_ref().map_or(0, BytesColumn::len_bytes)
            + self.values.as_ref().map_or(0, ValueColumn::len_bytes)
            + self.xattrs.as_ref().map_or(0, XattrsColumn::len_bytes)
            + self.deferred.len_bytes()
            + self.rows() * self.bytes_per_row
    }

    /// Returns the room reserved for keys and documents unless a good part of it is used:
    /// compressed documents take far less until they are inflated.
    pub(crate) fn shrink_bytes(&mut self, pool: &BufferPool) {
        self.keys.iter_mut().for_each(|keys| keys.shrink_bytes(pool));
        self.values.iter_mut().for_each(ValueColumn::shrink_bytes);
    }

    /// Returns unused room.
    #[cold]
    pub(crate) fn shrink(&mut self, pool: &BufferPool) {
        fn shrink<T>(column: &mut Option<Vec<T>>) {
            column.iter_mut().for_each(Vec::shrink_to_fit);
        }
        self.kinds.shrink_to_fit();
        self.vbuckets.shrink_to_fit();
        self.seqnos.shrink_to_fit();
        self.keys.iter_mut().for_each(|keys| keys.shrink(pool));
        self.values.iter_mut().for_each(|values| values.plain.shrink(pool));
        self.xattrs.iter_mut().for_each(XattrsColumn::shrink);
        shrink(&mut self.epochs);
        shrink(&mut self.json);
        shrink(&mut self.history);
        let longs = [
            &mut self.collection_ids,
            &mut self.cas,
            &mut self.revs,
            &mut self.expiries,
            &mut self.delete_times,
            &mut self.flags,
            &mut self.vbuuids,
            &mut self.snapshot_starts,
            &mut self.snapshot_ends,
        ];
        longs.into_iter().for_each(shrink);
    }

    /// Appends one row of any kind, or nothing if there is no room for all of it. `content` is the
    /// value of `change`, `about` its collection as in the column of ids.
    #[inline(always)]
    pub(crate) fn push_row(
        &mut self,
        (kind, about): (RowKind, i64),
        change: &Change<'_>,
        content: &Content<'_>,
    ) -> Result<(), Full> {
        if let Some(keys) = &self.keys {
            keys.check_room(change.key.len())?;
        }
        self.push_content(kind, content)?;
        if let Some(keys) = &mut self.keys {
            keys.push(change.key);
        }
        self.kinds.push(kind);
        self.vbuckets.push(i32::from(change.vbid.0));
        self.seqnos.push(bits(change.seqno.0));
        push(&mut self.collection_ids, || about);
        push(&mut self.epochs, || bits32(change.epoch));
        push(&mut self.cas, || bits(change.cas.0));
        push(&mut self.revs, || bits(change.rev_seqno.0));
        push(&mut self.expiries, || i64::from(change.expiry));
        push(&mut self.delete_times, || i64::from(change.delete_time));
        push(&mut self.flags, || i64::from(change.flags));
        push(&mut self.json, || change.datatype.contains(Datatype::JSON));
        push(&mut self.vbuuids, || bits(change.vbuuid.0));
        push(&mut self.snapshot_starts, || bits(change.snapshot.start.0));
        push(&mut self.snapshot_ends, || bits(change.snapshot.end.0));
        push(&mut self.history, || change.history);
        Ok(())
    }

    /// Appends to `value` and `xattrs`, or nothing if one of them has no room.
    #[inline(always)]
    fn push_content(&mut self, kind: RowKind, content: &Content<'_>) -> Result<(), Full> {
        let (value_bytes, xattr_bytes, section) = match *content {
            Content::Plain(value, section) => {
                (value.len(), section.as_ref().map_or(0, Xattrs::len_bytes), section)
            }
            Content::Compressed(_, len) => (len, 0, None),
            Content::Late(_, len) => (len, len, None),
        };
        if let Some(values) = &self.values {
            match *content {
                Content::Compressed(block, len) => values.check_room_compressed(block, len)?,
                _ => values.plain.check_room(value_bytes)?,
            }
        }
        if let Some(xattrs) = &mut self.xattrs {
            xattrs.check_room(xattr_bytes)?;
            xattrs.push(section);
        }
        let row = self.rows();
        match (*content, &mut self.values) {
            (Content::Plain(value, _), Some(values)) => values.plain.push(value),
            (Content::Compressed(block, len), Some(values)) => {
                values.push_compressed(row, block, len);
            }
            (Content::Late(block, len), values) => {
                if let Some(values) = values {
                    values.plain.reserve(len);
                    values.plain.push(&[]);
                }
                if let Some(xattrs) = &mut self.xattrs {
                    xattrs.reserve(len);
                }
                self.deferred.push(row, block, len, kind == RowKind::Mutation);
            }
            (Content::Plain(..) | Content::Compressed(..), None) => {}
        }
        Ok(())
    }

    /// Appends mutations without attributes column by column: the packets are in the first-level
    /// cache, and each loop touches one column only. Appends nothing if a value has no room or, if
    /// `some_compressed`, is not a block; then they have to be pushed one at a time.
    pub(crate) fn push_run(
        &mut self,
        run: &MutationRun<'_, '_>,
        some_compressed: bool,
    ) -> Option<()> {
        let mutations = run.mutations;
        let key_bytes: usize = mutations.iter().map(MutationView::key_len).sum();
        let bodies: usize = mutations.iter().map(|mutation| mutation.key_and_value().len()).sum();
        let value_bytes = bodies - key_bytes;
        if let Some(keys) = &self.keys {
            keys.check_room(key_bytes).ok()?;
        }
        let first = self.rows();
        if let Some(values) = &mut self.values {
            if some_compressed {
                values.push_values_compressed(first, mutations)?;
            } else {
                values.plain.check_room(value_bytes).ok()?;
                values.plain.push_values(mutations, value_bytes);
            }
        }
        if let Some(keys) = &mut self.keys {
            keys.push_keys(mutations, key_bytes);
        }
        if let Some(xattrs) = &mut self.xattrs {
            mutations.iter().for_each(|_| xattrs.push(None));
        }
        let rows = first + mutations.len();
        self.kinds.resize(rows, RowKind::Mutation);
        self.vbuckets.resize(rows, i32::from(run.vbid.0));
        self.seqnos.extend(mutations.iter().map(|mutation| bits(mutation.seqno().0)));
        extend(&mut self.collection_ids, mutations, |mutation| {
            i64::from(mutation.collection_id().0)
        });
        extend(&mut self.cas, mutations, |mutation| bits(mutation.cas().0));
        extend(&mut self.revs, mutations, |mutation| bits(mutation.rev_seqno().0));
        extend(&mut self.expiries, mutations, |mutation| i64::from(mutation.expiry()));
        extend(&mut self.flags, mutations, |mutation| i64::from(mutation.flags()));
        extend(&mut self.json, mutations, |mutation| mutation.datatype().contains(Datatype::JSON));
        fill(&mut self.epochs, rows, bits32(run.epoch));
        fill(&mut self.delete_times, rows, 0);
        fill(&mut self.vbuuids, rows, bits(run.vbuuid.0));
        fill(&mut self.snapshot_starts, rows, bits(run.snapshot.start.0));
        fill(&mut self.snapshot_ends, rows, bits(run.snapshot.end.0));
        fill(&mut self.history, rows, run.history);
        Some(())
    }
}

/// Room reserved per key in bytes.
const EXPECTED_KEY_BYTES: usize = 24;

/// The number's bits, as documented for 64-bit columns.
#[inline]
const fn bits(number: u64) -> i64 {
    number.cast_signed()
}

#[inline]
const fn bits32(number: u32) -> i32 {
    number.cast_signed()
}
