//! GET_ERROR_MAP: descriptions of all statuses, for clients that do not know them.

use std::sync::LazyLock;

use dcp_wire::Status;
use serde_json::{Map, Value, json};

use super::command::Command;
use super::failure::Failure;

/// Newest version of the map's form.
const VERSION: u16 = 2;
/// Grows with each change to the map's contents.
const REVISION: u16 = 1;
/// What servers of this release do not list: they have no manifest that clients could be ahead of,
/// and the times that overflow are of a later release.
const ABSENT: [Status; 3] =
    [Status::COLLECTIONS_MANIFEST_IS_AHEAD, Status::EXPIRY_OVERFLOW, Status::LOCK_EXPIRY_OVERFLOW];

impl Command<'_, '_> {
    pub(super) fn error_map(&mut self) -> Result<(), Failure> {
        static MAPS: LazyLock<[String; 2]> =
            LazyLock::new(|| [1, VERSION].map(|version| error_map(version).to_string()));
        if !self.frame.extras.is_empty() || !self.frame.key.is_empty() {
            return Err(Failure::Invalid("the request must not have extras or a key"));
        }
        let version = <[u8; 2]>::try_from(self.frame.value)
            .map_err(|_| Failure::Invalid("the version is two bytes"))?;
        // The newest version that the client knows as well.
        let [first, newest] = &*MAPS;
        let map = match u16::from_be_bytes(version) {
            0 => return Err(Status::KEY_ENOENT.into()),
            1 => first,
            _ => newest,
        };
        let json = self.json();
        self.succeed(self.success().with_datatype(json).with_value(map.as_bytes()))
    }
}

fn error_map(version: u16) -> Value {
    let mut errors = Map::new();
    let sent = Status::KNOWN.iter().filter(|status| !ABSENT.contains(status));
    for &status in sent {
        let (description, attributes) = describe(status);
        let name = name(status);
        let entry = json!({"name": name, "desc": description, "attrs": attributes});
        errors.insert(format!("{:x}", status.0), entry);
    }
    json!({"version": version, "revision": REVISION, "errors": errors})
}

/// Name of a status in the servers' map.
fn name(status: Status) -> &'static str {
    match status {
        Status::DCP_STREAM_NOT_FOUND => "STREAM_NOT_FOUND",
        Status::DCP_STREAMID_INVALID => "DCP stream-ID invalid",
        Status::EWOULDTHROTTLE => "EWOULD_THROTTLE",
        Status::DURABILITY_INVALID_LEVEL => "DurabilityInvalidLevel",
        Status::DURABILITY_IMPOSSIBLE => "DurabilityImpossible",
        Status::SYNC_WRITE_IN_PROGRESS => "SyncWriteInProgress",
        Status::SYNC_WRITE_AMBIGUOUS => "SyncWriteAmbiguous",
        Status::SYNC_WRITE_RE_COMMIT_IN_PROGRESS => "SyncWriteReCommitInProgress",
        Status::RANGE_SCAN_CANCELLED => "RangeScanCancelled",
        Status::RANGE_SCAN_MORE => "RangeScanMore",
        Status::RANGE_SCAN_COMPLETE => "RangeScanComplete",
        Status::VB_UUID_NOT_EQUAL => "VbUuidNotEqual",
        Status::SUBDOC_DOC_E2DEEP => "SUBDOC_PATH_E2DEEP",
        _ => status.name().unwrap_or_default(),
    }
}

