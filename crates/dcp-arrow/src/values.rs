//! Columns of bytes, filled with one copy from the read buffer.

use arrow_buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use dcp_wire::message::MutationView;
use dcp_wire::{DecodeError, snappy};

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

/// A block is kept if at least one part in this many is used.
pub(crate) const MOSTLY_USED: usize = 4;

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

    /// A column for values that were already checked to fit.
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
    pub(crate) fn extend_from(&mut self, other: &Self, rows: std::ops::Range<usize>) {
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
            bytes.clear();
            bytes.extend_from_slice(self.bytes.get(..self.written).unwrap_or_default());
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
    pub(crate) fn value(&self, row: usize) -> &[u8] {
        match (self.offsets.get(row), self.offsets.get(row + 1)) {
            (Some(&start), Some(&end)) => {
                self.bytes.get(start as usize..end as usize).unwrap_or_default()
            }
            _ => &[],
        }
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
    compressed: Vec<u8>,
    blocks: Vec<Block>,
    pool: BufferPool,
    limits: BatchLimits,
}

/// One compressed document.
#[derive(Debug)]
struct Block {
    row: usize,
    /// End of its compressed bytes, which begin where the previous block ends.
    source_end: usize,
    target: std::ops::Range<usize>,
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
            compressed: Vec::new(),
            blocks: Vec::new(),
            pool: pool.clone(),
            limits,
        }
    }

    /// Returns unused room, unless there is little of it.
    pub(crate) fn shrink_bytes(&mut self) {
        self.plain.shrink_bytes(&self.pool);
        let used = self.compressed.len();
        shrink_block(&mut self.compressed, used, &self.pool);
        if self.blocks.capacity() / MOSTLY_USED > self.blocks.len() {
            self.blocks.shrink_to_fit();
        }
    }

    /// Memory used by documents in bytes: inflated ones, and the compressed bytes.
    pub(crate) fn len_bytes(&self) -> usize {
        self.plain.len_bytes() + self.compressed.len()
    }

    /// Appends a compressed document that inflates to `len` bytes; the caller has checked the room.
    #[inline]
    pub(crate) fn push_compressed(&mut self, row: usize, block: &[u8], len: usize) {
        if self.compressed.capacity() == 0 {
            self.compressed = self.pool.take(self.limits.expected_bytes);
            self.compressed.clear();
            self.blocks.reserve(self.limits.expected_rows);
        }
        self.compressed.extend_from_slice(block);
        let start = self.plain.used;
        // Its bytes are written when the batch is finished.
        self.plain.push_later(len);
        let target = start..start + len;
        self.blocks.push(Block { row, source_end: self.compressed.len(), target });
    }

    /// The same column with `plain` instead of its bytes and compressed documents.
    pub(crate) fn replaced_by(self, plain: BytesColumn) -> Self {
        self.pool.give_back(self.plain.bytes);
        Self { plain, compressed: Vec::new(), blocks: Vec::new(), ..self }
    }

    /// The column as Arrow buffers, with compressed documents inflated.
    pub(crate) fn finish(mut self) -> Result<(OffsetBuffer<i32>, Buffer), BadBlock> {
        self.inflate()?;
        Ok(self.plain.finish(&self.pool))
    }

    /// Inflates compressed documents.
    pub(crate) fn inflate(&mut self) -> Result<(), BadBlock> {
        self.plain.take_memory(&self.pool);
        let mut start = 0;
        for block in self.blocks.drain(..) {
            let source = self.compressed.get(start..block.source_end).unwrap_or_default();
            let target = self.plain.bytes.get_mut(block.target.clone()).unwrap_or_default();
            snappy::decompress_exact(source, target)
                .map_err(|error| BadBlock { row: block.row, error })?;
            start = block.source_end;
        }
        self.pool.give_back(std::mem::take(&mut self.compressed));
        Ok(())
    }
}

/// A null buffer, or none if every row is valid.
pub(crate) fn nulls(valid: &[bool]) -> Option<NullBuffer> {
    valid.contains(&false).then(|| NullBuffer::from(valid))
}
