//! A client that sends exactly what it is told to.

use std::time::Duration;

use bytes::{Buf, BytesMut};
use dcp_producer::Producer;
use dcp_wire::message::{BufferAck, Control, Open, OpenFlags, StreamRequest, StreamRequestFlags};
use dcp_wire::sasl::{Mechanism, ScramClient};
use dcp_wire::{Feature, Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid, sasl};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;

/// Longest wait for something that must come.
const PATIENCE: Duration = Duration::from_secs(30);

/// One whole packet.
#[derive(Clone, Debug)]
pub(crate) struct Packet(Vec<u8>);

impl Packet {
    pub(crate) fn frame(&self) -> Frame<'_> {
        let (frame, used) = Frame::parse(&self.0, MAX_BODY_LEN).unwrap().unwrap();
        assert_eq!(used, self.0.len());
        frame
    }

    pub(crate) fn opcode(&self) -> Opcode {
        self.frame().header.opcode
    }

    pub(crate) fn status(&self) -> Status {
        assert!(self.frame().header.magic.is_response(), "{:?} is no response", self.frame());
        self.frame().header.status()
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn opaque(&self) -> u32 {
        self.frame().header.opaque.0
    }
}

/// What a client may speak over.
pub(crate) trait Socket: AsyncRead + AsyncWrite + Unpin + Send + std::fmt::Debug {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send + std::fmt::Debug> Socket for S {}

/// A connection to one node.
#[derive(Debug)]
pub(crate) struct RawClient {
    socket: Box<dyn Socket>,
    input: BytesMut,
    next_opaque: u32,
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
        Self { socket: Box::new(socket), input: BytesMut::new(), next_opaque: 1000 }
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
        self.socket.write_all(bytes).await.unwrap();
    }

    /// Sends to a server that may have closed the connection.
    pub(crate) async fn try_send(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.socket.write_all(bytes).await
    }

    /// Whether the server answers at all.
    pub(crate) async fn try_hello(&mut self) -> bool {
        let mut out = BytesMut::new();
        Frame::request(Opcode::HELLO).encode(&mut out).unwrap();
        self.try_send(&out).await.is_ok() && self.next().await.is_some()
    }

    /// Sends a request and returns its answer.
    pub(crate) async fn ask(&mut self, request: Frame<'_>) -> Packet {
        self.next_opaque += 1;
        let opaque = self.next_opaque;
        let mut out = BytesMut::new();
        request.with_opaque(Opaque(opaque)).encode(&mut out).unwrap();
        self.send(&out).await;
        let answer = self.receive().await;
        assert_eq!(
            (answer.opcode(), answer.opaque()),
            (request.header.opcode, opaque),
            "answers come in order"
        );
        answer
    }

    /// Sends a request that must succeed.
    pub(crate) async fn succeed(&mut self, request: Frame<'_>) -> Packet {
        let answer = self.ask(request).await;
        assert_eq!(answer.status(), Status::SUCCESS, "{:?}", request.header.opcode);
        answer
    }

    /// Sends a request that must be refused with `status`.
    pub(crate) async fn fail(&mut self, request: Frame<'_>, status: Status) -> Packet {
        let answer = self.ask(request).await;
        assert_eq!(answer.status(), status, "{:?}", request.header.opcode);
        answer
    }

    /// The next packet, which must come.
    pub(crate) async fn receive(&mut self) -> Packet {
        let packet = tokio::time::timeout(PATIENCE, self.next()).await;
        packet.expect("nothing came").expect("the server closed the connection")
    }

    /// The next packet; `None` if the server closed the connection.
    async fn next(&mut self) -> Option<Packet> {
        loop {
            let parsed = Frame::parse(&self.input, MAX_BODY_LEN).unwrap();
            if let Some(len) = parsed.map(|(_, len)| len) {
                let packet = Packet(self.input[..len].to_vec());
                self.input.advance(len);
                return Some(packet);
            }
            match self.socket.read_buf(&mut self.input).await {
                Ok(0) => return None,
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Expects the server to close the connection without another packet.
    pub(crate) async fn expect_end(&mut self) {
        let packet = tokio::time::timeout(PATIENCE, self.next()).await;
        let packet = packet.expect("the connection stays open");
        assert!(packet.is_none(), "{packet:?}");
    }

    /// Expects nothing to come for a while.
    pub(crate) async fn expect_silence(&mut self) {
        let packet = tokio::time::timeout(Duration::from_millis(200), self.next()).await;
        assert!(packet.is_err(), "{packet:?}");
    }

    /// Every byte that comes until the server closes the connection.
    pub(crate) async fn rest(mut self) -> Vec<u8> {
        let read = self.socket.read_buf(&mut self.input);
        let mut more = tokio::time::timeout(PATIENCE, read).await.expect("it stays open").unwrap();
        while more > 0 {
            let read = self.socket.read_buf(&mut self.input);
            more = tokio::time::timeout(PATIENCE, read).await.expect("it stays open").unwrap();
        }
        self.input.to_vec()
    }

    /// The next `len` bytes, which must come.
    pub(crate) async fn bytes(&mut self, len: usize) -> Vec<u8> {
        while self.input.len() < len {
            let read = self.socket.read_buf(&mut self.input);
            let read = tokio::time::timeout(PATIENCE, read).await.expect("nothing came");
            assert_ne!(read.unwrap(), 0, "the server closed the connection");
        }
        self.input.split_to(len).to_vec()
    }
}
