//! A cluster's connection, by a hostile client.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use dcp_meter::Meter;
use dcp_producer::{MemoryStream, Producer, ProducerOptions, ServerVersion, WriteOptions};
use dcp_wire::message::{Open, OpenFlags, StreamRequest, StreamRequestFlags};
use dcp_wire::{
    Datatype, Feature, Frame, Header, MAX_BODY_LEN, Magic, Opaque, Opcode, Seqno, Status, Vbid,
    Vbuuid, sasl,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::runtime::Runtime;
use tokio::time::timeout;

use crate::bytes_in::BytesIn;

/// Simulated time in which nothing happens: the cluster has done what it was asked for.
const QUIET: Duration = Duration::from_millis(100);

/// What the cluster may hold beyond what it was sent: output that waits to be read, on either side
/// of the pipe, and what it reads into.
const BEYOND: usize = 1 << 20;

/// Most that one packet of a few bytes may inflate to, as a multiple.
const INFLATED: usize = 22;

/// The oldest whose ways are known.
const OLD: ServerVersion = ServerVersion { major: 6, minor: 0, patch: 5 };

/// Whatever a client sends: it is answered in order, and whole packets, or the connection is
/// closed; the cluster holds no more than it may, and others are served as before.
///
/// Time is simulated and connections are buffers: there is no IO. The cluster is the same for all
/// inputs, its bucket a new one for each.
pub fn cluster(data: &[u8]) {
    thread_local! {
        static STAGE: RefCell<Option<ManuallyDrop<Stage>>> = const { RefCell::new(None) };
    }
    STAGE.with_borrow_mut(|stage| {
        let stage = stage.get_or_insert_with(|| ManuallyDrop::new(Stage::new()));
        stage.play(data);
    });
}

/// A cluster in simulated time, and a client that means well.
struct Stage {
    runtime: Runtime,
    producer: Producer,
    other: MemoryStream,
}

impl Stage {
    fn new() -> Self {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
        let (producer, other) = runtime.block_on(async {
            let mut options = ProducerOptions::default();
            options.in_memory = true;
            options.seed = Some(7);
            options.vbuckets = 2;
            let producer = Producer::start(options).await.expect("no port is taken");
            fill(&producer);
            let other = producer.dial(address()).expect("the node runs");
            let (mut read, mut write) = tokio::io::split(other);
            let login = requests(&[login(), Frame::request(Opcode::NOOP)]);
            let mut answers = Vec::new();
            exchange(&mut read, &mut write, &login, &mut answers).await;
            assert_eq!(statuses(&answers), [Status::SUCCESS; 2]);
            (producer, read.unsplit(write))
        });
        Self { runtime, producer, other }
    }

    fn play(&mut self, data: &[u8]) {
        let mut bytes = BytesIn::new(data);
        let how = bytes.u8();
        let mut config = self.producer.dcp_config();
        config.server_version = if how & 1 == 0 { ServerVersion::NEWEST } else { OLD };
        self.producer.set_dcp_config(config);
        let prelude = prelude(how);
        let mut hostile = Vec::new();
        while !bytes.is_empty() {
            request(&mut bytes, &mut hostile);
        }
        let (mut before, mut answers) = (Vec::new(), Vec::with_capacity(1 << 20));
        let Self { runtime, producer, other } = self;
        runtime.block_on(async {
            let stream = producer.dial(address()).expect("the node runs");
            let (mut read, mut write) = tokio::io::split(stream);
            exchange(&mut read, &mut write, &prelude, &mut before).await;
            let meter = Meter::start();
            let is_open = exchange(&mut read, &mut write, &hostile, &mut answers).await;
            let most = meter.most();
            let plain = 4 * hostile.len();
            let inflated = if has_compressed(&hostile) { INFLATED * hostile.len() } else { 0 };
            let grown = answers.capacity() - (1 << 20);
            let allowed = plain + inflated + BEYOND + 2 * grown;
            assert!(most <= allowed, "{most} bytes held for {} received", hostile.len());
            drop(read.unsplit(write));
            check_answers(&[prelude, hostile].concat(), &[before, answers].concat(), is_open);
            // One that was there before is served.
            let noop = requests(&[Frame::request(Opcode::NOOP)]);
            let mut answer = [0; Header::LEN];
            other.write_all(&noop).await.expect("the connection is open");
            let served = timeout(QUIET, other.read_exact(&mut answer)).await;
            served.expect("an answer").expect("the connection is open");
        });
        let known: u64 = self.producer.high_seqnos().values().map(|seqno| seqno.0).sum();
        if known != DOCUMENTS {
            self.producer.drop_bucket().expect("there is one");
            self.producer.create_bucket().expect("there is none");
            fill(&self.producer);
        }
    }
}

/// Documents in the bucket, as many as seqnos.
const DOCUMENTS: u64 = 4;

fn fill(producer: &Producer) {
    for key in ["key", "other", "third", "fourth"] {
        let options = WriteOptions::default();
        producer.upsert(key.as_bytes(), r#"{"a":1}"#.into(), options).expect("there is room");
    }
    producer.persist();
}

fn address() -> SocketAddr {
    SocketAddr::new(Ipv4Addr::LOCALHOST.into(), 11_210)
}

/// Sends bytes, and reads until nothing more comes; whether the connection is open then.
async fn exchange(
    read: &mut ReadHalf<MemoryStream>,
    write: &mut WriteHalf<MemoryStream>,
    bytes: &[u8],
    answers: &mut Vec<u8>,
) -> bool {
    let send = async {
        // A connection that is closed takes nothing more.
        let _ = write.write_all(bytes).await;
    };
    let receive = async {
        while let Ok(received) = timeout(QUIET, read.read_buf(answers)).await {
            if !matches!(received, Ok(1..)) {
                return false;
            }
        }
        true
    };
    let (_, is_open) = tokio::join!(timeout(10 * QUIET, send), receive);
    is_open
}

fn requests(frames: &[Frame<'_>]) -> Vec<u8> {
    let mut bytes = Vec::new();
    frames.iter().for_each(|frame| frame.encode(&mut bytes).expect("small parts"));
    bytes
}

fn login() -> Frame<'static> {
    const PLAIN: &[u8] = b"\0Administrator\0password";
    debug_assert_eq!(*sasl::encode_plain("Administrator", "password").unwrap_or_default(), PLAIN);
    Frame::request(Opcode::SASL_AUTH).with_key(b"PLAIN").with_value(PLAIN)
}

/// What brings the connection as far as `how` says.
fn prelude(how: u8) -> Vec<u8> {
    let mut features = vec![Feature::XERROR, Feature::XATTR, Feature::JSON, Feature::SNAPPY];
    if how & 2 == 0 {
        features.extend([Feature::COLLECTIONS, Feature::ALT_REQUEST_SUPPORT, Feature::DUPLEX]);
    }
    let features: Vec<_> = features.iter().flat_map(|feature| feature.0.to_be_bytes()).collect();
    let mut frames = Vec::new();
    if how & 4 == 0 {
        frames.push(Frame::request(Opcode::HELLO).with_value(&features));
    }
    if how & 8 == 0 {
        frames.push(login());
    }
    if how & 16 == 0 {
        frames.push(Frame::request(Opcode::SELECT_BUCKET).with_key(b"default"));
    }
    let mut bytes = requests(&frames);
    if how & 32 == 0 {
        let (name, value, datatype) = (&b"reader"[..], &b""[..], Datatype::RAW);
        let open = Open { flags: OpenFlags::PRODUCER, name, value, datatype };
        open.encode(Opaque(1), &mut bytes).expect("small parts");
    }
    if how & 64 == 0 {
        let noop = Frame::request(Opcode::DCP_CONTROL);
        let noop = noop.with_key(b"enable_noop").with_value(b"true");
        noop.encode(&mut bytes).expect("small parts");
    }
    if how & 128 == 0 {
        stream_request(0, b"").encode(&mut bytes).expect("small parts");
    }
    bytes
}

const fn stream_request(vbid: u16, value: &[u8]) -> StreamRequest<'_> {
    StreamRequest {
        vbid: Vbid(vbid),
        opaque: Opaque(9),
        flags: StreamRequestFlags::empty(),
        start_seqno: Seqno(0),
        end_seqno: Seqno::MAX,
        vbuuid: Vbuuid(0),
        snapshot_start: Seqno(0),
        snapshot_end: Seqno(0),
        value,
    }
}

/// Appends what `bytes` say to send next.
fn request(bytes: &mut BytesIn<'_>, out: &mut Vec<u8>) {
    let what = bytes.u8();
    match what {
        0..0x20 => {
            // A packet, or anything else.
            let len = usize::from(bytes.u16());
            out.extend_from_slice(bytes.take(len));
        }
        0x20..0x30 => {
            let mut request = stream_request(u16::from(what & 3), bytes.part());
            request.start_seqno = Seqno(bytes.near(0));
            request.snapshot_start = Seqno(bytes.near(0));
            request.snapshot_end = Seqno(bytes.near(0));
            request.flags = StreamRequestFlags::from_bits_retain(u32::from(bytes.u8()));
            request.encode(out).expect("small parts");
        }
        0x30..0x38 => {
            let (key, value) = (bytes.one_of(CONTROLS), bytes.part());
            let control = Frame::request(Opcode::DCP_CONTROL).with_key(key.as_bytes());
            control.with_value(value).encode(out).expect("small parts");
        }
        0x38..0x40 => {
            // Damages what was said last.
            let (from_end, byte) = (usize::from(bytes.u8()), bytes.u8());
            let at = out.len().checked_sub(1 + from_end);
            if let Some(place) = at.and_then(|at| out.get_mut(at)) {
                *place = byte;
            }
        }
        _ => any_request(what, bytes, out),
    }
}

const CONTROLS: &[&str] = &[
    "connection_buffer_size",
    "enable_noop",
    "set_noop_interval",
    "enable_stream_id",
    "enable_out_of_order_snapshots",
    "max_marker_version",
    "flatbuffers_system_events",
    "change_streams",
    "enable_expiry_opcode",
    "send_stream_end_on_client_close_stream",
    "enable_sync_writes",
    "force_value_compression",
    "set_priority",
    "consumer_name",
    "include_deleted_user_xattrs",
];

/// Appends a packet of any opcode with plausible parts.
fn any_request(what: u8, bytes: &mut BytesIn<'_>, out: &mut Vec<u8>) {
    let mut frame = Frame::request(Opcode::KNOWN[usize::from(bytes.u8()) % Opcode::KNOWN.len()]);
    if what >= 0xf0 {
        frame.header.magic = bytes.one_of(Magic::KNOWN);
        frame.framing_extras = if frame.header.magic.is_alt() { bytes.part() } else { &[] };
    }
    frame.header.opaque = Opaque(u32::from(what));
    frame.header.vbid_or_status = u16::from(bytes.u8() & 3);
    let shape = bytes.u8();
    let extras_len = [0, 0, 4, 8, 20, 24, 28, 1][usize::from(shape & 7)];
    let mut extras = bytes.take(if what & 1 == 0 { 0 } else { extras_len }).to_vec();
    extras.resize(extras_len, 0);
    frame.header.datatype = Datatype(if what & 2 == 0 { 0 } else { bytes.u8() & 7 });
    let key = match shape >> 3 & 7 {
        0 => b"",
        1 | 2 => &b"key"[..],
        3 => b"\0key",
        4 => b"default",
        5 => b"SCRAM-SHA1",
        _ => bytes.part(),
    };
    let value = match shape >> 6 {
        0 => b"",
        1 => &br#"{"a":[1,{"b":null}]}"#[..],
        _ => bytes.part(),
    };
    frame.with_extras(&extras).with_key(key).with_value(value).encode(out).expect("small parts");
}

fn has_compressed(sent: &[u8]) -> bool {
    each(sent).any(|header| header.datatype.contains(Datatype::SNAPPY))
}

/// Headers of the whole packets at the front of `bytes`.
fn each(mut bytes: &[u8]) -> impl Iterator<Item = Header> {
    std::iter::from_fn(move || {
        let (frame, used) = Frame::parse(bytes, MAX_BODY_LEN).ok()??;
        bytes = &bytes[used..];
        Some(frame.header)
    })
}

fn statuses(answers: &[u8]) -> Vec<Status> {
    each(answers).map(|header| header.status()).collect()
}

/// Checks that answers are whole packets, in the order of the requests, and of nothing else.
fn check_answers(sent: &[u8], answers: &[u8], is_open: bool) {
    let whole: usize = each(answers).map(|header| header.packet_len()).sum();
    assert!(whole == answers.len() || !is_open, "whole packets only");
    let asked: Vec<_> = each(sent).filter(|header| !header.magic.is_response()).collect();
    let mut at = 0;
    for answer in each(answers).filter(|header| header.magic.is_response()) {
        let is_of = |asked: &Header| (asked.opcode, asked.opaque) == (answer.opcode, answer.opaque);
        let found = asked.iter().skip(at).position(is_of);
        let (opcode, opaque) = (answer.opcode, answer.opaque);
        let Some(later) = found else { panic!("{opcode} {opaque} answers nothing") };
        at += later;
    }
}
