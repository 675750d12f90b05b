//! Files that go with a model and are not made of it, such as those of its tokenizer: a save puts them beside it, and they
//! change with it as one.

use super::disk::{Pending, failed, is_taken, open_regular};
use shardgrad_tensor::Result;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// How many bytes are held of a file that is copied or compared.
const CHUNK: usize = 1 << 20;

/// A file that goes with a model, by its name in the folder: what it is to hold, or `None` where there is to be none.
#[derive(Clone, Copy, Debug)]
pub struct Companion<'a> {
    /// The name of an entry of the folder; none that a save itself gives.
    pub name: &'a str,
    /// An open file, read from its beginning.
    pub file: Option<&'a File>,
}

impl Companion<'_> {
    /// Looks at its place in a folder, before there is something to save.
    ///
    /// # Errors
    /// `Kind::Io` for what is there and is no file (a link, a folder, a pipe, a device): a save would refuse it.
    pub fn check(&self, dir: &Path) -> Result<()> {
        is_taken(&dir.join(self.name)).map(drop)
    }
}

/// What becomes of the files beside a model when it is replaced.
#[derive(Debug, Default)]
pub(super) struct Beside {
    pub(super) names: Vec<String>,
    /// Copies under other names, whole and synced, of those that the folder has not as they are to be.
    pub(super) new: Vec<Pending>,
    /// Those that go.
    pub(super) gone: Vec<PathBuf>,
}

impl Beside {
    /// Copies what is to come into a folder; what stands there stays.
    ///
    /// # Errors
    /// As [`is_taken`]; `Kind::Io` if the system refuses.
    pub(super) fn prepare(dir: &Path, companions: &[Companion<'_>]) -> Result<Beside> {
        let mut beside = Beside::default();
        for Companion { name, file } in companions {
            let path = dir.join(name);
            let is_there = is_taken(&path)?;
            match file {
                Some(file) if !is_there || !is_same(file, &path)? => beside.new.push(copy(file, &path)?),
                None if is_there => beside.gone.push(path),
                _ => {}
            }
            beside.names.push((*name).to_string());
        }
        Ok(beside)
    }

    /// Whether the folder changes.
    pub(super) fn changes(&self) -> bool {
        !self.new.is_empty() || !self.gone.is_empty()
    }
}

/// A copy of an open file, sealed.
fn copy(file: &File, path: &Path) -> Result<Pending> {
    let mut new = Pending::create(path)?;
    let (mut chunk, mut at) = (vec![0; CHUNK], 0);
    loop {
        let len = file.read_at(&mut chunk, at).map_err(|e| failed(path, "copy", &e))?;
        if len == 0 {
            break;
        }
        new.write(&chunk[..len])?;
        at += len as u64;
    }
    new.seal()?;
    Ok(new)
}

/// Whether a file holds what an open one holds.
fn is_same(file: &File, path: &Path) -> Result<bool> {
    let told = |e: &std::io::Error| failed(path, "read", e);
    let (other, len) = open_regular(path)?;
    if file.metadata().map_err(|e| told(&e))?.len() != len {
        return Ok(false);
    }
    let (mut one, mut two) = (vec![0; CHUNK], vec![0; CHUNK]);
    for at in (0..len).step_by(CHUNK) {
        let part = CHUNK.min((len - at) as usize);
        file.read_exact_at(&mut one[..part], at).map_err(|e| told(&e))?;
        other.read_exact_at(&mut two[..part], at).map_err(|e| told(&e))?;
        if one[..part] != two[..part] {
            return Ok(false);
        }
    }
    Ok(true)
}
