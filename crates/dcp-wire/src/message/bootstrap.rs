//! SELECT_BUCKET (0x89) and GET_ERROR_MAP (0xfe): the last steps of connection set-up.

use bytes::BufMut;

use super::{encode_request, expect, extras, no_key, no_value};
use crate::{DecodeError, EncodeError, Frame, Opaque, Opcode, Reader};

/// Selects the connection's bucket (server page "BinaryProtocol").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SelectBucket<'a> {
    /// Name of the bucket.
    pub bucket: &'a [u8],
}

impl<'a> SelectBucket<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::SELECT_BUCKET)?;
        extras::<0>(frame)?;
        no_value(frame)?;
        Ok(Self { bucket: frame.key })
    }

    encode_request!(SELECT_BUCKET);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_key(self.bucket).encode(out)
    }
}

/// Requests the meanings of the server's statuses (server page "ErrorMap"), returned as JSON.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetErrorMap {
    /// Newest version of the map that the client understands.
    pub version: u16,
}

impl GetErrorMap {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::GET_ERROR_MAP)?;
        extras::<0>(frame)?;
        no_key(frame)?;
        let mut reader = Reader::new(frame.value, "error map version");
        let version = reader.u16()?;
        reader.finish()?;
        Ok(Self { version })
    }

    encode_request!(GET_ERROR_MAP);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_value(&self.version.to_be_bytes()).encode(out)
    }
}
