//! Maps the engine's errors to exceptions of `dcp_rs.exceptions`.

use std::error::Error as _;

use dcp_arrow::SchemaError;
use dcp_consumer::plan::PlannerError;
use dcp_consumer::{Chain, Error as ConsumerError, ErrorKind};
use dcp_producer::{DocumentError, Error as ProducerError, RuleError};
use dcp_proto::SinkError;
use dcp_proto::checkpoint::{CheckpointError, Form};
use dcp_proto::plan::PlanError;
use dcp_wire::{DecodeError, Seqno, Status, Vbid};
use pyo3::prelude::*;

/// Classes of `dcp_rs.exceptions`, each without the `Error` at the end of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AccessDenied,
    Authentication,
    BucketNotFound,
    Checkpoint,
    Closed,
    Config,
    Connect,
    Data,
    Dcp,
    DocumentExists,
    DocumentNotFound,
    ForkedProcess,
    Protocol,
    Rollback,
    Server,
    StreamEnded,
    Timeout,
    Unsupported,
    UnusablePacket,
}

/// A failure that becomes an exception.
#[derive(Debug)]
pub(crate) struct Failure {
    kind: Kind,
    code: Option<&'static str>,
    message: String,
    vbid: Option<Vbid>,
    seqno: Option<Seqno>,
    status: Option<Status>,
    is_retryable: bool,
}

impl Failure {
    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            code: None,
            message: message.into(),
            vbid: None,
            seqno: None,
            status: None,
            is_retryable: false,
        }
    }

    fn coded(kind: Kind, code: &'static str, message: impl Into<String>) -> Self {
        Self { code: Some(code), ..Self::new(kind, message) }
    }

    fn into_exception(self, py: Python<'_>) -> PyResult<PyErr> {
        let class = py.import("dcp_rs.exceptions")?.getattr(format!("{:?}Error", self.kind))?;
        let exception = class.call1((self.message,))?;
        if let Some(code) = self.code {
            exception.setattr("code", code)?;
        }
        if let Some(vbid) = self.vbid {
            exception.setattr("vbucket", vbid.0)?;
        }
        if let Some(seqno) = self.seqno {
            exception.setattr("seqno", seqno.0)?;
        }
        if let Some(status) = self.status {
            exception.setattr("status", status.0)?;
        }
        if self.is_retryable {
            exception.setattr("is_retryable", true)?;
        }
        Ok(PyErr::from_value(exception))
    }
}

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        Python::attach(|py| failure.into_exception(py).unwrap_or_else(|error| error))
    }
}

const fn class(kind: ErrorKind) -> Kind {
    match kind {
        ErrorKind::AccessDenied => Kind::AccessDenied,
        ErrorKind::Authentication => Kind::Authentication,
        ErrorKind::BucketNotFound => Kind::BucketNotFound,
        ErrorKind::Checkpoint => Kind::Checkpoint,
        ErrorKind::Closed => Kind::Closed,
        ErrorKind::Config => Kind::Config,
        ErrorKind::Connect
        | ErrorKind::ConnectionLost
        | ErrorKind::NotCouchbase
        | ErrorKind::Tls => Kind::Connect,
        ErrorKind::Protocol => Kind::Protocol,
        ErrorKind::Rollback => Kind::Rollback,
        ErrorKind::Sink => Kind::Data,
        ErrorKind::Status => Kind::Server,
        ErrorKind::StreamEnded => Kind::StreamEnded,
        ErrorKind::Timeout => Kind::Timeout,
        ErrorKind::Unsupported => Kind::Unsupported,
        ErrorKind::UnusablePacket => Kind::UnusablePacket,
        _ => Kind::Dcp,
    }
}

/// The kind of a checkpoint error.
const fn checkpoint_code(error: &CheckpointError) -> &'static str {
    match error {
        CheckpointError::OtherBucket { .. } | CheckpointError::OtherShape { .. } => {
            "bucket_changed"
        }
        CheckpointError::OtherFilter(_) | CheckpointError::MixedFilters { .. } => "filter_changed",
        CheckpointError::Damaged { form, .. } | CheckpointError::Version { form, .. } => match form
        {
            Form::Offsets => "offsets",
            Form::Plan => "plan",
            _ => "checkpoint",
        },
        _ => "checkpoint",
    }
}

