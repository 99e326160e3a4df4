//! A client of a connection machine: sends requests, reads what comes back as text.

use std::time::{Duration, Instant};

use bytes::BytesMut;
use dcp_producer_proto::{Connection, ConnectionConfig, Disconnect, Features};
use dcp_test::bucket::{BRANCH, Bucket};
use dcp_test::words;
use dcp_wire::message::{
    BufferAck, CloseStream, Control, Open, OpenFlags, StreamAddress, StreamRequest,
    StreamRequestFlags,
};
use dcp_wire::{Datatype, Frame, MAX_BODY_LEN, Opaque, Opcode, Seqno, Status, StreamId, Vbid};

pub(crate) const COLLECTIONS: Features = Features { collections: true, ..LEGACY };
pub(crate) const LEGACY: Features = Features { xerror: true, json: true, ..Features::NONE };

/// The opaque of every stream request.
pub(crate) const OPAQUE: Opaque = Opaque(0x77);

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Response {
    pub(crate) status: Status,
    pub(crate) datatype: Datatype,
    pub(crate) opaque: Opaque,
    pub(crate) value: Vec<u8>,
}

pub(crate) struct Client {
    pub(crate) connection: Connection,
    pub(crate) bucket: Bucket,
    pub(crate) features: Features,
    pub(crate) now: Instant,
    out: BytesMut,
}

pub(crate) use dcp_test::harness::start as some_instant;

/// A request for everything of vBucket 0, from the beginning, for ever.
pub(crate) fn from_scratch() -> StreamRequest<'static> {
    StreamRequest {
        vbid: Vbid(0),
        opaque: OPAQUE,
        flags: StreamRequestFlags::empty(),
        start_seqno: Seqno(0),
        end_seqno: Seqno::MAX,
        vbuuid: BRANCH,
        snapshot_start: Seqno(0),
        snapshot_end: Seqno(0),
        value: &[],
    }
}

/// A request that resumes inside a snapshot.
pub(crate) fn resume(start: u64, snapshot: (u64, u64)) -> StreamRequest<'static> {
    StreamRequest {
        start_seqno: Seqno(start),
        snapshot_start: Seqno(snapshot.0),
        snapshot_end: Seqno(snapshot.1),
        ..from_scratch()
    }
}

impl Client {
    /// A connection that is not opened yet.
    pub(crate) fn new(bucket: Bucket, features: Features) -> Self {
        Self {
            connection: Connection::new(ConnectionConfig::default()),
            bucket,
            features,
            now: some_instant(),
            out: BytesMut::new(),
        }
    }

    /// A producer connection with noops.
    pub(crate) fn open(bucket: Bucket, features: Features) -> Self {
        Self::open_with(bucket, features, OpenFlags::PRODUCER, &[("enable_noop", "true")])
    }

    pub(crate) fn open_with(
        bucket: Bucket,
        features: Features,
        flags: OpenFlags,
        controls: &[(&str, &str)],
    ) -> Self {
        let mut client = Self::new(bucket, features);
        assert_eq!(client.send_open(flags), Status::SUCCESS);
        for (key, value) in controls {
            assert_eq!(client.control(key, value), Status::SUCCESS, "{key}={value}");
        }
        client
    }

    pub(crate) fn send_open(&mut self, flags: OpenFlags) -> Status {
        self.send_open_as(b"test", flags)
    }

    pub(crate) fn send_open_as(&mut self, name: &[u8], flags: OpenFlags) -> Status {
        let open = Open { flags, name, value: &[], datatype: Datatype::RAW };
        let mut packet = BytesMut::new();
        open.encode(Opaque(1), &mut packet).unwrap();
        self.status(&packet)
    }

    pub(crate) fn control(&mut self, key: &str, value: &str) -> Status {
        let mut packet = BytesMut::new();
        let control = Control { key: key.as_bytes(), value: value.as_bytes() };
        control.encode(Opaque(2), &mut packet).unwrap();
        self.status(&packet)
    }

    pub(crate) fn request(&mut self, request: &StreamRequest<'_>) -> Status {
        self.ask(request).status
    }

    pub(crate) fn ask(&mut self, request: &StreamRequest<'_>) -> Response {
        let mut packet = BytesMut::new();
        request.encode(&mut packet).unwrap();
        self.exchange(&packet).expect("no disconnect").expect("an answer")
    }

    pub(crate) fn close(&mut self, stream_id: Option<u16>) -> Status {
        let to = StreamAddress { stream_id: stream_id.map(StreamId), ..StreamAddress::default() };
        let mut packet = BytesMut::new();
        CloseStream.encode(to, &mut packet).unwrap();
        self.status(&packet)
    }

