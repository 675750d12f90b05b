//! A file that only grows. Bytes that the disk refuses are kept, and are written before later ones.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// A file that is opened late, and the bytes that are not in it yet.
#[derive(Debug, Default)]
pub(super) struct AppendedFile {
    pub(super) file: Option<File>,
    pending: Vec<u8>,
}

impl AppendedFile {
    /// Adds bytes, which [`AppendedFile::write_pending`] writes.
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.pending.extend_from_slice(bytes);
    }

    /// Whether bytes are still to be written.
    pub(super) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// Writes as many bytes as the system takes; `open` opens the file on first use.
    ///
    /// # Errors
    /// The error of the system; unwritten bytes stay pending.
    pub(super) fn write_pending(&mut self, open: impl FnOnce() -> io::Result<File>) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let file = match &mut self.file {
            Some(file) => file,
            none => none.insert(open()?),
        };
        while !self.pending.is_empty() {
            match file.write(&self.pending) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => drop(self.pending.drain(..written)),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        Ok(())
    }

    /// Waits until written bytes are on the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        self.file.as_ref().map_or(Ok(()), File::sync_data)
    }
}

/// Creates or truncates a file and opens it in append mode, so that a truncation by another program leaves no gap.
pub(super) fn create(path: &Path) -> io::Result<File> {
    File::create(path)?;
    open_at_end(path)
}

/// Opens a file in append mode.
pub(super) fn open_at_end(path: &Path) -> io::Result<File> {
    File::options().append(true).open(path)
}

/// Replaces a file atomically by one with the given contents, opened in append mode. A symlink stays; its target is replaced.
pub(super) fn replace(path: &Path, contents: &[u8]) -> io::Result<File> {
    if path.is_symlink() && !path.exists() {
        // Creating the file gives a broken link a target.
        File::create(path)?;
    }
    let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_path_buf());
    let temporary = path.with_added_extension(format!("tmp-{}", std::process::id()));
    let mut file = create(&temporary)?;
    let written = file.write_all(contents).and_then(|()| file.sync_all());
    written
        .and_then(|()| fs::rename(&temporary, &path))
        .inspect_err(|_| drop(fs::remove_file(&temporary)))?;
    Ok(file)
}
