//! DCP_DELETION (0x58): a document was removed.

use bytes::BufMut;

use super::{StreamAddress, encode_stream_message, expect};
use crate::{Cas, Datatype, DecodeError, EncodeError, Frame, Opcode, Reader, RevSeqno, Seqno};

/// A document was removed (DCP page `deletion`).
///
/// The second layout, with a delete time, is used on connections opened with
/// [`OpenFlags::INCLUDE_DELETE_TIMES`](super::OpenFlags::INCLUDE_DELETE_TIMES).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deletion<'a> {
    /// Seqno in the vBucket.
    pub seqno: Seqno,
    /// Revision seqno of the document.
    pub rev_seqno: RevSeqno,
    /// CAS of the tombstone.
    pub cas: Cas,
    /// How the value is encoded.
    pub datatype: Datatype,
    /// When the document was removed, in seconds since 1970; `None` in the first layout.
    pub delete_time: Option<u32>,
    /// Key, with its collection id on connections with collections.
    pub key: &'a [u8],
    /// Xattr section, or empty. Servers before 7.0 may append the document's body.
    pub value: &'a [u8],
}

impl<'a> Deletion<'a> {
    /// Length of the extras without a delete time in bytes.
    pub const EXTRAS_LEN_V1: usize = 18;
    /// Length of the extras with a delete time in bytes.
    pub const EXTRAS_LEN_V2: usize = 21;

    /// Reads a deletion in either layout.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not a well-formed deletion.
    #[inline]
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_DELETION)?;
        let mut reader = Reader::new(frame.extras, "deletion");
        let (seqno, rev_seqno) = (Seqno(reader.u64()?), RevSeqno(reader.u64()?));
        let delete_time = match frame.extras.len() {
            Self::EXTRAS_LEN_V1 => match reader.u16()? {
                0 => None,
                _ => return Err(DecodeError::InvalidField("extended metadata length")),
            },
            Self::EXTRAS_LEN_V2 => {
                let delete_time = reader.u32()?;
                // Unused, always 0.
                if reader.u8()? != 0 {
                    return Err(DecodeError::InvalidField("deletion extras"));
                }
                Some(delete_time)
            }
            _ => {
                return Err(DecodeError::InvalidLength {
                    what: "extras",
                    len: u32::from(frame.header.extras_len),
                });
            }
        };
        if seqno == Seqno::ZERO {
            return Err(DecodeError::InvalidField("seqno 0"));
        }
        Ok(Self {
            seqno,
            rev_seqno,
            delete_time,
            cas: frame.header.cas,
            datatype: frame.header.datatype,
            key: frame.key,
            value: frame.value,
        })
    }

    encode_stream_message!(DCP_DELETION);

    /// Appends the packet to `out`, in a frame whose header is already filled in; in the second
    /// layout if there is a delete time.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let mut buffer = [0; Self::EXTRAS_LEN_V2];
        let mut cursor = buffer.as_mut_slice();
        cursor.put_u64(self.seqno.0);
        cursor.put_u64(self.rev_seqno.0);
        let extras = match self.delete_time {
            Some(time) => {
                cursor.put_u32(time);
                buffer.as_slice()
            }
            None => buffer.split_at(Self::EXTRAS_LEN_V1).0,
        };
        frame
            .with_datatype(self.datatype)
            .with_cas(self.cas)
            .with_extras(extras)
            .with_key(self.key)
            .with_value(self.value)
            .encode(out)
    }
}
