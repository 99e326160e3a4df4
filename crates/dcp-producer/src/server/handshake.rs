//! TLS handshakes, and authentication by client certificate.

use std::time::Duration;

use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::kv::Credentials;
use crate::tls;

/// How long a client may take for its handshake.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A client after its handshake.
#[derive(Debug)]
pub(super) struct Shaken {
    pub(super) stream: TlsStream<TcpStream>,
    /// Whether its certificate names the user.
    pub(super) is_certified: bool,
}

/// Performs the handshake; `None` if it fails, or if the client's certificate names an unknown
/// user.
pub(super) async fn shake(
    acceptor: &TlsAcceptor,
    socket: TcpStream,
    credentials: &Credentials,
) -> Option<Shaken> {
    let stream = match tokio::time::timeout(ANSWER_TIMEOUT, acceptor.accept(socket)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => {
            tracing::debug!(%error, "TLS handshake failed");
            return None;
        }
        Err(_) => {
            tracing::debug!("TLS handshake took too long");
            return None;
        }
    };
    let is_certified = match stream.get_ref().1.peer_certificates().and_then(<[_]>::first) {
        None => false,
        Some(certificate) => {
            if tls::common_name(certificate).as_deref() != Some(credentials.username()) {
                tracing::debug!("a client certificate names an unknown user");
                return None;
            }
            true
        }
    };
    Some(Shaken { stream, is_certified })
}
