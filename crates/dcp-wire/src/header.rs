//! The 24 bytes every packet starts with.

use crate::{Cas, Datatype, DecodeError, Magic, Opaque, Opcode, Reader, Status, Vbid};

/// The 24-byte packet header, with consistent lengths (server page "BinaryProtocol").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Direction and form.
    pub magic: Magic,
    /// What the packet requests or reports.
    pub opcode: Opcode,
    /// Length of the framing extras in bytes; 0 unless the magic is an alternative one.
    pub framing_extras_len: u8,
    /// Length of the key in bytes.
    pub key_len: u16,
    /// Length of the extras in bytes.
    pub extras_len: u8,
    /// How the value is encoded.
    pub datatype: Datatype,
    /// vBucket id of a request, status of a response.
    pub vbid_or_status: u16,
    /// Length of everything after the header in bytes.
    pub body_len: u32,
    /// Correlation token.
    pub opaque: Opaque,
    /// CAS of the document; 0 if there is none.
    pub cas: Cas,
}

impl Header {
    /// Size of a header in bytes.
    pub const LEN: usize = 24;

    /// Reads a header and validates its lengths.
    ///
    /// # Errors
    /// [`DecodeError::InvalidMagic`] for a first byte outside the protocol,
    /// [`DecodeError::InvalidLength`] if framing extras, extras and key exceed the body.
    #[inline(always)]
    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes, "header");
        let magic = Magic(reader.u8()?);
        if magic.name().is_none() {
            return Err(DecodeError::InvalidMagic(magic.0));
        }
        let opcode = Opcode(reader.u8()?);
        let [high, low] = reader.array()?;
        let (framing_extras_len, key_len) = if magic.is_alt() {
            (high, u16::from(low))
        } else {
            (0, u16::from_be_bytes([high, low]))
        };
        let extras_len = reader.u8()?;
        let datatype = Datatype(reader.u8()?);
        let vbid_or_status = reader.u16()?;
        let body_len = reader.u32()?;
        let opaque = Opaque(reader.u32()?);
        let cas = Cas(reader.u64()?);
        let header = Self {
            magic,
            opcode,
            framing_extras_len,
            key_len,
            extras_len,
            datatype,
            vbid_or_status,
            body_len,
            opaque,
            cas,
        };
        if header.prefix_len() > body_len {
            return Err(DecodeError::InvalidLength { what: "body", len: body_len });
        }
        Ok(header)
    }

    /// The header's 24 bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; Self::LEN] {
        let [key_high, key_low] = self.key_len.to_be_bytes();
        let (b2, b3) = if self.magic.is_alt() {
            (self.framing_extras_len, key_low)
        } else {
            (key_high, key_low)
        };
        let [s0, s1] = self.vbid_or_status.to_be_bytes();
        let [l0, l1, l2, l3] = self.body_len.to_be_bytes();
        let [o0, o1, o2, o3] = self.opaque.0.to_be_bytes();
        let [c0, c1, c2, c3, c4, c5, c6, c7] = self.cas.0.to_be_bytes();
        [
            self.magic.0,
            self.opcode.0,
            b2,
            b3,
            self.extras_len,
            self.datatype.0,
            s0,
            s1,
            l0,
            l1,
            l2,
            l3,
            o0,
            o1,
            o2,
            o3,
            c0,
            c1,
            c2,
            c3,
            c4,
            c5,
            c6,
            c7,
        ]
    }

    /// Length of everything before the value, header excluded, in bytes (at most 66,045).
    const fn prefix_len(&self) -> u32 {
        (self.framing_extras_len as u32)
            .saturating_add(self.extras_len as u32)
            .saturating_add(self.key_len as u32)
    }

    /// Length of the value in bytes.
    #[must_use]
    pub const fn value_len(&self) -> u32 {
        self.body_len.saturating_sub(self.prefix_len())
    }

    /// Length of the whole packet in bytes.
    #[must_use]
    pub const fn packet_len(&self) -> usize {
        Self::LEN.saturating_add(self.body_len as usize)
    }

    /// The vBucket of a request; meaningless on a response.
    #[must_use]
    pub const fn vbid(&self) -> Vbid {
        Vbid(self.vbid_or_status)
    }

    /// The status of a response; meaningless on a request.
    #[must_use]
    pub const fn status(&self) -> Status {
        Status(self.vbid_or_status)
    }
}
