//! The datatype byte.

use core::fmt;

/// How a value is encoded: a set of bits (server page "BinaryProtocol").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Datatype(pub u8);

impl Datatype {
    /// No bits set: raw bytes.
    pub const RAW: Self = Self(0);
    /// The body is JSON.
    pub const JSON: Self = Self(0x01);
    /// The complete value, including the xattr section, is one Snappy block.
    pub const SNAPPY: Self = Self(0x02);
    /// The value starts with an xattr section.
    pub const XATTR: Self = Self(0x04);

    /// Whether every bit of `other` is set.
    #[must_use]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether any bit of `other` is set.
    #[must_use]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// This set with the bits of `other`.
    #[must_use]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// This set without the bits of `other`.
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Whether only known bits are set.
    #[must_use]
    pub const fn is_valid(self) -> bool {
        self.0 <= 0x07
    }
}

impl fmt::Display for Datatype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("raw");
        }
        let mut separator = "";
        for (bit, name) in [(Self::JSON, "json"), (Self::SNAPPY, "snappy"), (Self::XATTR, "xattr")]
        {
            if self.contains(bit) {
                write!(f, "{separator}{name}")?;
                separator = ",";
            }
        }
        if !self.is_valid() {
            write!(f, "{separator}{:#x}", self.0 & !0x07)?;
        }
        Ok(())
    }
}
