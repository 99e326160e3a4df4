//! Checkpoints in files: either the old document or the new one, never half of one.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use dcp_proto::checkpoint::Checkpoint;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::{Error, ErrorKind};

/// Longest checkpoint file that is read, in bytes: a hundred times the size for 1024 vBuckets.
const MAX_LEN: u64 = 64 * 1024 * 1024;

/// Age at which a temporary file counts as abandoned: a save takes milliseconds.
const ABANDONED: Duration = Duration::from_secs(3600);

/// Longest wait for another writer's save.
const LOCKED: Duration = Duration::from_secs(10);

/// Writes a checkpoint to `path`, replacing an existing file.
///
/// The document is written to a temporary file in the same folder, synced, and renamed; then the
/// folder is synced: after a crash, there is either the old document or the new one. Only the owner
/// may read the file.
///
/// A crash may leave a temporary file, `<name>.<16 hexadecimal digits>.tmp`. Later saves remove
/// such files once they have not been written to for an hour.
///
/// Blocks; call it from a blocking task.
///
/// # Errors
/// [`ErrorKind::Checkpoint`] with the IO error as its source; the old document is still there. A
/// device, pipe or socket at `path` is not replaced.
pub fn save_checkpoint(checkpoint: &Checkpoint, path: &Path) -> Result<(), Error> {
    let failed = |error: io::Error| {
        let message = format!("the checkpoint could not be written to {}", path.display());
        Error::new(ErrorKind::Checkpoint, message).with_source(error)
    };
    if fs::metadata(path).is_ok_and(|there| !there.is_file()) {
        return Err(failed(io::Error::other("it is not a regular file, and is not replaced")));
    }
    let temporary = temporary_path(path).map_err(failed)?;
    // A file that cannot be created may belong to another writer, and is left alone.
    let file = create(&temporary).map_err(failed)?;
    let written = write_synced(&file, checkpoint.to_json().as_bytes())
        .and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = written {
        // Best effort: the file is useless.
        let _ = fs::remove_file(&temporary);
        return Err(failed(error));
    }
    remove_abandoned(path, &file);
    sync_folder(path).map_err(failed)
}

/// Reads a checkpoint from `path`.
///
/// Blocks; call it from a blocking task.
///
/// # Errors
/// [`ErrorKind::Checkpoint`] if there is no such file, it cannot be read, or it is not an undamaged
/// checkpoint.
pub fn load_checkpoint(path: &Path) -> Result<Checkpoint, Error> {
    let message = || format!("the checkpoint could not be read from {}", path.display());
    let failed = |error: io::Error| Error::new(ErrorKind::Checkpoint, message()).with_source(error);
    let mut json = Vec::new();
    let file = File::open(path).map_err(failed)?;
    file.take(MAX_LEN).read_to_end(&mut json).map_err(failed)?;
    Checkpoint::from_json(&json)
        .map_err(|error| Error::new(ErrorKind::Checkpoint, message()).with_source(error))
}

/// A lock on a checkpoint file, held until it is dropped.
///
/// The locked file is a separate one in the same folder and stays, since a save replaces the
/// checkpoint file itself. The holder of the lock may store a short document in it.
#[derive(Debug)]
pub struct CheckpointLock(File);

impl CheckpointLock {
    /// Locks the checkpoint file `path` against other writers, in this process or another. The
    /// system releases the lock of a process that dies.
    ///
    /// On file systems without locks, writers are not excluded. Blocks for up to ten seconds.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`] if the file cannot be opened, or another writer holds the lock for
    /// longer than any save takes.
    pub fn acquire(path: &Path) -> Result<Self, Error> {
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(".lock");
        let file = path.with_file_name(name);
        let failed = |error: io::Error| {
            let message = format!(
                "the checkpoint {} could not be locked: check that its folder can be written to, \
                 and that no other process holds {}",
                path.display(),
                file.display()
            );
            Error::new(ErrorKind::Checkpoint, message).with_source(error)
        };
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let opened = options.open(&file).map_err(failed)?;
        #[cfg(unix)]
        wait_for_lock(&opened).map_err(failed)?;
        Ok(Self(opened))
    }

    /// The document that was last written by a holder; empty if there is none.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`] with the IO error as its source.
    pub fn read(&self) -> Result<Vec<u8>, Error> {
        let mut file = &self.0;
        let mut bytes = Vec::new();
        file.rewind()
            .and_then(|()| file.take(MAX_LEN).read_to_end(&mut bytes))
            .map_err(|error| Self::failed("read", error))?;
        Ok(bytes)
    }

