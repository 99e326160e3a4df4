//! Where checkpoints are kept.

use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use dcp_proto::checkpoint::Checkpoint;

use crate::{Error, load_checkpoint, save_checkpoint};

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
    /// [`ErrorKind::Checkpoint`](crate::ErrorKind::Checkpoint) if it cannot be read or is damaged,
    /// which must never be taken for none: the reader would begin anew, or pass over changes.
    fn load(&self) -> Result<Option<Checkpoint>, Error>;

    /// Keeps a checkpoint in place of the one before it, durably, whole or not at all.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`](crate::ErrorKind::Checkpoint) if it cannot be kept; the one before
    /// it still is.
    fn save(&self, checkpoint: &Checkpoint) -> Result<(), Error>;
}

/// Keeps a checkpoint in a file, as [`save_checkpoint`] writes it.
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
        save_checkpoint(checkpoint, &self.path)
    }
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
        *kept = Some(checkpoint.clone());
        Ok(())
    }
}
