//! Documents that are both compressed and have extended attributes.
//!
//! Only the inflated value shows where the document begins, and inflating is not the reading task's
//! work. So the row stays empty at first and is filled when the batch is finished.

use std::ops::Range;

use dcp_proto::SinkError;
use dcp_wire::{DecodeError, snappy, xattr};

use crate::BufferPool;
use crate::rows::Places;
use crate::values::BytesColumn;
use crate::xattrs::{XattrsColumn, check};

use super::Columns;

/// Values of rows that are filled when the batch is finished.
#[derive(Debug, Default)]
pub(crate) struct DeferredValues {
    compressed: Vec<u8>,
    blocks: Vec<Block>,
    inflated_bytes: usize,
}

#[derive(Debug)]
struct Block {
    row: usize,
    /// Its range in the compressed bytes.
    source: Range<usize>,
    inflated_len: usize,
    /// Whether the document after the attributes is shown.
    has_document: bool,
}

impl DeferredValues {
    /// Stores the value of `row`, which inflates to `inflated_len` bytes.
    pub(crate) fn push(
        &mut self,
        row: usize,
        value: &[u8],
        inflated_len: usize,
        has_document: bool,
    ) {
        let start = self.compressed.len();
        self.compressed.extend_from_slice(value);
        self.inflated_bytes += inflated_len;
        let source = start..self.compressed.len();
        self.blocks.push(Block { row, source, inflated_len, has_document });
    }

    /// Memory used now and by inflated values later, in bytes.
    pub(crate) const fn len_bytes(&self) -> usize {
        self.compressed.len() + self.inflated_bytes
    }
}

impl Columns {
    /// Fills the postponed rows.
    pub(crate) fn fill_in_deferred(
        &mut self,
        places: &Places,
        pool: &BufferPool,
    ) -> Result<(), SinkError> {
        let deferred = std::mem::take(&mut self.deferred);
        if deferred.blocks.is_empty() {
            return Ok(());
        }
        if let Some(values) = &mut self.values {
            values.inflate().map_err(|bad| places.error(bad.row, bad.error.to_string()))?;
        }
        let (values, xattrs) = (self.values.take(), self.xattrs.take());
        let mut filled = Filled {
            values: values.as_ref().map(|values| {
                let bytes = pool.take(values.len_bytes() + deferred.inflated_bytes);
                BytesColumn::with_room_checked(self.rows(), bytes)
            }),
            xattrs: xattrs.as_ref().map(|_| XattrsColumn::with_room_checked(self.rows())),
        };
        let mut inflated = Vec::new();
        let mut next = 0;
        for block in &deferred.blocks {
            filled.copy(
                values.as_ref().map(|values| &values.plain),
                xattrs.as_ref(),
                next..block.row,
            );
            let source = deferred.compressed.get(block.source.clone()).unwrap_or_default();
            inflated.resize(block.inflated_len, 0);
            snappy::decompress_exact(source, &mut inflated)
                .and_then(|()| filled.push(&inflated, block.has_document))
                .map_err(|error| places.error(block.row, error.to_string()))?;
            next = block.row + 1;
        }
        filled.copy(
            values.as_ref().map(|values| &values.plain),
            xattrs.as_ref(),
            next..self.rows(),
        );
        if let (Some(values), Some(filled)) = (values, filled.values) {
            self.values = Some(values.replaced_by(filled));
        }
        self.xattrs = filled.xattrs;
        Ok(())
    }
}

/// The columns with every row filled.
struct Filled {
    values: Option<BytesColumn>,
    xattrs: Option<XattrsColumn>,
}

impl Filled {
    fn copy(
        &mut self,
        values: Option<&BytesColumn>,
        xattrs: Option<&XattrsColumn>,
        rows: Range<usize>,
    ) {
        if let (Some(to), Some(from)) = (&mut self.values, values) {
            to.extend_from(from, rows.clone());
        }
        if let (Some(to), Some(from)) = (&mut self.xattrs, xattrs) {
            to.extend_from(from, rows);
        }
    }

    fn push(&mut self, value: &[u8], has_document: bool) -> Result<(), DecodeError> {
        let (section, document) = xattr::split(value)?;
        if let Some(xattrs) = &mut self.xattrs {
            check(section)?;
            xattrs.push(Some(section));
        }
        if let Some(values) = &mut self.values {
            values.push(if has_document { document } else { &[] });
        }
        Ok(())
    }
}
