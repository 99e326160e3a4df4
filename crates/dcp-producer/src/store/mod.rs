//! A data folder: the bucket survives the process.
//!
//! The folder follows the disk image in memory: after each round of the flusher, new items are
//! written in one transaction. Only the active copy of each vBucket is stored; replicas are filled
//! from it.

mod item;

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use dcp_wire::Vbid;
use redb::{Database, ReadableTable, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bucket::{Manifest, Stored, Unstored, VBucketRecord};
use crate::cluster::Cluster;
use crate::{Error, ProducerOptions};

const FILE: &str = "bucket.redb";
const BUCKET: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("bucket");
const VBUCKETS: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("vbuckets");
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
}

impl BucketRecord {
    const FORMAT: u32 = 1;

    fn of(cluster: &Cluster) -> Self {
        let map = cluster.map();
        Self {
            format: Self::FORMAT,
            name: cluster.bucket_name().to_owned(),
            vbuckets: cluster.bucket.vbucket_count(),
            uuid: map.bucket_uuid.as_deref().map(str::to_owned),
            manifest: map.manifest.to_stored(),
            epoch: map.version.epoch,
        }
    }
}

/// A data folder.
pub(crate) struct Store {
    path: PathBuf,
    /// `None` once it is closed.
    open: Mutex<Option<Open>>,
}

struct Open {
    database: Database,
    /// How much of each vBucket is stored.
    stored: Vec<Stored>,
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
        let database =
            Database::builder().create_file(file).map_err(|error| unusable(error.into()))?;
        let record = read_record(&database).map_err(unusable)?;
        if let Some(record) = record {
            check(&record, options)?;
        }
        let stored = vec![Stored::default(); usize::from(options.vbuckets)];
        let open = Open { database, stored, pending: BTreeSet::new() };
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
        let known = open.load(cluster).map_err(|source| self.unusable(source))?;
        if !known {
            open.pending.extend(cluster.bucket.vbids());
        }
        // Also marks the folder as not clean from now on.
        open.round(cluster).map_err(|source| self.unusable(source))
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
        open.round(cluster).map_err(|source| self.unusable(source))
    }

    /// Stores everything and closes the folder; active copies continue their history when the
    /// folder is opened again.
    pub(crate) fn close(&self, cluster: &Cluster) -> Result<(), Error> {
        let mut open = self.lock();
        let Some(mut open) = open.take() else { return Ok(()) };
        open.pending.extend(cluster.bucket.vbids());
        open.round(cluster)
            .and_then(|()| open.finish(cluster))
            .map_err(|source| self.unusable(source))
    }
}

/// Error of the storage library or the operating system.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

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
        return invalid("data", format!("the folder has the unknown format {format}"));
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
    /// Loads the folder; returns whether there was anything.
    fn load(&mut self, cluster: &Cluster) -> Result<bool, Failure> {
        let Some(record) = read_record(&self.database)? else {
            return Ok(false);
        };
        let manifest = Manifest::from_stored(&record.manifest).ok_or("the manifest is damaged")?;
        cluster.resume(record.uuid.map(Into::into), manifest, record.epoch + 1);
        let transaction = self.database.begin_write()?;
        {
            let mut records = transaction.open_table(VBUCKETS)?;
            let items = transaction.open_table(ITEMS)?;
            for vbid in cluster.bucket.vbids() {
                let Some(record) = records.get(vbid.0)?.map(|found| found.value().to_vec()) else {
                    continue;
                };
                let record: VBucketRecord = serde_json::from_slice(&record)?;
                let (from, below) = item::keys_of(vbid);
                let mut found = Vec::new();
                for entry in items.range(&from[..]..&below[..])? {
                    found.push(item::decode(entry?.1.value())?);
                }
                found.sort_unstable_by_key(|item| item.seqno);
                let restored = cluster.bucket.with_first_copy(vbid, |vbucket| {
                    (
                        vbucket.restore(&record, found, cluster.bucket.chance().vbuuid()),
                        vbucket.record(false),
                    )
                });
                let Some((stored, record)) = restored else { continue };
                records.insert(vbid.0, &serde_json::to_vec(&record)?[..])?;
                if let Some(slot) = self.stored.get_mut(vbid.index()) {
                    *slot = stored;
                }
                cluster.bucket.rearrange(vbid, crate::bucket::Copies::replicate);
            }
        }
        transaction.commit()?;
        cluster.bring_forward();
        self.pending.extend(cluster.bucket.vbids());
        Ok(true)
    }

    fn round(&mut self, cluster: &Cluster) -> Result<(), Failure> {
        let mut done = Vec::new();
        let transaction = self.database.begin_write()?;
        {
            let mut records = transaction.open_table(VBUCKETS)?;
            let mut items = transaction.open_table(ITEMS)?;
            for &vbid in &self.pending {
                let known = self.stored.get(vbid.index()).copied().unwrap_or_default();
                let looked =
                    cluster.bucket.with_first_copy(vbid, |vbucket| vbucket.unstored(known));
                let then = match looked {
                    Some(None) => continue,
                    Some(Some(unstored)) => {
                        if unstored.is_whole {
                            forget(&mut items, vbid)?;
                        }
                        write(&mut records, &mut items, vbid, &unstored)?;
                        unstored.then
                    }
                    // The bucket is dropped, or the vBucket is lost.
                    None => {
                        forget(&mut items, vbid)?;
                        records.remove(vbid.0)?;
                        Stored::default()
                    }
                };
                done.push((vbid, then));
            }
        }
        // Last, so that the manifest is never older than that of the vBuckets.
        write_bucket(&transaction, cluster)?;
        transaction.commit()?;
        self.pending.clear();
        for (vbid, then) in done {
            if let Some(stored) = self.stored.get_mut(vbid.index()) {
                *stored = then;
            }
            cluster.bucket.with_first_copy(vbid, |vbucket| vbucket.note_stored(then));
        }
        Ok(())
    }

    /// Marks all vBuckets on running nodes as complete.
    fn finish(&self, cluster: &Cluster) -> Result<(), Failure> {
        let transaction = self.database.begin_write()?;
        {
            let mut records = transaction.open_table(VBUCKETS)?;
            for vbid in cluster.bucket.vbids() {
                let record = cluster.bucket.with_active(vbid, |vbucket| vbucket.record(true));
                if let Some(record) = record {
                    records.insert(vbid.0, &serde_json::to_vec(&record)?[..])?;
                }
            }
        }
        transaction.commit()?;
        Ok(())
    }
}

type Items<'a> = redb::Table<'a, &'static [u8], &'static [u8]>;
type Records<'a> = redb::Table<'a, u16, &'static [u8]>;

fn forget(items: &mut Items<'_>, vbid: Vbid) -> Result<(), Failure> {
    let (from, below) = item::keys_of(vbid);
    Ok(items.retain_in(&from[..]..&below[..], |_, _| false)?)
}

fn write(
    records: &mut Records<'_>,
    items: &mut Items<'_>,
    vbid: Vbid,
    unstored: &Unstored,
) -> Result<(), Failure> {
    for item in &unstored.items {
        items.insert(&item::key(vbid, item)[..], &item::encode(item)?[..])?;
    }
    records.insert(vbid.0, &serde_json::to_vec(&unstored.record)?[..])?;
    Ok(())
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
