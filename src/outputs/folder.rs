//! The folder of a run: locked as long as the run lasts, and followed where it is moved.

use super::lock::{FolderLock, FolderState};
use super::{ELSEWHERE, FILES, cannot, check_model, check_plain, try_to_write};
use shardgrad::{Error, Kind, Result};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The folder of a run, which no other run writes into until all clones are dropped or the process ends.
#[derive(Clone, Debug)]
pub(crate) struct OutFolder(Arc<Mutex<OpenFolder>>);

#[derive(Debug)]
struct OpenFolder {
    /// Where the folder is now.
    path: PathBuf,
    /// None where the first process of a run holds it.
    lock: Option<FolderLock>,
}

impl OutFolder {
    fn new(path: &Path, lock: Option<FolderLock>) -> OutFolder {
        OutFolder(Arc::new(Mutex::new(OpenFolder { path: path.to_path_buf(), lock })))
    }

    /// Makes the folder if need be and locks it. What is in it stays as it is.
    ///
    /// # Errors
    /// `Kind::Io` with a repair: for a folder that cannot be written, for a file or folder in the place of the other, for
    /// what a save would not replace, and while another run writes there.
    pub(crate) fn open(path: &Path) -> Result<OutFolder> {
        let refuse = |path: &Path, e: &io::Error| cannot("write", path, e).detail("help", ELSEWHERE);
        if path.exists() && !path.is_dir() {
            let text = format!("--out {} is a file", path.display());
            return Err(Error::new(Kind::Io, text).detail("help", "give a folder with --out DIR"));
        }
        fs::create_dir_all(path).map_err(|e| refuse(path, &e))?;
        let Some(lock) = FolderLock::acquire(path).map_err(|e| refuse(&path.join(".lock"), &e))? else {
            let help = format!("wait until it has ended, or {ELSEWHERE}");
            return Err(occupied(path).detail("help", help));
        };
        for name in FILES {
            let file = path.join(name);
            check_plain(&file).map_err(|e| e.detail("help", ELSEWHERE))?;
            if file.exists() {
                try_to_write(&file).map_err(|e| refuse(&file, &e))?;
            }
        }
        check_model(&path.join("model"))?;
        Ok(OutFolder::new(path, Some(lock)))
    }

    /// The folder that another process of the same run has opened, and alone writes into.
    pub(crate) fn of_leader(path: &Path) -> OutFolder {
        OutFolder::new(path, None)
    }

    fn open_folder(&self) -> MutexGuard<'_, OpenFolder> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A path in the folder.
    #[must_use]
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.open_folder().path.join(name)
    }

    /// Verifies that the path still leads to the folder that this run has locked; to be called before each write. Where the folder was
    /// moved, [`OutFolder::join`] gives paths at its new place from now on; where it was removed, in a new folder of that name,
    /// locked. Either is returned once, as the error with which the run is to end after a save.
    ///
    /// # Errors
    /// `Kind::Io` where nothing may be written any more: the path leads to a folder of somebody else.
    pub(crate) fn verify(&self) -> Result<Option<Error>> {
        let mut open = self.open_folder();
        let OpenFolder { path, lock: Some(lock) } = &*open else { return Ok(None) };
        let (path, shown) = (path.clone(), path.display().to_string());
        match lock.state(&path) {
            FolderState::Unchanged => Ok(None),
            // The next write reports what the system refuses here.
            FolderState::LockRemoved => match FolderLock::acquire(&path) {
                Ok(None) => Err(occupied(&path).detail("cause", format!("{shown}/.lock was removed"))),
                acquired => {
                    open.lock = acquired.ok().flatten().or(open.lock.take());
                    Ok(None)
                }
            },
            FolderState::Moved(now) => {
                let text = format!("{shown} was moved to {} during the run", now.display());
                open.path = now;
                Ok(Some(
                    Error::new(Kind::Io, text).detail("help", "start it anew, with --out at its new place"),
                ))
            }
            FolderState::Removed => {
                let text = format!("{shown} was removed during the run");
                open.lock = Some(create(&path).map_err(|e| Error::new(Kind::Io, format!("{text}: {e}")))?);
                Ok(Some(Error::new(Kind::Io, text)))
            }
            FolderState::Replaced => {
                let text = format!("{shown} was removed during the run, and something else has its name now");
                Err(Error::new(Kind::Io, text).detail("kept", format!("nothing more is written to {shown}")))
            }
        }
    }
}

/// For a folder that another run has locked.
fn occupied(path: &Path) -> Error {
    Error::new(Kind::Io, format!("another run is writing to {}", path.display()))
}

/// Makes a folder that is not there, and locks it.
fn create(path: &Path) -> io::Result<FolderLock> {
    if let Some(above) = path.parent() {
        fs::create_dir_all(above)?;
    }
    fs::create_dir(path)?;
    FolderLock::acquire(path)?.ok_or_else(|| ErrorKind::ResourceBusy.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;

    #[test]
    fn a_folder_that_is_moved_keeps_its_lock_and_is_followed() {
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
        assert_eq!(OutFolder::open(&new).unwrap_err().message(), occupied(&new).message());
        // A run in a new folder of the old name is another one.
        let second = OutFolder::open(&old).unwrap();
        assert!(out.verify().unwrap().is_none() && second.verify().unwrap().is_none());
    }

    #[test]
    fn a_folder_that_is_removed_is_made_anew_unless_its_name_is_taken() {
        let dir = Scratch::new();
        let path = dir.path("above/out");
        let out = OutFolder::open(&path).unwrap();
        fs::remove_dir_all(dir.path("above")).unwrap();
        let removed = out.verify().unwrap().unwrap();
        assert_eq!(removed.message(), format!("{} was removed during the run", path.display()));
        assert!(out.verify().unwrap().is_none() && out.join("x") == path.join("x"));
        assert_eq!(OutFolder::open(&path).unwrap_err().message(), occupied(&path).message());
        // Where another run has made it, whether it goes on or has ended, nothing is written.
        fs::remove_dir_all(&path).unwrap();
        drop(OutFolder::open(&path).unwrap());
        for _ in 0..2 {
            let error = out.verify().unwrap_err();
            assert!(error.message().ends_with("something else has its name now"), "{error}");
        }
    }

    #[test]
    fn a_lock_file_that_is_removed_is_made_anew() {
        let dir = Scratch::new();
        let path = dir.path("out");
        let out = OutFolder::open(&path).unwrap();
        fs::remove_file(path.join(".lock")).unwrap();
        assert!(out.verify().unwrap().is_none());
        assert_eq!(OutFolder::open(&path).unwrap_err().message(), occupied(&path).message());
        fs::remove_file(path.join(".lock")).unwrap();
        let _second = OutFolder::open(&path).unwrap();
        assert_eq!(out.verify().unwrap_err().message(), occupied(&path).message());
    }
}
