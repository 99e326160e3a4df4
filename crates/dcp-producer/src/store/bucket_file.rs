//! The file of one bucket.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use dcp_wire::Vbid;
use redb::{Database, ReadableTable, TableDefinition, WriteTransaction};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Failure, item};
use crate::ProducerOptions;
use crate::bucket::{Bucket, Copies, Copy, Flushed, Manifest, VBucketRecord};
use crate::cluster::{BucketSettings, Cluster, Resumed, ServedBucket};

const BUCKET: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("bucket");
/// [`CopyRecords`] by vBucket.
const VBUCKETS: TableDefinition<'_, u16, &[u8]> = TableDefinition::new("vbuckets");
/// By vBucket, node and seqno.
const ITEMS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("items");
/// The only key of `BUCKET`.
const RECORD: &str = "record";

/// What is stored of the bucket as a whole.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
pub(super) struct BucketRecord {
    pub(super) format: u32,
    pub(super) name: String,
    pub(super) vbuckets: u16,
    /// `None` while it is dropped.
    uuid: Option<String>,
    manifest: Value,
    /// Epoch of the cluster map.
    pub(super) epoch: i64,
    /// Nodes that were failed over and not added again.
    #[serde(default)]
    pub(super) failed_over: Vec<usize>,
    /// Not of the bucket of the options in files of earlier versions.
    #[serde(default)]
    settings: Option<Settings>,
}

/// Flushed settings of a bucket.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq, Eq)]
struct Settings {
    replicas: u8,
    is_ephemeral: bool,
    quota_bytes: usize,
    may_flush: bool,
}

impl BucketRecord {
    pub(super) const FORMAT: u32 = 2;

    fn of(cluster: &Cluster, served: &ServedBucket) -> Self {
        let (nodes, map) = (cluster.map(), served.map());
        let BucketSettings { name, replicas, is_ephemeral, quota_bytes, may_flush } =
            served.settings();
        Self {
            format: Self::FORMAT,
            name,
            vbuckets: served.bucket.vbucket_count(),
            uuid: map.bucket_uuid.as_deref().map(str::to_owned),
            manifest: map.manifest.to_stored(),
            epoch: nodes.version.epoch,
            failed_over: nodes.failed_over(),
            settings: Some(Settings { replicas, is_ephemeral, quota_bytes, may_flush }),
        }
    }

    /// The settings of a bucket other than that of the options.
    pub(super) fn settings(&self) -> Option<BucketSettings> {
        let Settings { replicas, is_ephemeral, quota_bytes, may_flush } = self.settings.clone()?;
        let is_valid = ProducerOptions::is_bucket_name(&self.name)
            && replicas <= ProducerOptions::MAX_REPLICAS;
        let name = self.name.clone();
        let settings = BucketSettings { name, replicas, is_ephemeral, quota_bytes, may_flush };
        is_valid.then_some(settings)
    }
}

/// Records of the copies of a vBucket, by node, the active one first.
type CopyRecords = Vec<(u16, VBucketRecord)>;

/// The file of a bucket.
pub(super) struct BucketFile {
    pub(super) path: PathBuf,
    database: Database,
    /// vBuckets that may have more to store.
    pending: BTreeSet<Vbid>,
}

impl BucketFile {
    /// Opens a file, which is created if it does not exist.
    pub(super) fn open(path: PathBuf) -> Result<Self, Failure> {
        let database = Database::builder().create_file(own_file(&path)?)?;
        Ok(Self { path, database, pending: BTreeSet::new() })
    }

