//! How often a connection under load is read, and when a batch is handed over before it is full.
//!
//! A node writes a few changes at a time, a hundred thousand times a second. Waking up for each
//! write costs more than reading it, and costs the node more than writing it. So once wake-ups are
//! too frequent, data may gather for a moment, like interrupt moderation of network cards.
//!
//! A drained socket therefore does not mean that the node has no more to send. A batch stays open
//! while more comes and would fill it at the present rate. Any other is handed over, under load after
//! a moment, and otherwise at once: nothing is gained by keeping it open.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::connect::ConnectionId;

/// How long data may gather: the resolution of tokio's timer, which may wait twice as long.
pub(super) const PAUSE: Duration = Duration::from_millis(1);

/// Bytes that a [`PAUSE`] brings at least under load. Fewer are single changes, which may have come close
/// together by chance.
const LOAD: usize = 2 * 1024;

/// Number of wake-ups within a [`PAUSE`] that is too many.
const BUSY: u32 = 4;

/// How long a batch stays open at least under load, and at most after the last data.
pub(super) const LULL: Duration = Duration::from_millis(3);

/// A batch is worth waiting for if it would be full within this many times its `linger`.
const WORTH_FILLING: f64 = 4.0;

/// Bytes that make a wake-up worthwhile.
const WORTHWHILE: usize = 64 * 1024;

/// Which connection of a stream was last under load. All of them share threads, which are busy then:
/// what begins to come on another one gathers as well, not only after [`BUSY`] wake-ups.
#[derive(Debug, Default)]
pub(crate) struct Load(Mutex<Option<(ConnectionId, Instant)>>);

impl Load {
    /// A connection is under load.
    pub(super) fn note(&self, id: ConnectionId, now: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((id, now));
    }

    /// Whether another connection was under load a moment ago.
    pub(super) fn is_on_others(&self, id: ConnectionId, now: Instant) -> bool {
        let last = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        last.is_some_and(|(other, at)| other != id && now < at + LULL)
    }
}

/// When a connection is read: immediately, until that wakes its task too often.
#[derive(Debug)]
pub(super) struct Pace {
    may_wait: bool,
    linger: Duration,
    /// Bytes read since the last time no data was available.
    taken: usize,
    state: State,
    /// When all available data was last read.
    dry_at: Instant,
    /// When wake-ups were last too frequent.
    loaded_at: Option<Instant>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Data is read immediately; `wakes` counts wake-ups with little data since then.
    AtOnce { since: Instant, wakes: u32 },
    /// Data gathers.
    Gathers { until: Instant },
    /// Data has gathered until then, or would have if there had been room.
    Due { at: Instant, has_gathered: bool },
}

