//! Opcodes.

use crate::wire_enum;

wire_enum! {
    /// What a packet requests or reports (BinaryProtocol and the DCP pages).
    Opcode(u8) {
        /// Read a document.
        GET = 0x00, "GET";
        /// Write a document.
        SET = 0x01, "SET";
        /// Write a document that must not exist yet.
        ADD = 0x02, "ADD";
        /// Write a document that must exist.
        REPLACE = 0x03, "REPLACE";
        /// Remove a document.
        DELETE = 0x04, "DELETE";
        /// Add to a counter.
        INCREMENT = 0x05, "INCREMENT";
        /// Subtract from a counter.
        DECREMENT = 0x06, "DECREMENT";
        /// Close the connection.
        QUIT = 0x07, "QUIT";
        /// Do nothing but respond.
        NOOP = 0x0a, "NOOP";
        /// Get the server's version.
        VERSION = 0x0b, "VERSION";
        /// Append to a document.
        APPEND = 0x0e, "APPEND";
        /// Prepend to a document.
        PREPEND = 0x0f, "PREPEND";
        /// Get statistics.
        STAT = 0x10, "STAT";
        /// Change a document's expiry.
        TOUCH = 0x1c, "TOUCH";
        /// Read a document and change its expiry.
        GET_AND_TOUCH = 0x1d, "GAT";
        /// Negotiate features.
        HELLO = 0x1f, "HELLO";
        /// List authentication mechanisms.
        SASL_LIST_MECHS = 0x20, "SASL_LIST_MECHS";
        /// Begin authentication.
        SASL_AUTH = 0x21, "SASL_AUTH";
        /// Continue authentication.
        SASL_STEP = 0x22, "SASL_STEP";
        /// Set a vBucket's state.
        SET_VBUCKET = 0x3d, "SET_VBUCKET";
        /// Read a vBucket's state.
        GET_VBUCKET = 0x3e, "GET_VBUCKET";
        /// Delete a vBucket.
        DELETE_VBUCKET = 0x3f, "DELETE_VBUCKET";
        /// Get the high seqnos of all vBuckets.
        GET_ALL_VB_SEQNOS = 0x48, "GET_ALL_VB_SEQNOS";
        /// Open a DCP connection.
        DCP_OPEN = 0x50, "DCP_OPEN";
        /// Tell a consumer to open a stream.
        DCP_ADD_STREAM = 0x51, "DCP_ADD_STREAM";
        /// Close a stream.
        DCP_CLOSE_STREAM = 0x52, "DCP_CLOSE_STREAM";
        /// Open a stream.
        DCP_STREAM_REQ = 0x53, "DCP_STREAM_REQ";
        /// Get a failover log on a DCP connection.
        DCP_GET_FAILOVER_LOG = 0x54, "DCP_GET_FAILOVER_LOG";
        /// A stream ended.
        DCP_STREAM_END = 0x55, "DCP_STREAM_END";
        /// A snapshot begins.
        DCP_SNAPSHOT_MARKER = 0x56, "DCP_SNAPSHOT_MARKER";
        /// A document was written.
        DCP_MUTATION = 0x57, "DCP_MUTATION";
        /// A document was removed.
        DCP_DELETION = 0x58, "DCP_DELETION";
        /// A document expired.
        DCP_EXPIRATION = 0x59, "DCP_EXPIRATION";
        /// Obsolete.
        DCP_FLUSH = 0x5a, "DCP_FLUSH";
        /// Hand over a vBucket.
        DCP_SET_VBUCKET_STATE = 0x5b, "DCP_SET_VBUCKET_STATE";
        /// Keep-alive.
        DCP_NOOP = 0x5c, "DCP_NOOP";
        /// Acknowledge processed bytes to the producer.
        DCP_BUFFER_ACK = 0x5d, "DCP_BUFFER_ACK";
        /// Change a connection setting.
        DCP_CONTROL = 0x5e, "DCP_CONTROL";
        /// A collection or scope changed.
        DCP_SYSTEM_EVENT = 0x5f, "DCP_SYSTEM_EVENT";
        /// A durable write began.
        DCP_PREPARE = 0x60, "DCP_PREPARE";
        /// A prepare is durable on a replica.
        DCP_SEQNO_ACK = 0x61, "DCP_SEQNO_ACK";
        /// A durable write succeeded.
        DCP_COMMIT = 0x62, "DCP_COMMIT";
        /// A durable write was aborted.
        DCP_ABORT = 0x63, "DCP_ABORT";
        /// No changes for this stream up to a seqno.
        DCP_SEQNO_ADVANCED = 0x64, "DCP_SEQNO_ADVANCED";
        /// An out-of-sequence-order snapshot begins or ends.
        DCP_OSO_SNAPSHOT = 0x65, "DCP_OSO_SNAPSHOT";
        /// Cached documents.
        DCP_CACHE_TRANSFER = 0x66, "DCP_CACHE_TRANSFER";
        /// All cached documents have been sent.
        DCP_CACHE_TRANSFER_END = 0x67, "DCP_CACHE_TRANSFER_END";
        /// Flush a vBucket's changes to disk.
        STOP_PERSISTENCE = 0x80, "STOP_PERSISTENCE";
        /// Resume flushing.
        START_PERSISTENCE = 0x81, "START_PERSISTENCE";
        /// Set a server parameter.
        SET_PARAM = 0x82, "SET_PARAM";
        /// Read a document from a replica.
        GET_REPLICA = 0x83, "GET_REPLICA";
        /// Create a bucket.
        CREATE_BUCKET = 0x85, "CREATE_BUCKET";
        /// Delete a bucket.
        DELETE_BUCKET = 0x86, "DELETE_BUCKET";
        /// Choose the connection's bucket.
        SELECT_BUCKET = 0x89, "SELECT_BUCKET";
        /// Get the persisted and current seqno of a vBucket.
        OBSERVE_SEQNO = 0x91, "OBSERVE_SEQNO";
        /// Get the node of a key.
        OBSERVE = 0x92, "OBSERVE";
        /// Evict a key from memory.
        EVICT_KEY = 0x93, "EVICT_KEY";
        /// Read and lock a document.
        GET_LOCKED = 0x94, "GET_LOCKED";
        /// Unlock a document.
        UNLOCK = 0x95, "UNLOCK";
        /// Get a failover log on any connection.
        GET_FAILOVER_LOG = 0x96, "GET_FAILOVER_LOG";
        /// Get a document's metadata.
        GET_META = 0xa0, "GET_META";
        /// Write a document with its metadata.
        SET_WITH_META = 0xa2, "SET_WITH_META";
        /// Write a new document with its metadata.
        ADD_WITH_META = 0xa4, "ADD_WITH_META";
        /// Remove a document with its metadata.
        DELETE_WITH_META = 0xa8, "DELETE_WITH_META";
        /// Compact the database.
        COMPACT_DB = 0xb3, "COMPACT_DB";
        /// Set the cluster map.
        SET_CLUSTER_CONFIG = 0xb4, "SET_CLUSTER_CONFIG";
        /// Get the cluster map.
        GET_CLUSTER_CONFIG = 0xb5, "GET_CLUSTER_CONFIG";
        /// Wait until a seqno is persisted.
        SEQNO_PERSISTENCE = 0xb7, "SEQNO_PERSISTENCE";
        /// Set the collections manifest.
        SET_COLLECTIONS_MANIFEST = 0xb9, "SET_COLLECTIONS_MANIFEST";
        /// Get the collections manifest.
        GET_COLLECTIONS_MANIFEST = 0xba, "GET_COLLECTIONS_MANIFEST";
        /// Get the id of a collection by name.
        GET_COLLECTION_ID = 0xbb, "GET_COLLECTION_ID";
        /// Get the id of a scope by name.
        GET_SCOPE_ID = 0xbc, "GET_SCOPE_ID";
        /// Read one path of a document.
        SUBDOC_GET = 0xc5, "SUBDOC_GET";
        /// Check whether a path exists.
        SUBDOC_EXISTS = 0xc6, "SUBDOC_EXISTS";
        /// Add a member to an object.
        SUBDOC_DICT_ADD = 0xc7, "SUBDOC_DICT_ADD";
        /// Set a member of an object.
        SUBDOC_DICT_UPSERT = 0xc8, "SUBDOC_DICT_UPSERT";
        /// Remove a path.
        SUBDOC_DELETE = 0xc9, "SUBDOC_DELETE";
        /// Replace a path.
        SUBDOC_REPLACE = 0xca, "SUBDOC_REPLACE";
        /// Append to an array.
        SUBDOC_ARRAY_PUSH_LAST = 0xcb, "SUBDOC_ARRAY_PUSH_LAST";
        /// Prepend to an array.
        SUBDOC_ARRAY_PUSH_FIRST = 0xcc, "SUBDOC_ARRAY_PUSH_FIRST";
        /// Insert into an array.
        SUBDOC_ARRAY_INSERT = 0xcd, "SUBDOC_ARRAY_INSERT";
        /// Append a value to an array unless it is present.
        SUBDOC_ARRAY_ADD_UNIQUE = 0xce, "SUBDOC_ARRAY_ADD_UNIQUE";
        /// Change the counter at a path.
        SUBDOC_COUNTER = 0xcf, "SUBDOC_COUNTER";
        /// Read parts of a document.
        SUBDOC_MULTI_LOOKUP = 0xd0, "SUBDOC_MULTI_LOOKUP";
        /// Change parts of a document.
        SUBDOC_MULTI_MUTATION = 0xd1, "SUBDOC_MULTI_MUTATION";
        /// Count the elements of an array or object.
        SUBDOC_GET_COUNT = 0xd2, "SUBDOC_GET_COUNT";
        /// Set the privileges of users that an external service knows.
        UPDATE_EXTERNAL_USER_PERMISSIONS = 0xf6, "UPDATE_EXTERNAL_USER_PERMISSIONS";
        /// Adjust the server's clock.
        ADJUST_TIME_OF_DAY = 0xfc, "ADJUST_TIME_OF_DAY";
        /// Get the error map.
        GET_ERROR_MAP = 0xfe, "GET_ERROR_MAP";
    }
}

impl Opcode {
    /// Opcode of a pushed cluster map, only with magic
    /// [`SERVER_REQUEST`](crate::Magic::SERVER_REQUEST), where opcodes have other meanings.
    pub const CLUSTER_MAP_CHANGE: Self = Self(0x01);

    /// Whether this is one of the DCP opcodes.
    #[must_use]
    pub const fn is_dcp(self) -> bool {
        self.0 >= 0x50 && self.0 <= 0x67
    }
}
