//! Fields of requests and stream messages.

use super::document::{key, value};
use super::{FieldValue, Fields, Keys, NOT_SHOWN};
use crate::message::{
    ClusterMapChange, ConfigVersion, Features, OsoSnapshot, PathSpec, Prepare, PushedVersion,
    Request, Sasl, SnapshotFlags, SnapshotMarker, StreamRequest, SystemEvent, WithMeta,
};
use crate::sasl::{Mechanism, PlainMessage};
use crate::{Datatype, DecodeError, Frame, Reader, RevSeqno, Seqno};

pub(super) fn describe<'a>(
    frame: &Frame<'a>,
    request: &Request<'a>,
    keys: Keys,
    fields: &mut Fields<'a>,
) {
    let datatype = frame.header.datatype;
    match request {
        Request::Abort(abort) => {
            fields.u64("prepared_seqno", abort.prepared_seqno.0);
            fields.u64("abort_seqno", abort.abort_seqno.0);
            key(abort.key, keys, fields);
        }
        Request::AddStream(add) => fields.flags(&add.flags),
        Request::BufferAck(ack) => fields.u64("bytes", ack.bytes),
        Request::CloseStream(_) | Request::Plain => {}
        Request::Commit(commit) => {
            fields.u64("prepared_seqno", commit.prepared_seqno.0);
            fields.u64("commit_seqno", commit.commit_seqno.0);
            key(commit.key, keys, fields);
        }
        Request::Control(control) => {
            fields.readable("key", control.key);
            fields.readable("value", control.value);
        }
        Request::Counter(counter) => {
            fields.u64("delta", counter.delta);
            fields.u64("initial", counter.initial);
            fields.u64("expiry", counter.expiry);
            key(counter.key, keys, fields);
        }
        Request::Deletion(deletion) => {
            change(deletion.seqno, deletion.rev_seqno, fields);
            if let Some(time) = deletion.delete_time {
                fields.u64("delete_time", time);
            }
            key(deletion.key, keys, fields);
            value(datatype, deletion.value, fields);
        }
        Request::Expiration(expiration) => {
            change(expiration.seqno, expiration.rev_seqno, fields);
            fields.u64("delete_time", expiration.delete_time);
            key(expiration.key, keys, fields);
            value(datatype, expiration.value, fields);
        }
        Request::Mutation(mutation) => {
            change(mutation.seqno, mutation.rev_seqno, fields);
            fields.hex("flags", mutation.flags);
            fields.u64("expiry", mutation.expiry);
            fields.u64("lock_time", mutation.lock_time);
            fields.u64("nru", mutation.nru);
            key(mutation.key, keys, fields);
            value(datatype, mutation.value, fields);
        }
        Request::Prepare(message) => prepare(message, keys, fields),
        Request::GetAllVbSeqnos(request) => {
            if let Some(state) = request.state {
                let state = state.map_or("alive".to_owned(), |state| state.to_string());
                fields.text("state", state);
            }
            if let Some(id) = request.collection_id {
                fields.hex("collection_id", id.0);
            }
        }
        Request::GetClusterConfig(request) => {
            if let Some(known) = request.known {
                config_version(known, fields);
            }
        }
        Request::GetErrorMap(request) => fields.u64("version", request.version),
        Request::GetMeta(request) => {
            if let Some(version) = request.version {
                fields.u64("version", version);
            }
            key(request.key, keys, fields);
        }
        Request::Hello(hello) => {
            fields.readable("agent", hello.agent);
            features(hello.features, fields);
        }
        Request::KeyRequest(request) => key(request.key, keys, fields),
        Request::ObserveSeqno(request) => fields.hex("vbuuid", request.vbuuid.0),
        Request::Open(open, _) => {
            fields.flags(&open.flags);
            fields.readable("name", open.name);
            if !open.value.is_empty() {
                fields.readable("value", open.value);
            }
        }
        Request::OsoSnapshot(snapshot) => fields.text(
            "marker",
            match snapshot {
                OsoSnapshot::Start => "start",
                OsoSnapshot::End => "end",
            },
        ),
        Request::ResolveName(name) => fields.readable("path", name.path),
        Request::Sasl(message) => sasl(message, fields),
        Request::SelectBucket(request) => fields.readable("bucket", request.bucket),
        Request::SeqnoAck(ack) => fields.u64("prepared_seqno", ack.prepared_seqno.0),
        Request::SeqnoAdvanced(advanced) => fields.u64("seqno", advanced.seqno.0),
        Request::SeqnoPersistence(request) => fields.u64("seqno", request.seqno.0),
        Request::SetClusterConfig(request) => {
            if let Some(version) = request.version {
                config_version(version, fields);
            }
            fields.readable("bucket", request.bucket);
            fields.readable("config", request.config);
        }
        Request::SetVbucketState(message) => fields.text("state", message.state.to_string()),
        Request::SnapshotMarker(marker) => snapshot_marker(frame, marker, fields),
        Request::Stat(group) => fields.readable("group", group),
        Request::Store(store) => {
            fields.hex("flags", store.flags);
            fields.u64("expiry", store.expiry);
            key(store.key, keys, fields);
            value(datatype, store.value, fields);
        }
        Request::StreamEnd(end) => fields.text("reason", end.reason.to_string()),
        Request::StreamRequest(request, _) => stream_request(request, fields),
        Request::SubdocLookup(lookup) => {
            key(lookup.key, keys, fields);
            paths(lookup.lookups(), fields);
        }
        Request::SubdocMutation(mutation) => {
            if let Some(expiry) = mutation.expiry {
                fields.u64("expiry", expiry);
            }
            if let Some(flags) = mutation.user_flags {
                fields.u64("flags", flags);
            }
            key(mutation.key, keys, fields);
            paths(mutation.mutations(), fields);
        }
        Request::SystemEvent(event) => system_event(event, fields),
        Request::Touch(touch) => {
            fields.u64("expiry", touch.expiry);
            key(touch.key, keys, fields);
        }
        Request::WithMeta(request) => with_meta(request, datatype, keys, fields),
    }
}

