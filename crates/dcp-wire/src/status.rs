//! Response statuses.

use crate::wire_enum;

wire_enum! {
    /// Status of a response (server page "BinaryProtocol").
    Status(u16) {
        /// Success.
        SUCCESS = 0x00, "SUCCESS";
        /// No such key, stream, bucket or uuid.
        KEY_ENOENT = 0x01, "KEY_ENOENT";
        /// The key already exists, or the CAS differs.
        KEY_EEXISTS = 0x02, "KEY_EEXISTS";
        /// The value is too large.
        E2BIG = 0x03, "E2BIG";
        /// Malformed request.
        EINVAL = 0x04, "EINVAL";
        /// Not stored.
        NOT_STORED = 0x05, "NOT_STORED";
        /// The value is not a number.
        DELTA_BADVAL = 0x06, "DELTA_BADVAL";
        /// The vBucket is not on this node or not in the required state.
        NOT_MY_VBUCKET = 0x07, "NOT_MY_VBUCKET";
        /// No bucket is selected.
        NO_BUCKET = 0x08, "NO_BUCKET";
        /// The document is locked.
        LOCKED = 0x09, "LOCKED";
        /// No such stream (with v7 status codes).
        DCP_STREAM_NOT_FOUND = 0x0a, "DCP_STREAM_NOT_FOUND";
        /// The opaque differs from the stream's (with v7 status codes).
        OPAQUE_NO_MATCH = 0x0b, "OPAQUE_NO_MATCH";
        /// The request would be throttled.
        EWOULDTHROTTLE = 0x0c, "EWOULDTHROTTLE";
        /// The bucket exists only in the configuration.
        ECONFIG_ONLY = 0x0d, "ECONFIG_ONLY";
        /// The document is not locked.
        NOT_LOCKED = 0x0e, "NOT_LOCKED";
        /// The CAS is not valid.
        CAS_VALUE_INVALID = 0x0f, "CAS_VALUE_INVALID";
        /// The client must authenticate again.
        AUTH_STALE = 0x1f, "AUTH_STALE";
        /// Authentication failed.
        AUTH_ERROR = 0x20, "AUTH_ERROR";
        /// Authentication continues with another step.
        AUTH_CONTINUE = 0x21, "AUTH_CONTINUE";
        /// Seqnos are out of range.
        ERANGE = 0x22, "ERANGE";
        /// The client must roll back.
        ROLLBACK = 0x23, "ROLLBACK";
        /// The user lacks a privilege.
        EACCESS = 0x24, "EACCESS";
        /// The node is not initialized.
        NOT_INITIALIZED = 0x25, "NOT_INITIALIZED";
        /// The key that a file is encrypted with is not available.
        ENCRYPTION_KEY_NOT_AVAILABLE = 0x26, "ENCRYPTION_KEY_NOT_AVAILABLE";
        /// A checksum does not match.
        CHECKSUM_MISMATCH = 0x27, "CHECKSUM_MISMATCH";
        /// The expiry time is out of range.
        EXPIRY_OVERFLOW = 0x28, "EXPIRY_OVERFLOW";
        /// The time until which to lock is out of range.
        LOCK_EXPIRY_OVERFLOW = 0x29, "LOCK_EXPIRY_OVERFLOW";
        /// Rate limit: network in.
        RATE_LIMITED_NETWORK_INGRESS = 0x30, "RATE_LIMITED_NETWORK_INGRESS";
        /// Rate limit: network out.
        RATE_LIMITED_NETWORK_EGRESS = 0x31, "RATE_LIMITED_NETWORK_EGRESS";
        /// Rate limit: connections.
        RATE_LIMITED_MAX_CONNECTIONS = 0x32, "RATE_LIMITED_MAX_CONNECTIONS";
        /// Rate limit: commands.
        RATE_LIMITED_MAX_COMMANDS = 0x33, "RATE_LIMITED_MAX_COMMANDS";
        /// The scope exceeds its data limit.
        SCOPE_SIZE_LIMIT_EXCEEDED = 0x34, "SCOPE_SIZE_LIMIT_EXCEEDED";
        /// The bucket exceeds its size limit.
        BUCKET_SIZE_LIMIT_EXCEEDED = 0x35, "BUCKET_SIZE_LIMIT_EXCEEDED";
        /// Too little of the bucket is in memory to accept writes.
        BUCKET_RESIDENT_RATIO_TOO_LOW = 0x36, "BUCKET_RESIDENT_RATIO_TOO_LOW";
        /// The bucket's data on a node exceeds its limit.
        BUCKET_DATA_SIZE_TOO_BIG = 0x37, "BUCKET_DATA_SIZE_TOO_BIG";
        /// The disk is too full to accept writes.
        BUCKET_DISK_SPACE_TOO_LOW = 0x38, "BUCKET_DISK_SPACE_TOO_LOW";
        /// The bucket is paused.
        BUCKET_PAUSED = 0x50, "BUCKET_PAUSED";
        /// The request was cancelled.
        CANCELLED = 0x51, "CANCELLED";
        /// Unknown framing extra.
        UNKNOWN_FRAME_INFO = 0x80, "UNKNOWN_FRAME_INFO";
        /// Unknown opcode.
        UNKNOWN_COMMAND = 0x81, "UNKNOWN_COMMAND";
        /// Out of memory.
        ENOMEM = 0x82, "ENOMEM";
        /// Not supported in this context.
        NOT_SUPPORTED = 0x83, "NOT_SUPPORTED";
        /// Internal error.
        EINTERNAL = 0x84, "EINTERNAL";
        /// The server is busy.
        EBUSY = 0x85, "EBUSY";
        /// Temporary failure.
        ETMPFAIL = 0x86, "ETMPFAIL";
        /// Malformed xattrs.
        XATTR_EINVAL = 0x87, "XATTR_EINVAL";
        /// No such collection.
        UNKNOWN_COLLECTION = 0x88, "UNKNOWN_COLLECTION";
        /// No collections manifest is set.
        NO_COLLECTIONS_MANIFEST = 0x89, "NO_COLLECTIONS_MANIFEST";
        /// The collections manifest cannot be applied.
        CANNOT_APPLY_COLLECTIONS_MANIFEST = 0x8a, "CANNOT_APPLY_COLLECTIONS_MANIFEST";
        /// The client's collections manifest is newer.
        COLLECTIONS_MANIFEST_IS_AHEAD = 0x8b, "COLLECTIONS_MANIFEST_IS_AHEAD";
        /// No such scope.
        UNKNOWN_SCOPE = 0x8c, "UNKNOWN_SCOPE";
        /// The stream id is missing, unexpected or 0.
        DCP_STREAMID_INVALID = 0x8d, "DCP_STREAMID_INVALID";
        /// Unknown durability level.
        DURABILITY_INVALID_LEVEL = 0xa0, "DURABILITY_INVALID_LEVEL";
        /// Too few replicas for the durability level.
        DURABILITY_IMPOSSIBLE = 0xa1, "DURABILITY_IMPOSSIBLE";
        /// A durable write of the key is pending.
        SYNC_WRITE_IN_PROGRESS = 0xa2, "SYNC_WRITE_IN_PROGRESS";
        /// The outcome of the durable write is unknown.
        SYNC_WRITE_AMBIGUOUS = 0xa3, "SYNC_WRITE_AMBIGUOUS";
        /// A durable write of the key is being committed again.
        SYNC_WRITE_RE_COMMIT_IN_PROGRESS = 0xa4, "SYNC_WRITE_RE_COMMIT_IN_PROGRESS";
        /// A range scan was cancelled.
        RANGE_SCAN_CANCELLED = 0xa5, "RANGE_SCAN_CANCELLED";
        /// A range scan has more to send.
        RANGE_SCAN_MORE = 0xa6, "RANGE_SCAN_MORE";
        /// A range scan is complete.
        RANGE_SCAN_COMPLETE = 0xa7, "RANGE_SCAN_COMPLETE";
        /// The vBucket uuid differs.
        VB_UUID_NOT_EQUAL = 0xa8, "VB_UUID_NOT_EQUAL";
        /// The path does not exist in the document.
        SUBDOC_PATH_ENOENT = 0xc0, "SUBDOC_PATH_ENOENT";
        /// The path does not match the document's structure.
        SUBDOC_PATH_MISMATCH = 0xc1, "SUBDOC_PATH_MISMATCH";
        /// The path is malformed.
        SUBDOC_PATH_EINVAL = 0xc2, "SUBDOC_PATH_EINVAL";
        /// The path is too long.
        SUBDOC_PATH_E2BIG = 0xc3, "SUBDOC_PATH_E2BIG";
        /// The document is nested too deeply.
        SUBDOC_DOC_E2DEEP = 0xc4, "SUBDOC_DOC_E2DEEP";
        /// The value cannot be inserted at the path.
        SUBDOC_VALUE_CANTINSERT = 0xc5, "SUBDOC_VALUE_CANTINSERT";
        /// The document is not JSON.
        SUBDOC_DOC_NOTJSON = 0xc6, "SUBDOC_DOC_NOTJSON";
        /// The number at the path is out of range.
        SUBDOC_NUM_ERANGE = 0xc7, "SUBDOC_NUM_ERANGE";
        /// The number to add is invalid.
        SUBDOC_DELTA_EINVAL = 0xc8, "SUBDOC_DELTA_EINVAL";
        /// The path already exists.
        SUBDOC_PATH_EEXISTS = 0xc9, "SUBDOC_PATH_EEXISTS";
        /// The value would nest too deeply.
        SUBDOC_VALUE_ETOODEEP = 0xca, "SUBDOC_VALUE_ETOODEEP";
        /// The operations cannot be combined in one request.
        SUBDOC_INVALID_COMBO = 0xcb, "SUBDOC_INVALID_COMBO";
        /// Some of several paths failed.
        SUBDOC_MULTI_PATH_FAILURE = 0xcc, "SUBDOC_MULTI_PATH_FAILURE";
        /// Success on a tombstone.
        SUBDOC_SUCCESS_DELETED = 0xcd, "SUBDOC_SUCCESS_DELETED";
        /// Some of several paths failed, on a tombstone.
        SUBDOC_MULTI_PATH_FAILURE_DELETED = 0xd3, "SUBDOC_MULTI_PATH_FAILURE_DELETED";
    }
}

