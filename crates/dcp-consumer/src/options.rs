//! Options of a stream of changes.

use std::collections::BTreeMap;
use std::time::Duration;

use dcp_proto::checkpoint::Checkpoint;
use dcp_proto::consumer::StreamFilter;
use dcp_proto::{CollectionPatterns, RowFilter};
use dcp_wire::{Seqno, Vbid};

use crate::{Error, OnPurge, OnRollback};

/// Where a stream begins.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Start {
    /// Before the first change of every vBucket.
    #[default]
    Earliest,
    /// After the newest change of every vBucket at the moment the stream is opened.
    Latest,
    /// At the position of an earlier stream of the same bucket and filter.
    Checkpoint(Checkpoint),
}

/// Where a stream ends.
///
/// A finite stream delivers up to the end of the snapshot that holds the end seqno: otherwise, a
/// key that was rewritten meanwhile, whose change has moved above the end, would be missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum End {
    /// Never.
    #[default]
    Never,
    /// With the newest change of every vBucket at the moment the stream is opened.
    Now,
    /// With these seqnos; vBuckets that are not named are not streamed.
    At(BTreeMap<Vbid, Seqno>),
}

/// Which parts of a document the server sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Content {
    /// Whether values are sent; their datatype is sent in any case.
    pub values: bool,
    /// Whether extended attributes are sent, in front of the value.
    pub xattrs: bool,
}

impl Default for Content {
    /// Values without extended attributes.
    fn default() -> Self {
        Self { values: true, xattrs: false }
    }
}

/// Which documents the server sends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Filter {
    /// All of the bucket.
    #[default]
    All,
    /// Those of one scope, collections created later included.
    Scope(String),
    /// Those of these collections, each as `scope.collection`. If any name contains `*` for any
    /// text or `?` for one character, all names are patterns, and matching collections that are
    /// created later are streamed as well. Wildcards do not match scope `_system`.
    Collections(Vec<String>),
    /// By ids, as stored in checkpoints and offsets: dropped collections are left out.
    Ids(StreamFilter, CollectionPatterns),
}

/// What happens to the deletions of a vBucket's first load.
///
/// Only the load from the beginning is concerned, up to what the server has on disk when it begins;
/// deletions that it has in memory, and all later ones, are delivered. A load that is interrupted
/// resumes with the deletions above its position.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum InitialDeletions {
    /// They are delivered.
    #[default]
    Deliver,
    /// The server leaves them out, with the events of collections and scopes that were dropped. A
    /// server that cannot is refused with an error of kind
    /// [`ErrorKind::Config`](crate::ErrorKind::Config).
    Skip,
    /// The server leaves them out if it can.
    SkipIfSupported,
}

/// How many messages a node writes in one turn of a connection.
///
/// Nodes write in turns, and what a reader waits for is mostly their pauses in between. A higher
/// priority makes a load quicker and cheaper for both ends, and the slowest key-value operations of
/// the node slower.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Priority {
    /// One message.
    Low,
    /// Five messages: what servers do unless they are asked for something else.
    Medium,
    /// Fifty messages.
    High,
}

impl Priority {
    /// Every priority, ascending.
    pub const ALL: [Self; 3] = [Self::Low, Self::Medium, Self::High];

    /// Its name, as in the protocol.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::Medium => "medium",
            Self::High => "high",
        }
    }
}

/// In which order a node reads the vBuckets of a connection from disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BackfillOrder {
    /// In turns: what servers do unless they are asked for something else.
    RoundRobin,
    /// One vBucket after the other.
    Sequential,
}

impl BackfillOrder {
    /// Every order.
    pub const ALL: [Self; 2] = [Self::RoundRobin, Self::Sequential];

    /// Its name, as in the protocol.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round-robin",
            Self::Sequential => "sequential",
        }
    }
}

/// When a batch is delivered.
///
/// A batch ends at the first limit it reaches. Lingering ends one only while the application has
/// nothing else to take, so a slow application gets larger batches instead of more of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchPolicy {
    /// Most rows in a batch.
    pub max_rows: usize,
    /// Size of a batch in bytes above which it ends; one document may overshoot it. At most
    /// [`BatchPolicy::MAX_BYTES`].
    pub max_bytes: usize,
    /// How long the first row of a batch waits at most for others. A stream without an end waits so
    /// long only while changes come so fast that they would fill the batch: others are handed over
    /// once nothing is left to read, under load after 3 ms. From 2 ms on, data of a busy connection
    /// may gather for that long before it is read; with less, every batch waits for `linger`.
    pub linger: Duration,
}

impl BatchPolicy {
    /// Largest `max_bytes`: larger batches cost more in allocation than they save.
    pub const MAX_BYTES: usize = 16 * 1024 * 1024;
}

impl Default for BatchPolicy {
    /// 10,000 rows, 4 MiB, 100 ms.
    fn default() -> Self {
        Self { max_rows: 10_000, max_bytes: 4 * 1024 * 1024, linger: Duration::from_millis(100) }
    }
}

