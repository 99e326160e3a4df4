//! Whole packets, as sent and received by scripted peers.

use bytes::{Bytes, BytesMut};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Opcode, Status};

/// One whole packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packet(Bytes);

impl Packet {
    /// Its parts.
    #[must_use]
    pub fn frame(&self) -> Frame<'_> {
        Frame::parse(&self.0, MAX_BODY_LEN).unwrap().unwrap().0
    }

    /// Its opcode.
    #[must_use]
    pub fn opcode(&self) -> Opcode {
        self.frame().header.opcode
    }

    /// The status of a response.
    ///
    /// # Panics
    /// If it is not a response.
    #[must_use]
    pub fn status(&self) -> Status {
        assert!(self.frame().header.magic.is_response(), "{:?} is no response", self.frame());
        self.frame().header.status()
    }

    /// Its opaque.
    #[must_use]
    pub fn opaque(&self) -> Opaque {
        self.frame().header.opaque
    }

    /// The whole packet.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Removes the first packet from `input`; `None` if it is incomplete.
    ///
    /// # Panics
    /// If `input` does not begin with a valid packet.
    #[must_use]
    pub fn take(input: &mut BytesMut) -> Option<Self> {
        let (_, len) = Frame::parse(input, MAX_BODY_LEN).unwrap()?;
        Some(Self(input.split_to(len).freeze()))
    }
}

/// Splits `bytes` into packets.
///
/// # Panics
/// If `bytes` are not whole packets.
#[must_use]
pub fn packets(bytes: &[u8]) -> Vec<Packet> {
    let mut rest = BytesMut::from(bytes);
    let packets = std::iter::from_fn(|| Packet::take(&mut rest)).collect();
    assert!(rest.is_empty(), "a packet is not whole: {rest:02x?}");
    packets
}

/// Encodes a frame.
///
/// # Panics
/// If a part is too long.
#[must_use]
pub fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes).expect("it fits a packet");
    bytes
}
