//! Connections to a bucket.

use std::collections::BTreeMap;

use dcp_arrow::{ArrowSink, BatchLimits, BufferPool, CollectionName, CollectionNames, TableSchema};
use dcp_consumer::{Client as EngineClient, StreamOptions};
use dcp_proto::checkpoint::Checkpoint as EngineCheckpoint;
use dcp_wire::Vbid;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};

use crate::arguments::Arguments;
use crate::checkpoint::Checkpoint;
use crate::error::Failure;
use crate::options::{self, Connection, ConnectionSettings};
use crate::plan::ReadPlan;
use crate::runtime::pending::Pending;
use crate::runtime::{ProcessBound, current, wait};
use crate::schema::table;
use crate::stream::ChangeStream;
use crate::unmatched::Watches;

/// A bucket to stream changes from.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct Client {
    client: ProcessBound<EngineClient>,
    settings: ConnectionSettings,
    watches: Watches,
}

#[pymethods]
impl Client {
    #[staticmethod]
    fn connect(py: Python<'_>, options: Bound<'_, PyDict>) -> PyResult<Self> {
        let Connection { options, settings } = Connection::read(&Arguments::new(options))?;
        let client = wait(py, || EngineClient::connect(options))?.map_err(Failure::from)?;
        Self::new(py, client, settings, Watches::default())
    }

    /// Like `connect`, for an event loop.
    #[staticmethod]
    fn connect_async(
        py: Python<'_>,
        options: Bound<'_, PyDict>,
        notify: Py<PyAny>,
    ) -> PyResult<Pending> {
        let Connection { options, settings } = Connection::read(&Arguments::new(options))?;
        Pending::start(py, notify, EngineClient::connect(options), move |py, client| {
            let client = Self::new(py, client, settings, Watches::default())?;
            Ok(Py::new(py, client)?.into_any())
        })
    }

    #[getter]
    fn bucket_name(&self) -> PyResult<String> {
        Ok(self.client.get()?.bucket_name().to_owned())
    }

    #[getter]
    fn bucket_uuid(&self) -> PyResult<String> {
        Ok(self.client.get()?.bucket_uuid().to_owned())
    }

    #[getter]
    fn num_vbuckets(&self) -> PyResult<u16> {
        Ok(self.client.get()?.num_vbuckets())
    }

