//! The error type of this crate.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use dcp_proto::checkpoint::CheckpointError;
use dcp_proto::consumer::{Failure, ProtocolError};
use dcp_proto::topology::Address;
use dcp_wire::{DecodeError, Opcode, Seqno, Status, Vbid};

type Source = Box<dyn StdError + Send + Sync + 'static>;

/// Kind of an error; decides whether a retry can help.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The user lacks a privilege.
    AccessDenied,
    /// User name, password, token or certificate were refused.
    Authentication,
    /// There is no such bucket.
    BucketNotFound,
    /// A checkpoint is damaged, or belongs to another bucket or filter.
    Checkpoint,
    /// The client or the stream has been closed on this side.
    Closed,
    /// An option is invalid.
    Config,
    /// A connection could not be made: unknown host, refused, unreachable.
    Connect,
    /// A connection was lost.
    ConnectionLost,
    /// The peer does not speak the protocol: it is another service, or expects TLS or no TLS.
    NotCouchbase,
    /// The peer broke the protocol.
    Protocol,
    /// A vBucket was rolled back, and the stream is configured to fail then; or its first load was
    /// interrupted again and again, below the server's purge seqno.
    Rollback,
    /// The sink could not take a change.
    Sink,
    /// The server refused a request with a status.
    Status,
    /// A stream ended permanently before its end was reached.
    StreamEnded,
    /// Something took longer than allowed.
    Timeout,
    /// The TLS handshake failed.
    Tls,
    /// The server lacks a required feature.
    Unsupported,
    /// The same packet ended three connections without progress of its vBucket in between, or bytes
    /// that are no packet did without progress of any vBucket.
    UnusablePacket,
}

impl ErrorKind {
    /// A short name for programs, such as `connection_lost`.
    #[must_use]
    pub const fn code(self) -> &'static str {
        match self {
            Self::AccessDenied => "access_denied",
            Self::Authentication => "authentication",
            Self::BucketNotFound => "bucket_not_found",
            Self::Checkpoint => "checkpoint",
            Self::Closed => "closed",
            Self::Config => "config",
            Self::Connect => "connect",
            Self::ConnectionLost => "connection_lost",
            Self::NotCouchbase => "not_couchbase",
            Self::Protocol => "protocol",
            Self::Rollback => "rollback",
            Self::Sink => "data",
            Self::Status => "status",
            Self::StreamEnded => "stream_ended",
            Self::Timeout => "timeout",
            Self::Tls => "tls",
            Self::Unsupported => "unsupported",
            Self::UnusablePacket => "unusable_packet",
        }
    }

    const fn is_retryable(self) -> bool {
        matches!(self, Self::Connect | Self::ConnectionLost | Self::Timeout)
    }
}

impl From<Failure> for ErrorKind {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Authentication => Self::Authentication,
            Failure::AccessDenied => Self::AccessDenied,
            Failure::BucketNotFound => Self::BucketNotFound,
            Failure::Unsupported => Self::Unsupported,
            Failure::Refused => Self::Status,
        }
    }
}

struct Inner {
    kind: ErrorKind,
    message: String,
    options: &'static [&'static str],
    value: Option<String>,
    source: Option<Source>,
    status: Option<Status>,
    opcode: Option<Opcode>,
    vbid: Option<Vbid>,
    seqno: Option<Seqno>,
}

