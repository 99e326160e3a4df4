//! A data folder: the bucket survives the process.
//!
//! The folder follows the disk images in memory: after each round of the flusher, new items are
//! written in one transaction, for all copies of a vBucket at once. Each node's copy is restored
//! as it was; replicas then request the rest from the active copy, as after any interruption.

mod item;

use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dcp_wire::Vbid;
use redb::{Database, ReadableTable, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bucket::{Copies, Copy, Manifest, Stored, VBucketRecord};
use crate::cluster::Cluster;
use crate::{Error, ProducerOptions};

const FILE: &str = "bucket.redb";
const BUCKET: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("bucket");
/// [`CopyRecords`] by vBucket.
const VBUCKETS: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("vbuckets");
/// By vBucket, node and seqno.
const ITEMS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("items");
/// The only key of `BUCKET`.
const RECORD: &str = "record";

/// What is stored of the bucket as a whole.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
struct BucketRecord {
    format: u32,
    name: String,
    vbuckets: u16,
    /// `None` while it is dropped.
    uuid: Option<String>,
    manifest: Value,
    /// Epoch of the cluster map.
    epoch: i64,
    /// Nodes that were failed over and not added again.
    #[serde(default)]
    failed_over: Vec<usize>,
}

impl BucketRecord {
    const FORMAT: u32 = 2;

    fn of(cluster: &Cluster) -> Self {
        let map = cluster.map();
        Self {
            format: Self::FORMAT,
            name: cluster.bucket_name().to_owned(),
            vbuckets: cluster.bucket.vbucket_count(),
            uuid: map.bucket_uuid.as_deref().map(str::to_owned),
            manifest: map.manifest.to_stored(),
            epoch: map.version.epoch,
            failed_over: map.failed_over(),
        }
    }
}

/// Records of the copies of a vBucket, by node, the active one first.
type CopyRecords = Vec<(u16, VBucketRecord)>;

/// A data folder.
pub(crate) struct Store {
    path: PathBuf,
    /// `None` once it is closed.
    open: Mutex<Option<Open>>,
}

struct Open {
    database: Database,
    /// vBuckets that may have more to store.
    pending: BTreeSet<Vbid>,
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Store").field("path", &self.path).finish_non_exhaustive()
    }
}

