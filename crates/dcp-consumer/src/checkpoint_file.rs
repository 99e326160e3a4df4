//! Checkpoints in files: either the old document or the new one, never half of one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use dcp_proto::checkpoint::Checkpoint;

use crate::{Error, ErrorKind};

/// Longest checkpoint file read, in bytes: a hundred times what 1024 vBuckets take.
const MAX_LEN: u64 = 64 * 1024 * 1024;

/// Writes a checkpoint to `path`, in place of what is there.
///
/// The document is written to a file next to it, synced, renamed over it, and the folder synced:
/// after a crash there is the old document or the new one. Only the owner may read the file.
/// Blocks; call it from a blocking task.
///
/// # Errors
/// [`ErrorKind::Checkpoint`] with the IO error as its source; the old document is still there.
pub fn save_checkpoint(checkpoint: &Checkpoint, path: &Path) -> Result<(), Error> {
    let failed = |error: io::Error| {
        let message = format!("the checkpoint could not be written to {}", path.display());
        Error::new(ErrorKind::Checkpoint, message).with_source(error)
    };
    let temporary = temporary_path(path).map_err(failed)?;
    let written = write_synced(&temporary, checkpoint.to_json().as_bytes())
        .and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = written {
        // Best effort: the file is of no use to anybody.
        let _ = fs::remove_file(&temporary);
        return Err(failed(error));
    }
    sync_folder(path).map_err(failed)
}

/// Reads a checkpoint from `path`.
///
/// Blocks; call it from a blocking task.
///
/// # Errors
/// [`ErrorKind::Checkpoint`] if there is no such file, it cannot be read, or what it holds is not
/// an undamaged checkpoint.
pub fn load_checkpoint(path: &Path) -> Result<Checkpoint, Error> {
    let message = || format!("the checkpoint could not be read from {}", path.display());
    let failed = |error: io::Error| Error::new(ErrorKind::Checkpoint, message()).with_source(error);
    let mut json = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_LEN).read_to_end(&mut json).map_err(failed)?;
    Checkpoint::from_json(&json)
        .map_err(|error| Error::new(ErrorKind::Checkpoint, message()).with_source(error))
}

/// A name in the same folder that no other writer uses at the same time.
fn temporary_path(path: &Path) -> io::Result<PathBuf> {
    static WRITERS: AtomicU64 = AtomicU64::new(0);
    let mut name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?
        .to_owned();
    let writer = WRITERS.fetch_add(1, Ordering::Relaxed);
    name.push(format!(".{}-{writer}.tmp", std::process::id()));
    Ok(path.with_file_name(name))
}

fn write_synced(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let mut file = options.open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes a rename in the folder of `path` durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    // Only Unix can open a folder; elsewhere the rename is as durable as the system makes it.
    if cfg!(unix) { File::open(folder)?.sync_all() } else { Ok(()) }
}