/// Why something failed.
///
/// The message says what to check; causes are in the [source](StdError::source) chain, which
/// [`Chain`] includes. Neither ever contains a document's key or value, or a secret.
pub struct Error(Box<Inner>);

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner {
            kind,
            message: message.into(),
            options: &[],
            value: None,
            source: None,
            status: None,
            opcode: None,
            vbid: None,
            seqno: None,
        }))
    }

    /// Options are wrong, alone or together. `problem` names no option.
    pub(crate) fn option(options: &'static [&'static str], problem: impl Into<String>) -> Self {
        let mut error = Self::new(ErrorKind::Config, problem);
        error.0.options = options;
        error
    }

    /// The same with the value of an option; never a secret.
    pub(crate) fn with_value(mut self, value: impl Into<String>) -> Self {
        self.0.value = Some(value.into());
        self
    }

    pub(crate) fn with_source(mut self, source: impl Into<Source>) -> Self {
        self.0.source = Some(source.into());
        self
    }

    pub(crate) fn with_status(mut self, status: Status) -> Self {
        self.0.status = Some(status);
        self
    }

    pub(crate) fn with_opcode(mut self, opcode: Opcode) -> Self {
        self.0.opcode = Some(opcode);
        self
    }

    pub(crate) fn with_vbid(mut self, vbid: Vbid) -> Self {
        self.0.vbid = Some(vbid);
        self
    }

    pub(crate) fn with_rollback_seqno(mut self, seqno: Seqno) -> Self {
        self.0.seqno = Some(seqno);
        self
    }

    /// The same with another kind.
    pub(crate) fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// The same with a message that includes its causes.
    pub(crate) fn with_message(mut self, message: String) -> Self {
        (self.0.message, self.0.options, self.0.source) = (message, &[], None);
        self
    }

    /// The same with more to say after its text.
    pub(crate) fn followed_by(mut self, text: &str) -> Self {
        self.0.message.push_str(text);
        self
    }

    /// The same with the address of its node.
    pub(crate) fn of_node(mut self, address: &Address) -> Self {
        self.0.message = format!("{address}: {}", self.0.message);
        self
    }

    /// A packet has ended too many connections.
    pub(crate) fn unusable_packet(packet: &ProtocolError) -> Self {
        let message = format!(
            "the server keeps sending a packet that cannot be used ({packet}): please report this, \
             and leave the vBucket out to read the others"
        );
        let mut error = Self::new(ErrorKind::UnusablePacket, message).with_vbid(packet.vbid);
        error.0.seqno = packet.seqno;
        error.with_opcode(packet.opcode).with_source(*packet)
    }

    /// Bytes that are no packet have ended too many connections to a node.
    pub(crate) fn unusable_bytes(node: &Address, error: DecodeError) -> Self {
        let message = format!(
            "{node} keeps sending bytes that are no packet ({error}): look for what may alter them on \
             the way, such as a proxy, or else please report this"
        );
        Self::new(ErrorKind::UnusablePacket, message).with_source(error)
    }

    /// A vBucket was unreachable for the whole retry timeout.
    ///
    /// The kind is that of the last failure if something must be corrected, such as a password, and
    /// [`ErrorKind::Timeout`] if the cluster did not answer.
    pub(crate) fn out_of_reach(vbid: Vbid, waited: Duration, cause: Option<Arc<Self>>) -> Self {
        let message = match waited.as_secs_f64() {
            // There was no retry.
            ..0.05 => format!("{vbid} could not be reached"),
            seconds => format!("{vbid} could not be reached for {seconds:.1} s"),
        };
        let Some(cause) = cause else {
            let message = format!("{message}: check the cluster");
            return Self::new(ErrorKind::Timeout, message).with_vbid(vbid);
        };
        let kind = match cause.kind() {
            kind @ (ErrorKind::AccessDenied
            | ErrorKind::Authentication
            | ErrorKind::BucketNotFound
            | ErrorKind::Status
            | ErrorKind::Tls
            | ErrorKind::Unsupported)
                if !cause.is_retryable() =>
            {
                kind
            }
            _ => ErrorKind::Timeout,
        };
        let mut error = Self::new(kind, format!("{message}: {}", Chain(&cause)));
        error.0.status = cause.status();
        error.0.opcode = cause.opcode();
        error.with_vbid(vbid).with_source(cause)
    }

    /// Kind of the error.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Whether the same call may succeed later without a change on this side.
    #[must_use]
    pub fn is_retryable(&self) -> bool {
        self.0.kind.is_retryable() || self.0.status.is_some_and(Status::is_temporary)
    }

    /// The options that are wrong, by the names of their fields; the text begins with them.
    #[must_use]
    pub fn options(&self) -> &'static [&'static str] {
        self.0.options
    }

    /// The value of the first of these options, if it is known and no secret.
    #[must_use]
    pub fn value(&self) -> Option<&str> {
        self.0.value.as_deref()
    }

    /// Status of the server, if that caused the error.
    #[must_use]
    pub fn status(&self) -> Option<Status> {
        self.0.status
    }

    /// vBucket of the error, if any.
    #[must_use]
    pub fn vbid(&self) -> Option<Vbid> {
        self.0.vbid
    }

    /// Opcode of the request that was refused, or of the packet that cannot be used.
    #[must_use]
    pub fn opcode(&self) -> Option<Opcode> {
        self.0.opcode
    }

    /// Seqno of the error: the target for [`ErrorKind::Rollback`]; that of the packet for
    /// [`ErrorKind::UnusablePacket`].
    #[must_use]
    pub fn seqno(&self) -> Option<Seqno> {
        self.0.seqno
    }
}

/// Shows a duration in seconds with at most three digits, so that an option of three seconds reads
/// so even where a little of it has passed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seconds(pub(crate) Duration);

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs_f64();
        let decimals = match seconds {
            ..0.1 => 3,
            ..1.0 => 2,
            ..100.0 => 1,
            _ => 0,
        };
        let rounded = format!("{seconds:.decimals$}");
        let rounded = match rounded.contains('.') {
            true => rounded.trim_end_matches('0').trim_end_matches('.'),
            false => &rounded,
        };
        write!(f, "{rounded} s")
    }
}

