//! A stream of changes as an Arrow C stream.

use std::sync::Arc;

use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_schema::{ArrowError, SchemaRef};
use pyo3::prelude::*;

use super::next_batch;
use crate::runtime::ProcessBound;
use crate::shared::Shared;

/// The reader behind the C stream interface.
///
/// It may be called on any thread, attached to Python or not.
#[derive(Debug)]
pub(crate) struct StreamReader {
    shared: ProcessBound<Arc<Shared>>,
    schema: SchemaRef,
}

impl StreamReader {
    pub(crate) fn new(py: Python<'_>, shared: Arc<Shared>) -> PyResult<Self> {
        let schema = shared.table().arrow();
        Ok(Self { shared: ProcessBound::new(py, "stream", shared)?, schema })
    }
}

impl Iterator for StreamReader {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        let next = Python::try_attach(|py| {
            self.shared.get().and_then(|shared| next_batch(py, shared, None)).map_err(|error| {
                // The consuming library makes its own error of this text; the C interface has no
                // exceptions.
                ArrowError::ExternalError(error.to_string().into())
            })
        });
        match next {
            None => Some(Err(ArrowError::ExternalError("Python is shutting down".into()))),
            Some(next) => next.map(|batch| batch.map(|batch| batch.batch)).transpose(),
        }
    }
}

impl RecordBatchReader for StreamReader {
    fn schema(&self) -> SchemaRef {
        Arc::clone(&self.schema)
    }
}

impl Drop for StreamReader {
    /// Closes the stream: a library that stops early will not read the rest.
    fn drop(&mut self) {
        if let Some(shared) = self.shared.own() {
            shared.close();
        }
    }
}