    pub(crate) fn ack(&mut self, bytes: u32) {
        let mut packet = BytesMut::new();
        BufferAck { bytes }.encode(&mut packet).unwrap();
        assert_eq!(self.exchange(&packet), Ok(None), "an acknowledgement has no answer");
    }

    /// Acknowledges what a replica has; nothing is answered.
    pub(crate) fn seqno_ack(&mut self, seqno: Seqno) -> Result<(), Disconnect> {
        let mut packet = BytesMut::new();
        let extras = seqno.0.to_be_bytes();
        Frame::request(Opcode::DCP_SEQNO_ACK).with_extras(&extras).encode(&mut packet).unwrap();
        self.exchange(&packet).map(|answer| assert_eq!(answer, None))
    }

    pub(crate) fn status(&mut self, packet: &[u8]) -> Status {
        self.exchange(packet).expect("no disconnect").expect("an answer").status
    }

    /// Sends a packet; returns the response if there is one.
    pub(crate) fn exchange(&mut self, packet: &[u8]) -> Result<Option<Response>, Disconnect> {
        let (frame, used) = Frame::parse(packet, MAX_BODY_LEN).unwrap().expect("a whole packet");
        assert_eq!(used, packet.len());
        let mut out = BytesMut::new();
        let source = Some(&self.bucket);
        self.connection.handle_frame(self.now, &frame, source, self.features, &mut out)?;
        if out.is_empty() {
            return Ok(None);
        }
        let (response, used) = Frame::parse(&out, MAX_BODY_LEN).unwrap().expect("whole");
        assert_eq!(used, out.len(), "one response");
        assert!(response.header.magic.is_response());
        assert_eq!(response.header.opcode, frame.header.opcode);
        assert_eq!(response.header.opaque, frame.header.opaque);
        Ok(Some(Response {
            status: response.header.status(),
            datatype: response.header.datatype,
            opaque: response.header.opaque,
            value: response.value.to_vec(),
        }))
    }

    /// Sends a packet that ends the connection; returns what was answered before, and the reason.
    pub(crate) fn last_words(&mut self, packet: &[u8]) -> (Vec<u8>, Disconnect) {
        let mut out = BytesMut::new();
        let (frame, source) = (frame(packet), Some(&self.bucket));
        let handled =
            self.connection.handle_frame(self.now, &frame, source, self.features, &mut out);
        (out.to_vec(), handled.expect_err("a reason to close the connection"))
    }

    /// Answers something the producer pushed.
    pub(crate) fn respond(
        &mut self,
        opcode: Opcode,
        status: Status,
        opaque: Opaque,
    ) -> Result<(), Disconnect> {
        let mut packet = BytesMut::new();
        Frame::response(opcode, status).with_opaque(opaque).encode(&mut packet).unwrap();
        self.exchange(&packet).map(|answer| assert_eq!(answer, None))
    }

    /// Writes to vBucket 0 and tells the connection.
    pub(crate) fn write(&mut self, items: impl IntoIterator<Item = dcp_producer_proto::Item>) {
        for item in items {
            self.bucket.vb().write(item);
        }
        self.connection.notify(Vbid(0));
    }

    pub(crate) fn pass(&mut self, time: Duration) {
        self.now += time;
    }

    /// Everything the connection has to send, as text.
    pub(crate) fn receive(&mut self) -> Vec<String> {
        self.receive_packets().iter().map(|packet| describe(packet)).collect()
    }

    /// Everything the connection has to send, packet by packet.
    pub(crate) fn receive_packets(&mut self) -> Vec<Vec<u8>> {
        self.out.clear();
        for _ in 0..1000 {
            let (now, bucket) = (self.now, &self.bucket);
            if !self.connection.poll_transmit(now, bucket, &mut self.out, usize::MAX).more {
                return packets(&self.out);
            }
        }
        panic!("it always has more to send");
    }
}

pub(crate) fn packets(bytes: &[u8]) -> Vec<Vec<u8>> {
    dcp_test::packet::packets(bytes).iter().map(|packet| packet.bytes().to_vec()).collect()
}

pub(crate) fn frame(packet: &[u8]) -> Frame<'_> {
    Frame::parse(packet, MAX_BODY_LEN).unwrap().unwrap().0
}

/// One stream message in the words of [`words`].
pub(crate) fn describe(packet: &[u8]) -> String {
    let packet = &dcp_test::packet::packets(packet)[0];
    if packet.opcode() != Opcode::DCP_NOOP {
        assert_eq!(packet.opaque(), OPAQUE, "the opaque is the stream request's");
    }
    words::describe(packet)
}
