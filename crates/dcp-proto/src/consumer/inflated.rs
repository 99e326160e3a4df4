//! The JSON of cluster maps and manifests, which servers may compress.

use std::borrow::Cow;

use dcp_wire::{Datatype, DecodeError, Frame, snappy};

use crate::topology::MAX_CONFIG_LEN;

/// The value of a packet, inflated to at most [`MAX_CONFIG_LEN`] bytes if it is compressed.
pub(super) fn inflated<'a>(frame: &Frame<'a>) -> Result<Cow<'a, [u8]>, DecodeError> {
    if !frame.header.datatype.contains(Datatype::SNAPPY) {
        return Ok(Cow::Borrowed(frame.value));
    }
    snappy::decompress(frame.value, MAX_CONFIG_LEN).map(Cow::Owned)
}
