//! The consumer's side of one DCP connection of a server.

use std::collections::BTreeSet;

use bytes::BytesMut;
use dcp_wire::message::{AddStream, BufferAck, CloseStream, SeqnoAck, StreamEnd, rollback_seqno};
use dcp_wire::{DecodeError, EncodeError, Frame, Opaque, Opcode, Seqno, Status, Vbid};
use rustc_hash::FxHashMap;
use tracing::debug;

use super::config::Config;
use super::negotiation::{Answered, Negotiation};
use super::store::ReplicaStore;
use super::stream::{Phase, Rejected, Stream, Taken};
use crate::noop;
use crate::refusal::Refusal;
use crate::reply::{refuse, succeed};
use crate::{Disconnect, Features, ServerVersion, VBucketState};
use dcp_proto::flow_control::counted_bytes;

/// Bytes are acknowledged once they exceed the window divided by this.
const ACK_SHARE: u64 = 5;

/// The consumer's end of a connection over which replicas are fed (DCP pages "add-stream",
/// "snapshot-marker", "flow-control").
///
/// Feed it every packet, and drain [`poll_transmit`](Self::poll_transmit) after each. Its state is
/// bounded by the number of vBuckets of a node.
#[derive(Debug)]
pub struct Connection {
    version: ServerVersion,
    negotiation: Negotiation,
    features: Features,
    /// Whether the node takes part in durable writes.
    is_replicating: bool,
    streams: FxHashMap<Vbid, Stream>,
    /// Streams to request, in the order in which they were added.
    queue: Vec<Vbid>,
    /// Streams with prepares to acknowledge.
    unacknowledged: BTreeSet<Vbid>,
    last_opaque: u32,
    /// 0 without flow control.
    window: u64,
    freed: u64,
}

impl Connection {
    /// A connection that was just opened; `features` is what its HELLO negotiated.
    #[must_use]
    pub fn new(config: &Config, features: Features) -> Self {
        let is_modern = !config.server_version.is_legacy();
        Self {
            version: config.server_version,
            negotiation: Negotiation::new(config, features.collections),
            features,
            is_replicating: is_modern && config.consumer_name.is_some(),
            streams: FxHashMap::default(),
            queue: Vec::new(),
            unacknowledged: BTreeSet::new(),
            last_opaque: 0,
            window: u64::from(config.buffer_size),
            freed: 0,
        }
    }

    /// Whether a stream of the vBucket was added and has not ended.
    #[must_use]
    pub fn has_stream(&self, vbid: Vbid) -> bool {
        self.streams.contains_key(&vbid)
    }

    /// Handles a packet from the manager or the producer and appends the answer to `out`.
    ///
    /// # Errors
    /// [`Disconnect`]: close the connection after writing what is in `out`.
    pub fn handle_frame(
        &mut self,
        frame: &Frame<'_>,
        store: &dyn ReplicaStore,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        self.freed += counted_bytes(&frame.header);
        if frame.header.magic.is_response() {
            return self.handle_response(frame, store, out);
        }
        let opcode = frame.header.opcode;
        match opcode {
            Opcode::DCP_NOOP => match noop::check(frame) {
                Ok(()) => succeed(frame, out),
                Err(error) => self.reject(frame, error, out),
            },
            Opcode::DCP_ADD_STREAM => self.add_stream(frame, store, out),
            Opcode::DCP_CLOSE_STREAM => self.close_stream(frame, out),
            Opcode::DCP_STREAM_REQ
            | Opcode::DCP_GET_FAILOVER_LOG
            | Opcode::DCP_BUFFER_ACK
            | Opcode::DCP_SEQNO_ACK => Err(Disconnect::UnexpectedRequest(opcode)),
            // A consumer has no settings, and never asks for out-of-order snapshots.
            Opcode::DCP_CONTROL | Opcode::DCP_OSO_SNAPSHOT => {
                self.respond(frame, Status::EINVAL, out)
            }
            Opcode::DCP_FLUSH => self.respond(frame, Status::NOT_SUPPORTED, out),
            Opcode::DCP_CACHE_TRANSFER | Opcode::DCP_CACHE_TRANSFER_END => {
                self.respond(frame, Status::UNKNOWN_COMMAND, out)
            }
            _ => self.stream_message(frame, store, out),
        }
    }

    fn add_stream(
        &mut self,
        frame: &Frame<'_>,
        store: &dyn ReplicaStore,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        let (vbid, asked_by) = (frame.header.vbid(), frame.header.opaque);
        let flags = match AddStream::decode(frame) {
            Ok(request) => request.flags,
            Err(error) => return self.reject(frame, error, out),
        };
        match store.state(vbid) {
            Some(VBucketState::Replica | VBucketState::Pending | VBucketState::Dead) => {}
            _ => return self.respond(frame, Status::NOT_MY_VBUCKET, out),
        }
        if self.streams.contains_key(&vbid) {
            return self.respond(frame, Status::KEY_EEXISTS, out);
        }
        let opaque = self.next_opaque();
        self.streams.insert(vbid, Stream::new(vbid, opaque, flags, asked_by));
        self.queue.push(vbid);
        Ok(())
    }

