//! Framing extras: small tagged objects in front of the extras (server page "BinaryProtocol").

use crate::{DecodeError, Reader, StreamId};

/// One object of the framing extras.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameInfo<'a> {
    /// Which object; requests and responses number theirs independently.
    pub id: u16,
    /// Its bytes.
    pub payload: &'a [u8],
}

impl FrameInfo<'_> {
    /// Request object: durability requirements (1 or 3 bytes).
    pub const DURABILITY: u16 = 1;
    /// Request object: DCP stream id (2 bytes).
    pub const STREAM_ID: u16 = 2;
    /// Response object: time the server spent on the request (2 bytes).
    pub const SERVER_DURATION: u16 = 0;
}

/// The framing extras that carry one stream id.
#[must_use]
pub const fn stream_id_frame(id: StreamId) -> [u8; 3] {
    let [high, low] = id.0.to_be_bytes();
    [0x22, high, low]
}

/// Framing extras that carry the time the server spent on the request.
///
/// The server's encoding: `(2 × microseconds)^(1 / 1.74)`, saturating.
#[must_use]
pub const fn server_duration_frame(encoded: u16) -> [u8; 3] {
    let [high, low] = encoded.to_be_bytes();
    [0x02, high, low]
}

/// Iterates over the objects of framing extras.
#[derive(Clone, Copy, Debug)]
pub struct FrameInfos<'a> {
    reader: Reader<'a>,
}

impl<'a> FrameInfos<'a> {
    /// The objects in `bytes`.
    #[must_use]
    pub const fn new(bytes: &'a [u8]) -> Self {
        Self { reader: Reader::new(bytes, "framing extras") }
    }

    fn read(&mut self) -> Result<FrameInfo<'a>, DecodeError> {
        let first = self.reader.u8()?;
        let id = self.nibble(first >> 4)?;
        let len = self.nibble(first & 0x0f)?;
        Ok(FrameInfo { id, payload: self.reader.bytes(usize::from(len))? })
    }

    /// 15 is an escape: the value is 15 plus the next byte.
    fn nibble(&mut self, nibble: u8) -> Result<u16, DecodeError> {
        if nibble < 15 {
            return Ok(u16::from(nibble));
        }
        Ok(u16::from(self.reader.u8()?).saturating_add(15))
    }
}

impl<'a> Iterator for FrameInfos<'a> {
    type Item = Result<FrameInfo<'a>, DecodeError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.reader.is_empty() {
            return None;
        }
        let item = self.read();
        if item.is_err() {
            self.reader = Reader::new(&[], "framing extras");
        }
        Some(item)
    }
}
