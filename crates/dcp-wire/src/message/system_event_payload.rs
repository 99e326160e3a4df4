//! What a system event says about its collection or scope.

use super::flatbuffers::Table;
use super::{SystemEvent, SystemEventId};
use crate::{CollectionId, DecodeError, ManifestUid, Reader, ScopeId};

/// What a system event says about its collection or scope, in any form (DCP page `system_event`).
///
/// Of several events that one manifest update causes only the last carries the new uid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemEventPayload<'a> {
    /// Manifest the vBucket has reached.
    pub manifest_uid: ManifestUid,
    /// Scope created or dropped, or the scope of the collection.
    pub scope_id: ScopeId,
    /// The collection, if the event concerns one.
    pub collection_id: Option<CollectionId>,
    /// Name of the collection or scope; empty for drops.
    pub name: &'a [u8],
    /// Expiry of the collection's documents in seconds, if it sets one.
    pub max_ttl: Option<u32>,
    /// Whether the collection keeps every version of its documents (FlatBuffers form only).
    pub history: bool,
    /// Manifest by which the collection was flushed last; 0 if never (FlatBuffers form only).
    pub flush_uid: ManifestUid,
}

impl<'a> SystemEvent<'a> {
    /// Reads the payload; `None` for an id or version this crate does not know, which the protocol
    /// wants skipped.
    ///
    /// # Errors
    /// [`DecodeError`] if the payload is damaged.
    pub fn payload(&self) -> Result<Option<SystemEventPayload<'a>>, DecodeError> {
        let collection = match self.id {
            SystemEventId::BEGIN_COLLECTION
            | SystemEventId::END_COLLECTION
            | SystemEventId::MODIFY_COLLECTION => true,
            SystemEventId::CREATE_SCOPE | SystemEventId::DROP_SCOPE => false,
            _ => return Ok(None),
        };
        match self.version {
            0 | 1 => self.plain_payload(collection).map(Some),
            2 => {
                let damaged = DecodeError::InvalidField("FlatBuffers payload of a system event");
                self.flatbuffers_payload(collection).map(Some).ok_or(damaged)
            }
            _ => Ok(None),
        }
    }

    fn plain_payload(&self, collection: bool) -> Result<SystemEventPayload<'a>, DecodeError> {
        let mut reader = Reader::new(self.value, "payload of a system event");
        let payload = SystemEventPayload {
            manifest_uid: ManifestUid(reader.u64()?),
            scope_id: ScopeId(reader.u32()?),
            collection_id: if collection { Some(CollectionId(reader.u32()?)) } else { None },
            name: self.key,
            max_ttl: if self.version == 1 { Some(reader.u32()?) } else { None },
            history: false,
            flush_uid: ManifestUid(0),
        };
        reader.finish()?;
        Ok(payload)
    }

    fn flatbuffers_payload(&self, collection: bool) -> Option<SystemEventPayload<'a>> {
        let table = Table::root(self.value)?;
        let payload = SystemEventPayload {
            manifest_uid: ManifestUid(table.u64(0)?),
            scope_id: ScopeId(table.u32(1)?),
            collection_id: None,
            name: self.key,
            max_ttl: None,
            history: false,
            flush_uid: ManifestUid(0),
        };
        // The tables differ from their third field on.
        Some(match self.id {
            SystemEventId::CREATE_SCOPE => SystemEventPayload { name: table.string(2)?, ..payload },
            SystemEventId::END_COLLECTION => {
                SystemEventPayload { collection_id: Some(CollectionId(table.u32(2)?)), ..payload }
            }
            _ if collection => SystemEventPayload {
                collection_id: Some(CollectionId(table.u32(2)?)),
                max_ttl: if table.bool(3)? { Some(table.u32(4)?) } else { None },
                name: table.string(5)?,
                history: table.bool(6)?,
                flush_uid: ManifestUid(table.u64(9)?),
                ..payload
            },
            _ => payload,
        })
    }
}