    fn close_stream(&mut self, frame: &Frame<'_>, out: &mut BytesMut) -> Result<(), Disconnect> {
        if let Err(error) = CloseStream::decode(frame) {
            return self.reject(frame, error, out);
        }
        match self.remove(frame.header.vbid()) {
            Some(_) => succeed(frame, out),
            None => self.respond(frame, Status::KEY_ENOENT, out),
        }
    }

    fn remove(&mut self, vbid: Vbid) -> Option<Stream> {
        self.queue.retain(|&queued| queued != vbid);
        self.unacknowledged.remove(&vbid);
        self.streams.remove(&vbid)
    }

    /// Handles a stream message. It is answered only if it is refused or asks for an answer.
    fn stream_message(
        &mut self,
        frame: &Frame<'_>,
        store: &dyn ReplicaStore,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        let (vbid, opcode) = (frame.header.vbid(), frame.header.opcode);
        let (unknown, mismatch) = if self.version.is_legacy() {
            (Status::KEY_ENOENT, Status::KEY_EEXISTS)
        } else {
            (Status::DCP_STREAM_NOT_FOUND, Status::OPAQUE_NO_MATCH)
        };
        let Some(stream) = self.streams.get_mut(&vbid).filter(|it| it.phase == Phase::Open) else {
            return self.respond(frame, unknown, out);
        };
        if stream.opaque != frame.header.opaque {
            return self.respond(frame, mismatch, out);
        }
        let taken = match opcode {
            Opcode::DCP_STREAM_END => {
                if let Err(error) = StreamEnd::decode(frame) {
                    return self.reject(frame, error, out);
                }
                self.remove(vbid);
                return Ok(());
            }
            Opcode::DCP_SNAPSHOT_MARKER => stream.marker(frame, self.is_replicating, store),
            Opcode::DCP_SET_VBUCKET_STATE => stream.set_state(frame, store),
            _ => stream.change(frame, self.features.collections, store),
        };
        if stream.has_prepares() {
            self.unacknowledged.insert(vbid);
        }
        match taken {
            Ok(Taken::Silently) => Ok(()),
            Ok(Taken::Done) => succeed(frame, out),
            Ok(Taken::SnapshotReceived) => {
                let response = Frame::response(Opcode::DCP_SNAPSHOT_MARKER, Status::SUCCESS);
                write(&response.with_opaque(frame.header.opaque), out)
            }
            Err(Rejected::Status(status)) => self.respond(frame, status, out),
            Err(Rejected::Malformed(error)) => self.reject(frame, error, out),
            Err(Rejected::OutOfRange(seqno)) => {
                self.respond(frame, Status::ERANGE, out)?;
                Err(Disconnect::OutOfRange { vbid, seqno })
            }
            Err(Rejected::NotPrepared(seqno)) => {
                self.respond(frame, Status::KEY_ENOENT, out)?;
                Err(Disconnect::NotPrepared { vbid, seqno })
            }
            Err(Rejected::BadMarker) => {
                self.respond(frame, Status::EINVAL, out)?;
                Err(Disconnect::BadMarker(vbid))
            }
        }
    }

    fn handle_response(
        &mut self,
        frame: &Frame<'_>,
        store: &dyn ReplicaStore,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        let (opcode, opaque) = (frame.header.opcode, frame.header.opaque);
        let status = frame.header.status();
        match opcode {
            Opcode::DCP_STREAM_REQ => self.stream_answered(frame, store, out),
            Opcode::GET_ERROR_MAP | Opcode::DCP_CONTROL => {
                if self.negotiation.answered(opaque, status.is_success()) == Answered::NoWindow {
                    self.window = 0;
                }
                Ok(())
            }
            // Acknowledgements are answered only if they are refused.
            Opcode::DCP_BUFFER_ACK | Opcode::DCP_SEQNO_ACK if !status.is_success() => {
                debug!(%opcode, %status, "the producer refused an acknowledgement");
                Ok(())
            }
            _ => Err(Disconnect::UnexpectedResponse { opcode, status }),
        }
    }

