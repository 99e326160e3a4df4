//! The one error of this crate.

use std::error::Error as StdError;
use std::fmt;

use dcp_proto::checkpoint::CheckpointError;
use dcp_wire::{Seqno, Status, Vbid};

type Source = Box<dyn StdError + Send + Sync + 'static>;

/// What kind of thing went wrong; decides whether trying again can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The user may not do that.
    AccessDenied,
    /// User name, password or certificate are refused.
    Authentication,
    /// There is no such bucket.
    BucketNotFound,
    /// A checkpoint is damaged, or belongs to something else.
    Checkpoint,
    /// The client or the stream has been closed on this side.
    Closed,
    /// An option is wrong.
    Config,
    /// A connection could not be made: unknown host, refused, unreachable.
    Connect,
    /// A connection was lost.
    ConnectionLost,
    /// The peer does not speak the protocol: another service, or TLS against plain.
    NotCouchbase,
    /// The peer broke the protocol.
    Protocol,
    /// A vBucket was rolled back, and the stream was told to fail on that.
    Rollback,
    /// The sink could not take a change.
    Sink,
    /// The server refused a request with a status.
    Status,
    /// A stream ended before its end was reached, for good.
    StreamEnded,
    /// Something took longer than allowed.
    Timeout,
    /// The TLS handshake failed.
    Tls,
    /// The server lacks a feature that is needed.
    Unsupported,
}

impl ErrorKind {
    const fn is_retryable(self) -> bool {
        matches!(self, Self::Connect | Self::ConnectionLost | Self::Timeout)
    }
}

struct Inner {
    kind: ErrorKind,
    message: String,
    source: Option<Source>,
    status: Option<Status>,
    vbid: Option<Vbid>,
    rollback_seqno: Option<Seqno>,
}

/// Why something failed.
///
/// The message says what to check; causes are in the [source](StdError::source) chain and not
/// repeated in it. Neither ever holds a document's key or value, or a secret.
pub struct Error(Box<Inner>);

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            source: None,
            status: None,
            vbid: None,
            rollback_seqno: None,
        }))
    }

    pub(crate) fn with_source(mut self, source: impl Into<Source>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    pub(crate) fn with_status(mut self, status: Status) -> Self {
        self.0.status = Some(status);
        self
    }

    pub(crate) fn with_vbid(mut self, vbid: Vbid) -> Self {
        self.0.vbid = Some(vbid);
        self
    }

    pub(crate) fn with_rollback_seqno(mut self, seqno: Seqno) -> Self {
        self.0.rollback_seqno = Some(seqno);
        self
    }

    /// What kind of thing went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the same call may succeed later without anything being changed on this side.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.0.kind.is_retryable() || self.0.status.is_some_and(is_temporary)
    }

    /// What the server answered, if that is what went wrong.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        self.0.status
    }

    /// vBucket concerned, if it is about one.
    #[must_use]
    pub fn vbid(&self) -> Option<Vbid> {
        self.0.vbid
    }

    /// Seqno rolled back to, for [`ErrorKind::Rollback`].
    #[must_use]
    pub fn rollback_seqno(&self) -> Option<Seqno> {
        self.0.rollback_seqno
    }
}

/// Statuses of servers that start, are busy or move things, by themselves.
const fn is_temporary(status: Status) -> bool {
    matches!(
        status,
        Status::EBUSY
            | Status::ENOMEM
            | Status::ETMPFAIL
            | Status::EWOULDTHROTTLE
            | Status::BUCKET_PAUSED
            | Status::ECONFIG_ONLY
            | Status::NOT_INITIALIZED
            | Status::RATE_LIMITED_MAX_COMMANDS
            | Status::RATE_LIMITED_MAX_CONNECTIONS
            | Status::RATE_LIMITED_NETWORK_EGRESS
            | Status::RATE_LIMITED_NETWORK_INGRESS
    )
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Error");
        debug.field("kind", &self.0.kind).field("message", &self.0.message);
        if let Some(status) = self.0.status {
            debug.field("status", &status);
        }
        if let Some(vbid) = self.0.vbid {
            debug.field("vbid", &vbid);
        }
        if let Some(seqno) = self.0.rollback_seqno {
            debug.field("rollback_seqno", &seqno);
        }
        if let Some(source) = &self.0.source {
            debug.field("source", source);
        }
        debug.finish()
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as _)
    }
}

impl From<CheckpointError> for Error {
    fn from(error: CheckpointError) -> Self {
        Self::new(ErrorKind::Checkpoint, "the checkpoint cannot be used").with_source(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_one_word() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
        assert_eq!(size_of::<Result<(), Error>>(), size_of::<usize>());
    }

    #[test]
    fn retrying_helps_with_lost_connections_and_busy_servers_only() {
        assert!(Error::new(ErrorKind::ConnectionLost, "x").is_retryable());
        assert!(Error::new(ErrorKind::Status, "x").with_status(Status::ETMPFAIL).is_retryable());
        assert!(!Error::new(ErrorKind::Status, "x").with_status(Status::EINVAL).is_retryable());
        assert!(!Error::new(ErrorKind::Authentication, "x").is_retryable());
    }

    #[test]
    fn what_is_known_is_kept() {
        let error = Error::new(ErrorKind::Rollback, "vBucket 7 was rolled back")
            .with_vbid(Vbid(7))
            .with_rollback_seqno(Seqno(41))
            .with_source(CheckpointError::Damaged("x"));
        assert_eq!((error.vbid(), error.rollback_seqno()), (Some(Vbid(7)), Some(Seqno(41))));
        assert_eq!(error.to_string(), "vBucket 7 was rolled back");
        assert!(error.source().is_some());
    }
}
