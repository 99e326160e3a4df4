//! The plain drain: a client that connects, opens every stream, and then only reads, counts and
//! acknowledges. No client that processes the changes can be faster.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use bytes::BytesMut;
use dcp_proto::consumer::{Auth, Bootstrap, BootstrapConfig, DcpOpen};
use dcp_proto::flow_control::counted_bytes;
use dcp_wire::message::{BufferAck, OpenFlags, StreamRequest, StreamRequestFlags};
use dcp_wire::{Frame, Header, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, Vbid, Vbuuid};

use crate::Error;
use crate::measure::WallClock;

/// Maximum time without a byte before a drain fails.
const PATIENCE: Duration = Duration::from_secs(20);

/// Length of one read in bytes.
const READ_LEN: usize = 1024 * 1024;

/// The node, bucket and streams to drain.
#[derive(Clone, Debug)]
pub struct Target {
    /// Address of the node.
    pub address: SocketAddr,
    /// The bucket.
    pub bucket: String,
    /// User name.
    pub username: String,
    /// Password.
    pub password: String,
    /// The vBuckets with the end seqnos of their streams.
    pub ends: Vec<(Vbid, Seqno)>,
    /// Flow-control buffer in bytes.
    pub buffer_size: u32,
    /// Number of consecutive streams per vBucket, at least 1: each is requested when the previous
    /// one of its vBucket has ended.
    pub passes: usize,
    /// How long to sleep before each read, to let data accumulate.
    pub nap: Duration,
}

/// Totals of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Drained {
    /// Mutations, deletions and expirations.
    pub changes: u64,
    /// Bytes of packets counted by flow control: all messages of the streams.
    pub bytes: u64,
    /// From before the first stream request until the last stream end.
    pub elapsed: Duration,
}

/// Connects, opens the streams and reads until all of them have ended.
///
/// # Errors
/// If the connection fails or stays silent, a stream is refused, or a packet is malformed.
pub fn drain(target: &Target) -> Result<Drained, Error> {
    let mut socket = TcpStream::connect(target.address)?;
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let leftover = bootstrap(&mut socket, target)?;
    let clock = WallClock::start();
    let mut requests = Vec::new();
    for &end in &target.ends {
        request_stream(end, &mut requests)?;
    }
    socket.write_all(&requests)?;
    let streams = target.ends.len();
    let again = streams * target.passes.saturating_sub(1);
    let mut walk = Walk { open: streams, again, ..Walk::default() };
    let mut buffer = vec![0; READ_LEN];
    let mut acknowledged = 0;
    walk.feed(&leftover)?;
    while walk.open > 0 {
        if !target.nap.is_zero() {
            thread::sleep(target.nap);
        }
        let len = socket.read(&mut buffer)?;
        if len == 0 {
            return Err("the node closed the connection before the streams had ended".into());
        }
        walk.feed(&buffer[..len])?;
        let freed = walk.counted - acknowledged;
        if freed >= u64::from(target.buffer_size) / 2 {
            let mut packet = Vec::new();
            BufferAck { bytes: u32::try_from(freed)? }.encode(&mut packet)?;
            socket.write_all(&packet)?;
            acknowledged = walk.counted;
        }
        for vbid in std::mem::take(&mut walk.ended) {
            let end = target.ends.iter().find(|end| end.0 == vbid);
            request_stream(*end.ok_or("a stream nobody asked for ended")?, &mut walk.answers)?;
        }
        if !walk.answers.is_empty() {
            socket.write_all(&std::mem::take(&mut walk.answers))?;
        }
    }
    Ok(Drained { changes: walk.changes, bytes: walk.counted, elapsed: clock.elapsed() })
}

fn request_stream((vbid, end_seqno): (Vbid, Seqno), out: &mut Vec<u8>) -> Result<(), Error> {
    let request = StreamRequest {
        vbid,
        opaque: Opaque(u32::from(vbid.0)),
        flags: StreamRequestFlags::empty(),
        start_seqno: Seqno::ZERO,
        end_seqno,
        vbuuid: Vbuuid(0),
        snapshot_start: Seqno::ZERO,
        snapshot_end: Seqno::ZERO,
        value: &[],
    };
    Ok(request.encode(out)?)
}

