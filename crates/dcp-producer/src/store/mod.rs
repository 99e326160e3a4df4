//! A data folder: the buckets survive the process.
//!
//! The folder has a file for each bucket: `bucket.redb` for that of the options, and one named by the
//! bucket's identity for each other. A file follows the disk images in memory: after each round of
//! the flusher, new items are written in one transaction, for all copies of a vBucket at once. Each
//! node's copy is restored as it was; replicas then request the rest from the active copy, as after
//! any interruption.

mod bucket_file;
mod item;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dcp_wire::Vbid;

use crate::cluster::{Cluster, ServedBucket};
use crate::{Error, ProducerOptions};
use bucket_file::{BucketFile, BucketRecord};

const FIRST: &str = "bucket.redb";

/// Name of the file of another bucket, around its identity.
const OTHER: (&str, &str) = ("bucket-", ".redb");

/// A data folder.
pub(crate) struct Store {
    path: PathBuf,
    /// `None` once it is closed.
    open: Mutex<Option<Files>>,
}

/// The files of the buckets.
struct Files {
    first: BucketFile,
    others: Vec<(Arc<ServedBucket>, BucketFile)>,
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
        let opened = guarded(|| {
            let first = BucketFile::open(path.join(FIRST))?;
            let record = first.record()?;
            Ok((first, record))
        });
        let (first, record) = opened.map_err(unusable)?;
        if let Some(record) = record {
            check(&record, options)?;
        }
        let files = Files { first, others: Vec::new() };
        Ok(Self { path: path.to_owned(), open: Mutex::new(Some(files)) })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Files>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn unusable(&self, source: Failure) -> Error {
        Error::Data { path: self.path.clone(), source }
    }

    /// Loads the folder into a cluster that is not yet in use, or saves the cluster's new bucket to
    /// a new folder.
    pub(crate) fn load(&self, cluster: &Cluster) -> Result<(), Error> {
        let mut open = self.lock();
        let Some(files) = open.as_mut() else { return Ok(()) };
        guarded(|| files.load(&self.path, cluster)).map_err(|source| self.unusable(source))
    }

    /// Stores newly persisted changes of `vbids` of a bucket, or that the bucket is gone.
    pub(crate) fn round(
        &self,
        cluster: &Cluster,
        served: &Arc<ServedBucket>,
        vbids: impl IntoIterator<Item = Vbid>,
    ) -> Result<(), Error> {
        let mut open = self.lock();
        let Some(files) = open.as_mut() else { return Ok(()) };
        let round = || {
            if !cluster.has(served) {
                return files.forget(served);
            }
            match files.of(&self.path, cluster, served)? {
                Some(file) => {
                    file.mark(vbids);
                    file.round(cluster, served)
                }
                None => Ok(()),
            }
        };
        guarded(round).map_err(|source| self.unusable(source))
    }

    /// Stores everything and closes the folder; active copies continue their history when the
    /// folder is opened again.
    pub(crate) fn close(&self, cluster: &Cluster) -> Result<(), Error> {
        let mut open = self.lock();
        let Some(mut files) = open.take() else { return Ok(()) };
        guarded(|| files.finish(&self.path, cluster)).map_err(|source| self.unusable(source))
    }
}

impl Files {
    fn load(&mut self, folder: &Path, cluster: &Cluster) -> Result<(), Failure> {
        let (mut resumed, mut epoch, mut failed_over) = (Vec::new(), None, Vec::new());
        if let Some(record) = self.first.record()? {
            resumed.push(self.first.load(&record, cluster.first())?);
            (epoch, failed_over) = (Some(record.epoch), record.failed_over);
        }
        for path in others(folder)? {
            let file = BucketFile::open(path)?;
            let Some(record) = file.record()? else {
                // The process ended before the bucket was stored.
                std::fs::remove_file(file.path)?;
                continue;
            };
            check_format(&record).map_err(|error| error.to_string())?;
            let settings = record.settings().ok_or("the settings of a bucket are damaged")?;
            let served = cluster.new_bucket(&settings);
            if record.vbuckets != served.bucket.vbucket_count() {
                let (name, vbuckets) = (record.name, record.vbuckets);
                return Err(format!("bucket `{name}` has {vbuckets} vBuckets").into());
            }
            resumed.push(file.load(&record, Arc::clone(&served))?);
            epoch = epoch.max(Some(record.epoch));
            self.others.push((served, file));
        }
        if let Some(epoch) = epoch {
            let epoch = epoch.checked_add(1).ok_or("the epoch is damaged")?;
            cluster.resume(resumed, epoch, &failed_over);
        }
        // Also marks the files as not clean from now on.
        self.first.mark(cluster.first().bucket.vbids());
        self.first.round(cluster, &cluster.first())?;
        for (served, file) in &mut self.others {
            file.mark(served.bucket.vbids());
            file.round(cluster, served)?;
        }
        Ok(())
    }

