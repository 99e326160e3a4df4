//! The answer to a server's noop.

use dcp_wire::{DecodeError, Frame, Opcode, Status};

/// The answer to a noop; one with a body is malformed.
pub(super) const fn answer_to(noop: &Frame<'_>) -> Result<Frame<'static>, DecodeError> {
    let len = noop.header.body_len;
    if len != 0 {
        return Err(DecodeError::TrailingBytes { what: "the header of a noop", len });
    }
    Ok(Frame::response(Opcode::DCP_NOOP, Status::SUCCESS).with_opaque(noop.header.opaque))
}
