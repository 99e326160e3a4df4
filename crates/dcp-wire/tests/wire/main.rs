//! The wire crate against recorded traffic, golden packets and arbitrary bytes.
#![expect(clippy::print_stdout, reason = "a test over a folder tells how much it has seen")]

mod describe;
mod facts;
mod fields;
mod framing;
mod golden_packets;
mod layouts;
mod malformed;
mod properties;
mod snapshot_markers;
mod traces;

use dcp_wire::{Frame, MAX_BODY_LEN};

/// The one packet in `bytes`.
fn frame(bytes: &[u8]) -> Frame<'_> {
    let (frame, used) = Frame::parse(bytes, MAX_BODY_LEN).unwrap().expect("a whole packet");
    assert_eq!(used, bytes.len());
    frame
}
