//! Columns of bytes, filled by one copy from the read buffer.

use arrow_buffer::{Buffer, OffsetBuffer, ScalarBuffer};
use dcp_wire::{DecodeError, snappy};

use crate::{BatchLimits, BufferPool};

/// A column of byte strings being filled.
#[derive(Debug)]
pub(crate) struct BytesColumn {
    offsets: Vec<i32>,
    bytes: Vec<u8>,
    max_bytes: usize,
}

/// The column has no room: offsets are 32 bits wide, and memory is bounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

impl BytesColumn {
    pub(crate) fn new(rows: usize, bytes: Vec<u8>, limits: BatchLimits) -> Self {
        let mut offsets = Vec::with_capacity(rows.saturating_add(1));
        offsets.push(0);
        let max_bytes = limits.max_column_bytes.min(BatchLimits::OFFSET_LIMIT);
        Self { offsets, bytes, max_bytes }
    }

    /// A column for values whose room was checked when they were first appended elsewhere.
    pub(crate) fn with_room_checked(rows: usize, bytes: Vec<u8>) -> Self {
        let mut column = Self {
            offsets: Vec::with_capacity(rows.saturating_add(1)),
            bytes,
            max_bytes: BatchLimits::OFFSET_LIMIT,
        };
        column.offsets.push(0);
        column
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Keeps room for `len` bytes that come later; the caller has checked that there is.
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
    pub(crate) fn check_room(&self, len: usize) -> Result<(), Full> {
        if len > self.max_bytes - self.bytes.len() { Err(Full) } else { Ok(()) }
    }

    /// Appends a value; the caller has checked that there is room.
    #[inline]
    pub(crate) fn push(&mut self, value: &[u8]) {
        debug_assert!(self.check_room(value.len()).is_ok());
        self.bytes.extend_from_slice(value);
        self.end_value();
    }

    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "bounded by OFFSET_LIMIT, which every append checks before"
    )]
    fn end_value(&mut self) {
        self.offsets.push(self.bytes.len() as i32);
    }

    /// Offsets and bytes as Arrow buffers.
    pub(crate) fn finish(self, pool: &BufferPool) -> (OffsetBuffer<i32>, Buffer) {
        let offsets = OffsetBuffer::new(ScalarBuffer::from(self.offsets));
        (offsets, pool.buffer(self.bytes))
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
/// A compressed document is kept as it came; its place among the others is reserved at once, and
/// filled when the batch is finished, which is not the reading task's work.
#[derive(Debug)]
pub(crate) struct ValueColumn {
    pub(crate) plain: BytesColumn,
    compressed: Vec<u8>,
    blocks: Vec<Block>,
}

/// One compressed document.
#[derive(Debug)]
struct Block {
    row: usize,
    /// Where its bytes end among the compressed ones; they begin where the one before ends.
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
    pub(crate) fn new(rows: usize, bytes: Vec<u8>, limits: BatchLimits) -> Self {
        Self {
            plain: BytesColumn::new(rows, bytes, limits),
            compressed: Vec::new(),
            blocks: Vec::new(),
        }
    }

    /// Memory used by documents in bytes: inflated ones, and the compressed ones beside them.
    pub(crate) fn len_bytes(&self) -> usize {
        self.plain.len_bytes() + self.compressed.len()
    }

    #[inline]
    pub(crate) fn check_room(&self, len: usize) -> Result<(), Full> {
        self.plain.check_room(len)
    }

    #[inline]
    pub(crate) fn push(&mut self, value: &[u8]) {
        self.plain.push(value);
    }

    /// Appends a compressed document that inflates to `len` bytes; room has been checked.
    pub(crate) fn push_compressed(&mut self, row: usize, block: &[u8], len: usize) {
        self.compressed.extend_from_slice(block);
        let start = self.plain.bytes.len();
        self.plain.bytes.resize(start + len, 0);
        self.plain.end_value();
        let target = start..start + len;
        self.blocks.push(Block { row, source_end: self.compressed.len(), target });
    }

    /// The same column with other bytes, what is compressed inflated.
    pub(crate) fn replaced_by(self, plain: BytesColumn, pool: &BufferPool) -> Self {
        drop(pool.buffer(self.plain.bytes));
        Self { plain, compressed: Vec::new(), blocks: Vec::new() }
    }

    /// The column as Arrow buffers, what is compressed inflated.
    pub(crate) fn finish(
        mut self,
        pool: &BufferPool,
    ) -> Result<(OffsetBuffer<i32>, Buffer), BadBlock> {
        self.inflate()?;
        Ok(self.plain.finish(pool))
    }

    /// Inflates what is compressed.
    pub(crate) fn inflate(&mut self) -> Result<(), BadBlock> {
        let mut start = 0;
        for block in self.blocks.drain(..) {
            let source = self.compressed.get(start..block.source_end).unwrap_or_default();
            let target = self.plain.bytes.get_mut(block.target.clone()).unwrap_or_default();
            snappy::decompress_exact(source, target)
                .map_err(|error| BadBlock { row: block.row, error })?;
            start = block.source_end;
        }
        Ok(())
    }
}
