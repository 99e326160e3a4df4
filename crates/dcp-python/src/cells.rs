//! Conversion of columns to Python values.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Date32Type, Decimal128Type, Float32Type, Float64Type, Int8Type, Int16Type,
    Int32Type, Int64Type, TimestampMicrosecondType,
};
use arrow_array::{Array, ArrayRef, StructArray};
use arrow_schema::DataType;
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString};

use crate::error::{Failure, Kind};
use crate::times::Times;

type Cells<'py> = Vec<Bound<'py, PyAny>>;

/// The cells of a column as Python values.
pub(crate) fn cells<'py>(
    py: Python<'py>,
    column: &ArrayRef,
    times: &Times<'py>,
) -> PyResult<Cells<'py>> {
    match column.data_type() {
        DataType::Utf8 => texts(py, column),
        DataType::Binary => {
            let bytes = column.as_binary::<i32>().iter();
            bytes.map(|bytes| each(py, bytes.map(|bytes| PyBytes::new(py, bytes)))).collect()
        }
        DataType::Boolean => column.as_boolean().iter().map(|flag| each(py, flag)).collect(),
        DataType::Int8 => numbers::<Int8Type>(py, column),
        DataType::Int16 => numbers::<Int16Type>(py, column),
        DataType::Int32 => numbers::<Int32Type>(py, column),
        DataType::Int64 => numbers::<Int64Type>(py, column),
        DataType::Float32 => numbers::<Float32Type>(py, column),
        DataType::Float64 => numbers::<Float64Type>(py, column),
        DataType::Decimal128(..) => decimals(py, column),
        DataType::Date32 => {
            let days = column.as_primitive::<Date32Type>().iter();
            days.map(|day| day.map_or_else(|| none(py), |day| times.date(day))).collect()
        }
        DataType::Timestamp(_, zone) => {
            let moment = |micros| match zone {
                Some(_) => times.datetime(py, micros),
                None => times.local(micros),
            };
            let moments = column.as_primitive::<TimestampMicrosecondType>().iter();
            moments.map(|micros| micros.map_or_else(|| none(py), moment)).collect()
        }
        DataType::List(_) => {
            let lists = column.as_list::<i32>();
            let ranges = lists.value_offsets();
            let elements = cells(py, &within(lists.values(), ranges), times)?;
            by_row(py, column, ranges, |range| {
                PyList::new(py, elements.get(range).unwrap_or_default())?.into_bound_py_any(py)
            })
        }
        DataType::Map(..) => {
            let maps = column.as_map();
            let ranges = maps.value_offsets();
            let keys = cells(py, &within(maps.keys(), ranges), times)?;
            let values = cells(py, &within(maps.values(), ranges), times)?;
            by_row(py, column, ranges, |range| {
                let dict = PyDict::new(py);
                let keys = keys.get(range.clone()).unwrap_or_default();
                for (key, value) in keys.iter().zip(values.get(range).unwrap_or_default()) {
                    dict.set_item(key, value)?;
                }
                Ok(dict.into_any())
            })
        }
        DataType::Struct(_) => structs(py, column.as_struct(), times),
        other => {
            let message = format!("a column of type {other} has no Python value");
            Err(Failure::new(Kind::Dcp, message).into())
        }
    }
}

/// The cells of a column as a Python iterable of known length: a list, or one repeated value.
pub(crate) fn in_order<'py>(
    py: Python<'py>,
    column: &ArrayRef,
    times: &Times<'py>,
) -> PyResult<Bound<'py, PyAny>> {
    let is_complete = column.null_count() == 0;
    Ok(match column.data_type() {
        DataType::Utf8 if all_the_same(column) => {
            let text = column.as_string::<i32>().value(0);
            return py.import("itertools")?.getattr("repeat")?.call1((text, column.len()));
        }
        DataType::Int32 if is_complete => {
            PyList::new(py, column.as_primitive::<Int32Type>().values().iter().copied())?
        }
        DataType::Int64 if is_complete => {
            PyList::new(py, column.as_primitive::<Int64Type>().values().iter().copied())?
        }
        DataType::Binary if is_complete => {
            let column = column.as_binary::<i32>();
            PyList::new(py, (0..column.len()).map(|row| PyBytes::new(py, column.value(row))))?
        }
        _ => PyList::new(py, cells(py, column, times)?)?,
    }
    .into_any())
}

