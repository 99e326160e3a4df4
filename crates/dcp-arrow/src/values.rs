//! Columns of bytes, filled with one copy from the read buffer.

use std::ops::Range;

use arrow_buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use dcp_wire::message::MutationView;
use dcp_wire::{Datatype, DecodeError, snappy};

use crate::pool::MOSTLY_USED;
use crate::{BatchLimits, BufferPool};

/// Builder of a column of byte strings.
#[derive(Debug)]
pub(crate) struct BytesColumn {
    offsets: Vec<i32>,
    /// All of it is initialized; bytes from `used` on are zeros or from an earlier batch.
    bytes: Vec<u8>,
    used: usize,
    /// From here to `used`, values are still to be inflated and nothing was written.
    written: usize,
    max_bytes: usize,
}

/// Keys up to this length are copied with a few instructions.
const SHORT: usize = 32;

/// Number of bytes to initialize at a time.
const GROWTH: usize = 64 * 1024;

#[inline]
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "bounded by OFFSET_LIMIT, which every append checks before"
)]
const fn offset(end: usize) -> i32 {
    end as i32
}

/// Returns a mostly unused block to the pool, after copying its contents into a small one.
fn shrink_block(block: &mut Vec<u8>, used: usize, pool: &BufferPool) {
    let used = used.min(block.len());
    if block.capacity() / MOSTLY_USED > used {
        let small = block.get(..used).unwrap_or_default().to_vec();
        pool.give_back(std::mem::replace(block, small));
    }
}

