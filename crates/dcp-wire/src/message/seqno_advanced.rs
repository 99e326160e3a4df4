//! DCP_SEQNO_ADVANCED (0x64): no changes for this stream up to a seqno.

use bytes::BufMut;

use super::{StreamAddress, encode_stream_message, expect, extras, no_key, no_value};
use crate::{DecodeError, EncodeError, Frame, Opcode, Seqno};

/// The stream has no changes up to this seqno (DCP page `seqno-advanced`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqnoAdvanced {
    /// The seqno.
    pub seqno: Seqno,
}

impl SeqnoAdvanced {
    /// Reads the message.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_SEQNO_ADVANCED)?;
        no_key(frame)?;
        no_value(frame)?;
        Ok(Self { seqno: Seqno(u64::from_be_bytes(extras(frame)?)) })
    }

    encode_stream_message!(DCP_SEQNO_ADVANCED);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_extras(&self.seqno.0.to_be_bytes()).encode(out)
    }
}