/// When a batch counts as processed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Acknowledge {
    /// When the application takes the next one.
    #[default]
    OnNext,
    /// When the application acknowledges it, in any order
    /// ([`ChangeStream::ack`](crate::ChangeStream::ack)). A batch that is never acknowledged holds
    /// its bytes of the flow-control buffer forever.
    Manual,
}

/// Options of a stream of changes; [`StreamOptions::default`] is an endless stream of everything.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StreamOptions {
    /// Where to begin.
    pub start: Start,
    /// Where to end.
    pub end: End,
    /// vBuckets to stream; `None` all.
    pub vbuckets: Option<Vec<Vbid>>,
    /// Which parts of a document to send.
    pub content: Content,
    /// Which documents to send.
    pub filter: Filter,
    /// Which of their changes to deliver. Positions move past the others, which the server sends
    /// anyway.
    pub rows: RowFilter,
    /// When a batch is delivered.
    pub batch: BatchPolicy,
    /// Flow-control buffer of each node's connection in bytes: how much may be received but not yet
    /// processed by the application, exceeded by at most one document.
    pub buffer_size: u32,
    /// What happens when the server asks for a rollback.
    pub on_rollback: OnRollback,
    /// Whether the stream stops exactly at the end seqno, even inside a snapshot. The rest of the
    /// snapshot may hold newer versions of keys at or below the end, so this is only for readers
    /// that continue from there, such as micro-batches. Needs an end.
    pub clamp: bool,
    /// Whether the seqnos of [`End::At`] are known to exist. A vBucket with a lower high seqno was
    /// rolled back since: the stream ends with an error of kind
    /// [`ErrorKind::Rollback`](crate::ErrorKind::Rollback) instead of waiting for changes that may
    /// never be written.
    pub end_exists: bool,
    /// Off by default, unlike in the [`Limits`](dcp_proto::plan::Limits) of a plan, because a
    /// stream's checkpoint finds its way back if a failover takes changes back. Whether a change is
    /// delivered only once every present copy of its vBucket has persisted it, so that no failover
    /// to one of them can lose it. Waiting changes count towards
    /// [`buffer_size`](Self::buffer_size), so the server stops when that is full.
    ///
    /// Has no effect on ephemeral buckets, which persist nothing: a warning is logged and
    /// [`StreamEvent::NothingPersisted`](crate::StreamEvent::NothingPersisted) reported.
    pub persisted_only: bool,
    /// Whether a stream with an end is complete only once the whole snapshot of its last change is
    /// persisted on all copies. Then no failover to one of them can restore a version below the end
    /// that the snapshot omitted in favour of one above it. This matters with
    /// [`clamp`](Self::clamp) for readers whose positions have no snapshots. Needs
    /// `persisted_only`.
    pub end_persisted: bool,
    /// Whether documents of scope `_system` and records of distributed transactions (keys that
    /// begin with `_txn:`) are delivered. Otherwise positions move past them. Documents of a scope
    /// or collection that the filter names are delivered in any case, except transaction records.
    pub system_documents: bool,
    /// Whether to deliver every version of a document that the server still has, in collections
    /// with change history, instead of the newest one of each snapshot.
    ///
    /// A server or bucket without history refuses it, which is an error of kind
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported). Positions do not depend on it: it
    /// may be turned on or off when resuming from a checkpoint, for the changes after it.
    pub history: bool,
    /// What happens to a position below the server's purge seqno: [`OnPurge::Resync`] or
    /// [`OnPurge::Ignore`]. To the server, the former is a rollback, so
    /// [`on_rollback`](Self::on_rollback) may end the stream; servers before 7.2 cannot do the
    /// latter.
    pub on_purge: OnPurge,
    /// Whether the server may send the initial load of a vBucket in key order, which saves a scan
    /// of the whole vBucket if the filter names one small collection.
    ///
    /// The vBucket's position stays at its beginning until all of it has arrived. If the connection
    /// is lost before, the vBucket starts again, with the record of a rollback to 0 first and a new
    /// epoch, and also after a restart from a checkpoint with this option. So it needs another
    /// [`on_rollback`](Self::on_rollback) than [`OnRollback::Fail`].
    pub out_of_order: bool,
    /// What happens to the deletions of first loads. Others than [`InitialDeletions::Deliver`] are
    /// refused together with [`Start::Latest`], which has no first load,
    /// [`history`](Self::history), whose older versions would come back without their deletions,
    /// and [`out_of_order`](Self::out_of_order), where servers send them all.
    pub initial_deletions: InitialDeletions,
    /// Which priority to ask the nodes for; `None` asks for none. Positions do not depend on it, nor
    /// on [`backfill_order`](Self::backfill_order): a stream may resume with another. A node that
    /// has no such setting is read without it, which is logged.
    pub priority: Option<Priority>,
    /// In which order to ask the nodes for vBuckets from disk; `None` asks for none.
    pub backfill_order: Option<BackfillOrder>,
    /// Whether empty vBuckets of a finite stream are streamed as well, so that their [caught
    /// up](dcp_proto::ChangeSink::caught_up) record is delivered.
    pub caught_up: bool,
    /// Whether the server compresses documents that get smaller by it: less network traffic for
    /// more processor time at both ends. Otherwise documents are compressed only if they are stored
    /// so. Servers without this feature send them as stored.
    pub compressed: bool,
    /// When a batch counts as processed.
    pub acknowledge: Acknowledge,
    /// Time between the server's noops; a connection on which neither a complete packet nor 64 KiB
    /// of one arrives for twice as long counts as dead.
    pub noop_interval: Duration,
    /// Longest time a vBucket may be without a stream, while it is retried, before the whole stream
    /// ends with an error. Zero: no retries.
    ///
    /// It also applies to opening the stream, and to everything that may be temporary during a
    /// restart, a failover or a password change: connections that are refused, lost, or closed
    /// without an answer, a bucket that a node does not know yet, a refused user. Only what the
    /// server has never granted to this client or stream, such as the privilege to stream, ends it
    /// at once.
    ///
    /// The error names the vBucket and the last cause. Its kind is that of the cause if something
    /// must be corrected ([`Authentication`](crate::ErrorKind::Authentication),
    /// [`AccessDenied`](crate::ErrorKind::AccessDenied),
    /// [`BucketNotFound`](crate::ErrorKind::BucketNotFound), [`Tls`](crate::ErrorKind::Tls),
    /// [`Unsupported`](crate::ErrorKind::Unsupported) or [`Status`](crate::ErrorKind::Status)), and
    /// [`Timeout`](crate::ErrorKind::Timeout) if the cluster did not answer.
    pub retry_timeout: Duration,
}

