//! How long to wait before the next attempt.

use std::time::Duration;

use rand::Rng;

/// Waits that double from a shortest to a longest, each shortened at random by up to half, so that
/// a thousand vBuckets do not retry at the same time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Backoff {
    shortest: Duration,
    longest: Duration,
}

impl Backoff {
    /// For short failures: a vBucket that moves, a busy server, a lost connection.
    pub(crate) const SHORT: Self =
        Self { shortest: Duration::from_millis(50), longest: Duration::from_secs(10) };
    /// For a server that could not read its disk.
    pub(crate) const LONG: Self =
        Self { shortest: Duration::from_secs(1), longest: Duration::from_secs(64) };

    /// The wait before attempt number `attempts`, counted from 0.
    pub(crate) fn wait(self, attempts: u32, randomness: &mut impl Rng) -> Duration {
        let full = self.full(attempts);
        full.mul_f64(randomness.random_range(0.5..=1.0))
    }

    fn full(self, attempts: u32) -> Duration {
        let factor = 1_u32.checked_shl(attempts.min(31)).unwrap_or(u32::MAX);
        self.shortest.saturating_mul(factor).min(self.longest)
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;
    use rand::rngs::StdRng;

    use super::*;

    #[test]
    fn retry_waits_double_up_to_the_longest() {
        let full = |attempts| Backoff::LONG.full(attempts).as_secs();
        assert_eq!([0, 1, 5, 6, 7, 40].map(full), [1, 2, 32, 64, 64, 64]);
    }

    #[test]
    fn retry_wait_is_at_least_half_of_its_bound() {
        for attempts in 0..20 {
            let wait = Backoff::SHORT.wait(attempts, &mut StdRng::seed_from_u64(7));
            let full = Backoff::SHORT.full(attempts);
            assert!(wait >= full / 2 && wait <= full, "{wait:?} of {full:?}");
        }
    }
}
