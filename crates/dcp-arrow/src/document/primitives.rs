//! Builders of typed columns that have no child columns, or only offsets.

use std::sync::Arc;

use arrow_array::types::ArrowPrimitiveType;
use arrow_array::{ArrayRef, BinaryArray, BooleanArray, PrimitiveArray, StringArray, StructArray};
use arrow_buffer::{ArrowNativeType, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::ArrowError;

use super::malformed::Malformed;
use super::variant::VariantEncoder;
use super::variant_fields;
use crate::values::nulls;

/// Makes a row null; returns whether it was not.
pub(super) fn set_null(valid: &mut [bool], row: usize) -> bool {
    valid.get_mut(row).is_some_and(|valid| std::mem::replace(valid, false))
}

/// Values of a fixed width.
#[derive(Debug)]
pub(super) struct Primitive<T> {
    values: Vec<T>,
    valid: Vec<bool>,
}

impl<T: Copy + Default> Primitive<T> {
    pub(super) fn new(rows: usize) -> Self {
        Self { values: Vec::with_capacity(rows), valid: Vec::with_capacity(rows) }
    }

    #[inline]
    pub(super) fn push(&mut self, value: T) {
        self.values.push(value);
        self.valid.push(true);
    }

    pub(super) fn push_null(&mut self) {
        self.values.push(T::default());
        self.valid.push(false);
    }

    pub(super) fn set_null(&mut self, row: usize) {
        set_null(&mut self.valid, row);
    }

    pub(super) fn truncate(&mut self, rows: usize) {
        self.values.truncate(rows);
        self.valid.truncate(rows);
    }

    pub(super) fn len(&self) -> usize {
        self.valid.len()
    }

    pub(super) fn finish<A: ArrowPrimitiveType<Native = T>>(self) -> PrimitiveArray<A>
    where
        T: ArrowNativeType,
    {
        PrimitiveArray::new(ScalarBuffer::from(self.values), nulls(&self.valid))
    }
}

impl Primitive<bool> {
    pub(super) fn booleans(self) -> BooleanArray {
        BooleanArray::new(self.values.into(), nulls(&self.valid))
    }
}

/// Strings or bytes.
#[derive(Debug)]
pub(super) struct Texts {
    offsets: Vec<i32>,
    bytes: Vec<u8>,
    valid: Vec<bool>,
}

/// Converts the end of a column to Arrow's 32-bit offset.
///
/// The size is bounded far below 32 bits: see [`MAX_BATCH_BYTES`](super::batch).
fn end(len: usize) -> i32 {
    i32::try_from(len).unwrap_or(i32::MAX)
}

fn offset_buffer(offsets: Vec<i32>) -> OffsetBuffer<i32> {
    OffsetBuffer::new(ScalarBuffer::from(offsets))
}

impl Texts {
    pub(super) fn new(rows: usize) -> Self {
        let mut offsets = Vec::with_capacity(rows.saturating_add(1));
        offsets.push(0);
        Self { offsets, bytes: Vec::new(), valid: Vec::with_capacity(rows) }
    }

    #[inline]
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        self.end_value(true);
    }

    pub(super) fn set_null(&mut self, row: usize) {
        set_null(&mut self.valid, row);
    }

    pub(super) fn push_null(&mut self) {
        self.end_value(false);
    }

    /// Appends a value written by a function.
    pub(super) fn push_with<E>(
        &mut self,
        write: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<(), E> {
        write(&mut self.bytes)?;
        self.end_value(true);
        Ok(())
    }

    fn end_value(&mut self, is_valid: bool) {
        self.offsets.push(end(self.bytes.len()));
        self.valid.push(is_valid);
    }

    pub(super) fn len(&self) -> usize {
        self.valid.len()
    }

    pub(super) fn len_bytes(&self) -> usize {
        self.bytes.len()
    }

    fn value(&self, row: usize) -> &[u8] {
        match (self.offsets.get(row), self.offsets.get(row + 1)) {
            (Some(&start), Some(&end)) => {
                self.bytes.get(start as usize..end as usize).unwrap_or_default()
            }
            _ => &[],
        }
    }

    /// Whether the values from `row` on contain duplicates.
    pub(super) fn has_duplicates(&self, row: usize) -> bool {
        const FEW: usize = 8;
        let mut values: Vec<&[u8]> = Vec::new();
        if self.len() - row <= FEW {
            let rows = || row..self.len();
            return rows().any(|a| (row..a).any(|b| self.value(a) == self.value(b)));
        }
        values.extend((row..self.len()).map(|row| self.value(row)));
        values.sort_unstable();
        values.windows(2).any(|pair| matches!(pair, [a, b] if a == b))
    }

    pub(super) fn truncate(&mut self, rows: usize) {
        self.offsets.truncate(rows + 1);
        self.valid.truncate(rows);
        self.bytes.truncate(self.offsets.last().map_or(0, |end| *end as usize));
    }

    pub(super) fn strings(self) -> Result<StringArray, ArrowError> {
        StringArray::try_new(offset_buffer(self.offsets), self.bytes.into(), nulls(&self.valid))
    }

    pub(super) fn binaries(self) -> Result<BinaryArray, ArrowError> {
        BinaryArray::try_new(offset_buffer(self.offsets), self.bytes.into(), nulls(&self.valid))
    }
}

/// Spark's variant type.
#[derive(Debug)]
pub(super) struct Variants {
    encoder: Box<VariantEncoder>,
    values: Texts,
    metadata: Texts,
    valid: Vec<bool>,
}

impl Variants {
    pub(super) fn new(rows: usize) -> Self {
        Self {
            encoder: Box::default(),
            values: Texts::new(rows),
            metadata: Texts::new(rows),
            valid: Vec::with_capacity(rows),
        }
    }

    /// Appends the JSON `text`; nothing if it is malformed.
    pub(super) fn push(&mut self, text: &[u8]) -> Result<(), Malformed> {
        let (value, metadata) = self.encoder.encode(text)?;
        self.values.push(value);
        self.metadata.push(metadata);
        self.valid.push(true);
        Ok(())
    }

    pub(super) fn set_null(&mut self, row: usize) {
        set_null(&mut self.valid, row);
    }

    pub(super) fn push_null(&mut self) {
        // Both parts of a variant are non-null even in a null row.
        self.values.push(&[]);
        self.metadata.push(&[]);
        self.valid.push(false);
    }

    pub(super) fn len(&self) -> usize {
        self.valid.len()
    }

    pub(super) fn len_bytes(&self) -> usize {
        self.values.len_bytes() + self.metadata.len_bytes()
    }

    pub(super) fn truncate(&mut self, rows: usize) {
        self.values.truncate(rows);
        self.metadata.truncate(rows);
        self.valid.truncate(rows);
    }

    pub(super) fn finish(self) -> Result<StructArray, ArrowError> {
        let parts: Vec<ArrayRef> =
            vec![Arc::new(self.values.binaries()?), Arc::new(self.metadata.binaries()?)];
        StructArray::try_new(variant_fields(), parts, nulls(&self.valid))
    }
}

/// Rows with a variable number of elements in child columns.
#[derive(Debug)]
pub(super) struct Ranges {
    offsets: Vec<i32>,
    valid: Vec<bool>,
}

impl Ranges {
    pub(super) fn new(rows: usize) -> Self {
        let mut offsets = Vec::with_capacity(rows.saturating_add(1));
        offsets.push(0);
        Self { offsets, valid: Vec::with_capacity(rows) }
    }

    /// Ends a row at element `elements`.
    pub(super) fn push(&mut self, elements: usize, is_valid: bool) {
        self.offsets.push(end(elements));
        self.valid.push(is_valid);
    }

    pub(super) fn set_null(&mut self, row: usize) {
        set_null(&mut self.valid, row);
    }

    pub(super) fn push_null(&mut self) {
        self.push(self.elements(), false);
    }

    /// Total number of elements.
    pub(super) fn elements(&self) -> usize {
        self.offsets.last().map_or(0, |end| *end as usize)
    }

    pub(super) fn len(&self) -> usize {
        self.valid.len()
    }

    pub(super) fn truncate(&mut self, rows: usize) {
        self.offsets.truncate(rows + 1);
        self.valid.truncate(rows);
    }

    pub(super) fn finish(self) -> (OffsetBuffer<i32>, Option<NullBuffer>) {
        (offset_buffer(self.offsets), nulls(&self.valid))
    }
}
