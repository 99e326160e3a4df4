//! How often a connection under load is read.
//!
//! A node writes a few changes at a time, a hundred thousand times a second. Waking up for each
//! write costs more than reading it, and costs the node more than writing it. So once wake-ups are
//! too frequent, data may gather for a moment, like interrupt moderation of network cards.

use std::time::{Duration, Instant};

/// How long data may gather: the resolution of tokio's timer, which may wait twice as long.
pub(super) const PAUSE: Duration = Duration::from_millis(1);

/// Number of wake-ups within a [`PAUSE`] that is too many.
const BUSY: u32 = 4;

/// Bytes that make a wake-up worthwhile.
const WORTHWHILE: usize = 64 * 1024;

/// When a connection is read: immediately, until that wakes its task too often.
#[derive(Debug)]
pub(super) struct Pace {
    may_wait: bool,
    /// Bytes read since the last time no data was available.
    taken: usize,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Data is read immediately; `wakes` counts wake-ups with little data since then.
    AtOnce { since: Instant, wakes: u32 },
    /// Data gathers.
    Gathers { until: Instant },
    /// Data has gathered until then.
    Due { at: Instant },
}

impl Pace {
    /// For batches with this `linger`: a pause is never longer than that.
    pub(super) fn new(linger: Duration, now: Instant) -> Self {
        let state = State::AtOnce { since: now, wakes: 0 };
        Self { may_wait: linger >= 2 * PAUSE, taken: 0, state }
    }

    /// Bytes were read.
    pub(super) const fn took(&mut self, len: usize) {
        self.taken += len;
    }

    /// Whether [`ran_dry`](Self::ran_dry) must be called when no data is left.
    pub(super) const fn asks(&self) -> bool {
        self.may_wait && self.taken > 0
    }

    /// All available data was read; returns whether new data should gather. Never without
    /// `has_room`, which would stall the server.
    pub(super) fn ran_dry(&mut self, now: Instant, has_room: bool) -> bool {
        let taken = std::mem::take(&mut self.taken);
        let is_loaded = match &mut self.state {
            State::Gathers { .. } => true,
            State::Due { at } if now < *at + PAUSE => true,
            State::AtOnce { since, wakes } if now < *since + PAUSE => {
                *wakes = if taken < WORTHWHILE { *wakes + 1 } else { 0 };
                *wakes >= BUSY
            }
            // The first bytes after a pause.
            State::Due { .. } | State::AtOnce { .. } => {
                self.state = State::AtOnce { since: now, wakes: 1 };
                false
            }
        };
        let gathers = self.may_wait && is_loaded && has_room;
        if gathers {
            self.state = State::Gathers { until: now + PAUSE };
        } else if is_loaded {
            self.state = State::Due { at: now };
        }
        gathers
    }

    /// Time until which data gathers.
    pub(super) const fn gathers_until(&self) -> Option<Instant> {
        match self.state {
            State::Gathers { until } => Some(until),
            State::AtOnce { .. } | State::Due { .. } => None,
        }
    }

    /// Ends a pause; `true` if data has gathered long enough.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due = self.gathers_until().is_some_and(|until| now >= until);
        if is_due {
            self.state = State::Due { at: now };
        }
        is_due
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: usize = 1655;
    const LINGER: Duration = Duration::from_millis(100);

    fn micros(number: u64) -> Duration {
        Duration::from_micros(number)
    }

    /// Reads `len` bytes, after which there is nothing; whether data gathers then.
    fn read(pace: &mut Pace, now: Instant, len: usize) -> bool {
        pace.took(len);
        assert!(pace.asks());
        let gathers = pace.ran_dry(now, true);
        assert!(!pace.asks(), "told once");
        assert_eq!(gathers, pace.gathers_until().is_some());
        gathers
    }

    fn under_load() -> (Pace, Instant) {
        let mut now = Instant::now();
        let mut pace = Pace::new(LINGER, now);
        while !read(&mut pace, now, SMALL) {
            now += micros(20);
        }
        (pace, now)
    }

    #[test]
    fn pace_reads_at_once_what_comes_rarely() {
        let mut now = Instant::now();
        let mut pace = Pace::new(LINGER, now);
        for _ in 0..1000 {
            now += micros(400);
            assert!(!read(&mut pace, now, SMALL));
        }
    }

    #[test]
    fn pace_gathers_for_one_pause_at_a_time_where_wakes_are_frequent() {
        let start = Instant::now();
        let mut pace = Pace::new(LINGER, start);
        let gathers: Vec<_> =
            (1..=4).map(|number| read(&mut pace, start + micros(20) * number, SMALL)).collect();
        assert_eq!(gathers, [false, false, false, true]);
        let mut now = start + micros(80);
        for _ in 0..100 {
            assert_eq!(pace.gathers_until(), Some(now + PAUSE));
            assert!(!pace.is_due(now + PAUSE / 2));
            now += PAUSE;
            assert!(pace.is_due(now));
            assert_eq!(pace.gathers_until(), None, "it is to be read");
            now += micros(50);
            assert!(read(&mut pace, now, 100 * SMALL), "there was something, and more comes");
        }
    }

    #[test]
    fn pace_never_gathers_large_reads() {
        let mut now = Instant::now();
        let mut pace = Pace::new(LINGER, now);
        for _ in 0..1000 {
            now += micros(20);
            assert!(!read(&mut pace, now, WORTHWHILE));
        }
    }

    #[test]
    fn pace_stops_after_a_pause_in_which_nothing_comes() {
        let (mut pace, mut now) = under_load();
        now += PAUSE;
        assert!(pace.is_due(now));
        now += Duration::from_secs(1);
        assert!(!read(&mut pace, now, SMALL), "the first after a second");
        now += micros(20);
        assert!(!read(&mut pace, now, SMALL), "nor is the second one too many");
    }

    #[test]
    fn pace_ends_a_pause_early_once_enough_has_arrived() {
        let (mut pace, now) = under_load();
        let early = now + PAUSE / 4;
        assert!(read(&mut pace, early, 256 * 1024));
        assert_eq!(pace.gathers_until(), Some(early + PAUSE));
    }

    #[test]
    fn pace_gathers_nothing_without_room_and_resumes_once_there_is_some() {
        let (mut pace, mut now) = under_load();
        for _ in 0..10 {
            now += micros(20);
            pace.took(SMALL);
            assert!(!pace.ran_dry(now, false));
            assert_eq!(pace.gathers_until(), None);
        }
        assert!(read(&mut pace, now + micros(20), SMALL));
    }

    #[test]
    fn pace_gathers_nothing_for_a_reader_that_lingers_less() {
        let now = Instant::now();
        for linger in [Duration::ZERO, PAUSE] {
            let mut pace = Pace::new(linger, now);
            for _ in 0..100 {
                pace.took(SMALL);
                assert!(!pace.asks() && !pace.ran_dry(now, true), "{linger:?}");
            }
        }
    }
}
