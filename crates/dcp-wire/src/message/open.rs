//! DCP_OPEN (0x50): turns a connection into a DCP connection.

use bitflags::bitflags;
use bytes::BufMut;

use super::{expect, extras};
use crate::{Datatype, DecodeError, EncodeError, Frame, Opaque, Opcode, Reader};

bitflags! {
    /// What a DCP connection requests (DCP page `open-connection`); unknown bits are kept.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct OpenFlags: u32 {
        /// The server is the producer.
        const PRODUCER = 0x001;
        /// Send xattrs.
        const INCLUDE_XATTRS = 0x004;
        /// Omit document bodies.
        const NO_VALUE = 0x008;
        /// Deletions include their time.
        const INCLUDE_DELETE_TIMES = 0x020;
        /// Omit document bodies but keep the stored datatype.
        const NO_VALUE_WITH_UNDERLYING_DATATYPE = 0x040;
        /// Deletions include user xattrs.
        const INCLUDE_DELETED_USER_XATTRS = 0x100;
        /// Omit deletions from a first backfill.
        const SKIP_DELETES_IN_INITIAL_BACKFILL = 0x200;
        const _ = !0;
    }
}

/// Turns a connection into a DCP connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Open<'a> {
    /// What the connection requests.
    pub flags: OpenFlags,
    /// Name of the connection; the server closes an older connection with the same name.
    pub name: &'a [u8],
    /// Nothing, or JSON with `consumer_name` (consumer connections only).
    pub value: &'a [u8],
    /// Datatype of the value.
    pub datatype: Datatype,
}

impl<'a> Open<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_OPEN)?;
        let extras = extras::<8>(frame)?;
        let mut reader = Reader::new(&extras, "open");
        reader.u32()?;
        let flags = OpenFlags::from_bits_retain(reader.u32()?);
        if frame.key.is_empty() {
            return Err(DecodeError::InvalidLength { what: "connection name", len: 0 });
        }
        Ok(Self { flags, name: frame.key, value: frame.value, datatype: frame.header.datatype })
    }

    /// Appends the packet to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] if the name does not fit a packet.
    pub fn encode(&self, opaque: Opaque, out: &mut impl BufMut) -> Result<(), EncodeError> {
        self.write(Frame::request(Opcode::DCP_OPEN).with_opaque(opaque), 0, out)
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(
        &self,
        frame: Frame<'_>,
        reserved: u32,
        out: &mut impl BufMut,
    ) -> Result<(), EncodeError> {
        let mut extras = [0; 8];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u32(reserved);
        cursor.put_u32(self.flags.bits());
        frame
            .with_datatype(self.datatype)
            .with_extras(&extras)
            .with_key(self.name)
            .with_value(self.value)
            .encode(out)
    }
}
