//! A scripted node that sends ready-made frames: it answers a client's set-up requests and then
//! only writes, so that it does not limit a client.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dcp_wire::message::{BufferAck, Control, FailoverEntry, StreamRequest, encode_failover_log};
use dcp_wire::sasl::{MIN_ITERATIONS, Mechanism, ScramCredentials, ScramServer};
use dcp_wire::{
    Datatype, Feature, Frame, Header, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid,
};
use serde_json::json;

use crate::Error;
use crate::frames::{Frames, STAMPED_LEN, Shape, marked_len};
use crate::listening::listen;
use crate::window::Window;
use crate::writes::Writes;

/// Name of the node's bucket.
pub const BUCKET: &str = "frames";

/// User name of clients.
pub const USERNAME: &str = "reader";

/// Password of clients.
pub const PASSWORD: &str = "only for loopback";

/// The only SASL mechanism offered.
const MECHANISM: Mechanism = Mechanism::ScramSha1;

/// Maximum size of a write in bytes: smaller writes would dominate the sender's cost.
pub(crate) const WRITE_LEN: usize = 256 * 1024;

/// A node whose every DCP connection sends the same stream: `passes` passes of the frames on all
/// vBuckets, then the stream ends.
#[derive(Debug)]
pub struct Sender {
    address: SocketAddr,
    congestion_control: String,
    plan: Plan,
    rows: u64,
    bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct Plan {
    shape: Shape,
    passes: u64,
    /// Time between two mutations; `None` sends as fast as possible.
    interval: Option<Duration>,
    writes: Writes,
    port: u16,
    high_seqno: u64,
}

impl Sender {
    /// Listens on a loopback port and serves it until the process ends, writing according to
    /// `writes`. `congestion_control` replaces the system's default.
    ///
    /// # Errors
    /// If the system refuses the port or the congestion control.
    pub fn start(
        shape: Shape,
        passes: u64,
        writes: Writes,
        congestion_control: Option<&str>,
    ) -> Result<Self, Error> {
        Self::start_with(shape, passes, None, writes, congestion_control)
    }

    /// Like [`start`](Self::start), but sends one mutation at a time, `interval` apart, with the
    /// send time in its value (see [`Frames::stamp`]).
    ///
    /// # Errors
    /// If the system refuses the port, or values are too short for a timestamp.
    pub fn paced(shape: Shape, passes: u64, interval: Duration) -> Result<Self, Error> {
        if shape.value_len < STAMPED_LEN {
            return Err(format!("a value with its time takes {STAMPED_LEN} bytes").into());
        }
        // One mutation of each vBucket.
        let shape = Shape { pass_bytes: 0, ..shape };
        Self::start_with(shape, passes, Some(interval), Writes::Large, None)
    }

    fn start_with(
        shape: Shape,
        passes: u64,
        interval: Option<Duration>,
        writes: Writes,
        congestion_control: Option<&str>,
    ) -> Result<Self, Error> {
        let (listener, congestion_control) = listen(congestion_control)?;
        let address = listener.local_addr()?;
        let frames = Frames::new(shape)?;
        let plan = Plan {
            shape,
            passes,
            interval,
            writes,
            port: address.port(),
            high_seqno: frames.rows_per_vbucket() * passes,
        };
        let bytes = frames.bytes().len() as u64 * passes + frames.stream_ends()?.len() as u64;
        let rows = frames.rows() * passes;
        let ready = Arc::new(Mutex::new(Some(frames)));
        thread::Builder::new().name("sender".to_owned()).spawn(move || {
            while let Ok((socket, _)) = listener.accept() {
                let ready = Arc::clone(&ready);
                thread::spawn(move || {
                    if let Err(error) = Connection::serve(socket, plan, ready) {
                        // The client fails as well and reports it.
                        let _ = writeln!(std::io::stderr(), "sender: {error}");
                    }
                });
            }
        })?;
        Ok(Self { address, congestion_control, plan, rows, bytes })
    }

    /// Address of the node.
    #[must_use]
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// The connection string of the node.
    #[must_use]
    pub fn connection_string(&self) -> String {
        format!("couchbase://127.0.0.1:{}", self.address.port())
    }