/// What a status says, to whoever gets it in answer to something other than a document's operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StatusClass {
    /// The request succeeded.
    Success,
    /// The exchange is not over.
    Continues,
    /// The client's position is not on the server's history.
    Rollback,
    /// Seqnos contradict each other or the server's.
    OutOfRange,
    /// What the request names does not exist.
    NotFound,
    /// What the request creates exists.
    Exists,
    /// Another node has the vBucket.
    Moved,
    /// The node does not know the scope or collection.
    UnknownCollection,
    /// The node has no collections manifest, or an older one than the client.
    Manifest,
    /// The user name, password or token is wrong.
    LoginRefused,
    /// The user lacks a privilege.
    Denied,
    /// The connection has lost its login or its bucket.
    Invalidated,
    /// The server is starting, busy or rebalancing: the same request may succeed later.
    Temporary,
    /// The server does not know the request, or refuses it in this form.
    Unsupported,
    /// The server failed.
    Failed,
    /// The server cannot read its disk.
    Unreadable,
    /// An answer to operations on documents, streams of other connections and range scans only.
    Elsewhere,
    /// A status that this version does not know.
    Unknown,
}

impl StatusClass {
    /// Every class.
    pub const ALL: [Self; 18] = [
        Self::Success,
        Self::Continues,
        Self::Rollback,
        Self::OutOfRange,
        Self::NotFound,
        Self::Exists,
        Self::Moved,
        Self::UnknownCollection,
        Self::Manifest,
        Self::LoginRefused,
        Self::Denied,
        Self::Invalidated,
        Self::Temporary,
        Self::Unsupported,
        Self::Failed,
        Self::Unreadable,
        Self::Elsewhere,
        Self::Unknown,
    ];
}

