//! Servers that send without end, to clients that read, that pause and that are gone.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dcp_arrow::{ArrowSink, BatchLimits, CollectionNames, PendingBatch, TableOptions, TableSchema};
use dcp_consumer::{ChangeStream, Client, ConnectOptions, Credentials, End, Start};
use dcp_e2e::options;
use dcp_producer::{Producer, ProducerOptions};
use dcp_test::packet::Packet;
use dcp_wire::message::{
    BufferAck, Deletion, Mutation, SeqnoAdvanced, SnapshotFlags, SnapshotMarker, StreamAddress,
    StreamEnd, StreamEndReason, SystemEvent, SystemEventId, encode_vb_seqnos,
};
use dcp_wire::{Cas, Datatype, Frame, Magic, Opcode, RevSeqno, Seqno, Status, snappy};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use crate::tap::{Dialer, Open, Taken, Tap};
use dcp_meter::{Meter, alone};

/// How long a client is flooded.
const FLOOD: Duration = Duration::from_millis(300);

/// Longest wait for what must happen.
const PATIENCE: Duration = Duration::from_secs(10);

const VBUCKETS: u16 = 1024;

/// Items of a stream that are sent at a time.
const ITEMS: u64 = 4;

/// Flow-control window of the one connection that streams.
const WINDOW: u32 = 4 << 20;

/// Largest batch.
const BATCH: usize = 256 << 10;

/// Bytes of packets that a batch may be made of: a row takes less than its packet does.
const TAKEN: usize = 2 * BATCH;

/// What a client may hold beyond a connection on which nothing happens: of changes that wait for the
/// application, and otherwise.
const OF_ROWS: usize = WINDOW as usize + BATCH + (16 << 20);
const OTHERWISE: usize = 12 << 20;

/// What documents take besides while they are inflated: what one read brings may be twenty times as
/// large, in the batch under way, in the one that is taken and in the pool of blocks.
const INFLATED: usize = 24 << 20;

/// What a server sends without end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Flood {
    /// Noops, and reads none of the answers.
    Noops,
    /// Cluster maps of 100 KB.
    Maps,
    /// That there are newer maps, and reads none of the questions for them.
    MapChanges,
    /// Large requests that concern nobody.
    UnknownRequests,
    /// Answers to questions for seqnos that nobody asked.
    HighSeqnos,
    /// Collections made in scope `_system` and elsewhere, with long names.
    SystemEvents,
    /// Snapshots without an item.
    EmptyMarkers,
    /// Seqnos without a change.
    SeqnoAdvanced,
    /// The ends of streams, whenever they are opened again.
    StreamEnds,
    /// Rollbacks, whenever a stream is asked for from anywhere but the beginning.
    Rollbacks,
    /// Changes that are as small as can be.
    Rows,
    /// The same, whatever the window.
    RowsBeyondTheWindow,
    /// Documents that are twenty times as large inflated.
    CompressedRows,
}

const FLOODS: [Flood; 13] = [
    Flood::Noops,
    Flood::Maps,
    Flood::MapChanges,
    Flood::UnknownRequests,
    Flood::HighSeqnos,
    Flood::SystemEvents,
    Flood::EmptyMarkers,
    Flood::SeqnoAdvanced,
    Flood::StreamEnds,
    Flood::Rollbacks,
    Flood::Rows,
    Flood::RowsBeyondTheWindow,
    Flood::CompressedRows,
];

impl Flood {
    const fn reads(self) -> bool {
        !matches!(self, Self::Noops | Self::MapChanges)
    }

    /// How long it lasts while nobody reads.
    const fn pause(self) -> Duration {
        match self {
            // It takes full sockets, or some reconnects, for much to be held.
            Self::Noops
            | Self::MapChanges
            | Self::Rows
            | Self::RowsBeyondTheWindow
            | Self::CompressedRows => Duration::from_millis(1500),
            _ => FLOOD,
        }
    }

