//! Payloads of system events.

use super::flatbuffers::{Table, TableWriter};
use super::{SystemEvent, SystemEventId};
use crate::{CollectionId, DecodeError, ManifestUid, Reader, ScopeId};

/// The payload of a system event, in any version (DCP page `system_event`).
///
/// If one manifest update causes several events, only the last carries the new uid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SystemEventPayload<'a> {
    /// Uid of the manifest that the vBucket has reached.
    pub manifest_uid: ManifestUid,
    /// The created or dropped scope, or the scope of the collection.
    pub scope_id: ScopeId,
    /// The collection, if the event concerns one.
    pub collection_id: Option<CollectionId>,
    /// Name of the collection or scope; empty for drops.
    pub name: &'a [u8],
    /// Expiry of the collection's documents in seconds, if it sets one.
    pub max_ttl: Option<u32>,
    /// Whether the collection keeps every version of its documents (FlatBuffers only).
    pub history: bool,
    /// Uid of the manifest that last flushed the collection; 0 if none (FlatBuffers only).
    pub flush_uid: ManifestUid,
}

impl<'a> SystemEvent<'a> {
    /// Reads the payload; `None` for an unknown id or version, which the protocol says to skip.
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

impl SystemEventPayload<'_> {
    /// The payload in version 0, or 1 if it has an expiry, and the version used.
    ///
    /// [`SystemEventId::MODIFY_COLLECTION`] has no such version.
    #[must_use]
    pub fn to_plain(&self) -> (Vec<u8>, u8) {
        let mut value = Vec::with_capacity(20);
        value.extend_from_slice(&self.manifest_uid.0.to_be_bytes());
        value.extend_from_slice(&self.scope_id.0.to_be_bytes());
        if let Some(id) = self.collection_id {
            value.extend_from_slice(&id.0.to_be_bytes());
        }
        if let Some(max_ttl) = self.max_ttl {
            value.extend_from_slice(&max_ttl.to_be_bytes());
        }
        (value, u8::from(self.max_ttl.is_some()))
    }

    /// The payload in version 2, which is FlatBuffers.
    #[must_use]
    pub fn to_flatbuffers(&self, id: SystemEventId) -> Vec<u8> {
        let is_drop = matches!(id, SystemEventId::END_COLLECTION | SystemEventId::DROP_SCOPE);
        let (mut table, name) = match is_drop {
            true => (TableWriter::default(), None),
            false => {
                let (table, name) = TableWriter::with_string(self.name);
                (table, Some(name))
            }
        };
        // The tables differ from their third field on.
        if let (Some(collection_id), Some(name)) = (self.collection_id, name) {
            table.u64(9, self.flush_uid.0);
            table.u64(0, self.manifest_uid.0);
            table.string(5, name);
            table.u32(4, self.max_ttl.unwrap_or_default());
            table.u32(2, collection_id.0);
            table.u32(1, self.scope_id.0);
            table.bool(6, self.history);
            table.bool(3, self.max_ttl.is_some());
            return table.finish();
        }
        table.u64(0, self.manifest_uid.0);
        if let Some(name) = name {
            table.string(2, name);
        }
        table.u32(2, self.collection_id.unwrap_or_default().0);
        table.u32(1, self.scope_id.0);
        table.finish()
    }
}
