//! What a connection has agreed on: features, open flags, controls.

use core::time::Duration;

use dcp_wire::message::OpenFlags;

/// The features a connection negotiated with HELLO, as far as they change DCP.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Features {
    /// Keys carry their collection id, stream requests may carry a filter.
    pub collections: bool,
    /// Real error codes instead of closed connections.
    pub xerror: bool,
    /// Values may be sent compressed.
    pub snappy: bool,
    /// Error bodies are marked as JSON.
    pub json: bool,
    /// Responses may overtake each other, which excludes DCP.
    pub unordered_execution: bool,
}

impl Features {
    /// Nothing negotiated.
    pub const NONE: Self = Self {
        collections: false,
        xerror: false,
        snappy: false,
        json: false,
        unordered_execution: false,
    };
}

/// A version of the data service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ServerVersion {
    /// First number.
    pub major: u8,
    /// Second number.
    pub minor: u8,
    /// Third number.
    pub patch: u8,
}

impl ServerVersion {
    /// The newest version whose behaviour is known: 8.0.2.
    pub const NEWEST: Self = Self { major: 8, minor: 0, patch: 2 };

    /// Whether this is `major.minor` or newer.
    #[must_use]
    pub const fn is_at_least(self, major: u8, minor: u8) -> bool {
        self.major > major || (self.major == major && self.minor >= minor)
    }

    /// Whether a client may ask for first loads without deletions. Released servers do not know it
    /// yet; the newest one that is played does, so that clients can be tested.
    #[must_use]
    pub const fn skips_deletions(self) -> bool {
        self.is_at_least(8, 0)
    }

    /// Whether this is a version from before collections, which behaves differently in many
    /// respects.
    #[must_use]
    pub const fn is_legacy(self) -> bool {
        !self.is_at_least(7, 0)
    }
}

impl Default for ServerVersion {
    fn default() -> Self {
        Self::NEWEST
    }
}

/// The configuration of the server side of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnectionConfig {
    /// How long a connection with noops may be silent before it is closed.
    pub idle_timeout: Duration,
    /// Whether streams with xattrs or collections need noops to be enabled first.
    pub noop_mandatory: bool,
    /// Shortest noop interval that a client may request.
    pub min_noop_interval: Duration,
    /// How many streams a connection may have, including ended ones whose end is unsent; further
    /// requests are refused with ENOMEM.
    pub max_streams: usize,
    /// Largest flow-control buffer that a client may request, in bytes; larger ones are refused
    /// with ENOMEM.
    pub max_buffer_size: u32,
    /// Whether clients that allow it get backfills in key order.
    pub oso_backfill: OsoBackfill,
    /// Most collections a filter may name for such a backfill.
    pub oso_max_collections: usize,
    /// How long a backfill may send nothing while the disk is nearly full before its stream ends
    /// with "slow".
    pub backfill_idle_limit: Duration,
    /// Percentage from which the disk counts as nearly full.
    pub backfill_idle_disk_percent: u8,
    /// When a client that acknowledges nothing is disconnected; `None`, the default: never.
    pub stuck: Option<StuckClients>,
    /// Server version whose behaviour the connection follows where versions differ.
    pub server_version: ServerVersion,
}

/// Clients whose connection is closed when they leave their flow-control window exhausted
/// (`dcp_disconnect_when_stuck_name_regex`, `dcp_disconnect_when_stuck_timeout_seconds`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StuckClients {
    /// Text that their names contain; in servers a regular expression.
    pub name_contains: String,
    /// How long the window may be exhausted while there is more to send.
    pub timeout: Duration,
}

impl StuckClients {
    /// Whether it applies to a connection of that name.
    pub(super) fn contains(&self, name: &[u8]) -> bool {
        let wanted = self.name_contains.as_bytes();
        wanted.is_empty() || name.windows(wanted.len()).any(|part| part == wanted)
    }
}

/// When a backfill is sent in key order (`dcp_oso_backfill`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OsoBackfill {
    /// Never.
    Disabled,
    /// When the filter's collection is such a small part of the vBucket that lookups beat reading
    /// everything.
    #[default]
    Auto,
    /// Whenever the other conditions are met.
    Enabled,
}

/// Whether a client allows snapshots in key order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum OutOfOrder {
    /// None.
    #[default]
    No,
    /// Any.
    Allowed,
    /// Yes, followed by a SEQNO_ADVANCED with their highest seqno.
    WithSeqnoAdvanced,
}

impl Default for ConnectionConfig {
    fn default() -> Self {
        Self {
            idle_timeout: Duration::from_secs(360),
            noop_mandatory: true,
            min_noop_interval: Duration::from_millis(100),
            max_streams: 65_536,
            max_buffer_size: u32::MAX,
            oso_backfill: OsoBackfill::Auto,
            oso_max_collections: 1,
            backfill_idle_limit: Duration::from_secs(720),
            backfill_idle_disk_percent: 90,
            stuck: None,
            server_version: ServerVersion::NEWEST,
        }
    }
}

/// How much a client that asked for a priority is sent in one pass over its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Priority {
    Low,
    Medium,
    High,
}

impl Priority {
    /// Messages in a pass, as servers count them.
    pub(super) const fn messages(self) -> usize {
        match self {
            Self::Low => 1,
            Self::Medium => 5,
            Self::High => 50,
        }
    }
}

/// How far a client takes part in durable writes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum SyncWrites {
    /// None.
    #[default]
    Off,
    /// The client understands prepares.
    Visible,
    /// The client is a replica: markers carry what it needs to commit by itself.
    Replication,
}

/// The settings of one connection: its open flags and every control it has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Settings {
    pub(super) flags: OpenFlags,
    pub(super) version: ServerVersion,
    pub(super) buffer_size: u32,
    pub(super) noop_enabled: bool,
    pub(super) noop_interval: Duration,
    pub(super) expiry_opcode: bool,
    pub(super) force_compression: bool,
    pub(super) stream_ids: bool,
    pub(super) stream_end_on_close: bool,
    pub(super) v7_status_codes: bool,
    pub(super) purge_seqno_markers: bool,
    pub(super) sync_writes: SyncWrites,
    pub(super) consumer_name: bool,
    pub(super) hifi_mfu: bool,
    pub(super) out_of_order: OutOfOrder,
    /// System events are sent as FlatBuffers, modified collections among them.
    pub(super) flatbuffers_events: bool,
    /// Whether a slow stream may be sent back to the disk.
    pub(super) cursor_dropping: bool,
    pub(super) change_streams: bool,
    /// `None` if the client has not asked for any: it is sent as much as it takes.
    pub(super) priority: Option<Priority>,
    /// Whether a backfill waits for the end of the one before.
    pub(super) sequential_backfills: bool,
}

impl Settings {
    /// A connection that was just opened with `flags` and that name; replication keeps its cursors
    /// in memory by default.
    pub(super) fn new(flags: OpenFlags, name: &[u8], version: ServerVersion) -> Self {
        let cursor_dropping = !name.windows(11).any(|part| part == b"replication");
        Self {
            flags,
            version,
            buffer_size: 0,
            noop_enabled: false,
            noop_interval: Duration::from_secs(20),
            expiry_opcode: false,
            force_compression: false,
            stream_ids: false,
            stream_end_on_close: false,
            v7_status_codes: false,
            purge_seqno_markers: false,
            sync_writes: SyncWrites::Off,
            consumer_name: false,
            hifi_mfu: false,
            out_of_order: OutOfOrder::No,
            flatbuffers_events: false,
            cursor_dropping,
            change_streams: false,
            priority: None,
            sequential_backfills: false,
        }
    }
}