    const fn needs_streams(self) -> bool {
        !matches!(
            self,
            Self::Noops | Self::Maps | Self::MapChanges | Self::UnknownRequests | Self::HighSeqnos
        )
    }

    /// Whether it stops at a full window, as long as it is not acknowledged.
    const fn honours_window(self) -> bool {
        matches!(
            self,
            Self::SystemEvents
                | Self::EmptyMarkers
                | Self::SeqnoAdvanced
                | Self::Rows
                | Self::CompressedRows
        )
    }

    /// Appends some packets to `out`.
    fn send(self, streams: &mut [Open], map: &[u8], out: &mut Vec<u8>) {
        match self {
            Self::Noops => (0..512).for_each(|_| put(Frame::request(Opcode::DCP_NOOP), out)),
            Self::Maps => put(server_request(Opcode::CLUSTER_MAP_CHANGE).with_value(map), out),
            Self::MapChanges => {
                (0..512).for_each(|_| put(server_request(Opcode::CLUSTER_MAP_CHANGE), out));
            }
            Self::UnknownRequests => {
                put(server_request(Opcode(0x77)).with_value(&[7; 1 << 20]), out);
            }
            Self::HighSeqnos => {
                let answer = Frame::response(Opcode::GET_ALL_VB_SEQNOS, Status::SUCCESS);
                (0..64).for_each(|_| put(answer.with_value(&[0; 10 * VBUCKETS as usize]), out));
            }
            Self::StreamEnds => streams.iter().for_each(|stream| end(stream, out)),
            Self::Rollbacks => {
                let answer = Frame::response(Opcode::DCP_STREAM_REQ, Status::ROLLBACK);
                for stream in streams {
                    put(answer.with_opaque(stream.opaque).with_value(&[0; 8]), out);
                }
            }
            _ => streams.iter_mut().for_each(|stream| self.items(stream, out)),
        }
    }

    /// Appends a snapshot, and what it holds.
    fn items(self, stream: &mut Open, out: &mut Vec<u8>) {
        let to = address(stream);
        let count = if self == Self::EmptyMarkers { 0 } else { ITEMS };
        let compressible = match self {
            Self::CompressedRows => snappy::compress(&[b'z'; 4096]).expect("a short value"),
            _ => Vec::new(),
        };
        marker(stream, stream.seqno + ITEMS, out);
        for n in 1..=count {
            let seqno = Seqno(stream.seqno + n);
            let encoded = match self {
                Self::SystemEvents => {
                    let mut value = [0; 16];
                    // Manifest uid, scope and collection.
                    value[..8].copy_from_slice(&seqno.0.to_be_bytes());
                    value[11] = u8::from(n % 2 == 0) * 8;
                    let id = seqno.0 as u32 * u32::from(VBUCKETS) + u32::from(stream.vbid.0) + 8;
                    value[12..].copy_from_slice(&id.to_be_bytes());
                    let mut event = SystemEvent {
                        seqno,
                        id: SystemEventId::BEGIN_COLLECTION,
                        version: 0,
                        key: &[b'n'; 251],
                        value: &value,
                    };
                    if n == 1 {
                        (event.id, event.key) = (SystemEventId::CREATE_SCOPE, b"_system");
                        event.value = &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 8];
                    }
                    event.encode(to, out)
                }
                Self::SeqnoAdvanced => SeqnoAdvanced { seqno }.encode(to, out),
                Self::CompressedRows => {
                    let mutation = Mutation {
                        seqno,
                        rev_seqno: RevSeqno(1),
                        cas: Cas(1),
                        datatype: Datatype::SNAPPY,
                        flags: 0,
                        expiry: 0,
                        lock_time: 0,
                        nru: 0,
                        key: b"\0k",
                        value: &compressible,
                    };
                    mutation.encode(to, out)
                }
                _ => {
                    let deletion = Deletion {
                        seqno,
                        rev_seqno: RevSeqno(1),
                        cas: Cas(1),
                        datatype: Datatype::RAW,
                        delete_time: None,
                        key: b"\0k",
                        value: b"",
                    };
                    deletion.encode(to, out)
                }
            };
            encoded.expect("small packets");
        }
        stream.seqno += ITEMS;
    }

    /// Answers a stream request.
    fn answer(self, stream: &mut Open, out: &mut Vec<u8>) {
        let answer = |status| Frame::response(Opcode::DCP_STREAM_REQ, status);
        if self == Self::Rollbacks && stream.seqno > 0 {
            let to = (stream.seqno / 2).to_be_bytes();
            return put(answer(Status::ROLLBACK).with_opaque(stream.opaque).with_value(&to), out);
        }
        let mut log = [0; 16];
        log[7] = 9;
        put(answer(Status::SUCCESS).with_opaque(stream.opaque).with_value(&log), out);
        match self {
            Self::StreamEnds => end(stream, out),
            Self::Rollbacks => {
                marker(stream, 1000, out);
                let advanced = SeqnoAdvanced { seqno: Seqno(1000) };
                advanced.encode(address(stream), out).expect("a small packet");
                end(stream, out);
            }
            _ => {}
        }
    }
}

