//! Builders of typed columns, which can be truncated to an earlier row.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::types::{
    Date32Type, Decimal128Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type,
    Int64Type, TimestampMicrosecondType,
};
use arrow_array::{ArrayRef, ListArray, MapArray, StructArray};
use arrow_schema::{ArrowError, DataType};

use super::primitives::{Primitive, Ranges, Texts, Variants, set_null};
use super::{Field, Kind};
use crate::values::nulls;

/// The fields of an object, by name.
#[derive(Debug)]
pub(super) struct Objects {
    names: Vec<Box<str>>,
    by_name: HashMap<Box<str>, usize>,
    pub(super) columns: Vec<Builder>,
    /// Whether there was a null for each of them, or a value that does not fit.
    pub(super) had_none: Vec<bool>,
}

impl Objects {
    /// Up to this number of names, a linear search is faster than a map.
    const FEW_NAMES: usize = 8;

    pub(super) fn new(fields: &[Field], rows: usize) -> Self {
        let names: Vec<Box<str>> = fields.iter().map(|field| field.name.as_str().into()).collect();
        let by_name = names.iter().cloned().enumerate().map(|(index, name)| (name, index));
        Self {
            by_name: by_name.collect(),
            columns: fields.iter().map(|field| Builder::new(&field.kind, rows)).collect(),
            had_none: vec![false; names.len()],
            names,
        }
    }

    /// The field called `name`; `guess` is its index if objects have the order of the schema.
    #[inline]
    pub(super) fn find(&self, name: &str, guess: usize) -> Option<usize> {
        if self.names.get(guess).is_some_and(|known| **known == *name) {
            return Some(guess);
        }
        if self.names.len() <= Self::FEW_NAMES {
            return self.names.iter().position(|known| **known == *name);
        }
        self.by_name.get(name).copied()
    }

    /// Truncates to `rows` rows; columns may have more, or one fewer if a row was begun.
    pub(super) fn truncate(&mut self, rows: usize) {
        for column in &mut self.columns {
            column.truncate(rows);
        }
    }

    pub(super) fn push_null(&mut self) {
        for column in &mut self.columns {
            column.push_null();
        }
    }

    /// Ends the row after `rows`; missing values are null.
    pub(super) fn end_row(&mut self, rows: usize) {
        for column in &mut self.columns {
            if column.len() == rows {
                column.push_null();
            }
        }
    }

    fn width(&self) -> usize {
        self.columns.iter().map(Builder::width).sum()
    }
}

/// Builder of a column.
#[derive(Debug)]
pub(super) enum Builder {
    Boolean(Primitive<bool>),
    Byte(Primitive<i8>),
    Short(Primitive<i16>),
    Int(Primitive<i32>),
    Long(Primitive<i64>),
    Float(Primitive<f32>),
    Double(Primitive<f64>),
    Decimal {
        numbers: Primitive<i128>,
        precision: u8,
        scale: u8,
    },
    String(Texts),
    Binary(Texts),
    Date(Primitive<i32>),
    Timestamp(Primitive<i64>),
    TimestampNtz(Primitive<i64>),
    Variant(Variants),
    /// `width` is the minimum size of another element in bytes.
    Array {
        ranges: Ranges,
        elements: Box<Self>,
        width: usize,
    },
    Map {
        ranges: Ranges,
        keys: Texts,
        values: Box<Self>,
        width: usize,
    },
    Struct {
        valid: Vec<bool>,
        fields: Objects,
    },
}

