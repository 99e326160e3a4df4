//! Where checkpoints are kept.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use dcp_proto::checkpoint::Checkpoint;
use dcp_wire::Seqno;

use crate::{CheckpointLock, Error, ErrorKind, load_checkpoint, save_checkpoint};

/// Keeps one checkpoint: in a file, in memory, or wherever else it is implemented for.
///
/// Save a batch's checkpoint once the batch was processed: with what was made of it in one
/// transaction, or afterwards, never before. Whether a checkpoint belongs to the bucket and the
/// filter is checked when a stream [starts](crate::Start::Checkpoint) from it. Calls may block: make
/// them from a blocking task.
pub trait CheckpointStore: Debug + Send + Sync {
    /// The checkpoint that was saved last; `None` if none ever was.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`] if it cannot be read or is damaged,
    /// which must never be taken for none: the reader would begin anew, or pass over changes.
    fn load(&self) -> Result<Option<Checkpoint>, Error>;

    /// Keeps a checkpoint in place of the one before it, durably, whole or not at all.
    ///
    /// The stores of this crate never go back: of two readers that share one, the slower is told,
    /// and what the faster has saved stays. A rollback is no step back.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`] if it cannot be kept, is behind the one before it in any vBucket or
    /// does not have that, or is of another bucket; the one before it still is there.
    fn save(&self, checkpoint: &Checkpoint) -> Result<(), Error>;
}

/// Keeps a checkpoint in a file, as [`save_checkpoint`] writes it.
///
/// A save holds a lock on the file `<name>.lock` next to it, which stays there, so that nobody saves
/// between its look at what is there and its write. To go back on purpose, use [`save_checkpoint`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileStore {
    path: PathBuf,
}

impl FileStore {
    /// In the file `path`, which is made by the first save.
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
        // A link that leads nowhere is something gone wrong, not a first start.
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

/// Fails if `checkpoint` would take a vBucket back that `kept` has read further, or leave it out, or
/// is of another bucket.
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
        // A reader that was rolled back has a lower seqno and counts one rollback more.
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

/// Keeps a checkpoint for as long as the process lives.
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
