//! What a stream of changes is asked for.

use std::collections::BTreeMap;
use std::time::Duration;

use dcp_proto::checkpoint::Checkpoint;
use dcp_proto::consumer::StreamFilter;
use dcp_proto::{CollectionPatterns, RowFilter};
use dcp_wire::{Seqno, Vbid};

use crate::{Error, ErrorKind, OnRollback};

/// Where a stream begins.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub enum Start {
    /// Before the first change of every vBucket.
    #[default]
    Earliest,
    /// After the newest change of every vBucket at the moment the stream is opened.
    Latest,
    /// Where an earlier stream of the same bucket and filter stood.
    Checkpoint(Checkpoint),
}

/// Where a stream ends.
///
/// A finite stream delivers to the end of the snapshot that holds the end seqno: a key rewritten
/// meanwhile has moved above it and would be missing otherwise.
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
    /// Whether values are sent; without them their datatype is still known.
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
    /// Those of these collections, each as `scope.collection`. If any name holds `*` for any text or
    /// `?` for one character, all of them are patterns, and collections made later that match are
    /// streamed too. Wildcards do not match scope `_system`.
    Collections(Vec<String>),
    /// By ids, as positions store it: what was dropped since is left out.
    Ids(StreamFilter, CollectionPatterns),
}

/// When a batch is handed over.
///
/// A batch ends with whichever comes first. Lingering ends one only while the application has
/// nothing else to take, so that a slow application sees larger batches instead of more of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchPolicy {
    /// Most rows in a batch.
    pub max_rows: usize,
    /// Size of a batch in bytes above which it ends; one document may overshoot it. At most
    /// [`BatchPolicy::MAX_BYTES`].
    pub max_bytes: usize,
    /// How long the first row of a batch waits for others. From 2 ms on, what a busy connection
    /// brings may gather that long before it is read.
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
    /// When it takes the next one.
    #[default]
    OnNext,
    /// When it says so, in any order ([`ChangeStream::ack`](crate::ChangeStream::ack)). A batch
    /// that never is holds its bytes of the window for ever.
    Manual,
}