impl Builder {
    pub(super) fn new(kind: &Kind, rows: usize) -> Self {
        match kind {
            Kind::Boolean => Self::Boolean(Primitive::new(rows)),
            Kind::Byte => Self::Byte(Primitive::new(rows)),
            Kind::Short => Self::Short(Primitive::new(rows)),
            Kind::Int => Self::Int(Primitive::new(rows)),
            Kind::Long => Self::Long(Primitive::new(rows)),
            Kind::Float => Self::Float(Primitive::new(rows)),
            Kind::Double => Self::Double(Primitive::new(rows)),
            Kind::Decimal { precision, scale } => Self::Decimal {
                numbers: Primitive::new(rows),
                precision: *precision,
                scale: *scale,
            },
            Kind::String => Self::String(Texts::new(rows)),
            Kind::Binary => Self::Binary(Texts::new(rows)),
            Kind::Date => Self::Date(Primitive::new(rows)),
            Kind::Timestamp => Self::Timestamp(Primitive::new(rows)),
            Kind::TimestampNtz => Self::TimestampNtz(Primitive::new(rows)),
            Kind::Variant => Self::Variant(Variants::new(rows)),
            Kind::Array(element) => {
                let elements = Box::new(Self::new(element, 0));
                let width = elements.width();
                Self::Array { ranges: Ranges::new(rows), elements, width }
            }
            Kind::Map(value) => {
                let (keys, values) = (Texts::new(0), Box::new(Self::new(value, 0)));
                let width = 5 + values.width();
                Self::Map { ranges: Ranges::new(rows), keys, values, width }
            }
            Kind::Struct(fields) => {
                Self::Struct { valid: Vec::with_capacity(rows), fields: Objects::new(fields, rows) }
            }
        }
    }

    /// Minimum size of another row in bytes.
    pub(super) fn width(&self) -> usize {
        match self {
            Self::Boolean(_) | Self::Byte(_) => 2,
            Self::Short(_) => 3,
            Self::Int(_)
            | Self::Float(_)
            | Self::Date(_)
            | Self::String(_)
            | Self::Binary(_)
            | Self::Array { .. }
            | Self::Map { .. } => 5,
            Self::Long(_) | Self::Double(_) | Self::Timestamp(_) | Self::TimestampNtz(_) => 9,
            Self::Variant(_) => 11,
            Self::Decimal { .. } => 17,
            Self::Struct { fields, .. } => 1 + fields.width(),
        }
    }

