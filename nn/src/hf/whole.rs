//! A folder that takes its name only when it is whole, as a checkpoint does.

use super::commit::is_gone;
use super::disk::{failed, refuse, sync_folder, unfinished};
use super::run_state::{OPTIMIZER_FILE, STATE_FILE};
use shardgrad_tensor::{Error, Kind, Result};
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// What stands behind the name of a checkpoint that goes.
const OLD: &str = ".old";
/// How the name of a checkpoint begins, before the number of its step.
const PREFIX: &str = "checkpoint-";

/// A folder under another name beside its place (`*.tmp-` and the number of the process). Dropped before it has its name, it
/// leaves nothing behind.
#[derive(Debug)]
pub(crate) struct WholeFolder {
    path: PathBuf,
    temporary: PathBuf,
}

/// The name that something has while it is made, or removed.
fn temporary(path: &Path, mark: &str) -> Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| refuse(path, "is not the name of a folder"))?;
    let mut name = name.to_os_string();
    name.push(format!("{mark}.tmp-{}", std::process::id()));
    Ok(path.with_file_name(name))
}

/// The last part of a path.
fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The step of a checkpoint, if this is the name of one.
fn step(name: &str) -> Option<u64> {
    let step = name.strip_prefix(PREFIX)?;
    step.parse().ok().filter(|n: &u64| n.to_string() == step)
}

/// The folder that something is in.
fn above(path: &Path) -> &Path {
    path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// What saves and removals of something that have ended left beside it: under the name that it has while it is made, or, with a
/// mark, while it goes.
fn left(path: &Path, mark: &str) -> Result<Vec<PathBuf>> {
    let (dir, own) = (above(path), name(path) + mark);
    let entries = match fs::read_dir(dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(|e| failed(dir, "read", &e))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.map_err(|e| failed(dir, "read", &e))?.path();
        if unfinished(&name(&path)).is_some_and(|(of, id)| of == own && is_gone(id)) {
            found.push(path);
        }
    }
    Ok(found)
}

/// Whether something stands at a place that a checkpoint may replace: an empty folder, or one that holds a checkpoint.
fn is_replaceable(path: &Path) -> Result<bool> {
    let cannot = |what: &str| {
        let text = format!("cannot write {}: it is {what}, which is not replaced", path.display());
        Err(Error::new(Kind::Io, text).detail("help", "give another name"))
    };
    match path.symlink_metadata() {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(failed(path, "write", &e)),
        Ok(found) if !found.is_dir() => return cannot("no folder"),
        Ok(_) => {}
    }
    let is_ours = [STATE_FILE, OPTIMIZER_FILE].iter().any(|name| path.join(name).is_file());
    let is_empty = || fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    if is_ours || is_empty() { Ok(true) } else { cannot("a folder of something else than a checkpoint") }
}

impl WholeFolder {
    /// Makes an empty folder, and those above it.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses, and if something else than a checkpoint or an empty folder stands at the place.
    pub(crate) fn create(path: &Path) -> Result<WholeFolder> {
        is_replaceable(path)?;
        let temporary = temporary(path, "")?;
        fs::create_dir_all(above(path)).map_err(|e| failed(above(path), "make", &e))?;
        if temporary.symlink_metadata().is_ok() {
            fs::remove_dir_all(&temporary).map_err(|e| failed(&temporary, "remove", &e))?;
        }
        fs::create_dir(&temporary).map_err(|e| failed(&temporary, "make", &e))?;
        Ok(WholeFolder { path: path.to_path_buf(), temporary })
    }

    /// Where its files are to be written.
    pub(crate) fn inside(&self) -> &Path {
        &self.temporary
    }

    /// Gives it its name, in place of a checkpoint that has it. Its files must be on the disk.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses, or as [`WholeFolder::create`]: what stood there is as it was, or gone.
    pub(crate) fn place(self) -> Result<()> {
        sync_folder(&self.temporary)?;
        let old = is_replaceable(&self.path)?.then(|| temporary(&self.path, OLD)).transpose()?;
        if let Some(old) = &old {
            fs::rename(&self.path, old).map_err(|e| failed(&self.path, "write", &e))?;
        }
        if let Err(e) = fs::rename(&self.temporary, &self.path) {
            // What stood there comes back, if it can.
            old.iter().for_each(|old| drop(fs::rename(old, &self.path)));
            return Err(failed(&self.path, "write", &e));
        }
        sync_folder(above(&self.path))?;
        old.map_or(Ok(()), |old| fs::remove_dir_all(&old).map_err(|e| failed(&old, "remove", &e)))
    }
}

impl Drop for WholeFolder {
    fn drop(&mut self) {
        // Once it has its name, nothing is there; otherwise nobody is left to tell of a failure.
        let _ = fs::remove_dir_all(&self.temporary);
    }
}

/// The checkpoints of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoints {
    /// Those that are whole, by step, the earliest first.
    pub whole: Vec<(u64, PathBuf)>,
    /// What was not finished: folders under other names, and those without a state.
    pub unfinished: Vec<PathBuf>,
}