/// Meaning of a status, and attributes for clients that do not know it.
fn describe(status: Status) -> (&'static str, &'static [&'static str]) {
    match status {
        Status::SUCCESS => ("Done", &["success"]),
        Status::KEY_ENOENT => ("There is no such item", &["item-only"]),
        Status::KEY_EEXISTS => ("The item exists or has another CAS", &["item-only"]),
        Status::E2BIG => ("The value is too long", &["item-only", "invalid-input"]),
        Status::EINVAL => ("The request is malformed", &["internal", "invalid-input"]),
        Status::NOT_STORED => ("Nothing was stored", &["internal", "item-only"]),
        Status::DELTA_BADVAL => {
            ("The document does not hold a number", &["item-only", "invalid-input"])
        }
        Status::NOT_MY_VBUCKET => {
            ("Another node has the vBucket", &["fetch-config", "invalid-input"])
        }
        Status::NO_BUCKET => ("No bucket is selected", &["conn-state-invalidated"]),
        Status::LOCKED => ("The item is locked", &["item-locked", "item-only", "retry-now"]),
        Status::NOT_LOCKED => ("The item is not locked", &["item-only"]),
        Status::DCP_STREAM_NOT_FOUND => ("There is no such stream", &["conn-state-invalidated"]),
        Status::OPAQUE_NO_MATCH => ("The opaque is not the stream's", &["conn-state-invalidated"]),
        Status::ECONFIG_ONLY => {
            ("The bucket exists as configuration only", &["fetch-config", "retry-now"])
        }
        Status::CAS_VALUE_INVALID => ("The CAS is not a valid one", &["item-only"]),
        Status::AUTH_STALE => ("Authenticate again", &["conn-state-invalidated", "auth"]),
        Status::AUTH_ERROR => ("Wrong user name or password", &["conn-state-invalidated", "auth"]),
        Status::AUTH_CONTINUE => ("Authentication goes on", &["special-handling"]),
        Status::ERANGE => ("A number is out of range", &["invalid-input"]),
        Status::ROLLBACK => ("The client must roll back", &["dcp", "special-handling"]),
        Status::EACCESS => ("A privilege is missing", &["support"]),
        Status::NOT_INITIALIZED => ("The node is not ready", &["conn-state-invalidated"]),
        Status::ENCRYPTION_KEY_NOT_AVAILABLE => {
            ("A file's encryption key is missing", &["special-handling"])
        }
        Status::CHECKSUM_MISMATCH => ("A checksum does not match", &["special-handling"]),
        Status::EWOULDTHROTTLE
        | Status::RATE_LIMITED_NETWORK_INGRESS
        | Status::RATE_LIMITED_NETWORK_EGRESS
        | Status::RATE_LIMITED_MAX_COMMANDS => {
            ("Too much at a time", &["temp", "retry-later", "rate-limit"])
        }
        Status::RATE_LIMITED_MAX_CONNECTIONS => {
            ("Too many connections", &["conn-state-invalidated", "rate-limit"])
        }
        Status::SCOPE_SIZE_LIMIT_EXCEEDED => ("The scope is full", &["item-only", "rate-limit"]),
        Status::BUCKET_SIZE_LIMIT_EXCEEDED
        | Status::BUCKET_RESIDENT_RATIO_TOO_LOW
        | Status::BUCKET_DATA_SIZE_TOO_BIG
        | Status::BUCKET_DISK_SPACE_TOO_LOW => {
            ("The bucket takes no more data", &["item-only", "system-constraint", "no-retry"])
        }
        Status::RANGE_SCAN_CANCELLED | Status::RANGE_SCAN_MORE | Status::RANGE_SCAN_COMPLETE => {
            ("A range scan goes on or has ended", &["success"])
        }
        Status::BUCKET_PAUSED => ("The bucket is paused", &["support"]),
        Status::CANCELLED => ("Cancelled, nothing changed", &["item-only", "retry-now"]),
        Status::UNKNOWN_FRAME_INFO => ("A framing extra is not known", &["support"]),
        Status::UNKNOWN_COMMAND => ("The command is not known", &["support"]),
        Status::ENOMEM => ("The memory quota is used up", &["temp", "retry-later"]),
        Status::NOT_SUPPORTED => ("Not possible here", &["support"]),
        Status::EINTERNAL => ("Something went wrong", &["internal", "conn-state-invalidated"]),
        Status::EBUSY => ("Busy", &["temp", "retry-now"]),
        Status::ETMPFAIL => ("Not possible just now", &["temp", "retry-now"]),
        Status::NO_COLLECTIONS_MANIFEST => ("There is no manifest", &["retry-later"]),
        Status::DURABILITY_IMPOSSIBLE => {
            ("Too few replicas for the durability level", &["item-only", "invalid-input"])
        }
        Status::SYNC_WRITE_IN_PROGRESS | Status::SYNC_WRITE_RE_COMMIT_IN_PROGRESS => {
            ("A durable write is under way", &["item-only", "retry-later"])
        }
        Status::SYNC_WRITE_AMBIGUOUS => {
            ("Whether the durable write succeeded is not known", &["item-only"])
        }
        Status::SUBDOC_PATH_ENOENT => ("The path does not exist", &["subdoc", "item-only"]),
        Status::SUBDOC_PATH_MISMATCH => ("The path does not fit", &["subdoc", "item-only"]),
        Status::SUBDOC_PATH_EINVAL => ("The path is malformed", &["subdoc", "invalid-input"]),
        Status::SUBDOC_DOC_NOTJSON => ("The document is not JSON", &["subdoc", "item-only"]),
        Status::SUBDOC_PATH_EEXISTS => ("The path exists already", &["subdoc", "item-only"]),
        Status::SUBDOC_MULTI_PATH_FAILURE => {
            ("Some of the paths failed", &["subdoc", "special-handling"])
        }
        Status::SUBDOC_PATH_E2BIG => ("The path is too long", &["subdoc", "invalid-input"]),
        Status::SUBDOC_DOC_E2DEEP => ("The document is too deep", &["subdoc", "invalid-input"]),
        Status::SUBDOC_VALUE_CANTINSERT => {
            ("The value cannot be put there", &["subdoc", "invalid-input"])
        }
        Status::SUBDOC_NUM_ERANGE => ("The number is too large", &["subdoc", "item-only"]),
        Status::SUBDOC_DELTA_EINVAL => ("The delta is no number", &["subdoc", "item-only"]),
        Status::SUBDOC_VALUE_ETOODEEP => {
            ("The value would be too deep", &["subdoc", "invalid-input", "item-only"])
        }
        Status::SUBDOC_INVALID_COMBO => {
            ("The paths do not go together", &["subdoc", "invalid-input"])
        }
        Status::SUBDOC_SUCCESS_DELETED => {
            ("Done, on a tombstone", &["item-deleted", "success", "subdoc"])
        }
        Status::SUBDOC_MULTI_PATH_FAILURE_DELETED => {
            ("Some of a tombstone's paths failed", &["item-deleted", "subdoc", "special-handling"])
        }
        _ => (status.name().unwrap_or_default(), &["invalid-input"]),
    }
}
