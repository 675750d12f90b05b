//! Lock of a model folder: one save at a time, across processes. Two concurrent saves would take each other's
//! temporary files for those of a dead process, and remove each other's weights as those of an earlier model.

use super::disk::folder_path;
use shardgrad_tensor::{Error, Kind, Result};
use std::fs::{File, TryLockError};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long a save waits for another.
const LOCK_TIMEOUT: Duration = Duration::from_secs(600);
/// How often a waiting save tries the lock.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Lock on a folder, held while this value lives. It is a lock on the folder itself, so that no lock file is left
/// behind. It works on one machine, across containers; on file systems without such locks, such as NFS, it excludes
/// nobody.
#[derive(Debug)]
pub(crate) struct FolderLock {
    _locked: Option<File>,
}

impl FolderLock {
    /// Waits until no other save writes into a folder, and locks the folder. Does not wait for a folder that does not
    /// exist.
    ///
    /// # Errors
    /// `Kind::Io` if the other save takes longer than ten minutes.
    pub(crate) fn acquire(dir: &Path) -> Result<FolderLock> {
        let Ok(folder) = File::open(folder_path(dir)) else { return Ok(FolderLock { _locked: None }) };
        let start = Instant::now();
        while let Err(TryLockError::WouldBlock) = folder.try_lock() {
            if start.elapsed() > LOCK_TIMEOUT {
                let text =
                    format!("cannot write {}: another save into this folder is running", dir.display());
                return Err(Error::new(Kind::Io, text)
                    .detail("help", "wait until it has finished, or choose another folder"));
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(FolderLock { _locked: Some(folder) })
    }
}