fn bootstrap(socket: &mut TcpStream, target: &Target) -> Result<BytesMut, Error> {
    let auth = Auth::Password {
        username: target.username.clone(),
        password: target.password.clone().into(),
        nonce: "a nonce of a client that only drains".replace(' ', "-"),
        mechanisms: dcp_wire::sasl::Mechanism::SCRAM.to_vec(),
    };
    let mut config =
        BootstrapConfig::new(auth, Some(target.bucket.clone()), target.address.ip().to_string());
    config.dcp =
        Some(DcpOpen::new("dcp-benches-drain", OpenFlags::empty(), target.buffer_size, 20));
    let mut machine = Bootstrap::new(config)?;
    let (mut input, mut output) = (BytesMut::new(), BytesMut::new());
    let mut chunk = vec![0; 64 * 1024];
    loop {
        while machine.poll_transmit(&mut output) {}
        socket.write_all(&output.split())?;
        if machine.is_done() {
            return Ok(input);
        }
        let len = socket.read(&mut chunk)?;
        if len == 0 {
            return Err("the node closed the connection during set-up".into());
        }
        input.extend_from_slice(&chunk[..len]);
        machine.handle_bytes(&mut input)?;
    }
}

/// Finds the packet headers in the received bytes; bodies are skipped without storing them.
#[derive(Debug, Default)]
struct Walk {
    open: usize,
    /// Streams still to be requested, each when another has ended.
    again: usize,
    /// vBuckets whose stream has ended and has to be requested again.
    ended: Vec<Vbid>,
    changes: u64,
    counted: u64,
    /// Remaining bytes of the current packet.
    skip: usize,
    /// An incomplete header.
    partial: Vec<u8>,
    answers: Vec<u8>,
}

impl Walk {
    fn feed(&mut self, input: &[u8]) -> Result<(), Error> {
        let mut rest = input;
        if !self.partial.is_empty() {
            let take = rest.len().min(Header::LEN - self.partial.len());
            let (head, after) = rest.split_at(take);
            self.partial.extend_from_slice(head);
            rest = after;
            let Some(header) = self.partial.first_chunk::<{ Header::LEN }>().copied() else {
                return Ok(());
            };
            self.partial.clear();
            self.skip = self.header(&header)?;
        }
        loop {
            let skipped = self.skip.min(rest.len());
            rest = &rest[skipped..];
            self.skip -= skipped;
            let Some((header, after)) = rest.split_first_chunk::<{ Header::LEN }>() else {
                break;
            };
            self.skip = self.header(header)?;
            rest = after;
        }
        self.partial.extend_from_slice(rest);
        Ok(())
    }

    /// Processes one header; returns the length of its body.
    fn header(&mut self, bytes: &[u8; Header::LEN]) -> Result<usize, Error> {
        let header = Header::decode(bytes)?;
        self.counted += counted_bytes(&header);
        match header.opcode {
            Opcode::DCP_MUTATION | Opcode::DCP_DELETION | Opcode::DCP_EXPIRATION => {
                self.changes += 1;
            }
            Opcode::DCP_STREAM_END if self.again > 0 => {
                self.again -= 1;
                self.ended.push(header.vbid());
            }
            Opcode::DCP_STREAM_END => {
                self.open = self.open.checked_sub(1).ok_or("more stream ends than streams")?;
            }
            Opcode::DCP_STREAM_REQ if header.status() != Status::SUCCESS => {
                return Err(format!("a stream was refused: {}", header.status()).into());
            }
            Opcode::DCP_NOOP => Frame::response(Opcode::DCP_NOOP, Status::SUCCESS)
                .with_opaque(header.opaque)
                .encode(&mut self.answers)?,
            _ => {}
        }
        if header.body_len as usize > MAX_BODY_LEN {
            return Err("a packet is too long".into());
        }
        Ok(header.body_len as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::{Frames, Shape};

    #[test]
    fn the_walk_counts_the_same_however_the_bytes_are_cut() {
        let frames = Frames::new(Shape { value_len: 64, vbuckets: 3, pass_bytes: 5000 }).unwrap();
        let mut bytes = frames.bytes().to_vec();
        bytes.extend_from_slice(&frames.stream_ends().unwrap());
        for piece in [1, 7, 23, 24, 25, 139, 1000, bytes.len()] {
            let mut walk = Walk { open: 3, ..Walk::default() };
            for chunk in bytes.chunks(piece) {
                walk.feed(chunk).unwrap();
            }
            assert_eq!(
                (walk.open, walk.changes, walk.counted),
                (0, frames.rows(), bytes.len() as u64),
                "pieces of {piece} bytes"
            );
        }
    }
}
