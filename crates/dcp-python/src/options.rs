//! Options as the Python package hands them over: dataclasses whose types it has checked.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use dcp_arrow::{Column, TableSchema};
use dcp_consumer::{
    Acknowledge, BatchPolicy, ClientCertificate, ConnectOptions, Content, Credentials,
    CredentialsSource, End, Filter, OnRollback, Pem, Start, StreamOptions, TlsOptions,
};
use dcp_proto::topology::{Network, NetworkSelection};
use dcp_proto::{FailoverLog, Position, Snapshot};
use dcp_wire::message::FailoverEntry;
use dcp_wire::sasl::Mechanism;
use dcp_wire::{Seqno, Vbid, Vbuuid};
use pyo3::prelude::*;

use crate::checkpoint::Checkpoint;
use crate::credentials::callable;
use crate::error::{Failure, Kind};
use crate::schema::one_of;

/// `dcp_rs.ConnectionOptions`.
#[derive(FromPyObject)]
pub(crate) struct ConnectArgs {
    connection_string: String,
    bucket: Option<String>,
    username: Option<String>,
    password: Option<String>,
    password_file: Option<PathBuf>,
    credentials: Option<Py<PyAny>>,
    sasl_mechanisms: Option<Vec<String>>,
    connect_timeout: f64,
    tls_ca: Option<PathBuf>,
    tls_certificate: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    network: String,
    keep_connections: f64,
}

impl ConnectArgs {
    pub(crate) fn into_options(self) -> Result<ConnectOptions, Failure> {
        let credentials = match (self.username, self.password, self.password_file) {
            (Some(username), Some(password), None) => {
                Some(Credentials::new(username, password).into())
            }
            (Some(username), None, Some(path)) => {
                Some(CredentialsSource::PasswordFile { username, path })
            }
            (None, None, None) => self.credentials.map(callable),
            _ => {
                let message = "username, password: give both or neither";
                return Err(Failure::new(Kind::Config, message));
            }
        };
        let client_certificate = match (self.tls_certificate, self.tls_key) {
            (Some(chain), Some(key)) => {
                Some(ClientCertificate { chain: Pem::File(chain), key: Pem::File(key) })
            }
            (None, None) => None,
            _ => {
                let message = "tls_certificate, tls_key: give both or neither";
                return Err(Failure::new(Kind::Config, message));
            }
        };
        let mut options = ConnectOptions::new(self.connection_string)
            .with_connect_timeout(seconds("connect_timeout", self.connect_timeout)?)
            .with_keep_connections(seconds("keep_connections", self.keep_connections)?)
            .with_tls(TlsOptions { ca: self.tls_ca.map(Pem::File), client_certificate });
        options.bucket = self.bucket;
        options.credentials = credentials;
        options.sasl_mechanisms = self.sasl_mechanisms.map(mechanisms).transpose()?;
        options.network = match self.network.as_str() {
            "auto" => NetworkSelection::Auto,
            "default" => NetworkSelection::Fixed(Network::Default),
            "external" => NetworkSelection::Fixed(Network::External),
            _ => return Err(one_of("network", &["auto", "default", "external"])),
        };
        Ok(options)
    }
}

/// Mechanisms by their names.
fn mechanisms(names: Vec<String>) -> Result<Vec<Mechanism>, Failure> {
    let all = Mechanism::ALL.map(Mechanism::name);
    let of = |name: String| Mechanism::from_name(name.as_bytes());
    names.into_iter().map(|name| of(name).ok_or_else(|| one_of("sasl_mechanisms", &all))).collect()
}

/// Where to begin.
#[derive(FromPyObject)]
enum StartArg {
    Checkpoint(Checkpoint),
    Word(String),
    /// vbuuid, seqno and epoch by vBucket: each a complete snapshot on that branch.
    Positions(BTreeMap<u16, (u64, u64, u32)>),
}

/// Where to end.
#[derive(FromPyObject)]
enum EndArg {
    Word(String),
    Seqnos(BTreeMap<u16, u64>),
}

/// What a stream is asked for, besides the columns of its table.
#[derive(FromPyObject)]
pub(crate) struct StreamArgs {
    start: StartArg,
    until: Option<EndArg>,
    vbuckets: Option<Vec<u16>>,
    scope: Option<String>,
    collections: Option<Vec<String>>,
    batch_rows: usize,
    batch_bytes: usize,
    linger: f64,
    buffer_size: u32,
    clamp: bool,
    end_exists: bool,
    persisted_only: bool,
    end_persisted: bool,
    system_documents: bool,
    compressed: bool,
    on_rollback: String,
    ack: String,
    noop_interval: f64,
    retry_timeout: f64,
}

