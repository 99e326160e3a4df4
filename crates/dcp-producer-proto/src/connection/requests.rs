//! The requests of an opened connection.

use bytes::BytesMut;
use dcp_wire::message::{
    BufferAck, CloseStream, Control, Deletion, Expiration, Mutation, OsoSnapshot, SeqnoAck,
    SeqnoAdvanced, SnapshotMarker, StreamAddress, StreamEnd, StreamRequest, SystemEvent,
    encode_failover_log,
};
use dcp_wire::{Datatype, DecodeError, Frame, Opcode, Status, StreamId};
use tracing::debug;

use super::Opened;
use crate::message_format::MessageFormat;
use crate::refusal::Refusal;
use crate::reply::succeed_with;
use crate::settings::SyncWrites;
use crate::stream::Stream;
use crate::stream_request::Checks;
use crate::{BucketSource, ConnectionConfig, Disconnect, Features, VBucketSource, noop, oso};

/// Outcome of a request: the outer error ends the connection, the inner one is answered.
pub(super) type Outcome = Result<Result<(), Refusal>, Disconnect>;

/// One request on an opened connection.
#[derive(Debug)]
pub(super) struct Handler<'a, S> {
    pub(super) config: &'a ConnectionConfig,
    pub(super) features: Features,
    pub(super) opened: &'a mut Opened,
    pub(super) request: &'a Frame<'a>,
    pub(super) stream_id: Option<StreamId>,
    pub(super) source: &'a S,
    pub(super) out: &'a mut BytesMut,
}

impl<S: BucketSource> Handler<'_, S> {
    /// Handles the request.
    pub(super) fn handle(&mut self) -> Outcome {
        let request = self.request;
        let opcode = request.header.opcode;
        match opcode {
            Opcode::DCP_STREAM_REQ => self.answer(Self::stream_request),
            Opcode::DCP_CLOSE_STREAM => self.answer(Self::close_stream),
            Opcode::DCP_GET_FAILOVER_LOG => self.answer(Self::failover_log),
            Opcode::DCP_CONTROL => self.answer(Self::control),
            Opcode::DCP_BUFFER_ACK => Ok(self.buffer_ack()),
            Opcode::DCP_SEQNO_ACK => self.seqno_ack(),
            Opcode::DCP_FLUSH => Ok(Err(Refusal::Status(Status::NOT_SUPPORTED))),
            Opcode::DCP_CACHE_TRANSFER | Opcode::DCP_CACHE_TRANSFER_END => {
                Ok(Err(Refusal::Status(Status::UNKNOWN_COMMAND)))
            }
            _ => match check_stream_message(request) {
                Err(error) => Ok(Err(error.into())),
                Ok(()) => Err(Disconnect::UnexpectedRequest(opcode)),
            },
        }
    }

    /// Runs `handle`, which returns the value of the success response.
    fn answer(&mut self, handle: fn(&mut Self) -> Result<Vec<u8>, Refusal>) -> Outcome {
        match handle(self) {
            Ok(value) => succeed_with(self.request, &value, self.out).map(Ok),
            Err(refusal) => Ok(Err(refusal)),
        }
    }

    fn raw_datatype(&self) -> Result<(), Refusal> {
        raw_datatype(self.request)
    }

    fn stream_request(&mut self) -> Result<Vec<u8>, Refusal> {
        let request = StreamRequest::decode(self.request)?;
        let Opened { settings, streams, .. } = &mut *self.opened;
        streams.end_outlived(request.vbid, self.source);
        let checks = Checks { settings, features: self.features, config: self.config };
        checks.check_packet(&request)?;
        let is_live = |stream_id| streams.is_live(request.vbid, stream_id);
        let accepted = checks.check(&request, self.source, is_live)?;
        if streams.len() >= self.config.max_streams {
            return Err(Refusal::Status(Status::ENOMEM));
        }
        debug!(
            vbid = %request.vbid, start = %accepted.start_seqno, end = %accepted.end_seqno,
            "stream begins"
        );
        let mut log = Vec::new();
        encode_failover_log(accepted.failover_log.iter().copied(), &mut log);
        let to = StreamAddress {
            vbid: request.vbid,
            opaque: request.opaque,
            stream_id: accepted.stream_id,
        };
        let format = MessageFormat::new(settings, self.features)
            .resuming(accepted.start_seqno, accepted.snapshot);
        let oso = oso::Terms::new(settings, self.config);
        streams.insert(Stream::new(to, accepted, format, settings, oso));
        Ok(log)
    }

    fn close_stream(&mut self) -> Result<Vec<u8>, Refusal> {
        CloseStream::decode(self.request)?;
        self.raw_datatype()?;
        let (vbid, stream_id) = (self.request.header.vbid(), self.stream_id);
        let Opened { settings, streams, .. } = &mut *self.opened;
        streams.end_outlived(vbid, self.source);
        let wrong_id = Refusal::Status(Status::DCP_STREAMID_INVALID);
        if settings.stream_ids && stream_id.is_none() {
            return Err(wrong_id);
        }
        let fits = stream_id.is_some() == settings.stream_ids;
        if fits && streams.close(vbid, stream_id, settings.stream_end_on_close) {
            return Ok(Vec::new());
        }
        if stream_id.is_some() && streams.has_live(vbid) {
            return Err(wrong_id);
        }
        Err(Refusal::Status(Status::KEY_ENOENT))
    }

    fn failover_log(&mut self) -> Result<Vec<u8>, Refusal> {
        read_failover_log(self.request, self.source)
    }

    fn control(&mut self) -> Result<Vec<u8>, Refusal> {
        let control = Control::decode(self.request)?;
        self.raw_datatype()?;
        let Opened { settings, window, .. } = &mut *self.opened;
        let keeps_history = self.source.keeps_history();
        settings.apply(&control, self.features, self.config, keeps_history)?;
        window.resize(settings.buffer_size);
        Ok(Vec::new())
    }

    /// Never answered unless it is malformed.
    fn buffer_ack(&mut self) -> Result<(), Refusal> {
        let ack = BufferAck::decode(self.request)?;
        self.raw_datatype()?;
        self.opened.window.acknowledged(ack.bytes);
        Ok(())
    }

    /// A replica acknowledges prepares; the owner of the bucket commits them.
    fn seqno_ack(&self) -> Outcome {
        let acknowledged = match SeqnoAck::decode(self.request) {
            Ok(ack) => ack.prepared_seqno,
            Err(error) => return Ok(Err(error.into())),
        };
        if self.opened.settings.sync_writes != SyncWrites::Replication {
            return Ok(Err(Refusal::Status(Status::EINVAL)));
        }
        let sent = self.opened.streams.last_sent(self.request.header.vbid());
        if sent.is_some_and(|sent| acknowledged > sent) {
            return Err(Disconnect::AcknowledgedUnsent(acknowledged));
        }
        self.source.prepares_acknowledged(self.request.header.vbid(), acknowledged);
        Ok(Ok(()))
    }
}

