//! Whole packets, as a peer that is played by hand sends and receives them.

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

    /// What it is.
    #[must_use]
    pub fn opcode(&self) -> Opcode {
        self.frame().header.opcode
    }

    /// The status of a response.
    ///
    /// # Panics
    /// If it is no response.
    #[must_use]
    pub fn status(&self) -> Status {
        assert!(self.frame().header.magic.is_response(), "{:?} is no response", self.frame());
        self.frame().header.status()
    }

    /// Which request it belongs to.
    #[must_use]
    pub fn opaque(&self) -> Opaque {
        self.frame().header.opaque
    }

    /// All of it.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// Takes the first packet out of `input`; `None` if it is not whole yet.
    ///
    /// # Panics
    /// If what is there begins no packet.
    #[must_use]
    pub fn take(input: &mut BytesMut) -> Option<Self> {
        let (_, len) = Frame::parse(input, MAX_BODY_LEN).unwrap()?;
        Some(Self(input.split_to(len).freeze()))
    }
}

/// The packets that `bytes` are.
///
/// # Panics
/// If they are not whole packets.
#[must_use]
pub fn packets(bytes: &[u8]) -> Vec<Packet> {
    let mut rest = BytesMut::from(bytes);
    let packets = std::iter::from_fn(|| Packet::take(&mut rest)).collect();
    assert!(rest.is_empty(), "a packet is not whole: {rest:02x?}");
    packets
}

/// A frame as bytes.
///
/// # Panics
/// If it is too long for one.
#[must_use]
pub fn encoded(frame: &Frame<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes).expect("it fits a packet");
    bytes
}
