//! Servers whose answers to a connecting client are of every layout.

use std::collections::{BTreeMap, VecDeque};
use std::error::Error as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, TableOptions, TableSchema};
use dcp_consumer::{
    Chain, Client, ConnectOptions, Credentials, Dial, Dialing, End, Error, ErrorKind, Start,
    Transport,
};
use dcp_e2e::options;
use dcp_meter::alone;
use dcp_producer::{Producer, ProducerOptions, WriteOptions};
use dcp_proto::topology::Address;
use dcp_test::login::{Login, PASSWORD, USERNAME};
use dcp_test::packet::encoded;
use dcp_test::peer::Peer;
use dcp_wire::sasl::{MIN_ITERATIONS, Mechanism, ScramCredentials};
use dcp_wire::{Datatype, Frame, MAX_BODY_LEN, Opaque, Opcode, Status, snappy};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use crate::layouts::layouts;
use crate::tally::{Outcome, PATIENCE, PROBE, Report, SOON, Tally};

/// What the client may hold beyond what it was sent and what an idle connection holds.
const BEYOND: usize = 64 << 10;

const CONFIG: &[u8] = br#"{"rev":3,"name":"default","uuid":"ab","nodesExt":[{"services":{"kv":9}}],"vBucketServerMap":{"serverList":["$HOST:9"],"vBucketMap":[[0]]}}"#;
const REFUSAL: &[u8] = br#"{"error":{"context":"no"}}"#;

/// What is sent in every layout.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Sent {
    /// The usual answer.
    Answer,
    /// A refusal of that request, with a reason.
    Refusal(Status),
    /// The usual answer, compressed.
    Compressed,
    /// The cluster map, unasked.
    Push,
    /// A noop.
    Noop,
}

/// The moment at which it is sent: at which request with an opcode, counted from 0.
type Moment = (Opcode, usize, Sent);

/// What a client is sent until it knows the bucket.
const UNTIL_CONNECTED: [Moment; 12] = [
    (Opcode::HELLO, 0, Sent::Answer),
    (Opcode::HELLO, 0, Sent::Noop),
    (Opcode::SASL_LIST_MECHS, 0, Sent::Answer),
    (Opcode::SASL_AUTH, 0, Sent::Answer),
    (Opcode::SASL_AUTH, 0, Sent::Refusal(Status::AUTH_ERROR)),
    (Opcode::SASL_STEP, 0, Sent::Answer),
    (Opcode::SELECT_BUCKET, 0, Sent::Answer),
    (Opcode::SELECT_BUCKET, 0, Sent::Refusal(Status::EACCESS)),
    (Opcode::GET_CLUSTER_CONFIG, 0, Sent::Answer),
    (Opcode::GET_CLUSTER_CONFIG, 0, Sent::Push),
    (Opcode::GET_COLLECTIONS_MANIFEST, 0, Sent::Answer),
    (Opcode::GET_COLLECTIONS_MANIFEST, 0, Sent::Compressed),
];

/// What it is sent after that, until it requests a stream that starts at the latest change.
const UNTIL_STREAM: [Moment; 7] = [
    (Opcode::DCP_OPEN, 0, Sent::Answer),
    (Opcode::DCP_OPEN, 0, Sent::Refusal(Status::EACCESS)),
    (Opcode::DCP_CONTROL, 0, Sent::Answer),
    (Opcode::DCP_CONTROL, 3, Sent::Answer),
    (Opcode::DCP_CONTROL, 3, Sent::Refusal(Status::EINVAL)),
    (Opcode::GET_ALL_VB_SEQNOS, 0, Sent::Answer),
    (Opcode::DCP_GET_FAILOVER_LOG, 0, Sent::Answer),
];

/// Nothing out of the ordinary.
const NEVER: Moment = (Opcode::NOOP, 0, Sent::Answer);

/// Leads every connection to the test, whatever the address.
#[derive(Clone, Debug)]
struct Door {
    listener: Arc<TcpListener>,
    address: SocketAddr,
    opened: mpsc::UnboundedSender<TcpStream>,
}

impl Dial for Door {
    fn dial(&self, _: &Address) -> Dialing {
        let door = self.clone();
        Box::pin(async move {
            let client = TcpStream::connect(door.address).await?;
            let (server, _) = door.listener.accept().await?;
            for socket in [&client, &server] {
                socket.set_nodelay(true)?;
            }
            let _ = door.opened.send(server);
            Ok(Box::new(client) as Box<dyn Transport>)
        })
    }
}

/// The server's part of one connection.
#[derive(Debug)]
struct Server {
    peer: Peer<TcpStream>,
    login: Login,
    /// Requests that arrived meanwhile.
    waiting: VecDeque<dcp_test::packet::Packet>,
    asked: BTreeMap<u8, usize>,
}

