//! Checkpoints.

use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use dcp_consumer::{CheckpointLock as EngineLock, check_ahead, load_checkpoint, save_checkpoint};
use dcp_proto::checkpoint::Checkpoint as EngineCheckpoint;
use dcp_proto::consumer::StreamFilter;
use dcp_wire::{Seqno, Vbid};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

use crate::error::Failure;

/// Scope, collections, whether system documents are delivered, patterns of collections, keys,
/// operations, seconds since 1970.
type FilterTuple = (
    Option<u32>,
    Option<Vec<u32>>,
    bool,
    Option<Vec<String>>,
    Option<Vec<String>>,
    Option<Vec<&'static str>>,
    Option<f64>,
);

/// The position in every vBucket.
#[pyclass(frozen, module = "dcp_rs._dcp_rs", from_py_object)]
#[derive(Clone, Debug)]
pub(crate) struct Checkpoint(pub(crate) EngineCheckpoint);

#[pymethods]
impl Checkpoint {
    #[staticmethod]
    fn from_json(text: &[u8]) -> PyResult<Self> {
        Ok(Self(EngineCheckpoint::from_json(text).map_err(Failure::from)?))
    }

    fn to_json(&self, py: Python<'_>) -> String {
        py.detach(|| self.0.to_json())
    }

    #[staticmethod]
    fn load(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        Ok(Self(py.detach(|| load_checkpoint(&path)).map_err(Failure::from)?))
    }

    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        Ok(py.detach(|| save_checkpoint(&self.0, &path)).map_err(Failure::from)?)
    }

    fn check_ahead(&self, kept: &Self) -> PyResult<()> {
        Ok(check_ahead(&self.0, &kept.0).map_err(Failure::from)?)
    }

    #[getter]
    fn bucket_uuid(&self) -> &str {
        self.0.bucket_uuid()
    }

    #[getter]
    fn filter(&self) -> Option<FilterTuple> {
        let filter = self.0.filter()?;
        let (scope, collections) = match filter.documents() {
            StreamFilter::All => (None, None),
            StreamFilter::Scope(id) => (Some(id.0), None),
            StreamFilter::Collections(ids) => (None, Some(ids.iter().map(|id| id.0).collect())),
        };
        let (patterns, rows) = (filter.patterns(), filter.rows());
        Some((
            scope,
            collections,
            filter.system_documents(),
            (!patterns.is_all()).then(|| patterns.names()),
            rows.keys().map(<[String]>::to_vec),
            rows.ops().map(|ops| ops.iter().map(|op| op.name()).collect()),
            rows.since().map(|since| Duration::from_nanos(since).as_secs_f64()),
        ))
    }

    /// Positions by vBucket, each as a dict.
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let positions = PyDict::new(py);
        for (vbid, position) in self.0.positions() {
            let fields = PyDict::new(py);
            fields.set_item("seqno", position.seqno.0)?;
            fields.set_item("snapshot_start", position.snapshot.start.0)?;
            fields.set_item("snapshot_end", position.snapshot.end.0)?;
            fields.set_item("vbuuid", position.vbuuid().0)?;
            fields.set_item("epoch", position.epoch)?;
            fields.set_item("manifest_uid", position.manifest_uid.0)?;
            fields.set_item("purge_seqno", position.purge_seqno.0)?;
            positions.set_item(vbid.0, fields)?;
        }
        Ok(positions)
    }

    fn rewound_to(&self, vbucket: u16, seqno: u64) -> Self {
        Self(self.0.rewound_to(Vbid(vbucket), Seqno(seqno)))
    }

    fn restricted_to(&self, vbuckets: Vec<u16>) -> Self {
        Self(self.0.restricted_to(vbuckets.into_iter().map(Vbid)))
    }

    fn merged_with(&self, other: &Self) -> PyResult<Self> {
        let mut merged = self.0.clone();
        merged.merge(&other.0).map_err(Failure::from)?;
        Ok(Self(merged))
    }

    fn __eq__(&self, other: &Self) -> bool {
        self.0 == other.0
    }

    fn __len__(&self) -> usize {
        self.0.positions().count()
    }
}

/// A lock on a checkpoint file until the end of its `with` block, or until it is garbage collected
/// if Ctrl-C arrived before the block began.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
pub(crate) struct CheckpointLock(Mutex<Option<EngineLock>>);

impl CheckpointLock {
    fn held<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&EngineLock) -> Result<T, dcp_consumer::Error> + Send,
    ) -> PyResult<T>
    where
        T: Send,
    {
        py.detach(|| {
            let held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            held.as_ref().map(work).transpose()
        })
        .map_err(Failure::from)?
        .ok_or_else(|| PyRuntimeError::new_err("the lock was released"))
    }
}

#[pymethods]
impl CheckpointLock {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let lock = py.detach(|| EngineLock::acquire(&path)).map_err(Failure::from)?;
        Ok(Self(Mutex::new(Some(lock))))
    }

    fn read(&self, py: Python<'_>) -> PyResult<Vec<u8>> {
        self.held(py, EngineLock::read)
    }

    fn write(&self, py: Python<'_>, document: &[u8]) -> PyResult<()> {
        self.held(py, |lock| lock.write(document))
    }

    fn __enter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    #[pyo3(signature = (*_raised))]
    fn __exit__(&self, _raised: &Bound<'_, PyTuple>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}
