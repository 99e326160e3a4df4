//! Connections to a bucket.

use std::collections::BTreeMap;

use dcp_arrow::{ArrowSink, BatchLimits, BufferPool, CollectionName, CollectionNames, TableSchema};
use dcp_consumer::Client as EngineClient;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::Arguments;
use crate::error::Failure;
use crate::options::{self, Connection, Transport};
use crate::runtime::{ProcessBound, wait};
use crate::schema::table;
use crate::stream::ChangeStream;

/// A bucket to stream changes from.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct Client {
    client: ProcessBound<EngineClient>,
    transport: Transport,
}

#[pymethods]
impl Client {
    #[staticmethod]
    fn connect(py: Python<'_>, options: Bound<'_, PyDict>) -> PyResult<Self> {
        let Connection { options, transport } = Connection::read(&Arguments::new(options))?;
        let client = wait(py, || EngineClient::connect(options))?.map_err(Failure::from)?;
        Self::new(py, client, transport)
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

    fn vbuckets_by_node(&self, py: Python<'_>) -> PyResult<Vec<(String, Vec<u16>)>> {
        let client = self.client.get()?;
        let nodes = py.detach(|| client.vbuckets_by_node());
        let numbers = |vbids: Vec<dcp_wire::Vbid>| vbids.into_iter().map(|vbid| vbid.0).collect();
        Ok(nodes.into_iter().map(|(node, vbids)| (node, numbers(vbids))).collect())
    }

    fn high_seqnos(&self, py: Python<'_>) -> PyResult<BTreeMap<u16, u64>> {
        let client = self.client.get()?;
        let seqnos = wait(py, || client.high_seqnos())?.map_err(Failure::from)?;
        Ok(seqnos.into_iter().map(|(vbid, seqno)| (vbid.0, seqno.0)).collect())
    }

    fn stream(&self, py: Python<'_>, options: Bound<'_, PyDict>) -> PyResult<ChangeStream> {
        let client = self.client.get()?;
        let arguments = Arguments::new(options);
        let table = table(&arguments)?;
        let options = options::stream(&arguments, self.transport, &table)?;
        let make_sink = sinks(client, &table);
        let stream = wait(py, || client.stream(options, make_sink))?.map_err(Failure::from)?;
        ChangeStream::new(py, stream, table)
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let client = self.client.get()?;
        wait(py, || client.close())
    }
}

impl Client {
    pub(crate) fn new(
        py: Python<'_>,
        client: EngineClient,
        transport: Transport,
    ) -> PyResult<Self> {
        Ok(Self { client: ProcessBound::new(py, "client", client)?, transport })
    }

    pub(crate) fn engine(&self) -> PyResult<&EngineClient> {
        self.client.get()
    }
}

/// Makes the sinks of one stream, which share their memory and their names.
pub(crate) fn sinks(
    client: &EngineClient,
    table: &TableSchema,
) -> impl Fn() -> ArrowSink + Send + Sync + use<> {
    let (table, names, pool) = (table.clone(), names(client.clone()), BufferPool::default());
    move || ArrowSink::with_pool(table.clone(), names.clone(), BatchLimits::default(), pool.clone())
}

/// Names as the client's manifest has them.
fn names(client: EngineClient) -> CollectionNames {
    let scopes = client.clone();
    CollectionNames::new(move |id| {
        let manifest = client.manifest();
        let (scope, collection) = manifest.names(id)?;
        Some(CollectionName::new(scope, collection))
    })
    .with_scopes(move |id| Some(scopes.manifest().scope(id)?.name.as_str().into()))
}
