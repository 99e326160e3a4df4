//! The embedded cluster.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use dcp_producer::{
    Document, DocumentError, MutationToken, NodeCertificate, Producer as EngineProducer,
    ProducerOptions, TlsOptions, WriteOptions,
};
use dcp_wire::{Cas, Seqno, Vbid};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::error::{Failure, Kind};
use crate::runtime::{ProcessBound, wait};

/// `dcp_rs.Producer`'s options.
#[derive(FromPyObject)]
pub(crate) struct ProducerArgs {
    nodes: usize,
    vbuckets: u16,
    bucket: String,
    username: String,
    password: String,
    host: String,
    port: u16,
    management_port: u16,
    tls: bool,
    tls_port: u16,
    tls_certificate: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_client_ca: Option<PathBuf>,
    tls_client_required: bool,
    persist_delay: f64,
}

impl ProducerArgs {
    fn into_options(self) -> Result<ProducerOptions, Failure> {
        let wrong = |message: &str| Failure::new(Kind::Config, message);
        let host: IpAddr =
            self.host.parse().map_err(|_| wrong("host: must be an IP address, as 127.0.0.1"))?;
        let mut options = ProducerOptions::default();
        options.nodes = self.nodes;
        options.vbuckets = self.vbuckets;
        options.bucket = self.bucket;
        options.username = self.username;
        options.password = self.password;
        options.host = host;
        options.port = self.port;
        options.management_port = self.management_port;
        options.tls_port = self.tls_port;
        if self.tls {
            let mut tls = TlsOptions::default();
            if let (Some(chain), Some(key)) = (self.tls_certificate, self.tls_key) {
                let chain = read("tls_certificate", &chain)?;
                tls.certificate = Some(NodeCertificate::new(chain, read("tls_key", &key)?));
            }
            if let Some(ca) = self.tls_client_ca {
                tls.client_ca = Some(read("tls_client_ca", &ca)?);
            }
            tls.require_client_certificate = self.tls_client_required;
            options.tls = Some(tls);
        }
        options.persist_delay = Duration::try_from_secs_f64(self.persist_delay)
            .map_err(|_| wrong("persist_delay: must be a number of seconds from 0 up"))?;
        Ok(options)
    }
}

/// The text of a file that an option names.
fn read(option: &str, path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|error| {
        let path = path.display();
        Failure::new(Kind::Config, format!("{option}: {path} could not be read: {error}"))
    })
}

/// How a document is written.
#[derive(FromPyObject)]
pub(crate) struct WriteArgs {
    cas: u64,
    expiry: u32,
    flags: u32,
}

impl WriteArgs {
    fn into_options(self) -> WriteOptions {
        let mut options = WriteOptions::default();
        options.cas = Cas(self.cas);
        options.expiry = self.expiry;
        options.flags = self.flags;
        options
    }
}

/// An embedded cluster; `None` once it has been shut down.
#[pyclass(frozen, module = "dcp_rs._dcp_rs")]
#[derive(Debug)]
pub(crate) struct Producer {
    producer: ProcessBound<RwLock<Option<EngineProducer>>>,
}

impl Producer {
    /// Calls the engine detached: its locks are shared with its tasks, which may want to log.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&EngineProducer) -> T + Send,
    ) -> PyResult<T> {
        let producer = self.producer.get()?;
        let result = py.detach(|| {
            let producer = producer.read().unwrap_or_else(PoisonError::into_inner);
            producer.as_ref().map(call)
        });
        result.ok_or_else(|| Failure::new(Kind::Closed, "the producer has been shut down").into())
    }

    fn write(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&EngineProducer) -> Result<MutationToken, DocumentError> + Send,
    ) -> PyResult<(u16, u64, u64, u64)> {
        let token = self.with(py, call)?.map_err(Failure::from)?;
        Ok((token.vbid.0, token.seqno.0, token.vbuuid.0, token.cas.0))
    }
}

fn document<'py>(py: Python<'py>, document: &Document) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("value", PyBytes::new(py, &document.value))?;
    dict.set_item("cas", document.cas.0)?;
    dict.set_item("seqno", document.seqno.0)?;
    dict.set_item("rev", document.rev_seqno.0)?;
    dict.set_item("flags", document.flags)?;
    dict.set_item("expiry", document.expiry)?;
    Ok(dict)
}

#[pymethods]
impl Producer {
    #[staticmethod]
    fn start(py: Python<'_>, options: ProducerArgs) -> PyResult<Self> {
        let options = options.into_options()?;
        let producer = wait(py, || EngineProducer::start(options))?.map_err(Failure::from)?;
        Ok(Self { producer: ProcessBound::new(py, "producer", RwLock::new(Some(producer)))? })
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

    fn upsert(
        &self,
        py: Python<'_>,
        key: &[u8],
        value: &[u8],
        options: WriteArgs,
    ) -> PyResult<(u16, u64, u64, u64)> {
        let value = Bytes::copy_from_slice(value);
        self.write(py, |producer| producer.upsert(key, value, options.into_options()))
    }

    fn insert(
        &self,
        py: Python<'_>,
        key: &[u8],
        value: &[u8],
        options: WriteArgs,
    ) -> PyResult<(u16, u64, u64, u64)> {
        let value = Bytes::copy_from_slice(value);
        self.write(py, |producer| producer.insert(key, value, options.into_options()))
    }

    fn remove(
        &self,
        py: Python<'_>,
        key: &[u8],
        options: WriteArgs,
    ) -> PyResult<(u16, u64, u64, u64)> {
        self.write(py, |producer| producer.remove(key, options.into_options()))
    }

    fn expire(
        &self,
        py: Python<'_>,
        key: &[u8],
        options: WriteArgs,
    ) -> PyResult<(u16, u64, u64, u64)> {
        self.write(py, |producer| producer.expire(key, options.into_options()))
    }

    fn get<'py>(&self, py: Python<'py>, key: &[u8]) -> PyResult<Option<Bound<'py, PyDict>>> {
        let found = self.with(py, |producer| producer.get(key))?;
        found.map(|found| document(py, &found)).transpose()
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
        let purged = self.with(py, |producer| producer.purge(Vbid(vbucket), Seqno(to)))?;
        Ok(purged.map_err(Failure::from)?)
    }

    fn roll_back(&self, py: Python<'_>, vbucket: u16, to: u64) -> PyResult<()> {
        let rolled = self.with(py, |producer| producer.roll_back(Vbid(vbucket), Seqno(to)))?;
        Ok(rolled.map_err(Failure::from)?)
    }

    fn move_vbucket(&self, py: Python<'_>, vbucket: u16, node: usize) -> PyResult<()> {
        let moved = self.with(py, |producer| producer.move_vbucket(Vbid(vbucket), node))?;
        Ok(moved.map_err(Failure::from)?)
    }

    fn set_faults(&self, py: Python<'_>, rules: &str) -> PyResult<()> {
        let rules = dcp_producer::parse_rules(rules).map_err(Failure::from)?;
        let set = self.with(py, |producer| producer.set_faults(rules))?;
        Ok(set.map_err(Failure::from)?)
    }

    /// The rules in force as JSON, and how often each reacted.
    fn faults(&self, py: Python<'_>) -> PyResult<(String, Vec<u64>)> {
        let (rules, counts) =
            self.with(py, |producer| (producer.faults(), producer.fault_counts()))?;
        let json = serde_json::to_string(&rules)
            .map_err(|error| Failure::new(Kind::Dcp, error.to_string()))?;
        Ok((json, counts))
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
