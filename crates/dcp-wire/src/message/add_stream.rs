//! DCP_ADD_STREAM (0x51): tell a consumer to open a stream.

use bytes::BufMut;

use super::{StreamRequestFlags, encode_request, expect, extras, no_key, no_value};
use crate::{DecodeError, EncodeError, Frame, Opaque, Opcode};

/// Tells a consumer to open a stream (DCP page `add-stream`); sent by the cluster manager.
///
/// The response's extras hold the opaque of that stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AddStream {
    /// Flags of the stream.
    pub flags: StreamRequestFlags,
}

impl AddStream {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_ADD_STREAM)?;
        no_key(frame)?;
        no_value(frame)?;
        let flags = u32::from_be_bytes(extras(frame)?);
        Ok(Self { flags: StreamRequestFlags::from_bits_retain(flags) })
    }

    encode_request!(DCP_ADD_STREAM);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_extras(&self.flags.bits().to_be_bytes()).encode(out)
    }
}
