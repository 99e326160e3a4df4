//! SASL_AUTH (0x21) and SASL_STEP (0x22): authentication.

use core::fmt;

use bytes::BufMut;

use super::extras;
use crate::{DecodeError, EncodeError, Frame, Opaque, Opcode};

/// A client's authentication message (server page "sasl").
///
/// Its payload is made by [`sasl`](crate::sasl). `Debug` does not show it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Sasl<'a> {
    /// Name of the mechanism.
    pub mechanism: &'a [u8],
    /// The mechanism's payload.
    pub message: &'a [u8],
}

impl<'a> Sasl<'a> {
    /// Reads either request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        if !matches!(frame.header.opcode, Opcode::SASL_AUTH | Opcode::SASL_STEP) {
            return Err(DecodeError::UnexpectedOpcode(frame.header.opcode.0));
        }
        extras::<0>(frame)?;
        Ok(Self { mechanism: frame.key, message: frame.value })
    }

    /// Appends the first message of an exchange to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] if a part does not fit a packet.
    pub fn encode_auth(&self, opaque: Opaque, out: &mut impl BufMut) -> Result<(), EncodeError> {
        self.write(Frame::request(Opcode::SASL_AUTH).with_opaque(opaque), out)
    }

    /// Appends a subsequent message of an exchange to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] if a part does not fit a packet.
    pub fn encode_step(&self, opaque: Opaque, out: &mut impl BufMut) -> Result<(), EncodeError> {
        self.write(Frame::request(Opcode::SASL_STEP).with_opaque(opaque), out)
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_key(self.mechanism).with_value(self.message).encode(out)
    }
}

impl fmt::Debug for Sasl<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mechanism = String::from_utf8_lossy(self.mechanism);
        f.debug_struct("Sasl").field("mechanism", &mechanism).finish_non_exhaustive()
    }
}
