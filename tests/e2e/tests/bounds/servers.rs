//! Servers that send packets of every layout to a client.

use dcp_test::packet::encoded;
use dcp_test::peer::Peer;
use dcp_test::with;
use std::error::Error as _;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, PendingBatch, TableOptions, TableSchema};
use dcp_consumer::{
    Chain, ChangeStream, Client, ConnectOptions, Credentials, End, Error, ErrorKind, Start,
};
use dcp_e2e::options;
use dcp_producer::{Producer, ProducerOptions, WriteOptions};
use dcp_wire::message::{
    Deletion, Expiration, Mutation, SeqnoAdvanced, SnapshotFlags, SnapshotMarker, StreamAddress,
    StreamEnd, StreamEndReason, SystemEvent, SystemEventId,
};
use dcp_wire::sasl::Mechanism;
use dcp_wire::{
    Cas, Datatype, Frame, MAX_BODY_LEN, Magic, Opaque, Opcode, RevSeqno, Seqno, Status, snappy,
};
use tokio::io::AsyncWriteExt;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;

use crate::layouts::{headers, layouts};
use crate::messages;
use crate::tally::{Outcome, PATIENCE, PROBE, Report, SOON, Tally};
use crate::tap::{Dialer, Open, Taken, Tap};
use dcp_meter::{Meter, alone};

/// What the client may hold beyond what it was sent and what an idle connection holds.
const BEYOND: usize = 64 << 10;

/// A value next to which what a connection holds anyway is little.
const LARGE: usize = 4 << 20;

/// A client, and the way on which its connections are taken over.
struct Rig {
    client: Client,
    taken: mpsc::UnboundedReceiver<Taken>,
    producer: Producer,
}

impl Rig {
    async fn start() -> Self {
        let mut options = ProducerOptions::default();
        options.vbuckets = 1;
        let producer = Producer::start(options).await.expect("loopback ports are there");
        let (sender, taken) = mpsc::unbounded_channel();
        let tap = Tap {
            streams: 1,
            start: watch::Sender::new(true),
            takeover: Box::new(move |taken| {
                let _ = sender.send(taken);
                Box::pin(std::future::ready(Ok(())))
            }),
            live: AtomicUsize::new(0),
        };
        let mut connect = ConnectOptions::new(producer.connection_string())
            .with_bucket("default")
            .with_credentials(Credentials::new("Administrator", "password"))
            // Thousands of connections are made.
            .with_sasl_mechanisms([Mechanism::ScramSha1]);
        connect.dialer = Some(Arc::new(Dialer(Arc::new(tap))));
        let client = Client::connect(connect).await.expect("the cluster is there");
        Self { client, taken, producer }
    }

    /// A stream that is over with its connection.
    async fn open(&mut self) -> (ChangeStream<PendingBatch>, Taken) {
        let mut options = options(Start::Earliest, End::Never);
        options.retry_timeout = Duration::ZERO;
        let schema = TableSchema::new(&TableOptions::default()).expect("the basic columns");
        // What is reserved for a batch is not what is looked at.
        let limits = with(BatchLimits::default(), |o| {
            o.expected_rows = 1;
            o.expected_bytes = 1;
        });
        let sink = move || ArrowSink::new(schema.clone(), CollectionNames::default(), limits);
        let stream = self.client.stream(options, sink).await.expect("the stream opens");
        let taken = timeout(PATIENCE, self.taken.recv()).await.expect("a stream is asked for");
        (stream, taken.expect("the tap is there"))
    }
}

/// A stream of a client that meets nothing but the cluster.
pub(crate) async fn undisturbed(producer: &Producer) -> ChangeStream<PendingBatch> {
    let connect = ConnectOptions::new(producer.connection_string())
        .with_bucket("default")
        .with_credentials(Credentials::new("Administrator", "password"));
    let client = Client::connect(connect).await.expect("the cluster is there");
    let schema = TableSchema::new(&TableOptions::default()).expect("the basic columns");
    let (names, limits) = (CollectionNames::default(), BatchLimits::default());
    let sink = move || ArrowSink::new(schema.clone(), names.clone(), limits);
    let options = options(Start::Earliest, End::Never);
    client.stream(options, sink).await.expect("the stream opens")
}

/// What a stream ends with.
async fn failure(stream: &mut ChangeStream<PendingBatch>) -> Error {
    let last = async {
        loop {
            match stream.next().await {
                Some(Ok(delivered)) => drop(delivered.batch.finish()),
                Some(Err(error)) => return error,
                None => panic!("an endless stream ends without an error"),
            }
        }
    };
    timeout(PATIENCE, last).await.expect("the stream is not told that its connection is over")
}

