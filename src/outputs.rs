//! Output files and folders. They are checked before anything is computed, so that no result is lost at the end of a run, and no input or
//! earlier result is overwritten by mistake.

mod lock;
mod folder;

pub(crate) use folder::OutFolder;

use crate::background::BackgroundWorker;
use shardgrad::nn::Log;
use shardgrad::nn::checkpoint::Checkpoints;
use shardgrad::{Error, Kind, Result};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Files of a run folder that a run replaces.
const FILES: [&str; 3] = ["metrics.jsonl", "loss.svg", "schedule.txt"];
/// Help text if `--out` cannot be used.
pub(crate) const HELP_OTHER_FOLDER: &str = "use another folder with --out DIR";

/// Converts an I/O error on a file.
pub(crate) fn io_error(doing: &str, path: &Path, e: &io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot {doing} {}: {e}", path.display()))
}

/// Writes lines to stdout in the background, for commands whose results are files: if the reader closes the pipe, the command continues
/// silently; if the reader pauses, it does not wait. Dropping the writer waits until all lines are written.
#[derive(Debug)]
pub(crate) struct StdoutWriter {
    is_closed: Arc<AtomicBool>,
    worker: BackgroundWorker,
}

impl StdoutWriter {
    /// Starts the writer.
    pub(crate) fn new() -> StdoutWriter {
        StdoutWriter { is_closed: Arc::default(), worker: BackgroundWorker::start() }
    }

    /// Writes a line. An error other than a closed pipe is reported once on stderr.
    pub(crate) fn print_line(&self, line: impl Display) {
        let line = line.to_string();
        self.enqueue(move |print_line| print_line(&line));
    }

    /// Runs `show` after the lines before; its argument writes a line.
    pub(crate) fn enqueue(&self, show: impl FnOnce(&dyn Fn(&str)) + Send + 'static) {
        let is_closed = Arc::clone(&self.is_closed);
        self.worker.submit(move || {
            show(&|line| write_line(line, &is_closed));
            Ok(())
        });
    }
}

/// Writes a line and flushes, unless stdout has failed before.
fn write_line(line: &str, is_closed: &AtomicBool) {
    if is_closed.load(Ordering::Relaxed) {
        return;
    }
    let mut out = io::stdout().lock();
    let Err(e) = writeln!(out, "{line}").and_then(|()| out.flush()) else { return };
    if !is_closed.swap(true, Ordering::Relaxed) && e.kind() != ErrorKind::BrokenPipe {
        eprintln!("cannot write to stdout: {e}; the run continues without output");
    }
}

/// Rejects an existing path that is not a regular file.
fn check_plain(path: &Path) -> Result<()> {
    match fs::metadata(path) {
        Ok(found) if !found.is_file() => {
            let text = format!("cannot write {}: it is a folder, a pipe or a device", path.display());
            Err(Error::new(Kind::Io, text))
        }
        _ => Ok(()),
    }
}

/// Checks that a file can be opened for writing, without changing it; a missing file is created and removed again.
pub(crate) fn check_writable(path: &Path) -> io::Result<()> {
    match File::options().write(true).open(path) {
        Err(e) if e.kind() == ErrorKind::NotFound => {
            File::create_new(path)?;
            fs::remove_file(path)
        }
        done => done.map(drop),
    }
}

/// Rejects an output file given with an option if it cannot be written: not a regular file, or equal to a path of `protected` or inside one.
///
/// # Errors
/// `Kind::Io`, or `Kind::Config` for a path of `protected`, with help.
pub(crate) fn check_target<'a>(
    option: &str,
    path: &Path,
    protected: impl IntoIterator<Item = &'a Path>,
) -> Result<()> {
    let help = || format!("use another file with {option} FILE");
    check_plain(path).map_err(|e| e.detail("help", help()))?;
    let own = resolve_path(path);
    let is_overwritten = |protected: &&Path| {
        own == resolve_path(protected) || path.exists() && own.starts_with(resolve_path(protected))
    };
    if let Some(protected) = protected.into_iter().find(is_overwritten) {
        let text = format!("{option} {} would replace a file of {}", path.display(), protected.display());
        return Err(Error::new(Kind::Config, text).detail("help", help()));
    }
    check_writable(path).map_err(|e| io_error("write", path, &e).detail("help", help()))
}