impl Server {
    fn new(socket: TcpStream, credentials: &ScramCredentials) -> Self {
        let login = Login {
            credentials: Some(credentials.clone()),
            mechanisms: b"PLAIN SCRAM-SHA1",
            instead: vec![
                (Opcode::GET_CLUSTER_CONFIG, Status::SUCCESS, CONFIG),
                (Opcode::GET_ALL_VB_SEQNOS, Status::SUCCESS, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 7]),
                (Opcode::DCP_GET_FAILOVER_LOG, Status::SUCCESS, &[1; 16]),
                (Opcode::DCP_STREAM_REQ, Status::SUCCESS, &[1; 16]),
            ],
            ..Login::default()
        };
        Self { peer: Peer::new(socket), login, waiting: VecDeque::new(), asked: BTreeMap::new() }
    }

    /// Answers until the client closes the connection. At one moment a packet is sent in one of its
    /// layouts: returns what came of that, `None` if there is no such moment or layout.
    async fn serve(mut self, moment: Moment, number: usize) -> Option<Report> {
        let mut report = None;
        loop {
            let request = match self.waiting.pop_front() {
                Some(request) => request,
                None => match self.peer.next().await {
                    Some(request) => request,
                    None => return report,
                },
            };
            let frame = request.frame();
            if frame.header.magic.is_response() {
                continue;
            }
            let opcode = request.opcode();
            let nth = self.asked.entry(opcode.0).or_default();
            let now = (opcode, *nth, moment.2);
            *nth += 1;
            let answer = self.login.answer(&request);
            if now == moment && report.is_none() {
                let layout = layouts(&packet(moment.2, &answer)).into_iter().nth(number)?;
                let probed = Report::of(layout, async |layout: &[u8]| self.probe(layout).await);
                let probed = report.insert(probed.await);
                if probed.outcome != Outcome::Tolerated {
                    return report;
                }
            }
            // Whatever was taken for the answer, this one is the second then.
            if self.peer.io.write_all(&answer).await.is_err() {
                return report;
            }
        }
    }

    /// Sends a packet and a noop, which a client answers at any time.
    async fn probe(&mut self, layout: &[u8]) -> Outcome {
        let noop = encoded(&Frame::request(Opcode::DCP_NOOP).with_opaque(PROBE));
        let sent = [layout, &noop].concat();
        if self.peer.io.write_all(&sent).await.is_err() {
            return Outcome::Closed;
        }
        let answer = async {
            while let Some(packet) = self.peer.next().await {
                if packet.opaque() == PROBE && packet.frame().header.magic.is_response() {
                    return Outcome::Tolerated;
                }
                self.waiting.push_back(packet);
            }
            Outcome::Closed
        };
        // Where a packet ends elsewhere, the noop is a part of it or of the next one.
        let is_cut = match Frame::parse(layout, MAX_BODY_LEN) {
            Ok(Some((_, len))) => len != layout.len(),
            Ok(None) => true,
            Err(_) => false,
        };
        let patience = if is_cut { SOON / 10 } else { PATIENCE };
        let outcome = timeout(patience, answer).await;
        assert!(outcome.is_ok() || is_cut, "neither answered nor closed: {layout:02x?}");
        outcome.unwrap_or(Outcome::Waited)
    }
}

