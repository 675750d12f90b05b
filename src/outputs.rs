//! Where programs write. It is looked at before anything is computed, so that no result is lost at the end of a run, and
//! nothing that an earlier run left, or that is read, is destroyed by a slip.

mod lock;
mod folder;

pub(crate) use folder::OutFolder;

use crate::behind::Behind;
use crate::tokenizer::TOKENIZER_FILE;
use shardgrad::nn::hf::{Checkpoints, Companion, check_replaceable, open_within};
use shardgrad::{Error, Kind, Result};
use std::fmt::Display;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Files of a run's folder that a run replaces.
const FILES: [&str; 3] = ["metrics.jsonl", "loss.svg", "schedule.txt"];
/// What a repair offers where `--out` cannot be used.
const ELSEWHERE: &str = "give another folder with --out DIR";

/// An error of the operating system about a file.
pub(crate) fn cannot(doing: &str, path: &Path, e: &io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot {doing} {}: {e}", path.display()))
}

/// Lines on stdout of a program that leaves more than them: where nobody reads any more, it goes on in silence, and where the
/// reader pauses, it does not wait. All is written when this is dropped.
#[derive(Debug)]
pub(crate) struct Lines {
    over: Arc<AtomicBool>,
    behind: Behind,
}

impl Lines {
    /// Nothing is said yet.
    pub(crate) fn new() -> Lines {
        Lines { over: Arc::default(), behind: Behind::start() }
    }

    /// Writes a line, behind those before it. That stdout cannot be written, unless its reader has gone, is told once on
    /// stderr.
    pub(crate) fn say(&self, line: impl Display) {
        let line = line.to_string();
        self.then(move |say| say(&line));
    }

    /// Does something else for people, behind the lines before it; it is handed what writes a line.
    pub(crate) fn then(&self, show: impl FnOnce(&dyn Fn(&str)) + Send + 'static) {
        let over = Arc::clone(&self.over);
        self.behind.hand(move || {
            show(&|line| write_line(line, &over));
            Ok(())
        });
    }
}

