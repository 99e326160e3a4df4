//! Errors for connections that cannot be made, with what to check at each stage.

use std::io;
use std::time::Duration;

use dcp_proto::consumer::{BootstrapError, Reaction, Step, Token};
use dcp_proto::topology::Address;
use dcp_wire::message::Control;
use dcp_wire::{DecodeError, Feature, Opcode};

use crate::error::Seconds;
use crate::{Chain, Error, ErrorKind, tls};

/// Stage of a connection attempt, for timeouts.
#[derive(Clone, Copy)]
pub(super) enum Stage {
    Credentials,
    Resolve,
    Tcp,
    Tls,
    Bootstrap { heard: bool },
}

impl Stage {
    pub(super) fn timed_out(self, address: &Address, limit: Duration) -> Error {
        let what = match self {
            Self::Credentials => return no_credentials(limit),
            Self::Resolve => "the host name was not resolved: check it and the name servers",
            Self::Tcp => "the host does not answer: check the address, the port and firewalls",
            Self::Tls => {
                "the TLS handshake was not answered: check that the port speaks TLS (11207)"
            }
            Self::Bootstrap { heard: false } => {
                "connected, but the peer does not answer: check that the port is the data \
                 service's (11210, with TLS 11207)"
            }
            Self::Bootstrap { heard: true } => {
                "the server began to answer but did not finish: it may be overloaded or starting"
            }
        };
        let limit = Seconds(limit);
        let message = format!("connecting to {address} took longer than {limit}: {what}");
        Error::new(ErrorKind::Timeout, message)
    }
}

/// The source of the credentials does not answer.
pub(super) fn no_credentials(limit: Duration) -> Error {
    let message = format!("the credentials were not available within {}", Seconds(limit));
    Error::new(ErrorKind::Authentication, message)
}

/// The connection ended during set-up.
pub(super) fn lost(address: &Address, heard: bool, error: Option<io::Error>) -> Error {
    let tls_alert = error.as_ref().and_then(tls::alert_advice);
    let lost = if let Some(advice) = tls_alert {
        // With TLS 1.3, a server checks the client's certificate after the handshake.
        Error::new(ErrorKind::Tls, format!("{address} ended the TLS connection: {advice}"))
    } else if heard {
        let message = format!("{address} closed the connection during set-up");
        Error::new(ErrorKind::ConnectionLost, message)
    } else {
        let message = format!(
            "{address} closed the connection without an answer: check that the port is the data \
             service's, and use couchbases:// if it speaks TLS"
        );
        Error::new(ErrorKind::NotCouchbase, message)
    };
    match error {
        Some(error) => lost.with_source(error),
        None => lost,
    }
}

pub(super) fn set_up_failed(address: &Address, error: &BootstrapError) -> Error {
    use BootstrapError as E;

    if let E::FeatureMissing(Feature::DCP_SKIP_DELETES_IN_INITIAL_BACKFILL) = error {
        let problem = format!(
            "{address} cannot leave out the deletions of first loads, which needs a server newer \
             than 8.0: deliver them, or skip them if supported"
        );
        return Error::option(&["initial_deletions"], problem);
    }
    let kind = match error {
        E::AuthenticationFailed { .. } | E::Sasl(_) => ErrorKind::Authentication,
        E::TokenRefused { .. } | E::TokenStale => ErrorKind::Authentication,
        E::BucketNotFound { .. } => ErrorKind::BucketNotFound,
        E::BucketAccess { .. } | E::DcpAccess => ErrorKind::AccessDenied,
        E::ControlRefused { status, .. } => match Reaction::to(Step::RequiredControl, *status) {
            Reaction::Fail(failure) => failure.into(),
            _ => ErrorKind::Status,
        },
        E::FeatureMissing(_) | E::NoTokens => ErrorKind::Unsupported,
        // A node that has just started receives it within seconds.
        E::NoConfig { .. } => ErrorKind::Connect,
        E::Status { .. } => ErrorKind::Status,
        E::TooLong { .. } => ErrorKind::Config,
        E::Decode(DecodeError::InvalidMagic(first)) => {
            return not_couchbase(address, *first);
        }
        _ => ErrorKind::Protocol,
    };
    let advice = match error {
        E::ControlRefused { key: Control::CHANGE_STREAMS, .. }
            if kind == ErrorKind::Unsupported =>
        {
            "; history needs Couchbase Server 7.2 and a bucket stored with Magma: leave it out to \
             read the newest versions"
        }
        _ => "",
    };
    let failed = Error::new(kind, format!("{address}: {}{advice}", Chain(error)));
    let failed = match refused_opcode(error) {
        Some(opcode) => failed.with_opcode(opcode),
        None => failed,
    };
    match error.status() {
        Some(status) => failed.with_status(status),
        None => failed,
    }
}

/// Says what to do about a token that the server did not accept; it is `wall` now, counted from 1970.
pub(super) fn about_token(error: Error, token: &Token, wall: Duration) -> Error {
    if error.kind() != ErrorKind::Authentication {
        return error;
    }
    let Some(expires) = token.expires() else {
        return error.followed_by(": check that the cluster trusts its issuer");
    };
    match wall.checked_sub(expires) {
        Some(ago) => {
            let ago = Seconds(ago);
            error.followed_by(&format!(", which expired {ago} ago: give a newer one"))
        }
        None => error.followed_by(
            ": check that the cluster trusts its issuer, that the token is meant for it, and this \
             machine's clock",
        ),
    }
}

/// The request that was refused, if that matters for retries.
const fn refused_opcode(error: &BootstrapError) -> Option<Opcode> {
    use BootstrapError as E;

    match error {
        E::DcpAccess => Some(Opcode::DCP_OPEN),
        E::BucketNotFound { .. } | E::BucketAccess { .. } => Some(Opcode::SELECT_BUCKET),
        E::NoConfig { .. } => Some(Opcode::GET_CLUSTER_CONFIG),
        E::ControlRefused { .. } => Some(Opcode::DCP_CONTROL),
        E::Status { opcode, .. } => Some(*opcode),
        _ => None,
    }
}

/// The first byte of an answer shows what is listening there.
fn not_couchbase(address: &Address, first: u8) -> Error {
    let what = match first {
        0x15 | 0x16 => "it speaks TLS: use couchbases://, or the plain port (11210)",
        b'H' => "it speaks HTTP: use the data service's port (11210, with TLS 11207)",
        _ => "use the data service's port (11210, with TLS 11207)",
    };
    let message = format!("{address} is not a Couchbase data service port: {what}");
    Error::new(ErrorKind::NotCouchbase, message)
}