const fn address(stream: &Open) -> StreamAddress {
    StreamAddress { vbid: stream.vbid, opaque: stream.opaque, stream_id: None }
}

fn marker(stream: &Open, end: u64, out: &mut Vec<u8>) {
    let marker = SnapshotMarker {
        start_seqno: Seqno(stream.seqno + 1),
        end_seqno: Seqno(end),
        flags: SnapshotFlags::MEMORY,
        max_visible_seqno: None,
        high_completed_seqno: None,
        purge_seqno: None,
        high_prepared_seqno: None,
    };
    marker.encode(address(stream), out).expect("a small packet");
}

fn end(stream: &Open, out: &mut Vec<u8>) {
    let end = StreamEnd { reason: StreamEndReason::STATE_CHANGED };
    end.encode(address(stream), out).expect("a small packet");
}

fn server_request(opcode: Opcode) -> Frame<'static> {
    let mut frame = Frame::request(opcode);
    frame.header.magic = Magic::SERVER_REQUEST;
    frame
}

fn put(frame: Frame<'_>, out: &mut Vec<u8>) {
    frame.encode(out).expect("it fits a packet");
}

/// Floods a client until its connection is closed.
async fn run(flood: Flood, taken: Taken, sent: Arc<AtomicUsize>) -> io::Result<()> {
    let Taken { client, mut input, mut streams, mut map } = taken;
    // As large as maps get, and still one.
    map.resize(map.len().max(100_000), b' ');
    let (mut from_client, mut to_client) = client.into_split();
    input.reserve(64 << 10);
    let (mut out, mut written, mut unacknowledged, mut largest) = (Vec::new(), 0, 0, 0);
    loop {
        if written == out.len() {
            (written, unacknowledged) = (0, unacknowledged + out.len());
            out.clear();
            // A burst has to fit what is left of the window: clients leave a server that exceeds it.
            if !flood.honours_window() || unacknowledged + largest <= WINDOW as usize {
                flood.send(&mut streams, &map, &mut out);
                largest = largest.max(out.len());
            }
        }
        tokio::select! {
            len = from_client.read_buf(&mut input), if flood.reads() => {
                if len? == 0 {
                    return Ok(());
                }
                while let Some(packet) = Packet::take(&mut input) {
                    let frame = packet.frame();
                    if let Ok(ack) = BufferAck::decode(&frame) {
                        unacknowledged = unacknowledged.saturating_sub(ack.bytes as usize);
                    } else if let Some(mut stream) = Open::of(&frame) {
                        flood.answer(&mut stream, &mut out);
                        streams.retain(|open| open.vbid != stream.vbid);
                        streams.push(stream);
                    } else if frame.header.opcode == Opcode::GET_ALL_VB_SEQNOS {
                        // Asked now and then, for the lag.
                        let mut seqnos = Vec::new();
                        let each = streams.iter().map(|open| (open.vbid, Seqno(open.seqno)));
                        encode_vb_seqnos(each, &mut seqnos);
                        let answer = Frame::response(Opcode::GET_ALL_VB_SEQNOS, Status::SUCCESS);
                        let opaque = frame.header.opaque;
                        put(answer.with_opaque(opaque).with_value(&seqnos), &mut out);
                    }
                }
            }
            len = to_client.write(&out[written..]), if written < out.len() => {
                let len = len?;
                written += len;
                sent.fetch_add(len, Ordering::Relaxed);
            }
        }
    }
}

