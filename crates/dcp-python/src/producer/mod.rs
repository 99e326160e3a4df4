//! The embedded cluster.

mod document;
pub(crate) mod options;

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use bytes::Bytes;
use dcp_producer::{DocumentError, MutationToken, Producer as EngineProducer, WriteOptions};
use dcp_wire::{Seqno, Vbid};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use self::document::WriteArgs;
use crate::arguments::Arguments;
use crate::classes::{Class, make};
use crate::error::{Failure, Kind};
use crate::runtime::{ProcessBound, wait};

static MAP_VERSION: Class = Class::new("dcp_rs.testing.control", "MapVersion");

/// An embedded cluster; `None` once it has been shut down.
#[pyclass(frozen, module = "dcp_rs._dcp_rs", name = "EmbeddedCluster")]
#[derive(Debug)]
pub(crate) struct Producer {
    producer: ProcessBound<RwLock<Option<Arc<EngineProducer>>>>,
}

impl Producer {
    fn engine(&self, py: Python<'_>) -> PyResult<Arc<EngineProducer>> {
        let shared = self.producer.get()?;
        let producer = py.detach(|| shared.read().unwrap_or_else(PoisonError::into_inner).clone());
        producer.ok_or_else(|| Failure::new(Kind::Closed, "the embedded cluster is closed").into())
    }

    /// Calls the engine detached: its locks are shared with its tasks, which may log.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&EngineProducer) -> T + Send,
    ) -> PyResult<T> {
        let producer = self.engine(py)?;
        Ok(py.detach(|| call(&producer)))
    }

    /// Like [`with`](Self::with), for fallible calls.
    fn attempt<T: Send, E: Into<Failure> + Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&EngineProducer) -> Result<T, E> + Send,
    ) -> PyResult<T> {
        Ok(self.with(py, call)?.map_err(Into::into)?)
    }

    fn write<'py>(
        &self,
        py: Python<'py>,
        call: impl FnOnce(&EngineProducer) -> Result<MutationToken, Failure> + Send,
    ) -> PyResult<Bound<'py, PyAny>> {
        document::token(py, self.attempt(py, call)?)
    }

    fn store<'py>(
        &self,
        py: Python<'py>,
        key: &[u8],
        value: &[u8],
        options: Bound<'py, PyDict>,
        store: fn(
            &EngineProducer,
            &[u8],
            Bytes,
            WriteOptions,
        ) -> Result<MutationToken, DocumentError>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let value = Bytes::copy_from_slice(value);
        let options = WriteArgs::read(options)?;
        self.write(py, |producer| {
            let (options, value) = options.with_value(producer, value)?;
            Ok(store(producer, key, value, options)?)
        })
    }
}

#[pymethods]
impl Producer {
    #[staticmethod]
    fn start(py: Python<'_>, options: Bound<'_, PyDict>) -> PyResult<Self> {
        let options = options::cluster(&Arguments::new(options))?;
        let producer = wait(py, || EngineProducer::start(options))?.map_err(Failure::from)?;
        Ok(Self {
            producer: ProcessBound::new(
                py,
                "embedded cluster",
                RwLock::new(Some(Arc::new(producer))),
            )?,
        })
    }