impl Checkpoints {
    /// Where a run keeps that of a step: `checkpoint-STEP` of its folder, as the Hugging Face Trainer names it.
    #[must_use]
    pub fn place(dir: &Path, step: u64) -> PathBuf {
        dir.join(format!("{PREFIX}{step}"))
    }

    /// The step of a checkpoint by its name, if that is one of a checkpoint that is not being written.
    #[must_use]
    pub fn step(path: &Path) -> Option<u64> {
        step(&name(path))
    }

    /// Renames a damaged checkpoint (`checkpoint-STEP.damaged`), so that it counts as none and no save replaces it. Returns the
    /// new name.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses.
    pub fn set_aside(path: &Path) -> Result<PathBuf> {
        let mark = |i: usize| if i == 1 { ".damaged".to_string() } else { format!(".damaged-{i}") };
        let to = |i: usize| path.with_file_name(name(path) + &mark(i));
        let free = (1..).map(to).find(|to| to.symlink_metadata().is_err()).expect("some number is free");
        fs::rename(path, &free).map_err(|e| failed(path, "rename", &e))?;
        sync_folder(above(path))?;
        Ok(free)
    }

    /// Looks for the checkpoints of a folder; in one that is not there, none are.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses.
    pub fn find(dir: &Path) -> Result<Checkpoints> {
        let mut found = Checkpoints::default();
        let entries = match fs::read_dir(dir) {
            Err(e) if e.kind() == ErrorKind::NotFound => return Ok(found),
            entries => entries.map_err(|e| failed(dir, "read", &e))?,
        };
        for entry in entries {
            let path = entry.map_err(|e| failed(dir, "read", &e))?.path();
            let name = name(&path);
            if !name.starts_with(PREFIX) || !path.is_dir() {
                continue;
            }
            match step(&name) {
                Some(step) if path.join(STATE_FILE).symlink_metadata().is_ok() => {
                    found.whole.push((step, path))
                }
                Some(_) => found.unfinished.push(path),
                None if unfinished(&name).is_some() => found.unfinished.push(path),
                None => {}
            }
        }
        found.whole.sort();
        found.unfinished.sort();
        Ok(found)
    }

    /// Gives a checkpoint its name that lies whole under another one, where nothing has that name: a save that replaces one is left so
    /// if it is killed after the old one has lost its name and before the new one has it. What was to be replaced goes. Several may
    /// call this at once. Gives whether the name is there now that was not.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses, with where the checkpoint lies.
    pub fn complete(path: &Path) -> Result<bool> {
        if path.file_name().is_none() || path.symlink_metadata().is_ok() {
            return Ok(false);
        }
        // The state is written last. Of several, which only several processes leave, the last counts.
        let written = |dir: &PathBuf| dir.join(STATE_FILE).metadata().and_then(|state| state.modified()).ok();
        let Some(whole) =
            left(path, "")?.into_iter().filter(|dir| written(dir).is_some()).max_by_key(written)
        else {
            return Ok(false);
        };
        if let Err(e) = fs::rename(&whole, path) {
            // Another rank may have been first.
            if path.symlink_metadata().is_ok() {
                return Ok(true);
            }
            return Err(failed(path, "write", &e).detail("lies in", whole.display().to_string()));
        }
        sync_folder(above(path))?;
        // Nobody reads it under its other name; the next run clears it if it cannot go now.
        left(path, OLD)?.iter().for_each(|old| drop(fs::remove_dir_all(old)));
        Ok(true)
    }

    /// [`Checkpoints::complete`] of all that lie in a folder: those that have their names now.
    ///
    /// # Errors
    /// As [`Checkpoints::complete`].
    pub fn complete_all(dir: &Path) -> Result<Vec<PathBuf>> {
        let mut done = Vec::new();
        for path in Checkpoints::find(dir)?.unfinished {
            let own = name(&path);
            let Some((own, _)) = unfinished(&own).filter(|(own, _)| step(own).is_some()) else { continue };
            let place = dir.join(own);
            if Checkpoints::complete(&place)? {
                done.push(place);
            }
        }
        Ok(done)
    }