/// Writes a line at once, unless it is over with that.
fn write_line(line: &str, over: &AtomicBool) {
    if over.load(Ordering::Relaxed) {
        return;
    }
    let mut out = io::stdout().lock();
    let Err(e) = writeln!(out, "{line}").and_then(|()| out.flush()) else { return };
    if !over.swap(true, Ordering::Relaxed) && e.kind() != ErrorKind::BrokenPipe {
        eprintln!("cannot write to stdout: {e}; the run goes on without it");
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

/// What a run replaces or removes in its folder: its own files, and those of the model and of checkpoints.
pub(crate) fn written(out: &Path) -> Vec<PathBuf> {
    let found = Checkpoints::find(out).unwrap_or_default();
    let checkpoints = found.whole.into_iter().map(|(_, path)| path).chain(found.unfinished);
    FILES.into_iter().chain(["model"]).map(|name| out.join(name)).chain(checkpoints).collect()
}

/// Where a path leads, links followed, whether something stands there or not.
pub(crate) fn place(path: &Path) -> PathBuf {
    let folder = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let named = |folder: PathBuf| path.file_name().map_or(folder.clone(), |name| folder.join(name));
    fs::canonicalize(path)
        .or_else(|_| fs::canonicalize(folder).map(named))
        .unwrap_or_else(|_| path.to_path_buf())
}

/// Refuses a folder in the place of the model that a save could not fill: all that a save refuses, before there is something
/// to save.
fn check_model(model: &Path) -> Result<()> {
    let refuse = |e: &io::Error| cannot("write", model, e).detail("help", ELSEWHERE);
    let in_the_way = |why: String| {
        let help = format!("move it out of the way, or {ELSEWHERE}");
        Error::new(Kind::Io, why).detail("help", help)
    };
    let shown = model.display();
    match fs::metadata(model) {
        Ok(found) if found.is_dir() => {
            check_replaceable(model).map_err(|e| in_the_way(e.message().to_string()))?;
            let is_odd = |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
            if let Some(odd) = COMPANIONS.map(|name| model.join(name)).iter().find(|path| is_odd(path)) {
                return Err(in_the_way(format!("cannot write {}: it is a folder", odd.display())));
            }
            try_to_write(&model.join(".new")).map_err(|e| refuse(&e))
        }
        Ok(_) => Err(in_the_way(format!("cannot write {shown}: it is no folder"))),
        Err(e) if e.kind() == ErrorKind::NotFound && model.is_symlink() => {
            Err(in_the_way(format!("cannot write {shown}: it is a link that leads nowhere")))
        }
        Err(e) if e.kind() == ErrorKind::NotFound => Ok(()),
        Err(e) => Err(refuse(&e)),
    }
}

/// What goes with a model beside config and weights, and is not changed by training.
const COMPANIONS: [&str; 12] = [
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// The files that go with a model, of the folder that it comes from: open from the beginning of a run, so that at its end
/// those are copied that were there.
#[derive(Debug)]
pub(crate) struct Companions(Vec<(&'static str, Option<File>)>);

impl Companions {
    /// Opens the files of a folder; of none, if the model is a new one.
    ///
    /// # Errors
    /// As [`open_within`]: for a link that leads out of the folder, and for what is no file.
    pub(crate) fn open(from: Option<&Path>) -> Result<Companions> {
        let open = |name: &'static str| {
            let is_there = |from: &&Path| from.join(name).symlink_metadata().is_ok();
            let file = from.filter(is_there).map(|from| open_within(from, name)).transpose()?;
            Ok((name, file.map(|(file, _)| file)))
        };
        COMPANIONS.into_iter().map(open).collect::<Result<_>>().map(Companions)
    }

    /// The files as a save takes them: each that is open is to be there, and no other of an earlier model.
    pub(crate) fn all(&self) -> impl Iterator<Item = Companion<'_>> {
        self.0.iter().map(|(name, file)| Companion { name, file: file.as_ref() })
    }
}

/// Removes a file, if there is one.
///
/// # Errors
/// `Kind::Io` naming it.
pub(crate) fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(cannot("remove", path, &e)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;
    use std::os::unix::fs::symlink;

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
        assert_eq!(told("c"), format!("--out {} is a file", dir.path("c").display()));
        assert!(told("c/under").starts_with("cannot write "));
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
    fn what_a_save_refuses_is_refused_before_there_is_something_to_save() {
        let told = |dir: &Scratch, name: &str| {
            let error = OutFolder::open(&dir.path("out")).unwrap_err();
            let help = "move it out of the way, or give another folder with --out DIR";
            assert_eq!((error.kind(), error.details()[0].1.as_str()), (Kind::Io, help), "{error}");
            let start = format!("cannot write {}: it is ", dir.path(name).display());
            error.message().strip_prefix(&start).unwrap_or_else(|| panic!("{error}")).to_string()
        };
        let dir = Scratch::new();
        dir.file("out/x", "");
        symlink(dir.path("nowhere"), dir.path("out/model")).unwrap();
        assert_eq!(told(&dir, "out/model"), "a link that leads nowhere");
        for (name, what) in [
            ("config.json", "a folder, which is not replaced"),
            ("model.safetensors", "a folder, which is not replaced"),
            ("model-00001-of-00002.safetensors", "a folder, which is not replaced"),
            ("tokenizer.json", "a folder"),
        ] {
            let dir = Scratch::new();
            let name = format!("out/model/{name}");
            dir.file(&format!("{name}/x"), "");
            assert_eq!(told(&dir, &name), what);
            // A link to a folder is as good as one; what lies there counts.
            let linked = dir.path("out");
            fs::rename(linked.join("model"), dir.path("there")).unwrap();
            symlink(dir.path("there"), linked.join("model")).unwrap();
            assert_eq!(told(&dir, &name), what);
        }
        let dir = Scratch::new();
        symlink(dir.file("blob", ""), dir.file("out/model/x", "").with_file_name("model.safetensors"))
            .unwrap();
        assert_eq!(told(&dir, "out/model/model.safetensors"), "a link, which is not replaced");
    }

    #[test]
    fn what_is_no_file_of_the_folder_does_not_go_with_a_model() {
        let dir = Scratch::new();
        let secret = dir.file("secret", "");
        let path = dir.file("from/x", "").with_file_name("vocab.txt");
        symlink(secret, &path).unwrap();
        let told =
            |dir: &Scratch| Companions::open(Some(&dir.path("from"))).unwrap_err().message().to_string();
        assert!(told(&dir).contains("is a link that leads out of its folder"), "{}", told(&dir));
        fs::remove_file(&path).unwrap();
        let _socket = std::os::unix::net::UnixListener::bind(&path).unwrap();
        assert!(told(&dir).contains("is a pipe or a device, not a file"), "{}", told(&dir));
        fs::remove_file(&path).unwrap();
        symlink("x", &path).unwrap();
        assert!(Companions::open(Some(&dir.path("from"))).unwrap().0.iter().any(|(_, file)| file.is_some()));
    }
}
