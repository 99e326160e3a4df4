//! Any request, decoded by its opcode.

use bytes::BufMut;

use super::{
    Abort, AddStream, BufferAck, CloseStream, Commit, Control, Counter, Deletion, Expiration,
    GetAllVbSeqnos, GetClusterConfig, GetErrorMap, GetMeta, Hello, KeyRequest, Mutation,
    ObserveSeqno, Open, OsoSnapshot, Prepare, ResolveName, Sasl, SelectBucket, SeqnoAck,
    SeqnoAdvanced, SeqnoPersistence, SetClusterConfig, SetVbucketState, SnapshotMarker, Store,
    StreamEnd, StreamRequest, SubdocLookup, SubdocMutation, SystemEvent, Touch, WithMeta, extras,
    no_key, no_value,
};
use crate::{DecodeError, EncodeError, Frame, Opcode, Reader};

/// A request, or a message pushed by a DCP producer.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
#[expect(missing_docs, reason = "each variant is the message of the same name")]
pub enum Request<'a> {
    Abort(Abort<'a>),
    AddStream(AddStream),
    BufferAck(BufferAck),
    CloseStream(CloseStream),
    Commit(Commit<'a>),
    Control(Control<'a>),
    Counter(Counter<'a>),
    Deletion(Deletion<'a>),
    Expiration(Expiration<'a>),
    GetAllVbSeqnos(GetAllVbSeqnos),
    GetClusterConfig(GetClusterConfig),
    GetErrorMap(GetErrorMap),
    GetMeta(GetMeta<'a>),
    Hello(Hello<'a>),
    KeyRequest(KeyRequest<'a>),
    Mutation(Mutation<'a>),
    ObserveSeqno(ObserveSeqno),
    Open(Open<'a>, Reserved),
    OsoSnapshot(OsoSnapshot),
    /// A request without fields: noops, failover logs, the end of a cache transfer and others.
    Plain,
    Prepare(Prepare<'a>),
    ResolveName(ResolveName<'a>),
    Sasl(Sasl<'a>),
    SelectBucket(SelectBucket<'a>),
    SeqnoAck(SeqnoAck),
    SeqnoAdvanced(SeqnoAdvanced),
    SeqnoPersistence(SeqnoPersistence),
    SetClusterConfig(SetClusterConfig<'a>),
    SetVbucketState(SetVbucketState),
    SnapshotMarker(SnapshotMarker),
    /// Requests a group of statistics; empty for all.
    Stat(&'a [u8]),
    Store(Store<'a>),
    StreamEnd(StreamEnd),
    StreamRequest(StreamRequest<'a>, Reserved),
    SubdocLookup(SubdocLookup<'a>),
    SubdocMutation(SubdocMutation<'a>),
    SystemEvent(SystemEvent<'a>),
    Touch(Touch<'a>),
    WithMeta(WithMeta<'a>),
}

/// Value of a reserved field, normally 0; ignored but kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reserved(pub u32);

impl<'a> Request<'a> {
    /// Reads a request; `None` for an opcode without a type of its own.
    pub(super) fn decode(frame: &Frame<'a>) -> Result<Option<Self>, DecodeError> {
        if frame.header.opcode.is_dcp() {
            return Self::decode_dcp(frame);
        }
        Ok(Some(match frame.header.opcode {
            Opcode::GET | Opcode::DELETE => Self::KeyRequest(KeyRequest::decode(frame)?),
            Opcode::SET | Opcode::ADD | Opcode::REPLACE => Self::Store(Store::decode(frame)?),
            Opcode::INCREMENT | Opcode::DECREMENT => Self::Counter(Counter::decode(frame)?),
            Opcode::TOUCH | Opcode::GET_AND_TOUCH => Self::Touch(Touch::decode(frame)?),
            Opcode::STAT => {
                extras::<0>(frame)?;
                no_value(frame)?;
                Self::Stat(frame.key)
            }
            Opcode::HELLO => Self::Hello(Hello::decode(frame)?),
            Opcode::SASL_AUTH | Opcode::SASL_STEP => Self::Sasl(Sasl::decode(frame)?),
            Opcode::GET_ALL_VB_SEQNOS => Self::GetAllVbSeqnos(GetAllVbSeqnos::decode(frame)?),
            Opcode::SELECT_BUCKET => Self::SelectBucket(SelectBucket::decode(frame)?),
            Opcode::OBSERVE_SEQNO => Self::ObserveSeqno(ObserveSeqno::decode(frame)?),
            Opcode::GET_META => Self::GetMeta(GetMeta::decode(frame)?),
            Opcode::SET_WITH_META | Opcode::ADD_WITH_META | Opcode::DELETE_WITH_META => {
                Self::WithMeta(WithMeta::decode(frame)?)
            }
            Opcode::SET_CLUSTER_CONFIG => Self::SetClusterConfig(SetClusterConfig::decode(frame)?),
            Opcode::GET_CLUSTER_CONFIG => Self::GetClusterConfig(GetClusterConfig::decode(frame)?),
            Opcode::SEQNO_PERSISTENCE => Self::SeqnoPersistence(SeqnoPersistence::decode(frame)?),
            Opcode::GET_COLLECTION_ID | Opcode::GET_SCOPE_ID => {
                Self::ResolveName(ResolveName::decode(frame)?)
            }
            Opcode::SUBDOC_MULTI_LOOKUP => Self::SubdocLookup(SubdocLookup::decode(frame)?),
            Opcode::SUBDOC_MULTI_MUTATION => Self::SubdocMutation(SubdocMutation::decode(frame)?),
            Opcode::GET_ERROR_MAP => Self::GetErrorMap(GetErrorMap::decode(frame)?),
            Opcode::NOOP
            | Opcode::QUIT
            | Opcode::VERSION
            | Opcode::SASL_LIST_MECHS
            | Opcode::GET_FAILOVER_LOG
            | Opcode::GET_COLLECTIONS_MANIFEST => Self::decode_plain(frame)?,
            _ => return Ok(None),
        }))
    }

    fn decode_dcp(frame: &Frame<'a>) -> Result<Option<Self>, DecodeError> {
        Ok(Some(match frame.header.opcode {
            Opcode::DCP_MUTATION => Self::Mutation(Mutation::decode(frame)?),
            Opcode::DCP_DELETION => Self::Deletion(Deletion::decode(frame)?),
            Opcode::DCP_EXPIRATION => Self::Expiration(Expiration::decode(frame)?),
            Opcode::DCP_SNAPSHOT_MARKER => Self::SnapshotMarker(SnapshotMarker::decode(frame)?),
            Opcode::DCP_SEQNO_ADVANCED => Self::SeqnoAdvanced(SeqnoAdvanced::decode(frame)?),
            Opcode::DCP_SYSTEM_EVENT => Self::SystemEvent(SystemEvent::decode(frame)?),
            Opcode::DCP_OSO_SNAPSHOT => Self::OsoSnapshot(OsoSnapshot::decode(frame)?),
            Opcode::DCP_STREAM_END => Self::StreamEnd(StreamEnd::decode(frame)?),
            Opcode::DCP_PREPARE => Self::Prepare(Prepare::decode(frame)?),
            Opcode::DCP_COMMIT => Self::Commit(Commit::decode(frame)?),
            Opcode::DCP_ABORT => Self::Abort(Abort::decode(frame)?),
            Opcode::DCP_SEQNO_ACK => Self::SeqnoAck(SeqnoAck::decode(frame)?),
            Opcode::DCP_BUFFER_ACK => Self::BufferAck(BufferAck::decode(frame)?),
            Opcode::DCP_OPEN => {
                let open = Open::decode(frame)?;
                Self::Open(open, Reserved::first(frame)?)
            }
            Opcode::DCP_CONTROL => Self::Control(Control::decode(frame)?),
            Opcode::DCP_STREAM_REQ => {
                let request = StreamRequest::decode(frame)?;
                Self::StreamRequest(request, Reserved::second(frame)?)
            }
            Opcode::DCP_CLOSE_STREAM => Self::CloseStream(CloseStream::decode(frame)?),
            Opcode::DCP_ADD_STREAM => Self::AddStream(AddStream::decode(frame)?),
            Opcode::DCP_SET_VBUCKET_STATE => Self::SetVbucketState(SetVbucketState::decode(frame)?),
            Opcode::DCP_NOOP | Opcode::DCP_GET_FAILOVER_LOG | Opcode::DCP_CACHE_TRANSFER_END => {
                Self::decode_plain(frame)?
            }
            _ => return Ok(None),
        }))
    }

    fn decode_plain(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        extras::<0>(frame)?;
        no_key(frame)?;
        no_value(frame)?;
        Ok(Self::Plain)
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        match self {
            Self::Abort(message) => message.write(frame, out),
            Self::AddStream(message) => message.write(frame, out),
            Self::BufferAck(message) => message.write(frame, out),
            Self::CloseStream(CloseStream) | Self::Plain => frame.encode(out),
            Self::Commit(message) => message.write(frame, out),
            Self::Control(message) => message.write(frame, out),
            Self::Counter(message) => message.encode(frame, out),
            Self::Deletion(message) => message.write(frame, out),
            Self::Expiration(message) => message.write(frame, out),
            Self::GetAllVbSeqnos(message) => message.write(frame, out),
            Self::GetClusterConfig(message) => message.write(frame, out),
            Self::GetErrorMap(message) => message.write(frame, out),
            Self::GetMeta(message) => message.encode(frame, out),
            Self::Hello(message) => message.write(frame, out),
            Self::KeyRequest(message) => message.encode(frame, out),
            Self::Mutation(message) => message.write(frame, out),
            Self::ObserveSeqno(message) => message.write(frame, out),
            Self::Open(message, reserved) => message.write(frame, reserved.0, out),
            Self::OsoSnapshot(message) => message.write(frame, out),
            Self::Prepare(message) => message.write(frame, out),
            Self::ResolveName(message) => message.write(frame, out),
            Self::Sasl(message) => message.write(frame, out),
            Self::SelectBucket(message) => message.write(frame, out),
            Self::SeqnoAck(message) => message.write(frame, out),
            Self::SeqnoAdvanced(message) => message.write(frame, out),
            Self::SeqnoPersistence(message) => message.write(frame, out),
            Self::SetClusterConfig(message) => message.write(frame, out),
            Self::SetVbucketState(message) => message.write(frame, out),
            Self::SnapshotMarker(message) => message.write(frame, out),
            Self::Stat(group) => frame.with_key(group).encode(out),
            Self::Store(message) => message.encode(frame, out),
            Self::StreamEnd(message) => message.write(frame, out),
            Self::StreamRequest(message, reserved) => message.write(frame, reserved.0, out),
            Self::SubdocLookup(message) => message.encode(frame, out),
            Self::SubdocMutation(message) => message.encode(frame, out),
            Self::SystemEvent(message) => message.write(frame, out),
            Self::Touch(message) => message.encode(frame, out),
            Self::WithMeta(message) => message.encode(frame, out),
        }
    }
}

impl Reserved {
    /// The first word of the extras.
    fn first(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        Ok(Self(Reader::new(frame.extras, "extras").u32()?))
    }

    /// The second word of the extras.
    fn second(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(frame.extras, "extras");
        reader.u32()?;
        Ok(Self(reader.u32()?))
    }
}