    /// Removes all but the `count` newest whole ones of a folder. One that goes loses its name first, so that a stop in between leaves
    /// none that looks whole.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses one; the others go.
    pub fn keep_newest(dir: &Path, count: usize) -> Result<()> {
        let whole = Checkpoints::find(dir)?.whole;
        let going = whole.iter().rev().skip(count).map(|(_, path)| {
            let going = temporary(path, OLD)?;
            fs::rename(path, &going).map_err(|e| failed(path, "remove", &e))?;
            fs::remove_dir_all(&going).map_err(|e| failed(&going, "remove", &e))
        });
        going.fold(Ok(()), Result::and)
    }

    /// Removes what saves that have ended left unfinished in a folder: before this process makes one there, so that such of its
    /// own number are of one before it, as in containers.
    ///
    /// # Errors
    /// As [`Checkpoints::keep_newest`].
    pub fn clear(dir: &Path) -> Result<()> {
        let left = Checkpoints::find(dir)?.unfinished;
        let has_ended = |path: &&PathBuf| unfinished(&name(path)).is_some_and(|(_, id)| is_gone(id));
        let gone = left.iter().filter(has_ended);
        gone.map(|path| fs::remove_dir_all(path).map_err(|e| failed(path, "remove", &e)))
            .fold(Ok(()), Result::and)
    }

    /// What has the name of a checkpoint and is none that a save may replace: another program's, or a copy that broke off.
    pub fn in_the_way(&self) -> impl Iterator<Item = &Path> {
        let has_name = |path: &&PathBuf| unfinished(&name(path)).is_none();
        let stays = self.unfinished.iter().filter(has_name).filter(|path| is_replaceable(path).is_err());
        stays.map(PathBuf::as_path)
    }
}

#[cfg(test)]
mod tests {
    use super::super::disk::scratch::Scratch;
    use super::*;

    /// A checkpoint whose state is this text.
    fn make(dir: &Path, step: u64, text: &str) {
        let folder = WholeFolder::create(&Checkpoints::place(dir, step)).unwrap();
        fs::write(folder.inside().join(STATE_FILE), text).unwrap();
        folder.place().unwrap();
    }

    fn read(dir: &Path, step: u64) -> Option<String> {
        fs::read_to_string(Checkpoints::place(dir, step).join(STATE_FILE)).ok()
    }

    #[test]
    fn a_folder_has_its_name_when_it_is_whole_and_replaces_nothing_but_checkpoints() {
        let scratch = Scratch::new();
        let dir = scratch.path("a/b");
        make(&dir, 3, "old");
        let folder = WholeFolder::create(&Checkpoints::place(&dir, 3)).unwrap();
        fs::write(folder.inside().join(STATE_FILE), "half").unwrap();
        assert_eq!(Checkpoints::find(&dir).unwrap().unfinished, [folder.inside()]);
        drop(folder);
        assert_eq!((read(&dir, 3).unwrap(), fs::read_dir(&dir).unwrap().count()), ("old".to_string(), 1));
        make(&dir, 3, "new");
        assert_eq!((read(&dir, 3).unwrap(), fs::read_dir(&dir).unwrap().count()), ("new".to_string(), 1));
        let other = scratch.file("file", b"");
        assert!(WholeFolder::create(&other).unwrap_err().message().contains("it is no folder"));
        let error = WholeFolder::create(&scratch.path("a")).unwrap_err();
        assert!(error.message().contains("something else than a checkpoint"), "{error}");
        let late = WholeFolder::create(&scratch.path("late")).unwrap();
        fs::create_dir(scratch.path("late")).unwrap();
        scratch.file("late/x", b"mine");
        assert_eq!(late.place().unwrap_err().kind(), Kind::Io);
        assert_eq!(scratch.names(), ["a", "file", "late"]);
    }

