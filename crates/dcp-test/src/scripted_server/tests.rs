//! A hand-written client against scripted servers.

use bytes::{Buf, BytesMut};
use dcp_wire::message::{
    BufferAck, CloseStream, Control, Hello, Open, OpenFlags, Sasl, StreamAddress, StreamRequest,
    StreamRequestFlags, encode_features,
};
use dcp_wire::sasl::{Mechanism, ScramClient};
use dcp_wire::{
    Datatype, Feature, Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::{Duration, timeout};

use super::*;
use crate::traces::{self, EventKind};

const FEATURES: [Feature; 6] = [
    Feature::XATTR,
    Feature::XERROR,
    Feature::SELECT_BUCKET,
    Feature::SNAPPY,
    Feature::JSON,
    Feature::COLLECTIONS,
];

struct Client {
    socket: TcpStream,
    input: BytesMut,
}

impl Client {
    /// Connects and authenticates, and opens a DCP connection.
    async fn open(addr: SocketAddr) -> Self {
        let mut client =
            Self { socket: TcpStream::connect(addr).await.unwrap(), input: BytesMut::new() };
        let mut out = Vec::new();
        let features = encode_features(FEATURES);
        let features = dcp_wire::message::Features::decode(&features).unwrap();
        Hello { agent: b"test", features }.encode(Opaque(1), &mut out).unwrap();
        client.request(&out).await;
        assert_eq!(client.log_in("password").await, Status::SUCCESS);
        let mut out = Vec::new();
        let name: &[u8] = b"test";
        let flags = OpenFlags::PRODUCER;
        let open = Open { flags, name, value: &[], datatype: Datatype::RAW };
        open.encode(Opaque(4), &mut out).unwrap();
        assert_eq!(status(&client.request(&out).await), Status::SUCCESS);
        client
    }

    async fn log_in(&mut self, password: &str) -> Status {
        let mechanism = Mechanism::ScramSha256;
        let mut scram = ScramClient::new(mechanism, "user", password, "client-nonce").unwrap();
        let mut out = Vec::new();
        let first = scram.first_message();
        let mechanism = mechanism.name().as_bytes();
        Sasl { mechanism, message: &first }.encode_auth(Opaque(2), &mut out).unwrap();
        let challenge = self.request(&out).await;
        assert_eq!(status(&challenge), Status::AUTH_CONTINUE);
        let message = scram.respond(&challenge[24..]).unwrap();
        out.clear();
        Sasl { mechanism, message: &message }.encode_step(Opaque(3), &mut out).unwrap();
        let last = self.request(&out).await;
        if status(&last) == Status::SUCCESS {
            scram.verify(&last[24..]).unwrap();
        }
        status(&last)
    }

    async fn send(&mut self, bytes: &[u8]) {
        self.socket.write_all(bytes).await.unwrap();
    }

    async fn request(&mut self, bytes: &[u8]) -> Vec<u8> {
        self.send(bytes).await;
        self.next().await.expect("an answer")
    }

    /// The next packet, `None` at the end of the connection.
    async fn next(&mut self) -> Option<Vec<u8>> {
        loop {
            if let Some((_, used)) = Frame::parse(&self.input, MAX_BODY_LEN).unwrap() {
                let packet = self.input[..used].to_vec();
                self.input.advance(used);
                return Some(packet);
            }
            let read = self.socket.read_buf(&mut self.input);
            let read = timeout(Duration::from_secs(10), read).await.expect("no packet came");
            if read.unwrap_or(0) == 0 {
                return None;
            }
        }
    }

    /// Whether nothing comes for a moment.
    async fn is_quiet(&mut self) -> bool {
        timeout(Duration::from_millis(100), self.next()).await.is_err()
    }

    async fn stream(&mut self, vbid: Vbid, opaque: Opaque) -> Vec<u8> {
        let mut out = Vec::new();
        let request = StreamRequest {
            vbid,
            opaque,
            flags: StreamRequestFlags::empty(),
            start_seqno: Seqno::ZERO,
            end_seqno: Seqno::MAX,
            vbuuid: Vbuuid(0),
            snapshot_start: Seqno::ZERO,
            snapshot_end: Seqno::ZERO,
            value: &[],
        };
        request.encode(&mut out).unwrap();
        self.request(&out).await
    }
}

fn status(packet: &[u8]) -> Status {
    let (frame, _) = Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap();
    frame.header.status()
}

fn opcode(packet: &[u8]) -> Opcode {
    Opcode(packet[1])
}

/// Stream messages of a recording in order, with opaque 0.
fn recorded_messages(scenario: &Scenario) -> Vec<Vec<u8>> {
    let packets = scenario.events.iter().filter_map(|event| match &event.kind {
        EventKind::ServerPacket(bytes) => Some(bytes.clone()),
        _ => None,
    });
    packets
        .filter(|bytes| matches!(bytes[0], 0x80 | 0x08) && opcode(bytes) != Opcode::DCP_NOOP)
        .map(without_opaque)
        .collect()
}

fn without_opaque(mut packet: Vec<u8>) -> Vec<u8> {
    packet[12..16].fill(0);
    packet
}

#[tokio::test]
async fn recording_with_a_crash_is_played_across_two_connections() {
    let scenario = Scenario::load("8.0.2-crash-rollback")
        .or_else(|_| Scenario::load("6.0.5-crash-rollback"))
        .unwrap();
    let server = ScriptedServer::start(&scenario).await.unwrap();
    let vbid = server.vbids()[0];
    let mut played = Vec::new();

    let mut client = Client::open(server.addr()).await;
    assert_eq!(status(&client.stream(vbid, Opaque(77)).await), Status::SUCCESS);
    while let Some(packet) = client.next().await {
        assert_eq!(packet[12..16], 77u32.to_be_bytes());
        played.push(without_opaque(packet));
    }
    let mut client = Client::open(server.addr()).await;
    assert_eq!(status(&client.stream(vbid, Opaque(5)).await), Status::ROLLBACK);
    assert_eq!(status(&client.stream(vbid, Opaque(6)).await), Status::SUCCESS);
    let recorded = recorded_messages(&scenario);
    while played.len() < recorded.len() {
        played.push(without_opaque(client.next().await.unwrap()));
    }
    assert_eq!(played, recorded);
    let report = server.finish().await;
    assert_eq!((report.connections, report.streams_left), (2, 0));
    assert_eq!(report.messages_sent, recorded.len());
    assert_eq!(report.problems, Vec::<String>::new());
}

#[tokio::test]
async fn window_that_is_full_stops_the_stream_until_it_is_acknowledged() {
    let scenario = Scenario::load("8.0.2-flow-control").unwrap();
    let server = ScriptedServer::start(&scenario).await.unwrap();
    let mut client = Client::open(server.addr()).await;
    let mut out = Vec::new();
    Control { key: b"connection_buffer_size", value: b"1024" }.encode(Opaque(9), &mut out).unwrap();
    assert_eq!(status(&client.request(&out).await), Status::SUCCESS);
    let response = client.stream(server.vbids()[0], Opaque(10)).await;
    assert_eq!(status(&response), Status::SUCCESS);

    let mut bytes = 0;
    while bytes < 1024 {
        bytes += client.next().await.unwrap().len();
    }
    // What the recorded server sent before it stopped as well.
    assert_eq!(bytes, 1140);
    assert!(client.is_quiet().await);
    let mut out = Vec::new();
    BufferAck { bytes: 1140 }.encode(&mut out).unwrap();
    client.send(&out).await;
    assert_eq!(opcode(&client.next().await.unwrap()), Opcode::DCP_MUTATION);
}

#[tokio::test]
async fn recording_after_a_close_is_played_when_the_client_closes() {
    let scenario = Scenario::load("8.0.2-close-stream-with-end").unwrap();
    let server = ScriptedServer::start(&scenario).await.unwrap();
    let vbid = server.vbids()[0];
    let mut client = Client::open(server.addr()).await;
    let opaque = Opaque(0x0102_0304);
    assert_eq!(status(&client.stream(vbid, opaque).await), Status::SUCCESS);
    assert_eq!(opcode(&client.next().await.unwrap()), Opcode::DCP_SNAPSHOT_MARKER);
    while !client.is_quiet().await {}

    let mut out = Vec::new();
    let to = StreamAddress { vbid, opaque, stream_id: None };
    CloseStream.encode(to, &mut out).unwrap();
    let answer = client.request(&out).await;
    assert_eq!((opcode(&answer), status(&answer)), (Opcode::DCP_CLOSE_STREAM, Status::SUCCESS));
    let end = client.next().await.unwrap();
    assert_eq!((opcode(&end), end[27]), (Opcode::DCP_STREAM_END, 1));
    assert_eq!(status(&client.request(&out).await), Status::KEY_ENOENT);
}

#[tokio::test]
async fn password_that_is_wrong_is_refused() {
    let scenario = Scenario::load("8.0.2-memory-fresh").unwrap();
    let server = ScriptedServer::start(&scenario).await.unwrap();
    let socket = TcpStream::connect(server.addr()).await.unwrap();
    let mut client = Client { socket, input: BytesMut::new() };
    assert_eq!(client.log_in("another").await, Status::AUTH_ERROR);
}

#[tokio::test]
async fn recordings_play_all_their_streams() {
    let mut streams = 0;
    for scenario in Scenario::load_all().unwrap() {
        for conn in scenario.connections() {
            let server = ScriptedServer::start_connection(&scenario, conn).await.unwrap();
            let left = server.report().streams_left;
            if left == 0 {
                continue;
            }
            let mut client = Client::open(server.addr()).await;
            let mut out = Vec::new();
            for vbid in server.vbids() {
                for _ in 0..left {
                    let request = Frame::request(Opcode::DCP_STREAM_REQ).with_vbid(vbid);
                    request.with_extras(&[0; 48]).encode(&mut out).unwrap();
                }
            }
            // More requests than streams: some get an idle stream or a closed connection.
            let _ = client.socket.write_all(&out).await;
            let deadline = Instant::now() + Duration::from_secs(10);
            while server.report().streams_left > 0 {
                assert!(Instant::now() < deadline, "{} conn {conn}", scenario.name);
                let _ = timeout(Duration::from_millis(1), client.next()).await;
            }
            let report = server.finish().await;
            assert_eq!(report.problems, Vec::<String>::new(), "{} conn {conn}", scenario.name);
            assert_eq!(report.streams_played, left);
            streams += left;
        }
    }
    // Other recordings may be of other things.
    assert!(streams > 0 || !traces::is_own_folder());
}

#[tokio::test]
async fn recording_of_one_request_answers_all_that_ask_in_the_same_way() {
    let scenario = Scenario::load("6.0.5-rollback-purge").unwrap();
    let server = ScriptedServer::start_request(&scenario, 0, 0).await.unwrap();
    let vbid = server.vbids()[0];
    let mut client = Client::open(server.addr()).await;
    assert_eq!(status(&client.stream(vbid, Opaque(1)).await), Status::ROLLBACK, "the one chosen");
    // The recorded client asked from the beginning, too, as its sixth request.
    assert_eq!(status(&client.stream(vbid, Opaque(2)).await), Status::SUCCESS);
    assert_eq!(opcode(&client.next().await.unwrap()), Opcode::DCP_SNAPSHOT_MARKER);
    while !client.is_quiet().await {}
    assert_eq!(status(&client.stream(vbid, Opaque(3)).await), Status::SUCCESS);
    assert!(client.is_quiet().await, "nothing is left");
    let report = server.finish().await;
    assert_eq!(report.played, [(0, 0), (0, 5)]);
    assert_eq!(report.asked.len(), 3);
    assert!(report.asked[0].is_same_range(&report.asked[2]));
    assert_eq!(report.problems, Vec::<String>::new());
}

#[tokio::test]
async fn stream_ids_are_left_out_for_a_client_that_did_not_turn_them_on() {
    let scenario = Scenario::load("8.0.2-stream-id").unwrap();
    for (turn_on, magic) in [(false, 0x80), (true, 0x08)] {
        let server = ScriptedServer::start_request(&scenario, 0, 3).await.unwrap();
        let mut client = Client::open(server.addr()).await;
        if turn_on {
            let mut out = Vec::new();
            let control = Control { key: b"enable_stream_id", value: b"true" };
            control.encode(Opaque(9), &mut out).unwrap();
            assert_eq!(status(&client.request(&out).await), Status::SUCCESS);
        }
        let answer = client.stream(server.vbids()[0], Opaque(1)).await;
        assert_eq!(status(&answer), Status::SUCCESS);
        let marker = client.next().await.unwrap();
        assert_eq!((opcode(&marker), marker[0]), (Opcode::DCP_SNAPSHOT_MARKER, magic));
    }
}

#[tokio::test]
async fn cluster_map_in_a_refusal_is_the_one_of_the_server_and_newer() {
    let scenario = Scenario::load("8.0.2-meta-commands").unwrap();
    let server = ScriptedServer::start_request(&scenario, 0, 0).await.unwrap();
    let mut client = Client::open(server.addr()).await;
    let answer = client.stream(server.vbids()[0], Opaque(1)).await;
    assert_eq!(status(&answer), Status::NOT_MY_VBUCKET);
    let (frame, _) = Frame::parse(&answer, MAX_BODY_LEN).unwrap().unwrap();
    let map: Value = serde_json::from_slice(frame.value).unwrap();
    assert_eq!(map["rev"], 2);
    assert_eq!(map["nodesExt"][0]["services"]["kv"], server.addr().port());
}
