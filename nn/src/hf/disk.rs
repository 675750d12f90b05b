//! Files of a model folder on disk: opened with suspicion, written whole or not at all.

use shardgrad_tensor::{Error, Kind, Result};
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::io::{BufWriter, ErrorKind, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

/// An error about a file: `path: why`.
pub(super) fn refuse(path: &Path, why: impl fmt::Display) -> Error {
    Error::new(Kind::Checkpoint, format!("{}: {why}", path.display()))
}

/// An error of the operating system about a file.
pub(super) fn failed(path: &Path, doing: &str, e: &std::io::Error) -> Error {
    match e.kind() {
        ErrorKind::UnexpectedEof => refuse(path, "the file became shorter while it was read"),
        ErrorKind::NotFound => refuse(path, "there is no such file"),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            let text = format!("cannot {doing} {}: {e}", path.display());
            Error::new(Kind::Io, text).detail("help", MAKE_ROOM)
        }
        _ => Error::new(Kind::Io, format!("cannot {doing} {}: {e}", path.display())),
    }
}

/// What to do about a full disk.
const MAKE_ROOM: &str = "make room on the disk, or save to another folder";

/// Checks that the file system of a path has room for more bytes. What a save replaces goes only when the new files are whole,
/// so its bytes are not counted as free. A file system that does not tell passes.
///
/// # Errors
/// `Kind::Io` naming the path, the bytes that are needed, and those that are free.
pub(crate) fn check_space(path: &Path, needed: u64) -> Result<()> {
    match path.ancestors().find_map(free_bytes) {
        Some(free) if free < needed => {
            let text =
                format!("cannot write {}: it takes {needed} bytes, of which {free} are free", path.display());
            Err(Error::new(Kind::Io, text).detail("help", MAKE_ROOM))
        }
        _ => Ok(()),
    }
}

/// The bytes that the file system of an existing file or folder has left for this user.
#[cfg(target_os = "linux")]
fn free_bytes(path: &Path) -> Option<u64> {
    let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
    // Some file systems of networks tell no size at all.
    let found = rustix::fs::statvfs(path).ok().filter(|found| found.f_blocks > 0)?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(not(target_os = "linux"))]
fn free_bytes(_: &Path) -> Option<u64> {
    None
}

/// Opens a regular file and tells its length. Anything else (a folder, a pipe that would block for ever, a
/// device without end) is refused before it is opened.
pub(super) fn open_regular(path: &Path) -> Result<(File, u64)> {
    let kind = fs::metadata(path).map_err(|e| failed(path, "open", &e))?;
    if !kind.is_file() {
        let what = if kind.is_dir() { "a folder" } else { "a pipe or a device" };
        return Err(refuse(path, format_args!("is {what}, not a file")));
    }
    let file = File::open(path).map_err(|e| failed(path, "open", &e))?;
    let length = file.metadata().map_err(|e| failed(path, "open", &e))?.len();
    Ok((file, length))
}

/// Whether a name that a file gives can only mean an entry of the folder that the file is in.
pub(super) fn is_plain(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(only)), None) if only == name)
        && !name.contains(|c: char| c.is_control() || c == '\\')
}

/// Opens a regular file of a folder and tells its length. A link is followed within the folder only, or to the `blobs`
/// beside the `snapshots` that the folder is one of: the cache of Hugging Face keeps its files there.
///
/// # Errors
/// `Kind::Checkpoint` for a file that is missing, a link that leads elsewhere, and what is no regular file; `Kind::Io` if the
/// system refuses.
pub fn open_within(dir: &Path, name: &str) -> Result<(File, u64)> {
    let path = dir.join(name);
    let found = path.symlink_metadata().map_err(|e| failed(&path, "open", &e))?;
    if !found.is_symlink() {
        let (file, length) = open_regular(&path)?;
        return same(&path, &path, file).map(|file| (file, length));
    }
    let target = path.canonicalize().map_err(|e| failed(&path, "open", &e))?;
    let home = dir.canonicalize().map_err(|e| failed(dir, "open", &e))?;
    let cache = home.parent().filter(|above| above.ends_with("snapshots")).and_then(Path::parent);
    let is_cached = cache.is_some_and(|cache| target.starts_with(cache.join("blobs")));
    if !target.starts_with(&home) && !is_cached {
        let error = refuse(&path, "is a link that leads out of its folder, which is not followed");
        return Err(error.detail("help", "put the file itself there"));
    }
    let (file, length) = open_regular(&target)?;
    same(&path, &target, file).map(|file| (file, length))
}