impl StreamOptions {
    /// Smallest [`buffer_size`](Self::buffer_size): below it the server would wait for
    /// acknowledgements after every few documents.
    pub const MIN_BUFFER_SIZE: u32 = 64 * 1024;
}

impl Default for StreamOptions {
    fn default() -> Self {
        Self {
            start: Start::default(),
            end: End::default(),
            vbuckets: None,
            content: Content::default(),
            filter: Filter::default(),
            rows: RowFilter::default(),
            batch: BatchPolicy::default(),
            buffer_size: 8 * 1024 * 1024,
            on_rollback: OnRollback::default(),
            clamp: false,
            end_exists: false,
            persisted_only: false,
            end_persisted: false,
            system_documents: false,
            history: false,
            on_purge: OnPurge::Resync,
            out_of_order: false,
            initial_deletions: InitialDeletions::default(),
            priority: None,
            backfill_order: None,
            caught_up: false,
            compressed: false,
            acknowledge: Acknowledge::default(),
            noop_interval: Duration::from_secs(20),
            retry_timeout: Duration::from_secs(300),
        }
    }
}

impl StreamOptions {
    /// Refuses options that contradict each other, as opening a stream does.
    ///
    /// # Errors
    /// [`ErrorKind::Config`](crate::ErrorKind::Config), with the options.
    pub fn check(&self) -> Result<(), Error> {
        check_batch(&self.batch)?;
        self.check_initial_deletions()?;
        Err(match &self.end {
            End::Never if self.clamp => {
                Error::option(&["clamp"], "the stream has no end to stop at")
            }
            _ if self.end_persisted && !self.persisted_only => {
                let problem = "only changes that are persisted lead to a persisted end: set both";
                Error::option(&["end_persisted", "persisted_only"], problem)
            }
            _ if self.on_purge == OnPurge::Fail => Error::option(
                &["on_purge"],
                "a stream cannot fail at a purge, which the server does not tell from other \
                 rollbacks: choose 'resync' or 'ignore'",
            )
            .with_value("fail"),
            _ if self.out_of_order && self.on_rollback == OnRollback::Fail => Error::option(
                &["out_of_order", "on_rollback"],
                "a lost connection restarts the initial load, which is reported as a rollback: \
                 choose 'emit' or 'resync'",
            ),
            _ => return Ok(()),
        })
    }
}

impl StreamOptions {
    /// Refuses first loads without deletions where they would be wrong, or do nothing.
    pub(crate) fn check_initial_deletions(&self) -> Result<(), Error> {
        let (option, problem): (&'static [_], _) = match &self.start {
            _ if self.initial_deletions == InitialDeletions::Deliver => return Ok(()),
            Start::Latest => (
                &["initial_deletions", "start"],
                "a stream that starts at the latest changes has no first load: leave one out",
            ),
            _ if self.history => (
                &["initial_deletions", "history"],
                "every version of a document would be delivered without its deletion: leave out \
                 history or deliver the deletions",
            ),
            _ if self.out_of_order => (
                &["initial_deletions", "out_of_order"],
                "servers send the deletions of loads in the order of keys: choose one",
            ),
            _ => return Ok(()),
        };
        Err(Error::option(option, problem))
    }
}

/// Refuses empty batches.
pub(crate) fn check_batch(policy: &BatchPolicy) -> Result<(), Error> {
    let least = "must be at least 1";
    match policy {
        BatchPolicy { max_rows: 0, .. } => Err(Error::option(&["max_rows"], least)),
        BatchPolicy { max_bytes: 0, .. } => Err(Error::option(&["max_bytes"], least)),
        _ => Ok(()),
    }
}
