//! File access for model folders: errors that name the file, free space, and checked opening and reading.

use shardgrad_tensor::{Error, Kind, Result, try_zeroed};
use std::fmt;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Component, Path, PathBuf};

/// Error about the contents of a file: `path: why`.
pub(crate) fn file_error(path: &Path, why: impl fmt::Display) -> Error {
    Error::new(Kind::Checkpoint, format!("{}: {why}", path.display()))
}

/// Error of the operating system about a file.
pub(crate) fn io_error(path: &Path, doing: &str, e: &std::io::Error) -> Error {
    match e.kind() {
        ErrorKind::UnexpectedEof => file_error(path, "the file shrank while it was read"),
        ErrorKind::NotFound => file_error(path, "no such file"),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            let text = format!("cannot {doing} {}: {e}", path.display());
            Error::new(Kind::Io, text).detail("help", MAKE_ROOM)
        }
        _ => Error::new(Kind::Io, format!("cannot {doing} {}: {e}", path.display())),
    }
}

/// Help for a full disk.
const MAKE_ROOM: &str = "free disk space, or save to another folder";

/// Checks that the file system of a path has enough free bytes. The files that a save replaces are removed only when
/// the new ones are complete, so their bytes do not count as free. A file system that does not report free bytes
/// passes.
///
/// # Errors
/// `Kind::Io` naming the path, the bytes that are needed, and those that are free.
pub(crate) fn check_space(path: &Path, needed: u64) -> Result<()> {
    match path.ancestors().find_map(free_bytes) {
        Some(free) if free < needed => {
            let text = format!("cannot write {}: {needed} bytes are needed, {free} are free", path.display());
            Err(Error::new(Kind::Io, text).detail("help", MAKE_ROOM))
        }
        _ => Ok(()),
    }
}

/// Returns the free bytes, for this user, on the file system of an existing path.
#[cfg(target_os = "linux")]
fn free_bytes(path: &Path) -> Option<u64> {
    // Some network file systems report no size.
    let found = rustix::fs::statvfs(folder_path(path)).ok().filter(|found| found.f_blocks > 0)?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(not(target_os = "linux"))]
fn free_bytes(_: &Path) -> Option<u64> {
    None
}

/// Opens a regular file and returns its length. Anything else (a folder, a pipe that would block, an endless device)
/// is refused before it is opened.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64)> {
    let kind = fs::metadata(path).map_err(|e| io_error(path, "open", &e))?;
    if !kind.is_file() {
        let what = if kind.is_dir() { "a folder" } else { "a pipe or a device" };
        return Err(file_error(path, format_args!("is {what}, not a file")));
    }
    let file = File::open(path).map_err(|e| io_error(path, "open", &e))?;
    let length = file.metadata().map_err(|e| io_error(path, "open", &e))?.len();
    Ok((file, length))
}

/// Whether a name that a file contains can only mean an entry of the folder of that file: no path, no `..`.
pub(crate) fn is_plain_name(name: &str) -> bool {
    let mut parts = Path::new(name).components();
    matches!((parts.next(), parts.next()), (Some(Component::Normal(only)), None) if only == name)
        && !name.contains(|c: char| c.is_control() || c == '\\')
}

/// Opens a regular file of a folder and returns its length. Follows a symlink only within the folder, or to the
/// `blobs` of the Hugging Face cache whose `snapshots` contain the folder.
///
/// # Errors
/// `Kind::Checkpoint` for a missing file, a symlink that leaves the folder, and anything but a regular file;
/// `Kind::Io` if the system refuses.
pub fn open_within(dir: &Path, name: &str) -> Result<(File, u64)> {
    let path = dir.join(name);
    let found = path.symlink_metadata().map_err(|e| io_error(&path, "open", &e))?;
    if !found.is_symlink() {
        let (file, length) = open_regular(&path)?;
        return check_same_file(&path, &path, file).map(|file| (file, length));
    }
    let target = path.canonicalize().map_err(|e| io_error(&path, "open", &e))?;
    let home = dir.canonicalize().map_err(|e| io_error(dir, "open", &e))?;
    let cache = home.parent().filter(|above| above.ends_with("snapshots")).and_then(Path::parent);
    let is_cached = cache.is_some_and(|cache| target.starts_with(cache.join("blobs")));
    if !target.starts_with(&home) && !is_cached {
        let error = file_error(&path, "is a symlink out of its folder, which is not followed");
        return Err(error.detail("help", "copy the file itself into the folder"));
    }
    let (file, length) = open_regular(&target)?;
    check_same_file(&path, &target, file).map(|file| (file, length))
}

/// Returns an open file if it is the file that was checked: no symlink was put there meanwhile.
fn check_same_file(path: &Path, checked: &Path, file: File) -> Result<File> {
    let (opened, there) = (file.metadata(), checked.symlink_metadata());
    let id = |found: std::io::Result<fs::Metadata>| found.map(|f| (f.is_file(), f.dev(), f.ino()));
    match (id(opened), id(there)) {
        (Ok(opened), Ok(there)) if opened == there && opened.0 => Ok(file),
        _ => Err(file_error(path, "was replaced while it was opened")),
    }
}