/// Whether a text column has the same value in every row.
fn all_the_same(column: &ArrayRef) -> bool {
    let column = column.as_string::<i32>();
    if column.null_count() > 0 || column.is_empty() {
        return false;
    }
    let first = column.value(0);
    (1..column.len()).all(|row| column.value(row) == first)
}

#[expect(clippy::unnecessary_wraps, reason = "stands where a conversion may fail")]
fn none(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    Ok(py.None().into_bound(py))
}

fn each<'py>(py: Python<'py>, cell: Option<impl IntoPyObject<'py>>) -> PyResult<Bound<'py, PyAny>> {
    match cell {
        Some(cell) => cell.into_bound_py_any(py),
        None => none(py),
    }
}

fn numbers<'py, T: ArrowPrimitiveType>(py: Python<'py>, column: &ArrayRef) -> PyResult<Cells<'py>>
where
    T::Native: IntoPyObject<'py>,
{
    column.as_primitive::<T>().iter().map(|number| each(py, number)).collect()
}

fn texts<'py>(py: Python<'py>, column: &ArrayRef) -> PyResult<Cells<'py>> {
    // Names of operations, scopes and collections are repeated: share one object per run.
    let mut last: Option<(&str, Bound<'py, PyAny>)> = None;
    let column = column.as_string::<i32>();
    let mut cells = Vec::with_capacity(column.len());
    for row in 0..column.len() {
        if column.is_null(row) {
            cells.push(none(py)?);
            continue;
        }
        let text = column.value(row);
        if let Some((previous, object)) = &last
            && *previous == text
        {
            cells.push(object.clone());
            continue;
        }
        let object = PyString::new(py, text).into_any();
        last = Some((text, object.clone()));
        cells.push(object);
    }
    Ok(cells)
}

fn decimals<'py>(py: Python<'py>, column: &ArrayRef) -> PyResult<Cells<'py>> {
    let decimal = py.import("decimal")?.getattr("Decimal")?;
    let column = column.as_primitive::<Decimal128Type>();
    (0..column.len())
        .map(|row| {
            if column.is_null(row) {
                none(py)
            } else {
                decimal.call1((column.value_as_string(row),))
            }
        })
        .collect()
}

fn structs<'py>(py: Python<'py>, column: &StructArray, times: &Times<'py>) -> PyResult<Cells<'py>> {
    let names = column.fields().iter().map(|field| PyString::intern(py, field.name()));
    let names: Vec<_> = names.collect();
    let fields = column.columns().iter().map(|field| cells(py, field, times));
    let fields: Vec<_> = fields.collect::<PyResult<_>>()?;
    (0..column.len())
        .map(|row| {
            if column.is_null(row) {
                return none(py);
            }
            let dict = PyDict::new(py);
            for (name, cells) in names.iter().zip(&fields) {
                dict.set_item(name, cells.get(row))?;
            }
            Ok(dict.into_any())
        })
        .collect()
}

/// The elements of a column's rows: a slice of a column keeps all of its parent's elements.
fn within(elements: &ArrayRef, offsets: &[i32]) -> ArrayRef {
    let index = |offset: Option<&i32>| offset.and_then(|at| usize::try_from(*at).ok());
    let start = index(offsets.first()).unwrap_or_default().min(elements.len());
    let end = index(offsets.last()).unwrap_or_default().clamp(start, elements.len());
    elements.slice(start, end - start)
}

/// The cells of a column of lists or maps, with offsets relative to its first row.
fn by_row<'py>(
    py: Python<'py>,
    column: &ArrayRef,
    offsets: &[i32],
    make: impl Fn(std::ops::Range<usize>) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Cells<'py>> {
    let first = offsets.first().copied().unwrap_or_default();
    let index = |offset: i32| usize::try_from(offset - first).unwrap_or_default();
    let ranges = offsets.windows(2).enumerate();
    ranges
        .map(|(row, range)| match range {
            [start, end] if column.is_valid(row) => make(index(*start)..index(*end)),
            _ => none(py),
        })
        .collect()
}
