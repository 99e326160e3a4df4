//! DCP_PREPARE (0x60): a durable write began.

use bytes::BufMut;

use super::{StreamAddress, encode_stream_message, expect, extras};
use crate::{
    Cas, Datatype, DecodeError, EncodeError, Frame, Opcode, Reader, RevSeqno, Seqno, wire_enum,
};

wire_enum! {
    /// When a write counts as durable.
    DurabilityLevel(u8) {
        /// In memory on a majority of the nodes.
        MAJORITY = 1, "majority";
        /// In memory on a majority, and persisted on the active node.
        MAJORITY_AND_PERSIST_ON_ACTIVE = 2, "majorityAndPersistOnActive";
        /// Persisted on a majority.
        PERSIST_TO_MAJORITY = 3, "persistToMajority";
    }
}

const EXTRAS_LEN: usize = 31;

/// A durable write began (DCP page `prepare`); sent to consumers that enabled sync writes.
///
/// Flow control counts two bytes more than its length on the wire (DCP page `flow-control`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prepare<'a> {
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
    /// Whether the write removes the document.
    pub deleted: bool,
    /// When the write counts as durable.
    pub level: DurabilityLevel,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
    /// Document as sent.
    pub value: &'a [u8],
}

impl<'a> Prepare<'a> {
    /// Reads the message.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not a well-formed prepare.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_PREPARE)?;
        let extras = extras::<EXTRAS_LEN>(frame)?;
        let mut reader = Reader::new(&extras, "prepare");
        let prepare = Self {
            seqno: Seqno(reader.u64()?),
            rev_seqno: RevSeqno(reader.u64()?),
            flags: reader.u32()?,
            expiry: reader.u32()?,
            lock_time: reader.u32()?,
            nru: reader.u8()?,
            deleted: match reader.u8()? {
                0 => false,
                1 => true,
                _ => return Err(DecodeError::InvalidField("deleted flag")),
            },
            level: DurabilityLevel(reader.u8()?),
            cas: frame.header.cas,
            datatype: frame.header.datatype,
            key: frame.key,
            value: frame.value,
        };
        if prepare.level.name().is_none() {
            return Err(DecodeError::InvalidField("durability level"));
        }
        if prepare.seqno == Seqno::ZERO {
            return Err(DecodeError::InvalidField("seqno 0"));
        }
        if prepare.cas == Cas(0) {
            return Err(DecodeError::InvalidField("CAS 0"));
        }
        Ok(prepare)
    }

    encode_stream_message!(DCP_PREPARE);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let mut extras = [0; EXTRAS_LEN];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u64(self.seqno.0);
        cursor.put_u64(self.rev_seqno.0);
        cursor.put_u32(self.flags);
        cursor.put_u32(self.expiry);
        cursor.put_u32(self.lock_time);
        cursor.put_u8(self.nru);
        cursor.put_u8(u8::from(self.deleted));
        cursor.put_u8(self.level.0);
        frame
            .with_datatype(self.datatype)
            .with_cas(self.cas)
            .with_extras(&extras)
            .with_key(self.key)
            .with_value(self.value)
            .encode(out)
    }
}
