//! One end of a connection, played by hand over whatever carries bytes.

use std::time::Duration;

use bytes::BytesMut;
use dcp_wire::{Frame, Opaque, Opcode, Status};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use crate::packet::{Packet, encoded};

/// Longest wait for what must come, unless [`Peer::patient`] says otherwise.
const PATIENCE: Duration = Duration::from_secs(30);

/// What a peer may speak over.
pub trait Wire: AsyncRead + AsyncWrite + Unpin {}

impl<W: AsyncRead + AsyncWrite + Unpin> Wire for W {}

/// One end of a connection: says what it is told to, and hands over what comes.
#[derive(Debug)]
pub struct Peer<W> {
    /// What it speaks over.
    pub io: W,
    /// What has come and was not taken.
    pub input: BytesMut,
    patience: Duration,
    asked: u32,
}

impl<W: Wire> Peer<W> {
    /// Speaks over `io`.
    pub fn new(io: W) -> Self {
        Self { io, input: BytesMut::new(), patience: PATIENCE, asked: 1000 }
    }

    /// Waits so long for what must come: in simulated time that may be a week.
    #[must_use]
    pub fn patient(self, patience: Duration) -> Self {
        Self { patience, ..self }
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
    /// If what comes is no packet.
    pub async fn next(&mut self) -> Option<Packet> {
        loop {
            if let Some(packet) = Packet::take(&mut self.input) {
                return Some(packet);
            }
            // One that is reset, or was cut by us, is as closed.
            if !matches!(self.io.read_buf(&mut self.input).await, Ok(1..)) {
                return None;
            }
        }
    }

    /// The next packet, which must come.
    ///
    /// # Panics
    /// If none does.
    pub async fn receive(&mut self) -> Packet {
        let packet = timeout(self.patience, self.next()).await;
        packet.expect("nothing came").expect("the connection was closed")
    }

    /// The next packet of which `is_it` is true; those before it are dropped.
    ///
    /// # Panics
    /// If none comes.
    pub async fn receive_until(&mut self, is_it: impl Fn(&Packet) -> bool) -> Packet {
        loop {
            let packet = self.receive().await;
            if is_it(&packet) {
                return packet;
            }
        }
    }

    /// Sends a request and returns its answer, which must be the next packet.
    ///
    /// # Panics
    /// If another comes.
    pub async fn ask(&mut self, request: Frame<'_>) -> Packet {
        self.asked += 1;
        let opaque = Opaque(self.asked);
        self.send_frame(&request.with_opaque(opaque)).await;
        let answer = self.receive().await;
        let wanted = (request.header.opcode, opaque);
        assert_eq!((answer.opcode(), answer.opaque()), wanted, "answers come in order");
        answer
    }

    /// Sends a request that must be answered with `status`.
    ///
    /// # Panics
    /// If it is not.
    pub async fn ask_for(&mut self, request: Frame<'_>, status: Status) -> Packet {
        let answer = self.ask(request).await;
        assert_eq!(answer.status(), status, "{:?}", request.header.opcode);
        answer
    }

    /// Logs in with a password that goes over the wire, and selects a bucket.
    ///
    /// # Panics
    /// If that is refused.
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
    /// If it does not.
    pub async fn expect_end(&mut self) {
        let packet = timeout(self.patience, self.next()).await.expect("it stays open");
        assert!(packet.is_none(), "{packet:?}");
    }

    /// Expects nothing to come for a while.
    ///
    /// # Panics
    /// If something does.
    pub async fn expect_silence(&mut self, a_while: Duration) {
        let packet = timeout(a_while, self.next()).await;
        assert!(packet.is_err(), "{packet:?}");
    }

    /// Every byte that comes until the other end closes the connection.
    ///
    /// # Panics
    /// If it stays open.
    pub async fn rest(mut self) -> Vec<u8> {
        while self.more().await > 0 {}
        self.input.to_vec()
    }

    /// The next `len` bytes, which must come.
    ///
    /// # Panics
    /// If they do not.
    pub async fn bytes(&mut self, len: usize) -> Vec<u8> {
        while self.input.len() < len {
            assert_ne!(self.more().await, 0, "the connection was closed");
        }
        self.input.split_to(len).to_vec()
    }

    async fn more(&mut self) -> usize {
        let read = timeout(self.patience, self.io.read_buf(&mut self.input)).await;
        read.expect("nothing came").expect("the connection holds")
    }
}