    /// The congestion control of its connections.
    #[must_use]
    pub fn congestion_control(&self) -> &str {
        &self.congestion_control
    }

    /// Number of mutations sent on each DCP connection.
    #[must_use]
    pub const fn rows(&self) -> u64 {
        self.rows
    }

    /// Number of bytes sent on each DCP connection once its streams are open.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of vBuckets.
    #[must_use]
    pub const fn vbuckets(&self) -> u16 {
        self.plan.shape.vbuckets
    }
}

struct Connection {
    plan: Plan,
    reader: TcpStream,
    writer: Arc<Mutex<TcpStream>>,
    window: Arc<Window>,
    /// The current exchange.
    scram: Option<ScramServer>,
    /// Frames reused by consecutive connections.
    ready: Ready,
    frames: Option<Frames>,
    opened: u16,
}

type Ready = Arc<Mutex<Option<Frames>>>;

impl Connection {
    fn serve(socket: TcpStream, plan: Plan, ready: Ready) -> Result<(), Error> {
        socket.set_nodelay(true)?;
        let mut connection = Self {
            plan,
            writer: Arc::new(Mutex::new(socket.try_clone()?)),
            reader: socket,
            window: Arc::default(),
            scram: None,
            ready,
            frames: None,
            opened: 0,
        };
        let mut input = Vec::new();
        let mut chunk = vec![0; 64 * 1024];
        loop {
            let used = connection.take_packets(&input)?;
            input.drain(..used);
            match connection.reader.read(&mut chunk) {
                Ok(0) | Err(_) => break,
                Ok(len) => input.extend_from_slice(&chunk[..len]),
            }
        }
        // Do not wait for flow control forever.
        connection.window.close();
        Ok(())
    }

    fn take_packets(&mut self, input: &[u8]) -> Result<usize, Error> {
        let mut used = 0;
        while let Some((frame, len)) = Frame::parse(&input[used..], MAX_BODY_LEN)? {
            if !frame.header.magic.is_response() {
                self.answer(&frame)?;
            }
            used += len;
        }
        Ok(used)
    }

    fn answer(&mut self, request: &Frame<'_>) -> Result<(), Error> {
        match request.header.opcode {
            Opcode::HELLO => {
                let wanted = request.value.as_chunks::<2>().0;
                let granted: Vec<u8> = wanted
                    .iter()
                    .filter(|code| {
                        Feature(u16::from_be_bytes(**code))
                            != Feature::CLUSTER_MAP_CHANGE_NOTIFICATION
                    })
                    .flatten()
                    .copied()
                    .collect();
                self.respond(request, Status::SUCCESS, &granted)
            }
            Opcode::SASL_LIST_MECHS => {
                self.respond(request, Status::SUCCESS, MECHANISM.name().as_bytes())
            }
            Opcode::SASL_AUTH => {
                let credentials =
                    ScramCredentials::derive(MECHANISM, PASSWORD, &[7; 16], MIN_ITERATIONS)?;
                let mut scram = ScramServer::read(request.value)?;
                let challenge = scram.challenge(credentials, "a nonce of the scripted node")?;
                self.scram = Some(scram);
                self.respond(request, Status::AUTH_CONTINUE, &challenge)
            }
            Opcode::SASL_STEP => {
                let scram = self.scram.take().ok_or("SASL_STEP without SASL_AUTH")?;
                let last = scram.verify(request.value)?;
                self.respond(request, Status::SUCCESS, &last)
            }
            Opcode::GET_CLUSTER_CONFIG => {
                self.respond_json(request, self.plan.config().to_string().as_bytes())
            }
            Opcode::GET_COLLECTIONS_MANIFEST => {
                self.respond_json(request, manifest().to_string().as_bytes())
            }
            Opcode::GET_ALL_VB_SEQNOS => {
                let mut value = Vec::new();
                for vbid in 0..self.plan.shape.vbuckets {
                    value.extend_from_slice(&vbid.to_be_bytes());
                    value.extend_from_slice(&self.plan.high_seqno.to_be_bytes());
                }
                self.respond(request, Status::SUCCESS, &value)
            }
            Opcode::DCP_GET_FAILOVER_LOG | Opcode::GET_FAILOVER_LOG => {
                self.respond(request, Status::SUCCESS, &failover_log(request.header.vbid()))
            }
            Opcode::DCP_CONTROL => {
                let control = Control::decode(request)?;
                if control.key == Control::CONNECTION_BUFFER_SIZE.as_bytes() {
                    self.window.set_limit(std::str::from_utf8(control.value)?.parse()?);
                }
                self.respond(request, Status::SUCCESS, &[])
            }
            Opcode::DCP_BUFFER_ACK => {
                self.window.give_back(u64::from(BufferAck::decode(request)?.bytes));
                Ok(())
            }
            Opcode::DCP_STREAM_REQ => self.open_stream(request),
            Opcode::SELECT_BUCKET | Opcode::DCP_OPEN | Opcode::DCP_CLOSE_STREAM | Opcode::NOOP => {
                self.respond(request, Status::SUCCESS, &[])
            }
            _ => self.respond(request, Status::UNKNOWN_COMMAND, &[]),
        }
    }