    /// What is stored of the bucket as a whole; `None` in a new file.
    pub(super) fn record(&self) -> Result<Option<BucketRecord>, Failure> {
        let transaction = self.database.begin_read()?;
        let table = match transaction.open_table(BUCKET) {
            Ok(table) => table,
            Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let record = table.get(RECORD)?;
        Ok(record.map(|record| serde_json::from_slice(record.value())).transpose()?)
    }

    /// Stores these vBuckets in the next round.
    pub(super) fn mark(&mut self, vbids: impl IntoIterator<Item = Vbid>) {
        self.pending.extend(vbids);
    }

    /// Loads the file into `served`, which is not yet in use.
    pub(super) fn load(
        &self,
        record: &BucketRecord,
        served: Arc<ServedBucket>,
    ) -> Result<Resumed, Failure> {
        let manifest = Manifest::from_stored(&record.manifest).ok_or("the manifest is damaged")?;
        let has_disk = record.settings.as_ref().is_none_or(|settings| !settings.is_ephemeral);
        if record.uuid.is_some() && has_disk {
            let transaction = self.database.begin_read()?;
            let records = transaction.open_table(VBUCKETS)?;
            let items = transaction.open_table(ITEMS)?;
            for vbid in served.bucket.vbids() {
                if let Some(found) = records.get(vbid.0)? {
                    let copies = read_copies(&served.bucket, vbid, found.value(), &items)?;
                    served.bucket.with_copies(vbid, |held| held.restore(copies));
                }
            }
        }
        Ok(Resumed { served, uuid: record.uuid.as_deref().map(Into::into), manifest })
    }

    pub(super) fn round(
        &mut self,
        cluster: &Cluster,
        served: &ServedBucket,
    ) -> Result<(), Failure> {
        if served.bucket.is_ephemeral() {
            // It has no disk: after a restart, a bucket with its name and UUID is empty.
            self.pending.clear();
        }
        let mut done = Vec::new();
        let transaction = self.database.begin_write()?;
        {
            let mut records = transaction.open_table(VBUCKETS)?;
            let mut items = transaction.open_table(ITEMS)?;
            for &vbid in &self.pending {
                done.push((vbid, write_copies(&served.bucket, vbid, &mut records, &mut items)?));
            }
        }
        // Last, so that the manifest is never older than that of the vBuckets.
        write_bucket(&transaction, &BucketRecord::of(cluster, served))?;
        transaction.commit()?;
        self.pending.clear();
        for (vbid, stored) in done {
            served.bucket.note_flushed(vbid, &stored);
        }
        Ok(())
    }

    /// Stores everything, and marks the copies of all running nodes as complete.
    pub(super) fn finish(
        &mut self,
        cluster: &Cluster,
        served: &ServedBucket,
    ) -> Result<(), Failure> {
        let bucket = &served.bucket;
        if bucket.is_ephemeral() {
            return self.round(cluster, served);
        }
        // The first round may commit durable writes, which the second stores.
        for _ in 0..2 {
            for vbid in bucket.vbids() {
                bucket.each_copy(vbid, |copy| {
                    copy.persist_everything();
                    false
                });
                self.pending.insert(vbid);
            }
            self.round(cluster, served)?;
        }
        let transaction = self.database.begin_write()?;
        {
            let mut records = transaction.open_table(VBUCKETS)?;
            for vbid in bucket.vbids() {
                let last = bucket.with_copies(vbid, |copies| copies.last_records());
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

/// Flushed copies of a vBucket.
fn read_copies(
    bucket: &Bucket,
    vbid: Vbid,
    records: &[u8],
    items: &impl ReadableTable<&'static [u8], &'static [u8]>,
) -> Result<Vec<Copy>, Failure> {
    let mut copies: Vec<Copy> = Vec::new();
    for (node, record) in serde_json::from_slice::<CopyRecords>(records)? {
        let mut copy = bucket.new_copy(usize::from(node), vbid);
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
        copy.vbucket.restore(&record, found, bucket.chance().vbuuid())?;
        copies.push(copy);
    }
    Ok(copies)
}

/// Writes new changes of the copies of a vBucket; returns up to where each is stored then.
fn write_copies(
    bucket: &Bucket,
    vbid: Vbid,
    records: &mut RecordTable<'_>,
    items: &mut ItemTable<'_>,
) -> Result<Vec<(usize, Flushed)>, Failure> {
    let next_flush = bucket.with_copies(vbid, Copies::next_flush).unwrap_or_default();
    let (mut stored, mut kept) = (Vec::new(), CopyRecords::new());
    for (node, next_flush) in next_flush {
        let place = number(node)?;
        if next_flush.is_whole {
            forget(items, vbid, place)?;
        }
        for seqno in &next_flush.gone {
            items.remove(&item::key(vbid, place, *seqno)[..])?;
        }
        for item in &next_flush.items {
            items.insert(&item::key(vbid, place, item.seqno)[..], &item::encode(item)?[..])?;
        }
        stored.push((node, next_flush.then));
        kept.push((place, next_flush.record));
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

fn write_bucket(transaction: &WriteTransaction, record: &BucketRecord) -> Result<(), Failure> {
    let mut table = transaction.open_table(BUCKET)?;
    let record = serde_json::to_vec(record)?;
    let is_known = table.get(RECORD)?.is_some_and(|known| known.value() == record);
    if !is_known {
        table.insert(RECORD, &record[..])?;
    }
    Ok(())
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
