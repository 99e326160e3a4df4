//! Any packet, decoded by its magic.

use bytes::BufMut;

use super::{ClusterMapChange, Request, Response};
use crate::{DecodeError, EncodeError, Frame, Magic, Opcode};

/// A decoded packet.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Message<'a> {
    /// A request, or a message pushed by a DCP producer.
    Request(Request<'a>),
    /// A response.
    Response(Response<'a>),
    /// Notification of a new cluster map.
    ClusterMapChange(ClusterMapChange<'a>),
    /// A packet this crate has no type for.
    Raw(RawMessage<'a>),
}

/// The undecoded parts of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawMessage<'a> {
    /// Extras.
    pub extras: &'a [u8],
    /// Key.
    pub key: &'a [u8],
    /// Value.
    pub value: &'a [u8],
}

impl<'a> Message<'a> {
    /// Decodes a packet by its magic, opcode and status. A packet without a type of its own becomes
    /// [`Message::Raw`], never an error.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet does not have the layout of its opcode.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        let message = match frame.header.magic {
            Magic::CLIENT_REQUEST | Magic::ALT_CLIENT_REQUEST => {
                Request::decode(frame)?.map(Self::Request)
            }
            Magic::CLIENT_RESPONSE | Magic::ALT_CLIENT_RESPONSE => {
                Response::decode(frame)?.map(Self::Response)
            }
            Magic::SERVER_REQUEST if frame.header.opcode == Opcode::CLUSTER_MAP_CHANGE => {
                Some(Self::ClusterMapChange(ClusterMapChange::decode(frame)?))
            }
            _ => None,
        };
        let raw = RawMessage { extras: frame.extras, key: frame.key, value: frame.value };
        Ok(message.unwrap_or(Self::Raw(raw)))
    }

    /// Appends the packet to `out`: `envelope` provides [everything else](Frame::envelope).
    ///
    /// After [`decode`](Self::decode) this reproduces the same bytes, except for fields without
    /// meaning, which become 0: the high-completed and high-prepared seqnos of memory snapshots.
    ///
    /// # Errors
    /// [`EncodeError`] if a part does not fit a packet.
    pub fn encode(&self, envelope: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        match self {
            Self::Request(request) => request.write(envelope, out),
            Self::Response(response) => response.write(envelope, out),
            Self::ClusterMapChange(change) => change.write(envelope, out),
            Self::Raw(RawMessage { extras, key, value }) => {
                envelope.with_extras(extras).with_key(key).with_value(value).encode(out)
            }
        }
    }
}
