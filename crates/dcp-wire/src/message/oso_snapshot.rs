//! DCP_OSO_SNAPSHOT (0x65): an out-of-sequence-order snapshot begins or ends.

use bytes::BufMut;

use super::{StreamAddress, encode_stream_message, expect, extras, no_key, no_value};
use crate::{DecodeError, EncodeError, Frame, Opcode};

/// An out-of-sequence-order snapshot begins or ends (DCP page `oso_snapshot`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OsoSnapshot {
    /// Items in key order follow.
    Start,
    /// All items have been sent.
    End,
}

impl OsoSnapshot {
    /// Reads the message.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_OSO_SNAPSHOT)?;
        no_key(frame)?;
        no_value(frame)?;
        match u32::from_be_bytes(extras(frame)?) {
            1 => Ok(Self::Start),
            2 => Ok(Self::End),
            _ => Err(DecodeError::InvalidField("OSO snapshot flags")),
        }
    }

    encode_stream_message!(DCP_OSO_SNAPSHOT);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let flags: u32 = match self {
            Self::Start => 1,
            Self::End => 2,
        };
        frame.with_extras(&flags.to_be_bytes()).encode(out)
    }
}
