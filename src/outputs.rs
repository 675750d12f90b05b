//! Where programs write. It is looked at before anything is computed, so that no result is lost at the end of a run, and
//! nothing that an earlier run left, or that is read, is destroyed by a slip.

use shardgrad::{Error, Kind, Result};
use std::fmt::Display;
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Files of a run's folder that a run replaces.
const FILES: [&str; 3] = ["metrics.jsonl", "loss.svg", "schedule.txt"];
/// What a repair offers where `--out` cannot be used.
const ELSEWHERE: &str = "give another folder with --out DIR";

/// An error of the operating system about a file.
pub(crate) fn cannot(doing: &str, path: &Path, e: &io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot {doing} {}: {e}", path.display()))
}

/// Lines on stdout of a program that leaves more than them: where nobody reads any more, it goes on in silence.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    over: AtomicBool,
}

impl Lines {
    /// Writes a line at once. That stdout cannot be written, unless its reader has gone, is told once on stderr.
    pub(crate) fn say(&self, line: impl Display) {
        if self.over.load(Ordering::Relaxed) {
            return;
        }
        let mut out = io::stdout().lock();
        let Err(e) = writeln!(out, "{line}").and_then(|()| out.flush()) else { return };
        if !self.over.swap(true, Ordering::Relaxed) && e.kind() != ErrorKind::BrokenPipe {
            eprintln!("cannot write to stdout: {e}; the run goes on without it");
        }
    }
}

/// The folder of a run, which no other run writes into until this is dropped or the process ends.
#[derive(Debug)]
pub(crate) struct OutFolder {
    path: PathBuf,
    _lock: File,
}

impl OutFolder {
    /// Makes the folder if need be and locks it. What is in it stays as it is.
    ///
    /// # Errors
    /// `Kind::Io` with a repair: for a folder that cannot be written, for a file or folder in the place of the other, and
    /// while another run writes there.
    pub(crate) fn open(path: &Path) -> Result<OutFolder> {
        let refuse = |path: &Path, e: &io::Error| cannot("write", path, e).detail("help", ELSEWHERE);
        fs::create_dir_all(path).map_err(|e| refuse(path, &e))?;
        // The file stays: whoever removed it would let two runs lock two files of one name.
        let lock = path.join(".lock");
        let lock = File::options().write(true).create(true).truncate(false).open(lock);
        let lock = lock.map_err(|e| refuse(path, &e))?;
        if let Err(TryLockError::WouldBlock) = lock.try_lock() {
            let text = format!("another run is writing to {}", path.display());
            return Err(
                Error::new(Kind::Io, text).detail("help", format!("wait until it has ended, or {ELSEWHERE}"))
            );
        }
        // A file system without locks is no reason to refuse.
        for name in FILES {
            let file = path.join(name);
            check_plain(&file).map_err(|e| e.detail("help", ELSEWHERE))?;
            if file.exists() {
                try_to_write(&file).map_err(|e| refuse(&file, &e))?;
            }
        }
        let model = path.join("model");
        match fs::metadata(&model) {
            Ok(found) if found.is_dir() => {
                try_to_write(&model.join(".new")).map_err(|e| refuse(&model, &e))?;
            }
            Ok(_) => {
                let text = format!("cannot write {}: it is no folder", model.display());
                return Err(Error::new(Kind::Io, text)
                    .detail("help", format!("move it out of the way, or {ELSEWHERE}")));
            }
            Err(e) if e.kind() == ErrorKind::NotFound => {}
            Err(e) => return Err(refuse(&model, &e)),
        }
        Ok(OutFolder { path: path.to_path_buf(), _lock: lock })
    }

    /// A path in the folder.
    #[must_use]
    pub(crate) fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

/// Refuses what is there and is no plain file.
fn check_plain(path: &Path) -> Result<()> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            let text = format!("cannot write {}: a folder, a pipe or a device has this name", path.display());
            Err(Error::new(Kind::Io, text))
        }
        _ => Ok(()),
    }
}

/// Opens a file for writing and leaves it as it is; one that is not there is made and removed again.
fn try_to_write(path: &Path) -> io::Result<()> {
    match File::options().write(true).open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            File::create_new(path)?;
            fs::remove_file(path)
        }
        done => done.map(drop),
    }
}

/// Refuses a file, named with an option, that cannot be written or should not be: another thing than a plain file, one of
/// `kept`, or one that stands in a folder of `kept`.
///
/// # Errors
/// `Kind::Io`, and `Kind::Config` for what is kept, with a repair.
pub(crate) fn check_target<'a>(
    option: &str,
    path: &Path,
    kept: impl IntoIterator<Item = &'a Path>,
) -> Result<()> {
    let help = || format!("give another file with {option} FILE");
    check_plain(path).map_err(|e| e.detail("help", help()))?;
    let own = place(path);
    let spoilt = |kept: &&Path| own == place(kept) || path.exists() && own.starts_with(place(kept));
    if let Some(kept) = kept.into_iter().find(spoilt) {
        let text = format!("{option} {} would replace a file of {}", path.display(), kept.display());
        return Err(Error::new(Kind::Config, text).detail("help", help()));
    }
    try_to_write(path).map_err(|e| cannot("write", path, &e).detail("help", help()))
}