const fn address(stream: &Open) -> StreamAddress {
    StreamAddress { vbid: stream.vbid, opaque: stream.opaque, stream_id: None }
}

const NAMES: [&str; 14] = [
    "marker",
    "mutation",
    "compressed mutation",
    "mutation with attributes",
    "deletion",
    "expiration",
    "system event",
    "seqno advanced",
    "stream end",
    "noop",
    "cluster map",
    "answer to a stream request",
    "rollback",
    "high seqnos",
];

/// What is sent before a packet that is as it should be, and that packet.
fn packet(name: &str, stream: &Open) -> (Vec<u8>, Vec<u8>) {
    let further = messages::of_server(name, stream);
    if let Some(marker) = further.as_ref().filter(|_| name.starts_with("marker")) {
        return (Vec::new(), marker.clone());
    }
    let (to, seqno) = (address(stream), Seqno(stream.seqno + 1));
    let mut out = Vec::new();
    let marker = SnapshotMarker {
        start_seqno: seqno,
        end_seqno: Seqno(seqno.0 + 50),
        flags: SnapshotFlags::MEMORY,
        max_visible_seqno: None,
        high_completed_seqno: None,
        purge_seqno: None,
        high_prepared_seqno: None,
    };
    marker.encode(to, &mut out).expect("small");
    if name == "marker" {
        return (Vec::new(), out);
    }
    let before = std::mem::take(&mut out);
    if let Some(further) = further {
        return (before, further);
    }
    let compressed = snappy::compress(&[b'z'; 40]).expect("short");
    let (datatype, value): (_, &[u8]) = match name {
        "compressed mutation" => (Datatype::SNAPPY, &compressed),
        "mutation with attributes" => (Datatype::XATTR, b"\0\0\0\x0a\0\0\0\x06_a\0{}\0{}"),
        _ => (Datatype::JSON, b"{}"),
    };
    let (rev_seqno, cas, key) = (RevSeqno(1), Cas(1), b"\0k");
    let answer = |opcode, status| Frame::response(opcode, status).with_opaque(stream.opaque);
    match name {
        "deletion" => {
            let datatype = Datatype::RAW;
            Deletion { seqno, rev_seqno, cas, datatype, delete_time: Some(9), key, value: b"" }
                .encode(to, &mut out)
        }
        "system event" => {
            let value = &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 9];
            let id = SystemEventId::BEGIN_COLLECTION;
            SystemEvent { seqno, id, version: 0, key: b"name", value }.encode(to, &mut out)
        }
        "seqno advanced" => SeqnoAdvanced { seqno }.encode(to, &mut out),
        "stream end" => StreamEnd { reason: StreamEndReason::CLOSED }.encode(to, &mut out),
        "noop" => Frame::request(Opcode::DCP_NOOP).encode(&mut out),
        "cluster map" => {
            let mut frame = Frame::request(Opcode::CLUSTER_MAP_CHANGE).with_key(b"default");
            frame.header.magic = Magic::SERVER_REQUEST;
            frame.with_extras(&[0; 16]).with_value(br#"{"rev":1}"#).encode(&mut out)
        }
        "answer to a stream request" => {
            let answer = answer(Opcode::DCP_STREAM_REQ, Status::SUCCESS);
            answer.with_value(&[0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0]).encode(&mut out)
        }
        "rollback" => {
            let answer = answer(Opcode::DCP_STREAM_REQ, Status::ROLLBACK);
            answer.with_value(&[0; 8]).encode(&mut out)
        }
        "high seqnos" => {
            answer(Opcode::GET_ALL_VB_SEQNOS, Status::SUCCESS).with_value(&[0; 10]).encode(&mut out)
        }
        "expiration" => Expiration {
            seqno,
            rev_seqno,
            cas,
            datatype: Datatype::RAW,
            delete_time: 9,
            key,
            value: b"",
        }
        .encode(to, &mut out),
        _ => {
            let (flags, expiry, lock_time, nru) = (0, 0, 0, 0);
            Mutation { seqno, rev_seqno, cas, datatype, flags, expiry, lock_time, nru, key, value }
                .encode(to, &mut out)
        }
    }
    .expect("small packets");
    (before, out)
}

