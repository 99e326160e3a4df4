//! The column of extended attributes.

use std::ops::Range;
use std::sync::Arc;

use arrow_array::{ArrayRef, MapArray, StringArray, StructArray};
use arrow_buffer::{OffsetBuffer, ScalarBuffer};
use arrow_schema::{ArrowError, DataType};
use dcp_wire::{DecodeError, xattr};

use crate::schema::xattrs_entries;
use crate::values::{BytesColumn, Full, nulls};
use crate::{BatchLimits, BufferPool};

/// Builder of a map column from names to JSON texts.
#[derive(Debug)]
pub(crate) struct XattrsColumn {
    offsets: Vec<i32>,
    present: Vec<bool>,
    names: BytesColumn,
    values: BytesColumn,
    entries: i32,
}

impl XattrsColumn {
    pub(crate) fn new(rows: usize, limits: BatchLimits) -> Self {
        let mut offsets = Vec::with_capacity(rows.saturating_add(1));
        offsets.push(0);
        Self {
            offsets,
            present: Vec::with_capacity(rows),
            names: BytesColumn::new(0, Vec::new(), limits),
            values: BytesColumn::new(0, Vec::new(), limits),
            entries: 0,
        }
    }

    /// Returns unused room.
    pub(crate) fn shrink(&mut self) {
        self.offsets.shrink_to_fit();
        self.present.shrink_to_fit();
    }

    /// A column for attributes that were already checked to fit.
    pub(crate) fn with_room_checked(rows: usize) -> Self {
        Self {
            names: BytesColumn::with_room_checked(0, Vec::new()),
            values: BytesColumn::with_room_checked(0, Vec::new()),
            ..Self::new(rows, BatchLimits::default())
        }
    }

    /// Reserves room for a section of `len` bytes appended later; the caller has checked that it
    /// exists.
    pub(crate) const fn reserve(&mut self, len: usize) {
        self.names.reserve(len);
        self.values.reserve(len);
    }

    /// Appends rows of another column.
    pub(crate) fn extend_from(&mut self, other: &Self, rows: Range<usize>) {
        for row in rows {
            if !other.present.get(row).is_some_and(|present| *present) {
                self.push(None);
                continue;
            }
            let (Some(&start), Some(&end)) = (other.offsets.get(row), other.offsets.get(row + 1))
            else {
                return;
            };
            let entries = start as usize..end as usize;
            self.entries += end - start;
            self.names.extend_from(&other.names, entries.clone());
            self.values.extend_from(&other.values, entries);
            self.offsets.push(self.entries);
            self.present.push(true);
        }
    }

    pub(crate) fn len_bytes(&self) -> usize {
        self.names.len_bytes() + self.values.len_bytes() + 8 * self.entries as usize
    }

    /// Whether a section of `len` bytes can be appended.
    pub(crate) fn check_room(&self, len: usize) -> Result<(), Full> {
        self.names.check_room(len)?;
        self.values.check_room(len)
    }

    /// Appends a row with these attributes, which were [checked](check), or with none.
    #[inline]
    pub(crate) fn push(&mut self, xattrs: Option<xattr::Xattrs<'_>>) {
        self.present.push(xattrs.is_some());
        if let Some(xattrs) = xattrs {
            for xattr in xattrs.flatten() {
                self.names.push(xattr.name);
                self.values.push(xattr.value);
                // A section has at least seven bytes per attribute, which bounds this as well.
                self.entries += 1;
            }
        }
        self.offsets.push(self.entries);
    }

    /// The map array, with the schema's fields.
    pub(crate) fn finish(self, pool: &BufferPool) -> Result<ArrayRef, ArrowError> {
        let (offsets, bytes) = self.names.finish(pool);
        let names = StringArray::try_new(offsets, bytes, None)?;
        let (offsets, bytes) = self.values.finish(pool);
        let values = StringArray::try_new(offsets, bytes, None)?;
        let entries = xattrs_entries();
        let DataType::Struct(fields) = entries.data_type().clone() else {
            return Err(ArrowError::SchemaError("map entries are not a struct".to_owned()));
        };
        let columns: Vec<ArrayRef> = vec![Arc::new(names), Arc::new(values)];
        let map = MapArray::try_new(
            Arc::new(entries),
            OffsetBuffer::new(ScalarBuffer::from(self.offsets)),
            StructArray::try_new(fields, columns, None)?,
            nulls(&self.present),
            false,
        )?;
        Ok(Arc::new(map))
    }
}

/// Checks that attributes are well-formed and UTF-8.
pub(crate) fn check(xattrs: xattr::Xattrs<'_>) -> Result<(), DecodeError> {
    for xattr in xattrs {
        let xattr = xattr?;
        if std::str::from_utf8(xattr.name).is_err() || std::str::from_utf8(xattr.value).is_err() {
            return Err(DecodeError::InvalidField("xattr: not UTF-8"));
        }
    }
    Ok(())
}