/// Positions at the ends of snapshots.
fn complete_positions(
    positions: BTreeMap<u16, (u64, u64, u32)>,
) -> Result<BTreeMap<Vbid, Position>, Failure> {
    let position = |(vbid, (vbuuid, seqno, epoch))| {
        let seqno = Seqno(seqno);
        let branch = FailoverEntry { vbuuid: Vbuuid(vbuuid), seqno: Seqno::ZERO };
        let log = FailoverLog::new(vec![branch])
            .map_err(|error| Failure::new(Kind::Config, format!("start: {error}")))?;
        let position = Position {
            seqno,
            snapshot: Snapshot { start: seqno, end: seqno },
            failover_log: (seqno != Seqno::ZERO).then_some(log),
            epoch,
            ..Position::EARLIEST
        };
        Ok((Vbid(vbid), position))
    };
    positions.into_iter().map(position).collect()
}

impl StreamArgs {
    pub(crate) fn into_options(self, table: &TableSchema) -> Result<StreamOptions, Failure> {
        let start = match self.start {
            StartArg::Checkpoint(checkpoint) => Start::Checkpoint(checkpoint.0),
            StartArg::Word(word) if word == "earliest" => Start::Earliest,
            StartArg::Word(word) if word == "latest" => Start::Latest,
            StartArg::Positions(positions) => Start::Positions(complete_positions(positions)?),
            StartArg::Word(_) => {
                let message = "start: must be earliest, latest or a Checkpoint";
                return Err(Failure::new(Kind::Config, message));
            }
        };
        let end = match self.until {
            None => End::Never,
            Some(EndArg::Word(word)) if word == "now" => End::Now,
            Some(EndArg::Word(_)) => {
                let message = "until: must be now, seqnos by vBucket, or None";
                return Err(Failure::new(Kind::Config, message));
            }
            Some(EndArg::Seqnos(seqnos)) => End::At(
                seqnos.into_iter().map(|(vbid, seqno)| (Vbid(vbid), Seqno(seqno))).collect(),
            ),
        };
        let on_rollback = match self.on_rollback.as_str() {
            "emit" => OnRollback::Emit,
            "fail" => OnRollback::Raise,
            "resync" => OnRollback::Resync,
            _ => return Err(one_of("on_rollback", &["emit", "fail", "resync"])),
        };
        let acknowledge = match self.ack.as_str() {
            "next" => Acknowledge::OnNext,
            "manual" => Acknowledge::Manual,
            _ => return Err(one_of("ack", &["next", "manual"])),
        };
        Ok(StreamOptions {
            start,
            end,
            vbuckets: self.vbuckets.map(|vbids| vbids.into_iter().map(Vbid).collect()),
            content: Content {
                values: table.needs(Column::Value),
                xattrs: table.needs(Column::Xattrs),
            },
            filter: filter(self.scope, self.collections)?,
            batch: BatchPolicy {
                max_rows: self.batch_rows,
                max_bytes: self.batch_bytes,
                linger: seconds("linger", self.linger)?,
            },
            buffer_size: self.buffer_size,
            clamp: self.clamp,
            end_exists: self.end_exists,
            persisted_only: self.persisted_only,
            end_persisted: self.end_persisted,
            system_documents: self.system_documents,
            compressed: self.compressed,
            on_rollback,
            acknowledge,
            noop_interval: seconds("noop_interval", self.noop_interval)?,
            retry_timeout: seconds("retry_timeout", self.retry_timeout)?,
        })
    }
}

/// Collections may be named within `scope` or with their own, as `scope.collection`.
pub(crate) fn filter(
    scope: Option<String>,
    collections: Option<Vec<String>>,
) -> Result<Filter, Failure> {
    let Some(collections) = collections else {
        return Ok(scope.map_or(Filter::All, Filter::Scope));
    };
    let qualify = |name: String| match (&scope, name.split_once('.')) {
        (None, Some(_)) => Ok(name),
        (None, None) => Ok(format!("_default.{name}")),
        (Some(scope), None) => Ok(format!("{scope}.{name}")),
        (Some(scope), Some((own, _))) if own == scope => Ok(name),
        (Some(scope), Some(_)) => Err(Failure::new(
            Kind::Config,
            format!("collections: {name:?} is not in scope {scope:?}: name it alone, or no scope"),
        )),
    };
    Ok(Filter::Collections(collections.into_iter().map(qualify).collect::<Result<_, _>>()?))
}

pub(crate) fn seconds(option: &str, seconds: f64) -> Result<Duration, Failure> {
    Duration::try_from_secs_f64(seconds).map_err(|_| {
        Failure::new(Kind::Config, format!("{option}: must be a number of seconds from 0 up"))
    })
}
