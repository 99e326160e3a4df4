//! What a consumer negotiates, since which release servers have it, and what it does without.
//!
//! The page *Servers* of the reference is made from this table. A server's own answers decide what is
//! used: it is never asked for its version.

use core::fmt;

use dcp_wire::Feature;
use dcp_wire::message::{Control, OpenFlags, StreamRequestFlags};

/// A release of Couchbase Server, as far as what servers have depends on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Release {
    /// The first number.
    pub major: u8,
    /// The second number.
    pub minor: u8,
}

impl Release {
    /// The releases that differ for a consumer and are in use, ascending.
    pub const IN_USE: [Self; 7] = [
        Self::new(6, 0),
        Self::new(6, 6),
        Self::new(7, 0),
        Self::new(7, 2),
        Self::new(7, 6),
        Self::new(8, 0),
        Self::new(8, 1),
    ];

    /// The release with these numbers.
    #[must_use]
    pub const fn new(major: u8, minor: u8) -> Self {
        Self { major, minor }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// How a consumer asks for something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Negotiated {
    /// By a feature in HELLO.
    Feature(Feature),
    /// By a flag of DCP_OPEN.
    OpenFlag(OpenFlags),
    /// By a DCP_CONTROL with this name.
    Control(&'static str),
    /// By a flag of each stream request.
    StreamFlag(StreamRequestFlags),
    /// By a member in the value of each stream request.
    StreamMember(&'static str),
}

impl fmt::Display for Negotiated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Feature(feature) => write!(f, "feature {feature} ({:#04x})", feature.0),
            Self::OpenFlag(flag) => {
                let names = flag.iter_names().map(|(name, _)| name).collect::<Vec<_>>();
                write!(f, "open flag {} ({:#05x})", names.join(", "), flag.bits())
            }
            Self::Control(key) => write!(f, "control `{key}`"),
            Self::StreamFlag(flag) => {
                let names = flag.iter_names().map(|(name, _)| name).collect::<Vec<_>>();
                write!(f, "stream flag {} ({:#04x})", names.join(", "), flag.bits())
            }
            Self::StreamMember(name) => write!(f, "stream filter `{name}`"),
        }
    }
}

/// Something that a consumer negotiates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Capability {
    /// How it is asked for.
    pub by: Negotiated,
    /// When it is asked for, if not always.
    pub asked: &'static str,
    /// The first release that has it.
    pub since: Release,
    /// What the consumer does without it; empty if every release in use has it.
    pub without: &'static str,
}

const fn always(by: Negotiated) -> Capability {
    Capability { by, asked: "", since: Release::new(6, 0), without: "" }
}

const fn since(by: Negotiated, version: (u8, u8), without: &'static str) -> Capability {
    let (major, minor) = version;
    Capability { by, asked: "", since: Release::new(major, minor), without }
}

impl Capability {
    const fn asked(mut self, when: &'static str) -> Self {
        self.asked = when;
        self
    }

    /// Whether servers of a release have it.
    #[must_use]
    pub fn is_in(&self, release: Release) -> bool {
        release >= self.since
    }