    /// The file of a bucket of the cluster; `None` if the bucket is not created yet.
    fn of(
        &mut self,
        folder: &Path,
        cluster: &Cluster,
        served: &Arc<ServedBucket>,
    ) -> Result<Option<&mut BucketFile>, Failure> {
        if Arc::ptr_eq(served, &cluster.first()) {
            return Ok(Some(&mut self.first));
        }
        let known = self.others.iter().position(|(known, _)| Arc::ptr_eq(known, served));
        if known.is_none() {
            let uuid = served.uuid();
            if uuid.is_empty() {
                return Ok(None);
            }
            let (before, after) = OTHER;
            let mut file = BucketFile::open(folder.join(format!("{before}{uuid}{after}")))?;
            file.mark(served.bucket.vbids());
            self.others.push((Arc::clone(served), file));
        }
        let at = known.unwrap_or(self.others.len().saturating_sub(1));
        Ok(self.others.get_mut(at).map(|(_, file)| file))
    }

    /// Deletes the file of a bucket that is not the cluster's any more.
    fn forget(&mut self, served: &Arc<ServedBucket>) -> Result<(), Failure> {
        let at = self.others.iter().position(|(known, _)| Arc::ptr_eq(known, served));
        if let Some(at) = at {
            let (_, BucketFile { path, .. }) = self.others.swap_remove(at);
            std::fs::remove_file(path)?;
        }
        Ok(())
    }

    fn finish(&mut self, folder: &Path, cluster: &Cluster) -> Result<(), Failure> {
        let gone: Vec<_> = self.others.iter().map(|(served, _)| Arc::clone(served)).collect();
        for served in gone.iter().filter(|served| !cluster.has(served)) {
            self.forget(served)?;
        }
        for served in cluster.buckets() {
            if let Some(file) = self.of(folder, cluster, &served)? {
                file.finish(cluster, &served)?;
            }
        }
        Ok(())
    }
}

/// The files of the buckets other than that of the options.
fn others(folder: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let is_one = |name: &str| name.starts_with(OTHER.0) && name.ends_with(OTHER.1);
        if entry.file_name().to_str().is_some_and(is_one) {
            paths.push(entry.path());
        }
    }
    // In the same order each time.
    paths.sort();
    Ok(paths)
}

/// Error of the storage library or the operating system.
pub(crate) type Failure = Box<dyn std::error::Error + Send + Sync>;

/// Turns a panic into an error: the storage library asserts what damaged files violate.
fn guarded<T>(op: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    let done = catch_unwind(AssertUnwindSafe(op));
    done.unwrap_or_else(|_| Err("the file is damaged".into()))
}

/// Checks that the folder belongs to the configured bucket.
fn check(record: &BucketRecord, options: &ProducerOptions) -> Result<(), Error> {
    let invalid = |option, reason| Err(Error::InvalidOption { option, reason });
    check_format(record)?;
    let BucketRecord { name, vbuckets, .. } = record;
    if *name != options.bucket {
        return invalid("bucket", format!("the data folder has the bucket `{name}`"));
    }
    if *vbuckets != options.vbuckets {
        return invalid("vbuckets", format!("the bucket in the data folder has {vbuckets}"));
    }
    Ok(())
}

fn check_format(record: &BucketRecord) -> Result<(), Error> {
    let (format, known) = (record.format, BucketRecord::FORMAT);
    if format == known {
        return Ok(());
    }
    let reason = format!(
        "the folder has format {format}, but this version uses {known}: use another folder, or \
         delete this one"
    );
    Err(Error::InvalidOption { option: "data", reason })
}

/// Creates the folder if necessary, writable only by its owner.
fn own_folder(path: &Path) -> std::io::Result<()> {
    let mut folder = std::fs::DirBuilder::new();
    folder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut folder, 0o700);
    folder.create(path)
}
