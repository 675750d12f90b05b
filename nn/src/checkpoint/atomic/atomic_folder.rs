//! Atomic folders: written under a temporary name, and renamed into place when complete, as a checkpoint is.

use super::disk::{entries_of, file_error, io_error, last_component, parent_folder, sync_folder};
use super::temporary_name::{OLD, is_process_gone, parse_temporary_name, temporary_path};
use crate::checkpoint::file_names::{OPTIMIZER_FILE, STATE_FILE};
use shardgrad_tensor::{Error, Kind, Result};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// A folder that is written under a temporary name in the same parent folder (`*.tmp-` and the process id) and renamed
/// when all of its files are on the disk. Dropped before that, the folder is removed.
#[derive(Debug)]
pub(crate) struct AtomicFolder {
    path: PathBuf,
    temporary: PathBuf,
}

/// [`temporary_path`] of a folder.
///
/// # Errors
/// `Kind::Checkpoint` for a path that does not end with a name.
pub(crate) fn temporary_folder(path: &Path, mark: &str) -> Result<PathBuf> {
    temporary_path(path, mark).ok_or_else(|| file_error(path, "is not the name of a folder"))
}

/// Returns the temporary folders of `path` that ended processes left: of saves, or, with the mark [`OLD`], of removals.
pub(crate) fn stale_siblings(path: &Path, mark: &str) -> Result<Vec<PathBuf>> {
    let own = last_component(path) + mark;
    let is_stale = |path: &PathBuf| {
        parse_temporary_name(&last_component(path)).is_some_and(|(of, id)| of == own && is_process_gone(id))
    };
    Ok(entries_of(parent_folder(path))?.into_iter().filter(is_stale).collect())
}

/// Whether something exists at `path`; an error for anything that a checkpoint must not replace: all but an empty
/// folder and a checkpoint.
pub(crate) fn is_replaceable(path: &Path) -> Result<bool> {
    let cannot = |what: &str| {
        let text = format!("cannot write {}: it is {what}, and saving does not replace it", path.display());
        Err(Error::new(Kind::Io, text).detail("help", "choose another name"))
    };
    match path.symlink_metadata() {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(io_error(path, "write", &e)),
        Ok(found) if !found.is_dir() => return cannot("not a folder"),
        Ok(_) => {}
    }
    let holds_checkpoint = [STATE_FILE, OPTIMIZER_FILE].iter().any(|name| path.join(name).is_file());
    let is_empty = || fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    if holds_checkpoint || is_empty() {
        Ok(true)
    } else {
        cannot("a folder with other files than a checkpoint")
    }
}

impl AtomicFolder {
    /// Creates an empty folder under its temporary name, and the parents of the folder.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses, and if `path` is anything but a checkpoint or an empty folder.
    pub(crate) fn create(path: &Path) -> Result<AtomicFolder> {
        is_replaceable(path)?;
        let temporary = temporary_folder(path, "")?;
        fs::create_dir_all(parent_folder(path)).map_err(|e| io_error(parent_folder(path), "make", &e))?;
        if temporary.symlink_metadata().is_ok() {
            fs::remove_dir_all(&temporary).map_err(|e| io_error(&temporary, "remove", &e))?;
        }
        fs::create_dir(&temporary).map_err(|e| io_error(&temporary, "make", &e))?;
        Ok(AtomicFolder { path: path.to_path_buf(), temporary })
    }

    /// Returns the path at which to write the files of the folder.
    pub(crate) fn temporary_path(&self) -> &Path {
        &self.temporary
    }

    /// Renames the folder to its final name, in place of a checkpoint that has it. Its files must be on the disk.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses, or as [`AtomicFolder::create`]; the old checkpoint is unchanged, or gone.
    pub(crate) fn commit(self) -> Result<()> {
        sync_folder(&self.temporary)?;
        let old = is_replaceable(&self.path)?.then(|| temporary_folder(&self.path, OLD)).transpose()?;
        if let Some(old) = &old {
            fs::rename(&self.path, old).map_err(|e| io_error(&self.path, "write", &e))?;
        }
        if let Err(e) = fs::rename(&self.temporary, &self.path) {
            // Restore the old checkpoint, if possible.
            old.iter().for_each(|old| drop(fs::rename(old, &self.path)));
            return Err(io_error(&self.path, "write", &e));
        }
        sync_folder(parent_folder(&self.path))?;
        old.map_or(Ok(()), |old| fs::remove_dir_all(&old).map_err(|e| io_error(&old, "remove", &e)))
    }
}

impl Drop for AtomicFolder {
    fn drop(&mut self) {
        // After a commit the path is gone; otherwise a failure cannot be reported from here.
        let _ = fs::remove_dir_all(&self.temporary);
    }
}
