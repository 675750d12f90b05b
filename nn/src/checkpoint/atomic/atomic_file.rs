//! Atomic files: written under a temporary name, synced, then renamed into place.

use super::disk::{file_error, io_error, is_existing_file, parent_folder, sync_folder};
use super::temporary_name::temporary_path;
use shardgrad_tensor::{Error, Kind, Result};
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A file that is written under a temporary name in the folder of its final name, synced, then renamed. Dropped before that, the
/// file is removed.
#[doc(alias = "atomic write")]
#[doc(alias = "NamedTempFile")]
#[derive(Debug)]
pub(crate) struct AtomicFile {
    pub(crate) path: PathBuf,
    temporary: PathBuf,
    file: Option<BufWriter<File>>,
    keeps_temporary: bool,
}

impl AtomicFile {
    /// Creates the temporary file.
    ///
    /// # Errors
    /// As [`is_existing_file`]; `Kind::Io` if the system refuses.
    pub(crate) fn create(path: &Path) -> Result<AtomicFile> {
        is_existing_file(path)?;
        let temporary =
            temporary_path(path, "").ok_or_else(|| file_error(path, "is not the name of a file"))?;
        // A dead process with the same id may have left one; never write through an existing path.
        if temporary.symlink_metadata().is_ok() {
            fs::remove_file(&temporary).map_err(|e| io_error(&temporary, "remove", &e))?;
        }
        let file =
            OpenOptions::new().write(true).create_new(true).open(&temporary).map_err(|e| match e.kind() {
                ErrorKind::NotFound => Error::new(
                    Kind::Io,
                    format!("cannot write {}: its folder does not exist", path.display()),
                ),
                _ => io_error(path, "write", &e),
            })?;
        let file = Some(BufWriter::with_capacity(1 << 20, file));
        Ok(AtomicFile { path: path.to_path_buf(), temporary, file, keeps_temporary: false })
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.file {
            Some(file) => file.write_all(bytes).map_err(|e| io_error(&self.path, "write", &e)),
            None => Ok(()),
        }
    }

    /// Overwrites bytes that were written before.
    pub(crate) fn rewrite(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let written = file.flush().and_then(|()| file.get_ref().write_all_at(bytes, at));
        written.map_err(|e| io_error(&self.path, "write", &e))
    }

    /// Finishes writing and syncs the file to the disk; it keeps its temporary name.
    pub(crate) fn flush_and_sync(&mut self) -> Result<()> {
        let Some(mut file) = self.file.take() else { return Ok(()) };
        let sealed = file.flush().and_then(|()| file.get_ref().sync_all());
        sealed.map_err(|e| io_error(&self.path, "write", &e))
    }

    /// Keeps the file under its temporary name even if this value is dropped.
    pub(crate) fn keep_temporary(&mut self) {
        self.keeps_temporary = true;
    }

    /// Renames a synced file to its final name, replacing the file that has it.
    ///
    /// # Errors
    /// As [`is_existing_file`]; `Kind::Io` if the system refuses.
    pub(crate) fn rename_into_place(self) -> Result<()> {
        is_existing_file(&self.path)?;
        fs::rename(&self.temporary, &self.path).map_err(|e| io_error(&self.path, "write", &e))
    }

    /// Syncs the file and renames it into place.
    pub(crate) fn commit(mut self) -> Result<()> {
        self.flush_and_sync()?;
        let folder = parent_folder(&self.path).to_path_buf();
        self.rename_into_place()?;
        sync_folder(&folder)
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        if !self.keeps_temporary {
            // After a commit the path is gone; otherwise a failure cannot be reported from here.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes a small file atomically.
pub(crate) fn write_text(path: &Path, text: &str) -> Result<()> {
    write_temporary_text(path, text)?.commit()
}

/// Writes and syncs a small file under its temporary name.
pub(crate) fn write_temporary_text(path: &Path, text: &str) -> Result<AtomicFile> {
    let mut pending = AtomicFile::create(path)?;
    pending.write(text.as_bytes())?;
    pending.flush_and_sync()?;
    Ok(pending)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::atomic::disk::scratch::Scratch;

    #[test]
    fn full_disk_error_names_the_file() {
        let mut full = AtomicFile {
            path: PathBuf::from("model.safetensors"),
            temporary: PathBuf::from("/nonexistent/x"),
            file: Some(BufWriter::with_capacity(
                4,
                OpenOptions::new().write(true).open("/dev/full").unwrap(),
            )),
            keeps_temporary: false,
        };
        let error = full.write(b"more than four").unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(error.message().starts_with("cannot write model.safetensors: No space left"), "{error}");
        assert!(error.details()[0].1.starts_with("free disk space"), "{error}");
    }

    #[test]
    fn stale_temporary_is_replaced_and_symlink_is_not_followed() {
        let dir = Scratch::new();
        let victim = dir.file("victim", b"keep");
        let name = format!("m.tmp-{}", std::process::id());
        std::os::unix::fs::symlink(&victim, dir.path(&name)).unwrap();
        write_text(&dir.path("m"), "new").unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"keep");
        assert_eq!(dir.names(), ["m", "victim"]);
    }

    #[test]
    fn symlinks_folders_and_devices_are_not_replaced() {
        let dir = Scratch::new();
        let victim = dir.file("victim", b"keep");
        std::os::unix::fs::symlink(&victim, dir.path("link")).unwrap();
        std::os::unix::fs::symlink("/dev/full", dir.path("device")).unwrap();
        fs::create_dir(dir.path("folder")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.path("socket")).unwrap();
        let all = dir.names();
        for (name, what) in [
            ("link", "a symlink"),
            ("device", "a symlink"),
            ("folder", "a folder"),
            ("socket", "a pipe or a device"),
        ] {
            let path = dir.path(name);
            let error = write_text(&path, "new").unwrap_err();
            assert_eq!(error.kind(), Kind::Io);
            let expected =
                format!("cannot write {}: it is {what}, and saving does not replace it", path.display());
            assert_eq!(error.message(), expected);
        }
        // Nor if the folder appears while the file is written.
        let late = write_temporary_text(&dir.path("late"), "new").unwrap();
        fs::create_dir(dir.path("late")).unwrap();
        assert!(late.commit().unwrap_err().message().contains("it is a folder"));
        fs::remove_dir(dir.path("late")).unwrap();
        assert_eq!((dir.names(), fs::read(&victim).unwrap()), (all, b"keep".to_vec()));
    }
}
