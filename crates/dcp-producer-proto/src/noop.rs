//! Keep-alive: sends noops and closes connections that are silent for too long.

use core::time::Duration;
use std::time::Instant;

use dcp_wire::{DecodeError, Frame, Opaque};

/// The opaque of a connection's first noop; later ones count on from it.
const FIRST_OPAQUE: u32 = 10_000_001;

/// Checks that a noop has nothing but a header.
pub(super) fn check(frame: &Frame<'_>) -> Result<(), DecodeError> {
    match frame.header.body_len {
        0 => Ok(()),
        len => Err(DecodeError::InvalidLength { what: "noop", len }),
    }
}

/// The noop schedule of a connection (DCP page "dead-connections").
///
/// A noop is due one interval after the last one was sent, regardless of other traffic, unless that
/// one is still unanswered. An unanswered noop alone does not end the connection; silence for the
/// whole idle timeout does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Noop {
    last_sent: Instant,
    last_received: Instant,
    awaiting_answer: bool,
    next_opaque: u32,
}

impl Noop {
    pub(super) const fn new(now: Instant) -> Self {
        Self {
            last_sent: now,
            last_received: now,
            awaiting_answer: false,
            next_opaque: FIRST_OPAQUE,
        }
    }

    /// The schedule of a server that receives noops and sends none.
    pub(super) const fn silent(now: Instant) -> Self {
        Self { awaiting_answer: true, ..Self::new(now) }
    }

    pub(super) const fn received(&mut self, now: Instant) {
        self.last_received = now;
    }

    /// The opaque of a noop that is due now; it counts as sent.
    pub(super) fn take_due(&mut self, now: Instant, interval: Duration) -> Option<Opaque> {
        if self.awaiting_answer || now.saturating_duration_since(self.last_sent) < interval {
            return None;
        }
        let opaque = Opaque(self.next_opaque);
        self.next_opaque = self.next_opaque.wrapping_add(1);
        self.last_sent = now;
        self.awaiting_answer = true;
        Some(opaque)
    }

    /// Whether `opaque` is that of the last noop sent; its answer is no longer awaited then.
    pub(super) fn answered(&mut self, opaque: Opaque) -> bool {
        let sent_any = self.next_opaque != FIRST_OPAQUE;
        let is_last = sent_any && opaque.0 == self.next_opaque.wrapping_sub(1);
        if is_last {
            self.awaiting_answer = false;
        }
        is_last
    }

    /// How long ago the last packet was received.
    pub(super) fn silence(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.last_received)
    }

    /// When the next action is due.
    pub(super) fn deadline(&self, interval: Duration, idle_timeout: Duration) -> Option<Instant> {
        let idle = self.last_received.checked_add(idle_timeout);
        if self.awaiting_answer {
            return idle;
        }
        let due = self.last_sent.checked_add(interval);
        [due, idle].into_iter().flatten().min()
    }
}
