//! Decodes packets for display.

use dcp_wire::describe::{Field, FieldValue, Keys, describe};
use dcp_wire::{Frame, MAX_BODY_LEN};
use pyo3::IntoPyObjectExt;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::classes::{Class, make};
use crate::error::Failure;

static PACKET: Class = Class::new("dcp_rs.debug", "Packet");
static DECODED: Class = Class::new("dcp_rs.debug", "Decoded");

/// Describes the whole packets at the front of `data`, as `dcp_rs.debug.Decoded`.
#[pyfunction]
pub(crate) fn decode<'py>(
    py: Python<'py>,
    data: &[u8],
    collections: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let mut packets = Vec::new();
    let mut keys = if collections { Keys::WithCollection } else { Keys::Plain };
    let mut used = 0;
    while let Some((frame, len)) =
        Frame::parse(data.get(used..).unwrap_or_default(), MAX_BODY_LEN).map_err(Failure::from)?
    {
        let description = describe(&frame, keys);
        let (fields, line) = (record(py, &description.fields)?, description.to_string());
        packets.push(make!(PACKET, py, { fields: fields, _line: line })?);
        keys = keys.after(&frame);
        used += len;
    }
    let collections = keys == Keys::WithCollection;
    make!(DECODED, py, { packets: packets, used: used, collections: collections })
}

/// Total length in bytes of the packet at the front of `data`, or the length needed to tell.
#[pyfunction]
pub(crate) fn wanted(data: &[u8]) -> PyResult<usize> {
    Ok(Frame::wanted(data, MAX_BODY_LEN).map_err(Failure::from)?)
}

/// Number of levels in JSON text; `None` if it is not JSON.
#[pyfunction]
pub(crate) fn json_depth(py: Python<'_>, text: &[u8]) -> Option<usize> {
    py.detach(|| dcp_arrow::json_depth(text))
}

fn record<'py>(py: Python<'py>, fields: &[Field<'_>]) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    for Field { name, value } in fields {
        dict.set_item(name, object(py, value)?)?;
    }
    Ok(dict)
}

fn object<'py>(py: Python<'py>, value: &FieldValue<'_>) -> PyResult<Bound<'py, PyAny>> {
    match value {
        FieldValue::Bool(value) => value.into_bound_py_any(py),
        FieldValue::U64(number) | FieldValue::Hex(number) => number.into_bound_py_any(py),
        FieldValue::I64(number) => number.into_bound_py_any(py),
        FieldValue::Text(text) => text.into_bound_py_any(py),
        FieldValue::Bytes(bytes) => Ok(PyBytes::new(py, bytes).into_any()),
        FieldValue::List(values) => {
            let values = values.iter().map(|value| object(py, value));
            values.collect::<PyResult<Vec<_>>>()?.into_bound_py_any(py)
        }
        FieldValue::Record(fields) => Ok(record(py, fields)?.into_any()),
    }
}