    /// Replaces the document with `bytes`. A crash may leave a part of them.
    ///
    /// # Errors
    /// [`ErrorKind::Checkpoint`] with the IO error as its source.
    pub fn write(&self, bytes: &[u8]) -> Result<(), Error> {
        let mut file = &self.0;
        file.rewind()
            .and_then(|()| file.write_all(bytes))
            .and_then(|()| file.set_len(bytes.len() as u64))
            .map_err(|error| Self::failed("written", error))
    }

    fn failed(what: &str, error: io::Error) -> Error {
        let message = format!("the lock of a checkpoint could not be {what}");
        Error::new(ErrorKind::Checkpoint, message).with_source(error)
    }
}

impl Drop for CheckpointLock {
    fn drop(&mut self) {
        // Unlocks explicitly, instead of only closing: a child that another thread has forked
        // meanwhile has the file open as well, and would hold the lock as long as it lives.
        #[cfg(unix)]
        let _ = rustix::fs::flock(&self.0, rustix::fs::FlockOperation::Unlock);
    }
}

#[cfg(unix)]
fn wait_for_lock(file: &File) -> io::Result<()> {
    use rustix::fs::{FlockOperation, flock};
    use rustix::io::Errno;

    let end = Instant::now() + LOCKED;
    loop {
        match flock(file, FlockOperation::NonBlockingLockExclusive) {
            // Not every network file system has locks.
            Ok(()) | Err(Errno::NOLCK | Errno::NOSYS | Errno::NOTSUP) => return Ok(()),
            Err(Errno::WOULDBLOCK | Errno::INTR) if Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// A name in the same folder that no other writer uses, in this process or another. A process id is
/// not enough: in a container it is the same after each restart. Neither is a thread-local
/// generator, which a forked child copies.
fn temporary_path(path: &Path) -> io::Result<PathBuf> {
    let mut name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?
        .to_owned();
    name.push(format!(".{:016x}.tmp", StdRng::from_os_rng().random::<u64>()));
    Ok(path.with_file_name(name))
}

/// Whether `name` is one that [`temporary_path`] gives for the file `of`.
fn is_temporary(name: &OsStr, of: &OsStr) -> bool {
    let digits = name
        .as_encoded_bytes()
        .strip_prefix(of.as_encoded_bytes())
        .and_then(|rest| rest.strip_prefix(b"."))
        .and_then(|rest| rest.strip_suffix(b".tmp"));
    let is_digit = |byte: &u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    digits.is_some_and(|digits| digits.len() == 16 && digits.iter().all(is_digit))
}

/// Removes temporary files that crashes have left next to `path`, if a check is due.
///
/// Best effort: no save fails because of another file. `written` has just been written, so its time
/// is the current time of the clock that the times of the other files come from.
fn remove_abandoned(path: &Path, written: &File) {
    let (Some(name), true) = (path.file_name(), is_time_to_look(path)) else { return };
    let Ok(now) = written.metadata().and_then(|written| written.modified()) else { return };
    let Ok(entries) = fs::read_dir(folder_of(path)) else { return };
    for entry in entries.flatten().filter(|entry| is_temporary(&entry.file_name(), name)) {
        // Does not follow links.
        let modified = entry.metadata().and_then(|metadata| metadata.modified());
        let age = modified.ok().and_then(|modified| now.duration_since(modified).ok());
        if age.is_some_and(|age| age >= ABANDONED) {
            let _ = fs::remove_file(entry.path());
        }
    }
}

/// Whether a check of `path` is due, at most once an hour: folders can be large.
fn is_time_to_look(path: &Path) -> bool {
    static LOOKED: Mutex<BTreeMap<PathBuf, Instant>> = Mutex::new(BTreeMap::new());
    let mut looked = LOOKED.lock().unwrap_or_else(PoisonError::into_inner);
    looked.retain(|_, at| at.elapsed() < ABANDONED);
    let is_time = !looked.contains_key(path);
    if is_time {
        looked.insert(path.to_owned(), Instant::now());
    }
    is_time
}

fn create(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    options.open(path)
}

fn write_synced(mut file: &File, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes a rename in the folder of `path` durable.
fn sync_folder(path: &Path) -> io::Result<()> {
    // Folders can only be opened on Unix; elsewhere the system decides how durable a rename is.
    if cfg!(unix) { File::open(folder_of(path))?.sync_all() } else { Ok(()) }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    }
}
