//! Bounded reads: their planner, and the streams of their partitions.

use std::collections::BTreeMap;

use dcp_consumer::plan::{Planner as EnginePlanner, open};
use dcp_proto::checkpoint::Positions;
use dcp_proto::plan::{Offsets, Start};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::Arguments;
use crate::checkpoint::Checkpoint;
use crate::classes::{Class, make};
use crate::client::{Client, sinks};
use crate::error::Failure;
use crate::options::{self, Connection, limits};
use crate::plan::ReadPlan;
use crate::runtime::{ProcessBound, wait};
use crate::schema::table;
use crate::stream::ChangeStream;

/// The start of a batch.
#[derive(FromPyObject)]
pub(crate) enum PlanStart {
    Checkpoint(Checkpoint),
    Text(String),
}

impl PlanStart {
    fn start(self, planner: &EnginePlanner) -> Result<Start, Failure> {
        Ok(planner.start_at(match self {
            Self::Checkpoint(Checkpoint(checkpoint)) => checkpoint.into(),
            Self::Text(json) => Positions::from_json(&json)?,
        }))
    }
}

/// Observes a bucket and plans batches.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct Planner {
    planner: ProcessBound<tokio::sync::Mutex<EnginePlanner>>,
}

#[pymethods]
impl Planner {
    #[new]
    fn new(py: Python<'_>, client: &Client, options: Bound<'_, PyDict>) -> PyResult<Self> {
        let arguments = Arguments::new(options);
        let options = options::stream(&arguments, client.settings(), &table(&arguments)?)?;
        let client = client.engine()?;
        let planner = wait(py, || EnginePlanner::new(client, options))?;
        let planner = tokio::sync::Mutex::new(planner.map_err(Failure::from)?);
        Ok(Self { planner: ProcessBound::new(py, "planner", planner)? })
    }

    #[getter]
    fn is_ephemeral(&self, py: Python<'_>) -> PyResult<bool> {
        self.get(py, EnginePlanner::is_ephemeral)
    }

    /// Observes the seqnos of the vBuckets.
    fn observe(&self, py: Python<'_>, persisted: bool) -> PyResult<()> {
        let planner = self.planner.get()?;
        let look = || async { planner.lock().await.observe(persisted).await };
        Ok(wait(py, look)?.map_err(Failure::from)?)
    }

    /// The high seqnos last observed.
    fn high_seqnos(&self, py: Python<'_>) -> PyResult<BTreeMap<u16, u64>> {
        let seqnos = self.get(py, EnginePlanner::high_seqnos)?;
        Ok(seqnos.into_iter().map(|(vbid, seqno)| (vbid.0, seqno.0)).collect())
    }

    /// Offsets after everything last observed.
    fn head(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.get(py, |planner| planner.head().map(|head| head.to_json()))
    }

    /// Offsets before the first change.
    fn earliest(&self, py: Python<'_>) -> PyResult<String> {
        self.get(py, |planner| planner.earliest().to_json())
    }

    /// Offsets after everything that may be read now.
    fn latest(&self, py: Python<'_>, options: Bound<'_, PyDict>) -> PyResult<String> {
        let (planner, limits) = (self.planner.get()?, limits(&Arguments::new(options))?);
        let ask = || async { planner.lock().await.latest(&limits).await };
        Ok(wait(py, ask)?.map_err(Failure::from)?.to_json())
    }

    /// Limits all batches to what may be read now.
    fn fix_target(&self, py: Python<'_>, options: Bound<'_, PyDict>) -> PyResult<()> {
        let (planner, limits) = (self.planner.get()?, limits(&Arguments::new(options))?);
        let ask = || async { planner.lock().await.fix_target(&limits).await };
        Ok(wait(py, ask)?.map_err(Failure::from)?)
    }

    /// The end offset of the batch that begins at `start`.
    fn plan_end(
        &self,
        py: Python<'_>,
        start: PlanStart,
        options: Bound<'_, PyDict>,
    ) -> PyResult<String> {
        let (planner, limits) = (self.planner.get()?, limits(&Arguments::new(options))?);
        let plan = || async {
            let mut planner = planner.lock().await;
            let start = start.start(&planner)?;
            planner.end(&start, &limits).await.map_err(Failure::from)
        };
        Ok(wait(py, plan)??.to_json())
    }

    /// The plans of a batch: at most `count`, each for one node.
    fn partitions(
        &self,
        py: Python<'_>,
        start: PlanStart,
        end: &str,
        count: Option<usize>,
        options: Bound<'_, PyDict>,
    ) -> PyResult<Vec<ReadPlan>> {
        let (planner, limits) = (self.planner.get()?, limits(&Arguments::new(options))?);
        let end = Offsets::from_json(end).map_err(Failure::from)?;
        let plan = || async {
            let mut planner = planner.lock().await;
            let start = start.start(&planner)?;
            let plans = planner.partitions(&start, &end, count, &limits).await?;
            Ok::<_, Failure>(plans.into_iter().map(ReadPlan).collect())
        };
        Ok(wait(py, plan)??)
    }
}

impl Planner {
    /// Reads the planner's state; detached, since other threads may hold it while they log.
    fn get<T: Send>(
        &self,
        py: Python<'_>,
        get: impl FnOnce(&EnginePlanner) -> T + Send,
    ) -> PyResult<T> {
        let planner = self.planner.get()?;
        wait(py, || async { get(&*planner.lock().await) })
    }
}

static OPENED: Class = Class::new("dcp_rs._clients", "Opened");

/// Connects and opens the stream of a plan, on the client of an earlier one if it is usable, as
/// `dcp_rs._clients.Opened`.
#[pyfunction]
pub(crate) fn open_plan<'py>(
    py: Python<'py>,
    connect: Bound<'py, PyDict>,
    kept: Option<&Client>,
    plan: &ReadPlan,
    options: Bound<'py, PyDict>,
) -> PyResult<Bound<'py, PyAny>> {
    let Connection { options: connect, settings } = Connection::read(&Arguments::new(connect))?;
    let watches = kept.map(|kept| kept.watches().clone()).unwrap_or_default();
    let kept = kept.map(Client::engine).transpose()?.cloned();
    let arguments = Arguments::new(options);
    let table = table(&arguments)?;
    let base = options::stream(&arguments, settings, &table)?;
    let opening = || async {
        let make_sinks = |client: &dcp_consumer::Client| sinks(client, &table);
        open(&connect, kept, &plan.0, &base, make_sinks).await.map_err(Failure::from)
    };
    let (client, stream) = wait(py, opening)??;
    let watch = watches.of(&table);
    let client = Client::new(py, client, settings, watches)?;
    let stream = ChangeStream::new(py, stream, table, watch)?;
    make!(OPENED, py, { client: client, stream: stream })
}