/// Sends packets and a noop, which a client answers at any time.
async fn probe(taken: &mut Taken, before: &[u8], layout: &[u8]) -> Outcome {
    let noop = encoded(&Frame::request(Opcode::DCP_NOOP).with_opaque(PROBE));
    if taken.client.write_all(&[before, layout, &noop].concat()).await.is_err() {
        return Outcome::Closed;
    }
    let mut client = Peer::new(&mut taken.client);
    let answer = async {
        while let Some(answer) = client.next().await {
            if answer.opaque() == PROBE && answer.frame().header.magic.is_response() {
                return Outcome::Tolerated;
            }
        }
        Outcome::Closed
    };
    let whole = Frame::parse(layout, MAX_BODY_LEN);
    let is_whole =
        !matches!(whole, Ok(None)) && !matches!(whole, Ok(Some((_, len))) if len != layout.len());
    let patience = if is_whole { PATIENCE } else { SOON / 4 };
    timeout(patience, answer).await.unwrap_or(Outcome::Waited)
}

async fn play(rig: &mut Rig, name: &'static str, tally: &mut Tally) {
    let count =
        layouts(&packet(name, &Open { vbid: dcp_wire::Vbid(0), opaque: Opaque(7), seqno: 70 }).1)
            .len();
    let (mut connection, mut number) = (None, 0);
    while number < count {
        let (mut stream, mut taken) = match connection.take() {
            Some(connection) => connection,
            None => rig.open().await,
        };
        let Some(open) = taken.streams.first_mut() else { panic!("no stream was asked for") };
        open.seqno += 100;
        let (before, packet) = packet(name, open);
        let Some(layout) = layouts(&packet).into_iter().nth(number) else {
            number += 1;
            continue;
        };
        let probing = async |layout: &[u8]| probe(&mut taken, &before, layout).await;
        let report = Report::of(layout, probing).await;
        number += usize::from(tally.add(name, &report, before.len() + BEYOND));
        if report.outcome == Outcome::Tolerated {
            connection = Some((stream, taken));
            continue;
        }
        drop(taken);
        let error = failure(&mut stream).await;
        // Nothing is tried again: the time for that is over, and why is the cause.
        let is_typed = error.kind() != ErrorKind::Timeout || error.source().is_some();
        let shown = Chain(&error).to_string();
        assert!(is_typed && !shown.contains("panicked"), "{name} {report:02x?}: {shown}");
    }
}

#[test]
fn a_client_goes_on_or_fails_with_a_cause_whatever_the_layout_and_holds_little() {
    let _alone = alone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let tally = runtime.expect("a runtime").block_on(async {
        let mut rig = Rig::start().await;
        let mut other = undisturbed(&rig.producer).await;
        let mut tally = Tally::default();
        for name in NAMES.into_iter().chain(messages::OF_SERVERS) {
            play(&mut rig, name, &mut tally).await;
        }
        rig.producer.upsert(b"k", "1".into(), WriteOptions::default()).expect("there is room");
        let batch = timeout(PATIENCE, other.next()).await.expect("others are not disturbed");
        let batch = batch.expect("it is endless").expect("its server is a good one").batch;
        assert_eq!(batch.finish().expect("a batch").num_rows(), 1);
        tally
    });
    tally.judge([9_760, 501, 501]);
}

#[test]
fn a_large_packet_takes_a_client_four_times_its_size_at_most() {
    let _alone = alone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let (layouts, most) = runtime.expect("a runtime").block_on(async {
        let mut rig = Rig::start().await;
        let large = |stream: &Open| {
            let (before, small) = packet("mutation", stream);
            let (frame, _) = Frame::parse(&small, MAX_BODY_LEN).expect("made so").expect("whole");
            let value = vec![b'v'; LARGE];
            let frame = frame.with_datatype(Datatype::RAW);
            (before, encoded(&frame.with_value(&value)))
        };
        let any = Open { vbid: dcp_wire::Vbid(0), opaque: Opaque(7), seqno: 0 };
        let (count, mut most) = (headers(&large(&any).1).len(), 0);
        for number in 0..count {
            let (mut stream, mut taken) = rig.open().await;
            let Some(open) = taken.streams.first() else { panic!("no stream was asked for") };
            let (before, mut layout) = large(open);
            let header = headers(&layout).swap_remove(number);
            layout[..header.len()].copy_from_slice(&header);
            let meter = Meter::start();
            let _ = probe(&mut taken, &before, &layout).await;
            drop(taken);
            failure(&mut stream).await;
            // What the test itself sends from is counted too.
            let held = meter.most() - (before.len() + layout.len());
            assert!(
                held <= 4 * layout.len() + BEYOND,
                "{:02x?} of {} bytes: {held}",
                &layout[..24],
                layout.len()
            );
            most = most.max(held);
        }
        (count, most)
    });
    eprintln!("{layouts} layouts of {} KiB: {} KiB at most", LARGE >> 10, most >> 10);
    assert!(most < MAX_BODY_LEN, "{} MiB", most >> 20);
    assert!(most > LARGE, "no large packet came through");
}