    fn stream_answered(
        &mut self,
        frame: &Frame<'_>,
        store: &dyn ReplicaStore,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        let (opaque, status) = (frame.header.opaque, frame.header.status());
        let is_it =
            |stream: &&mut Stream| stream.opaque == opaque && stream.phase == Phase::Requested;
        let Some(stream) = self.streams.values_mut().find(is_it) else {
            // It has been closed since.
            return Ok(());
        };
        let vbid = stream.vbid;
        let malformed = |_: DecodeError| Disconnect::MalformedResponse(frame.header.opcode);
        match status {
            Status::SUCCESS => {
                let Some(mut table) = store.failover_table(vbid) else {
                    return self.fail(vbid, Status::NOT_MY_VBUCKET, out);
                };
                table.replace(frame.value).map_err(malformed)?;
                store.set_failover_table(vbid, table);
                stream.open(store);
                if stream.has_prepares() {
                    self.unacknowledged.insert(vbid);
                }
                match stream.asked_by.take() {
                    Some(asked_by) => added(asked_by, opaque, out),
                    None => Ok(()),
                }
            }
            Status::ROLLBACK => {
                let to = rollback_seqno(frame).map_err(malformed)?;
                if !stream.roll_back(to, count(&mut self.last_opaque), store) {
                    return self.fail(vbid, status, out);
                }
                self.queue.push(vbid);
                Ok(())
            }
            _ => self.fail(vbid, status, out),
        }
    }

    /// Drops a stream and reports the failure to the manager if it still waits.
    fn fail(&mut self, vbid: Vbid, status: Status, out: &mut BytesMut) -> Result<(), Disconnect> {
        let asked_by = self.remove(vbid).and_then(|stream| stream.asked_by);
        asked_by.map_or(Ok(()), |asked_by| {
            write(&Frame::response(Opcode::DCP_ADD_STREAM, status).with_opaque(asked_by), out)
        })
    }

    fn respond(
        &self,
        frame: &Frame<'_>,
        status: Status,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        refuse(frame, &Refusal::Status(status), None, self.features, out)
    }

    fn reject(
        &self,
        frame: &Frame<'_>,
        error: DecodeError,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        refuse(frame, &Refusal::Malformed(error), None, self.features, out)
    }

    fn next_opaque(&mut self) -> Opaque {
        count(&mut self.last_opaque)
    }

    /// Appends the requests and acknowledgements that are due.
    ///
    /// # Errors
    /// [`Disconnect`] if one does not fit a packet; only a consumer name of 4 GiB would not.
    pub fn poll_transmit(
        &mut self,
        store: &dyn ReplicaStore,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        // Nodes send nothing before the first stream is added.
        if self.last_opaque == 0 {
            return Ok(());
        }
        let last_opaque = &mut self.last_opaque;
        self.negotiation.write(|| count(last_opaque), out).map_err(too_long)?;
        if !self.negotiation.is_done() {
            return Ok(());
        }
        self.request_streams(store, out)?;
        self.acknowledge_prepares(store, out)?;
        if self.window != 0 && self.freed.saturating_mul(ACK_SHARE) > self.window {
            let bytes = u32::try_from(self.freed).unwrap_or(u32::MAX);
            self.freed -= u64::from(bytes);
            BufferAck { bytes }.encode(out).map_err(too_long)?;
        }
        Ok(())
    }

    fn request_streams(
        &mut self,
        store: &dyn ReplicaStore,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        for vbid in core::mem::take(&mut self.queue) {
            let Some(stream) = self.streams.get_mut(&vbid) else { continue };
            match stream.request(store) {
                Some(request) => request.encode(out).map_err(too_long)?,
                None => self.fail(vbid, Status::NOT_MY_VBUCKET, out)?,
            }
        }
        Ok(())
    }

    /// Acknowledges prepares that this node holds as their levels demand.
    fn acknowledge_prepares(
        &mut self,
        store: &dyn ReplicaStore,
        out: &mut BytesMut,
    ) -> Result<(), Disconnect> {
        if !self.is_replicating || self.unacknowledged.is_empty() {
            return Ok(());
        }
        for vbid in self.unacknowledged.clone() {
            let Some(stream) = self.streams.get_mut(&vbid) else { continue };
            let persisted =
                store.position(vbid).map_or(Seqno::ZERO, |position| position.persisted_seqno);
            if let Some(prepared_seqno) = stream.take_acknowledged(persisted) {
                SeqnoAck { prepared_seqno }.encode(stream.address(), out).map_err(too_long)?;
            }
            if !stream.has_prepares() {
                self.unacknowledged.remove(&vbid);
            }
        }
        Ok(())
    }
}

/// The opaque of the next request. Nodes write it in the byte order of their processors.
const fn count(last_opaque: &mut u32) -> Opaque {
    *last_opaque = last_opaque.wrapping_add(1);
    Opaque(last_opaque.swap_bytes())
}

/// Answers the ADD_STREAM with opaque `asked_by`: the stream has `opaque`.
fn added(asked_by: Opaque, opaque: Opaque, out: &mut BytesMut) -> Result<(), Disconnect> {
    let extras = opaque.0.swap_bytes().to_be_bytes();
    let frame = Frame::response(Opcode::DCP_ADD_STREAM, Status::SUCCESS).with_opaque(asked_by);
    write(&frame.with_extras(&extras), out)
}

fn write(frame: &Frame<'_>, out: &mut BytesMut) -> Result<(), Disconnect> {
    frame.encode(out).map_err(too_long)
}

fn too_long(EncodeError { len, .. }: EncodeError) -> Disconnect {
    Disconnect::ResponseTooLong(len)
}
