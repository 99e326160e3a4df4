//! Newtypes of the protocol's 64-bit numbers, opaques and stream ids.

use core::fmt;

macro_rules! number {
    ($(#[$meta:meta])* $name:ident($int:ty)) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $int);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl From<$int> for $name {
            fn from(value: $int) -> Self {
                Self(value)
            }
        }
    };
}

number! {
    /// Position of a change within its vBucket; the first change is 1, 0 means "nothing".
    Seqno(u64)
}
number! {
    /// Revision seqno of a document, which conflict resolution by revision compares first.
    ///
    /// Each change raises it, but it does not count them: a new document starts above the revisions
    /// that were deleted in its vBucket, and a write with metadata sets any.
    RevSeqno(u64)
}
number! {
    /// CAS of a document: hybrid logical time in nanoseconds since 1970, low 16 bits logical.
    Cas(u64)
}
number! {
    /// Token that links a response to its request, and a stream message to its stream request.
    Opaque(u32)
}
number! {
    /// Id of one of several streams of a vBucket on one connection (1 to 65535).
    StreamId(u16)
}

impl Seqno {
    /// Before the first change.
    pub const ZERO: Self = Self(0);
    /// As an end: unbounded.
    pub const MAX: Self = Self(u64::MAX);
}