/// What a client does while it is flooded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reader {
    Reads,
    Pauses,
    IsGone,
    /// Its stream is complete, its connection is kept for the next one.
    KeepsConnection,
    /// It takes a batch each second, for so many seconds.
    IsSlow(u64),
}

const READERS: [Reader; 4] =
    [Reader::Reads, Reader::Pauses, Reader::IsGone, Reader::KeepsConnection];

async fn open(client: &Client, reader: Reader) -> ChangeStream<PendingBatch> {
    let end = if reader == Reader::KeepsConnection { End::Now } else { End::Never };
    let mut options = options(Start::Earliest, end);
    options.buffer_size = WINDOW;
    options.batch.max_bytes = BATCH;
    let schema = TableSchema::new(&TableOptions::default()).expect("the basic columns");
    let sink =
        move || ArrowSink::new(schema.clone(), CollectionNames::default(), BatchLimits::default());
    client.stream(options, sink).await.expect("the stream opens")
}

/// What came of a flood.
struct Outcome {
    /// The most that was held beyond an idle connection.
    most: usize,
    /// Bytes the flood has written.
    sent: usize,
}

async fn flood(flood: Flood, reader: Reader) -> Outcome {
    let mut options = ProducerOptions::default();
    options.vbuckets = VBUCKETS;
    let producer = Producer::start(options).await.expect("loopback ports are there");
    let sent = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&sent);
    let tap = Arc::new(Tap {
        streams: if reader == Reader::KeepsConnection { 0 } else { usize::from(VBUCKETS) },
        start: watch::Sender::new(false),
        takeover: Box::new(move |taken| Box::pin(run(flood, taken, Arc::clone(&count)))),
        live: AtomicUsize::new(0),
    });
    let mut connect = ConnectOptions::new(producer.connection_string())
        .with_bucket("default")
        .with_credentials(Credentials::new("Administrator", "password"));
    connect.dialer = Some(Arc::new(Dialer(Arc::clone(&tap))));
    if reader == Reader::KeepsConnection {
        connect.keep_connections = Duration::from_secs(60);
    }
    let client = Client::connect(connect).await.expect("the cluster is there");
    let mut stream = open(&client, reader).await;
    if reader == Reader::KeepsConnection {
        while stream.next().await.is_some() {}
        drop(stream);
        let outcome = measured(&tap, &sent, sleep(flood.pause())).await;
        client.close().await;
        closed(&tap).await;
        return outcome;
    }
    let streaming = async {
        while stream.stats().streaming < usize::from(VBUCKETS) {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, streaming).await.expect("all streams open");
    let outcome = match reader {
        Reader::Reads => {
            let read = async { while take(&mut stream).await {} };
            measured(&tap, &sent, timeout(FLOOD, read)).await
        }
        Reader::IsSlow(seconds) => {
            let read = async {
                while take(&mut stream).await {
                    sleep(Duration::from_secs(1)).await;
                }
            };
            let outcome = measured(&tap, &sent, timeout(Duration::from_secs(seconds), read)).await;
            assert_eq!(stream.stats().reconnects, 0, "the server keeps to its window");
            outcome
        }
        Reader::IsGone => {
            let gone = async {
                sleep(FLOOD / 4).await;
                drop(stream);
                sleep(FLOOD).await;
                closed(&tap).await;
            };
            measured(&tap, &sent, gone).await
        }
        _ => measured(&tap, &sent, sleep(flood.pause())).await,
    };
    client.close().await;
    closed(&tap).await;
    outcome
}

