//! Stores for checkpoints.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use dcp_proto::checkpoint::Checkpoint;
use dcp_wire::Seqno;

use crate::{CheckpointLock, Error, ErrorKind, load_checkpoint, save_checkpoint};

/// Stores one checkpoint: in a file, in memory, or in another implementation.
///
/// Save a batch's checkpoint once the batch was processed: in one transaction with its results, or
/// afterwards, never before. A stream that [starts](crate::Start::Checkpoint) from a checkpoint
/// checks that it belongs to the bucket and the filter. Calls may block: make them from a blocking
/// task.
pub trait CheckpointStore: Debug + Send + Sync {
    /// The last saved checkpoint; `None` if none was ever saved.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`] if it cannot be read or is damaged, which must never be treated as
    /// none: the reader would start over, or skip changes.
    fn load(&self) -> Result<Option<Checkpoint>, Error>;

    /// Replaces the stored checkpoint durably and atomically.
    ///
    /// The stores of this crate never go back: of two readers that share one, the slower gets an
    /// error, and the checkpoint of the faster one stays. A rollback does not count as going back.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`] if it cannot be stored, is behind the stored one in any vBucket,
    /// lacks one, or belongs to another bucket; the stored one stays.
    fn save(&self, checkpoint: &Checkpoint) -> Result<(), Error>;
}

/// Stores a checkpoint in a file, like [`save_checkpoint`].
///
/// A save locks the file `<name>.lock` in the same folder, which stays there, so that no other
/// writer saves between its check and its write. To go back on purpose, use [`save_checkpoint`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileStore {
    path: PathBuf,
}

impl FileStore {
    /// A store in the file `path`, which is created by the first save.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// The file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl CheckpointStore for FileStore {
    fn load(&self) -> Result<Option<Checkpoint>, Error> {
        // A dangling link is an error, not a first start.
        if self.path.symlink_metadata().is_err_and(|error| is_absence(&error)) {
            return Ok(None);
        }
        load_checkpoint(&self.path).map(Some)
    }

    fn save(&self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let _lock = CheckpointLock::acquire(&self.path)?;
        if let Some(kept) = self.load()? {
            check_ahead(checkpoint, &kept)?;
        }
        save_checkpoint(checkpoint, &self.path)
    }
}

/// Fails if `checkpoint` is behind `kept` in any vBucket, lacks one, or belongs to another bucket.
///
/// # Errors
/// [`ErrorKind::Checkpoint`], naming the first such vBucket.
pub fn check_ahead(checkpoint: &Checkpoint, kept: &Checkpoint) -> Result<(), Error> {
    let refused = |why: String| {
        let message = format!(
            "{why}. Another reader uses the same store: stop one of them, or give each its own. To \
             read again on purpose, remove the stored checkpoint first"
        );
        Err(Error::new(ErrorKind::Checkpoint, message))
    };
    let (new, old) = (checkpoint.bucket_uuid(), kept.bucket_uuid());
    if new != old {
        return refused(format!("the checkpoint belongs to bucket {new}, the stored one to {old}"));
    }
    for (vbid, old) in kept.positions().filter(|(_, old)| old.seqno > Seqno::ZERO) {
        let Some(new) = checkpoint.position(vbid) else {
            let why = format!("the checkpoint lacks {vbid}, which the stored one has");
            return refused(why);
        };
        // After a rollback, the seqno is lower and the epoch higher.
        if (new.epoch, new.seqno) < (old.epoch, old.seqno) {
            return refused(format!(
                "the checkpoint is behind the stored one: {vbid} is at seqno {}, stored is {}",
                new.seqno, old.seqno
            ));
        }
    }
    Ok(())
}

fn is_absence(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::NotFound
}

/// Stores a checkpoint as long as the process lives.
#[derive(Debug, Default)]
pub struct MemoryStore {
    checkpoint: Mutex<Option<Checkpoint>>,
}

impl CheckpointStore for MemoryStore {
    fn load(&self) -> Result<Option<Checkpoint>, Error> {
        Ok(self.checkpoint.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }

    fn save(&self, checkpoint: &Checkpoint) -> Result<(), Error> {
        let mut kept = self.checkpoint.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(kept) = &*kept {
            check_ahead(checkpoint, kept)?;
        }
        *kept = Some(checkpoint.clone());
        Ok(())
    }
}
