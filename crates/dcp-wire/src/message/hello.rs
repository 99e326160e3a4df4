//! HELLO (0x1f): negotiates the features of a connection.

use bytes::BufMut;

use super::{encode_request, expect, extras};
use crate::reader::saturating_u32;
use crate::{DecodeError, EncodeError, Feature, Frame, Opaque, Opcode};

/// Requests features (server page "BinaryProtocol"); the response's value lists the granted ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello<'a> {
    /// Name of the client: free text, or JSON with `a` (agent) and `i` (connection id).
    pub agent: &'a [u8],
    /// Requested features.
    pub features: Features<'a>,
}

impl<'a> Hello<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::HELLO)?;
        extras::<0>(frame)?;
        Ok(Self { agent: frame.key, features: Features::decode(frame.value)? })
    }

    encode_request!(HELLO);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_key(self.agent).with_value(self.features.bytes).encode(out)
    }
}

/// An encoded list of features.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features<'a> {
    bytes: &'a [u8],
}

impl<'a> Features<'a> {
    /// The features in `value`.
    ///
    /// # Errors
    /// [`DecodeError::InvalidLength`] for an odd length.
    pub const fn decode(value: &'a [u8]) -> Result<Self, DecodeError> {
        if value.len().is_multiple_of(2) {
            return Ok(Self { bytes: value });
        }
        Err(DecodeError::InvalidLength { what: "feature list", len: saturating_u32(value.len()) })
    }

    /// The bytes of the list.
    #[must_use]
    pub const fn as_bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// Whether `feature` is in the list.
    #[must_use]
    pub fn contains(&self, feature: Feature) -> bool {
        self.iter().any(|each| each == feature)
    }

    /// The features in order.
    pub fn iter(&self) -> impl Iterator<Item = Feature> + use<'a> {
        let (pairs, _) = self.bytes.as_chunks::<2>();
        pairs.iter().map(|pair| Feature(u16::from_be_bytes(*pair)))
    }
}

/// The bytes of a feature list.
#[must_use]
pub fn encode_features(features: impl IntoIterator<Item = Feature>) -> Vec<u8> {
    features.into_iter().flat_map(|feature| feature.0.to_be_bytes()).collect()
}
