//! Document operations: GET, SET, ADD, REPLACE, DELETE, TOUCH, GAT, INCREMENT, DECREMENT.
//!
//! Several opcodes share a layout, so `encode` takes a frame that already has its opcode, vBucket,
//! opaque, CAS and datatype.

use bytes::BufMut;

use super::{extras, no_value};
use crate::{DecodeError, EncodeError, Frame, Opcode, Reader, Seqno, Vbuuid};

/// Reads (GET) or removes (DELETE) a document (server page "BinaryProtocol").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyRequest<'a> {
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
}

impl<'a> KeyRequest<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        if !matches!(frame.header.opcode, Opcode::GET | Opcode::DELETE) {
            return Err(DecodeError::UnexpectedOpcode(frame.header.opcode.0));
        }
        extras::<0>(frame)?;
        no_value(frame)?;
        Ok(Self { key: some_key(frame)? })
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    ///
    /// # Errors
    /// [`EncodeError`] if the key does not fit a packet.
    pub fn encode(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_key(self.key).encode(out)
    }
}

/// Writes a document (SET, ADD, REPLACE; server page "BinaryProtocol").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Store<'a> {
    /// Flags set by the application, kept in their byte order.
    pub flags: u32,
    /// Expiry: up to 30 days, in seconds from now; above, in seconds since 1970; 0 for none.
    pub expiry: u32,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
    /// The document.
    pub value: &'a [u8],
}

impl<'a> Store<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        if !matches!(frame.header.opcode, Opcode::SET | Opcode::ADD | Opcode::REPLACE) {
            return Err(DecodeError::UnexpectedOpcode(frame.header.opcode.0));
        }
        let extras = extras::<8>(frame)?;
        let mut reader = Reader::new(&extras, "write");
        Ok(Self {
            flags: reader.u32()?,
            expiry: reader.u32()?,
            key: some_key(frame)?,
            value: frame.value,
        })
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    ///
    /// # Errors
    /// [`EncodeError`] if key or value do not fit a packet.
    pub fn encode(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let mut extras = [0; 8];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u32(self.flags);
        cursor.put_u32(self.expiry);
        frame.with_extras(&extras).with_key(self.key).with_value(self.value).encode(out)
    }
}

/// Changes a document's expiry (TOUCH), and also reads it (GAT).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Touch<'a> {
    /// When the document expires, as in [`Store::expiry`].
    pub expiry: u32,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
}

impl<'a> Touch<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        if !matches!(frame.header.opcode, Opcode::TOUCH | Opcode::GET_AND_TOUCH) {
            return Err(DecodeError::UnexpectedOpcode(frame.header.opcode.0));
        }
        no_value(frame)?;
        Ok(Self { expiry: u32::from_be_bytes(extras(frame)?), key: some_key(frame)? })
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    ///
    /// # Errors
    /// [`EncodeError`] if the key does not fit a packet.
    pub fn encode(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_extras(&self.expiry.to_be_bytes()).with_key(self.key).encode(out)
    }
}

/// Increments or decrements a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counter<'a> {
    /// Amount to add or subtract.
    pub delta: u64,
    /// Initial value of a new counter.
    pub initial: u64,
    /// Expiry, as in [`Store::expiry`]; all ones: fail if the counter does not exist.
    pub expiry: u32,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
}

impl<'a> Counter<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        if !matches!(frame.header.opcode, Opcode::INCREMENT | Opcode::DECREMENT) {
            return Err(DecodeError::UnexpectedOpcode(frame.header.opcode.0));
        }
        no_value(frame)?;
        let extras = extras::<20>(frame)?;
        let mut reader = Reader::new(&extras, "counter");
        Ok(Self {
            delta: reader.u64()?,
            initial: reader.u64()?,
            expiry: reader.u32()?,
            key: some_key(frame)?,
        })
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    ///
    /// # Errors
    /// [`EncodeError`] if the key does not fit a packet.
    pub fn encode(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let mut extras = [0; 20];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u64(self.delta);
        cursor.put_u64(self.initial);
        cursor.put_u32(self.expiry);
        frame.with_extras(&extras).with_key(self.key).encode(out)
    }
}

/// vbuuid and seqno of a write: the extras of its response on connections with
/// [`MUTATION_SEQNO`](crate::Feature::MUTATION_SEQNO).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MutationToken {
    /// History branch.
    pub vbuuid: Vbuuid,
    /// Seqno in the vBucket.
    pub seqno: Seqno,
}

impl MutationToken {
    /// Reads the extras of a response: 16 bytes, or none.
    ///
    /// # Errors
    /// [`DecodeError`] for any other length.
    pub fn decode(frame: &Frame<'_>) -> Result<Option<Self>, DecodeError> {
        if frame.extras.is_empty() {
            return Ok(None);
        }
        let extras = extras::<16>(frame)?;
        let mut reader = Reader::new(&extras, "mutation token");
        Ok(Some(Self { vbuuid: Vbuuid(reader.u64()?), seqno: Seqno(reader.u64()?) }))
    }

    /// The extras of a response.
    #[must_use]
    pub fn encode(&self) -> [u8; 16] {
        let mut extras = [0; 16];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u64(self.vbuuid.0);
        cursor.put_u64(self.seqno.0);
        extras
    }
}

/// The key; an error if it is empty.
pub(super) const fn some_key<'a>(frame: &Frame<'a>) -> Result<&'a [u8], DecodeError> {
    if frame.key.is_empty() {
        return Err(DecodeError::InvalidLength { what: "key", len: 0 });
    }
    Ok(frame.key)
}