    #[test]
    fn a_save_that_was_killed_between_two_names_is_completed() {
        let scratch = Scratch::new();
        let dir = scratch.path("a");
        let (dead, alive) = (u32::MAX - 1, std::os::unix::process::parent_id());
        let place = Checkpoints::place(&dir, 3);
        let stop = |id: u32| {
            make(&dir, 3, "old");
            fs::rename(&place, dir.join(format!("checkpoint-3.old.tmp-{id}"))).unwrap();
            make(&dir, 3, "new");
            fs::rename(&place, dir.join(format!("checkpoint-3.tmp-{id}"))).unwrap();
        };
        stop(dead);
        assert!(Checkpoints::complete(&place).unwrap() && !Checkpoints::complete(&place).unwrap());
        assert_eq!((read(&dir, 3).unwrap(), fs::read_dir(&dir).unwrap().count()), ("new".to_string(), 1));
        // What has its name is not touched, whatever lies beside it, and what stands for no checkpoint stays.
        fs::create_dir(dir.join(format!("checkpoint-3.tmp-{dead}"))).unwrap();
        fs::write(dir.join(format!("checkpoint-3.tmp-{dead}/{STATE_FILE}")), "later").unwrap();
        fs::create_dir(dir.join(format!("checkpoint-x.tmp-{dead}"))).unwrap();
        assert_eq!(
            (Checkpoints::complete_all(&dir).unwrap(), read(&dir, 3).unwrap()),
            (vec![], "new".to_string())
        );
        // A save that is not over, and one that is not whole.
        fs::remove_dir_all(&dir).unwrap();
        stop(alive);
        fs::create_dir(dir.join(format!("checkpoint-4.tmp-{dead}"))).unwrap();
        assert_eq!(Checkpoints::complete_all(&dir).unwrap(), Vec::<PathBuf>::new());
        fs::remove_dir_all(&dir).unwrap();
        stop(dead);
        assert_eq!(Checkpoints::complete_all(&dir).unwrap(), [place]);
        assert_eq!(Checkpoints::complete_all(&scratch.path("none")).unwrap(), Vec::<PathBuf>::new());
        assert!(!Checkpoints::complete(&scratch.path("none/x")).unwrap());
    }

    #[test]
    fn what_cannot_go_stays_and_a_link_goes_alone() {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        for step in 1..=4 {
            make(dir, step, "x");
        }
        fs::rename(Checkpoints::place(dir, 2), scratch.path("elsewhere")).unwrap();
        std::os::unix::fs::symlink(scratch.path("elsewhere"), Checkpoints::place(dir, 2)).unwrap();
        // The name that it is to have while it goes is taken.
        let taken = format!("checkpoint-1.old.tmp-{}", std::process::id());
        fs::create_dir(dir.join(&taken)).unwrap();
        scratch.file(&format!("{taken}/x"), b"");
        let error = Checkpoints::keep_newest(dir, 2).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        let told = format!("cannot remove {}: ", Checkpoints::place(dir, 1).display());
        assert!(error.message().starts_with(&told), "{error}");
        assert_eq!(scratch.names(), ["checkpoint-1", &taken, "checkpoint-3", "checkpoint-4", "elsewhere"]);
        assert!(read(dir, 1).is_some() && scratch.path("elsewhere").join(STATE_FILE).exists());
        // A link is no place to write one.
        std::os::unix::fs::symlink(scratch.path("elsewhere"), scratch.path("link")).unwrap();
        let error = WholeFolder::create(&scratch.path("link")).unwrap_err();
        assert!(error.message().ends_with("it is no folder, which is not replaced"), "{error}");
    }

    #[test]
    fn the_newest_are_kept_by_number_and_what_dead_saves_left_goes() {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        assert_eq!(Checkpoints::find(&scratch.path("none")).unwrap(), Checkpoints::default());
        for step in [5, 100, 20] {
            make(dir, step, "x");
        }
        let (dead, alive) = (u32::MAX, std::os::unix::process::parent_id());
        let left = [format!("checkpoint-7.tmp-{alive}"), "checkpoint-30".to_string()];
        for name in left.iter().chain(&[format!("checkpoint-7.tmp-{dead}"), "checkpoint-x".to_string()]) {
            fs::create_dir(dir.join(name)).unwrap();
        }
        let found = Checkpoints::find(dir).unwrap();
        assert!(found.whole.iter().map(|(step, _)| *step).eq([5, 20, 100]), "{found:?}");
        assert_eq!(found.unfinished.len(), 3);
        fs::write(dir.join("checkpoint-30/config.json"), "of another program").unwrap();
        let found = Checkpoints::find(dir).unwrap();
        assert!(found.in_the_way().eq([dir.join("checkpoint-30")]));
        let own = format!("checkpoint-8.tmp-{}", std::process::id());
        fs::create_dir(dir.join(own)).unwrap();
        Checkpoints::clear(dir).unwrap();
        Checkpoints::keep_newest(dir, 2).unwrap();
        let kept = ["checkpoint-100", "checkpoint-20", "checkpoint-30"].map(String::from);
        let kept = kept.into_iter().chain([left[0].clone(), "checkpoint-x".to_string()]);
        assert!(scratch.names().into_iter().eq(kept), "{:?}", scratch.names());
    }
}
