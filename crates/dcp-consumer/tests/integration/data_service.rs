//! The server's side of a connection set-up, as small as a test needs it.

use std::net::SocketAddr;
use std::time::Duration;

use dcp_consumer::{ConnectOptions, Credentials};
use dcp_test::login::{Login, PASSWORD, USERNAME};
use dcp_test::peer::{Peer, Wire};
use dcp_wire::{Opcode, Status};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

/// What the service does differently from a good one.
#[derive(Clone, Default)]
pub(crate) struct DataService {
    pub(crate) login: Login,
    /// Answers are written one byte at a time.
    pub(crate) dribbles: bool,
    /// Written behind the answer to DCP_OPEN's last control.
    pub(crate) trailer: &'static [u8],
    /// The connection is closed instead of answering this.
    pub(crate) closes_at: Option<Opcode>,
}

impl DataService {
    pub(crate) fn refusing(opcode: Opcode, status: Status) -> Self {
        Self { login: Login::answering(opcode, status, b""), ..Self::default() }
    }

    /// Serves plain connections; the port to connect to.
    pub(crate) async fn start(self) -> SocketAddr {
        serve(move |stream| {
            let service = self.clone();
            async move { service.run(stream).await }
        })
        .await
    }

    /// Serves one connection until it is closed. A byte that begins no packet ends the task and so
    /// the connection, which a data service closes too.
    pub(crate) async fn run(mut self, stream: impl Wire) {
        let mut peer = Peer::new(stream);
        while let Some(request) = peer.next().await {
            if self.closes_at == Some(request.opcode()) {
                return;
            }
            let mut answer = self.login.answer(&request);
            if request.frame().key == b"max_marker_version" {
                answer.extend_from_slice(self.trailer);
            }
            let chunk = if self.dribbles { 1 } else { answer.len() };
            for part in answer.chunks(chunk) {
                if peer.io.write_all(part).await.and(peer.io.flush().await).is_err() {
                    return;
                }
                if self.dribbles {
                    tokio::task::yield_now().await;
                }
            }
        }
    }
}

/// Runs `handle` for every connection; the port to connect to.
pub(crate) async fn serve<F, H>(handle: H) -> SocketAddr
where
    H: Fn(TcpStream) -> F + Send + 'static,
    F: Future<Output = ()> + Send + 'static,
{
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(handle(stream));
        }
    });
    address
}

/// Options for a server on loopback, with the right password.
pub(crate) fn options(connection_string: impl Into<String>) -> ConnectOptions {
    ConnectOptions::new(connection_string)
        .with_bucket("default")
        .with_credentials(Credentials::new(USERNAME, PASSWORD))
        .with_connect_timeout(Duration::from_secs(5))
}
