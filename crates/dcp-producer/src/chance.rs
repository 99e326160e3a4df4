//! Random numbers and the wall clock, which are passed to every operation.

use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dcp_wire::Vbuuid;
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use tokio::time::Instant;

/// Where a seeded clock begins, since 1970.
const EPOCH: Duration = Duration::from_secs(1_700_000_000);

/// The current time, in nanoseconds since 1970.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Now(pub(crate) u64);

impl Now {
    /// After every moment.
    pub(crate) const NEVER: Self = Self(u64::MAX);
    pub(crate) const NANOS_PER_SECOND: u64 = 1_000_000_000;
    /// Longest expiry that is relative to now, in seconds: 30 days.
    const MAX_RELATIVE_EXPIRY: u32 = 30 * 24 * 60 * 60;

    /// The time `duration` later.
    pub(crate) fn after(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// The time in seconds since 1970.
    pub(crate) fn seconds(self) -> u32 {
        u32::try_from(self.0 / Self::NANOS_PER_SECOND).unwrap_or(u32::MAX)
    }

    /// Converts an `expiry` from a client to seconds since 1970; 0 never.
    pub(crate) fn absolute_expiry(self, expiry: u32) -> u32 {
        match expiry {
            0 => 0,
            1..=Self::MAX_RELATIVE_EXPIRY => self.seconds().saturating_add(expiry),
            _ => expiry,
        }
    }
}

/// Source of a cluster's random numbers and time: the system, or a seed and the runtime's clock.
#[derive(Default)]
pub(crate) struct Chance(Option<Seeded>);

struct Seeded {
    rng: Mutex<StdRng>,
    begin: Instant,
}

impl fmt::Debug for Chance {
    /// Leaves out the state, from which the next numbers could be predicted.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Chance").field(&self.0.is_some()).finish()
    }
}

impl Chance {
    pub(crate) fn new(seed: Option<u64>) -> Self {
        Self(seed.map(|seed| Seeded {
            rng: Mutex::new(StdRng::seed_from_u64(seed)),
            begin: Instant::now(),
        }))
    }

    fn draw<T>(&self, draw: impl FnOnce(&mut dyn RngCore) -> T) -> T {
        match &self.0 {
            // Not a thread-local generator, which a forked child would copy.
            None => draw(&mut StdRng::from_os_rng()),
            Some(seeded) => draw(&mut *seeded.rng.lock().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    pub(crate) fn number(&self) -> u128 {
        self.draw(|rng| rng.random())
    }

    /// A branch identity: 48 significant bits, never 0.
    pub(crate) fn vbuuid(&self) -> Vbuuid {
        Vbuuid(self.draw(|rng| rng.random_range(1..1u64 << 48)))
    }

    /// The present moment.
    pub(crate) fn now(&self) -> Now {
        let since_1970 = match &self.0 {
            None => SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            Some(seeded) => EPOCH + seeded.begin.elapsed(),
        };
        Now(u64::try_from(since_1970.as_nanos()).unwrap_or(u64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn expiry_is_relative_up_to_thirty_days() {
        let now = Now(1_700_000_000 * Now::NANOS_PER_SECOND);
        assert_eq!(now.absolute_expiry(0), 0);
        assert_eq!(now.absolute_expiry(1), 1_700_000_001);
        assert_eq!(now.absolute_expiry(2_592_000), 1_702_592_000);
        assert_eq!(now.absolute_expiry(2_592_001), 2_592_001);
    }

    #[tokio::test(start_paused = true)]
    async fn seed_gives_the_same_numbers_and_the_same_time() {
        let [one, other] = [(); 2].map(|()| Chance::new(Some(7)));
        assert_eq!((one.number(), one.vbuuid()), (other.number(), other.vbuuid()));
        let begin = one.now();
        tokio::time::advance(Duration::from_secs(3)).await;
        assert_eq!(one.now().0 - begin.0, 3_000_000_000);
        assert_eq!(one.now(), other.now());
        assert_ne!(Chance::new(None).number(), Chance::new(None).number());
    }
}
