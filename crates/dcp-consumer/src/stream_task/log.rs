//! Targets of log records. They name the loggers of `docs/guides/monitor.md`, so they stay when
//! modules move.

/// Connections, nodes, and vBuckets that do not advance.
pub(super) const CLUSTER: &str = "dcp_consumer::cluster";

/// Persisted seqnos of copies.
pub(super) const PERSISTENCE: &str = "dcp_consumer::persistence";

/// Streams that are reopened, and why.
pub(super) const RECONCILER: &str = "dcp_consumer::reconciler";
