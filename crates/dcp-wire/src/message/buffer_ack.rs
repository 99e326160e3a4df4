//! DCP_BUFFER_ACK (0x5d): acknowledges bytes of the flow-control buffer.

use bytes::BufMut;

use super::{expect, extras, no_key, no_value};
use crate::{DecodeError, EncodeError, Frame, Opcode};

/// Bytes the client has processed (DCP page `flow-control`); has no response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferAck {
    /// Number of bytes.
    pub bytes: u32,
}

impl BufferAck {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_BUFFER_ACK)?;
        no_key(frame)?;
        no_value(frame)?;
        Ok(Self { bytes: u32::from_be_bytes(extras(frame)?) })
    }

    /// Appends the packet to `out`.
    ///
    /// # Errors
    /// Never: every part has a fixed size.
    pub fn encode(&self, out: &mut impl BufMut) -> Result<(), EncodeError> {
        self.write(Frame::request(Opcode::DCP_BUFFER_ACK), out)
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_extras(&self.bytes.to_be_bytes()).encode(out)
    }
}
