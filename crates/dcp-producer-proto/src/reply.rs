//! Responses: writes the server's and handles the client's.

use bytes::{BufMut, BytesMut};
use dcp_wire::{Datatype, EncodeError, Frame, Opcode, Status};
use serde_json::json;

use super::refusal::Refusal;
use super::settings::{Features, Settings};
use super::{Disconnect, noop::Noop};

/// Appends a success without a body to `out`.
pub(super) fn succeed(request: &Frame<'_>, out: &mut impl BufMut) -> Result<(), Disconnect> {
    succeed_with(request, &[], out)
}

/// Appends a success with a value to `out`.
pub(super) fn succeed_with(
    request: &Frame<'_>,
    value: &[u8],
    out: &mut impl BufMut,
) -> Result<(), Disconnect> {
    respond(request, Status::SUCCESS, Datatype::RAW, value, out)
}

/// Appends the answer to a refused request to `out`.
///
/// A client without XERROR does not know some statuses; its connection is closed instead.
pub(super) fn refuse(
    request: &Frame<'_>,
    refusal: &Refusal,
    cluster_map: Option<&[u8]>,
    features: Features,
    out: &mut BytesMut,
) -> Result<(), Disconnect> {
    let status = refusal.status();
    if needs_xerror(status) && !features.xerror {
        return Err(Disconnect::StatusNeedsXerror(status));
    }
    let json = if features.json { Datatype::JSON } else { Datatype::RAW };
    match refusal {
        Refusal::Status(_) => respond(request, status, Datatype::RAW, &[], out),
        // Exactly the seqno, which is all that clients read here.
        Refusal::Rollback(seqno) => {
            respond(request, status, Datatype::RAW, &seqno.0.to_be_bytes(), out)
        }
        Refusal::NotMyVbucket => {
            let map = cluster_map.unwrap_or_default();
            let datatype = if map.is_empty() { Datatype::RAW } else { json };
            respond(request, status, datatype, map, out)
        }
        Refusal::Malformed(error) => {
            respond(request, status, json, &context(&error.to_string()), out)
        }
        Refusal::Invalid(what) => {
            respond(request, status, json, &context(&format!("invalid request: {what}")), out)
        }
        Refusal::UnknownFlags(bits) => {
            let what = format!("invalid request: unknown flags {bits:#x}");
            respond(request, status, json, &context(&what), out)
        }
        Refusal::Unknown(_, manifest_uid) => {
            let what = if status == Status::UNKNOWN_SCOPE { "scope" } else { "collection" };
            let body = json!({
                "error": {"context": format!("unknown {what}")},
                "manifest_uid": manifest_uid.to_string(),
            });
            respond(request, status, json, body.to_string().as_bytes(), out)
        }
    }
}

fn context(what: &str) -> Vec<u8> {
    json!({"error": {"context": what}}).to_string().into_bytes()
}

/// Statuses that clients without XERROR do not know.
const fn needs_xerror(status: Status) -> bool {
    matches!(
        status,
        Status::DCP_STREAMID_INVALID
            | Status::NO_BUCKET
            | Status::EACCESS
            | Status::AUTH_STALE
            | Status::CANCELLED
    )
}

/// Appends the refusal of a malformed request as servers before collections do, without an
/// explanation.
pub(super) fn refuse_and_close(
    request: &Frame<'_>,
    out: &mut impl BufMut,
) -> Result<(), Disconnect> {
    respond(request, Status::EINVAL, Datatype::RAW, &[], out)
}

fn respond(
    request: &Frame<'_>,
    status: Status,
    datatype: Datatype,
    value: &[u8],
    out: &mut impl BufMut,
) -> Result<(), Disconnect> {
    Frame::response(request.header.opcode, status)
        .with_opaque(request.header.opaque)
        .with_datatype(datatype)
        .with_value(value)
        .encode(out)
        .map_err(|EncodeError { len, .. }| Disconnect::ResponseTooLong(len))
}

/// Handles the client's response to a packet that the producer sent (DCP page "protocol-flow").
///
/// Only noops need one. Others are tolerated if they have a status that a client may send for a
/// message that crossed the end of its stream.
pub(super) fn handle_response(
    response: &Frame<'_>,
    settings: &Settings,
    noop: &mut Noop,
) -> Result<(), Disconnect> {
    let (opcode, status) = (response.header.opcode, response.header.status());
    let crossed = match status {
        Status::NOT_MY_VBUCKET | Status::DCP_STREAM_NOT_FOUND | Status::OPAQUE_NO_MATCH => true,
        Status::KEY_EEXISTS => !settings.v7_status_codes,
        Status::KEY_ENOENT => {
            !settings.v7_status_codes && !matches!(opcode, Opcode::DCP_COMMIT | Opcode::DCP_ABORT)
        }
        _ => false,
    };
    let expected = match opcode {
        Opcode::DCP_NOOP => noop.answered(response.header.opaque) || crossed,
        // An acknowledgement, regardless of its status.
        Opcode::DCP_SNAPSHOT_MARKER | Opcode::DCP_SET_VBUCKET_STATE => true,
        Opcode::DCP_STREAM_END => matches!(status, Status::SUCCESS | Status::KEY_ENOENT) || crossed,
        Opcode::DCP_OPEN
        | Opcode::DCP_ADD_STREAM
        | Opcode::DCP_CLOSE_STREAM
        | Opcode::DCP_STREAM_REQ
        | Opcode::DCP_GET_FAILOVER_LOG
        | Opcode::DCP_MUTATION
        | Opcode::DCP_DELETION
        | Opcode::DCP_EXPIRATION
        | Opcode::DCP_FLUSH
        | Opcode::DCP_BUFFER_ACK
        | Opcode::DCP_CONTROL
        | Opcode::DCP_SYSTEM_EVENT
        | Opcode::DCP_PREPARE
        | Opcode::DCP_COMMIT
        | Opcode::DCP_ABORT
        | Opcode::DCP_CACHE_TRANSFER
        | Opcode::DCP_CACHE_TRANSFER_END
        | Opcode::GET_ERROR_MAP => status.is_success() || crossed,
        _ => false,
    };
    if expected {
        return Ok(());
    }
    Err(Disconnect::UnexpectedResponse { opcode, status })
}
