//! DCP_SET_VBUCKET_STATE (0x5b): hands over a vBucket.

use bytes::BufMut;

use super::{StreamAddress, encode_stream_message, expect, extras, no_key, no_value};
use crate::{DecodeError, EncodeError, Frame, Opcode, wire_enum};

wire_enum! {
    /// State of a vBucket on a node.
    VbucketState(u8) {
        /// Active: serves reads and writes.
        ACTIVE = 1, "active";
        /// Replica: follows the active vBucket.
        REPLICA = 2, "replica";
        /// Pending: is about to become active.
        PENDING = 3, "pending";
        /// Dead: is about to be deleted.
        DEAD = 4, "dead";
    }
}

/// Changes the state of the consumer's vBucket, at the end of a takeover (DCP page
/// `set-vbucket-state`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetVbucketState {
    /// The state.
    pub state: VbucketState,
}

impl SetVbucketState {
    /// Reads the message.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed or names an unknown state.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::DCP_SET_VBUCKET_STATE)?;
        no_key(frame)?;
        no_value(frame)?;
        let [state] = extras::<1>(frame)?;
        let state = VbucketState(state);
        if state.name().is_none() {
            return Err(DecodeError::InvalidField("vBucket state"));
        }
        Ok(Self { state })
    }

    encode_stream_message!(DCP_SET_VBUCKET_STATE);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_extras(&[self.state.0]).encode(out)
    }
}
