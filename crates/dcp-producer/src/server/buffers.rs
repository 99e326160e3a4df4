//! What becomes of a connection's buffers once they are empty.

use bytes::BytesMut;

/// Buffers larger than this are given back once they are empty, in bytes.
const KEPT_CAPACITY: usize = 2 << 20;

/// Gives an empty buffer's memory back if it has grown large. What was taken off its front counts
/// too, which its capacity no longer tells.
pub(super) fn let_go(buffer: &mut BytesMut) {
    if buffer.try_reclaim(KEPT_CAPACITY + 1) {
        *buffer = BytesMut::new();
    }
}

#[cfg(test)]
mod tests {
    use bytes::Buf;

    use super::*;

    #[test]
    fn a_buffer_that_grew_is_let_go_however_it_was_emptied() {
        for (len, is_kept) in [(64 << 10, true), (KEPT_CAPACITY * 2, false)] {
            let mut buffer = BytesMut::zeroed(len);
            buffer.advance(len - 10);
            buffer.advance(10);
            let_go(&mut buffer);
            assert_eq!(buffer.try_reclaim(1), is_kept, "{len} bytes");
        }
    }
}