impl Store {
    /// Opens a folder, which is created if it does not exist.
    pub(crate) fn open(path: &Path, options: &ProducerOptions) -> Result<Self, Error> {
        let unusable = |source: Failure| Error::Data { path: path.to_owned(), source };
        own_folder(path).map_err(|error| unusable(error.into()))?;
        let file = own_file(&path.join(FILE)).map_err(|error| unusable(error.into()))?;
        let opened = guarded(|| {
            let database = Database::builder().create_file(file)?;
            let record = read_record(&database)?;
            Ok((database, record))
        });
        let (database, record) = opened.map_err(unusable)?;
        if let Some(record) = record {
            check(&record, options)?;
        }
        let open = Open { database, pending: BTreeSet::new() };
        Ok(Self { path: path.to_owned(), open: Mutex::new(Some(open)) })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unusable(&self, source: Failure) -> Error {
        Error::Data { path: self.path.clone(), source }
    }

    /// Loads the folder into a cluster that is not yet in use, or saves the cluster's new bucket to
    /// a new folder.
    pub(crate) fn load(&self, cluster: &Cluster) -> Result<(), Error> {
        let mut open = self.lock();
        let Some(open) = open.as_mut() else { return Ok(()) };
        let loaded = guarded(|| {
            open.load(cluster)?;
            open.pending.extend(cluster.bucket.vbids());
            // Also marks the folder as not clean from now on.
            open.round(cluster)
        });
        loaded.map_err(|source| self.unusable(source))
    }

    /// Stores newly persisted changes of `vbids`.
    pub(crate) fn round(
        &self,
        cluster: &Cluster,
        vbids: impl IntoIterator<Item = Vbid>,
    ) -> Result<(), Error> {
        let mut open = self.lock();
        let Some(open) = open.as_mut() else { return Ok(()) };
        open.pending.extend(vbids);
        guarded(|| open.round(cluster)).map_err(|source| self.unusable(source))
    }

    /// Stores everything and closes the folder; active copies continue their history when the
    /// folder is opened again.
    pub(crate) fn close(&self, cluster: &Cluster) -> Result<(), Error> {
        let mut open = self.lock();
        let Some(mut open) = open.take() else { return Ok(()) };
        guarded(|| open.finish(cluster)).map_err(|source| self.unusable(source))
    }
}

/// Error of the storage library or the operating system.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Turns a panic into an error: the storage library asserts what damaged files violate.
fn guarded<T>(op: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let done = catch_unwind(AssertUnwindSafe(op));
    done.unwrap_or_else(|_| Err("the file is damaged".into()))
}

fn read_record(database: &Database) -> Result<Option<BucketRecord>, Failure> {
    let transaction = database.begin_read()?;
    let table = match transaction.open_table(BUCKET) {
        Ok(table) => table,
        Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let record = table.get(RECORD)?;
    Ok(record.map(|record| serde_json::from_slice(record.value())).transpose()?)
}

/// Checks that the folder belongs to the configured bucket.
fn check(record: &BucketRecord, options: &ProducerOptions) -> Result<(), Error> {
    let invalid = |option, reason| Err(Error::InvalidOption { option, reason });
    let BucketRecord { format, name, vbuckets, .. } = record;
    if *format != BucketRecord::FORMAT {
        let known = BucketRecord::FORMAT;
        let reason = format!(
            "the folder has format {format}, but this version uses {known}: use another folder, or \
             delete this one"
        );
        return invalid("data", reason);
    }
    if *name != options.bucket {
        return invalid("bucket", format!("the data folder has the bucket `{name}`"));
    }
    if *vbuckets != options.vbuckets {
        return invalid("vbuckets", format!("the bucket in the data folder has {vbuckets}"));
    }
    Ok(())
}

impl Open {
    /// Loads the folder into `cluster`.
    fn load(&self, cluster: &Cluster) -> Result<(), Failure> {
        let Some(record) = read_record(&self.database)? else {
            return Ok(());
        };
        let manifest = Manifest::from_stored(&record.manifest).ok_or("the manifest is damaged")?;
        let epoch = record.epoch.checked_add(1).ok_or("the epoch is damaged")?;
        if record.uuid.is_some() {
            let transaction = self.database.begin_read()?;
            let records = transaction.open_table(VBUCKETS)?;
            let items = transaction.open_table(ITEMS)?;
            for vbid in cluster.bucket.vbids() {
                if let Some(found) = records.get(vbid.0)? {
                    let copies = read_copies(cluster, vbid, found.value(), &items)?;
                    cluster.bucket.with_copies(vbid, |held| held.restore(copies));
                }
            }
        }
        cluster.resume(record.uuid.map(Into::into), manifest, epoch, &record.failed_over);
        Ok(())
    }

    fn round(&mut self, cluster: &Cluster) -> Result<(), Failure> {
        let mut done = Vec::new();
        let transaction = self.database.begin_write()?;
        {
            let mut records = transaction.open_table(VBUCKETS)?;
            let mut items = transaction.open_table(ITEMS)?;
            for &vbid in &self.pending {
                done.push((vbid, write_copies(cluster, vbid, &mut records, &mut items)?));
            }
        }
        // Last, so that the manifest is never older than that of the vBuckets.
        write_bucket(&transaction, cluster)?;
        transaction.commit()?;
        self.pending.clear();
        for (vbid, stored) in done {
            cluster.bucket.note_stored(vbid, &stored);
        }
        Ok(())
    }

    /// Stores everything, and marks the copies of all running nodes as complete.
    fn finish(&mut self, cluster: &Cluster) -> Result<(), Failure> {
        // The first round may commit durable writes, which the second stores.
        for _ in 0..2 {
            for vbid in cluster.bucket.vbids() {
                cluster.bucket.each_copy(vbid, |copy| {
                    copy.persist_everything();
                    false
                });
                self.pending.insert(vbid);
            }
            self.round(cluster)?;
        }
        let transaction = self.database.begin_write()?;
        {
            let mut records = transaction.open_table(VBUCKETS)?;
            for vbid in cluster.bucket.vbids() {
                let last = cluster.bucket.with_copies(vbid, |copies| copies.last_records());
                let last = last.unwrap_or_default().into_iter();
                let last = last.map(|(node, record)| Ok((number(node)?, record)));
                write_records(&mut records, vbid, last.collect::<Result<_, Failure>>()?)?;
            }
        }
        transaction.commit()?;
        Ok(())
    }
}

type ItemTable<'a> = redb::Table<'a, &'static [u8], &'static [u8]>;
type RecordTable<'a> = redb::Table<'a, u16, &'static [u8]>;

/// Stored copies of a vBucket.
fn read_copies(
    cluster: &Cluster,
    vbid: Vbid,
    records: &[u8],
    items: &impl ReadableTable<&'static [u8], &'static [u8]>,
) -> Result<Vec<Copy>, Failure> {
    let mut copies: Vec<Copy> = Vec::new();
    for (node, record) in serde_json::from_slice::<CopyRecords>(records)? {
        let mut copy = cluster.bucket.new_copy(usize::from(node), vbid);
        if copies.iter().any(|other| other.node == copy.node) {
            return Err("a node has two copies of a vBucket".into());
        }
        if !copies.is_empty() {
            copy.make_replica();
        }
        let (first, last) = item::keys_of(vbid, node);
        let mut found = Vec::new();
        for entry in items.range(&first[..]..=&last[..])? {
            found.push(item::decode(entry?.1.value())?);
        }
        copy.vbucket.restore(&record, found, cluster.bucket.chance().vbuuid())?;
        copies.push(copy);
    }
    Ok(copies)
}

/// Writes new changes of the copies of a vBucket; returns up to where each is stored then.
fn write_copies(
    cluster: &Cluster,
    vbid: Vbid,
    records: &mut RecordTable<'_>,
    items: &mut ItemTable<'_>,
) -> Result<Vec<(usize, Stored)>, Failure> {
    let unstored = cluster.bucket.with_copies(vbid, Copies::unstored).unwrap_or_default();
    let (mut stored, mut kept) = (Vec::new(), CopyRecords::new());
    for (node, unstored) in unstored {
        let place = number(node)?;
        if unstored.is_whole {
            forget(items, vbid, place)?;
        }
        for seqno in &unstored.gone {
            items.remove(&item::key(vbid, place, *seqno)[..])?;
        }
        for item in &unstored.items {
            items.insert(&item::key(vbid, place, item.seqno)[..], &item::encode(item)?[..])?;
        }
        stored.push((node, unstored.then));
        kept.push((place, unstored.record));
    }
    for node in write_records(records, vbid, kept)? {
        forget(items, vbid, node)?;
    }
    Ok(stored)
}

/// Writes the records of the copies of a vBucket; returns the nodes that no longer have one.
fn write_records(
    records: &mut RecordTable<'_>,
    vbid: Vbid,
    kept: CopyRecords,
) -> Result<Vec<u16>, Failure> {
    let bytes = serde_json::to_vec(&kept)?;
    let before = match records.get(vbid.0)? {
        Some(before) if before.value() == bytes => return Ok(Vec::new()),
        Some(before) => serde_json::from_slice::<CopyRecords>(before.value())?,
        None => CopyRecords::new(),
    };
    // Without copies, the bucket was dropped or the vBucket is lost.
    if kept.is_empty() {
        records.remove(vbid.0)?;
    } else {
        records.insert(vbid.0, &bytes[..])?;
    }
    let is_gone = |node: &u16| !kept.iter().any(|(kept, _)| kept == node);
    Ok(before.into_iter().map(|(node, _)| node).filter(is_gone).collect())
}

/// A node's number in the folder.
fn number(node: usize) -> Result<u16, Failure> {
    Ok(u16::try_from(node)?)
}

fn forget(items: &mut ItemTable<'_>, vbid: Vbid, node: u16) -> Result<(), Failure> {
    let (first, last) = item::keys_of(vbid, node);
    Ok(items.retain_in(&first[..]..=&last[..], |_, _| false)?)
}

fn write_bucket(transaction: &WriteTransaction, cluster: &Cluster) -> Result<(), Failure> {
    let mut table = transaction.open_table(BUCKET)?;
    let record = serde_json::to_vec(&BucketRecord::of(cluster))?;
    let is_known = table.get(RECORD)?.is_some_and(|known| known.value() == record);
    if !is_known {
        table.insert(RECORD, &record[..])?;
    }
    Ok(())
}

/// Creates the folder if necessary, writable only by its owner.
fn own_folder(path: &Path) -> std::io::Result<()> {
    let mut folder = std::fs::DirBuilder::new();
    folder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut folder, 0o700);
    folder.create(path)
}

/// Opens the file, readable only by its owner, since it contains documents.
fn own_file(path: &Path) -> std::io::Result<std::fs::File> {
    let mut options = std::fs::OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let file = options.open(path)?;
    // Files of earlier releases were readable by others.
    #[cfg(unix)]
    file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
    Ok(file)
}