impl Status {
    /// What the status says. Every [known](Self::KNOWN) one has a class of its own choice.
    #[must_use]
    pub const fn class(self) -> StatusClass {
        match self {
            Self::SUCCESS => StatusClass::Success,
            Self::AUTH_CONTINUE => StatusClass::Continues,
            Self::ROLLBACK => StatusClass::Rollback,
            Self::ERANGE => StatusClass::OutOfRange,
            Self::KEY_ENOENT => StatusClass::NotFound,
            Self::KEY_EEXISTS => StatusClass::Exists,
            Self::NOT_MY_VBUCKET => StatusClass::Moved,
            Self::UNKNOWN_COLLECTION | Self::UNKNOWN_SCOPE => StatusClass::UnknownCollection,
            Self::NO_COLLECTIONS_MANIFEST | Self::COLLECTIONS_MANIFEST_IS_AHEAD => {
                StatusClass::Manifest
            }
            Self::AUTH_ERROR => StatusClass::LoginRefused,
            Self::EACCESS => StatusClass::Denied,
            Self::NO_BUCKET | Self::AUTH_STALE => StatusClass::Invalidated,
            Self::EBUSY
            | Self::ENOMEM
            | Self::ETMPFAIL
            | Self::EWOULDTHROTTLE
            | Self::BUCKET_PAUSED
            | Self::ECONFIG_ONLY
            | Self::NOT_INITIALIZED
            | Self::RATE_LIMITED_MAX_COMMANDS
            | Self::RATE_LIMITED_MAX_CONNECTIONS
            | Self::RATE_LIMITED_NETWORK_EGRESS
            | Self::RATE_LIMITED_NETWORK_INGRESS => StatusClass::Temporary,
            Self::EINVAL
            | Self::NOT_SUPPORTED
            | Self::UNKNOWN_COMMAND
            | Self::DCP_STREAMID_INVALID => StatusClass::Unsupported,
            Self::EINTERNAL | Self::CANCELLED => StatusClass::Failed,
            Self::ENCRYPTION_KEY_NOT_AVAILABLE | Self::CHECKSUM_MISMATCH => StatusClass::Unreadable,
            Self::E2BIG
            | Self::NOT_STORED
            | Self::DELTA_BADVAL
            | Self::LOCKED
            | Self::DCP_STREAM_NOT_FOUND
            | Self::OPAQUE_NO_MATCH
            | Self::NOT_LOCKED
            | Self::CAS_VALUE_INVALID
            | Self::EXPIRY_OVERFLOW
            | Self::LOCK_EXPIRY_OVERFLOW
            | Self::SCOPE_SIZE_LIMIT_EXCEEDED
            | Self::BUCKET_SIZE_LIMIT_EXCEEDED
            | Self::BUCKET_RESIDENT_RATIO_TOO_LOW
            | Self::BUCKET_DATA_SIZE_TOO_BIG
            | Self::BUCKET_DISK_SPACE_TOO_LOW
            | Self::UNKNOWN_FRAME_INFO
            | Self::XATTR_EINVAL
            | Self::CANNOT_APPLY_COLLECTIONS_MANIFEST
            | Self::DURABILITY_INVALID_LEVEL
            | Self::DURABILITY_IMPOSSIBLE
            | Self::SYNC_WRITE_IN_PROGRESS
            | Self::SYNC_WRITE_AMBIGUOUS
            | Self::SYNC_WRITE_RE_COMMIT_IN_PROGRESS
            | Self::RANGE_SCAN_CANCELLED
            | Self::RANGE_SCAN_MORE
            | Self::RANGE_SCAN_COMPLETE
            | Self::VB_UUID_NOT_EQUAL
            | Self::SUBDOC_PATH_ENOENT
            | Self::SUBDOC_PATH_MISMATCH
            | Self::SUBDOC_PATH_EINVAL
            | Self::SUBDOC_PATH_E2BIG
            | Self::SUBDOC_DOC_E2DEEP
            | Self::SUBDOC_VALUE_CANTINSERT
            | Self::SUBDOC_DOC_NOTJSON
            | Self::SUBDOC_NUM_ERANGE
            | Self::SUBDOC_DELTA_EINVAL
            | Self::SUBDOC_PATH_EEXISTS
            | Self::SUBDOC_VALUE_ETOODEEP
            | Self::SUBDOC_INVALID_COMBO
            | Self::SUBDOC_MULTI_PATH_FAILURE
            | Self::SUBDOC_SUCCESS_DELETED
            | Self::SUBDOC_MULTI_PATH_FAILURE_DELETED => StatusClass::Elsewhere,
            _ => StatusClass::Unknown,
        }
    }

    /// Whether the request succeeded.
    #[must_use]
    pub const fn is_success(self) -> bool {
        self.0 == Self::SUCCESS.0
    }

    /// Whether the server is starting, busy or rebalancing: the same request may succeed later.
    #[must_use]
    pub const fn is_temporary(self) -> bool {
        matches!(self.class(), StatusClass::Temporary)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_that_is_known_has_a_class() {
        for status in Status::KNOWN {
            assert_ne!(status.class(), StatusClass::Unknown, "{status}");
        }
        assert_eq!(Status(0x5555).class(), StatusClass::Unknown);
        for class in StatusClass::ALL {
            let is_used = Status::KNOWN.iter().any(|status| status.class() == class);
            assert_eq!(is_used, class != StatusClass::Unknown, "{class:?}");
        }
    }
}