/// What is sent, given the usual answer.
fn packet(sent: Sent, answer: &[u8]) -> Vec<u8> {
    let (frame, _) = Frame::parse(answer, MAX_BODY_LEN).expect("made so").expect("whole");
    let (opcode, opaque) = (frame.header.opcode, frame.header.opaque);
    match sent {
        Sent::Answer => answer.to_vec(),
        Sent::Refusal(status) => {
            let refusal = Frame::response(opcode, status).with_opaque(opaque);
            encoded(&refusal.with_value(REFUSAL).with_datatype(Datatype::JSON))
        }
        Sent::Compressed => {
            let value = snappy::compress(frame.value).expect("short");
            encoded(&frame.with_value(&value).with_datatype(Datatype::SNAPPY))
        }
        Sent::Push => {
            let push = Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_key(b"default");
            encoded(&push.with_extras(&[0; 16]).with_value(br#"{"rev":9}"#))
        }
        Sent::Noop => encoded(&Frame::request(Opcode::DCP_NOOP).with_opaque(Opaque(9))),
    }
}

/// A client whose connections lead to the test.
struct Rig {
    connect: ConnectOptions,
    sockets: mpsc::UnboundedReceiver<TcpStream>,
    credentials: ScramCredentials,
}

impl Rig {
    async fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a port");
        let address = listener.local_addr().expect("it is bound");
        let (opened, sockets) = mpsc::unbounded_channel();
        let mut connect = ConnectOptions::new("couchbase://127.0.0.1:9")
            .with_bucket("default")
            .with_credentials(Credentials::new(USERNAME, PASSWORD))
            .with_sasl_mechanisms([Mechanism::ScramSha1]);
        connect.dialer = Some(Arc::new(Door { listener: Arc::new(listener), address, opened }));
        connect.connect_timeout = PATIENCE * 2;
        let credentials = ScramCredentials::derive(
            Mechanism::ScramSha1,
            PASSWORD,
            b"0123456789abcdef",
            // Thousands of connections are made.
            MIN_ITERATIONS,
        );
        Self { connect, sockets, credentials: credentials.expect("an ordinary password") }
    }

    /// Serves the connections that `work` makes, the first one with a packet in one of its layouts.
    async fn play<T>(
        &mut self,
        moment: Moment,
        number: usize,
        work: impl Future<Output = T>,
    ) -> (Option<Report>, T) {
        let (credentials, sockets) = (&self.credentials, &mut self.sockets);
        // Of attempts that were given up.
        while sockets.try_recv().is_ok() {}
        let (working, mut done) = oneshot::channel::<()>();
        let serve = async {
            let socket = sockets.recv().await.expect("the door is there");
            let report = Server::new(socket, credentials).serve(moment, number).await;
            loop {
                tokio::select! {
                    _ = &mut done => return report,
                    again = sockets.recv() => {
                        let socket = again.expect("the door is there");
                        Server::new(socket, credentials).serve(NEVER, 0).await;
                    }
                }
            }
        };
        let work = async {
            let result = work.await;
            drop(working);
            result
        };
        tokio::join!(serve, work)
    }

    async fn connect(&mut self, moment: Moment, number: usize) -> Option<Report> {
        let connect = Client::connect(self.connect.clone());
        let (report, connected) = self.play(moment, number, connect).await;
        let report = report?;
        check(moment, &report, connected.err());
        Some(report)
    }

    async fn stream(&mut self, client: &Client, moment: Moment, number: usize) -> Option<Report> {
        let mut options = options(Start::Latest, End::Never);
        options.retry_timeout = Duration::ZERO;
        let schema = TableSchema::new(&TableOptions::default()).expect("the basic columns");
        let sink = move || {
            ArrowSink::new(schema.clone(), CollectionNames::default(), BatchLimits::default())
        };
        // The stream is dropped at once, and its connection with it.
        let open = async { client.stream(options, sink).await.map(drop) };
        let (report, opened) = self.play(moment, number, open).await;
        let report = report?;
        check(moment, &report, opened.err());
        Some(report)
    }
}

/// A client that closes the connection says why.
fn check(moment: Moment, report: &Report, error: Option<Error>) {
    let Some(error) = error else { return };
    let shown = Chain(&error).to_string();
    // A stream does not try again: the time for that is over, and why is the cause.
    let is_typed = error.kind() != ErrorKind::Timeout || error.source().is_some();
    assert!(is_typed && !shown.contains("panicked"), "{moment:?} {report:02x?}: {shown}");
}

#[test]
fn a_client_connects_or_fails_with_a_cause_whatever_the_layout_of_an_answer() {
    let _alone = alone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let tally = runtime.expect("a runtime").block_on(async {
        let mut options = ProducerOptions::default();
        options.vbuckets = 1;
        let producer = Producer::start(options).await.expect("loopback ports are there");
        let mut other = crate::servers::undisturbed(&producer).await;
        let mut rig = Rig::start().await;
        let mut tally = Tally::default();
        for moment in UNTIL_CONNECTED {
            let mut number = 0;
            while let Some(report) = rig.connect(moment, number).await {
                number += usize::from(tally.add(moment, &report, BEYOND));
            }
            assert!(number > 50, "{moment:?} did not come");
        }
        let connect = Client::connect(rig.connect.clone());
        let (_, client) = rig.play(NEVER, 0, connect).await;
        let client = client.expect("an ordinary server");
        for moment in UNTIL_STREAM {
            let mut number = 0;
            while let Some(report) = rig.stream(&client, moment, number).await {
                number += usize::from(tally.add(moment, &report, BEYOND));
            }
            assert!(number > 50, "{moment:?} did not come");
        }
        producer.upsert(b"k", "1".into(), WriteOptions::default()).expect("there is room");
        let batch = timeout(PATIENCE, other.next()).await.expect("others are not disturbed");
        let batch = batch.expect("it is endless").expect("its server is a good one").batch;
        assert_eq!(batch.finish().expect("a batch").num_rows(), 1);
        tally
    });
    tally.judge([5_000, 501, 501]);
}
