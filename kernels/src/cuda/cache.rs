//! The cache of compiled kernels on disk: one file per program, named by a hash of its key and used only if it contains the whole
//! key and its checksum matches.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;

const MAGIC: &[u8; 8] = b"sgcubin1";

/// The contents of a file, besides its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The log of the compiler, with the resource usage.
    pub(super) log: String,
    /// The machine code.
    pub(super) cubin: Vec<u8>,
}

/// A folder of compiled kernels.
#[derive(Debug)]
pub(super) struct Cache {
    folder: PathBuf,
}

impl Cache {
    pub(super) fn new(folder: &Path) -> Cache {
        Cache { folder: folder.join("cubin") }
    }

    pub(super) fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("{:016x}.cubin", hash(&[key.as_bytes()])))
    }

    /// Reads the entry of a key; `None` if its file is missing, damaged or of another key.
    pub(super) fn read(&self, key: &str) -> Option<Entry> {
        let bytes = fs::read(self.path(key)).ok()?;
        let (found, entry) = parse(&bytes)?;
        (found == key.as_bytes()).then_some(entry)
    }

    /// Writes the entry of a key. Failures are ignored: the next run compiles the program again, which takes seconds.
    pub(super) fn write(&self, key: &str, entry: &Entry) {
        // The draft is named by process and thread; a thread writes one file at a time.
        let own = format!("{}-{:?}.draft", process::id(), std::thread::current().id());
        let draft = self.folder.join(own.replace(['(', ')'], ""));
        let done = fs::create_dir_all(&self.folder)
            .and_then(|()| fs::write(&draft, bytes(key, entry)))
            .and_then(|()| fs::rename(&draft, self.path(key)));
        if done.is_err() {
            // A full disk may leave a partial draft.
            let _ = fs::remove_file(&draft);
        }
    }
}

fn bytes(key: &str, entry: &Entry) -> Vec<u8> {
    let parts = [key.as_bytes(), entry.log.as_bytes(), &entry.cubin];
    let mut file = MAGIC.to_vec();
    for part in parts {
        file.extend((part.len() as u64).to_le_bytes());
    }
    file.extend(hash(&parts).to_le_bytes());
    parts.iter().for_each(|part| file.extend_from_slice(part));
    file
}

fn parse(bytes: &[u8]) -> Option<(&[u8], Entry)> {
    let (head, mut rest) = bytes.split_at_checked(40)?;
    let word = |i: usize| u64::from_le_bytes(head[8 * i..8 * i + 8].try_into().expect("eight bytes"));
    if &head[..8] != MAGIC {
        return None;
    }
    let mut parts: [&[u8]; 3] = [&[]; 3];
    for (i, part) in parts.iter_mut().enumerate() {
        (*part, rest) = rest.split_at_checked(usize::try_from(word(i + 1)).ok()?)?;
    }
    let whole = rest.is_empty() && hash(&parts) == word(4);
    let log = String::from_utf8(parts[1].to_vec()).ok().filter(|_| whole)?;
    Some((parts[0], Entry { log, cubin: parts[2].to_vec() }))
}

/// Returns the FNV-1a hash of the parts and their lengths.
fn hash(parts: &[&[u8]]) -> u64 {
    let mut state = 0xcbf2_9ce4_8422_2325u64;
    for part in parts {
        for byte in part.iter().copied().chain((part.len() as u64).to_le_bytes()) {
            state = (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
    state
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_entry_is_detected() {
        let entry = Entry { log: "fine".into(), cubin: (0..50).collect() };
        let good = bytes("key", &entry);
        assert_eq!(parse(&good), Some((&b"key"[..], entry)));
        for at in 0..good.len() {
            assert_eq!(parse(&good[..at]), None, "cut at {at}");
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert_eq!(parse(&bad), None, "changed at {at}");
        }
        assert_eq!(parse(&[&good[..], &[0]].concat()), None, "longer");
    }
}