    fn respond(&self, request: &Frame<'_>, status: Status, value: &[u8]) -> Result<(), Error> {
        let response = Frame::response(request.header.opcode, status)
            .with_opaque(request.header.opaque)
            .with_value(value);
        self.write(&response)
    }

    fn respond_json(&self, request: &Frame<'_>, value: &[u8]) -> Result<(), Error> {
        let response = Frame::response(request.header.opcode, Status::SUCCESS)
            .with_opaque(request.header.opaque)
            .with_datatype(Datatype::JSON)
            .with_value(value);
        self.write(&response)
    }

    fn write(&self, frame: &Frame<'_>) -> Result<(), Error> {
        let mut packet = Vec::new();
        frame.encode(&mut packet)?;
        self.writer.lock().unwrap_or_else(PoisonError::into_inner).write_all(&packet)?;
        Ok(())
    }

    /// The frames begin once every vBucket's stream is open.
    fn open_stream(&mut self, request: &Frame<'_>) -> Result<(), Error> {
        let stream = StreamRequest::decode(request)?;
        if self.frames.is_none() {
            let ready = self.ready.lock().unwrap_or_else(PoisonError::into_inner).take();
            self.frames = Some(ready.map_or_else(|| Frames::new(self.plan.shape), Ok)?);
        }
        let Some(frames) = &mut self.frames else { return Ok(()) };
        if stream.start_seqno != Seqno::ZERO || stream.vbid.0 >= self.plan.shape.vbuckets {
            return self.respond(request, Status::EINVAL, &[]);
        }
        frames.set_opaque(stream.vbid, stream.opaque);
        self.respond(request, Status::SUCCESS, &failover_log(stream.vbid))?;
        self.opened += 1;
        if self.opened == self.plan.shape.vbuckets
            && let Some(frames) = self.frames.take()
        {
            let (writer, window) = (Arc::clone(&self.writer), Arc::clone(&self.window));
            let (plan, ready) = (self.plan, Arc::clone(&self.ready));
            thread::spawn(move || match send(frames, plan, &writer, &window) {
                Ok(frames) => {
                    *ready.lock().unwrap_or_else(PoisonError::into_inner) = Some(frames);
                }
                Err(_) => {
                    // The reader notices when the connection ends.
                    let writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
                    let _ = writer.shutdown(Shutdown::Both);
                }
            });
        }
        Ok(())
    }
}

fn send(
    mut frames: Frames,
    plan: Plan,
    writer: &Mutex<TcpStream>,
    window: &Window,
) -> Result<Frames, Error> {
    let Plan { passes, interval, writes, .. } = plan;
    // With an interval, send one mutation and its marker at a time.
    let pieces = frames.pieces(interval.map_or(WRITE_LEN, |_| marked_len(plan.shape.value_len)));
    let write = |piece: &[u8]| -> Result<(), Error> {
        let mut rest = piece;
        while !rest.is_empty() {
            let now;
            (now, rest) = rest.split_at(first_frames(rest, window.room()?));
            writes.write(&mut *writer.lock().unwrap_or_else(PoisonError::into_inner), now)?;
            window.sent(now.len() as u64);
        }
        Ok(())
    };
    for pass in 0..passes {
        if pass > 0 {
            frames.advance();
        }
        for piece in &pieces {
            if let Some(interval) = interval {
                thread::sleep(interval);
                frames.stamp(piece.end, SystemTime::now().duration_since(UNIX_EPOCH)?);
            }
            write(&frames.bytes()[piece.clone()])?;
        }
    }
    write(&frames.stream_ends()?)?;
    if passes > 1 {
        frames.rewind();
    }
    Ok(frames)
}

/// Length of the frames that may be sent with `room` left: the last one may exceed it.
fn first_frames(frames: &[u8], room: u64) -> usize {
    let mut end = 0;
    if frames.len() as u64 <= room {
        return frames.len();
    }
    while (end as u64) < room
        && let Some(header) = frames[end..].first_chunk().and_then(|h| Header::decode(h).ok())
    {
        end += header.packet_len();
    }
    end
}

impl Plan {
    fn config(&self) -> serde_json::Value {
        let map: Vec<[u8; 1]> = vec![[0]; usize::from(self.shape.vbuckets)];
        json!({
            "rev": 1,
            "revEpoch": 1,
            "name": BUCKET,
            "uuid": "5c1f0e1d2b3a49788796a5b4c3d2e1f0",
            "nodeLocator": "vbucket",
            "bucketType": "membase",
            "collectionsManifestUid": "0",
            "bucketCapabilities": ["dcp", "collections", "xattr", "cccp", "nodesExt"],
            "nodesExt": [{
                "hostname": "127.0.0.1",
                "services": {"kv": self.port},
                "thisNode": true,
            }],
            "vBucketServerMap": {
                "hashAlgorithm": "CRC",
                "numReplicas": 0,
                "serverList": [format!("127.0.0.1:{}", self.port)],
                "vBucketMap": map,
            },
        })
    }
}

fn manifest() -> serde_json::Value {
    json!({
        "uid": "0",
        "scopes": [{
            "name": "_default",
            "uid": "0",
            "collections": [{"name": "_default", "uid": "0"}],
        }],
    })
}

/// Appends responses that accept every stream request in `requests`; returns the opaques for the
/// streams' packets.
///
/// # Errors
/// If the bytes are not packets.
pub fn answer_stream_requests(
    requests: &[u8],
    answers: &mut Vec<u8>,
) -> Result<Vec<(Vbid, Opaque)>, Error> {
    answer(requests, answers, |vbid| (Status::SUCCESS, failover_log(vbid)))
}

/// Appends responses that ask for a rollback to the beginning.
///
/// # Errors
/// If the bytes are not packets.
pub fn refuse_stream_requests(requests: &[u8], answers: &mut Vec<u8>) -> Result<(), Error> {
    let beginning = Seqno::ZERO.0.to_be_bytes();
    answer(requests, answers, |_| (Status::ROLLBACK, beginning.to_vec()))?;
    Ok(())
}

fn answer(
    requests: &[u8],
    answers: &mut Vec<u8>,
    with: impl Fn(Vbid) -> (Status, Vec<u8>),
) -> Result<Vec<(Vbid, Opaque)>, Error> {
    let mut opaques = Vec::new();
    let mut rest = requests;
    while let Some((frame, used)) = Frame::parse(rest, MAX_BODY_LEN)? {
        if frame.header.opcode == Opcode::DCP_STREAM_REQ {
            let (vbid, opaque) = (frame.header.vbid(), frame.header.opaque);
            let (status, value) = with(vbid);
            Frame::response(Opcode::DCP_STREAM_REQ, status)
                .with_opaque(opaque)
                .with_value(&value)
                .encode(answers)?;
            opaques.push((vbid, opaque));
        }
        rest = &rest[used..];
    }
    Ok(opaques)
}

/// The history branch of a vBucket's changes.
#[must_use]
pub fn branch_of(vbid: Vbid) -> Vbuuid {
    Vbuuid(0xdc9_0000_0000 + u64::from(vbid.0))
}

fn failover_log(vbid: Vbid) -> Vec<u8> {
    let vbuuid = branch_of(vbid);
    let mut log = Vec::new();
    encode_failover_log([FailoverEntry { vbuuid, seqno: Seqno::ZERO }], &mut log);
    log
}
