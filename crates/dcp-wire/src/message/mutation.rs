//! DCP_MUTATION (0x57): a document was written.

use bytes::BufMut;

use super::{StreamAddress, expect, extras_in_place};
use crate::{Cas, Datatype, DecodeError, EncodeError, Frame, Opcode, Reader, RevSeqno, Seqno};

const EXTRAS_LEN: usize = 31;

/// A document was written (DCP page `mutation`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mutation<'a> {
    /// Seqno in the vBucket.
    pub seqno: Seqno,
    /// Revision seqno of the document.
    pub rev_seqno: RevSeqno,
    /// CAS of the document.
    pub cas: Cas,
    /// How the value is encoded.
    pub datatype: Datatype,
    /// Flags set by the application, kept in their byte order.
    pub flags: u32,
    /// When the document expires, in seconds since 1970; 0 never.
    pub expiry: u32,
    /// How long the document stays locked, in seconds; normally 0.
    pub lock_time: u32,
    /// Access frequency hint.
    pub nru: u8,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
    /// Document as sent.
    pub value: &'a [u8],
}

impl<'a> Mutation<'a> {
    /// Length of the extras in bytes.
    pub const EXTRAS_LEN: usize = EXTRAS_LEN;

    /// Reads a mutation.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not a well-formed mutation.
    #[inline(always)]
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_MUTATION)?;
        let extras = extras_in_place::<EXTRAS_LEN>(frame)?;
        let mut reader = Reader::new(extras, "mutation");
        let mutation = Self {
            seqno: Seqno(reader.u64()?),
            rev_seqno: RevSeqno(reader.u64()?),
            flags: reader.u32()?,
            expiry: reader.u32()?,
            lock_time: reader.u32()?,
            // Extended metadata was removed in server 5; a length other than 0 is refused.
            nru: match reader.u16()? {
                0 => reader.u8()?,
                _ => return Err(DecodeError::InvalidField("extended metadata length")),
            },
            cas: frame.header.cas,
            datatype: frame.header.datatype,
            key: frame.key,
            value: frame.value,
        };
        if mutation.seqno == Seqno::ZERO {
            return Err(DecodeError::InvalidField("seqno 0"));
        }
        Ok(mutation)
    }

    /// Appends the packet to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] if key or value do not fit a packet.
    #[inline]
    pub fn encode(&self, to: StreamAddress, out: &mut impl BufMut) -> Result<(), EncodeError> {
        to.encode(Opcode::DCP_MUTATION, |frame| self.write(frame, out))
    }

    /// Appends the packet to `out` with `prefix` before its key: a collection id, which stored keys
    /// need not contain.
    ///
    /// # Errors
    /// [`EncodeError`] if key or value do not fit a packet.
    #[inline]
    pub fn encode_with_key_prefix(
        &self,
        prefix: &[u8],
        to: StreamAddress,
        out: &mut impl BufMut,
    ) -> Result<(), EncodeError> {
        to.encode(Opcode::DCP_MUTATION, |frame| {
            let extras = self.extras();
            self.filled(frame).with_extras(&extras).encode_with_key_prefix(prefix, out)
        })
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    #[inline]
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let extras = self.extras();
        self.filled(frame).with_extras(&extras).encode(out)
    }

    #[inline]
    fn extras(&self) -> [u8; EXTRAS_LEN] {
        let mut extras = [0; EXTRAS_LEN];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u64(self.seqno.0);
        cursor.put_u64(self.rev_seqno.0);
        cursor.put_u32(self.flags);
        cursor.put_u32(self.expiry);
        cursor.put_u32(self.lock_time);
        cursor.put_u16(0);
        cursor.put_u8(self.nru);
        extras
    }

    /// `frame` without the extras.
    #[inline]
    const fn filled<'f>(&self, frame: Frame<'f>) -> Frame<'f>
    where
        'a: 'f,
    {
        frame
            .with_datatype(self.datatype)
            .with_cas(self.cas)
            .with_key(self.key)
            .with_value(self.value)
    }
}
