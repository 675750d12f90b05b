//! The lock of a run's folder, and where the folder is now.

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// The file that is locked. It stays when a run has ended: if a run removed it, two others could lock two files of this name.
const LOCK_FILE: &str = ".lock";

/// A lock on a folder. It belongs to an open file, so it moves with the folder.
#[derive(Debug)]
pub(super) struct FolderLock {
    /// The folder, where it can be opened. As long as it is open, no other folder gets its inode.
    folder: Option<File>,
    lock: File,
}

/// What has become of a folder that was locked under a path.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum FolderState {
    /// It is there and locked.
    Unchanged,
    /// It is there, but its lock file is not.
    LockRemoved,
    /// It has another path now.
    Moved(PathBuf),
    /// Nothing has its path.
    Removed,
    /// Something else has its path.
    Replaced,
}

impl FolderLock {
    /// Locks a folder, unless another process has locked it: `None` then. A file system without locks is no reason to refuse.
    ///
    /// # Errors
    /// Those of the system for the lock file.
    pub(super) fn acquire(folder: &Path) -> io::Result<Option<FolderLock>> {
        let path = folder.join(LOCK_FILE);
        let lock = File::options().write(true).create(true).truncate(false).open(path)?;
        let is_taken = matches!(lock.try_lock(), Err(TryLockError::WouldBlock));
        Ok((!is_taken).then(|| FolderLock { folder: File::open(folder).ok(), lock }))
    }

    /// Compares the folder with what a path names now.
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
            // A path that cannot be read at this moment: the next write reports it.
            Err(_) => FolderState::Unchanged,
        }
    }
}

/// Whether an open file and a path are one inode.
fn is_same(file: &File, path: &Path) -> bool {
    let (Ok(open), Ok(named)) = (file.metadata(), fs::metadata(path)) else { return false };
    (open.dev(), open.ino()) == (named.dev(), named.ino())
}

/// The path of an open file, where the system tells it (Linux) and the file has one.
fn path_of(file: &File) -> Option<PathBuf> {
    let path = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    is_same(file, &path).then_some(path)
}
