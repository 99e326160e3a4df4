//! Encoding and decoding of the Couchbase binary protocol.
//!
//! This crate knows the layout of every packet that a DCP (Database Change Protocol) consumer or
//! producer exchanges, but not when they are exchanged: it has no IO, clock or tasks.
//!
//! * [`Frame`] is a borrowed view of one packet. [`Frame::parse`] checks every length against the
//!   packet before splitting it and refuses an over-long body before allocating anything.
//! * [`message`] contains one type per packet kind, each with `decode` from a [`Frame`] and
//!   `encode` to a buffer.
//! * [`sasl`], [`xattr`], [`snappy`] and [`leb128`] handle the values inside those packets.
//! * [`describe`] turns any packet into readable names and values.
//!
//! ```
//! use dcp_wire::{Frame, Opcode, message::StreamEnd};
//!
//! let packet = [
//!     0x80, 0x55, 0, 0, 4, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2,
//! ];
//! let (frame, used) = Frame::parse(&packet, dcp_wire::MAX_BODY_LEN)?.expect("a whole packet");
//! assert_eq!((frame.header.opcode, used), (Opcode::DCP_STREAM_END, packet.len()));
//! assert_eq!(StreamEnd::decode(&frame)?.reason.name(), Some("StateChanged"));
//! # Ok::<(), dcp_wire::DecodeError>(())
//! ```
#![forbid(unsafe_code)]
#![cfg_attr(
    not(test),
    deny(
        clippy::arithmetic_side_effects,
        clippy::cast_possible_truncation,
        clippy::expect_used,
        clippy::indexing_slicing,
        clippy::panic,
        clippy::unwrap_used
    )
)]

mod datatype;
pub mod describe;
mod error;
mod feature;
mod frame;
pub mod framing_extras;
mod header;
mod key;
pub mod leb128;
mod magic;
pub mod message;
mod opcode;
mod reader;
pub mod sasl;
mod seqno;
pub mod snappy;
mod status;
mod vbucket;
pub mod xattr;

pub use datatype::Datatype;
pub use error::{DecodeError, EncodeError};
pub use feature::Feature;
pub use frame::Frame;
pub use header::Header;
pub use key::{CollectionId, DocKey, ManifestUid, ScopeId};
pub use magic::Magic;
pub use opcode::Opcode;
pub use reader::Reader;
pub use seqno::{Cas, Opaque, RevSeqno, Seqno, StreamId};
pub use status::{Status, StatusClass};
pub use vbucket::{Vbid, Vbuuid};

/// Default limit of the body in bytes. This is the server's own limit: 20 MiB of document, 1 MiB of
/// system xattrs, and some overhead.
pub const MAX_BODY_LEN: usize = 30 * 1024 * 1024;

/// Defines a newtype over an integer whose known values have names.
///
/// Any value round-trips: an unknown one is preserved and printed as hex.
macro_rules! wire_enum {
    (
        $(#[$meta:meta])*
        $name:ident($int:ty) {
            $( $(#[$vmeta:meta])* $konst:ident = $value:literal, $text:literal; )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $int);

        impl $name {
            $( $(#[$vmeta])* pub const $konst: Self = Self($value); )*

            /// Every named value.
            pub const KNOWN: &'static [Self] = &[ $( Self::$konst ),* ];

            /// The protocol's name of this value, `None` if it is unknown.
            #[must_use]
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $( $value => Some($text), )*
                    _ => None,
                }
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, concat!(stringify!($name), "({:#x})"), self.0),
                }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "{:#x}", self.0),
                }
            }
        }

        impl From<$int> for $name {
            fn from(value: $int) -> Self {
                Self(value)
            }
        }
    };
}
pub(crate) use wire_enum;