/// Allocates zeroed bytes; returns an error instead of aborting if there is not enough memory.
pub(crate) fn zeroed(path: &Path, len: u64) -> Result<Vec<u8>> {
    let bytes = usize::try_from(len).ok().and_then(|len| try_zeroed(len, "the bytes of a file").ok());
    bytes.ok_or_else(|| {
        Error::new(Kind::OutOfMemory, format!("{}: not enough memory for {len} bytes", path.display()))
    })
}

/// Reads a small text file of a folder, such as `config.json`.
///
/// # Errors
/// `Kind::Checkpoint` if the file is missing, not a regular file, longer than `bytes_max`, or not UTF-8; `Kind::Io`
/// if the system refuses.
pub fn read_text(dir: &Path, name: &str, bytes_max: u64) -> Result<String> {
    let path = &dir.join(name);
    let (file, length) = open_within(dir, name)?;
    if length > bytes_max {
        return Err(file_error(path, format_args!("has {length} bytes, at most {bytes_max} are read")));
    }
    let mut bytes = zeroed(path, length)?;
    file.read_exact_at(&mut bytes, 0).map_err(|e| io_error(path, "read", &e))?;
    String::from_utf8(bytes)
        .map_err(|e| file_error(path, format_args!("is not UTF-8 at byte {}", e.utf8_error().valid_up_to())))
}

/// Returns the path of a folder for the system, which refuses an empty path to the working folder.
pub(crate) fn folder_path(dir: &Path) -> &Path {
    if dir.as_os_str().is_empty() { Path::new(".") } else { dir }
}

/// Returns the parent folder of a path.
pub(crate) fn parent_folder(path: &Path) -> &Path {
    path.parent().map_or(Path::new("."), folder_path)
}

/// Returns the last component of a path.
pub(crate) fn last_component(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the paths of the entries of a folder; none for a folder that does not exist.
pub(crate) fn entries_of(dir: &Path) -> Result<Vec<PathBuf>> {
    let read_error = |e: std::io::Error| io_error(dir, "read", &e);
    match fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(Vec::new()),
        entries => entries
            .map_err(read_error)?
            .map(|entry| entry.map(|entry| entry.path()).map_err(read_error))
            .collect(),
    }
}

/// Syncs the entries of a folder to the disk.
pub(crate) fn sync_folder(dir: &Path) -> Result<()> {
    let dir = folder_path(dir);
    File::open(dir).and_then(|folder| folder.sync_all()).map_err(|e| io_error(dir, "write", &e))
}

/// Whether a regular file exists at a path; an error for anything else, which a save must not replace. A symlink is
/// refused too: its creator meant another place, and the Hugging Face cache stores its files behind symlinks.
pub(crate) fn is_existing_file(path: &Path) -> Result<bool> {
    let kind = match path.symlink_metadata() {
        Ok(found) => found.file_type(),
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(io_error(path, "write", &e)),
    };
    let (what, help) = match kind {
        _ if kind.is_file() => return Ok(true),
        _ if kind.is_symlink() => ("a symlink", "use the path of its target, or remove it"),
        _ if kind.is_dir() => ("a folder", "choose another name"),
        _ => ("a pipe or a device", "choose another name"),
    };
    let text = format!("cannot write {}: it is {what}, and saving does not replace it", path.display());
    Err(Error::new(Kind::Io, text).detail("help", help))
}

#[cfg(test)]
pub(crate) mod scratch {
    //! A temporary folder for one test, removed when dropped.

    use std::path::PathBuf;

    pub(crate) struct Scratch(PathBuf);

    impl Scratch {
        pub(crate) fn new() -> Scratch {
            let folder = |i| std::env::temp_dir().join(format!("shardgrad-nn-{}-{}", std::process::id(), i));
            // The first free name.
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
    fn text_longer_than_limit_is_refused() {
        let dir = Scratch::new();
        dir.file("config.json", b"{\n}");
        let read_text = |name: &str, bytes_max| read_text(&dir.path(""), name, bytes_max);
        assert_eq!(read_text("config.json", 3).unwrap(), "{\n}");
        let error_text =
            |result: Result<String>| result.unwrap_err().message().rsplit_once(": ").unwrap().1.to_string();
        assert_eq!(error_text(read_text("config.json", 2)), "has 3 bytes, at most 2 are read");
        dir.file("x", b"ab\xffcd");
        assert_eq!(error_text(read_text("x", 9)), "is not UTF-8 at byte 2");
        assert_eq!(error_text(read_text("y", 9)), "no such file");
        assert_eq!(dir.names(), ["config.json", "x"]);
    }

    #[test]
    fn save_larger_than_free_space_is_refused_before_writing() {
        let dir = Scratch::new();
        for path in [dir.path(""), dir.path("not/there/yet")] {
            check_space(&path, 1).unwrap();
            let error = check_space(&path, u64::MAX).unwrap_err();
            let text = format!("cannot write {}: {} bytes are needed, ", path.display(), u64::MAX);
            assert!(error.kind() == Kind::Io && error.message().starts_with(&text), "{error}");
            assert_eq!(error.details()[0].1, "free disk space, or save to another folder");
        }
        check_space(Path::new("x"), 1).unwrap();
    }
}
