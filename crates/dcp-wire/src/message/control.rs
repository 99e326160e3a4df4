//! DCP_CONTROL (0x5e): a connection setting.

use bytes::BufMut;

use super::{expect, extras};
use crate::{DecodeError, EncodeError, Frame, Opaque, Opcode};

/// A connection setting (DCP page `control`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Control<'a> {
    /// Name of the setting.
    pub key: &'a [u8],
    /// Its value, as text.
    pub value: &'a [u8],
}

impl Control<'_> {
    /// Key: size of the flow-control buffer in bytes.
    pub const CONNECTION_BUFFER_SIZE: &'static str = "connection_buffer_size";
    /// Key: whether the producer sends noops.
    pub const ENABLE_NOOP: &'static str = "enable_noop";
    /// Key: seconds between noops.
    pub const SET_NOOP_INTERVAL: &'static str = "set_noop_interval";
    /// Key: send expirations as such instead of as deletions.
    pub const ENABLE_EXPIRY_OPCODE: &'static str = "enable_expiry_opcode";
    /// Key: compress values.
    pub const FORCE_VALUE_COMPRESSION: &'static str = "force_value_compression";
    /// Key: allow several streams per vBucket.
    pub const ENABLE_STREAM_ID: &'static str = "enable_stream_id";
    /// Key: also send a stream end when the client closes a stream.
    pub const SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM: &'static str =
        "send_stream_end_on_client_close_stream";
    /// Key: out-of-sequence-order backfills.
    pub const ENABLE_OUT_OF_ORDER_SNAPSHOTS: &'static str = "enable_out_of_order_snapshots";
    /// Key: system events with FlatBuffers payloads, modified collections included.
    pub const FLATBUFFERS_SYSTEM_EVENTS: &'static str = "flatbuffers_system_events";
    /// Key: snapshots that keep every version of a document.
    pub const CHANGE_STREAMS: &'static str = "change_streams";
    /// Key: how many messages the producer writes in a turn: `low`, `medium` or `high`.
    pub const SET_PRIORITY: &'static str = "set_priority";
    /// Key: whether backfills take turns (`round-robin`) or follow each other (`sequential`).
    pub const BACKFILL_ORDER: &'static str = "backfill_order";
    /// Key: newest snapshot marker version understood.
    pub const MAX_MARKER_VERSION: &'static str = "max_marker_version";
}

impl<'a> Control<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_CONTROL)?;
        extras::<0>(frame)?;
        if frame.key.is_empty() || frame.value.is_empty() {
            return Err(DecodeError::InvalidLength { what: "control key or value", len: 0 });
        }
        Ok(Self { key: frame.key, value: frame.value })
    }

    /// Appends the packet to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] if key or value do not fit a packet.
    pub fn encode(&self, opaque: Opaque, out: &mut impl BufMut) -> Result<(), EncodeError> {
        self.write(Frame::request(Opcode::DCP_CONTROL).with_opaque(opaque), out)
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_key(self.key).with_value(self.value).encode(out)
    }
}
