//! The reference: decodes frames into plain vectors, written by hand and without any other work.

use dcp_wire::{Header, Opcode};

use crate::Error;

/// Thirteen buffers with the layout of a change: one per fixed-size field, and offsets and bytes
/// for keys and values.
#[derive(Debug, Default)]
pub struct Columns {
    op: Vec<u8>,
    datatype: Vec<u8>,
    vbucket: Vec<u16>,
    collection: Vec<u32>,
    flags: Vec<u32>,
    expiry: Vec<u32>,
    seqno: Vec<u64>,
    rev: Vec<u64>,
    cas: Vec<u64>,
    key_ends: Vec<u32>,
    keys: Vec<u8>,
    value_ends: Vec<u32>,
    values: Vec<u8>,
}

impl Columns {
    /// Number of rows.
    #[must_use]
    pub const fn rows(&self) -> usize {
        self.op.len()
    }

    /// Total size of keys and values in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.keys.len() + self.values.len()
    }

    /// A checksum of all rows, which keeps the work from being optimized away.
    #[must_use]
    pub fn checksum(&self) -> u64 {
        self.seqno.last().copied().unwrap_or(0)
            ^ self.cas.last().copied().unwrap_or(0)
            ^ self.values.last().copied().map_or(0, u64::from)
    }

    /// Removes the rows but keeps the memory.
    pub fn clear(&mut self) {
        self.op.clear();
        self.datatype.clear();
        self.vbucket.clear();
        self.collection.clear();
        self.flags.clear();
        self.expiry.clear();
        self.seqno.clear();
        self.rev.clear();
        self.cas.clear();
        self.key_ends.clear();
        self.keys.clear();
        self.value_ends.clear();
        self.values.clear();
    }

    /// Appends the mutations at the front of `bytes` until `rows` or `bytes` of keys and values are
    /// reached or no whole frame is left; returns the number of bytes used. Other frames are
    /// skipped.
    ///
    /// # Errors
    /// If a frame's lengths are inconsistent.
    pub fn append(
        &mut self,
        input: &[u8],
        max_rows: usize,
        max_bytes: usize,
    ) -> Result<usize, Error> {
        let mut rest = input;
        while self.rows() < max_rows && self.bytes() < max_bytes {
            let Some((header, after)) = rest.split_first_chunk::<{ Header::LEN }>() else { break };
            let body_len = be32(header, 8) as usize;
            let Some((body, after)) = after.split_at_checked(body_len) else { break };
            if header[1] == Opcode::DCP_MUTATION.0 {
                self.push(header, body).ok_or("a mutation's lengths do not fit")?;
            }
            rest = after;
        }
        Ok(input.len() - rest.len())
    }

    #[inline(always)]
    fn push(&mut self, header: &[u8; Header::LEN], body: &[u8]) -> Option<()> {
        let (extras, after) = body.split_first_chunk::<31>()?;
        let (key, value) = after.split_at_checked(usize::from(be16(header, 2)))?;
        let (&collection, key) = key.split_first()?;
        if header[4] != 31 || collection >= 0x80 {
            return None;
        }
        self.op.push(0);
        self.datatype.push(header[5]);
        self.vbucket.push(be16(header, 6));
        self.collection.push(u32::from(collection));
        self.flags.push(be32(extras, 16));
        self.expiry.push(be32(extras, 20));
        self.seqno.push(be64(extras, 0));
        self.rev.push(be64(extras, 8));
        self.cas.push(be64(header, 16));
        self.keys.extend_from_slice(key);
        self.key_ends.push(u32::try_from(self.keys.len()).ok()?);
        self.values.extend_from_slice(value);
        self.value_ends.push(u32::try_from(self.values.len()).ok()?);
        Some(())
    }
}

fn be16(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn be64(bytes: &[u8], at: usize) -> u64 {
    (u64::from(be32(bytes, at)) << 32) | u64::from(be32(bytes, at + 4))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::{Frames, Shape};

    #[test]
    fn the_reference_takes_every_mutation_in_batches() {
        let frames =
            Frames::new(Shape { value_len: 100, vbuckets: 2, pass_bytes: 100_000 }).unwrap();
        let mut columns = Columns::default();
        let (mut rows, mut used) = (0, 0);
        while used < frames.bytes().len() {
            used += columns.append(&frames.bytes()[used..], 100, usize::MAX).unwrap();
            rows += columns.rows() as u64;
            assert!(columns.rows() <= 100 && columns.checksum() != 0);
            assert_eq!(columns.values.len(), columns.rows() * 100);
            assert_eq!(columns.keys.len(), columns.rows() * 19);
            columns.clear();
        }
        assert_eq!(rows, frames.rows());
    }
}
