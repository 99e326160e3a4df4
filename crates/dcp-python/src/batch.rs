//! One batch of changes.

use arrow_array::ffi::FFI_ArrowArray;
use arrow_array::{Array, RecordBatch, StructArray};
use dcp_arrow::sliced_bytes;
use dcp_consumer::AckToken;
use dcp_proto::checkpoint::Checkpoint as EngineCheckpoint;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict, PyList, PyString, PyTuple};

use crate::cells::{cells, in_order};
use crate::checkpoint::Checkpoint;
use crate::error::{Failure, Kind};
use crate::schema::schema_capsule;
use crate::times::Times;

/// A batch of changes, with the checkpoint that is valid once it has been processed.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct ChangeBatch {
    pub(crate) batch: RecordBatch,
    pub(crate) checkpoint: EngineCheckpoint,
    pub(crate) token: AckToken,
}

#[pymethods]
impl ChangeBatch {
    #[getter]
    fn num_rows(&self) -> usize {
        self.batch.num_rows()
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.batch.columns().iter().map(sliced_bytes).sum()
    }

    #[getter]
    fn column_names(&self) -> Vec<String> {
        self.batch.schema_ref().fields().iter().map(|field| field.name().clone()).collect()
    }

    #[getter]
    fn checkpoint(&self) -> Checkpoint {
        Checkpoint(self.checkpoint.clone())
    }

    /// A slice of the rows without a copy, clamped to the existing rows.
    fn slice(&self, start: usize, rows: usize) -> Self {
        let start = start.min(self.batch.num_rows());
        let rows = rows.min(self.batch.num_rows() - start);
        Self {
            batch: self.batch.slice(start, rows),
            checkpoint: self.checkpoint.clone(),
            token: self.token,
        }
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_capsule(py, &self.batch.schema())
    }

    /// The requested schema is a hint that the protocol lets a producer ignore; the caller sees the
    /// actual schema.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let _wish = requested_schema;
        capsules(py, &self.batch)
    }

    /// The rows as a list of dicts.
    fn to_dicts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        let names: Vec<_> = self
            .batch
            .schema_ref()
            .fields()
            .iter()
            .map(|field| PyString::intern(py, field.name()))
            .collect();
        let mut columns = self.cells(py)?;
        let rows = PyList::empty(py);
        for _ in 0..self.batch.num_rows() {
            let dict = PyDict::new(py);
            for (name, cells) in names.iter().zip(&mut columns) {
                dict.set_item(name, cells.next())?;
            }
            rows.append(dict)?;
        }
        Ok(rows)
    }

    /// The rows as an iterator of tuples in column order. Cells are converted at once, column by
    /// column; tuples are created on demand, so that few exist at a time.
    fn to_tuples<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let times = Times::new(py)?;
        let columns = self.batch.columns().iter().map(|column| in_order(py, column, &times));
        let columns: Vec<_> = columns.collect::<PyResult<_>>()?;
        py.import("builtins")?.getattr("zip")?.call1(PyTuple::new(py, columns)?)
    }
}

impl ChangeBatch {
    /// An iterator per column over its cells; whole columns are converted at a time.
    fn cells<'py>(&self, py: Python<'py>) -> PyResult<Vec<std::vec::IntoIter<Bound<'py, PyAny>>>> {
        let times = Times::new(py)?;
        let columns = self.batch.columns().iter();
        columns.map(|column| Ok(cells(py, column, &times)?.into_iter())).collect()
    }
}

/// The rows of batches by the ID of their collection, `None` for those that have none, with their
/// bytes and the oldest time of a CAS.
#[pyfunction]
pub(crate) fn by_collection<'py>(
    py: Python<'py>,
    batches: Vec<PyRef<'py, ChangeBatch>>,
) -> PyResult<Bound<'py, PyDict>> {
    let batches: Vec<RecordBatch> = batches.iter().map(|each| each.batch.clone()).collect();
    let parts = py.detach(|| dcp_arrow::by_collection(&batches.iter().collect::<Vec<_>>()));
    let parts = parts.map_err(|error| Failure::new(Kind::Dcp, error.to_string()))?;
    let found = PyDict::new(py);
    for part in parts {
        let (nbytes, oldest) = (part.nbytes(), part.oldest());
        let rows: Vec<ArrowBatch> = part.batches.into_iter().map(ArrowBatch).collect();
        found.set_item(part.collection_id, (rows, nbytes, oldest))?;
    }
    Ok(found)
}

/// Rows as Arrow columns, without a checkpoint.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct ArrowBatch(pub(crate) RecordBatch);

#[pymethods]
impl ArrowBatch {
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let _wish = requested_schema;
        capsules(py, &self.0)
    }
}

/// A batch's schema and rows as Arrow PyCapsules.
pub(crate) fn capsules<'py>(py: Python<'py>, batch: &RecordBatch) -> PyResult<Bound<'py, PyTuple>> {
    let rows = StructArray::from(batch.clone());
    let array = FFI_ArrowArray::new(&rows.to_data());
    let schema = schema_capsule(py, &batch.schema())?;
    let array = PyCapsule::new_with_value(py, array, c"arrow_array")?;
    PyTuple::new(py, [schema, array])
}
