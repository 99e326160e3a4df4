//! System events as rows.

use dcp_proto::SystemEventRecord;
use dcp_wire::message::{SystemEvent, SystemEventId, SystemEventPayload};
use dcp_wire::{DecodeError, ManifestUid};
use serde_json::json;

/// What an event says; `None` if its kind or form is not one this version knows.
pub(crate) fn payload<'a>(
    event: &SystemEventRecord<'a>,
) -> Result<Option<SystemEventPayload<'a>>, DecodeError> {
    let SystemEventRecord { seqno, id, version, key, value, .. } = *event;
    SystemEvent { seqno, id, version, key, value }.payload()
}

/// The payload as the JSON text of the row's `value`; ids are hexadecimal, as in a manifest.
pub(crate) fn to_json(id: SystemEventId, payload: Option<&SystemEventPayload<'_>>) -> String {
    let mut text = json!({"event": id.to_string()});
    let Some(payload) = payload else {
        return text.to_string();
    };
    text["manifest_uid"] = json!(payload.manifest_uid.to_string());
    text["scope_id"] = json!(payload.scope_id.to_string());
    if let Some(collection_id) = payload.collection_id {
        text["collection_id"] = json!(collection_id.to_string());
    }
    if let Some(max_ttl) = payload.max_ttl {
        text["max_ttl"] = json!(max_ttl);
    }
    if payload.history {
        text["history"] = json!(true);
    }
    if payload.flush_uid != ManifestUid(0) {
        text["flush_uid"] = json!(payload.flush_uid.to_string());
    }
    text.to_string()
}