/// Returns the paths in a run folder that a run replaces, removes or continues: its files, the model, the checkpoints and the event files.
pub(crate) fn output_paths(out: &Path) -> Vec<PathBuf> {
    let found = Checkpoints::find(out).unwrap_or_default();
    let checkpoints = found.complete.into_iter().map(|(_, path)| path).chain(found.incomplete);
    let files = FILES.into_iter().chain(["model"]).map(|name| out.join(name));
    files.chain(checkpoints).chain(Log::event_files(out)).collect()
}

/// Resolves the links of a path, which need not exist.
pub(crate) fn resolve_path(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let named = |folder: PathBuf| path.file_name().map_or(folder.clone(), |name| folder.join(name));
    fs::canonicalize(path)
        .or_else(|_| fs::canonicalize(folder).map(named))
        .unwrap_or_else(|_| path.to_path_buf())
}

/// Removes a file if it exists.
///
/// # Errors
/// `Kind::Io` naming it.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(io_error("remove", path, &e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;

    #[test]
    fn run_folder_is_locked_and_left_unchanged() {
        let dir = Scratch::new();
        let out = dir.path("new/out");
        let first = OutFolder::open(&out).unwrap();
        let error = OutFolder::open(&out).unwrap_err();
        assert_eq!(error.message(), format!("another run is writing to {}", out.display()));
        assert!(error.details()[0].1.ends_with("--out DIR"), "{error}");
        drop(first);
        let protected = ["metrics.jsonl", "loss.svg", "model/config.json"].map(|name| {
            let path = dir.file(&format!("new/out/{name}"), name);
            (path, name)
        });
        drop(OutFolder::open(&out).unwrap());
        assert!(protected.iter().all(|(path, text)| fs::read_to_string(path).unwrap() == *text));
        assert_eq!(fs::read_dir(out.join("model")).unwrap().count(), 1);
    }

    #[test]
    fn obstacles_in_the_run_folder_are_named_with_help() {
        let dir = Scratch::new();
        let error_text = |out: &str| {
            let error = OutFolder::open(&dir.path(out)).unwrap_err();
            assert!(error.kind() == Kind::Io && error.details()[0].1.contains("--out DIR"), "{error}");
            error.message().to_string()
        };
        dir.file("b/metrics.jsonl/x", "");
        assert!(error_text("b").contains("b/metrics.jsonl: it is a folder, a pipe or a device"));
        dir.file("c", "");
        assert_eq!(error_text("c"), format!("--out {} is a file", dir.path("c").display()));
        assert!(error_text("c/under").starts_with("cannot write "));
    }

    #[test]
    fn output_file_may_not_be_a_device_or_an_input() {
        let dir = Scratch::new();
        let (data, model) = (dir.file("data", "text"), dir.file("model/config.json", "{}"));
        let folder = dir.path("model");
        dir.file("beside/x", "");
        let check = |path: &Path| check_target("--to", path, [data.as_path(), folder.as_path()]);
        for (path, why) in [
            (Path::new("/dev/null"), "it is a folder, a pipe or a device"),
            (&folder, "it is a folder, a pipe or a device"),
            (&data, "would replace a file of "),
            (&dir.path("beside/../data"), "would replace a file of "),
            (&model, "would replace a file of "),
            (&dir.path("no/where"), "No such file"),
        ] {
            let error = check(path).unwrap_err();
            assert!(error.message().contains(why), "{error}");
            assert_eq!(error.details()[0].1, "use another file with --to FILE");
        }
        let (new, old) = (dir.path("model/new"), dir.file("old", "old"));
        check(&new).unwrap();
        check(&old).unwrap();
        assert!(!new.exists() && fs::read_to_string(old).unwrap() == "old");
    }
}
