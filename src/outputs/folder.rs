//! The run folder: locked while the run lasts, and followed if it is moved.

use super::lock::{FolderState, LockFile};
use super::{FILES, HELP_OTHER_FOLDER, check_plain, check_writable, io_error};
use shardgrad::{Error, Kind, Result};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A run folder, locked against other runs until all clones are dropped or the process ends.
#[derive(Clone, Debug)]
pub(crate) struct OutFolder(Arc<Mutex<OpenFolder>>);

#[derive(Debug)]
struct OpenFolder {
    /// The current path of the folder.
    path: PathBuf,
    /// `None` if rank 0 is another process, which holds the lock.
    lock: Option<LockFile>,
}

impl OutFolder {
    fn new(path: &Path, lock: Option<LockFile>) -> OutFolder {
        OutFolder(Arc::new(Mutex::new(OpenFolder { path: path.to_path_buf(), lock })))
    }

    /// Creates the folder if necessary and locks it. Its contents are unchanged.
    ///
    /// # Errors
    /// `Kind::Io` with help: if the folder cannot be written, a file is in the place of a folder or the reverse, or another run writes there.
    pub(crate) fn open(path: &Path) -> Result<OutFolder> {
        let refuse =
            |path: &Path, e: &io::Error| io_error("write", path, e).detail("help", HELP_OTHER_FOLDER);
        if path.exists() && !path.is_dir() {
            let text = format!("--out {} is a file", path.display());
            return Err(Error::new(Kind::Io, text).detail("help", "use a folder with --out DIR"));
        }
        fs::create_dir_all(path).map_err(|e| refuse(path, &e))?;
        let Some(lock) = LockFile::acquire(path).map_err(|e| refuse(&path.join(".lock"), &e))? else {
            let help = format!("wait until it has ended, or {HELP_OTHER_FOLDER}");
            return Err(locked_by_other_run(path).detail("help", help));
        };
        for name in FILES {
            let file = path.join(name);
            check_plain(&file).map_err(|e| e.detail("help", HELP_OTHER_FOLDER))?;
            if file.exists() {
                check_writable(&file).map_err(|e| refuse(&file, &e))?;
            }
        }
        Ok(OutFolder::new(path, Some(lock)))
    }

    /// Refers to the folder that rank 0, another process of the run, has opened.
    pub(crate) fn of_rank_zero(path: &Path) -> OutFolder {
        OutFolder::new(path, None)
    }

    fn open_folder(&self) -> MutexGuard<'_, OpenFolder> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns a path in the folder.
    #[must_use]
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.open_folder().path.join(name)
    }

    /// Verifies, before each write, that the path still leads to the locked folder. If the folder was moved, [`OutFolder::join`] returns paths
    /// at its new place from now on; if it was removed, a new folder is created and locked. Either is returned once, as the error with
    /// which the run must end after a save.
    ///
    /// # Errors
    /// `Kind::Io` if nothing may be written any more because the path leads to another folder.
    pub(crate) fn verify(&self) -> Result<Option<Error>> {
        let mut open = self.open_folder();
        let OpenFolder { path, lock: Some(lock) } = &*open else { return Ok(None) };
        let (path, shown) = (path.clone(), path.display().to_string());
        match lock.state(&path) {
            FolderState::Unchanged => Ok(None),
            // If the lock cannot be acquired for another reason, the next write reports it.
            FolderState::LockRemoved => match LockFile::acquire(&path) {
                Ok(None) => {
                    Err(locked_by_other_run(&path).detail("cause", format!("{shown}/.lock was removed")))
                }
                acquired => {
                    open.lock = acquired.ok().flatten().or(open.lock.take());
                    Ok(None)
                }
            },
            FolderState::Moved(now) => {
                let text = format!("{shown} was moved to {} during the run", now.display());
                open.path = now;
                Ok(Some(Error::new(Kind::Io, text).detail("help", "start again with --out at the new place")))
            }
            FolderState::Removed => {
                let text = format!("{shown} was removed during the run");
                open.lock = Some(create(&path).map_err(|e| Error::new(Kind::Io, format!("{text}: {e}")))?);
                Ok(Some(Error::new(Kind::Io, text)))
            }
            FolderState::Replaced => {
                let text =
                    format!("{shown} was removed during the run, and its path is taken by something else");
                Err(Error::new(Kind::Io, text).detail("kept", format!("nothing more is written to {shown}")))
            }
        }
    }
}

/// Returns the error for a folder that another run has locked.
fn locked_by_other_run(path: &Path) -> Error {
    Error::new(Kind::Io, format!("another run is writing to {}", path.display()))
}

/// Creates and locks a missing folder.
fn create(path: &Path) -> io::Result<LockFile> {
    if let Some(above) = path.parent() {
        fs::create_dir_all(above)?;
    }
    fs::create_dir(path)?;
    LockFile::acquire(path)?.ok_or_else(|| ErrorKind::ResourceBusy.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;

    #[test]
    fn moved_folder_keeps_its_lock_and_is_followed() {
        let dir = Scratch::new();
        let (old, new) = (dir.path("old"), dir.path("new"));
        let out = OutFolder::open(&old).unwrap();
        assert!(out.verify().unwrap().is_none());
        fs::rename(&old, &new).unwrap();
        let moved = out.verify().unwrap().unwrap();
        let text = format!("{} was moved to {} during the run", old.display(), new.display());
        assert_eq!((moved.kind(), moved.message()), (Kind::Io, &*text));
        assert!(out.verify().unwrap().is_none(), "it is reported once");
        assert_eq!(out.join("model"), new.join("model"));
        assert_eq!(OutFolder::open(&new).unwrap_err().message(), locked_by_other_run(&new).message());
        // A new folder at the old path can be locked by another run.
        let second = OutFolder::open(&old).unwrap();
        assert!(out.verify().unwrap().is_none() && second.verify().unwrap().is_none());
    }

    #[test]
    fn removed_folder_is_recreated_unless_replaced() {
        let dir = Scratch::new();
        let path = dir.path("above/out");
        let out = OutFolder::open(&path).unwrap();
        fs::remove_dir_all(dir.path("above")).unwrap();
        let removed = out.verify().unwrap().unwrap();
        assert_eq!(removed.message(), format!("{} was removed during the run", path.display()));
        assert!(out.verify().unwrap().is_none() && out.join("x") == path.join("x"));
        assert_eq!(OutFolder::open(&path).unwrap_err().message(), locked_by_other_run(&path).message());
        // If another run has recreated the folder, running or not, nothing is written.
        fs::remove_dir_all(&path).unwrap();
        drop(OutFolder::open(&path).unwrap());
        for _ in 0..2 {
            let error = out.verify().unwrap_err();
            assert!(error.message().ends_with("its path is taken by something else"), "{error}");
        }
    }

    #[test]
    fn removed_lock_file_is_recreated() {
        let dir = Scratch::new();
        let path = dir.path("out");
        let out = OutFolder::open(&path).unwrap();
        fs::remove_file(path.join(".lock")).unwrap();
        assert!(out.verify().unwrap().is_none());
        assert_eq!(OutFolder::open(&path).unwrap_err().message(), locked_by_other_run(&path).message());
        fs::remove_file(path.join(".lock")).unwrap();
        let _second = OutFolder::open(&path).unwrap();
        assert_eq!(out.verify().unwrap_err().message(), locked_by_other_run(&path).message());
    }
}