    /// Number of rows.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Boolean(values) => values.len(),
            Self::Byte(values) => values.len(),
            Self::Short(values) => values.len(),
            Self::Int(values) | Self::Date(values) => values.len(),
            Self::Long(values) | Self::Timestamp(values) | Self::TimestampNtz(values) => {
                values.len()
            }
            Self::Float(values) => values.len(),
            Self::Double(values) => values.len(),
            Self::Decimal { numbers, .. } => numbers.len(),
            Self::String(texts) | Self::Binary(texts) => texts.len(),
            Self::Variant(variants) => variants.len(),
            Self::Array { ranges, .. } | Self::Map { ranges, .. } => ranges.len(),
            Self::Struct { valid, .. } => valid.len(),
        }
    }

    pub(super) fn push_null(&mut self) {
        match self {
            Self::Boolean(values) => values.push_null(),
            Self::Byte(values) => values.push_null(),
            Self::Short(values) => values.push_null(),
            Self::Int(values) | Self::Date(values) => values.push_null(),
            Self::Long(values) | Self::Timestamp(values) | Self::TimestampNtz(values) => {
                values.push_null();
            }
            Self::Float(values) => values.push_null(),
            Self::Double(values) => values.push_null(),
            Self::Decimal { numbers, .. } => numbers.push_null(),
            Self::String(texts) | Self::Binary(texts) => texts.push_null(),
            Self::Variant(variants) => variants.push_null(),
            Self::Array { ranges, .. } | Self::Map { ranges, .. } => ranges.push_null(),
            Self::Struct { valid, fields } => {
                fields.push_null();
                valid.push(false);
            }
        }
    }

    /// Makes a complete row null.
    pub(super) fn set_null(&mut self, row: usize) {
        match self {
            Self::Boolean(values) => values.set_null(row),
            Self::Byte(values) => values.set_null(row),
            Self::Short(values) => values.set_null(row),
            Self::Int(values) | Self::Date(values) => values.set_null(row),
            Self::Long(values) | Self::Timestamp(values) | Self::TimestampNtz(values) => {
                values.set_null(row);
            }
            Self::Float(values) => values.set_null(row),
            Self::Double(values) => values.set_null(row),
            Self::Decimal { numbers, .. } => numbers.set_null(row),
            Self::String(texts) | Self::Binary(texts) => texts.set_null(row),
            Self::Variant(variants) => variants.set_null(row),
            Self::Array { ranges, .. } | Self::Map { ranges, .. } => ranges.set_null(row),
            Self::Struct { valid, fields } => {
                if set_null(valid, row) {
                    fields.columns.iter_mut().for_each(|column| column.set_null(row));
                }
            }
        }
    }

    /// Truncates to `rows` rows, including partially written ones.
    pub(super) fn truncate(&mut self, rows: usize) {
        match self {
            Self::Boolean(values) => values.truncate(rows),
            Self::Byte(values) => values.truncate(rows),
            Self::Short(values) => values.truncate(rows),
            Self::Int(values) | Self::Date(values) => values.truncate(rows),
            Self::Long(values) | Self::Timestamp(values) | Self::TimestampNtz(values) => {
                values.truncate(rows);
            }
            Self::Float(values) => values.truncate(rows),
            Self::Double(values) => values.truncate(rows),
            Self::Decimal { numbers, .. } => numbers.truncate(rows),
            Self::String(texts) | Self::Binary(texts) => texts.truncate(rows),
            Self::Variant(variants) => variants.truncate(rows),
            Self::Array { ranges, elements, .. } => {
                ranges.truncate(rows);
                elements.truncate(ranges.elements());
            }
            Self::Map { ranges, keys, values, .. } => {
                ranges.truncate(rows);
                keys.truncate(ranges.elements());
                values.truncate(ranges.elements());
            }
            Self::Struct { valid, fields } => {
                valid.truncate(rows);
                fields.truncate(rows);
            }
        }
    }

    /// The array, with the Arrow type of the column.
    pub(super) fn finish(self, data_type: &DataType) -> Result<ArrayRef, ArrowError> {
        Ok(match self {
            Self::Boolean(values) => Arc::new(values.booleans()),
            Self::Byte(values) => Arc::new(values.finish::<Int8Type>()),
            Self::Short(values) => Arc::new(values.finish::<Int16Type>()),
            Self::Int(values) => Arc::new(values.finish::<Int32Type>()),
            Self::Long(values) => Arc::new(values.finish::<Int64Type>()),
            Self::Float(values) => Arc::new(values.finish::<Float32Type>()),
            Self::Double(values) => Arc::new(values.finish::<Float64Type>()),
            Self::Decimal { numbers, .. } => {
                Arc::new(numbers.finish::<Decimal128Type>().with_data_type(data_type.clone()))
            }
            Self::String(texts) => Arc::new(texts.strings()?),
            Self::Binary(texts) => Arc::new(texts.binaries()?),
            Self::Variant(variants) => Arc::new(variants.finish()?),
            Self::Date(values) => Arc::new(values.finish::<Date32Type>()),
            Self::Timestamp(values) | Self::TimestampNtz(values) => {
                let array = values.finish::<TimestampMicrosecondType>();
                Arc::new(array.with_data_type(data_type.clone()))
            }
            Self::Array { ranges, elements, .. } => {
                let DataType::List(field) = data_type else { return Err(wrong(data_type)) };
                let elements = elements.finish(field.data_type())?;
                let (offsets, nulls) = ranges.finish();
                Arc::new(ListArray::try_new(Arc::clone(field), offsets, elements, nulls)?)
            }
            Self::Map { ranges, keys, values, .. } => {
                let DataType::Map(entries, _) = data_type else { return Err(wrong(data_type)) };
                let DataType::Struct(fields) = entries.data_type() else {
                    return Err(wrong(data_type));
                };
                let Some(value) = fields.get(1) else { return Err(wrong(data_type)) };
                let columns: Vec<ArrayRef> =
                    vec![Arc::new(keys.strings()?), values.finish(value.data_type())?];
                let pairs = StructArray::try_new(fields.clone(), columns, None)?;
                let (offsets, nulls) = ranges.finish();
                Arc::new(MapArray::try_new(Arc::clone(entries), offsets, pairs, nulls, false)?)
            }
            Self::Struct { valid, fields } => {
                let DataType::Struct(types) = data_type else { return Err(wrong(data_type)) };
                let columns = fields
                    .columns
                    .into_iter()
                    .zip(types)
                    .map(|(column, field)| column.finish(field.data_type()))
                    .collect::<Result<Vec<_>, _>>()?;
                Arc::new(StructArray::try_new(types.clone(), columns, nulls(&valid))?)
            }
        })
    }
}

#[cold]
fn wrong(data_type: &DataType) -> ArrowError {
    ArrowError::SchemaError(format!("a column is not of type {data_type}"))
}
