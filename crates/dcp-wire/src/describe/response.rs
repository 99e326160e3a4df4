//! Fields of responses.

use super::document::{json, key, value};
use super::request::features;
use super::{FieldValue, Fields, Keys};
use crate::message::{MutationToken, PathResult, Response};
use crate::{DecodeError, Frame, Opcode};

pub(super) fn describe<'a>(
    frame: &Frame<'a>,
    response: &Response<'a>,
    keys: Keys,
    fields: &mut Fields<'a>,
) {
    let datatype = frame.header.datatype;
    match response {
        Response::Empty => {}
        Response::ClusterConfig(config) => json("config", datatype, config, fields),
        Response::CollectionsManifest(manifest) => json("manifest", datatype, manifest, fields),
        Response::ErrorMap(map) => json("error_map", datatype, map, fields),
        Response::SaslMechanisms(names) => fields.readable("mechanisms", names),
        Response::SaslMessage(message) => {
            if !message.is_empty() {
                fields.readable("message", message);
            }
        }
        Response::Version(version) => fields.readable("version", version),
        Response::Error(body) => {
            if !body.is_empty() {
                json("error", datatype, body, fields);
            }
        }
        Response::Counter(written, count) => {
            token(*written, fields);
            fields.u64("count", *count);
        }
        Response::Document(flags, document_key, document) => {
            fields.hex("flags", *flags);
            if !document_key.is_empty() {
                key(document_key, keys, fields);
            }
            value(datatype, document, fields);
        }
        Response::FailoverLog(entries) => {
            let list = entries.map(|entry| {
                let mut record = Fields::default();
                record.hex("vbuuid", entry.vbuuid.0);
                record.u64("seqno", entry.seqno.0);
                FieldValue::Record(record.0)
            });
            fields.push("failover_log", FieldValue::List(list.collect()));
        }
        Response::Hello(granted) => features(*granted, fields),
        Response::LookupResults(lookup) => results(lookup.iter(), fields),
        Response::MutationResults(mutation) => {
            token(mutation.token, fields);
            results(mutation.iter(), fields);
        }
        Response::Metadata(metadata) => {
            fields.bool("deleted", metadata.deleted);
            fields.hex("flags", metadata.flags);
            fields.u64("expiry", metadata.expiry);
            fields.u64("rev_seqno", metadata.rev_seqno.0);
            if let Some(datatype) = metadata.datatype {
                fields.text("document_datatype", datatype.to_string());
            }
        }
        Response::ObservedSeqno(observed) => {
            fields.u64("vbucket", observed.vbid.0);
            fields.hex("vbuuid", observed.vbuuid.0);
            fields.u64("persisted_seqno", observed.persisted_seqno.0);
            fields.u64("current_seqno", observed.current_seqno.0);
            if let Some((vbuuid, seqno)) = observed.failover {
                fields.hex("old_vbuuid", vbuuid.0);
                fields.u64("last_valid_seqno", seqno.0);
            }
        }
        Response::ResolvedName(name) => {
            fields.hex("manifest_uid", name.manifest_uid.0);
            if frame.header.opcode == Opcode::GET_SCOPE_ID {
                fields.hex("scope_id", name.scope_id().0);
            } else {
                fields.hex("collection_id", name.collection_id().0);
            }
        }
        Response::Rollback(seqno) => fields.u64("rollback_seqno", seqno.0),
        Response::Stat(name, text) => {
            fields.readable("key", name);
            fields.readable("value", text);
        }
        Response::StreamAdded(opaque) => fields.hex("stream_opaque", opaque.0),
        Response::VbSeqnos(seqnos) => {
            let list = seqnos.map(|(vbid, seqno)| {
                let mut record = Fields::default();
                record.u64("vbucket", vbid.0);
                record.u64("seqno", seqno.0);
                FieldValue::Record(record.0)
            });
            fields.push("seqnos", FieldValue::List(list.collect()));
        }
        Response::Written(written) => token(Some(*written), fields),
    }
}

fn token(token: Option<MutationToken>, fields: &mut Fields<'_>) {
    if let Some(token) = token {
        fields.hex("vbuuid", token.vbuuid.0);
        fields.u64("seqno", token.seqno.0);
    }
}

fn results<'a>(
    results: impl Iterator<Item = Result<PathResult<'a>, DecodeError>>,
    fields: &mut Fields<'a>,
) {
    let list = results.flatten().map(|result| {
        let mut record = Fields::default();
        record.u64("index", result.index);
        record.text("status", result.status.to_string());
        record.readable("value", result.value);
        FieldValue::Record(record.0)
    });
    fields.push("results", FieldValue::List(list.collect()));
}