/// The column is full: offsets are 32 bits wide, and memory is bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl BytesColumn {
    /// A column with room for `rows` rows, in memory with unspecified contents.
    pub(crate) fn new(rows: usize, bytes: Vec<u8>, limits: BatchLimits) -> Self {
        let mut offsets = Vec::with_capacity(rows.saturating_add(1));
        offsets.push(0);
        let max_bytes = limits.max_column_bytes.min(BatchLimits::OFFSET_LIMIT);
        Self { offsets, bytes, used: 0, written: 0, max_bytes }
    }

    /// A column bounded by its offsets only.
    pub(crate) fn with_room_checked(rows: usize, bytes: Vec<u8>) -> Self {
        let max_column_bytes = BatchLimits::OFFSET_LIMIT;
        Self::new(rows, bytes, BatchLimits { max_column_bytes, ..BatchLimits::default() })
    }

    pub(crate) const fn len_bytes(&self) -> usize {
        self.used
    }

    /// Reserves room for `len` bytes appended later; the caller has checked that it exists.
    pub(crate) const fn reserve(&mut self, len: usize) {
        self.max_bytes = self.max_bytes.saturating_sub(len);
    }

    /// Appends rows of another column.
    pub(crate) fn extend_from(&mut self, other: &Self, rows: Range<usize>) {
        for row in rows {
            self.push(other.value(row));
        }
    }

    /// Whether a value of `len` bytes can be appended.
    #[inline]
    pub(crate) const fn check_room(&self, len: usize) -> Result<(), Full> {
        // Reservations may have left less room than is used.
        if len > self.max_bytes.saturating_sub(self.used) { Err(Full) } else { Ok(()) }
    }

    /// Appends a value; the caller has checked that there is room.
    #[inline]
    pub(crate) fn push(&mut self, value: &[u8]) {
        self.push_place(value.len()).copy_from_slice(value);
    }

    /// Appends a value of `len` bytes for the caller to write; the caller has checked that there is
    /// room.
    #[inline]
    fn push_place(&mut self, len: usize) -> &mut [u8] {
        debug_assert!(self.check_room(len).is_ok());
        let (start, end) = (self.used, self.used + len);
        if end > self.bytes.len() {
            self.grow(end);
        }
        (self.used, self.written) = (end, end);
        self.offsets.push(offset(end));
        &mut self.bytes[start..end]
    }

    /// Appends the values of a run, `len` bytes in total; the caller has checked that there is
    /// room.
    #[inline]
    pub(crate) fn push_values(&mut self, run: &[MutationView<'_>], len: usize) {
        let (mut start, end) = (self.used, self.used + len);
        if end > self.bytes.len() {
            self.grow(end);
        }
        for mutation in run {
            let value = mutation.value();
            self.bytes[start..start + value.len()].copy_from_slice(value);
            start += value.len();
        }
        self.push_offsets(run.iter().map(|mutation| mutation.value().len()));
    }

    /// Appends the keys of a run in the same way.
    #[inline]
    pub(crate) fn push_keys(&mut self, run: &[MutationView<'_>], len: usize) {
        let (mut start, end) = (self.used, self.used + len + SHORT);
        if end > self.bytes.len() {
            self.grow(end);
        }
        for mutation in run {
            let (key_len, bytes) = (mutation.key_len(), mutation.key_and_value());
            let place = &mut self.bytes[start..];
            // Most keys are short and followed by other bytes, and a copy of constant length takes
            // a few instructions. The next key overwrites the excess.
            if key_len <= SHORT
                && let Some(place) = place.first_chunk_mut::<SHORT>()
                && let Some(bytes) = bytes.first_chunk::<SHORT>()
            {
                *place = *bytes;
            } else {
                place[..key_len].copy_from_slice(&bytes[..key_len]);
            }
            start += key_len;
        }
        self.push_offsets(run.iter().map(MutationView::key_len));
    }

    #[inline]
    fn push_offsets(&mut self, lens: impl Iterator<Item = usize>) {
        let mut end = self.used;
        self.offsets.extend(lens.map(|len| {
            end += len;
            offset(end)
        }));
        (self.used, self.written) = (end, end);
    }

    /// Appends a value of `len` bytes whose memory is allocated by
    /// [`take_memory`](Self::take_memory) or by a later value.
    fn push_later(&mut self, len: usize) {
        debug_assert!(self.check_room(len).is_ok());
        self.used += len;
        self.offsets.push(offset(self.used));
    }

    /// Allocates and initializes the memory of every value.
    fn take_memory(&mut self, pool: &BufferPool) {
        if self.bytes.capacity() < self.used {
            let mut bytes = pool.take(self.used);
            let written = self.bytes.get(..self.written).unwrap_or_default();
            // A block from the pool is initialized already, and most of it need not be again.
            if let Some(place) = bytes.get_mut(..written.len()) {
                place.copy_from_slice(written);
            } else {
                bytes.clear();
                bytes.extend_from_slice(written);
            }
            pool.give_back(std::mem::replace(&mut self.bytes, bytes));
        }
        if self.bytes.len() < self.used {
            self.bytes.resize(self.used, 0);
        }
    }

    /// Initializes the bytes up to `end`, and some more.
    #[cold]
    fn grow(&mut self, end: usize) {
        // In steps, so that a large block is not touched before it is needed.
        let wanted = end.saturating_add(GROWTH);
        let within = wanted.min(self.bytes.capacity().max(end));
        self.bytes.resize(within, 0);
    }

    /// Returns unused room.
    pub(crate) fn shrink(&mut self, pool: &BufferPool) {
        self.offsets.shrink_to_fit();
        self.shrink_bytes(pool);
    }

    /// Returns unused room of the values only, if most of it is unused.
    pub(crate) fn shrink_bytes(&mut self, pool: &BufferPool) {
        shrink_block(&mut self.bytes, self.written, pool);
    }

    /// Offsets and bytes as Arrow buffers.
    pub(crate) fn finish(self, pool: &BufferPool) -> (OffsetBuffer<i32>, Buffer) {
        let offsets = OffsetBuffer::new(ScalarBuffer::from(self.offsets));
        (offsets, pool.buffer(self.bytes, self.used))
    }

    /// The value of one row.
    #[inline]
    pub(crate) fn value(&self, row: usize) -> &[u8] {
        self.place(row).and_then(|place| self.bytes.get(place)).unwrap_or_default()
    }

    /// The same, to be written.
    #[inline]
    fn value_mut(&mut self, row: usize) -> &mut [u8] {
        self.place(row).and_then(|place| self.bytes.get_mut(place)).unwrap_or_default()
    }

    #[inline]
    fn place(&self, row: usize) -> Option<Range<usize>> {
        Some(*self.offsets.get(row)? as usize..*self.offsets.get(row + 1)? as usize)
    }

    /// Removes the rows from `rows` on.
    #[cold]
    fn truncate(&mut self, rows: usize) {
        self.offsets.truncate(rows + 1);
        self.used = self.offsets.last().map_or(0, |end| *end as usize);
        self.written = self.written.min(self.used);
    }
}

/// The column of documents.
///
/// A compressed document is stored as received. Its place in the column is known at once, but
/// filled only when the batch is finished, which is not the reading task's work. Its memory is
/// allocated only then too: it could be twenty times what flow control counts.
#[derive(Debug)]
pub(crate) struct ValueColumn {
    pub(crate) plain: BytesColumn,
    /// Allocated with the first compressed document.
    compressed: Option<Compressed>,
    pool: BufferPool,
    limits: BatchLimits,
}

/// Compressed documents.
#[derive(Debug)]
struct Compressed {
    blocks: BytesColumn,
    /// The row of each block.
    rows: Vec<usize>,
}

impl Compressed {
    #[cold]
    fn new(pool: &BufferPool, limits: BatchLimits) -> Self {
        let rows = limits.expected_rows;
        Self {
            blocks: BytesColumn::with_room_checked(rows, pool.take(limits.expected_bytes)),
            rows: Vec::with_capacity(rows),
        }
    }
}

/// The document of `row` could not be inflated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BadBlock {
    pub(crate) row: usize,
    pub(crate) error: DecodeError,
}

