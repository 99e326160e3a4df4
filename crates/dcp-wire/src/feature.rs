//! Features negotiated by HELLO.

use crate::wire_enum;

wire_enum! {
    /// A feature a connection may request (server page "BinaryProtocol").
    Feature(u16) {
        /// Obsolete.
        TLS = 0x02, "Tls";
        /// Disable Nagle's algorithm.
        TCP_NODELAY = 0x03, "TcpNoDelay";
        /// Responses to writes carry vBucket uuid and seqno.
        MUTATION_SEQNO = 0x04, "MutationSeqno";
        /// Extended attributes.
        XATTR = 0x06, "Xattr";
        /// Extended error codes.
        XERROR = 0x07, "Xerror";
        /// SELECT_BUCKET.
        SELECT_BUCKET = 0x08, "SelectBucket";
        /// Compressed values.
        SNAPPY = 0x0a, "Snappy";
        /// The JSON datatype bit.
        JSON = 0x0b, "Json";
        /// The server may send requests.
        DUPLEX = 0x0c, "Duplex";
        /// Pushed cluster maps.
        CLUSTER_MAP_CHANGE_NOTIFICATION = 0x0d, "ClusterMapChangeNotification";
        /// Responses may be out of order; excludes DCP.
        UNORDERED_EXECUTION = 0x0e, "UnorderedExecution";
        /// Responses include the time they took.
        TRACING = 0x0f, "Tracing";
        /// Framing extras in requests.
        ALT_REQUEST_SUPPORT = 0x10, "AltRequestSupport";
        /// Durable writes.
        SYNC_REPLICATION = 0x11, "SyncReplication";
        /// Collections.
        COLLECTIONS = 0x12, "Collections";
        /// Compressed values in any message.
        SNAPPY_EVERYWHERE = 0x13, "SnappyEverywhere";
        /// Preserve a document's expiry on writes.
        PRESERVE_TTL = 0x14, "PreserveTtl";
        /// Virtual xattrs.
        VATTR = 0x15, "VAttr";
        /// Obsolete.
        POINT_IN_TIME_RECOVERY = 0x16, "PointInTimeRecovery";
        /// Sub-document writes may create tombstones.
        SUBDOC_CREATE_AS_DELETED = 0x17, "SubdocCreateAsDeleted";
        /// The `$document` macro.
        SUBDOC_DOCUMENT_MACRO_SUPPORT = 0x18, "SubdocDocumentMacroSupport";
        /// Replace the body with an xattr.
        SUBDOC_REPLACE_BODY_WITH_XATTR = 0x19, "SubdocReplaceBodyWithXattr";
        /// Responses report read and write units.
        REPORT_UNIT_USAGE = 0x1a, "ReportUnitUsage";
        /// Reject throttled requests instead of delaying them.
        NON_BLOCKING_THROTTLING_MODE = 0x1b, "NonBlockingThrottlingMode";
        /// Sub-document reads from replicas.
        SUBDOC_REPLICA_READ = 0x1c, "SubdocReplicaRead";
        /// GET_CLUSTER_CONFIG may include the known version.
        GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION = 0x1d, "GetClusterConfigWithKnownVersion";
        /// NOT_MY_VBUCKET omits a map that was already sent.
        DEDUPE_NOT_MY_VBUCKET_CLUSTER_MAP = 0x1e, "DedupeNotMyVbucketClustermap";
        /// Pushed notifications of new cluster maps without the map.
        CLUSTER_MAP_CHANGE_NOTIFICATION_BRIEF = 0x1f, "ClustermapChangeNotificationBrief";
        /// Sub-document operations may use several xattrs.
        SUBDOC_ALLOWS_ACCESS_ON_MULTIPLE_XATTR_KEYS = 0x20, "SubdocAllowsAccessOnMultipleXattrKeys";
        /// Xattrs may be binary.
        SUBDOC_BINARY_XATTR = 0x21, "SubdocBinaryXattr";
        /// Range scans may return xattrs.
        RANGE_SCAN_INCLUDE_XATTR = 0x22, "RangeScanIncludeXattr";
        /// Sub-document reads of tombstones from replicas.
        SUBDOC_ALLOW_REPLICA_READ_ON_DELETED_DOCS = 0x23, "SubdocAllowReplicaReadOnDeletedDocs";
        /// GET_RANDOM_KEY may return xattrs.
        GET_RANDOM_KEY_INCLUDE_XATTR = 0x24, "GetRandomKeyIncludeXattr";
        /// Writes with metadata through sub-document operations.
        MUTATE_WITH_META = 0x25, "MutateWithMeta";
        /// DCP_OPEN flag that omits deletions from the first backfill.
        DCP_SKIP_DELETES_IN_INITIAL_BACKFILL = 0x26, "DcpSkipDeletesInInitialBackfill";
    }
}