    fn connection_string(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, EngineProducer::connection_string)
    }

    fn tls_connection_string(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, EngineProducer::tls_connection_string)
    }

    fn management_urls(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, EngineProducer::management_urls)
    }

    fn tls_management_urls(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.with(py, EngineProducer::tls_management_urls)
    }

    fn ca_pem(&self, py: Python<'_>) -> PyResult<Option<String>> {
        self.with(py, |producer| producer.ca_pem().map(str::to_owned))
    }

    fn bucket_uuid(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, EngineProducer::bucket_uuid)
    }

    fn vbucket_of(&self, py: Python<'_>, key: &[u8]) -> PyResult<u16> {
        self.with(py, |producer| producer.vbid_of(key).0)
    }

    fn upsert<'py>(
        &self,
        py: Python<'py>,
        key: &[u8],
        value: &[u8],
        options: Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.store(py, key, value, options, EngineProducer::upsert)
    }

    fn insert<'py>(
        &self,
        py: Python<'py>,
        key: &[u8],
        value: &[u8],
        options: Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.store(py, key, value, options, EngineProducer::insert)
    }

    fn remove<'py>(
        &self,
        py: Python<'py>,
        key: &[u8],
        options: Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = WriteArgs::read(options)?;
        self.write(py, |producer| Ok(producer.remove(key, options.options(producer)?)?))
    }

    fn expire<'py>(
        &self,
        py: Python<'py>,
        key: &[u8],
        options: Bound<'py, PyDict>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = WriteArgs::read(options)?;
        self.write(py, |producer| Ok(producer.expire(key, options.options(producer)?)?))
    }

    fn get<'py>(
        &self,
        py: Python<'py>,
        key: &[u8],
        collection: Option<&str>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let found = self.attempt(py, |producer| {
            let collection = document::collection_id(producer, collection)?;
            Ok::<_, Failure>(producer.get_from(collection, key))
        })?;
        found.map(|found| document::read(py, &found)).transpose()
    }

    fn high_seqnos(&self, py: Python<'_>) -> PyResult<BTreeMap<u16, u64>> {
        let seqnos = self.with(py, EngineProducer::high_seqnos)?;
        Ok(seqnos.into_iter().map(|(vbid, seqno)| (vbid.0, seqno.0)).collect())
    }

    fn expire_due(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, EngineProducer::expire_due)
    }

    fn persist(&self, py: Python<'_>) -> PyResult<()> {
        self.with(py, EngineProducer::persist)
    }

    fn purge(&self, py: Python<'_>, vbucket: u16, to: u64) -> PyResult<()> {
        self.attempt(py, |producer| producer.purge(Vbid(vbucket), Seqno(to)))
    }

    fn roll_back(&self, py: Python<'_>, vbucket: u16, to: u64) -> PyResult<()> {
        self.attempt(py, |producer| producer.roll_back(Vbid(vbucket), Seqno(to)))
    }

    fn set_password(&self, py: Python<'_>, password: &str) -> PyResult<()> {
        self.attempt(py, |producer| producer.set_password(password))
    }

    fn num_nodes(&self, py: Python<'_>) -> PyResult<usize> {
        self.with(py, EngineProducer::num_nodes)
    }

    fn copies_of(&self, py: Python<'_>, vbucket: u16) -> PyResult<Vec<usize>> {
        self.attempt(py, |producer| producer.copies_of(Vbid(vbucket)))
    }

    fn move_vbucket(&self, py: Python<'_>, vbucket: u16, node: usize) -> PyResult<()> {
        self.attempt(py, |producer| producer.move_vbucket(Vbid(vbucket), node))
    }

    fn failover(&self, py: Python<'_>, node: usize, graceful: bool) -> PyResult<()> {
        self.attempt(py, |producer| producer.failover(node, graceful))
    }

    fn failover_unsafely(&self, py: Python<'_>, nodes: Vec<usize>) -> PyResult<()> {
        self.attempt(py, |producer| producer.failover_unsafely(&nodes))
    }

    fn map_version<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (epoch, revision) = self.with(py, EngineProducer::map_version)?;
        make!(MAP_VERSION, py, { epoch: epoch, revision: revision })
    }

    fn kill(&self, py: Python<'_>, node: usize) -> PyResult<()> {
        self.attempt(py, |producer| producer.kill(node))
    }

    fn restart(&self, py: Python<'_>, node: usize, clean: bool) -> PyResult<()> {
        let producer = self.engine(py)?;
        Ok(wait(py, || producer.restart(node, clean))?.map_err(Failure::from)?)
    }

    fn add_node(&self, py: Python<'_>) -> PyResult<usize> {
        let producer = self.engine(py)?;
        Ok(wait(py, || producer.add_node())?.map_err(Failure::from)?)
    }

    fn rebalance(&self, py: Python<'_>) -> PyResult<()> {
        self.attempt(py, EngineProducer::rebalance)
    }

    fn set_replica_lag(
        &self,
        py: Python<'_>,
        vbucket: u16,
        replica: usize,
        lag: Option<u64>,
    ) -> PyResult<()> {
        self.attempt(py, |producer| producer.set_replica_lag(Vbid(vbucket), replica, lag))
    }

    fn hold_persistence(
        &self,
        py: Python<'_>,
        vbucket: u16,
        copy: usize,
        hold: bool,
    ) -> PyResult<()> {
        self.attempt(py, |producer| producer.hold_persistence(Vbid(vbucket), copy, hold))
    }

    fn drop_bucket(&self, py: Python<'_>) -> PyResult<()> {
        self.attempt(py, EngineProducer::drop_bucket)
    }

    fn create_bucket(&self, py: Python<'_>) -> PyResult<()> {
        self.attempt(py, EngineProducer::create_bucket)
    }

    fn flush_bucket(&self, py: Python<'_>) -> PyResult<()> {
        self.attempt(py, EngineProducer::flush_bucket)
    }

    fn create_scope(&self, py: Python<'_>, scope: &str) -> PyResult<()> {
        self.attempt(py, |producer| producer.create_scope(scope).map(drop))
    }

    fn drop_scope(&self, py: Python<'_>, scope: &str) -> PyResult<()> {
        self.attempt(py, |producer| producer.drop_scope(scope))
    }

    fn create_collection(
        &self,
        py: Python<'_>,
        scope: &str,
        collection: &str,
        max_ttl: Option<u32>,
    ) -> PyResult<()> {
        let create = |producer: &EngineProducer| {
            producer.create_collection(scope, collection, max_ttl).map(drop)
        };
        self.attempt(py, create)
    }

    fn drop_collection(&self, py: Python<'_>, scope: &str, collection: &str) -> PyResult<()> {
        self.attempt(py, |producer| producer.drop_collection(scope, collection))
    }

    fn modify_collection(
        &self,
        py: Python<'_>,
        scope: &str,
        collection: &str,
        max_ttl: Option<u32>,
        history: bool,
    ) -> PyResult<()> {
        self.attempt(py, |producer| producer.modify_collection(scope, collection, max_ttl, history))
    }

    fn flush_collection(&self, py: Python<'_>, scope: &str, collection: &str) -> PyResult<()> {
        self.attempt(py, |producer| producer.flush_collection(scope, collection))
    }

    fn manifest(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, EngineProducer::manifest_json)
    }

    fn set_faults(&self, py: Python<'_>, rules: &str) -> PyResult<()> {
        let rules = dcp_producer::parse_rules(rules).map_err(Failure::from)?;
        self.attempt(py, |producer| producer.set_faults(rules))
    }

    /// The active rules as JSON.
    fn faults(&self, py: Python<'_>) -> PyResult<String> {
        let rules = self.with(py, EngineProducer::faults)?;
        let json = serde_json::to_string(&rules);
        Ok(json.map_err(|error| Failure::new(Kind::Dcp, error.to_string()))?)
    }

    /// How often each rule matched.
    fn fault_counts(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.with(py, EngineProducer::fault_counts)
    }

    fn shutdown(&self, py: Python<'_>) -> PyResult<()> {
        let shared = self.producer.get()?;
        let producer = py.detach(|| shared.write().unwrap_or_else(PoisonError::into_inner).take());
        match producer {
            Some(producer) => wait(py, || producer.shutdown()),
            None => Ok(()),
        }
    }
}