/// An open file, if it is what stands at the place that was checked: no link was put there meanwhile.
fn same(path: &Path, checked: &Path, file: File) -> Result<File> {
    let (opened, there) = (file.metadata(), checked.symlink_metadata());
    let id = |found: std::io::Result<fs::Metadata>| found.map(|f| (f.is_file(), f.dev(), f.ino()));
    match (id(opened), id(there)) {
        (Ok(opened), Ok(there)) if opened == there && opened.0 => Ok(file),
        _ => Err(refuse(path, "was exchanged while it was opened")),
    }
}

/// A buffer of zeros, or an error instead of an abort where the memory is not to be had.
pub(super) fn zeros(path: &Path, len: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let reserved = usize::try_from(len).ok().and_then(|n| bytes.try_reserve_exact(n).ok().map(|()| n));
    let n = reserved.ok_or_else(|| {
        Error::new(Kind::OutOfMemory, format!("{}: no memory for {len} bytes at once", path.display()))
    })?;
    bytes.resize(n, 0);
    Ok(bytes)
}

/// The text of a small file of a folder, such as `config.json`.
///
/// # Errors
/// `Kind::Checkpoint` if it is missing, no regular file, longer than `bytes_max`, or not UTF-8; `Kind::Io` if
/// the system refuses.
pub fn read_text(dir: &Path, name: &str, bytes_max: u64) -> Result<String> {
    let path = &dir.join(name);
    let (file, length) = open_within(dir, name)?;
    if length > bytes_max {
        return Err(refuse(path, format_args!("has {length} bytes, at most {bytes_max} are read")));
    }
    let mut bytes = zeros(path, length)?;
    file.read_exact_at(&mut bytes, 0).map_err(|e| failed(path, "read", &e))?;
    String::from_utf8(bytes)
        .map_err(|e| refuse(path, format_args!("is not UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}

/// Syncs the names of a folder to the disk.
pub(super) fn sync_folder(dir: &Path) -> Result<()> {
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    File::open(dir).and_then(|folder| folder.sync_all()).map_err(|e| failed(dir, "write", &e))
}

/// Whether a file stands at a place; an error for what is no file, which nothing of ours may replace. A link is none either:
/// whoever made it meant another place, and a cache of Hugging Face keeps its files behind links.
pub(super) fn is_taken(path: &Path) -> Result<bool> {
    let kind = match path.symlink_metadata() {
        Ok(found) => found.file_type(),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(failed(path, "write", &e)),
    };
    let (what, help) = match kind {
        _ if kind.is_file() => return Ok(true),
        _ if kind.is_symlink() => ("a link", "name the file that it leads to, or remove it"),
        _ if kind.is_dir() => ("a folder", "give another name"),
        _ => ("a pipe or a device", "give another name"),
    };
    let text = format!("cannot write {}: it is {what}, which is not replaced", path.display());
    Err(Error::new(Kind::Io, text).detail("help", help))
}

/// What stands between the name of a file that is being written and the number of the process that writes it.
const MARK: &str = ".tmp-";

/// The name that a file is to have, and the number of the process, if this is the name of one that is being written.
pub(super) fn unfinished(name: &str) -> Option<(&str, u32)> {
    let (name, id) = name.rsplit_once(MARK)?;
    let is_number = id.bytes().all(|b| b.is_ascii_digit());
    id.parse().ok().filter(|_| is_number).map(|id| (name, id))
}

/// A file that takes its name only when it is whole: written under another name beside it, synced, then
/// renamed. Dropped before that, it leaves nothing behind.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) path: PathBuf,
    temporary: PathBuf,
    file: Option<BufWriter<File>>,
    is_kept: bool,
}

impl Pending {
    /// Begins a file.
    ///
    /// # Errors
    /// As [`is_taken`]; `Kind::Io` if the system refuses.
    pub(super) fn create(path: &Path) -> Result<Pending> {
        is_taken(path)?;
        let mut name =
            path.file_name().ok_or_else(|| refuse(path, "is not the name of a file"))?.to_os_string();
        name.push(format!("{MARK}{}", std::process::id()));
        let temporary = path.with_file_name(name);
        // A dead process may have left one of the same number; never write through what stands there.
        if temporary.symlink_metadata().is_ok() {
            fs::remove_file(&temporary).map_err(|e| failed(&temporary, "remove", &e))?;
        }
        let file =
            OpenOptions::new().write(true).create_new(true).open(&temporary).map_err(|e| match e.kind() {
                ErrorKind::NotFound => Error::new(
                    Kind::Io,
                    format!("cannot write {}: its folder does not exist", path.display()),
                ),
                _ => failed(path, "write", &e),
            })?;
        let file = Some(BufWriter::with_capacity(1 << 20, file));
        Ok(Pending { path: path.to_path_buf(), temporary, file, is_kept: false })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match &mut self.file {
            Some(file) => file.write_all(bytes).map_err(|e| failed(&self.path, "write", &e)),
            None => Ok(()),
        }
    }

    /// Writes over bytes that were written before.
    pub(super) fn rewrite(&mut self, at: u64, bytes: &[u8]) -> Result<()> {
        let Some(file) = &mut self.file else { return Ok(()) };
        let written = file.flush().and_then(|()| file.get_ref().write_all_at(bytes, at));
        written.map_err(|e| failed(&self.path, "write", &e))
    }

    /// Ends the file and syncs it to the disk; its name is still another.
    pub(super) fn seal(&mut self) -> Result<()> {
        let Some(mut file) = self.file.take() else { return Ok(()) };
        let sealed = file.flush().and_then(|()| file.get_ref().sync_all());
        sealed.map_err(|e| failed(&self.path, "write", &e))
    }

    /// From now on the file stays under its other name, whatever becomes of this.
    pub(super) fn keep(&mut self) {
        self.is_kept = true;
    }

    /// Gives a sealed file its name, in place of the file that has it.
    ///
    /// # Errors
    /// As [`is_taken`]; `Kind::Io` if the system refuses.
    pub(super) fn place(self) -> Result<()> {
        is_taken(&self.path)?;
        fs::rename(&self.temporary, &self.path).map_err(|e| failed(&self.path, "write", &e))
    }

    /// Ends the file and gives it its name.
    pub(super) fn commit(mut self) -> Result<()> {
        self.seal()?;
        let folder = self.path.parent().unwrap_or(Path::new("")).to_path_buf();
        self.place()?;
        sync_folder(&folder)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if !self.is_kept {
            // After a commit there is nothing of this name; otherwise nobody is left to tell of a failure.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

/// Writes a small file whole or not at all.
pub(super) fn write_text(path: &Path, text: &str) -> Result<()> {
    sealed_text(path, text)?.commit()
}

/// A small file, whole and synced, under its other name.
pub(super) fn sealed_text(path: &Path, text: &str) -> Result<Pending> {
    let mut pending = Pending::create(path)?;
    pending.write(text.as_bytes())?;
    pending.seal()?;
    Ok(pending)
}

#[cfg(test)]
pub(super) mod scratch {
    //! A folder for one test, removed at its end.

    use std::path::PathBuf;

    pub(crate) struct Scratch(PathBuf);

    impl Scratch {
        pub(crate) fn new() -> Scratch {
            let folder = |i| std::env::temp_dir().join(format!("shardgrad-nn-{}-{}", std::process::id(), i));
            // The first name that no other test has taken.
            let free = |dir: &PathBuf| std::fs::create_dir(dir).is_ok();
            Scratch((0..10_000).map(folder).find(free).unwrap())
        }

        pub(crate) fn path(&self, name: &str) -> PathBuf {
            self.0.join(name)
        }

        pub(crate) fn file(&self, name: &str, bytes: &[u8]) -> PathBuf {
            std::fs::write(self.path(name), bytes).unwrap();
            self.path(name)
        }

        pub(crate) fn names(&self) -> Vec<String> {
            let entries = std::fs::read_dir(&self.0).unwrap();
            let mut names: Vec<String> =
                entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::scratch::Scratch;
    use super::*;

    #[test]
    fn text_is_read_within_its_limit() {
        let dir = Scratch::new();
        let path = dir.path("config.json");
        write_text(&path, "{}").unwrap();
        write_text(&path, "{\n}").unwrap();
        let read_text = |name: &str, bytes_max| read_text(&dir.path(""), name, bytes_max);
        assert_eq!(read_text("config.json", 3).unwrap(), "{\n}");
        let told =
            |result: Result<String>| result.unwrap_err().message().rsplit_once(": ").unwrap().1.to_string();
        assert_eq!(told(read_text("config.json", 2)), "has 3 bytes, at most 2 are read");
        dir.file("x", b"ab\xffcd");
        assert_eq!(told(read_text("x", 9)), "is not UTF-8 at byte 2");
        assert_eq!(told(read_text("y", 9)), "there is no such file");
        assert_eq!(dir.names(), ["config.json", "x"]);
    }

    #[test]
    fn a_full_disk_is_an_error_that_names_the_file() {
        let mut full = Pending {
            path: PathBuf::from("model.safetensors"),
            temporary: PathBuf::from("/nonexistent/x"),
            file: Some(BufWriter::with_capacity(
                4,
                OpenOptions::new().write(true).open("/dev/full").unwrap(),
            )),
            is_kept: false,
        };
        let error = full.write(b"more than four").unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(error.message().starts_with("cannot write model.safetensors: No space left"), "{error}");
        assert!(error.details()[0].1.starts_with("make room on the disk"), "{error}");
    }

    #[test]
    fn more_bytes_than_the_file_system_has_left_are_refused_before_they_are_written() {
        let dir = Scratch::new();
        for path in [dir.path(""), dir.path("not/there/yet")] {
            check_space(&path, 1).unwrap();
            let error = check_space(&path, u64::MAX).unwrap_err();
            let text = format!("cannot write {}: it takes {} bytes, of which ", path.display(), u64::MAX);
            assert!(error.kind() == Kind::Io && error.message().starts_with(&text), "{error}");
            assert_eq!(error.details()[0].1, "make room on the disk, or save to another folder");
        }
        check_space(Path::new("x"), 1).unwrap();
    }

    #[test]
    fn a_stale_temporary_is_replaced_and_a_link_in_its_place_is_not_followed() {
        let dir = Scratch::new();
        let victim = dir.file("victim", b"keep");
        let name = format!("m.tmp-{}", std::process::id());
        std::os::unix::fs::symlink(&victim, dir.path(&name)).unwrap();
        write_text(&dir.path("m"), "new").unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"keep");
        assert_eq!(dir.names(), ["m", "victim"]);
    }

    #[test]
    fn what_is_no_file_is_not_replaced() {
        let dir = Scratch::new();
        let victim = dir.file("victim", b"keep");
        std::os::unix::fs::symlink(&victim, dir.path("link")).unwrap();
        std::os::unix::fs::symlink("/dev/full", dir.path("device")).unwrap();
        fs::create_dir(dir.path("folder")).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(dir.path("socket")).unwrap();
        let all = dir.names();
        for (name, what) in [
            ("link", "a link"),
            ("device", "a link"),
            ("folder", "a folder"),
            ("socket", "a pipe or a device"),
        ] {
            let path = dir.path(name);
            let error = write_text(&path, "new").unwrap_err();
            assert_eq!(error.kind(), Kind::Io);
            let told = format!("cannot write {}: it is {what}, which is not replaced", path.display());
            assert_eq!(error.message(), told);
        }
        // Nor if it comes while the file is written.
        let late = sealed_text(&dir.path("late"), "new").unwrap();
        fs::create_dir(dir.path("late")).unwrap();
        assert!(late.commit().unwrap_err().message().contains("it is a folder"));
        fs::remove_dir(dir.path("late")).unwrap();
        assert_eq!((dir.names(), fs::read(&victim).unwrap()), (all, b"keep".to_vec()));
    }

    #[test]
    fn names_of_files_that_are_being_written() {
        assert_eq!(unfinished("model.safetensors.tmp-17"), Some(("model.safetensors", 17)));
        for other in
            ["model.safetensors", "m.tmp-", "m.tmp-x", "m.tmp-+1", "m.tmp-1.bak", "m.tmp-99999999999"]
        {
            assert_eq!(unfinished(other), None, "{other}");
        }
    }
}
