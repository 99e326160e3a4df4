//! Messages: one type per packet kind, each in its own file.
//!
//! `decode` reads the fields of a [`Frame`] with the message's opcode and checks the layout;
//! borrowed parts point into the packet. `encode` appends the whole packet.

mod add_stream;
mod any;
mod bootstrap;
mod buffer_ack;
mod close_stream;
mod cluster_config;
mod collections;
mod commit;
mod control;
mod deletion;
mod document;
mod expiration;
mod failover_log;
mod flatbuffers;
mod hello;
mod metadata;
mod mutation;
mod mutation_view;
mod open;
mod oso_snapshot;
mod prepare;
mod request;
mod response;
mod sasl;
mod seqno_advanced;
mod snapshot_marker;
mod stream_end;
mod stream_request;
mod subdocument;
mod system_event;
mod system_event_payload;
mod vbucket_seqnos;
mod vbucket_state;

pub use add_stream::AddStream;
pub use any::{Message, RawMessage};
pub use bootstrap::{GetErrorMap, SelectBucket};
pub use buffer_ack::BufferAck;
pub use close_stream::CloseStream;
pub use cluster_config::{
    ClusterMapChange, ConfigVersion, GetClusterConfig, PushedVersion, SetClusterConfig,
};
pub use collections::{ResolveName, ResolvedName};
pub use commit::{Abort, Commit, SeqnoAck};
pub use control::Control;
pub use deletion::Deletion;
pub use document::{Counter, KeyRequest, MutationToken, Store, Touch};
pub use expiration::Expiration;
pub use failover_log::{FailoverEntries, FailoverEntry, encode_failover_log};
pub use hello::{Features, Hello, encode_features};
pub use metadata::{GetMeta, Metadata, WithMeta, WithMetaOptions};
pub use mutation::Mutation;
pub use mutation_view::MutationView;
pub use open::{Open, OpenFlags};
pub use oso_snapshot::OsoSnapshot;
pub use prepare::{DurabilityLevel, Prepare};
pub use request::{Request, Reserved};
pub use response::Response;
pub use sasl::Sasl;
pub use seqno_advanced::SeqnoAdvanced;
pub use snapshot_marker::{SnapshotFlags, SnapshotMarker};
pub use stream_end::{StreamEnd, StreamEndReason};
pub use stream_request::{StreamRequest, StreamRequestFlags, rollback_seqno};
pub use subdocument::{
    LookupResults, MutationResults, PathResult, PathSpec, SubdocLookup, SubdocMutation,
};
pub use system_event::{SystemEvent, SystemEventId};
pub use system_event_payload::SystemEventPayload;
pub use vbucket_seqnos::{
    GetAllVbSeqnos, ObserveSeqno, ObservedSeqno, SeqnoPersistence, VbSeqnos, encode_vb_seqnos,
};
pub use vbucket_state::{SetVbucketState, VbucketState};

use crate::framing_extras::stream_id_frame;
use crate::{DecodeError, EncodeError, Frame, Opaque, Opcode, StreamId, Vbid};

/// Defines `encode` for a stream message.
macro_rules! encode_stream_message {
    ($opcode:ident) => {
        /// Appends the packet to `out`.
        ///
        /// # Errors
        /// [`EncodeError`] if a part does not fit a packet.
        pub fn encode(&self, to: StreamAddress, out: &mut impl BufMut) -> Result<(), EncodeError> {
            to.encode(Opcode::$opcode, |frame| self.write(frame, out))
        }
    };
}
use encode_stream_message;

/// Defines `encode` for a request without a vBucket.
macro_rules! encode_request {
    ($opcode:ident) => {
        /// Appends the packet to `out`.
        ///
        /// # Errors
        /// [`EncodeError`] if a part does not fit a packet.
        pub fn encode(&self, opaque: Opaque, out: &mut impl BufMut) -> Result<(), EncodeError> {
            self.write(Frame::request(Opcode::$opcode).with_opaque(opaque), out)
        }
    };
}
use encode_request;

/// The stream that a stream message belongs to, from its header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamAddress {
    /// vBucket of the stream.
    pub vbid: Vbid,
    /// Opaque of the stream request.
    pub opaque: Opaque,
    /// Stream id, on connections that use them.
    pub stream_id: Option<StreamId>,
}

impl StreamAddress {
    /// Reads the address of a frame.
    ///
    /// # Errors
    /// [`DecodeError`] if the framing extras are malformed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        Ok(Self {
            vbid: frame.header.vbid(),
            opaque: frame.header.opaque,
            stream_id: frame.stream_id()?,
        })
    }

    /// Passes a request of this stream to `write`, which adds the rest.
    #[inline]
    fn encode(
        self,
        opcode: Opcode,
        write: impl FnOnce(Frame<'_>) -> Result<(), EncodeError>,
    ) -> Result<(), EncodeError> {
        let frame = Frame::request(opcode).with_vbid(self.vbid).with_opaque(self.opaque);
        match self.stream_id {
            None => write(frame),
            Some(id) => write(frame.with_framing_extras(&stream_id_frame(id))),
        }
    }
}

const fn expect(frame: &Frame<'_>, opcode: Opcode) -> Result<(), DecodeError> {
    if frame.header.opcode.0 == opcode.0 {
        return Ok(());
    }
    Err(DecodeError::UnexpectedOpcode(frame.header.opcode.0))
}

/// The extras as an array; an error for any other length.
fn extras<const N: usize>(frame: &Frame<'_>) -> Result<[u8; N], DecodeError> {
    extras_in_place(frame).copied()
}

/// The same without a copy. A copy on the stack would be read back in pieces that straddle those it
/// was written in, which stalls until they have left the store buffer: a fifth of the time that
/// iterating over mutations takes.
#[inline]
fn extras_in_place<'a, const N: usize>(frame: &Frame<'a>) -> Result<&'a [u8; N], DecodeError> {
    <&[u8; N]>::try_from(frame.extras).map_err(|_| DecodeError::InvalidLength {
        what: "extras",
        len: u32::from(frame.header.extras_len),
    })
}

fn no_key(frame: &Frame<'_>) -> Result<(), DecodeError> {
    if frame.key.is_empty() {
        return Ok(());
    }
    Err(DecodeError::InvalidLength { what: "key", len: u32::from(frame.header.key_len) })
}

fn no_value(frame: &Frame<'_>) -> Result<(), DecodeError> {
    if frame.value.is_empty() {
        return Ok(());
    }
    Err(DecodeError::InvalidLength { what: "value", len: frame.header.value_len() })
}
