//! The server's side of a connection set-up, as small as a test needs it.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Buf, BytesMut};
use dcp_consumer::{ConnectOptions, Credentials};
use dcp_wire::sasl::{Mechanism, PlainMessage, ScramCredentials, ScramServer};
use dcp_wire::{Frame, Opcode, Status};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub(crate) const PASSWORD: &str = "pass-word-never-shown";
const CONFIG: &[u8] = br#"{"rev":1,"name":"default","uuid":"ab","nodeLocator":"vbucket",
    "nodesExt":[{"services":{"kv":11210},"thisNode":true}],
    "vBucketServerMap":{"serverList":["$HOST:11210"],"vBucketMap":[[0],[0]]}}"#;
const MANIFEST: &[u8] = br#"{"uid":"0","scopes":[]}"#;

/// What the service does differently from a good one.
#[derive(Clone, Default)]
pub(crate) struct DataService {
    /// Answers in place of the usual ones.
    pub(crate) instead: Vec<(Opcode, Status)>,
    pub(crate) mechanisms: Option<&'static [u8]>,
    /// Answers are written one byte at a time.
    pub(crate) dribbles: bool,
    /// Written behind the answer to DCP_OPEN's last control.
    pub(crate) trailer: &'static [u8],
    /// The connection is closed instead of answering this.
    pub(crate) closes_at: Option<Opcode>,
}

impl DataService {
    pub(crate) fn refusing(opcode: Opcode, status: Status) -> Self {
        Self { instead: vec![(opcode, status)], ..Self::default() }
    }

    /// Serves plain connections; the port to connect to.
    pub(crate) async fn start(self) -> SocketAddr {
        serve(move |stream| {
            let service = self.clone();
            async move { service.run(stream).await }
        })
        .await
    }

    /// Serves one connection until it is closed.
    pub(crate) async fn run(self, mut stream: impl AsyncRead + AsyncWrite + Unpin) {
        let mut input = BytesMut::new();
        let mut scram = None;
        loop {
            let mut output = BytesMut::new();
            while let Ok(Some((frame, len))) = Frame::parse(&input, 1 << 20) {
                if self.closes_at == Some(frame.header.opcode) {
                    return;
                }
                self.answer(&frame, &mut scram, &mut output);
                input.advance(len);
            }
            let chunk = if self.dribbles { 1 } else { output.len().max(1) };
            for part in output.chunks(chunk) {
                if stream.write_all(part).await.and(stream.flush().await).is_err() {
                    return;
                }
                if self.dribbles {
                    tokio::task::yield_now().await;
                }
            }
            // A byte that begins no packet ends the connection, as a data service does.
            if Frame::parse(&input, 1 << 20).is_err() {
                return;
            }
            if stream.read_buf(&mut input).await.unwrap_or(0) == 0 {
                return;
            }
        }
    }

    fn answer(&self, frame: &Frame<'_>, scram: &mut Option<ScramServer>, out: &mut BytesMut) {
        let opcode = frame.header.opcode;
        let (mut status, mut value) = (Status::SUCCESS, Vec::new());
        match opcode {
            Opcode::HELLO => value = frame.value.to_vec(),
            Opcode::SASL_LIST_MECHS => {
                value = self.mechanisms.unwrap_or(b"SCRAM-SHA512 SCRAM-SHA1 PLAIN").to_vec();
            }
            Opcode::SASL_AUTH => match Mechanism::from_name(frame.key).unwrap() {
                Mechanism::Plain => {
                    let message = PlainMessage::decode(frame.value).unwrap();
                    if !message.matches("user", PASSWORD) {
                        status = Status::AUTH_ERROR;
                    }
                }
                mechanism => {
                    let credentials =
                        ScramCredentials::derive(mechanism, PASSWORD, b"0123456789abcdef", 4096);
                    let server = scram.insert(ScramServer::read(frame.value).unwrap());
                    value = server.challenge(credentials.unwrap(), "serverNonce").unwrap();
                    status = Status::AUTH_CONTINUE;
                }
            },
            Opcode::SASL_STEP => match scram.take().unwrap().verify(frame.value) {
                Ok(last) => value = last,
                Err(_) => status = Status::AUTH_ERROR,
            },
            Opcode::GET_CLUSTER_CONFIG => value = CONFIG.to_vec(),
            Opcode::GET_COLLECTIONS_MANIFEST => value = MANIFEST.to_vec(),
            _ => {}
        }
        if let Some(&(_, instead)) = self.instead.iter().find(|(refused, _)| *refused == opcode) {
            (status, value) = (instead, Vec::new());
        }
        let answer = Frame::response(opcode, status).with_opaque(frame.header.opaque);
        answer.with_value(&value).encode(out).unwrap();
        if opcode == Opcode::DCP_CONTROL && frame.key == b"max_marker_version" {
            out.extend_from_slice(self.trailer);
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
        .with_credentials(Credentials::new("user", PASSWORD))
        .with_connect_timeout(Duration::from_secs(5))
}