impl Pace {
    /// For batches with this `linger`: a pause is never longer than that.
    pub(super) fn new(linger: Duration, now: Instant) -> Self {
        let state = State::AtOnce { since: now, wakes: 0 };
        Self {
            may_wait: linger >= 2 * PAUSE,
            linger,
            taken: 0,
            state,
            dry_at: now,
            loaded_at: None,
        }
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
    /// `has_room`, which would stall the server. With `load` on other connections, more than a change or
    /// two are the beginning of a burst.
    pub(super) fn ran_dry(&mut self, now: Instant, has_room: bool, load: bool) -> bool {
        let taken = std::mem::take(&mut self.taken);
        let is_burst = load && (LOAD..WORTHWHILE).contains(&taken);
        let is_loaded = match &mut self.state {
            State::Gathers { .. } => true,
            State::Due { at, has_gathered }
                if now < *at + PAUSE && (taken >= LOAD || !*has_gathered) =>
            {
                true
            }
            State::AtOnce { since, wakes } if now < *since + PAUSE => {
                *wakes = if taken < WORTHWHILE { *wakes + 1 } else { 0 };
                *wakes >= BUSY
            }
            // A pause that brought next to nothing: there was no load.
            State::Due { at, .. } if now < *at + PAUSE => {
                self.loaded_at = None;
                self.state = State::AtOnce { since: now, wakes: 1 };
                false
            }
            // The first bytes after a pause.
            State::Due { .. } | State::AtOnce { .. } => {
                self.state = State::AtOnce { since: now, wakes: 1 };
                false
            }
        };
        self.dry_at = now;
        if is_loaded {
            self.loaded_at = Some(now);
        }
        let gathers = self.may_wait && (is_loaded || is_burst) && has_room;
        if gathers {
            self.state = State::Gathers { until: now + PAUSE };
        } else if is_loaded {
            self.state = State::Due { at: now, has_gathered: false };
        }
        gathers
    }

    /// Whether the connection is under load.
    pub(super) fn is_loaded(&self) -> bool {
        self.loaded_at == Some(self.dry_at)
    }

    /// When a batch that is open since `opened_at` is handed over, of which `filled` is full: no
    /// later than after `linger`.
    pub(super) fn hand_over_at(&self, opened_at: Instant, filled: f64) -> Option<Instant> {
        let latest = opened_at.checked_add(self.linger);
        if !self.may_wait || self.taken > 0 {
            return latest;
        }
        let worth = (filled * WORTH_FILLING).clamp(0.0, 1.0);
        let mut filling =
            Duration::try_from_secs_f64(self.linger.as_secs_f64() * worth).unwrap_or(Duration::MAX);
        if self.loaded_at.is_some_and(|at| self.dry_at < at + LULL) {
            filling = filling.max(LULL);
        }
        let lull = self.dry_at + LULL;
        let at = opened_at.checked_add(filling).map_or(lull, |at| at.min(lull));
        // A shorter wait cannot be timed.
        let at = if at < self.dry_at + PAUSE { self.dry_at } else { at };
        Some(latest.map_or(at, |latest| latest.min(at)))
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
            self.state = State::Due { at: now, has_gathered: true };
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
        let gathers = pace.ran_dry(now, true, false);
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
            assert!(read(&mut pace, now, 30 * SMALL), "there was something, and more comes");
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
    fn pace_reads_at_once_again_if_a_pause_brings_a_change_or_two() {
        let (mut pace, now) = under_load();
        let now = now + PAUSE;
        assert!(pace.is_due(now));
        assert!(!read(&mut pace, now, SMALL));
        assert_eq!(pace.hand_over_at(now, 0.0), Some(now), "nothing more gathers");
        assert!(!read(&mut pace, now + PAUSE / 2, SMALL));
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
            assert!(!pace.ran_dry(now, false, false));
            assert_eq!(pace.gathers_until(), None);
        }
        assert!(read(&mut pace, now + micros(20), SMALL));
    }

    #[test]
    fn pace_gathers_a_burst_at_once_beside_others_under_load() {
        let start = Instant::now();
        let mut pace = Pace::new(LINGER, start);
        pace.took(LOAD);
        assert!(pace.ran_dry(start, true, true));
        assert_eq!(pace.hand_over_at(start, 0.0), Some(start), "what came is not kept back");
        assert!(!pace.is_loaded(), "that is still to be seen");
        // A change or two are read as fast as ever.
        let mut pace = Pace::new(LINGER, start);
        pace.took(SMALL);
        assert!(!pace.ran_dry(start, true, true));
        // As are large reads, and those without room for more.
        pace.took(WORTHWHILE);
        assert!(!pace.ran_dry(start, true, true));
        pace.took(LOAD);
        assert!(!pace.ran_dry(start, false, true));
    }

    #[test]
    fn load_is_of_other_connections_for_a_lull() {
        let (load, now) = (Load::default(), Instant::now());
        let (one, other) = (ConnectionId(1), ConnectionId(2));
        assert!(!load.is_on_others(one, now));
        load.note(other, now);
        assert!(load.is_on_others(one, now) && !load.is_on_others(other, now));
        assert!(!load.is_on_others(one, now + LULL));
    }

    #[test]
    fn batch_is_handed_over_at_once_where_little_comes() {
        let start = Instant::now();
        let mut pace = Pace::new(LINGER, start);
        for number in 1..100 {
            let now = start + micros(500) * number;
            pace.took(SMALL);
            assert_eq!(pace.hand_over_at(now, 0.0005), Some(now + LINGER), "there may be more");
            assert!(!pace.ran_dry(now, true, false));
            assert_eq!(pace.hand_over_at(now, 0.0005), Some(now));
        }
    }

    #[test]
    fn batch_is_kept_open_while_it_fills() {
        let start = Instant::now();
        let mut pace = Pace::new(LINGER, start);
        let now = start + Duration::from_millis(20);
        assert!(!read(&mut pace, now, WORTHWHILE));
        // At this rate, it would be full after 80 ms.
        assert_eq!(pace.hand_over_at(start, 0.25), Some(now + LULL));
        // After four times its linger, or more.
        assert_eq!(pace.hand_over_at(start, 0.05), Some(now));
        assert_eq!(pace.hand_over_at(start, 0.055), Some(start + Duration::from_millis(22)));
    }

    #[test]
    fn batch_under_load_is_kept_open_for_a_lull() {
        let (pace, now) = under_load();
        assert_eq!(pace.hand_over_at(now, 0.0), Some(now + LULL));
        assert_eq!(pace.hand_over_at(now - LULL, 0.0), Some(now));
    }

    #[test]
    fn batch_is_handed_over_once_nothing_has_come_for_a_lull() {
        let (pace, now) = under_load();
        assert_eq!(pace.hand_over_at(now, 0.9), Some(now + LULL));
        let old = now - LINGER;
        assert_eq!(pace.hand_over_at(old, 0.9), Some(now), "never later than after its linger");
    }

    #[test]
    fn first_data_after_a_lull_is_handed_over_at_once() {
        let (mut pace, now) = under_load();
        assert!(pace.is_due(now + PAUSE));
        let soon = now + 5 * PAUSE / 2;
        assert!(!read(&mut pace, soon, SMALL));
        assert_eq!(pace.hand_over_at(soon, 0.0), Some(soon + LULL), "the load may go on");
        let late = now + LULL;
        assert!(!read(&mut pace, late, SMALL));
        assert_eq!(pace.hand_over_at(late, 0.0), Some(late));
    }

    #[test]
    fn pace_gathers_nothing_for_a_reader_that_lingers_less() {
        let now = Instant::now();
        for linger in [Duration::ZERO, PAUSE] {
            let mut pace = Pace::new(linger, now);
            for _ in 0..100 {
                pace.took(SMALL);
                assert!(!pace.asks() && !pace.ran_dry(now, true, false), "{linger:?}");
                assert_eq!(pace.hand_over_at(now, 0.0), Some(now + linger));
            }
        }
    }
}
