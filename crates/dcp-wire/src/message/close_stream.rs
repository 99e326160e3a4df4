//! DCP_CLOSE_STREAM (0x52): close a stream.

use bytes::BufMut;

use super::{StreamAddress, expect, extras, no_key, no_value};
use crate::{DecodeError, EncodeError, Frame, Opcode};

/// Closes a stream (DCP page `close-stream`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloseStream;

impl CloseStream {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_CLOSE_STREAM)?;
        extras::<0>(frame)?;
        no_key(frame)?;
        no_value(frame)?;
        Ok(Self)
    }

    /// Appends the packet to `out`.
    ///
    /// # Errors
    /// Never: every part has a fixed size.
    pub fn encode(&self, to: StreamAddress, out: &mut impl BufMut) -> Result<(), EncodeError> {
        to.encode(Opcode::DCP_CLOSE_STREAM, |frame| frame.encode(out))
    }
}
