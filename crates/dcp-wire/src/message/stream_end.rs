//! DCP_STREAM_END (0x55): a stream ended.

use bytes::BufMut;

use super::{StreamAddress, encode_stream_message, expect, extras, no_key, no_value};
use crate::{DecodeError, EncodeError, Frame, Opcode, wire_enum};

wire_enum! {
    /// Why a stream ended (DCP page `stream-end`).
    StreamEndReason(u32) {
        /// The end seqno was reached.
        OK = 0, "Ok";
        /// The client closed the stream.
        CLOSED = 1, "Closed";
        /// The vBucket changed its state, was removed or rolled back.
        STATE_CHANGED = 2, "StateChanged";
        /// The connection was closed; never sent.
        DISCONNECTED = 3, "Disconnected";
        /// The client was too slow.
        SLOW = 4, "Slow";
        /// The producer could not read from disk.
        BACKFILL_FAIL = 5, "BackfillFail";
        /// The vBucket rolled back; sent as [`STATE_CHANGED`](Self::STATE_CHANGED).
        ROLLBACK = 6, "Rollback";
        /// All collections of the filter were dropped.
        FILTER_EMPTY = 7, "FilterEmpty";
        /// The client lost a privilege.
        LOST_PRIVILEGES = 8, "LostPrivileges";
    }
}

/// A stream ended; no messages follow on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamEnd {
    /// The reason.
    pub reason: StreamEndReason,
}

impl StreamEnd {
    /// Reads a stream end.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not a well-formed stream end.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_STREAM_END)?;
        no_key(frame)?;
        no_value(frame)?;
        Ok(Self { reason: StreamEndReason(u32::from_be_bytes(extras(frame)?)) })
    }

    encode_stream_message!(DCP_STREAM_END);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_extras(&self.reason.0.to_be_bytes()).encode(out)
    }
}
