//! Errors of decoding and encoding packets.

use thiserror::Error;

/// Why bytes could not be decoded as a packet or one of its parts.
///
/// Carries sizes and names only, never a key or a value.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeError {
    /// The input ended inside `what`.
    #[error("input ends inside {what}")]
    UnexpectedEnd {
        /// The truncated part.
        what: &'static str,
    },
    /// The first byte is not a magic of the protocol: the peer speaks another protocol.
    #[error("invalid magic byte {0:#04x}: the peer does not speak the Couchbase binary protocol")]
    InvalidMagic(u8),
    /// A length does not fit the packet or the layout.
    #[error("invalid length {len} of {what}")]
    InvalidLength {
        /// The part with the invalid length.
        what: &'static str,
        /// The length found, in bytes.
        len: u32,
    },
    /// The body is longer than the reader's limit.
    #[error("body of {len} bytes exceeds the limit of {max} bytes")]
    FrameTooLarge {
        /// Declared body length in bytes.
        len: u32,
        /// Largest body length accepted in bytes.
        max: u32,
    },
    /// Bytes remain after the last field.
    #[error("{len} bytes remain after {what}")]
    TrailingBytes {
        /// The part with the trailing bytes.
        what: &'static str,
        /// How many bytes remain.
        len: u32,
    },
    /// A field holds a value the protocol does not allow.
    #[error("invalid {0}")]
    InvalidField(&'static str),
    /// The compressed value is not valid Snappy, or would inflate beyond the limit.
    #[error("invalid snappy value: {0}")]
    Decompress(&'static str),
    /// The frame's opcode is not that of the message type.
    #[error("unexpected opcode {0:#04x}")]
    UnexpectedOpcode(u8),
}

/// Why a message could not be encoded: a part is longer than its length field allows.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{what} of {len} bytes does not fit a packet (at most {max})")]
pub struct EncodeError {
    /// The part that is too long.
    pub what: &'static str,
    /// Its length in bytes.
    pub len: usize,
    /// The largest length its field can hold, in bytes.
    pub max: usize,
}