    /// Everything that a consumer negotiates.
    pub const ALL: &'static [Self] = &[
        always(Negotiated::Feature(Feature::XATTR)),
        always(Negotiated::Feature(Feature::XERROR)),
        always(Negotiated::Feature(Feature::SELECT_BUCKET)),
        always(Negotiated::Feature(Feature::SNAPPY)),
        always(Negotiated::Feature(Feature::JSON)),
        always(Negotiated::Feature(Feature::DUPLEX)),
        always(Negotiated::Feature(Feature::CLUSTER_MAP_CHANGE_NOTIFICATION)),
        since(
            Negotiated::Feature(Feature::ALT_REQUEST_SUPPORT),
            (6, 5),
            "nothing changes: the client sends no framing extras",
        ),
        since(
            Negotiated::Feature(Feature::SUBDOC_CREATE_AS_DELETED),
            (6, 6),
            "the open flag INCLUDE_DELETED_USER_XATTRS is not sent",
        ),
        since(
            Negotiated::Feature(Feature::DCP_SKIP_DELETES_IN_INITIAL_BACKFILL),
            (8, 1),
            "the open flag SKIP_DELETES_IN_INITIAL_BACKFILL is not sent",
        )
        .asked("with `initial_deletions`"),
        since(
            Negotiated::Feature(Feature::COLLECTIONS),
            (7, 0),
            "everything is in the default collection; `collections` may name only that one",
        ),
        always(Negotiated::OpenFlag(OpenFlags::PRODUCER)),
        always(Negotiated::OpenFlag(OpenFlags::INCLUDE_DELETE_TIMES)),
        always(Negotiated::OpenFlag(OpenFlags::INCLUDE_XATTRS)).asked("with the column `xattrs`"),
        always(Negotiated::OpenFlag(OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE))
            .asked("without the column `value`"),
        since(
            Negotiated::OpenFlag(OpenFlags::INCLUDE_DELETED_USER_XATTRS),
            (6, 6),
            "tombstones have no user xattrs",
        )
        .asked("with the column `xattrs`"),
        since(
            Negotiated::OpenFlag(OpenFlags::SKIP_DELETES_IN_INITIAL_BACKFILL),
            (8, 1),
            "first loads have deletions, or `initial_deletions=\"skip\"` fails with `ConfigError`",
        )
        .asked("with `initial_deletions`"),
        always(Negotiated::Control(Control::ENABLE_NOOP)),
        always(Negotiated::Control(Control::SET_NOOP_INTERVAL)),
        always(Negotiated::Control(Control::CONNECTION_BUFFER_SIZE)),
        always(Negotiated::Control(Control::SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM)),
        always(Negotiated::Control(Control::FORCE_VALUE_COMPRESSION)).asked("with `compressed`"),
        always(Negotiated::Control(Control::SET_PRIORITY)).asked("with `priority`"),
        since(
            Negotiated::Control(Control::BACKFILL_ORDER),
            (6, 6),
            "the backfills of vBuckets take turns, and the log says so",
        )
        .asked("with `backfill_order`"),
        since(
            Negotiated::Control(Control::ENABLE_EXPIRY_OPCODE),
            (6, 5),
            "documents that expire come as `deletion`, not as `expiration`",
        ),
        since(
            Negotiated::Control(Control::ENABLE_OUT_OF_ORDER_SNAPSHOTS),
            (7, 1),
            "the first load comes in the order of seqnos",
        )
        .asked("with `out_of_order`"),
        since(
            Negotiated::Control(Control::FLATBUFFERS_SYSTEM_EVENTS),
            (7, 2),
            "there is no row when a collection is modified",
        ),
        since(
            Negotiated::Control(Control::CHANGE_STREAMS),
            (7, 2),
            "`history` fails with `UnsupportedError`",
        )
        .asked("with `history`"),
        since(
            Negotiated::Control(Control::MAX_MARKER_VERSION),
            (8, 0),
            "positions have no purge seqno, so `purge_seqno` is not sent",
        ),
        always(Negotiated::StreamFlag(StreamRequestFlags::ACTIVE_VB_ONLY)),
        since(
            Negotiated::StreamFlag(StreamRequestFlags::IGNORE_PURGED_TOMBSTONES),
            (7, 2),
            "a stream below the purge seqno is rolled back to 0, whatever `on_purge` is",
        )
        .asked("with `on_purge=\"ignore\"`"),
        since(
            Negotiated::StreamMember("collections"),
            (7, 0),
            "everything is in the default collection",
        )
        .asked("with `collections`"),
        since(Negotiated::StreamMember("scope"), (7, 0), "everything is in the default collection")
            .asked("with a whole scope in `collections`"),
        since(Negotiated::StreamMember("uid"), (7, 0), "it is not needed")
            .asked("once a collection was created or dropped"),
        since(
            Negotiated::StreamMember("purge_seqno"),
            (8, 0),
            "a stream below the purge seqno is rolled back to 0 even if it has missed no deletion",
        ),
    ];

    /// The features that servers of a release grant a consumer.
    pub fn features(release: Release) -> impl Iterator<Item = Feature> {
        let there = Self::ALL.iter().filter(move |capability| capability.is_in(release));
        there.filter_map(|capability| match capability.by {
            Negotiated::Feature(feature) => Some(feature),
            _ => None,
        })
    }
}
