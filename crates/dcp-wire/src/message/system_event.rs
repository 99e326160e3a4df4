//! DCP_SYSTEM_EVENT (0x5f): a collection or scope changed.

use bytes::BufMut;

use super::{StreamAddress, encode_stream_message, expect, extras};
use crate::{DecodeError, EncodeError, Frame, Opcode, Reader, Seqno, wire_enum};

wire_enum! {
    /// What happened to a collection or scope (DCP page `system_event`).
    SystemEventId(u32) {
        /// A collection was created, or flushed.
        BEGIN_COLLECTION = 0, "BeginCollection";
        /// A collection was dropped.
        END_COLLECTION = 1, "EndCollection";
        /// A scope was created.
        CREATE_SCOPE = 3, "CreateScope";
        /// A scope was dropped.
        DROP_SCOPE = 4, "DropScope";
        /// A collection was changed.
        MODIFY_COLLECTION = 5, "ModifyCollection";
    }
}

/// A collection or scope changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemEvent<'a> {
    /// Seqno in the vBucket.
    pub seqno: Seqno,
    /// What happened.
    pub id: SystemEventId,
    /// Version of the payload: 0, 1, or 2 for FlatBuffers.
    pub version: u8,
    /// Name of the collection or scope, if the event has one.
    pub key: &'a [u8],
    /// Payload.
    pub value: &'a [u8],
}

impl<'a> SystemEvent<'a> {
    /// Reads the message; the caller must skip unknown ids and versions.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_SYSTEM_EVENT)?;
        let extras = extras::<13>(frame)?;
        let mut reader = Reader::new(&extras, "system event");
        let event = Self {
            seqno: Seqno(reader.u64()?),
            id: SystemEventId(reader.u32()?),
            version: reader.u8()?,
            key: frame.key,
            value: frame.value,
        };
        if event.seqno == Seqno::ZERO {
            return Err(DecodeError::InvalidField("seqno 0"));
        }
        Ok(event)
    }

    encode_stream_message!(DCP_SYSTEM_EVENT);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let mut extras = [0; 13];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u64(self.seqno.0);
        cursor.put_u32(self.id.0);
        cursor.put_u8(self.version);
        frame.with_extras(&extras).with_key(self.key).with_value(self.value).encode(out)
    }
}
