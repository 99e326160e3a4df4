//! TLS handshakes: from a TCP connection to a client that may be known by its certificate.

use std::time::Duration;

use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::kv::Credentials;
use crate::tls;

/// How long a client may take for its handshake.
const PATIENCE: Duration = Duration::from_secs(10);

/// A client after its handshake.
#[derive(Debug)]
pub(super) struct Shaken {
    pub(super) stream: TlsStream<TcpStream>,
    /// Its certificate is the user's.
    pub(super) is_certified: bool,
}

/// Shakes hands; `None` if that fails, or the client's certificate is for somebody unknown.
pub(super) async fn shake(
    acceptor: &TlsAcceptor,
    socket: TcpStream,
    credentials: &Credentials,
) -> Option<Shaken> {
    let stream = match tokio::time::timeout(PATIENCE, acceptor.accept(socket)).await {
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
