//! Versions of documents.

use dcp_wire::Cas;

use crate::chance::Now;

/// Creates CAS values that ascend even if the clock does not.
///
/// The upper 48 bits are the clock, the lower 16 count within one tick of it.
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

    /// The last CAS created.
    pub(crate) const fn last(&self) -> Cas {
        Cas(self.last)
    }

    /// Notes a CAS created elsewhere: later ones are above it.
    pub(crate) fn observe(&mut self, cas: Cas) {
        self.last = self.last.max(cas.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cas_grows_while_the_clock_stands_still_or_goes_back() {
        let mut clock = HybridClock::default();
        let first = clock.tick(Now(0x5_0000));
        assert_eq!(first, Cas(0x5_0000));
        assert_eq!(clock.tick(Now(0x5_1234)), Cas(0x5_0001));
        assert_eq!(clock.tick(Now(0x1_0000)), Cas(0x5_0002));
        assert_eq!(clock.tick(Now(0x6_ffff)), Cas(0x6_0000));
        clock.observe(Cas(0x9_0000));
        assert_eq!(clock.tick(Now(0x7_0000)), Cas(0x9_0001));
    }
}
