//! The management port: the HTTP requests of DCP clients and SDKs.
//!
//! Answers are derived from the cluster map, so HTTP and KV never disagree. Clients can change
//! buckets, scopes and collections.

mod authorization;
mod body;
mod buckets;
mod documents;
mod form;
mod router;
mod scopes;

use std::convert::Infallible;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::{Body as _, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::cluster::Cluster;
use crate::kv::Credentials;

/// Longest request head in bytes: request line and all headers.
const MAX_HEAD_LEN: usize = 16 << 10;
/// Longest body of a request in bytes.
const MAX_FORM_LEN: usize = 4 << 10;
/// Most headers of a request.
const MAX_HEADERS: usize = 64;
/// How long a client may take to send a request head; also how long a connection may be idle.
const HEAD_TIMEOUT: Duration = Duration::from_secs(60);
/// How long clients may take to read answers once the cluster stops.
const CLOSING_TIMEOUT: Duration = Duration::from_secs(1);

/// State of the management port of one node.
#[derive(Debug)]
pub(crate) struct Management {
    cluster: Arc<Cluster>,
    node: usize,
    credentials: Arc<Credentials>,
    stop: CancellationToken,
    head_timeout: Duration,
}

impl Management {
    pub(crate) fn new(
        cluster: Arc<Cluster>,
        node: usize,
        credentials: Arc<Credentials>,
        stop: CancellationToken,
    ) -> Self {
        Self { cluster, node, credentials, stop, head_timeout: HEAD_TIMEOUT }
    }

    /// The same during another run of the node, which `stop` ends.
    pub(crate) fn during(&self, stop: CancellationToken) -> Self {
        Self {
            cluster: Arc::clone(&self.cluster),
            credentials: Arc::clone(&self.credentials),
            stop,
            ..*self
        }
    }

    /// Serves a connection until it ends. With `is_certified`, the client has authenticated with a
    /// certificate.
    pub(crate) async fn serve(
        self: Arc<Self>,
        socket: impl AsyncRead + AsyncWrite + Unpin + Send,
        is_certified: bool,
    ) {
        let service = service_fn(|request| {
            let management = Arc::clone(&self);
            async move {
                let mut request: Request<Incoming> = request;
                let read = read_form(request.body_mut());
                let form = timeout(management.head_timeout, read).await.ok().flatten();
                Ok::<_, Infallible>(management.answer(&request, form.as_deref(), is_certified))
            }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(self.head_timeout)
            .max_buf_size(MAX_HEAD_LEN)
            .max_headers(MAX_HEADERS)
            .serve_connection(TokioIo::new(socket), service);
        let mut connection = pin!(connection);
        let stopped = self.stop.cancelled();
        let ended = tokio::select! {
            ended = connection.as_mut() => ended,
            () = stopped => {
                connection.as_mut().graceful_shutdown();
                let closed = timeout(CLOSING_TIMEOUT, connection).await;
                closed.unwrap_or(Ok(()))
            }
        };
        if let Err(error) = ended {
            tracing::debug!(%error, "management connection closed");
        }
    }
}

/// The body of a request; `None` if it is too long or incomplete.
async fn read_form(body: &mut Incoming) -> Option<Vec<u8>> {
    let mut form = Vec::new();
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await {
        let data = frame.ok()?.into_data().unwrap_or_default();
        if form.len() + data.len() > MAX_FORM_LEN {
            return None;
        }
        form.extend_from_slice(&data);
    }
    Some(form)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::ProducerOptions;

    fn management() -> Arc<Management> {
        let stop = CancellationToken::new();
        let cluster = Cluster::new(&ProducerOptions::default(), &[], Arc::default(), &stop);
        let credentials = Arc::new(Credentials::new("user", "word", 1, Arc::default()).unwrap());
        let management = Management::new(Arc::new(cluster), 0, credentials, stop);
        Arc::new(Management { head_timeout: Duration::from_millis(50), ..management })
    }

    #[tokio::test]
    async fn http_client_that_says_nothing_or_does_not_finish_is_cut_off() {
        for said in ["", "GET /pools HTTP/1.1\r\nHost: no"] {
            let (mut client, server) = tokio::io::duplex(1 << 10);
            client.write_all(said.as_bytes()).await.unwrap();
            let served = tokio::spawn(management().serve(server, false));
            timeout(Duration::from_secs(5), served).await.unwrap().unwrap();
            let mut answer = String::new();
            client.read_to_string(&mut answer).await.unwrap();
            assert!(!answer.contains(" 200 "), "{answer}");
        }
    }

    #[tokio::test]
    async fn http_connection_is_closed_once_nothing_more_is_requested() {
        let (mut client, server) = tokio::io::duplex(1 << 10);
        let served = tokio::spawn(management().serve(server, true));
        client.write_all(b"GET /whoami HTTP/1.1\r\nHost: node\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        timeout(Duration::from_secs(5), served).await.unwrap().unwrap();
    }
}