/// Answers a request for a failover log on a connection that is not opened for DCP.
pub(super) fn failover_log<S: BucketSource>(
    request: &Frame<'_>,
    source: Option<&S>,
    out: &mut BytesMut,
) -> Outcome {
    let Some(source) = source else {
        return Ok(Err(Refusal::Status(Status::NO_BUCKET)));
    };
    match read_failover_log(request, source) {
        Ok(log) => succeed_with(request, &log, out).map(Ok),
        Err(refusal) => Ok(Err(refusal)),
    }
}

fn read_failover_log<S: BucketSource>(request: &Frame<'_>, source: &S) -> Result<Vec<u8>, Refusal> {
    let Frame { extras, key, value, .. } = request;
    raw_datatype(request)?;
    for (what, part) in [("extras", extras), ("key", key), ("value", value)] {
        if !part.is_empty() {
            let len = u32::try_from(part.len()).unwrap_or(u32::MAX);
            return Err(DecodeError::InvalidLength { what, len }.into());
        }
    }
    let vbucket = source.vbucket(request.header.vbid()).ok_or(Refusal::NotMyVbucket)?;
    let mut log = Vec::new();
    vbucket.failover_table().encode(&mut log);
    Ok(log)
}

fn raw_datatype(request: &Frame<'_>) -> Result<(), Refusal> {
    match request.header.datatype {
        Datatype::RAW => Ok(()),
        _ => Err(Refusal::invalid("datatype")),
    }
}

/// Checks the layout of a message that only a producer may send: a malformed one is refused, a
/// well-formed one ends the connection.
fn check_stream_message(frame: &Frame<'_>) -> Result<(), DecodeError> {
    match frame.header.opcode {
        Opcode::DCP_MUTATION => Mutation::decode(frame).map(drop),
        Opcode::DCP_DELETION => Deletion::decode(frame).and_then(|_| tombstone_datatype(frame)),
        Opcode::DCP_EXPIRATION => Expiration::decode(frame).and_then(|_| tombstone_datatype(frame)),
        Opcode::DCP_SNAPSHOT_MARKER => SnapshotMarker::decode(frame).map(drop),
        Opcode::DCP_STREAM_END => StreamEnd::decode(frame).map(drop),
        Opcode::DCP_SYSTEM_EVENT => SystemEvent::decode(frame).map(drop),
        Opcode::DCP_SEQNO_ADVANCED => SeqnoAdvanced::decode(frame).map(drop),
        Opcode::DCP_OSO_SNAPSHOT => OsoSnapshot::decode(frame).map(drop),
        Opcode::DCP_NOOP => noop::check(frame),
        _ => Ok(()),
    }
}

/// Servers refuse a tombstone whose body is JSON, although older ones send such tombstones.
const fn tombstone_datatype(frame: &Frame<'_>) -> Result<(), DecodeError> {
    let datatype = frame.header.datatype;
    if datatype.contains(Datatype::JSON) && !datatype.contains(Datatype::XATTR) {
        return Err(DecodeError::InvalidField("datatype of a tombstone"));
    }
    Ok(())
}