    fn vbuckets_by_node<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let client = self.client.get()?;
        let nodes = py.detach(|| client.vbuckets_by_node());
        let numbers = |vbids: Vec<Vbid>| vbids.into_iter().map(|vbid| vbid.0).collect::<Vec<_>>();
        nodes.into_iter().map(|(node, vbids)| (node, numbers(vbids))).into_py_dict(py)
    }

    fn high_seqnos(&self, py: Python<'_>) -> PyResult<BTreeMap<u16, u64>> {
        let client = self.client.get()?;
        let seqnos = wait(py, || client.high_seqnos())?.map_err(Failure::from)?;
        Ok(seqnos.into_iter().map(|(vbid, seqno)| (vbid.0, seqno.0)).collect())
    }

    /// Like `high_seqnos`, for an event loop.
    fn high_seqnos_async(&self, py: Python<'_>, notify: Py<PyAny>) -> PyResult<Pending> {
        let client = self.client.get()?.clone();
        let ask = async move { client.high_seqnos().await };
        Pending::start(py, notify, ask, |py, seqnos| {
            let seqnos = seqnos.into_iter().map(|(vbid, seqno)| (vbid.0, seqno.0));
            Ok(seqnos.collect::<BTreeMap<_, _>>().into_pyobject(py)?.into_any().unbind())
        })
    }

    /// The collections that a filter chooses, by asking the nodes.
    fn collections(
        &self,
        py: Python<'_>,
        options: Bound<'_, PyDict>,
    ) -> PyResult<BTreeMap<String, u32>> {
        let client = self.client.get()?;
        let filter = options::filter(&Arguments::new(options))?;
        let found = wait(py, || client.collections(&filter))?.map_err(Failure::from)?;
        Ok(found.into_iter().map(|(name, id)| (name, id.0)).collect())
    }

    /// The earliest positions of several readers, for a stream of a filter.
    fn earliest_of(
        &self,
        py: Python<'_>,
        options: Bound<'_, PyDict>,
        readers: Vec<Checkpoint>,
    ) -> PyResult<Checkpoint> {
        let client = self.client.get()?;
        let filter = options::filter(&Arguments::new(options))?;
        let filter = wait(py, || client.stored_filter(&filter, false))?.map_err(Failure::from)?;
        let readers: Vec<_> = readers.into_iter().map(|reader| reader.0).collect();
        let found = EngineCheckpoint::earliest_of(client.bucket_uuid(), filter, &readers);
        Ok(Checkpoint(found.map_err(Failure::from)?))
    }

    fn stream(&self, py: Python<'_>, options: Bound<'_, PyDict>) -> PyResult<ChangeStream> {
        let client = self.client.get()?;
        let (options, table) = self.stream_options(options)?;
        let (make_sink, watch) = (sinks(client, &table), self.watches.of(&table));
        let stream = wait(py, || client.stream(options, make_sink))?.map_err(Failure::from)?;
        ChangeStream::new(py, stream, table, watch)
    }

    /// Opens the stream of a plan; the options say how its changes are delivered.
    fn run(
        &self,
        py: Python<'_>,
        plan: &ReadPlan,
        options: Bound<'_, PyDict>,
    ) -> PyResult<ChangeStream> {
        let client = self.client.get()?;
        let (options, table) = self.stream_options(options)?;
        let (make_sink, watch) = (sinks(client, &table), self.watches.of(&table));
        let stream =
            wait(py, || client.run(&plan.0, &options, make_sink))?.map_err(Failure::from)?;
        ChangeStream::new(py, stream, table, watch)
    }

    /// Like `stream`, for an event loop.
    fn stream_async(
        &self,
        py: Python<'_>,
        options: Bound<'_, PyDict>,
        notify: Py<PyAny>,
    ) -> PyResult<Pending> {
        let client = self.client.get()?.clone();
        let (options, table) = self.stream_options(options)?;
        let (make_sink, watch) = (sinks(&client, &table), self.watches.of(&table));
        let open = async move { client.stream(options, make_sink).await };
        Pending::start(py, notify, open, move |py, stream| {
            Ok(Py::new(py, ChangeStream::new(py, stream, table, watch)?)?.into_any())
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let client = self.client.get()?;
        wait(py, || client.close())
    }

    /// Like `close`, for an event loop. The client is closed even if the result is not awaited.
    fn close_async(&self, py: Python<'_>, notify: Py<PyAny>) -> PyResult<Pending> {
        let client = self.client.get()?.clone();
        let closed = current(py)?.spawn(async move { client.close().await });
        let closed = async move {
            // The task finishes in any case, at the latest with the runtime.
            let _ended = closed.await;
            Ok::<_, Failure>(())
        };
        Pending::start(py, notify, closed, |py, ()| Ok(py.None()))
    }
}

impl Client {
    pub(crate) fn new(
        py: Python<'_>,
        client: EngineClient,
        settings: ConnectionSettings,
        watches: Watches,
    ) -> PyResult<Self> {
        Ok(Self { client: ProcessBound::new(py, "client", client)?, settings, watches })
    }

    fn stream_options(&self, options: Bound<'_, PyDict>) -> PyResult<(StreamOptions, TableSchema)> {
        let arguments = Arguments::new(options);
        let table = table(&arguments)?;
        let options = options::stream(&arguments, self.settings, &table)?;
        Ok((options, table))
    }

    pub(crate) const fn settings(&self) -> ConnectionSettings {
        self.settings
    }

    /// What its streams have seen.
    pub(crate) const fn watches(&self) -> &Watches {
        &self.watches
    }

    pub(crate) fn engine(&self) -> PyResult<&EngineClient> {
        self.client.get()
    }
}

/// Creates the sinks of one stream, which share memory and collection names.
pub(crate) fn sinks(
    client: &EngineClient,
    table: &TableSchema,
) -> impl Fn() -> ArrowSink + Send + Sync + use<> {
    let (table, names, pool) = (table.clone(), names(client.clone()), BufferPool::default());
    move || ArrowSink::with_pool(table.clone(), names.clone(), BatchLimits::default(), pool.clone())
}

/// Collection names from the client's manifest.
fn names(client: EngineClient) -> CollectionNames {
    let scopes = client.clone();
    CollectionNames::new(move |id| {
        let manifest = client.manifest();
        let (scope, collection) = manifest.names(id)?;
        Some(CollectionName::new(scope, collection))
    })
    .with_scopes(move |id| Some(scopes.manifest().scope(id)?.name.as_str().into()))
}
