//! The read buffer of a connection.

use dcp_wire::{DecodeError, Frame};

/// Size of the buffer of a stream. Reads below 64 KiB cost throughput on loopback, above 256 KiB they gain
/// nothing; twice that leaves room for a full read after the rest of the last packet.
pub(crate) const SIZE: usize = 512 * 1024;

/// Minimum room for a stream's read.
pub(crate) const MIN_READ: usize = SIZE / 2;

/// Size of the buffer of a connection without streams.
pub(crate) const SMALL: usize = 64 * 1024;

/// Reads without a huge packet after which the room for one is freed. Huge packets often follow each
/// other, and fresh memory costs a page fault per page, several times what reading into it takes.
const KEPT_FOR: usize = 16;

/// Bytes that arrived and were not consumed yet, at most one packet and one read.
#[derive(Debug)]
pub(crate) struct ReadBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    size: usize,
    max_body_len: usize,
    /// Reads since the last packet that took more than the buffer's size.
    reads: usize,
}

impl ReadBuffer {
    /// A buffer of `size` bytes that starts with those already read.
    pub(crate) fn new(read: &[u8], size: usize, max_body_len: usize) -> Self {
        let mut bytes = vec![0; size.max(read.len() + size / 2)];
        let (head, _) = bytes.split_at_mut(read.len());
        head.copy_from_slice(read);
        Self { bytes, start: 0, end: read.len(), size, max_body_len, reads: 0 }
    }

    /// Replaces the buffer by one of another size.
    pub(crate) fn resize(&mut self, size: usize) {
        *self = Self::new(self.filled(), size, self.max_body_len);
    }

    /// The bytes to consume.
    pub(crate) fn filled(&self) -> &[u8] {
        self.bytes.get(self.start..self.end).unwrap_or_default()
    }

    /// Notes that `len` bytes were consumed.
    pub(crate) const fn consume(&mut self, len: usize) {
        self.start += len;
        debug_assert!(self.start <= self.end, "consumed more bytes than were read");
    }

    /// Notes that `len` bytes were read into [`space`](Self::space).
    pub(crate) const fn filled_by(&mut self, len: usize) {
        self.end += len;
        self.reads += 1;
        debug_assert!(self.end <= self.bytes.len(), "read more bytes than there was space");
    }

