//! Maps the engine's errors to exceptions of `dcp_rs.exceptions`.

use std::error::Error as _;

use dcp_arrow::SchemaError;
use dcp_consumer::plan::PlannerError;
use dcp_consumer::{Chain, Error as ConsumerError, ErrorKind};
use dcp_producer::{DocumentError, Error as ProducerError, RuleError};
use dcp_proto::checkpoint::{CheckpointError, Form};
use dcp_proto::plan::PlanError;
use dcp_proto::{InvalidRowFilter, SinkError};
use dcp_wire::{DecodeError, Seqno, Status, Vbid};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};

/// Classes of `dcp_rs.exceptions`, each without the `Error` at the end of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    AccessDenied,
    Authentication,
    BucketNotFound,
    Checkpoint,
    Closed,
    ConcurrentWriter,
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
    /// Without the options.
    message: String,
    /// The options that are wrong, by their names in Python.
    options: Vec<String>,
    value: Option<Value>,
    vbid: Option<Vbid>,
    seqno: Option<Seqno>,
    status: Option<Status>,
    is_retryable: bool,
}

/// The value of a wrong option; `ConfigError` leaves out secrets.
#[derive(Debug)]
enum Value {
    Text(String),
    Given(Py<PyAny>),
}

impl Failure {
    /// Options are wrong, alone or together. `problem` names no option.
    pub(crate) fn option(options: &[&str], problem: impl Into<String>) -> Self {
        let options = options.iter().copied().map(ToOwned::to_owned).collect();
        Self { options, ..Self::coded(Kind::Config, "config", problem) }
    }

    /// The same with the value of the first option.
    pub(crate) fn with_value(mut self, value: &Bound<'_, PyAny>) -> Self {
        self.value = Some(Value::Given(value.clone().unbind()));
        self
    }

    fn with_text(mut self, value: Option<&str>) -> Self {
        self.value = value.map(|value| Value::Text(value.to_owned()));
        self
    }

    pub(crate) fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            code: None,
            message: message.into(),
            options: Vec::new(),
            value: None,
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
        let exception = if self.options.is_empty() {
            class.call1((self.message,))?
        } else {
            let named = PyDict::new(py);
            named.set_item("option", PyTuple::new(py, self.options)?)?;
            match self.value {
                Some(Value::Text(value)) => named.set_item("value", value)?,
                Some(Value::Given(value)) => named.set_item("value", value)?,
                None => {}
            }
            class.call((self.message,), Some(&named))?
        };
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
        let text = Chain(&error).to_string();
        let shown = format!("{}: ", error.options().join(", "));
        Self {
            kind,
            code: Some(code),
            options: error.options().iter().map(|option| in_python(option).to_owned()).collect(),
            value: error.value().map(|value| Value::Text(value.to_owned())),
            vbid: error.vbid(),
            seqno: error.seqno(),
            status: error.status(),
            is_retryable: error.is_retryable(),
            message: text.strip_prefix(&shown).map_or_else(|| text.clone(), ToOwned::to_owned),
        }
    }
}

/// Options of the engine that have another name in Python.
const IN_PYTHON: [(&str, &str); 4] =
    [("acknowledge", "ack"), ("end", "until"), ("history", "include"), ("batch_token", "batch")];

/// What an option of the engine is called in Python.
fn in_python(option: &str) -> &str {
    IN_PYTHON.iter().find(|(name, _)| *name == option).map_or(option, |(_, python)| python)
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
        Self::option(error.options(), error.to_string()).with_text(error.value())
    }
}

impl From<InvalidRowFilter> for Failure {
    fn from(error: InvalidRowFilter) -> Self {
        Self::option(&[error.option()], error.to_string())
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
            DocumentError::InvalidKey { .. } => return Self::option(&["key"], error.to_string()),
            DocumentError::ValueTooLarge { .. } | DocumentError::InvalidValue => {
                return Self::option(&["value"], error.to_string());
            }
            DocumentError::NotFound => (Kind::DocumentNotFound, "document_not_found"),
            DocumentError::Exists => (Kind::DocumentExists, "document_exists"),
            DocumentError::CasMismatch(_) => (Kind::DocumentExists, "cas_mismatch"),
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
        let option = error.option();
        let text = match error {
            ProducerError::InvalidOption { reason, .. } => reason,
            error => Chain(&error).to_string(),
        };
        Self {
            options: option.into_iter().map(ToOwned::to_owned).collect(),
            ..Self::coded(kind, code, text)
        }
    }
}

impl From<RuleError> for Failure {
    fn from(error: RuleError) -> Self {
        let text = Chain(&error).to_string();
        Self { code: Some("fault_rule"), ..Self::option(&["rules"], text) }
    }
}
