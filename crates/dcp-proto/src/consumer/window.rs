//! The consumer's side of flow control (public DCP page "flow-control").

use std::time::{Duration, Instant};

/// How long released bytes may wait before they are acknowledged, so that the last ones of a quiet
/// stream do not shrink the producer's window forever.
const ACK_AFTER: Duration = Duration::from_secs(1);

/// Part of the window that is acknowledged at once, as its divisor. The protocol's guide says a
/// fifth, or 50 KB. Bytes are released by the batch, and a batch ends before it holds half of the
/// window, so a threshold of one half would often wait for a second batch while the producer is
/// stalled.
const ACK_SHARE: u64 = 4;

/// Bytes received against bytes acknowledged on one connection.
///
/// `outstanding` never exceeds the producer's own count, since the producer counts a packet when it
/// sends it and an acknowledgement when it receives it. A producer stops once its count reaches the
/// window, so at most one packet exceeds it.
#[derive(Debug)]
pub(super) struct Window {
    size: u64,
    /// Received and not acknowledged.
    outstanding: u64,
    /// Part of `outstanding` that the application has processed.
    released: u64,
    /// When the oldest byte of `released` was released.
    released_at: Option<Instant>,
}

impl Window {
    /// A window of `size` bytes; 0 if flow control is off, in which case nothing is acknowledged.
    pub(super) const fn new(size: u32) -> Self {
        Self { size: size as u64, outstanding: 0, released: 0, released_at: None }
    }

    /// Counts bytes received; `false` if the producer sent more than the window allows.
    #[inline]
    pub(super) const fn receive(&mut self, bytes: u64) -> bool {
        let allowed = self.size == 0 || self.outstanding < self.size;
        self.outstanding += bytes;
        allowed || bytes == 0
    }

    /// How many bytes may be received before the next packet violates flow control.
    #[inline]
    pub(super) const fn room(&self) -> u64 {
        if self.size == 0 { u64::MAX } else { self.size.saturating_sub(self.outstanding) }
    }

    /// Returns bytes that the application has processed.
    pub(super) fn release(&mut self, now: Instant, bytes: u64) {
        debug_assert!(self.released + bytes <= self.outstanding, "more released than received");
        self.released = (self.released + bytes).min(self.outstanding);
        if self.released > 0 && self.released_at.is_none() {
            self.released_at = Some(now);
        }
    }

    /// Bytes to acknowledge now: once they are a quarter of the window, have waited a second, or
    /// the producer is stalled.
    pub(super) fn take_ack(&mut self, now: Instant) -> Option<u32> {
        if self.size == 0 || self.released == 0 {
            return None;
        }
        let due = self.released.saturating_mul(ACK_SHARE) >= self.size
            || self.is_full()
            || self.released_at.is_some_and(|at| now >= at + ACK_AFTER);
        if !due {
            return None;
        }
        let bytes = u32::try_from(self.released).unwrap_or(u32::MAX);
        self.released -= u64::from(bytes);
        self.outstanding -= u64::from(bytes);
        self.released_at = (self.released > 0).then_some(now);
        Some(bytes)
    }

    /// Bytes to acknowledge so that nothing is outstanding, as many as fit into one
    /// acknowledgement.
    pub(super) fn take_all(&mut self) -> Option<u32> {
        if self.size == 0 || self.outstanding == 0 {
            return None;
        }
        let bytes = u32::try_from(self.outstanding).unwrap_or(u32::MAX);
        self.outstanding -= u64::from(bytes);
        (self.released, self.released_at) = (0, None);
        Some(bytes)
    }

    /// When released bytes become due for [`take_ack`](Self::take_ack).
    pub(super) fn deadline(&self) -> Option<Instant> {
        if self.size == 0 {
            return None;
        }
        self.released_at.map(|at| at + ACK_AFTER)
    }

    /// Whether the producer is stalled until bytes are acknowledged.
    pub(super) const fn is_full(&self) -> bool {
        self.size != 0 && self.outstanding >= self.size
    }

