//! A client that sends exactly what it is told to.

use std::time::Duration;

use bytes::BytesMut;
use dcp_producer::Producer;
pub(crate) use dcp_test::packet::Packet;
use dcp_test::packet::encoded;
use dcp_test::peer::Peer;
use dcp_wire::message::{BufferAck, Control, Open, OpenFlags, StreamRequest, StreamRequestFlags};
use dcp_wire::sasl::{Mechanism, ScramClient};
use dcp_wire::{Feature, Frame, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid, sasl};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

/// What a client may speak over.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Unpin + Send + std::fmt::Debug {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + std::fmt::Debug> Socket for S {}

/// A connection to one node.
#[derive(Debug)]
pub(crate) struct RawClient {
    peer: Peer<Box<dyn Socket>>,
}

impl RawClient {
    /// Connects to a node and does nothing else.
    pub(crate) async fn connect(producer: &Producer, node: usize) -> Self {
        let connection_string = producer.connection_string();
        let addresses = connection_string.strip_prefix("couchbase://").unwrap();
        let address = addresses.split(',').nth(node).unwrap();
        let socket = TcpStream::connect(address).await.unwrap();
        socket.set_nodelay(true).unwrap();
        Self::over(socket)
    }

    /// Speaks over a connection that is there already.
    pub(crate) fn over(socket: impl Socket + 'static) -> Self {
        Self { peer: Peer::new(Box::new(socket)) }
    }

    /// Connects, authenticates and selects the bucket.
    pub(crate) async fn ready(producer: &Producer, node: usize, features: &[Feature]) -> Self {
        let mut client = Self::connect(producer, node).await;
        client.hello(features).await;
        client.log_in("Administrator", "password").await;
        client.succeed(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default")).await;
        client
    }

    pub(crate) async fn hello(&mut self, features: &[Feature]) -> Packet {
        let codes: Vec<u8> = features.iter().flat_map(|feature| feature.0.to_be_bytes()).collect();
        let hello = Frame::request(Opcode::HELLO).with_key(b"raw client").with_value(&codes);
        self.succeed(hello).await
    }

    /// Proves the password without telling it.
    pub(crate) async fn log_in_with_scram(&mut self, mechanism: Mechanism) {
        let mut scram =
            ScramClient::new(mechanism, "Administrator", "password", "client nonce").unwrap();
        let name = mechanism.name().as_bytes();
        let first = scram.first_message();
        let auth = Frame::request(Opcode::SASL_AUTH).with_key(name).with_value(&first);
        let challenge = self.ask(auth).await;
        assert_eq!(challenge.status(), Status::AUTH_CONTINUE);
        let last = scram.respond(challenge.frame().value).unwrap();
        let step = Frame::request(Opcode::SASL_STEP).with_key(name).with_value(&last);
        let proof = self.succeed(step).await;
        scram.verify(proof.frame().value).unwrap();
    }

    pub(crate) async fn log_in(&mut self, username: &str, password: &str) {
        let message = sasl::encode_plain(username, password).unwrap();
        let auth = Frame::request(Opcode::SASL_AUTH).with_key(b"PLAIN").with_value(&message);
        self.succeed(auth).await;
    }

    /// Opens the connection for DCP.
    pub(crate) async fn open_dcp(&mut self, name: &[u8], flags: OpenFlags) {
        let mut out = BytesMut::new();
        let open = Open {
            flags: flags | OpenFlags::PRODUCER,
            name,
            value: b"",
            datatype: dcp_wire::Datatype::RAW,
        };
        open.encode(Opaque(1), &mut out).unwrap();
        self.send(&out).await;
        assert_eq!(self.receive().await.status(), Status::SUCCESS);
    }

    pub(crate) async fn control(&mut self, key: &[u8], value: &[u8]) {
        let mut out = BytesMut::new();
        Control { key, value }.encode(Opaque(2), &mut out).unwrap();
        self.send(&out).await;
        assert_eq!(self.receive().await.status(), Status::SUCCESS, "{}", key.escape_ascii());
    }

    pub(crate) async fn acknowledge(&mut self, bytes: u32) {
        let mut out = BytesMut::new();
        BufferAck { bytes }.encode(&mut out).unwrap();
        self.send(&out).await;
    }

    /// Asks for a stream from `start`, which ended a snapshot; returns the answer. The stream's
    /// opaque is the vBucket's number plus one.
    pub(crate) async fn request_stream(
        &mut self,
        vbid: Vbid,
        start: Seqno,
        end: Seqno,
        vbuuid: Vbuuid,
        flags: StreamRequestFlags,
    ) -> Packet {
        let mut out = BytesMut::new();
        let request = StreamRequest {
            vbid,
            opaque: Opaque(u32::from(vbid.0) + 1),
            flags,
            start_seqno: start,
            end_seqno: end,
            vbuuid,
            snapshot_start: start,
            snapshot_end: start,
            value: b"",
        };
        request.encode(&mut out).unwrap();
        self.send(&out).await;
        let answer = self.receive().await;
        assert_eq!(answer.opcode(), Opcode::DCP_STREAM_REQ);
        answer
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) {
        self.peer.send(bytes).await;
    }

    /// Sends to a server that may have closed the connection.
    pub(crate) async fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.peer.io.write_all(bytes).await
    }

    /// Whether the server answers at all.
    pub(crate) async fn try_hello(&mut self) -> bool {
        let hello = encoded(&Frame::request(Opcode::HELLO));
        self.try_send(&hello).await.is_ok() && self.peer.next().await.is_some()
    }

    /// Sends a request and returns its answer.
    pub(crate) async fn ask(&mut self, request: Frame<'_>) -> Packet {
        self.peer.ask(request).await
    }

    /// Sends a request that must succeed.
    pub(crate) async fn succeed(&mut self, request: Frame<'_>) -> Packet {
        self.peer.ask_for(request, Status::SUCCESS).await
    }

    /// Sends a request that must be refused with `status`.
    pub(crate) async fn fail(&mut self, request: Frame<'_>, status: Status) -> Packet {
        self.peer.ask_for(request, status).await
    }

    /// The next packet, which must come.
    pub(crate) async fn receive(&mut self) -> Packet {
        self.peer.receive().await
    }

    /// Expects the server to close the connection without another packet.
    pub(crate) async fn expect_end(&mut self) {
        self.peer.expect_end().await;
    }

    /// Expects nothing to come for a while.
    pub(crate) async fn expect_silence(&mut self) {
        self.peer.expect_silence(Duration::from_millis(200)).await;
    }

    /// Every byte that comes until the server closes the connection.
    pub(crate) async fn rest(self) -> Vec<u8> {
        self.peer.rest().await
    }

    /// What it speaks over; nothing that has come may be left.
    pub(crate) fn into_socket(self) -> Box<dyn Socket> {
        assert!(self.peer.input.is_empty());
        self.peer.io
    }

    /// The next `len` bytes, which must come.
    pub(crate) async fn bytes(&mut self, len: usize) -> Vec<u8> {
        self.peer.bytes(len).await
    }
}
