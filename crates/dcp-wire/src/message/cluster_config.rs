//! The cluster map: get (0xb5), set (0xb4) and push (magic 0x82, opcode 0x01).

use bytes::BufMut;

use super::{encode_request, expect, extras, no_key, no_value};
use crate::{DecodeError, EncodeError, Frame, Magic, Opaque, Opcode, Reader};

/// Version of a cluster map, ordered by epoch, then by revision (server page "BinaryProtocol").
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct ConfigVersion {
    /// Number of times the cluster recovered from a lost quorum.
    pub epoch: i64,
    /// Number of changes within an epoch.
    pub rev: i64,
}

impl ConfigVersion {
    /// Length in a packet in bytes.
    const LEN: usize = 16;

    fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader::new(bytes, "cluster map version");
        let epoch = i64::from_be_bytes(reader.array()?);
        let rev = i64::from_be_bytes(reader.array()?);
        reader.finish()?;
        Ok(Self { epoch, rev })
    }

    fn encode(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        let mut cursor = bytes.as_mut_slice();
        cursor.put_i64(self.epoch);
        cursor.put_i64(self.rev);
        bytes
    }
}

/// Requests the cluster map; the response's value is JSON, or empty if the client is up to date.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GetClusterConfig {
    /// Version the client has; needs
    /// [`GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION`](crate::Feature::GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION).
    pub known: Option<ConfigVersion>,
}

impl GetClusterConfig {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed or names revision 0.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::GET_CLUSTER_CONFIG)?;
        no_key(frame)?;
        no_value(frame)?;
        if frame.extras.is_empty() {
            return Ok(Self { known: None });
        }
        let known = ConfigVersion::decode(&extras::<{ ConfigVersion::LEN }>(frame)?)?;
        if known.rev < 1 {
            return Err(DecodeError::InvalidField("cluster map revision"));
        }
        Ok(Self { known: Some(known) })
    }

    encode_request!(GET_CLUSTER_CONFIG);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        match self.known {
            None => frame.encode(out),
            Some(known) => frame.with_extras(&known.encode()).encode(out),
        }
    }
}

/// Sets the cluster map of a bucket; sent only by the cluster manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetClusterConfig<'a> {
    /// Version of the map; servers before 7.0 take it from the JSON only.
    pub version: Option<ConfigVersion>,
    /// Name of the bucket; empty for the selected one.
    pub bucket: &'a [u8],
    /// The map as JSON.
    pub config: &'a [u8],
}

impl<'a> SetClusterConfig<'a> {
    /// Reads the request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        expect(frame, Opcode::SET_CLUSTER_CONFIG)?;
        let version = if frame.extras.is_empty() {
            None
        } else {
            Some(ConfigVersion::decode(&extras::<{ ConfigVersion::LEN }>(frame)?)?)
        };
        Ok(Self { version, bucket: frame.key, config: frame.value })
    }

    encode_request!(SET_CLUSTER_CONFIG);

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let frame = frame.with_key(self.bucket).with_value(self.config);
        match self.version {
            None => frame.encode(out),
            Some(version) => frame.with_extras(&version.encode()).encode(out),
        }
    }
}

/// Notification of a new cluster map; has no response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterMapChange<'a> {
    /// Version of the new map.
    pub version: PushedVersion,
    /// Name of the bucket; empty for the cluster-wide map.
    pub bucket: &'a [u8],
    /// The map as JSON, or empty if the client has to fetch it.
    pub config: &'a [u8],
}

/// Version of a pushed cluster map, in either encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushedVersion {
    /// Encoding of old servers: only a revision.
    Rev(u32),
    /// Epoch and revision.
    EpochAndRev(ConfigVersion),
}

impl<'a> ClusterMapChange<'a> {
    /// Reads the notification.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        if frame.header.magic != Magic::SERVER_REQUEST {
            return Err(DecodeError::InvalidMagic(frame.header.magic.0));
        }
        expect(frame, Opcode::CLUSTER_MAP_CHANGE)?;
        let version = if frame.extras.len() == 4 {
            PushedVersion::Rev(u32::from_be_bytes(extras(frame)?))
        } else {
            let bytes = extras::<{ ConfigVersion::LEN }>(frame)?;
            PushedVersion::EpochAndRev(ConfigVersion::decode(&bytes)?)
        };
        Ok(Self { version, bucket: frame.key, config: frame.value })
    }

    /// Appends the packet to `out`.
    ///
    /// # Errors
    /// [`EncodeError`] if a part does not fit a packet.
    pub fn encode(&self, opaque: Opaque, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let frame = Frame::server_request(Opcode::CLUSTER_MAP_CHANGE).with_opaque(opaque);
        self.write(frame, out)
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        let frame = frame.with_key(self.bucket).with_value(self.config);
        match self.version {
            PushedVersion::Rev(rev) => frame.with_extras(&rev.to_be_bytes()).encode(out),
            PushedVersion::EpochAndRev(version) => frame.with_extras(&version.encode()).encode(out),
        }
    }
}
