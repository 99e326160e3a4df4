//! One end of a connection, scripted by a test, over any transport.

use std::time::Duration;

use bytes::BytesMut;
use dcp_wire::{Frame, Opaque, Opcode, Status};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::packet::{Packet, encoded};

/// Default limit on waiting for an expected packet; [`Peer::with_limit`] sets another.
const LIMIT: Duration = Duration::from_secs(30);

/// A transport for a peer.
pub trait Wire: AsyncRead + AsyncWrite + Unpin {}

impl<W: AsyncRead + AsyncWrite + Unpin> Wire for W {}

/// One end of a connection, which sends and receives on request.
#[derive(Debug)]
pub struct Peer<W> {
    /// The transport.
    pub io: W,
    /// Bytes received but not taken yet.
    pub input: BytesMut,
    limit: Duration,
    asked: u32,
}

impl<W: Wire> Peer<W> {
    /// A peer over `io`.
    pub fn new(io: W) -> Self {
        Self { io, input: BytesMut::new(), limit: LIMIT, asked: 1000 }
    }

    /// Sets the limit on waiting; in simulated time it may be a week.
    #[must_use]
    pub fn with_limit(self, limit: Duration) -> Self {
        Self { limit, ..self }
    }

    /// Sends bytes.
    ///
    /// # Panics
    /// If they cannot be sent.
    pub async fn send(&mut self, bytes: &[u8]) {
        self.io.write_all(bytes).await.expect("the other end takes it");
    }

    /// Sends a packet.
    ///
    /// # Panics
    /// If it cannot be sent.
    pub async fn send_frame(&mut self, frame: &Frame<'_>) {
        self.send(&encoded(frame)).await;
    }

    /// The next packet; `None` once the other end has closed the connection.
    ///
    /// # Panics
    /// If invalid bytes are received.
    pub async fn next(&mut self) -> Option<Packet> {
        loop {
            if let Some(packet) = Packet::take(&mut self.input) {
                return Some(packet);
            }
            // A reset, or our own cut, counts as closed.
            if !matches!(self.io.read_buf(&mut self.input).await, Ok(1..)) {
                return None;
            }
        }
    }

    /// Expects a packet.
    ///
    /// # Panics
    /// If there is none.
    pub async fn receive(&mut self) -> Packet {
        let packet = timeout(self.limit, self.next()).await;
        packet.expect("nothing came").expect("the connection was closed")
    }

    /// Sends a request and returns its response, which must be the next packet.
    ///
    /// # Panics
    /// If another packet comes first.
    pub async fn ask(&mut self, request: Frame<'_>) -> Packet {
        self.asked += 1;
        let opaque = Opaque(self.asked);
        self.send_frame(&request.with_opaque(opaque)).await;
        let answer = self.receive().await;
        let wanted = (request.header.opcode, opaque);
        assert_eq!((answer.opcode(), answer.opaque()), wanted, "answers come in order");
        answer
    }

    /// Sends a request and expects a response with `status`.
    ///
    /// # Panics
    /// If the response differs.
    pub async fn ask_for(&mut self, request: Frame<'_>, status: Status) -> Packet {
        let answer = self.ask(request).await;
        assert_eq!(answer.status(), status, "{:?}", request.header.opcode);
        answer
    }

    /// Logs in with PLAIN and selects a bucket.
    ///
    /// # Panics
    /// If the server refuses.
    pub async fn log_in(&mut self, username: &str, password: &str, bucket: &str) {
        let message = dcp_wire::sasl::encode_plain(username, password).expect("a password");
        let auth = Frame::request(Opcode::SASL_AUTH).with_key(b"PLAIN").with_value(&message);
        self.ask_for(auth, Status::SUCCESS).await;
        let select = Frame::request(Opcode::SELECT_BUCKET).with_key(bucket.as_bytes());
        self.ask_for(select, Status::SUCCESS).await;
    }

    /// Expects the other end to close the connection without another packet.
    ///
    /// # Panics
    /// If it does not, or sends a packet.
    pub async fn expect_end(&mut self) {
        let packet = timeout(self.limit, self.next()).await.expect("it stays open");
        assert!(packet.is_none(), "{packet:?}");
    }

    /// Expects that nothing is received for a while.
    ///
    /// # Panics
    /// If something is received.
    pub async fn expect_silence(&mut self, a_while: Duration) {
        let packet = timeout(a_while, self.next()).await;
        assert!(packet.is_err(), "{packet:?}");
    }

    /// All bytes received until the other end closes the connection.
    ///
    /// # Panics
    /// If it stays open.
    pub async fn rest(mut self) -> Vec<u8> {
        while self.more().await > 0 {}
        self.input.to_vec()
    }

    /// Expects `len` bytes.
    ///
    /// # Panics
    /// If fewer are received.
    pub async fn bytes(&mut self, len: usize) -> Vec<u8> {
        while self.input.len() < len {
            assert_ne!(self.more().await, 0, "the connection was closed");
        }
        self.input.split_to(len).to_vec()
    }

    async fn more(&mut self) -> usize {
        let read = timeout(self.limit, self.io.read_buf(&mut self.input)).await;
        read.expect("nothing came").expect("the connection holds")
    }
}