/// Shows an error with its causes in one line, each once.
///
/// ```
/// # use dcp_consumer::Chain;
/// let error: Box<dyn std::error::Error> = "x".parse::<u8>().unwrap_err().into();
/// assert_eq!(Chain(&*error).to_string(), "invalid digit found in string");
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a>(pub &'a (dyn StdError + 'static));

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        let mut source = self.0.source();
        while let Some(cause) = source {
            let cause_text = cause.to_string();
            // Some errors show their cause in their own text.
            if !text.contains(&cause_text) {
                text.push_str(": ");
                text.push_str(&cause_text);
            }
            source = cause.source();
        }
        f.write_str(&text)
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.0.options.is_empty() {
            write!(f, "{}: ", self.0.options.join(", "))?;
        }
        f.write_str(&self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Error");
        debug.field("kind", &self.0.kind).field("message", &self.0.message);
        if !self.0.options.is_empty() {
            debug.field("options", &self.0.options);
        }
        if let Some(value) = &self.0.value {
            debug.field("value", value);
        }
        if let Some(status) = self.0.status {
            debug.field("status", &status);
        }
        if let Some(opcode) = self.0.opcode {
            debug.field("opcode", &opcode);
        }
        if let Some(vbid) = self.0.vbid {
            debug.field("vbid", &vbid);
        }
        if let Some(seqno) = self.0.seqno {
            debug.field("seqno", &seqno);
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
    fn error_has_the_size_of_one_word() {
        assert_eq!(size_of::<Error>(), size_of::<usize>());
        assert_eq!(size_of::<Result<(), Error>>(), size_of::<usize>());
    }

    #[test]
    fn error_is_retryable_for_lost_connections_and_busy_servers_only() {
        assert!(Error::new(ErrorKind::ConnectionLost, "x").is_retryable());
        assert!(Error::new(ErrorKind::Status, "x").with_status(Status::ETMPFAIL).is_retryable());
        assert!(!Error::new(ErrorKind::Status, "x").with_status(Status::EINVAL).is_retryable());
        assert!(!Error::new(ErrorKind::Authentication, "x").is_retryable());
    }

    #[test]
    fn durations_are_shown_as_they_were_given() {
        for (nanos, shown) in [
            (2_999_997_386, "3 s"),
            (10_000_000_000, "10 s"),
            (200_000_000, "0.2 s"),
            (199_990_000, "0.2 s"),
            (1_500_000_000, "1.5 s"),
            (300_004_000_000, "300 s"),
            (5_000_000, "0.005 s"),
            (0, "0 s"),
        ] {
            assert_eq!(Seconds(Duration::from_nanos(nanos)).to_string(), shown);
        }
    }

    #[test]
    fn option_error_begins_with_its_options() {
        let error = Error::option(&["bucket", "network"], "they differ").with_value("travel");
        assert_eq!(error.kind(), ErrorKind::Config);
        assert_eq!((error.options(), error.value()), (&["bucket", "network"][..], Some("travel")));
        assert_eq!(error.to_string(), "bucket, network: they differ");
        let other = error.with_message("something else".to_owned());
        assert_eq!((other.options(), other.to_string()), (&[][..], "something else".to_owned()));
    }

    #[test]
    fn error_keeps_vbucket_seqno_and_source() {
        let error = Error::new(ErrorKind::Rollback, "vBucket 7 was rolled back")
            .with_vbid(Vbid(7))
            .with_rollback_seqno(Seqno(41))
            .with_source(CheckpointError::OtherShape { found: 1, expected: 2 });
        assert_eq!((error.vbid(), error.seqno()), (Some(Vbid(7)), Some(Seqno(41))));
        assert_eq!(error.to_string(), "vBucket 7 was rolled back");
        assert!(error.source().is_some());
    }
    #[test]
    fn error_shows_its_causes_to_the_last_and_each_once() {
        let last = std::io::Error::other("connection reset by peer");
        let shown = Error::new(ErrorKind::Protocol, format!("no answer: {last}")).with_source(last);
        let outer = Error::new(ErrorKind::Timeout, "gave up").with_source(shown);
        assert_eq!(Chain(&outer).to_string(), "gave up: no answer: connection reset by peer");
    }

    #[test]
    fn error_kinds_tell_misconfiguration_from_an_unavailable_cluster() {
        let out_of_reach = |kind| {
            let cause =
                Error::new(kind, "the cause").with_source(std::io::Error::other("the last"));
            Error::out_of_reach(Vbid(7), Duration::from_secs(5), Some(Arc::new(cause)))
        };
        for (kind, told) in [
            (ErrorKind::Authentication, ErrorKind::Authentication),
            (ErrorKind::BucketNotFound, ErrorKind::BucketNotFound),
            (ErrorKind::Tls, ErrorKind::Tls),
            (ErrorKind::NotCouchbase, ErrorKind::Timeout),
            (ErrorKind::Connect, ErrorKind::Timeout),
            (ErrorKind::ConnectionLost, ErrorKind::Timeout),
        ] {
            assert_eq!(out_of_reach(kind).kind(), told, "{kind:?}");
        }
        let error = out_of_reach(ErrorKind::Connect);
        assert_eq!(error.vbid(), Some(Vbid(7)));
        let text = "vb:7 could not be reached for 5.0 s: the cause: the last";
        assert_eq!((error.to_string(), Chain(&error).to_string()), (text.into(), text.into()));
    }
}
