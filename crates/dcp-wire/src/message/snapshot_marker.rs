//! DCP_SNAPSHOT_MARKER (0x56): a snapshot begins.

use bitflags::bitflags;
use bytes::{BufMut, BytesMut};

use super::{StreamAddress, expect, no_key};
use crate::{Datatype, DecodeError, EncodeError, Frame, Opcode, Reader, Seqno};

bitflags! {
    /// Kind of a snapshot (DCP page `snapshot-marker`); unknown bits are kept.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct SnapshotFlags: u32 {
        /// Read from memory.
        const MEMORY = 0x01;
        /// Read from disk.
        const DISK = 0x02;
        /// Begins a checkpoint.
        const CHECKPOINT = 0x04;
        /// Must be acknowledged once its end was processed.
        const ACK = 0x08;
        /// Contains every version of a document.
        const HISTORY = 0x10;
        /// May contain a key more than once.
        const MAY_CONTAIN_DUPLICATES = 0x20;
        const _ = !0;
    }
}

/// A snapshot begins: the changes that follow have seqnos in `[start_seqno, end_seqno]` (DCP page
/// `snapshot-marker`).
///
/// The optional fields decide the encoding: V2.2 if a purge or high-prepared seqno is present, V1
/// if none is, otherwise V2.0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SnapshotMarker {
    /// First seqno of the snapshot, or one below it.
    pub start_seqno: Seqno,
    /// Last seqno of the snapshot.
    pub end_seqno: Seqno,
    /// Kind of the snapshot.
    pub flags: SnapshotFlags,
    /// Highest committed seqno in the snapshot (V2.x).
    pub max_visible_seqno: Option<Seqno>,
    /// Highest completed prepare (V2.x, disk snapshots only).
    pub high_completed_seqno: Option<Seqno>,
    /// Seqno up to which tombstones were purged (V2.2).
    pub purge_seqno: Option<Seqno>,
    /// Highest prepare (V2.2, disk snapshots only).
    pub high_prepared_seqno: Option<Seqno>,
}

/// Version byte of a V2 marker, the only byte of its extras.
struct Version(u8);

impl Version {
    const V2_0: u8 = 0;
    const V2_1: u8 = 1;
    const V2_2: u8 = 2;

    /// Length of the value in bytes.
    const fn value_len(&self) -> Option<usize> {
        match self.0 {
            Self::V2_0 => Some(36),
            Self::V2_2 => Some(52),
            _ => None,
        }
    }
}

impl SnapshotMarker {
    /// Length of V1's extras in bytes.
    pub const EXTRAS_LEN_V1: usize = 20;

    /// A V1 marker.
    #[must_use]
    pub fn new(start_seqno: Seqno, end_seqno: Seqno, flags: SnapshotFlags) -> Self {
        Self { start_seqno, end_seqno, flags, ..Self::default() }
    }

    /// Reads a marker of version 1, 2.0 or 2.2.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not a well-formed marker. The removed version 2.1 has its
    /// own error.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_SNAPSHOT_MARKER)?;
        no_key(frame)?;
        if frame.header.datatype != Datatype::RAW {
            return Err(DecodeError::InvalidField("datatype of a snapshot marker"));
        }
        match *frame.extras {
            [version] => Self::decode_v2(&Version(version), frame),
            _ if frame.extras.len() == Self::EXTRAS_LEN_V1 => Self::decode_v1(frame),
            _ => Err(DecodeError::InvalidLength {
                what: "extras of a snapshot marker",
                len: u32::from(frame.header.extras_len),
            }),
        }
    }

    fn decode_v1(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        super::no_value(frame)?;
        let mut reader = Reader::new(frame.extras, "snapshot marker");
        Ok(Self {
            start_seqno: Seqno(reader.u64()?),
            end_seqno: Seqno(reader.u64()?),
            flags: SnapshotFlags::from_bits_retain(reader.u32()?),
            ..Self::default()
        })
    }

    fn decode_v2(version: &Version, frame: &Frame<'_>) -> Result<Self, DecodeError> {
        let Some(value_len) = version.value_len() else {
            return Err(DecodeError::InvalidField(if version.0 == Version::V2_1 {
                "snapshot marker version 2.1, which servers since 8.0 do not send"
            } else {
                "snapshot marker version"
            }));
        };
        if frame.value.len() != value_len {
            return Err(DecodeError::InvalidLength {
                what: "value of a snapshot marker",
                len: frame.header.value_len(),
            });
        }
        let mut reader = Reader::new(frame.value, "snapshot marker");
        let mut marker = Self {
            start_seqno: Seqno(reader.u64()?),
            end_seqno: Seqno(reader.u64()?),
            flags: SnapshotFlags::from_bits_retain(reader.u32()?),
            max_visible_seqno: Some(Seqno(reader.u64()?)),
            ..Self::default()
        };
        let disk = marker.flags.contains(SnapshotFlags::DISK);
        // Memory snapshots contain these bytes too, but without meaning.
        let high_completed_seqno = Seqno(reader.u64()?);
        marker.high_completed_seqno = disk.then_some(high_completed_seqno);
        if version.0 == Version::V2_2 {
            marker.purge_seqno = Some(Seqno(reader.u64()?));
            let high_prepared_seqno = Seqno(reader.u64()?);
            marker.high_prepared_seqno = disk.then_some(high_prepared_seqno);
        }
        Ok(marker)
    }

    /// Whether the packet needs version 2.2, 2.0, or neither.
    fn version(&self) -> Option<Version> {
        if self.purge_seqno.is_some() || self.high_prepared_seqno.is_some() {
            return Some(Version(Version::V2_2));
        }
        (self.max_visible_seqno.is_some() || self.high_completed_seqno.is_some())
            .then_some(Version(Version::V2_0))
    }

    /// Appends the packet to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] for a high-completed or high-prepared seqno of a snapshot that is not from
    /// disk: the packet cannot hold it.
    pub fn encode(&self, to: StreamAddress, out: &mut impl BufMut) -> Result<(), EncodeError> {
        to.encode(Opcode::DCP_SNAPSHOT_MARKER, |frame| self.write(frame, out))
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let disk = self.flags.contains(SnapshotFlags::DISK);
        if !disk && (self.high_completed_seqno.is_some() || self.high_prepared_seqno.is_some()) {
            let what = "high-completed or high-prepared seqno of a memory snapshot";
            return Err(EncodeError { what, len: 8, max: 0 });
        }
        let mut fields = BytesMut::with_capacity(52);
        fields.put_u64(self.start_seqno.0);
        fields.put_u64(self.end_seqno.0);
        fields.put_u32(self.flags.bits());
        let Some(version) = self.version() else {
            return frame.with_extras(&fields).encode(out);
        };
        fields.put_u64(self.max_visible_seqno.unwrap_or_default().0);
        fields.put_u64(self.high_completed_seqno.unwrap_or_default().0);
        if version.0 == Version::V2_2 {
            fields.put_u64(self.purge_seqno.unwrap_or_default().0);
            fields.put_u64(self.high_prepared_seqno.unwrap_or_default().0);
        }
        frame.with_extras(&[version.0]).with_value(&fields).encode(out)
    }
}
