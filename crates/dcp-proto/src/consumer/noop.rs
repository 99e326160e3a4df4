//! Keep-alive: answers the server's noops, and finds connections dead that are silent for too long.

use std::time::{Duration, Instant};

use dcp_wire::{DecodeError, Frame, Opcode, Status};

/// Noop intervals without any packet after which a connection is dead. The producer sends a noop
/// each interval regardless of other traffic, so one may be delayed by a stall.
const DEAD_AFTER_INTERVALS: u32 = 2;

/// When a connection is dead on which the last packet arrived at `heard_at`.
pub(super) fn dead_at(heard_at: Instant, interval: Duration) -> Instant {
    heard_at + interval * DEAD_AFTER_INTERVALS
}

/// The answer to a noop; one with a body is malformed.
pub(super) const fn answer_to(noop: &Frame<'_>) -> Result<Frame<'static>, DecodeError> {
    let len = noop.header.body_len;
    if len != 0 {
        return Err(DecodeError::TrailingBytes { what: "the header of a noop", len });
    }
    Ok(Frame::response(Opcode::DCP_NOOP, Status::SUCCESS).with_opaque(noop.header.opaque))
}
