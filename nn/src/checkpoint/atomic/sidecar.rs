//! Sidecar files: files that belong to a model without being made from it, such as those of the tokenizer. A save
//! replaces them together with the model.

use super::atomic_file::AtomicFile;
use super::disk::{io_error, is_existing_file, open_regular};
use shardgrad_tensor::Result;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Number of bytes of a file in memory while it is copied or compared.
const CHUNK: usize = 1 << 20;

/// A sidecar file by its name in the folder: its new contents, or `None` to remove it.
#[derive(Clone, Copy, Debug)]
pub struct SidecarFile<'a> {
    /// Name of an entry of the folder; not a name that the save itself uses.
    pub name: &'a str,
    /// Open file, read from its beginning.
    pub file: Option<&'a File>,
}

impl SidecarFile<'_> {
    /// Checks the path in a folder, before there is anything to save.
    ///
    /// # Errors
    /// `Kind::Io` if the path exists and is not a regular file (a symlink, a folder, a pipe, a device): a save would
    /// refuse it.
    pub fn check(&self, dir: &Path) -> Result<()> {
        is_existing_file(&dir.join(self.name)).map(drop)
    }
}

/// Changes to the sidecar files of a model that is replaced.
#[derive(Debug, Default)]
pub(crate) struct SidecarChanges {
    pub(crate) names: Vec<String>,
    /// Complete and synced copies, under temporary names, of the files that differ from those in the folder.
    pub(crate) new: Vec<AtomicFile>,
    /// Files to remove.
    pub(crate) removed: Vec<PathBuf>,
}

impl SidecarChanges {
    /// Copies new sidecar files into a folder under temporary names; existing files stay.
    ///
    /// # Errors
    /// As [`is_existing_file`]; `Kind::Io` if the system refuses.
    pub(crate) fn prepare(dir: &Path, sidecar_files: &[SidecarFile<'_>]) -> Result<SidecarChanges> {
        let mut changes = SidecarChanges::default();
        for SidecarFile { name, file } in sidecar_files {
            let path = dir.join(name);
            let is_there = is_existing_file(&path)?;
            match file {
                Some(file) if !is_there || !is_same(file, &path)? => changes.new.push(copy(file, &path)?),
                None if is_there => changes.removed.push(path),
                _ => {}
            }
            changes.names.push((*name).to_string());
        }
        Ok(changes)
    }

    /// Whether the folder changes.
    pub(crate) fn changes(&self) -> bool {
        !self.new.is_empty() || !self.removed.is_empty()
    }
}

/// Copies an open file to a synced file with a temporary name.
fn copy(file: &File, path: &Path) -> Result<AtomicFile> {
    let mut new = AtomicFile::create(path)?;
    let (mut chunk, mut at) = (vec![0; CHUNK], 0);
    loop {
        let len = file.read_at(&mut chunk, at).map_err(|e| io_error(path, "copy", &e))?;
        if len == 0 {
            break;
        }
        new.write(&chunk[..len])?;
        at += len as u64;
    }
    new.flush_and_sync()?;
    Ok(new)
}

/// Whether the file at `path` has the contents of an open file.
fn is_same(file: &File, path: &Path) -> Result<bool> {
    let read_error = |e: &std::io::Error| io_error(path, "read", e);
    let (other, len) = open_regular(path)?;
    if file.metadata().map_err(|e| read_error(&e))?.len() != len {
        return Ok(false);
    }
    let (mut left, mut right) = (vec![0; CHUNK], vec![0; CHUNK]);
    for at in (0..len).step_by(CHUNK) {
        let part = CHUNK.min((len - at) as usize);
        file.read_exact_at(&mut left[..part], at).map_err(|e| read_error(&e))?;
        other.read_exact_at(&mut right[..part], at).map_err(|e| read_error(&e))?;
        if left[..part] != right[..part] {
            return Ok(false);
        }
    }
    Ok(true)
}
