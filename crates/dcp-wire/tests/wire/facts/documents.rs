//! What was written over the key-value protocol arrives on the stream: `expected.kv_ops`.

use std::collections::BTreeSet;

use dcp_test::facts::Change;
use dcp_wire::message::{OpenFlags, Request, Response, SystemEventId};
use dcp_wire::{Seqno, Vbuuid};
use serde_json::Value;

use super::{Facts, Packet, Recording, hex_u64};

pub(super) fn check(recording: &Recording<'_>, facts: &mut Facts) {
    let operations = recording.expected("kv_ops").and_then(Value::as_array);
    let operations = operations.map_or(&[][..], Vec::as_slice);
    let written: Vec<_> =
        operations.iter().filter(|operation| operation.get("seqno").is_some()).collect();
    let changes = changes(recording);
    for change in &changes {
        let same_seqno = |operation: &&&Value| {
            let vbid = operation.get("vb").and_then(Value::as_u64);
            operation["seqno"] == change.seqno.0
                && vbid.is_none_or(|vbid| vbid == u64::from(change.vbid.0))
        };
        let candidates: Vec<_> = written.iter().filter(same_seqno).copied().collect();
        if candidates.is_empty() {
            continue;
        }
        // After a rollback a seqno may have been used twice: one of them is the right one.
        let wrong: Vec<_> =
            candidates.iter().map(|operation| change.differences(operation)).collect();
        let agrees = wrong.iter().any(Vec::is_empty);
        facts.check("written document", agrees, || format!("seqno {}: {wrong:?}", change.seqno));
    }
    let vbuuids = recording.vbuuids();
    let streamed = |operation: &&&Value| {
        recording.stream_requests().any(|(request, answer)| {
            operation["vb"] == request.vbid.0
                && matches!(answer.and_then(Packet::response), Some(Response::FailoverLog(_)))
        })
    };
    let branches: BTreeSet<_> = written
        .iter()
        .filter(streamed)
        .filter_map(|operation| hex_u64(operation.get("vbuuid")?))
        .collect();
    for branch in branches {
        facts.check("branch of a write", vbuuids.contains(&Vbuuid(branch)), || {
            format!("{branch:x} is in no failover log")
        });
    }
    compressed(recording, &changes, facts);
    system_events(recording, facts);
    system_event_payloads(recording, facts);
}

fn changes<'a>(recording: &Recording<'a>) -> Vec<Change<'a>> {
    let mut no_value = BTreeSet::new();
    let mut changes = Vec::new();
    for packet in &recording.packets {
        let Some(request) = packet.request() else { continue };
        let header = packet.frame.header;
        let change = Change {
            vbid: header.vbid(),
            seqno: Seqno::ZERO,
            cas: header.cas,
            deleted: false,
            flags: None,
            expiry: None,
            datatype: header.datatype,
            key: packet.frame.key,
            value: packet.frame.value,
            no_value: no_value.contains(&packet.conn),
        };
        match request {
            Request::Open(open, _) => {
                let without = OpenFlags::NO_VALUE | OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE;
                if open.flags.intersects(without) {
                    no_value.insert(packet.conn);
                }
            }
            Request::Mutation(message) if !packet.from_client => changes.push(Change {
                seqno: message.seqno,
                flags: Some(message.flags),
                expiry: Some(message.expiry),
                ..change
            }),
            Request::Prepare(message) => changes.push(Change {
                seqno: message.seqno,
                deleted: message.deleted,
                flags: Some(message.flags),
                expiry: Some(message.expiry),
                ..change
            }),
            Request::Deletion(message) => {
                changes.push(Change { seqno: message.seqno, deleted: true, ..change });
            }
            _ => {}
        }
    }
    changes
}

/// Values that arrive compressed inflate to the lengths that were written.
fn compressed(recording: &Recording<'_>, changes: &[Change<'_>], facts: &mut Facts) {
    let Some(lens) = recording.expected("plain_len") else { return };
    for change in changes.iter().filter(|change| !change.deleted) {
        let key = change.key.strip_prefix(b"\0").unwrap_or(change.key);
        let Some(kind) = key.split(|&byte| byte == b'-').next() else { continue };
        let Some(len) = lens.get(String::from_utf8_lossy(kind).as_ref()) else { continue };
        let body = change.body();
        facts.check("length of a value", *len == body.len(), || format!("{len} {}", body.len()));
    }
}

/// Collections and scopes have the names and ids of the manifests that were set.
fn system_events(recording: &Recording<'_>, facts: &mut Facts) {
    let manifests = recording.expected("manifests").and_then(Value::as_array);
    let manifests = manifests.map_or(&[][..], Vec::as_slice);
    let single = recording.expected("manifest");
    let known: Vec<_> = manifests.iter().chain(single).collect();
    // With the first manifests missing, names and ids of older collections are not known.
    let oldest = known.iter().filter_map(|manifest| hex_u64(&manifest["uid"])).min();
    if oldest.is_none_or(|oldest| oldest > 2) {
        return;
    }
    for packet in &recording.packets {
        let Some(Request::SystemEvent(event)) = packet.request() else { continue };
        let payload = event.payload().unwrap().unwrap();
        let name = String::from_utf8_lossy(payload.name);
        let (scope_id, id) = (payload.scope_id.to_string(), payload.collection_id);
        let found = known.iter().filter_map(|manifest| manifest["scopes"].as_array()).flatten();
        let mut found = found.filter(|scope| scope["uid"] == *scope_id);
        let agrees = match event.id {
            SystemEventId::CREATE_SCOPE => found.any(|scope| scope["name"] == *name),
            SystemEventId::BEGIN_COLLECTION | SystemEventId::MODIFY_COLLECTION => found
                .filter_map(|scope| scope["collections"].as_array())
                .flatten()
                .any(|collection| {
                    collection["name"] == *name
                        && collection["uid"] == id.unwrap().to_string()
                        && collection["maxTTL"].as_u64() == payload.max_ttl.map(u64::from)
                }),
            SystemEventId::END_COLLECTION => found
                .filter_map(|scope| scope["collections"].as_array())
                .flatten()
                .any(|collection| collection["uid"] == id.unwrap().to_string()),
            _ => found.next().is_some(),
        };
        facts.check("collection or scope", agrees, || format!("{event:?}"));
    }
}

/// What a payload says, written again, is the payload, byte for byte.
fn system_event_payloads(recording: &Recording<'_>, facts: &mut Facts) {
    for packet in &recording.packets {
        let Some(Request::SystemEvent(event)) = packet.request() else { continue };
        let payload = event.payload().unwrap().unwrap();
        let (again, version) = match event.version {
            2 => (payload.to_flatbuffers(event.id), 2),
            _ => payload.to_plain(),
        };
        let same = again == event.value && version == event.version;
        let kind = if version == 2 { "FlatBuffers event" } else { "plain event" };
        facts.check(kind, same, || format!("{event:?}: {again:?}"));
    }
}
