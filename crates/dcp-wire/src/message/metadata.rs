//! GET_META (0xa0) and SET/ADD/DELETE_WITH_META (0xa2, 0xa4, 0xa8): documents with their metadata.

use bitflags::bitflags;
use bytes::BufMut;

use super::document::some_key;
use super::{extras, no_value};
use crate::{Cas, Datatype, DecodeError, EncodeError, Frame, Opcode, Reader, RevSeqno};

/// Reads a document's metadata (server page "BinaryProtocol").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetMeta<'a> {
    /// Form of the response: `Some(2)` includes the datatype.
    pub version: Option<u8>,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
}

impl<'a> GetMeta<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        super::expect(frame, Opcode::GET_META)?;
        no_value(frame)?;
        let version = match *frame.extras {
            [] => None,
            [version] => Some(version),
            _ => return Err(wrong_extras(frame)),
        };
        Ok(Self { version, key: some_key(frame)? })
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    ///
    /// # Errors
    /// [`EncodeError`] if the key does not fit a packet.
    pub fn encode(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_extras(self.version.as_slice()).with_key(self.key).encode(out)
    }
}

/// A document's metadata, as the extras of a response; its CAS is in the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// Whether the document is a tombstone.
    pub deleted: bool,
    /// Flags set by the application, kept in their byte order.
    pub flags: u32,
    /// When the document expires, or was removed, in seconds since 1970.
    pub expiry: u32,
    /// Revision seqno of the document.
    pub rev_seqno: RevSeqno,
    /// Datatype, if it was requested.
    pub datatype: Option<Datatype>,
}

impl Metadata {
    /// Reads the extras of a response: 20 or 21 bytes.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(frame.extras, "metadata");
        let deleted = match reader.u32()? {
            0 => false,
            1 => true,
            _ => return Err(DecodeError::InvalidField("deleted flag")),
        };
        let (flags, expiry, rev_seqno) = (reader.u32()?, reader.u32()?, RevSeqno(reader.u64()?));
        let datatype = if reader.is_empty() { None } else { Some(Datatype(reader.u8()?)) };
        reader.finish()?;
        Ok(Self { deleted, flags, expiry, rev_seqno, datatype })
    }

    /// Appends the extras of a response to `out`.
    pub fn encode(&self, out: &mut impl BufMut) {
        out.put_u32(u32::from(self.deleted));
        out.put_u32(self.flags);
        out.put_u32(self.expiry);
        out.put_u64(self.rev_seqno.0);
        if let Some(datatype) = self.datatype {
            out.put_u8(datatype.0);
        }
    }
}

bitflags! {
    /// How a write with metadata treats an existing document; unknown bits are kept.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct WithMetaOptions: u32 {
        /// Do not compare revisions.
        const FORCE = 0x01;
        /// Required on last-write-wins buckets.
        const FORCE_ACCEPT = 0x02;
        /// Give the document a new CAS; needs the next bit.
        const REGENERATE_CAS = 0x04;
        /// Skip conflict resolution.
        const SKIP_CONFLICT_RESOLUTION = 0x08;
        /// The deletion is an expiration.
        const IS_EXPIRATION = 0x10;
        const _ = !0;
    }
}

/// Writes or removes a document with the caller's metadata (server page "BinaryProtocol").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WithMeta<'a> {
    /// Flags set by the application, kept in their byte order.
    pub flags: u32,
    /// When the document expires, or was removed, in seconds since 1970.
    pub expiry: u32,
    /// Revision seqno of the document.
    pub rev_seqno: RevSeqno,
    /// New CAS of the document; the header has the expected one.
    pub cas: Cas,
    /// How an existing document is treated.
    pub options: Option<WithMetaOptions>,
    /// Length of the extended metadata at the end of the value in bytes.
    pub extended_len: Option<u16>,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
    /// Document, then extended metadata.
    pub value: &'a [u8],
}

impl<'a> WithMeta<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        if !matches!(
            frame.header.opcode,
            Opcode::SET_WITH_META | Opcode::ADD_WITH_META | Opcode::DELETE_WITH_META
        ) {
            return Err(DecodeError::UnexpectedOpcode(frame.header.opcode.0));
        }
        let (options, extended) = match frame.extras.len() {
            24 => (false, false),
            26 => (false, true),
            28 => (true, false),
            30 => (true, true),
            _ => return Err(wrong_extras(frame)),
        };
        let mut reader = Reader::new(frame.extras, "write with metadata");
        let (flags, expiry) = (reader.u32()?, reader.u32()?);
        let (rev_seqno, cas) = (RevSeqno(reader.u64()?), Cas(reader.u64()?));
        let options =
            if options { Some(WithMetaOptions::from_bits_retain(reader.u32()?)) } else { None };
        let extended_len = if extended { Some(reader.u16()?) } else { None };
        if usize::from(extended_len.unwrap_or_default()) > frame.value.len() {
            return Err(DecodeError::InvalidField("extended metadata length"));
        }
        let (key, value) = (some_key(frame)?, frame.value);
        Ok(Self { flags, expiry, rev_seqno, cas, options, extended_len, key, value })
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    ///
    /// # Errors
    /// [`EncodeError`] if key or value do not fit a packet.
    pub fn encode(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let mut extras = Vec::with_capacity(30);
        extras.put_u32(self.flags);
        extras.put_u32(self.expiry);
        extras.put_u64(self.rev_seqno.0);
        extras.put_u64(self.cas.0);
        if let Some(options) = self.options {
            extras.put_u32(options.bits());
        }
        if let Some(len) = self.extended_len {
            extras.put_u16(len);
        }
        frame.with_extras(&extras).with_key(self.key).with_value(self.value).encode(out)
    }
}

fn wrong_extras(frame: &Frame<'_>) -> DecodeError {
    // Reuse the length check: no layout has 255 bytes of extras.
    extras::<255>(frame).err().unwrap_or(DecodeError::InvalidField("extras"))
}