/// Where a path leads, links followed, whether something stands there or not.
fn place(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let named = |folder: PathBuf| path.file_name().map_or(folder.clone(), |name| folder.join(name));
    fs::canonicalize(path)
        .or_else(|_| fs::canonicalize(folder).map(named))
        .unwrap_or_else(|_| path.to_path_buf())
}

/// Copies files from a folder to another, those that there are; each appears under its name when it is whole.
///
/// # Errors
/// `Kind::Io` naming the file.
pub(crate) fn copy_files(names: &[&str], from: &Path, to: &Path) -> Result<()> {
    if place(from) == place(to) {
        return Ok(());
    }
    for name in names {
        let new = to.join(format!(".{name}.new"));
        match fs::copy(from.join(name), &new).and_then(|_| fs::rename(&new, to.join(name))) {
            Err(e) if e.kind() != ErrorKind::NotFound => {
                let _ = fs::remove_file(&new);
                let text = format!("cannot copy {name} to {}: {e}", to.display());
                return Err(Error::new(Kind::Io, text));
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;

    #[test]
    fn a_folder_has_one_run_at_a_time_and_stays_as_it_is() {
        let dir = Scratch::new();
        let out = dir.path("new/out");
        let first = OutFolder::open(&out).unwrap();
        let error = OutFolder::open(&out).unwrap_err();
        assert_eq!(error.message(), format!("another run is writing to {}", out.display()));
        assert!(error.details()[0].1.ends_with("--out DIR"), "{error}");
        drop(first);
        let kept = ["metrics.jsonl", "loss.svg", "model/config.json"].map(|name| {
            let path = dir.file(&format!("new/out/{name}"), name);
            (path, name)
        });
        drop(OutFolder::open(&out).unwrap());
        assert!(kept.iter().all(|(path, text)| fs::read_to_string(path).unwrap() == *text));
        assert_eq!(fs::read_dir(out.join("model")).unwrap().count(), 1);
    }

    #[test]
    fn what_stands_in_the_way_is_named_with_a_repair() {
        let dir = Scratch::new();
        let told = |out: &str| {
            let error = OutFolder::open(&dir.path(out)).unwrap_err();
            assert!(error.kind() == Kind::Io && error.details()[0].1.contains("--out DIR"), "{error}");
            error.message().to_string()
        };
        dir.file("a/model", "a file");
        assert!(told("a").ends_with("a/model: it is no folder"));
        dir.file("b/metrics.jsonl/x", "");
        assert!(told("b").contains("b/metrics.jsonl: a folder, a pipe or a device"));
        dir.file("c", "");
        assert!(told("c").starts_with("cannot write "));
    }

    #[test]
    fn a_target_is_no_device_and_nothing_that_is_kept() {
        let dir = Scratch::new();
        let (data, model) = (dir.file("data", "text"), dir.file("model/config.json", "{}"));
        let folder = dir.path("model");
        dir.file("beside/x", "");
        let check = |path: &Path| check_target("--to", path, [data.as_path(), folder.as_path()]);
        for (path, why) in [
            (Path::new("/dev/null"), "a folder, a pipe or a device has this name"),
            (&folder, "a folder, a pipe or a device has this name"),
            (&data, "would replace a file of "),
            (&dir.path("beside/../data"), "would replace a file of "),
            (&model, "would replace a file of "),
            (&dir.path("no/where"), "No such file"),
        ] {
            let error = check(path).unwrap_err();
            assert!(error.message().contains(why), "{error}");
            assert_eq!(error.details()[0].1, "give another file with --to FILE");
        }
        let (new, old) = (dir.path("model/new"), dir.file("old", "old"));
        check(&new).unwrap();
        check(&old).unwrap();
        assert!(!new.exists() && fs::read_to_string(old).unwrap() == "old");
    }

    #[test]
    fn files_are_copied_whole_and_never_onto_themselves() {
        let dir = Scratch::new();
        dir.file("from/a", "of from");
        let old = dir.file("to/a", "older and longer");
        let copy =
            |from: &str, to: &str| copy_files(&["a", "absent"], &dir.path(from), &dir.path(to)).unwrap();
        copy("from", "from/../from");
        copy("from", "to");
        std::os::unix::fs::symlink(&old, dir.file("links/b", "").with_file_name("a")).unwrap();
        copy("links", "to");
        let text = |path| fs::read_to_string(dir.path(path)).unwrap();
        assert_eq!([text("from/a"), text("to/a")], ["of from", "of from"]);
        assert_eq!(fs::read_dir(dir.path("to")).unwrap().count(), 1);
    }
}