pub(super) fn cluster_map_change<'a>(change: &ClusterMapChange<'a>, fields: &mut Fields<'a>) {
    match change.version {
        PushedVersion::Rev(rev) => fields.u64("rev", rev),
        PushedVersion::EpochAndRev(version) => config_version(version, fields),
    }
    fields.readable("bucket", change.bucket);
    fields.readable("config", change.config);
}

/// Whether `frame` is a snapshot marker in a layout that servers no longer use: version 2.1 with
/// its timestamp, or version 2.2 as it was before its release.
pub(super) fn abandoned_snapshot_marker<'a>(frame: &Frame<'a>, fields: &mut Fields<'a>) -> bool {
    let (version, last, problem) = match *frame.extras {
        [1] => ("2.1", "timestamp", "servers since 8.0 do not know version 2.1"),
        [2] => ("2.2", "purge_seqno", "version 2.2 as it was before its release"),
        _ => return false,
    };
    let fields_of = |frame: &Frame<'a>| -> Result<(SnapshotMarker, u64), DecodeError> {
        let mut reader = Reader::new(frame.value, "snapshot marker");
        let marker = SnapshotMarker {
            start_seqno: Seqno(reader.u64()?),
            end_seqno: Seqno(reader.u64()?),
            flags: SnapshotFlags::from_bits_retain(reader.u32()?),
            max_visible_seqno: Some(Seqno(reader.u64()?)),
            high_completed_seqno: Some(Seqno(reader.u64()?)),
            ..SnapshotMarker::default()
        };
        let last = reader.u64()?;
        reader.finish()?;
        Ok((marker, last))
    };
    let Ok((marker, last_value)) = fields_of(frame) else {
        return false;
    };
    fields.text("version", version);
    marker_fields(&marker, fields);
    fields.u64(last, last_value);
    fields.text("problem", problem);
    true
}

fn snapshot_marker<'a>(frame: &Frame<'a>, marker: &SnapshotMarker, fields: &mut Fields<'a>) {
    fields.text(
        "version",
        match *frame.extras {
            [0] => "2.0",
            [_] => "2.2",
            _ => "1",
        },
    );
    marker_fields(marker, fields);
}

fn marker_fields(marker: &SnapshotMarker, fields: &mut Fields<'_>) {
    fields.u64("start_seqno", marker.start_seqno.0);
    fields.u64("end_seqno", marker.end_seqno.0);
    fields.flags(&marker.flags);
    for (name, seqno) in [
        ("max_visible_seqno", marker.max_visible_seqno),
        ("high_completed_seqno", marker.high_completed_seqno),
        ("purge_seqno", marker.purge_seqno),
        ("high_prepared_seqno", marker.high_prepared_seqno),
    ] {
        if let Some(seqno) = seqno {
            fields.u64(name, seqno.0);
        }
    }
}

fn stream_request<'a>(request: &StreamRequest<'a>, fields: &mut Fields<'a>) {
    fields.flags(&request.flags);
    fields.u64("start_seqno", request.start_seqno.0);
    // All ones is a number nobody recognises in decimal.
    match request.end_seqno {
        Seqno::MAX => fields.hex("end_seqno", Seqno::MAX.0),
        end => fields.u64("end_seqno", end.0),
    }
    fields.hex("vbuuid", request.vbuuid.0);
    fields.u64("snapshot_start", request.snapshot_start.0);
    fields.u64("snapshot_end", request.snapshot_end.0);
    if !request.value.is_empty() {
        fields.readable("value", request.value);
    }
}

