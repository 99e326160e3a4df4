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
use pyo3::types::{IntoPyDict, PyDict, PyTuple};

use crate::classes::{Class, make};
use crate::error::Failure;

static POSITION: Class = Class::new("dcp_rs.checkpoint", "Position");
static STORED_FILTER: Class = Class::new("dcp_rs.checkpoint", "StoredFilter");

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

    /// As `dcp_rs.StoredFilter`.
    #[getter]
    fn filter<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(filter) = self.0.filter() else { return Ok(None) };
        let (scope, collections) = match filter.documents() {
            StreamFilter::All => (None, None),
            StreamFilter::Scope(id) => (Some(id.0), None),
            StreamFilter::Collections(ids) => (None, Some(ids.iter().map(|id| id.0))),
        };
        let (patterns, rows) = (filter.patterns(), filter.rows());
        let patterns = (!patterns.is_all()).then(|| patterns.names());
        let ops = rows.ops().map(|ops| ops.iter().map(|op| op.name()));
        let filter = make!(STORED_FILTER, py, {
            scope_id: scope,
            collection_ids: collections.map(|ids| PyTuple::new(py, ids)).transpose()?,
            system_documents: filter.system_documents(),
            patterns: patterns.map(|names| PyTuple::new(py, names)).transpose()?,
            keys: rows.keys().map(|keys| PyTuple::new(py, keys)).transpose()?,
            ops: ops.map(|ops| PyTuple::new(py, ops)).transpose()?,
            since: rows.since().map(|since| Duration::from_nanos(since).as_secs_f64()),
        })?;
        Ok(Some(filter))
    }

    /// `dcp_rs.Position` by vBucket.
    fn positions<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let positions = PyDict::new(py);
        for (vbid, position) in self.0.positions() {
            let position = make!(POSITION, py, {
                seqno: position.seqno.0,
                snapshot_start: position.snapshot.start.0,
                snapshot_end: position.snapshot.end.0,
                vbuuid: position.vbuuid().0,
                epoch: position.epoch,
                manifest_uid: position.manifest_uid.0,
                purge_seqno: position.purge_seqno.0,
            })?;
            positions.set_item(vbid.0, position)?;
        }
        Ok(positions)
    }

    /// The last seqno by vBucket.
    fn seqnos<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.0.positions().map(|(vbid, position)| (vbid.0, position.seqno.0)).into_py_dict(py)
    }

    fn rewound_to(&self, vbucket: u16, seqno: u64) -> Self {
        Self(self.0.rewound_to(Vbid(vbucket), Seqno(seqno)))
    }

    fn begun_again(&self, vbuckets: Vec<u16>) -> Self {
        let mut again = self.0.clone();
        for vbid in vbuckets.into_iter().map(Vbid) {
            again = again.begun_again(vbid);
        }
        Self(again)
    }

    fn restricted_to(&self, vbuckets: Vec<u16>) -> Self {
        Self(self.0.restricted_to(vbuckets.into_iter().map(Vbid)))
    }

    fn merged_with(&self, other: &Self) -> PyResult<Self> {
        let mut merged = self.0.clone();
        merged.merge(&other.0).map_err(Failure::from)?;
        Ok(Self(merged))
    }

    fn has_in_history(&self, vbucket: u16, other: &Self) -> bool {
        self.0.has_in_history(Vbid(vbucket), &other.0)
    }

    fn with_positions_of(&self, other: &Self, vbuckets: Vec<u16>) -> PyResult<Self> {
        let vbids = vbuckets.into_iter().map(Vbid);
        Ok(Self(self.0.with_positions_of(&other.0, vbids).map_err(Failure::from)?))
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
