//! DCP_OPEN: what a connection may be opened with (DCP page "open-connection").

use dcp_wire::message::{Open, OpenFlags};
use dcp_wire::{Datatype, Frame};
use serde_json::{Map, Value};

use super::ServerVersion;
use super::refusal::Refusal;

/// Which end of DCP the server is on a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// It sends changes.
    Producer,
    /// It receives changes, and takes part in durable writes if it has a name.
    Consumer(Option<String>),
}

/// Longest connection name in bytes.
const MAX_NAME_LEN: usize = 250;

/// Flags that servers know since 7.0.
const KNOWN_FLAGS: OpenFlags = OpenFlags::PRODUCER
    .union(OpenFlags::INCLUDE_XATTRS)
    .union(OpenFlags::NO_VALUE)
    .union(OpenFlags::INCLUDE_DELETE_TIMES)
    .union(OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE)
    .union(OpenFlags::INCLUDE_DELETED_USER_XATTRS);

/// Checks a DCP_OPEN on its own, in the server's order.
pub(super) fn check_open<'a>(
    frame: &Frame<'a>,
    version: ServerVersion,
) -> Result<(Open<'a>, Role), Refusal> {
    let open = Open::decode(frame)?;
    if open.name.len() > MAX_NAME_LEN {
        return Err(Refusal::invalid("connection name of more than 250 bytes"));
    }
    let flags = open.flags;
    let known = match version.skips_deletions() {
        true => KNOWN_FLAGS.union(OpenFlags::SKIP_DELETES_IN_INITIAL_BACKFILL),
        false => KNOWN_FLAGS,
    };
    let unknown = flags.difference(known);
    if !unknown.is_empty() {
        return Err(Refusal::UnknownFlags(unknown.bits()));
    }
    if flags.contains(OpenFlags::SKIP_DELETES_IN_INITIAL_BACKFILL)
        && !flags.contains(OpenFlags::PRODUCER)
    {
        return Err(Refusal::invalid("only a producer can skip deletes"));
    }
    if flags.contains(OpenFlags::NO_VALUE | OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE) {
        return Err(Refusal::invalid("no-value flags exclude each other"));
    }
    if flags.contains(OpenFlags::INCLUDE_DELETED_USER_XATTRS)
        && !flags.contains(OpenFlags::INCLUDE_XATTRS)
    {
        return Err(Refusal::invalid("deleted user xattrs need the xattrs flag"));
    }
    let name = consumer_name(&open)?;
    let is_producer = flags.contains(OpenFlags::PRODUCER);
    Ok((open, if is_producer { Role::Producer } else { Role::Consumer(name) }))
}

/// A value must be marked as JSON, and may only name the consumer of a consumer connection.
fn consumer_name(open: &Open<'_>) -> Result<Option<String>, Refusal> {
    if open.value.is_empty() {
        return match open.datatype {
            Datatype::RAW => Ok(None),
            _ => Err(Refusal::invalid("datatype without a value")),
        };
    }
    if open.datatype != Datatype::JSON {
        return Err(Refusal::invalid("value without the JSON datatype"));
    }
    if open.flags.contains(OpenFlags::PRODUCER) {
        return Err(Refusal::invalid("value for a producer connection"));
    }
    let object: Map<String, Value> = serde_json::from_slice(open.value)
        .map_err(|_| Refusal::invalid("value is not a JSON object"))?;
    if object.iter().all(|(name, value)| name == "consumer_name" && value.is_string()) {
        let name = object.get("consumer_name").and_then(Value::as_str);
        return Ok(name.map(str::to_owned));
    }
    Err(Refusal::invalid("value with a member other than consumer_name"))
}
