//! Options of an embedded cluster.

use std::path::Path;

use dcp_producer::{NodeCertificate, ProducerOptions, TlsOptions, User};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

use crate::arguments::{Arguments, DAY, conflict, invalid};

const SIZES: std::ops::RangeInclusive<u64> = 0..=i64::MAX as u64;
const PORTS: std::ops::RangeInclusive<u64> = 0..=u16::MAX as u64;

/// The options of `dcp_rs.testing.EmbeddedCluster`.
pub(crate) fn cluster(arguments: &Arguments<'_>) -> PyResult<ProducerOptions> {
    let mut options = ProducerOptions::default();
    options.nodes = arguments.integer("nodes", options.nodes, 1..=64)?;
    options.vbuckets = arguments.integer("vbuckets", options.vbuckets, 1..=1024)?;
    options.replicas = arguments.integer("replicas", options.replicas, 0..=3)?;
    options.bucket = arguments.text("bucket", &options.bucket)?;
    options.ephemeral = arguments.flag("ephemeral", options.ephemeral)?;
    options.username = arguments.text("username", &options.username)?;
    options.password = arguments.text("password", &options.password)?;
    if let Some(given) = arguments.optional("users")? {
        let user = |each: Bound<'_, PyAny>| -> PyResult<User> {
            let arguments = Arguments::new(each.cast_into()?);
            Ok(User {
                username: arguments.text("username", "")?,
                password: arguments.text("password", "")?,
                reads: arguments.names("reads")?,
            })
        };
        options.users = given.try_iter()?.map(|each| user(each?)).collect::<PyResult<_>>()?;
    }
    options.token_key = arguments.optional_text("token_key")?.map(String::into_bytes);
    let host = arguments.text("host", &options.host.to_string())?;
    options.host = host.parse().map_err(|_| {
        let value = PyString::new(arguments.py(), &host);
        invalid("host", "must be an IP address, such as 127.0.0.1", value.as_any())
    })?;
    options.port = arguments.integer("port", options.port, PORTS)?;
    options.management_port =
        arguments.integer("management_port", options.management_port, PORTS)?;
    options.alternate_host = arguments.optional_text("alternate_host")?;
    options.tls_port = arguments.integer("tls_port", options.tls_port, PORTS)?;
    options.tls = tls(arguments, options.tls_port)?;
    options.data = arguments.path("data")?;
    let delay = options.persist_delay;
    options.persist_delay = arguments.seconds("persist_delay", delay, 0.0..=DAY)?;
    options.history_bytes = arguments.integer("history_bytes", options.history_bytes, SIZES)?;
    options.keeps_history = arguments.flag("keeps_history", options.keeps_history)?;
    options.keeps_compressed = arguments.flag("keeps_compressed", options.keeps_compressed)?;
    if let Some(given) = arguments.optional("limits")? {
        limits(&Arguments::new(given.cast_into()?), &mut options)?;
    }
    Ok(options)
}

/// `dcp_rs.testing.Limits`.
pub(crate) fn limits(arguments: &Arguments<'_>, options: &mut ProducerOptions) -> PyResult<()> {
    let quota = options.memory_quota_bytes;
    options.memory_quota_bytes = arguments.integer("memory_quota", quota, SIZES)?;
    let counts = 1..=1 << 20;
    let connections = options.max_connections;
    options.max_connections = arguments.integer("max_connections", connections, counts.clone())?;
    options.max_streams = arguments.integer("max_streams", options.max_streams, counts)?;
    options.max_unacknowledged_bytes = arguments.integer(
        "max_unacknowledged_bytes",
        options.max_unacknowledged_bytes,
        1..=u32::MAX.into(),
    )?;
    for (name, time, least) in [
        ("authentication_timeout", &mut options.authentication_timeout, 0.001),
        ("idle_timeout", &mut options.idle_timeout, 0.001),
        ("dcp_idle_timeout", &mut options.dcp_idle_timeout, 0.001),
        ("persistence_timeout", &mut options.persistence_timeout, 0.0),
    ] {
        *time = arguments.seconds(name, *time, least..=DAY)?;
    }
    options.congestion_control = arguments.optional_text("congestion_control")?;
    Ok(())
}

/// Checks `dcp_rs.testing.Limits`.
#[pyfunction]
pub(crate) fn check_limits(options: Bound<'_, PyDict>) -> PyResult<()> {
    limits(&Arguments::new(options), &mut ProducerOptions::default())
}

fn tls(arguments: &Arguments<'_>, port: u16) -> PyResult<Option<TlsOptions>> {
    let is_on = arguments.flag("tls", false)?;
    let (chain, key) = (arguments.path("tls_certificate")?, arguments.path("tls_key")?);
    let client_ca = arguments.path("tls_client_ca")?;
    let mut tls = TlsOptions::default();
    tls.require_client_certificate = arguments.flag("tls_client_required", false)?;
    if chain.is_some() != key.is_some() {
        return Err(conflict(&["tls_certificate", "tls_key"], "give both or neither"));
    }
    let needs_tls = [
        ("tls_port", port != 0),
        ("tls_certificate", chain.is_some()),
        ("tls_client_ca", client_ca.is_some()),
        ("tls_client_required", tls.require_client_certificate),
    ];
    if let Some((option, _)) = needs_tls.iter().find(|(_, is_given)| *is_given && !is_on) {
        return Err(conflict(&[option], "needs TLS, which is off: turn it on"));
    }
    if tls.require_client_certificate && client_ca.is_none() {
        return Err(conflict(
            &["tls_client_required", "tls_client_ca"],
            "name the authority that signed the clients' certificates as well",
        ));
    }
    if let (Some(chain), Some(key)) = (chain, key) {
        let chain = read("tls_certificate", &chain)?;
        tls.certificate = Some(NodeCertificate::new(chain, read("tls_key", &key)?));
    }
    tls.client_ca = client_ca.map(|ca| read("tls_client_ca", &ca)).transpose()?;
    Ok(is_on.then_some(tls))
}

/// The text of a file given as an option.
fn read(option: &str, path: &Path) -> PyResult<String> {
    std::fs::read_to_string(path).map_err(|error| {
        conflict(&[option], format!("{} could not be read: {error}", path.display()))
    })
}
