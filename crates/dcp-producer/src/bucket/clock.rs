//! Time as storage sees it: handed in with every operation.

use dcp_wire::Cas;

/// The present moment, in nanoseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Now(pub(crate) u64);

impl Now {
    const NANOS_PER_SECOND: u64 = 1_000_000_000;
    /// Longest expiry that is relative to now, in seconds: 30 days.
    const MAX_RELATIVE_EXPIRY: u32 = 30 * 24 * 60 * 60;

    /// The moment in seconds since 1970.
    pub(crate) fn seconds(self) -> u32 {
        u32::try_from(self.0 / Self::NANOS_PER_SECOND).unwrap_or(u32::MAX)
    }

    /// When a document with `expiry` as clients write it expires, in seconds since 1970; 0 never.
    pub(crate) fn absolute_expiry(self, expiry: u32) -> u32 {
        match expiry {
            0 => 0,
            1..=Self::MAX_RELATIVE_EXPIRY => self.seconds().saturating_add(expiry),
            _ => expiry,
        }
    }
}

/// Hands out versions that grow even when the clock does not.
///
/// The upper 48 bits are the clock's, the lower 16 count within one tick of it.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct HybridClock {
    last: u64,
}

impl HybridClock {
    const LOGICAL_BITS: u64 = 0xffff;

    /// The next version.
    pub(crate) fn tick(&mut self, now: Now) -> Cas {
        self.last = (now.0 & !Self::LOGICAL_BITS).max(self.last.saturating_add(1));
        Cas(self.last)
    }

    /// The last version given.
    pub(crate) const fn last(&self) -> Cas {
        Cas(self.last)
    }

    /// Takes notice of a version made elsewhere: later ones are above it.
    pub(crate) fn observe(&mut self, cas: Cas) {
        self.last = self.last.max(cas.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_grow_while_the_clock_stands_still_or_goes_back() {
        let mut clock = HybridClock::default();
        let first = clock.tick(Now(0x5_0000));
        assert_eq!(first, Cas(0x5_0000));
        assert_eq!(clock.tick(Now(0x5_1234)), Cas(0x5_0001));
        assert_eq!(clock.tick(Now(0x1_0000)), Cas(0x5_0002));
        assert_eq!(clock.tick(Now(0x6_ffff)), Cas(0x6_0000));
        clock.observe(Cas(0x9_0000));
        assert_eq!(clock.tick(Now(0x7_0000)), Cas(0x9_0001));
    }

    #[test]
    fn expiry_is_relative_up_to_thirty_days() {
        let now = Now(1_700_000_000 * Now::NANOS_PER_SECOND);
        assert_eq!(now.absolute_expiry(0), 0);
        assert_eq!(now.absolute_expiry(1), 1_700_000_001);
        assert_eq!(now.absolute_expiry(2_592_000), 1_702_592_000);
        assert_eq!(now.absolute_expiry(2_592_001), 2_592_001);
    }
}
