//! How an embedded cluster is set up.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use dcp_producer::{NodeCertificate, ProducerOptions, TlsOptions};
use pyo3::prelude::*;

use crate::error::{Failure, Kind};

/// `dcp_rs.testing.EmbeddedCluster`'s options.
#[derive(FromPyObject)]
pub(crate) struct ProducerArgs {
    nodes: usize,
    vbuckets: u16,
    replicas: u8,
    bucket: String,
    ephemeral: bool,
    username: String,
    password: String,
    host: String,
    port: u16,
    management_port: u16,
    alternate_host: Option<String>,
    tls: bool,
    tls_port: u16,
    tls_certificate: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    tls_client_ca: Option<PathBuf>,
    tls_client_required: bool,
    data: Option<PathBuf>,
    persist_delay: f64,
    history_bytes: usize,
    keeps_history: bool,
    keeps_compressed: bool,
    limits: LimitArgs,
}

/// `dcp_rs.testing.Limits`.
#[derive(FromPyObject)]
struct LimitArgs {
    memory_quota: usize,
    max_connections: usize,
    max_streams: usize,
    max_unacknowledged_bytes: u32,
    authentication_timeout: f64,
    idle_timeout: f64,
    dcp_idle_timeout: f64,
    persistence_timeout: f64,
    congestion_control: Option<String>,
}

impl ProducerArgs {
    pub(super) fn into_options(self) -> Result<ProducerOptions, Failure> {
        let wrong = |message: &str| Failure::new(Kind::Config, message);
        let host: IpAddr =
            self.host.parse().map_err(|_| wrong("host: must be an IP address, as 127.0.0.1"))?;
        let mut options = ProducerOptions::default();
        let seconds = |option: &str, value: f64| {
            Duration::try_from_secs_f64(value)
                .map_err(|_| wrong(&format!("{option}: must be a number of seconds from 0 up")))
        };
        options.persist_delay = seconds("persist_delay", self.persist_delay)?;
        options.authentication_timeout =
            seconds("authentication_timeout", self.limits.authentication_timeout)?;
        options.idle_timeout = seconds("idle_timeout", self.limits.idle_timeout)?;
        options.dcp_idle_timeout = seconds("dcp_idle_timeout", self.limits.dcp_idle_timeout)?;
        options.persistence_timeout =
            seconds("persistence_timeout", self.limits.persistence_timeout)?;
        options.tls = self.tls.then(|| self.tls_options()).transpose()?;
        options.nodes = self.nodes;
        options.vbuckets = self.vbuckets;
        options.replicas = self.replicas;
        options.bucket = self.bucket;
        options.ephemeral = self.ephemeral;
        options.username = self.username;
        options.password = self.password;
        options.host = host;
        options.port = self.port;
        options.management_port = self.management_port;
        options.alternate_host = self.alternate_host;
        options.tls_port = self.tls_port;
        options.memory_quota_bytes = self.limits.memory_quota;
        options.history_bytes = self.history_bytes;
        options.keeps_history = self.keeps_history;
        options.keeps_compressed = self.keeps_compressed;
        options.congestion_control = self.limits.congestion_control;
        options.max_connections = self.limits.max_connections;
        options.max_streams = self.limits.max_streams;
        options.max_unacknowledged_bytes = self.limits.max_unacknowledged_bytes;
        options.data = self.data;
        Ok(options)
    }

    fn tls_options(&self) -> Result<TlsOptions, Failure> {
        let mut tls = TlsOptions::default();
        if let (Some(chain), Some(key)) = (&self.tls_certificate, &self.tls_key) {
            let chain = read("tls_certificate", chain)?;
            tls.certificate = Some(NodeCertificate::new(chain, read("tls_key", key)?));
        }
        if let Some(ca) = &self.tls_client_ca {
            tls.client_ca = Some(read("tls_client_ca", ca)?);
        }
        tls.require_client_certificate = self.tls_client_required;
        Ok(tls)
    }
}

/// The text of a file that an option names.
fn read(option: &str, path: &Path) -> Result<String, Failure> {
    std::fs::read_to_string(path).map_err(|error| {
        let path = path.display();
        Failure::new(Kind::Config, format!("{option}: {path} could not be read: {error}"))
    })
}
