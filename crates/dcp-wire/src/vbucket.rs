//! vBucket identity.

use core::fmt;

/// Number of a vBucket within its bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vbid(pub u16);

impl Vbid {
    /// The number as an index into a table of vBuckets.
    #[must_use]
    pub const fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for Vbid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "vb:{}", self.0)
    }
}

/// Identity of one branch of a vBucket's history; 0 means none.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vbuuid(pub u64);

impl fmt::Debug for Vbuuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Vbuuid({:#x})", self.0)
    }
}

impl fmt::Display for Vbuuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}
