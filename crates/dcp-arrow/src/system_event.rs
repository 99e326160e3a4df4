//! System events as rows.

use dcp_proto::SystemEventRecord;
use dcp_wire::message::SystemEventId;
use dcp_wire::{CollectionId, DecodeError, ManifestUid, Reader, ScopeId};
use serde_json::json;

/// What a system event says, in versions 0 and 1 of its payload (dcp system-event).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SystemEventPayload {
    pub(crate) manifest_uid: ManifestUid,
    pub(crate) scope_id: ScopeId,
    /// `None` for the events of scopes.
    pub(crate) collection_id: Option<CollectionId>,
    /// Longest life of a document in seconds, if the collection has one.
    pub(crate) max_ttl: Option<u32>,
}

impl SystemEventPayload {
    /// Reads the payload; `None` if its event or version is not one this crate knows.
    pub(crate) fn decode(event: &SystemEventRecord<'_>) -> Result<Option<Self>, DecodeError> {
        if event.version > 1 {
            return Ok(None);
        }
        let of_collection = match event.id {
            SystemEventId::BEGIN_COLLECTION | SystemEventId::END_COLLECTION => true,
            SystemEventId::CREATE_SCOPE | SystemEventId::DROP_SCOPE => false,
            _ => return Ok(None),
        };
        let mut reader = Reader::new(event.value, "system event");
        let mut payload = Self {
            manifest_uid: ManifestUid(reader.u64()?),
            scope_id: ScopeId(reader.u32()?),
            collection_id: None,
            max_ttl: None,
        };
        if of_collection {
            payload.collection_id = Some(CollectionId(reader.u32()?));
        }
        if event.version == 1 {
            payload.max_ttl = Some(reader.u32()?);
        }
        reader.finish()?;
        Ok(Some(payload))
    }

    /// The payload as the JSON text of the row's `value`; ids are hexadecimal, as in a manifest.
    pub(crate) fn to_json(self, id: SystemEventId) -> String {
        let mut text = json!({
            "event": id.to_string(),
            "manifest_uid": self.manifest_uid.to_string(),
            "scope_id": self.scope_id.to_string(),
        });
        if let Some(collection_id) = self.collection_id {
            text["collection_id"] = json!(collection_id.to_string());
        }
        if let Some(max_ttl) = self.max_ttl {
            text["max_ttl"] = json!(max_ttl);
        }
        text.to_string()
    }
}