impl ValueColumn {
    pub(crate) fn new(rows: usize, pool: &BufferPool, limits: BatchLimits) -> Self {
        Self {
            plain: BytesColumn::new(rows, pool.take(limits.expected_bytes), limits),
            compressed: None,
            pool: pool.clone(),
            limits,
        }
    }

    /// Returns unused room, unless there is little of it.
    pub(crate) fn shrink_bytes(&mut self) {
        self.plain.shrink_bytes(&self.pool);
        if let Some(Compressed { blocks, rows }) = &mut self.compressed {
            blocks.shrink_bytes(&self.pool);
            if rows.capacity() / MOSTLY_USED > rows.len() {
                blocks.offsets.shrink_to_fit();
                rows.shrink_to_fit();
            }
        }
    }

    /// Memory used by documents in bytes: inflated ones, and the compressed bytes.
    pub(crate) fn len_bytes(&self) -> usize {
        let compressed = self.compressed.as_ref();
        self.plain.len_bytes() + compressed.map_or(0, |compressed| compressed.blocks.len_bytes())
    }

    /// Whether a compressed document that inflates to `len` bytes can be appended.
    #[inline]
    pub(crate) fn check_room_compressed(&self, block: &[u8], len: usize) -> Result<(), Full> {
        let compressed = self.compressed.as_ref();
        compressed.map_or(Ok(()), |compressed| compressed.blocks.check_room(block.len()))?;
        self.plain.check_room(len)
    }

    /// Appends a compressed document that inflates to `len` bytes; the caller has checked the room.
    #[inline]
    pub(crate) fn push_compressed(&mut self, row: usize, block: &[u8], len: usize) {
        let Compressed { blocks, rows } =
            self.compressed.get_or_insert_with(|| Compressed::new(&self.pool, self.limits));
        blocks.push(block);
        rows.push(row);
        self.plain.push_later(len);
    }

    /// Appends the values of a run from row `first` on, of which some are compressed, or nothing if one
    /// has no room or is not a block.
    pub(crate) fn push_values_compressed(
        &mut self,
        first: usize,
        run: &[MutationView<'_>],
    ) -> Option<()> {
        let before = self.compressed.as_ref().map_or(0, |compressed| compressed.rows.len());
        for (row, mutation) in (first..).zip(run) {
            let value = mutation.value();
            let pushed = if mutation.datatype().contains(Datatype::SNAPPY) && !value.is_empty() {
                snappy::decompressed_len(value, self.limits.max_value_bytes)
                    .ok()
                    .filter(|len| self.check_room_compressed(value, *len).is_ok())
                    .map(|len| self.push_compressed(row, value, len))
            } else {
                self.plain.check_room(value.len()).ok().map(|()| self.plain.push(value))
            };
            if pushed.is_none() {
                self.truncate(first, before);
                return None;
            }
        }
        Some(())
    }

    /// Removes the rows from `rows` on; `blocks` of the compressed documents stay.
    #[cold]
    fn truncate(&mut self, rows: usize, blocks: usize) {
        self.plain.truncate(rows);
        if let Some(compressed) = &mut self.compressed {
            compressed.blocks.truncate(blocks);
            compressed.rows.truncate(blocks);
        }
    }

    /// The same column with `plain` instead of its bytes and compressed documents.
    pub(crate) fn replaced_by(self, plain: BytesColumn) -> Self {
        self.pool.give_back(self.plain.bytes);
        Self { plain, compressed: None, ..self }
    }

    /// The column as Arrow buffers, with compressed documents inflated.
    pub(crate) fn finish(mut self) -> Result<(OffsetBuffer<i32>, Buffer), BadBlock> {
        self.inflate()?;
        Ok(self.plain.finish(&self.pool))
    }

    /// Inflates compressed documents.
    pub(crate) fn inflate(&mut self) -> Result<(), BadBlock> {
        let Some(Compressed { blocks, rows }) = self.compressed.take() else { return Ok(()) };
        self.plain.take_memory(&self.pool);
        for (index, row) in rows.into_iter().enumerate() {
            snappy::decompress_exact(blocks.value(index), self.plain.value_mut(row))
                .map_err(|error| BadBlock { row, error })?;
        }
        self.pool.give_back(blocks.bytes);
        Ok(())
    }
}

/// A null buffer, or none if every row is valid.
pub(crate) fn nulls(valid: &[bool]) -> Option<NullBuffer> {
    valid.contains(&false).then(|| NullBuffer::from(valid))
}
