//! DCP_CACHE_TRANSFER (0x66): cached documents sent before the stream.

use bytes::BufMut;

use super::{StreamAddress, encode_stream_message, expect, extras, no_key};
use crate::{
    Cas, Datatype, DecodeError, DocKey, EncodeError, Frame, Opcode, Reader, RevSeqno, Seqno,
};

/// Length of a record without key and value in bytes.
const RECORD_LEN: usize = 40;
/// Shortest key in bytes: collection prefix and one byte.
const MIN_KEY_LEN: usize = 2;

/// Cached documents (DCP page `cache-transfer`). As an iterator it ends after the first error.
#[derive(Clone, Copy, Debug)]
pub struct CacheTransfer<'a> {
    reader: Reader<'a>,
}

/// One cached document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedDocument<'a> {
    /// CAS of the document.
    pub cas: Cas,
    /// Seqno in the vBucket.
    pub seqno: Seqno,
    /// Revision seqno of the document.
    pub rev_seqno: RevSeqno,
    /// Flags set by the application, kept in their byte order.
    pub flags: u32,
    /// When the document expires, in seconds since 1970; 0 never.
    pub expiry: u32,
    /// How the value is encoded.
    pub datatype: Datatype,
    /// Access frequency hint.
    pub cache_hint: u8,
    /// Key with its collection id.
    pub key: &'a [u8],
    /// Document as sent; empty if only metadata is cached.
    pub value: &'a [u8],
}

impl<'a> CacheTransfer<'a> {
    /// Reads the message; its records are checked during iteration.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet cannot hold a record.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_CACHE_TRANSFER)?;
        extras::<0>(frame)?;
        no_key(frame)?;
        if frame.value.len() < RECORD_LEN.saturating_add(MIN_KEY_LEN) {
            return Err(DecodeError::InvalidLength {
                what: "cache transfer",
                len: frame.header.value_len(),
            });
        }
        Ok(Self::new(frame.value))
    }

    /// The records in `value`.
    #[must_use]
    pub const fn new(value: &'a [u8]) -> Self {
        Self { reader: Reader::new(value, "cached document") }
    }

    encode_stream_message!(DCP_CACHE_TRANSFER);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_value(self.reader.rest()).encode(out)
    }

    fn read(&mut self) -> Result<CachedDocument<'a>, DecodeError> {
        let reader = &mut self.reader;
        let (cas, seqno, rev_seqno) =
            (Cas(reader.u64()?), Seqno(reader.u64()?), RevSeqno(reader.u64()?));
        let value_len = reader.u32()?;
        let (flags, expiry) = (reader.u32()?, reader.u32()?);
        let key_len = usize::from(reader.u16()?);
        let (datatype, cache_hint) = (Datatype(reader.u8()?), reader.u8()?);
        if !(MIN_KEY_LEN..=DocKey::MAX_ENCODED_LEN).contains(&key_len) {
            return Err(DecodeError::InvalidField("key length of a cached document"));
        }
        let key = reader.bytes(key_len)?;
        let value = reader.bytes(usize::try_from(value_len).unwrap_or(usize::MAX))?;
        Ok(CachedDocument {
            cas,
            seqno,
            rev_seqno,
            flags,
            expiry,
            datatype,
            cache_hint,
            key,
            value,
        })
    }
}

impl<'a> Iterator for CacheTransfer<'a> {
    type Item = Result<CachedDocument<'a>, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.reader.is_empty() {
            return None;
        }
        let item = self.read();
        if item.is_err() {
            self.reader = Reader::new(&[], "cached document");
        }
        Some(item)
    }
}

impl CachedDocument<'_> {
    /// Appends the record to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] if key or value do not fit a record.
    pub fn encode(&self, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let fit =
            |what, len, max| if len > max { Err(EncodeError { what, len, max }) } else { Ok(()) };
        fit("key", self.key.len(), DocKey::MAX_ENCODED_LEN)?;
        fit("value", self.value.len(), u32::MAX as usize)?;
        out.put_u64(self.cas.0);
        out.put_u64(self.seqno.0);
        out.put_u64(self.rev_seqno.0);
        out.put_u32(crate::reader::saturating_u32(self.value.len()));
        out.put_u32(self.flags);
        out.put_u32(self.expiry);
        out.put_u16(u16::try_from(self.key.len()).unwrap_or(u16::MAX));
        out.put_u8(self.datatype.0);
        out.put_u8(self.cache_hint);
        out.put_slice(self.key);
        out.put_slice(self.value);
        Ok(())
    }
}
