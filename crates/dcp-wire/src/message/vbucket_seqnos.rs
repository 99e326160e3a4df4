//! GET_ALL_VB_SEQNOS (0x48), OBSERVE_SEQNO (0x91) and SEQNO_PERSISTENCE (0xb7).

use bytes::BufMut;

use super::{VbucketState, encode_request, expect, extras, no_key, no_value};
use crate::reader::saturating_u32;
use crate::{
    CollectionId, DecodeError, EncodeError, Frame, Opaque, Opcode, Reader, Seqno, Vbid, Vbuuid,
};

/// Requests the high seqnos of a node's vBuckets (server page "BinaryProtocol").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetAllVbSeqnos {
    /// State of the vBuckets; `None` (no extras) and `Some(None)` (state 0) both mean all but dead
    /// ones.
    pub state: Option<Option<VbucketState>>,
    /// Return the seqnos of one collection; needs a state and collections.
    pub collection_id: Option<CollectionId>,
}

impl GetAllVbSeqnos {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed or names an unknown state.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::GET_ALL_VB_SEQNOS)?;
        no_key(frame)?;
        no_value(frame)?;
        let mut reader = Reader::new(frame.extras, "extras");
        let mut request = Self::default();
        if !reader.is_empty() {
            let state = reader.u32()?;
            let state = u8::try_from(state).map(VbucketState);
            let unknown = DecodeError::InvalidField("vBucket state");
            request.state = Some(match state.map_err(|_| unknown)? {
                VbucketState(0) => None,
                state if state.name().is_some() => Some(state),
                _ => return Err(unknown),
            });
        }
        if !reader.is_empty() {
            request.collection_id = Some(CollectionId(reader.u32()?));
        }
        reader.finish()?;
        Ok(request)
    }

    encode_request!(GET_ALL_VB_SEQNOS);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let state = self.state.flatten().map_or(0, |state| u32::from(state.0)).to_be_bytes();
        match (self.state, self.collection_id) {
            (None, None) => frame.encode(out),
            (Some(_), None) => frame.with_extras(&state).encode(out),
            (_, Some(id)) => {
                let mut extras = [0; 8];
                let mut cursor = extras.as_mut_slice();
                cursor.put_slice(&state);
                cursor.put_u32(id.0);
                frame.with_extras(&extras).encode(out)
            }
        }
    }
}

/// High seqnos of vBuckets, the value of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VbSeqnos<'a> {
    bytes: &'a [u8],
}

impl<'a> VbSeqnos<'a> {
    /// Length of an entry in bytes.
    const ENTRY_LEN: usize = 10;

    /// The entries in `value`.
    ///
    /// # Errors
    /// [`DecodeError::InvalidLength`] unless the length is a multiple of 10.
    pub const fn decode(value: &'a [u8]) -> Result<Self, DecodeError> {
        if value.len().is_multiple_of(Self::ENTRY_LEN) {
            return Ok(Self { bytes: value });
        }
        Err(DecodeError::InvalidLength { what: "vBucket seqnos", len: saturating_u32(value.len()) })
    }

    /// The bytes of the entries.
    #[must_use]
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

impl Iterator for VbSeqnos<'_> {
    type Item = (Vbid, Seqno);

    fn next(&mut self) -> Option<Self::Item> {
        let (vbid, rest) = self.bytes.split_first_chunk::<2>()?;
        let (seqno, rest) = rest.split_first_chunk::<8>()?;
        self.bytes = rest;
        Some((Vbid(u16::from_be_bytes(*vbid)), Seqno(u64::from_be_bytes(*seqno))))
    }
}

/// Appends entries as the value of a response.
pub fn encode_vb_seqnos(entries: impl IntoIterator<Item = (Vbid, Seqno)>, out: &mut impl BufMut) {
    for (vbid, seqno) in entries {
        out.put_u16(vbid.0);
        out.put_u64(seqno.0);
    }
}

/// Requests the seqnos of a vBucket on a history branch (server page "BinaryProtocol").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObserveSeqno {
    /// The branch.
    pub vbuuid: Vbuuid,
}

impl ObserveSeqno {
    /// Reads the request; the vBucket is in the header.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::OBSERVE_SEQNO)?;
        extras::<0>(frame)?;
        no_key(frame)?;
        let mut reader = Reader::new(frame.value, "vBucket uuid");
        let vbuuid = Vbuuid(reader.u64()?);
        reader.finish()?;
        Ok(Self { vbuuid })
    }

    /// Appends the packet to `out`.
    ///
    /// # Errors
    /// Never: every part has a fixed size.
    pub fn encode(
        &self,
        vbid: Vbid,
        opaque: Opaque,
        out: &mut impl BufMut,
    ) -> Result<(), EncodeError> {
        self.write(Frame::request(Opcode::OBSERVE_SEQNO).with_vbid(vbid).with_opaque(opaque), out)
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_value(&self.vbuuid.0.to_be_bytes()).encode(out)
    }
}

/// Persisted and current seqno of a vBucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObservedSeqno {
    /// The vBucket.
    pub vbid: Vbid,
    /// Its current history branch.
    pub vbuuid: Vbuuid,
    /// Last persisted seqno.
    pub persisted_seqno: Seqno,
    /// Last seqno in memory.
    pub current_seqno: Seqno,
    /// Set if the request named an older branch: that branch and the last seqno valid on it.
    pub failover: Option<(Vbuuid, Seqno)>,
}

impl ObservedSeqno {
    /// Reads the value of a response: 27 bytes, or 43 after a failover.
    ///
    /// # Errors
    /// [`DecodeError`] for any other form or length.
    pub fn decode(value: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(value, "observed seqno");
        let form = reader.u8()?;
        let mut observed = Self {
            vbid: Vbid(reader.u16()?),
            vbuuid: Vbuuid(reader.u64()?),
            persisted_seqno: Seqno(reader.u64()?),
            current_seqno: Seqno(reader.u64()?),
            failover: None,
        };
        match form {
            0 => {}
            1 => observed.failover = Some((Vbuuid(reader.u64()?), Seqno(reader.u64()?))),
            _ => return Err(DecodeError::InvalidField("form of an observed seqno")),
        }
        reader.finish()?;
        Ok(observed)
    }

    /// Appends the value of a response to `out`.
    pub fn encode(&self, out: &mut impl BufMut) {
        out.put_u8(u8::from(self.failover.is_some()));
        out.put_u16(self.vbid.0);
        out.put_u64(self.vbuuid.0);
        out.put_u64(self.persisted_seqno.0);
        out.put_u64(self.current_seqno.0);
        if let Some((vbuuid, seqno)) = self.failover {
            out.put_u64(vbuuid.0);
            out.put_u64(seqno.0);
        }
    }
}

/// Waits until a seqno is persisted; the response comes then, or is a temporary failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SeqnoPersistence {
    /// The seqno.
    pub seqno: Seqno,
}

impl SeqnoPersistence {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::SEQNO_PERSISTENCE)?;
        no_key(frame)?;
        no_value(frame)?;
        Ok(Self { seqno: Seqno(u64::from_be_bytes(extras(frame)?)) })
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_extras(&self.seqno.0.to_be_bytes()).encode(out)
    }
}
