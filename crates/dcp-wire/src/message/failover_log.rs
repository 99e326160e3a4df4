//! The failover log, a value of several responses.

use bytes::BufMut;

use crate::{DecodeError, Seqno, Vbuuid, reader::saturating_u32};

/// One branch of a vBucket's history: `vbuuid` begins at `seqno` (DCP page `failover-log`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FailoverEntry {
    /// Identity of the branch.
    pub vbuuid: Vbuuid,
    /// Last seqno that the branch shares with the previous one.
    pub seqno: Seqno,
}

impl FailoverEntry {
    /// Size of an entry in bytes.
    pub const LEN: usize = 16;
}

/// The entries of a failover log as received, newest first.
#[derive(Clone, Copy, Debug)]
pub struct FailoverEntries<'a> {
    bytes: &'a [u8],
}

impl<'a> FailoverEntries<'a> {
    /// The entries in `value`.
    ///
    /// # Errors
    /// [`DecodeError::InvalidLength`] unless the length is a non-zero multiple of 16.
    pub const fn decode(value: &'a [u8]) -> Result<Self, DecodeError> {
        if value.is_empty() || !value.len().is_multiple_of(FailoverEntry::LEN) {
            return Err(DecodeError::InvalidLength {
                what: "failover log",
                len: saturating_u32(value.len()),
            });
        }
        Ok(Self { bytes: value })
    }
}

impl Iterator for FailoverEntries<'_> {
    type Item = FailoverEntry;

    fn next(&mut self) -> Option<Self::Item> {
        let (vbuuid, rest) = self.bytes.split_first_chunk::<8>()?;
        let (seqno, rest) = rest.split_first_chunk::<8>()?;
        self.bytes = rest;
        Some(FailoverEntry {
            vbuuid: Vbuuid(u64::from_be_bytes(*vbuuid)),
            seqno: Seqno(u64::from_be_bytes(*seqno)),
        })
    }
}

/// Appends entries, newest first, as the value of a response.
pub fn encode_failover_log(
    entries: impl IntoIterator<Item = FailoverEntry>,
    out: &mut impl BufMut,
) {
    for entry in entries {
        out.put_u64(entry.vbuuid.0);
        out.put_u64(entry.seqno.0);
    }
}