    /// Space to read into: for the rest of the current packet, whose length was checked against the
    /// maximum, or for a full read.
    ///
    /// # Errors
    /// [`DecodeError`] if the buffer does not begin with a packet.
    pub(crate) fn space(&mut self) -> Result<&mut [u8], DecodeError> {
        let min_read = self.size / 2;
        let wanted = Frame::wanted(self.filled(), self.max_body_len)?;
        let is_huge = wanted > self.size;
        if is_huge {
            self.reads = 0;
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.bytes.len() > self.size && self.reads >= KEPT_FOR {
                self.bytes.truncate(self.size);
                self.bytes.shrink_to_fit();
            }
        }
        // What was kept of a huge packet's room is for the next one: a read is not larger for it.
        let limit = self.size.max(wanted);
        let has_room = |buffer: &Self| limit.min(buffer.bytes.len()) >= buffer.end + min_read;
        if self.start > 0 && (is_huge || !has_room(self)) {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        if !has_room(self) && self.bytes.len() < wanted {
            // At most doubles the received bytes, since the rest of a packet may never arrive. Sets
            // the length explicitly, since a vector that grows by itself would reserve more.
            let len = wanted.min(self.end.saturating_mul(2)).max(self.end + 1);
            self.bytes.reserve_exact(len.saturating_sub(self.bytes.len()));
            self.bytes.resize(len.max(self.bytes.len()), 0);
        }
        let limit = limit.min(self.bytes.len());
        Ok(self.bytes.get_mut(self.end..limit).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use dcp_wire::{MAX_BODY_LEN, Opcode};

    use super::*;

    fn packet(value: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        let value = vec![7; value];
        Frame::request(Opcode::DCP_MUTATION).with_value(&value).encode(&mut bytes).unwrap();
        bytes
    }

    /// Feeds `bytes` through the buffer `step` at a time and returns the packets' lengths.
    fn walk(bytes: &[u8], step: usize) -> Vec<usize> {
        let mut buffer = ReadBuffer::new(&[], SIZE, MAX_BODY_LEN);
        let (mut lens, mut fed) = (Vec::new(), 0);
        while fed < bytes.len() {
            let space = buffer.space().unwrap();
            let len = space.len().min(step).min(bytes.len() - fed);
            space[..len].copy_from_slice(&bytes[fed..fed + len]);
            fed += len;
            buffer.filled_by(len);
            while let Some((_, used)) = Frame::parse(buffer.filled(), MAX_BODY_LEN).unwrap() {
                lens.push(used);
                buffer.consume(used);
            }
        }
        assert_eq!(buffer.filled(), b"");
        lens
    }

    #[test]
    fn packets_of_any_size_pass_in_any_portions() {
        let sizes = [0, 1, 300_000, 10, 900_000, 200_000, 2_000_000, 5];
        let bytes: Vec<u8> = sizes.iter().flat_map(|&size| packet(size)).collect();
        let expected: Vec<usize> = sizes.iter().map(|size| size + 24).collect();
        for step in [1 << 20, 262_144, 100_003, 4_099] {
            assert_eq!(walk(&bytes, step), expected, "step {step}");
        }
    }

    #[test]
    fn packet_has_twice_as_much_room_as_has_come_of_it() {
        let mut buffer = ReadBuffer::new(&[], SIZE, MAX_BODY_LEN);
        let mut header = [0; 24];
        (header[0], header[1]) = (0x80, Opcode::DCP_MUTATION.0);
        header[8..12].copy_from_slice(&u32::try_from(MAX_BODY_LEN).unwrap().to_be_bytes());
        buffer.space().unwrap()[..24].copy_from_slice(&header);
        let mut come = 24;
        buffer.filled_by(come);
        while come < MAX_BODY_LEN {
            let len = buffer.space().unwrap().len();
            assert!(len > 0 && buffer.bytes.capacity() <= SIZE.max(2 * come), "{come}");
            buffer.filled_by(len);
            come += len;
        }
    }

    /// Feeds one packet with such a value through the buffer; returns where it began.
    fn feed(buffer: &mut ReadBuffer, value: usize) -> *const u8 {
        let bytes = packet(value);
        let mut fed = 0;
        while fed < bytes.len() {
            let space = buffer.space().unwrap();
            let len = space.len().min(bytes.len() - fed);
            space[..len].copy_from_slice(&bytes[fed..fed + len]);
            buffer.filled_by(len);
            fed += len;
        }
        assert_eq!(buffer.filled(), bytes);
        let begin = buffer.filled().as_ptr();
        buffer.consume(bytes.len());
        begin
    }

    #[test]
    fn packets_that_are_huge_share_their_room_while_they_follow_each_other() {
        let mut buffer = ReadBuffer::new(&[], SIZE, MAX_BODY_LEN);
        let begin = feed(&mut buffer, 5_000_000);
        for _ in 0..KEPT_FOR / 2 {
            feed(&mut buffer, 10);
            assert_eq!(buffer.space().unwrap().len(), SIZE, "reads are no larger for it");
        }
        assert_eq!(feed(&mut buffer, 4_900_000), begin);
        for _ in 0..KEPT_FOR {
            assert!(buffer.bytes.len() > 5_000_000);
            feed(&mut buffer, 10);
        }
        buffer.space().unwrap();
        assert_eq!(
            (buffer.bytes.len(), buffer.bytes.capacity()),
            (SIZE, SIZE),
            "the last was long ago"
        );
    }
}
