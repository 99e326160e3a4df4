//! GET_COLLECTION_ID (0xbb) and GET_SCOPE_ID (0xbc): names to ids.

use bytes::BufMut;

use super::{extras, no_key};
use crate::{CollectionId, DecodeError, EncodeError, Frame, ManifestUid, Opcode, Reader, ScopeId};

/// Requests the id of a collection (`scope.collection`) or scope (server page "Collections").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResolveName<'a> {
    /// The name; an empty part stands for the default.
    pub path: &'a [u8],
}

impl<'a> ResolveName<'a> {
    /// Reads either request.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'a>) -> Result<Self, DecodeError> {
        if !matches!(frame.header.opcode, Opcode::GET_COLLECTION_ID | Opcode::GET_SCOPE_ID) {
            return Err(DecodeError::UnexpectedOpcode(frame.header.opcode.0));
        }
        extras::<0>(frame)?;
        no_key(frame)?;
        Ok(Self { path: frame.value })
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        frame.with_value(self.path).encode(out)
    }
}

/// The id of a collection or scope in a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResolvedName {
    /// Uid of the manifest in which the name was looked up.
    pub manifest_uid: ManifestUid,
    id: u32,
}

impl ResolvedName {
    /// The id of a collection.
    #[must_use]
    pub const fn collection(manifest_uid: ManifestUid, id: CollectionId) -> Self {
        Self { manifest_uid, id: id.0 }
    }

    /// The id of a scope.
    #[must_use]
    pub const fn scope(manifest_uid: ManifestUid, id: ScopeId) -> Self {
        Self { manifest_uid, id: id.0 }
    }

    /// The id, if this is the response for a collection.
    #[must_use]
    pub const fn collection_id(&self) -> CollectionId {
        CollectionId(self.id)
    }

    /// The id, if this is the response for a scope.
    #[must_use]
    pub const fn scope_id(&self) -> ScopeId {
        ScopeId(self.id)
    }

    /// Reads the extras of a response.
    ///
    /// # Errors
    /// [`DecodeError`] if the packet is not well-formed.
    pub fn decode(frame: &Frame<'_>) -> Result<Self, DecodeError> {
        let extras = extras::<12>(frame)?;
        let mut reader = Reader::new(&extras, "collection id");
        Ok(Self { manifest_uid: ManifestUid(reader.u64()?), id: reader.u32()? })
    }

    /// The extras of a response.
    #[must_use]
    pub fn encode(&self) -> [u8; 12] {
        let mut extras = [0; 12];
        let mut cursor = extras.as_mut_slice();
        cursor.put_u64(self.manifest_uid.0);
        cursor.put_u32(self.id);
        extras
    }
}