impl From<ConsumerError> for Failure {
    fn from(error: ConsumerError) -> Self {
        let (kind, code) = (class(error.kind()), error.kind().code());
        let checkpoint = error.source().and_then(|source| source.downcast_ref());
        let code = checkpoint.map_or(code, checkpoint_code);
        Self {
            kind,
            code: Some(code),
            vbid: error.vbid(),
            seqno: error.seqno(),
            status: error.status(),
            is_retryable: error.is_retryable(),
            message: Chain(&error).to_string(),
        }
    }
}

impl From<SinkError> for Failure {
    fn from(error: SinkError) -> Self {
        let (code, vbid, seqno) = match error {
            SinkError::Unrepresentable { vbid, seqno, .. } => ("data", Some(vbid), Some(seqno)),
            SinkError::Malformed { vbid, seqno, .. } => ("malformed", Some(vbid), Some(seqno)),
            _ => ("data", None, None),
        };
        let mut message = error.to_string();
        // It names no key, so that it says how to find the document.
        if let SinkError::Malformed { vbid, seqno, .. } = error {
            message +=
                &format!("; to see it: dcp-rs show CONNSTR --vbucket {} --seqno {seqno}", vbid.0);
        }
        Self { vbid, seqno, ..Self::coded(Kind::Data, code, message) }
    }
}

impl From<CheckpointError> for Failure {
    fn from(error: CheckpointError) -> Self {
        let code = checkpoint_code(&error);
        let kind = if code == "plan" { Kind::Config } else { Kind::Checkpoint };
        Self::coded(kind, code, error.to_string())
    }
}

impl From<PlanError> for Failure {
    fn from(error: PlanError) -> Self {
        let (kind, code, vbid, seqno) = match error {
            PlanError::RolledBack { vbid, common, .. } => {
                (Kind::Rollback, "rollback", Some(vbid), Some(common))
            }
            PlanError::Purged { vbid, purge, .. } => (Kind::Data, "data_loss", Some(vbid), purge),
            PlanError::NotPersisted { vbid, persisted, .. } => {
                (Kind::Timeout, "not_persisted", Some(vbid), Some(persisted))
            }
            _ => (Kind::Dcp, "plan", None, None),
        };
        Self { vbid, seqno, ..Self::coded(kind, code, error.to_string()) }
    }
}

impl From<PlannerError> for Failure {
    fn from(error: PlannerError) -> Self {
        match error {
            PlannerError::Cluster(error) => error.into(),
            PlannerError::Plan(error) => error.into(),
            PlannerError::Checkpoint(error) => error.into(),
            error => Self::new(Kind::Dcp, error.to_string()),
        }
    }
}

impl From<SchemaError> for Failure {
    fn from(error: SchemaError) -> Self {
        Self::coded(Kind::Config, "config", error.to_string())
    }
}

impl From<DecodeError> for Failure {
    fn from(error: DecodeError) -> Self {
        Self::coded(Kind::Protocol, "protocol", error.to_string())
    }
}

impl From<DocumentError> for Failure {
    fn from(error: DocumentError) -> Self {
        let (kind, code) = match error {
            DocumentError::NotFound => (Kind::DocumentNotFound, "document_not_found"),
            DocumentError::Exists => (Kind::DocumentExists, "document_exists"),
            DocumentError::CasMismatch(_) => (Kind::DocumentExists, "cas_mismatch"),
            DocumentError::InvalidKey { .. }
            | DocumentError::ValueTooLarge { .. }
            | DocumentError::InvalidValue => (Kind::Config, "config"),
            _ => (Kind::Dcp, "document"),
        };
        Self::coded(kind, code, error.to_string())
    }
}

impl From<ProducerError> for Failure {
    fn from(error: ProducerError) -> Self {
        let (kind, code) = match &error {
            ProducerError::Document(document) => return (*document).into(),
            ProducerError::Listen { .. } => (Kind::Connect, "listen"),
            _ => (Kind::Config, "config"),
        };
        Self::coded(kind, code, Chain(&error).to_string())
    }
}

impl From<RuleError> for Failure {
    fn from(error: RuleError) -> Self {
        Self::coded(Kind::Config, "fault_rule", Chain(&error).to_string())
    }
}
