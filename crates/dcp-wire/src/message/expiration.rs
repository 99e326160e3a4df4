//! DCP_EXPIRATION (0x59): a document expired.

use bytes::BufMut;

use super::{StreamAddress, encode_stream_message, expect, extras};
use crate::{Cas, Datatype, DecodeError, EncodeError, Frame, Opcode, Reader, RevSeqno, Seqno};

const EXTRAS_LEN: usize = 20;

/// A document expired (DCP page `expiration`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expiration<'a> {
    /// Seqno in the vBucket.
    pub seqno: Seqno,
    /// Revision seqno of the document.
    pub rev_seqno: RevSeqno,
    /// CAS of the tombstone.
    pub cas: Cas,
    /// How the value is encoded.
    pub datatype: Datatype,
    /// When the document expired, in seconds since 1970.
    pub delete_time: u32,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
    /// Xattr section, or empty. Servers before 7.0 may append the document's body.
    pub value: &'a [u8],
}

impl<'a> Expiration<'a> {
    /// Reads an expiration.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not a well-formed expiration.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_EXPIRATION)?;
        let extras = extras::<EXTRAS_LEN>(frame)?;
        let mut reader = Reader::new(&extras, "expiration");
        let expiration = Self {
            seqno: Seqno(reader.u64()?),
            rev_seqno: RevSeqno(reader.u64()?),
            delete_time: reader.u32()?,
            cas: frame.header.cas,
            datatype: frame.header.datatype,
            key: frame.key,
            value: frame.value,
        };
        if expiration.seqno == Seqno::ZERO {
            return Err(DecodeError::InvalidField("seqno 0"));
        }
        Ok(expiration)
    }

    encode_stream_message!(DCP_EXPIRATION);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let mut extras = [0; EXTRAS_LEN];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u64(self.seqno.0);
        cursor.put_u64(self.rev_seqno.0);
        cursor.put_u32(self.delete_time);
        frame
            .with_datatype(self.datatype)
            .with_cas(self.cas)
            .with_extras(&extras)
            .with_key(self.key)
            .with_value(self.value)
            .encode(out)
    }
}
