//! A mutation as a view of the read buffer.

use super::Mutation;
use crate::{
    Cas, CollectionId, Datatype, DocKey, Header, Magic, Opaque, Opcode, RevSeqno, Seqno, Vbid,
};

/// Header and extras together.
const HEAD_LEN: usize = Header::LEN + Mutation::EXTRAS_LEN;

/// The length of a mutation's extras as encoded in its header.
const EXTRAS_LEN_BYTE: u8 = 31;

/// A mutation in its usual form, whose fields are read from the packet on access.
///
/// Nearly every packet of a stream is one. Readers that process many of them field by field avoid
/// the copies of a [`Mutation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MutationView<'a> {
    head: &'a [u8; HEAD_LEN],
    /// Key without its collection id, then the value.
    body: &'a [u8],
    key_len: u8,
    collection_id: CollectionId,
}

/// The bytes of a field whose position is a constant.
#[inline(always)]
fn field<const AT: usize, const LEN: usize>(head: &[u8; HEAD_LEN]) -> [u8; LEN] {
    head.get(AT..).and_then(<[u8]>::first_chunk).copied().unwrap_or([0; LEN])
}

impl<'a> MutationView<'a> {
    /// A placeholder to initialize arrays with.
    pub const EMPTY: Self =
        Self { head: &[0; HEAD_LEN], body: &[], key_len: 0, collection_id: CollectionId::DEFAULT };

    /// Parses the mutation at the front of `input` if it is well-formed, complete and in its usual
    /// form (no framing extras); also returns the rest of `input`.
    ///
    /// `None` does not say why: use [`Frame::parse`](crate::Frame::parse) and [`Mutation::decode`],
    /// which accept everything this accepts with the same result.
    #[inline(always)]
    #[must_use]
    pub fn parse(input: &'a [u8], max_body: usize, collections: bool) -> Option<(Self, &'a [u8])> {
        let (head, after) = input.split_first_chunk::<HEAD_LEN>()?;
        if field::<0, 2>(head) != [Magic::CLIENT_REQUEST.0, Opcode::DCP_MUTATION.0]
            || field::<4, 1>(head) != [EXTRAS_LEN_BYTE]
            // Length of extended metadata.
            || field::<52, 2>(head) != [0, 0]
        {
            return None;
        }
        let key_len = usize::from(u16::from_be_bytes(field::<2, 2>(head)));
        let body_len = u32::from_be_bytes(field::<8, 4>(head)) as usize;
        if body_len > max_body {
            return None;
        }
        let (body, rest) = after.split_at_checked(body_len.checked_sub(Mutation::EXTRAS_LEN)?)?;
        let encoded = body.get(..key_len)?;
        let view = if collections {
            let DocKey { collection_id, key } = DocKey::decode(encoded).ok()?;
            let body = body.get(key_len.checked_sub(key.len())?..)?;
            Self { head, body, key_len: u8::try_from(key.len()).ok()?, collection_id }
        } else {
            if key_len == 0 || key_len > DocKey::MAX_DEFAULT_LEN {
                return None;
            }
            let key_len = u8::try_from(key_len).ok()?;
            Self { head, body, key_len, collection_id: CollectionId::DEFAULT }
        };
        (view.seqno() != Seqno::ZERO).then_some((view, rest))
    }

    /// The vBucket.
    #[inline(always)]
    #[must_use]
    pub fn vbid(&self) -> Vbid {
        Vbid(u16::from_be_bytes(field::<6, 2>(self.head)))
    }

    /// Opaque of the stream.
    #[inline(always)]
    #[must_use]
    pub fn opaque(&self) -> Opaque {
        Opaque(u32::from_be_bytes(field::<12, 4>(self.head)))
    }

    /// CAS of the document.
    #[inline(always)]
    #[must_use]
    pub fn cas(&self) -> Cas {
        Cas(u64::from_be_bytes(field::<16, 8>(self.head)))
    }

    /// Seqno in the vBucket.
    #[inline(always)]
    #[must_use]
    pub fn seqno(&self) -> Seqno {
        Seqno(u64::from_be_bytes(field::<24, 8>(self.head)))
    }

    /// Revision seqno of the document.
    #[inline(always)]
    #[must_use]
    pub fn rev_seqno(&self) -> RevSeqno {
        RevSeqno(u64::from_be_bytes(field::<32, 8>(self.head)))
    }

    /// Flags set by the application, kept in their byte order.
    #[inline(always)]
    #[must_use]
    pub fn flags(&self) -> u32 {
        u32::from_be_bytes(field::<40, 4>(self.head))
    }

    /// When the document expires, in seconds since 1970; 0 never.
    #[inline(always)]
    #[must_use]
    pub fn expiry(&self) -> u32 {
        u32::from_be_bytes(field::<44, 4>(self.head))
    }

    /// How the value is encoded.
    #[inline(always)]
    #[must_use]
    pub fn datatype(&self) -> Datatype {
        Datatype(u8::from_be_bytes(field::<5, 1>(self.head)))
    }

    /// Collection of the document.
    #[inline(always)]
    #[must_use]
    pub const fn collection_id(&self) -> CollectionId {
        self.collection_id
    }

    /// Key without its collection id.
    #[inline(always)]
    #[must_use]
    pub fn key(&self) -> &'a [u8] {
        self.body.get(..self.key_len()).unwrap_or_default()
    }

    /// Document as sent.
    #[inline(always)]
    #[must_use]
    pub fn value(&self) -> &'a [u8] {
        self.body.get(self.key_len()..).unwrap_or_default()
    }

    /// Key and value, which are adjacent.
    #[inline(always)]
    #[must_use]
    pub const fn key_and_value(&self) -> &'a [u8] {
        self.body
    }

    /// Length of the key without its collection id, in bytes.
    #[inline(always)]
    #[must_use]
    pub fn key_len(&self) -> usize {
        usize::from(self.key_len)
    }

    /// Length of the whole packet in bytes.
    #[inline(always)]
    #[must_use]
    pub fn packet_len(&self) -> usize {
        let body_len = u32::from_be_bytes(field::<8, 4>(self.head));
        Header::LEN.saturating_add(body_len as usize)
    }
}
