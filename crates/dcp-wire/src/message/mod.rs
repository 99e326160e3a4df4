//! One type per packet kind, in a file of its own.
//!
//! `decode` takes the fields out of a [`Frame`](crate::Frame) whose opcode is the message's and
//! checks the layout; borrowed parts keep pointing into the packet. `encode` appends the whole
//! packet.

mod buffer_ack;
mod close_stream;
mod control;
mod deletion;
mod expiration;
mod failover_log;
mod mutation;
mod open;
mod oso_snapshot;
mod seqno_advanced;
mod snapshot_marker;
mod stream_end;
mod stream_request;
mod system_event;

pub use buffer_ack::BufferAck;
pub use close_stream::CloseStream;
pub use control::Control;
pub use deletion::Deletion;
pub use expiration::Expiration;
pub use failover_log::{FailoverEntries, FailoverEntry, encode_failover_log};
pub use mutation::Mutation;
pub use open::{Open, OpenFlags};
pub use oso_snapshot::OsoSnapshot;
pub use seqno_advanced::SeqnoAdvanced;
pub use snapshot_marker::{SnapshotFlags, SnapshotMarker};
pub use stream_end::{StreamEnd, StreamEndReason};
pub use stream_request::{StreamRequest, StreamRequestFlags, rollback_seqno};
pub use system_event::{SystemEvent, SystemEventId};

use bytes::BufMut;

use crate::framing_extras::stream_id_frame;
use crate::{DecodeError, EncodeError, Frame, Opaque, Opcode, StreamId, Vbid};

/// What the header of every stream message says about its stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamAddress {
    /// vBucket streamed.
    pub vbid: Vbid,
    /// Opaque of the stream request.
    pub opaque: Opaque,
    /// Stream id, on connections that use them.
    pub stream_id: Option<StreamId>,
}

impl StreamAddress {
    /// The address a frame carries.
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

    fn encode(self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let frame = frame.with_vbid(self.vbid).with_opaque(self.opaque);
        match self.stream_id {
            None => frame.encode(out),
            Some(id) => frame.with_framing_extras(&stream_id_frame(id)).encode(out),
        }
    }
}

const fn expect(frame: &Frame<'_>, opcode: Opcode) -> Result<(), DecodeError> {
    if frame.header.opcode.0 == opcode.0 {
        return Ok(());
    }
    Err(DecodeError::UnexpectedOpcode(frame.header.opcode.0))
}

/// The extras as an array, refused if they have any other length.
fn extras<const N: usize>(frame: &Frame<'_>) -> Result<[u8; N], DecodeError> {
    <[u8; N]>::try_from(frame.extras).map_err(|_| DecodeError::InvalidLength {
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