fn system_event<'a>(event: &SystemEvent<'a>, fields: &mut Fields<'a>) {
    fields.u64("seqno", event.seqno.0);
    fields.text("event", event.id.to_string());
    fields.u64("version", event.version);
    match event.payload() {
        Ok(Some(payload)) => {
            fields.hex("manifest_uid", payload.manifest_uid.0);
            fields.hex("scope_id", payload.scope_id.0);
            if let Some(id) = payload.collection_id {
                fields.hex("collection_id", id.0);
            }
            if !payload.name.is_empty() {
                fields.readable("name", payload.name);
            }
            if let Some(ttl) = payload.max_ttl {
                fields.u64("max_ttl", ttl);
            }
            if event.version == 2 && payload.collection_id.is_some() {
                fields.bool("history", payload.history);
                fields.hex("flush_uid", payload.flush_uid.0);
            }
        }
        other => {
            if let Err(error) = other {
                fields.text("problem", error.to_string());
            }
            fields.readable("key", event.key);
            fields.bytes("value", event.value);
        }
    }
}

fn prepare<'a>(prepare: &Prepare<'a>, keys: Keys, fields: &mut Fields<'a>) {
    change(prepare.seqno, prepare.rev_seqno, fields);
    fields.hex("flags", prepare.flags);
    fields.u64("expiry", prepare.expiry);
    fields.u64("lock_time", prepare.lock_time);
    fields.u64("nru", prepare.nru);
    fields.bool("deleted", prepare.deleted);
    fields.text("level", prepare.level.to_string());
    key(prepare.key, keys, fields);
    value(prepare.datatype, prepare.value, fields);
}

fn with_meta<'a>(request: &WithMeta<'a>, datatype: Datatype, keys: Keys, fields: &mut Fields<'a>) {
    fields.hex("item_flags", request.flags);
    fields.u64("expiry", request.expiry);
    fields.u64("rev_seqno", request.rev_seqno.0);
    fields.hex("new_cas", request.cas.0);
    if let Some(options) = request.options {
        fields.flags(&options);
    }
    key(request.key, keys, fields);
    let extended = usize::from(request.extended_len.unwrap_or_default());
    let body = request.value.len().saturating_sub(extended);
    value(datatype, request.value.get(..body).unwrap_or_default(), fields);
    if extended > 0 {
        fields.bytes("extended_metadata", request.value.get(body..).unwrap_or_default());
    }
}

/// The message of an authentication; one that may hold a password or a token is not shown.
fn sasl<'a>(sasl: &Sasl<'a>, fields: &mut Fields<'a>) {
    fields.readable("mechanism", sasl.mechanism);
    match Mechanism::from_name(sasl.mechanism) {
        Some(Mechanism::Plain) => match PlainMessage::decode(sasl.message) {
            Ok(plain) => {
                fields.text("username", plain.username);
                fields.text("password", NOT_SHOWN);
            }
            Err(error) => fields.text("problem", error.to_string()),
        },
        Some(Mechanism::OAuthBearer) | None => fields.text("message", NOT_SHOWN),
        Some(_) => fields.readable("message", sasl.message),
    }
}

pub(super) fn features<'a>(features: Features<'a>, fields: &mut Fields<'a>) {
    let names = features.iter().map(|feature| FieldValue::Text(feature.to_string().into()));
    fields.push("features", FieldValue::List(names.collect()));
}

fn change(seqno: Seqno, rev_seqno: RevSeqno, fields: &mut Fields<'_>) {
    fields.u64("seqno", seqno.0);
    fields.u64("rev_seqno", rev_seqno.0);
}

fn config_version(version: ConfigVersion, fields: &mut Fields<'_>) {
    fields.push("epoch", FieldValue::I64(version.epoch));
    fields.push("rev", FieldValue::I64(version.rev));
}

fn paths<'a>(
    specs: impl Iterator<Item = Result<PathSpec<'a>, DecodeError>>,
    fields: &mut Fields<'a>,
) {
    let list = specs.flatten().map(|spec| {
        let mut record = Fields::default();
        record.text("opcode", spec.opcode.to_string());
        record.hex("flags", spec.flags);
        record.readable("path", spec.path);
        if !spec.value.is_empty() {
            record.readable("value", spec.value);
        }
        FieldValue::Record(record.0)
    });
    fields.push("paths", FieldValue::List(list.collect()));
}