/// What a stream of changes is asked for; [`StreamOptions::default`] is an endless stream of
/// everything.
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
    /// Which of their changes to deliver. Positions pass over the others, which the server sends
    /// nevertheless.
    pub rows: RowFilter,
    /// When a batch is handed over.
    pub batch: BatchPolicy,
    /// Flow-control window of each node's connection in bytes: so much may be received and not
    /// yet taken by the application, and one document more.
    pub buffer_size: u32,
    /// What happens when the server asks for a rollback.
    pub on_rollback: OnRollback,
    /// Whether the stream stops at the end seqno itself, inside a snapshot where that is: exactly
    /// the changes up to it are delivered. The rest of the snapshot may hold newer versions of keys
    /// at or below the end, so that this is only for a reader that goes on from there, as
    /// micro-batches do. Needs an end.
    pub clamp: bool,
    /// Whether the seqnos of [`End::At`] were seen to exist. A vBucket that has less was rolled
    /// back since: the stream ends with an error of kind [`ErrorKind::Rollback`] in place of waiting
    /// for changes that may never come.
    pub end_exists: bool,
    /// Whether a change is delivered only once every copy of its vBucket that is present has it on
    /// disk, so that no failover to one of them takes it back. What waits counts towards
    /// [`buffer_size`](Self::buffer_size), so that the server stops when that is full.
    ///
    /// Without effect on ephemeral buckets, which never have anything on disk: a warning is logged
    /// and [`StreamEvent::NothingPersisted`](crate::StreamEvent::NothingPersisted) told.
    pub persisted_only: bool,
    /// Whether a stream with an end is complete only once the whole snapshot its last change lies
    /// in is on the disks of all copies. Then no failover to one of them can bring back a version
    /// below the end that the snapshot left out in favour of one above it, which matters with
    /// [`clamp`](Self::clamp) to a reader that keeps no snapshots in its positions. Needs
    /// `persisted_only`.
    pub end_persisted: bool,
    /// Whether documents of scope `_system` and records of distributed transactions (keys that
    /// begin with `_txn:`) are delivered. Otherwise positions pass over them. Those of a scope or
    /// collection the filter names are delivered in any case, except records of transactions.
    pub system_documents: bool,
    /// Whether every version of a document is delivered that the server still has, in collections
    /// that keep their change history, in place of the newest one of each snapshot.
    ///
    /// A server or bucket that keeps no history refuses, which is an error of kind
    /// [`ErrorKind::Unsupported`]. Positions are the same with it and without: it may be turned on
    /// or off where a checkpoint stands, and holds for what comes after that.
    pub history: bool,
    /// Whether a position below the server's purge seqno is gone on from, and the deletions that
    /// the server has purged since are missed. Otherwise the server rolls it back to the beginning.
    /// Servers before 7.2 always do.
    pub ignore_purged_tombstones: bool,
    /// Whether the server may send the first load of a vBucket in the order of its keys, which
    /// spares it a scan of the whole vBucket where the filter names one small collection.
    ///
    /// The vBucket's position stays at its beginning until all of that has come. If the connection
    /// is lost before, the vBucket begins again, with the record of a rollback to 0 in front and
    /// another epoch: also after a restart from a checkpoint, with this option. So it needs
    /// another [`on_rollback`](Self::on_rollback) than [`OnRollback::Fail`].
    pub out_of_order: bool,
    /// Whether vBuckets that have nothing are streamed to a finite end too, so that their record of
    /// being [caught up](dcp_proto::ChangeSink::caught_up) comes.
    pub caught_up: bool,
    /// Whether the server is asked to send documents compressed that get smaller by it: less on the
    /// network for processor time at both ends. Otherwise those come compressed that lie so in the
    /// bucket. A server without it sends them as they are.
    pub compressed: bool,
    /// When a batch counts as processed.
    pub acknowledge: Acknowledge,
    /// Time between the noops the server sends; a connection on which no packet comes
    /// whole for twice as long, nor 64 KiB of one, is taken for dead.
    pub noop_interval: Duration,
    /// Longest time a vBucket may be without a stream, while it is tried again and again, before
    /// the whole stream ends with an error. Zero: nothing is tried again.
    ///
    /// It holds for opening the stream too, and for everything that a restart, a failover or a new
    /// password may pass through: connections that are refused, lost, or closed without a word, a
    /// bucket that a node does not know yet, a user that it refuses. Only what the server has never
    /// granted to this client or stream, as the right to stream, ends it at once.
    ///
    /// The error names the vBucket and the last cause. Its kind is that of the cause where something
    /// has to be put right ([`Authentication`](crate::ErrorKind::Authentication),
    /// [`AccessDenied`](crate::ErrorKind::AccessDenied),
    /// [`BucketNotFound`](crate::ErrorKind::BucketNotFound), [`Tls`](crate::ErrorKind::Tls),
    /// [`Unsupported`](crate::ErrorKind::Unsupported) or [`Status`](crate::ErrorKind::Status)), and
    /// [`Timeout`](crate::ErrorKind::Timeout) where the cluster did not answer.
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
            ignore_purged_tombstones: false,
            out_of_order: false,
            caught_up: false,
            compressed: false,
            acknowledge: Acknowledge::default(),
            noop_interval: Duration::from_secs(20),
            retry_timeout: Duration::from_secs(300),
        }
    }
}

/// Refuses options that contradict each other.
pub(crate) fn check(options: &StreamOptions) -> Result<(), Error> {
    check_batch(&options.batch)?;
    let message = match &options.end {
        End::Never if options.clamp => "clamp: the stream has no end to stop at",
        _ if options.end_persisted && !options.persisted_only => {
            "end_persisted needs persisted_only"
        }
        _ if options.out_of_order && options.on_rollback == OnRollback::Fail => {
            "out_of_order: a lost connection restarts the initial load, which is reported as a \
             rollback: set on_rollback to 'emit' or 'resync'"
        }
        _ => return Ok(()),
    };
    Err(Error::new(ErrorKind::Config, message))
}

/// Refuses batches of nothing.
fn check_batch(policy: &BatchPolicy) -> Result<(), Error> {
    if policy.max_rows == 0 || policy.max_bytes == 0 {
        let message = "a batch must have room for at least one row and one byte";
        return Err(Error::new(ErrorKind::Config, message));
    }
    Ok(())
}