    /// Bytes received and not acknowledged.
    pub(super) const fn outstanding(&self) -> u64 {
        self.outstanding
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[expect(clippy::disallowed_methods, reason = "some moment to count from")]
    fn start() -> Instant {
        Instant::now()
    }

    #[test]
    fn window_acknowledges_a_quarter_at_once() {
        let now = start();
        let mut window = Window::new(1000);
        assert!(window.receive(350));
        window.release(now, 249);
        assert_eq!(window.take_ack(now), None);
        window.release(now, 1);
        assert_eq!(window.take_ack(now), Some(250));
        assert_eq!((window.outstanding(), window.deadline()), (100, None));
    }

    #[test]
    fn window_acknowledges_less_after_a_second() {
        let now = start();
        let mut window = Window::new(1000);
        assert!(window.receive(100));
        window.release(now, 1);
        let deadline = window.deadline().unwrap();
        assert_eq!(deadline, now + ACK_AFTER);
        assert_eq!(window.take_ack(now + ACK_AFTER / 2), None);
        assert_eq!(window.take_ack(deadline), Some(1));
    }

    #[test]
    fn window_acknowledges_anything_while_the_producer_stands_still() {
        let now = start();
        let mut window = Window::new(1000);
        assert!(window.receive(1000));
        assert!(window.is_full());
        window.release(now, 10);
        assert_eq!(window.take_ack(now), Some(10));
        assert!(!window.is_full());
    }

    #[test]
    fn window_may_be_exceeded_by_one_packet_but_not_by_the_next() {
        let mut window = Window::new(1000);
        assert!(window.receive(999));
        assert!(window.receive(20_000_000));
        assert!(!window.receive(1));
    }

    #[test]
    fn window_without_flow_control_acknowledges_nothing() {
        let now = start();
        let mut window = Window::new(0);
        assert!(window.receive(u64::from(u32::MAX)));
        window.release(now, 5);
        assert_eq!((window.take_ack(now + ACK_AFTER), window.deadline()), (None, None));
    }

    #[test]
    fn window_that_is_full_allows_only_packets_of_no_bytes() {
        let mut window = Window::new(10);
        assert!(window.receive(10));
        assert!(window.receive(0));
        assert!(!window.receive(1));
        assert_eq!(window.outstanding(), 11);
    }

    #[test]
    fn window_room_is_what_is_left_of_it() {
        let mut window = Window::new(10);
        assert!(window.receive(4));
        assert_eq!(window.room(), 6);
        assert!(window.receive(10));
        assert_eq!(window.room(), 0);
        assert_eq!(Window::new(0).room(), u64::MAX);
    }

    #[test]
    fn window_wait_begins_with_the_oldest_byte_released() {
        let now = start();
        let mut window = Window::new(1000);
        assert!(window.receive(100));
        window.release(now, 0);
        assert_eq!(window.deadline(), None, "nothing waits");
        window.release(now, 1);
        window.release(now + ACK_AFTER / 2, 1);
        assert_eq!(window.deadline(), Some(now + ACK_AFTER));
    }

    #[test]
    fn window_acknowledges_more_than_one_packet_holds_in_parts() {
        let now = start();
        let more = || {
            let mut window = Window::new(u32::MAX);
            assert!(window.receive(5));
            assert!(window.receive(u64::from(u32::MAX)));
            window.release(now, u64::from(u32::MAX) + 4);
            window
        };
        let mut window = more();
        assert_eq!(window.take_ack(now), Some(u32::MAX));
        assert_eq!((window.outstanding(), window.deadline()), (5, Some(now + ACK_AFTER)));
        let mut window = more();
        assert_eq!(window.take_all(), Some(u32::MAX));
        assert_eq!((window.outstanding(), window.deadline()), (5, None));
        assert_eq!((window.take_all(), window.take_all()), (Some(5), None));
    }

    #[test]
    fn window_without_flow_control_ignores_a_forced_acknowledgement() {
        let mut window = Window::new(0);
        assert!(window.receive(5));
        assert_eq!((window.take_all(), window.is_full()), (None, false));
    }
}
