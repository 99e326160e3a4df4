//! DCP_STREAM_REQ (0x53): opens a stream.

use bitflags::bitflags;
use bytes::BufMut;

use super::{expect, extras, no_key};
use crate::{
    Datatype, DecodeError, EncodeError, Frame, Opaque, Opcode, Reader, Seqno, Vbid, Vbuuid,
};

bitflags! {
    /// Flags of a stream (DCP page `stream-request`); unknown bits are kept.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct StreamRequestFlags: u32 {
        /// Hand the vBucket over.
        const TAKE_OVER = 0x001;
        /// End with what is on disk.
        const DISK_ONLY = 0x002;
        /// End with the newest change.
        const TO_LATEST = 0x004;
        /// Require an active vBucket.
        const ACTIVE_VB_ONLY = 0x010;
        /// Also check the vBucket uuid when starting from seqno 0.
        const STRICT_VBUUID = 0x020;
        /// Start after the newest change.
        const FROM_LATEST = 0x040;
        /// Do not roll back because of purged tombstones.
        const IGNORE_PURGED_TOMBSTONES = 0x080;
        /// Send cached documents before the stream.
        const CACHE_TRANSFER = 0x100;
        const _ = !0;
    }
}

/// Opens a stream of a vBucket (DCP page `stream-request`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamRequest<'a> {
    /// vBucket to stream.
    pub vbid: Vbid,
    /// Opaque that every message of the stream will carry.
    pub opaque: Opaque,
    /// Flags of the stream.
    pub flags: StreamRequestFlags,
    /// Last seqno that the client has.
    pub start_seqno: Seqno,
    /// Last seqno to send; [`Seqno::MAX`] for an endless stream.
    pub end_seqno: Seqno,
    /// History branch of `start_seqno`; 0 when starting from 0.
    pub vbuuid: Vbuuid,
    /// First seqno of the snapshot that contains `start_seqno`.
    pub snapshot_start: Seqno,
    /// Last seqno of that snapshot.
    pub snapshot_end: Seqno,
    /// Empty, or JSON: filter, stream id, purge seqno (server page "stream-request-value").
    pub value: &'a [u8],
}

impl<'a> StreamRequest<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_STREAM_REQ)?;
        no_key(frame)?;
        // The value is JSON, but its datatype must be raw.
        if frame.header.datatype != Datatype::RAW {
            return Err(DecodeError::InvalidField("datatype of a stream request"));
        }
        let extras = extras::<48>(frame)?;
        let mut reader = Reader::new(&extras, "stream request");
        let flags = StreamRequestFlags::from_bits_retain(reader.u32()?);
        reader.u32()?;
        Ok(Self {
            vbid: frame.header.vbid(),
            opaque: frame.header.opaque,
            flags,
            start_seqno: Seqno(reader.u64()?),
            end_seqno: Seqno(reader.u64()?),
            vbuuid: Vbuuid(reader.u64()?),
            snapshot_start: Seqno(reader.u64()?),
            snapshot_end: Seqno(reader.u64()?),
            value: frame.value,
        })
    }

    /// Appends the packet to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] if the value does not fit a packet.
    pub fn encode(&self, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let frame = Frame::request(Opcode::DCP_STREAM_REQ);
        self.write(frame.with_vbid(self.vbid).with_opaque(self.opaque), 0, out)
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(
        &self,
        frame: Frame<'_>,
        reserved: u32,
        out: &mut impl BufMut,
    ) -> Result<(), EncodeError> {
        let mut extras = [0; 48];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u32(self.flags.bits());
        cursor.put_u32(reserved);
        cursor.put_u64(self.start_seqno.0);
        cursor.put_u64(self.end_seqno.0);
        cursor.put_u64(self.vbuuid.0);
        cursor.put_u64(self.snapshot_start.0);
        cursor.put_u64(self.snapshot_end.0);
        frame.with_extras(&extras).with_value(self.value).encode(out)
    }
}

/// The seqno in a ROLLBACK response to a stream request.
///
/// # Errors
/// [`DecodeError::InvalidLength`] unless the value is exactly 8 bytes.
pub fn rollback_seqno(frame: &Frame<'_>) -> Result<Seqno, DecodeError> {
    let value = <[u8; 8]>::try_from(frame.value).map_err(|_| DecodeError::InvalidLength {
        what: "rollback seqno",
        len: frame.header.value_len(),
    })?;
    Ok(Seqno(u64::from_be_bytes(value)))
}
