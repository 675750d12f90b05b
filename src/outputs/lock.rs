//! The lock file of a run folder, and the current path of the folder.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The lock file. It stays after a run: if a run removed it, two others could lock two files of this name.
const LOCK_FILE: &str = ".lock";

/// A lock on a folder. It is held on an open file, so it follows the folder if that is moved.
#[derive(Debug)]
pub(super) struct LockFile {
    /// The open folder, if it can be opened. While it is open, its inode is not reused.
    folder: Option<File>,
    lock: File,
}

/// The state of a locked folder.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FolderState {
    /// It exists and is locked.
    Unchanged,
    /// It exists, but its lock file does not.
    LockRemoved,
    /// It was moved to this path.
    Moved(PathBuf),
    /// Nothing exists at its path.
    Removed,
    /// Something else exists at its path.
    Replaced,
}

impl LockFile {
    /// Locks a folder; `None` if another process has locked it. A file system without locks is accepted.
    ///
    /// # Errors
    /// I/O errors of the lock file.
    pub(super) fn acquire(folder: &Path) -> io::Result<Option<LockFile>> {
        let path = folder.join(LOCK_FILE);
        let lock = File::options().write(true).create(true).truncate(false).open(path)?;
        let is_taken = matches!(lock.try_lock(), Err(TryLockError::WouldBlock));
        Ok((!is_taken).then(|| LockFile { folder: File::open(folder).ok(), lock }))
    }

    /// Compares the locked folder with the current target of a path.
    pub(super) fn state(&self, path: &Path) -> FolderState {
        if is_same(&self.lock, &path.join(LOCK_FILE)) {
            return FolderState::Unchanged;
        }
        if let Some(folder) = &self.folder {
            if is_same(folder, path) {
                return FolderState::LockRemoved;
            }
            if let Some(now) = path_of(folder) {
                return FolderState::Moved(now);
            }
        }
        match path.symlink_metadata() {
            Ok(_) => FolderState::Replaced,
            Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {
                FolderState::Removed
            }
            // The path cannot be read at the moment; the next write reports it.
            Err(_) => FolderState::Unchanged,
        }
    }
}

/// Returns whether an open file and a path have the same inode.
fn is_same(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (file.metadata(), fs::metadata(path)) else { return false };
    (open.dev(), open.ino()) == (named.dev(), named.ino())
}

/// Returns the current path of an open file (Linux), if it has one.
fn path_of(file: &File) -> Option<PathBuf> {
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    is_same(file, &path).then_some(path)
}