/// Waits until the client has closed every connection that is flooded.
async fn closed(tap: &Tap) {
    let closed = async {
        while tap.live.load(Ordering::SeqCst) > 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(PATIENCE, closed).await.expect("nobody wants the connection, and it is not closed");
}

/// Reads a batch, as an application would; `false` if there are no more.
async fn take(stream: &mut ChangeStream<PendingBatch>) -> bool {
    match stream.next().await {
        Some(Ok(delivered)) => {
            delivered.batch.finish().expect("a batch");
            true
        }
        _ => false,
    }
}

/// Lets the flood begin, and looks at what is held while the client does something.
async fn measured<T>(tap: &Tap, sent: &AtomicUsize, what: impl Future<Output = T>) -> Outcome {
    let meter = Meter::start();
    tap.start.send_replace(true);
    what.await;
    Outcome { most: meter.most(), sent: sent.load(Ordering::Relaxed) }
}

/// How long the slow reader reads: `make long` gives it a minute.
fn slow_seconds() -> u64 {
    let given = std::env::var("DCP_SLOW_SECONDS").ok();
    given.map_or(3, |seconds| seconds.parse().expect("DCP_SLOW_SECONDS is a number"))
}

#[test]
fn a_reader_of_a_batch_a_second_holds_a_window_and_a_batch_of_what_never_ends() {
    let _alone = alone();
    let seconds = slow_seconds();
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).enable_all().build().expect("threads");
    let outcome = runtime.block_on(flood(Flood::Rows, Reader::IsSlow(seconds)));
    runtime.shutdown_timeout(PATIENCE);
    let Outcome { most, sent } = outcome;
    let figures = format!("{seconds} s: {} KiB held of {} KiB sent", most >> 10, sent >> 10);
    eprintln!("{figures}");
    assert!(most <= OF_ROWS, "{figures}");
    // What is taken makes room, and nothing else does: a server that could send gigabytes waits.
    let taken = (seconds as usize + 1) * TAKEN;
    assert!(sent > WINDOW as usize / 2, "{figures}");
    assert!(sent <= WINDOW as usize + taken + (1 << 20), "{figures}");
}

#[test]
fn whatever_a_server_floods_a_client_with_is_bounded() {
    let _alone = alone();
    let mut beyond = Vec::new();
    for reader in READERS {
        let kept = reader == Reader::KeepsConnection;
        for each in FLOODS.into_iter().filter(|flood| !(kept && flood.needs_streams())) {
            let mut runtime = tokio::runtime::Builder::new_multi_thread();
            let runtime = runtime.worker_threads(2).enable_all().build().expect("threads");
            let bound = match each {
                Flood::Rows | Flood::RowsBeyondTheWindow => OF_ROWS,
                Flood::CompressedRows => OF_ROWS + INFLATED,
                _ => OTHERWISE,
            };
            let began = Instant::now();
            let Outcome { most, sent } = runtime.block_on(flood(each, reader));
            runtime.shutdown_timeout(PATIENCE);
            let figures = format!(
                "{reader:?}, {each:?}: {} KiB held of {} KiB sent, {:?}",
                most >> 10,
                sent >> 10,
                began.elapsed()
            );
            eprintln!("{figures}");
            if most > bound || sent == 0 {
                beyond.push(figures);
            }
        }
    }
    assert!(beyond.is_empty(), "more was held than is allowed: {beyond:#?}");
}
