//! Folders of training checkpoints: found, recovered after a killed save, and pruned.

use crate::checkpoint::atomic::atomic_folder::{is_replaceable, stale_siblings, temporary_folder};
use crate::checkpoint::atomic::disk::{entries_of, io_error, last_component, parent_folder, sync_folder};
use crate::checkpoint::atomic::temporary_name::{OLD, is_process_gone, parse_temporary_name};
use crate::checkpoint::file_names::STATE_FILE;
use shardgrad_tensor::Result;
use std::fs;
use std::path::{Path, PathBuf};

/// Prefix of the names of checkpoints; the number of the step follows.
const PREFIX: &str = "checkpoint-";

/// Parses the name of a checkpoint into its step.
fn parse_step(name: &str) -> Option<u64> {
    let step = name.strip_prefix(PREFIX)?;
    step.parse().ok().filter(|n: &u64| n.to_string() == step)
}

/// The checkpoints of a run.
#[doc(alias = "CheckpointManager")]
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Checkpoints {
    /// Complete checkpoints by step, the earliest first.
    pub complete: Vec<(u64, PathBuf)>,
    /// Incomplete checkpoints: folders under temporary names, and folders without a state file.
    pub incomplete: Vec<PathBuf>,
}

impl Checkpoints {
    /// Returns the path of the checkpoint of a step: `checkpoint-STEP` in the folder of the run, as the Hugging Face
    /// Trainer names it.
    #[must_use]
    pub fn path_of(dir: &Path, step: u64) -> PathBuf {
        dir.join(format!("{PREFIX}{step}"))
    }

    /// Returns the step of a checkpoint from its path; `None` for other paths and for temporary names.
    #[must_use]
    pub fn step_of(path: &Path) -> Option<u64> {
        parse_step(&last_component(path))
    }

    /// Renames a damaged checkpoint to `checkpoint-STEP.damaged`, so that it no longer counts as a checkpoint and no
    /// save replaces it. Returns the new path.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses.
    pub fn mark_damaged(path: &Path) -> Result<PathBuf> {
        let mark = |i: usize| if i == 1 { ".damaged".to_string() } else { format!(".damaged-{i}") };
        let to = |i: usize| path.with_file_name(last_component(path) + &mark(i));
        let free = (1..).map(to).find(|to| to.symlink_metadata().is_err()).expect("some number is free");
        fs::rename(path, &free).map_err(|e| io_error(path, "rename", &e))?;
        sync_folder(parent_folder(path))?;
        Ok(free)
    }

    /// Finds the checkpoints in a folder; none in a folder that does not exist.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses.
    pub fn find(dir: &Path) -> Result<Checkpoints> {
        let mut found = Checkpoints::default();
        for path in entries_of(dir)? {
            let name = last_component(&path);
            if !name.starts_with(PREFIX) || !path.is_dir() {
                continue;
            }
            match parse_step(&name) {
                Some(step) if path.join(STATE_FILE).symlink_metadata().is_ok() => {
                    found.complete.push((step, path))
                }
                Some(_) => found.incomplete.push(path),
                None if parse_temporary_name(&name).is_some() => found.incomplete.push(path),
                None => {}
            }
        }
        found.complete.sort();
        found.incomplete.sort();
        Ok(found)
    }

    /// Renames a complete checkpoint from its temporary name to `path`, if nothing has that name. A save that
    /// replaces a checkpoint leaves this state if it is killed after the old checkpoint lost its name and before the
    /// new one has it. Removes the old checkpoint. Several processes may call this at once. Returns whether the name
    /// exists now and did not before.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses, with the path of the checkpoint.
    pub fn recover(path: &Path) -> Result<bool> {
        if path.file_name().is_none() || path.symlink_metadata().is_ok() {
            return Ok(false);
        }
        // The state file is written last. If several processes left a checkpoint, the newest one counts.
        let written = |dir: &PathBuf| dir.join(STATE_FILE).metadata().and_then(|state| state.modified()).ok();
        let Some(whole) =
            stale_siblings(path, "")?.into_iter().filter(|dir| written(dir).is_some()).max_by_key(written)
        else {
            return Ok(false);
        };
        if let Err(e) = fs::rename(&whole, path) {
            // Another rank may have renamed it first.
            if path.symlink_metadata().is_ok() {
                return Ok(true);
            }
            return Err(
                io_error(path, "write", &e).detail("complete checkpoint", whole.display().to_string())
            );
        }
        sync_folder(parent_folder(path))?;
        // Nothing reads the old checkpoint; if it cannot be removed now, the next run removes it.
        stale_siblings(path, OLD)?.iter().for_each(|old| drop(fs::remove_dir_all(old)));
        Ok(true)
    }

    /// [`Checkpoints::recover`] for all checkpoints in a folder. Returns the paths of those that were renamed.
    ///
    /// # Errors
    /// As [`Checkpoints::recover`].
    pub fn recover_all(dir: &Path) -> Result<Vec<PathBuf>> {
        let mut recovered = Vec::new();
        for path in Checkpoints::find(dir)?.incomplete {
            let name = last_component(&path);
            let is_checkpoint = |(name, _): &(&str, u32)| parse_step(name).is_some();
            let Some((final_name, _)) = parse_temporary_name(&name).filter(is_checkpoint) else { continue };
            let final_path = dir.join(final_name);
            if Checkpoints::recover(&final_path)? {
                recovered.push(final_path);
            }
        }
        Ok(recovered)
    }

    /// Removes all but the `count` newest complete checkpoints in a folder. Each is renamed before it is removed, so
    /// that an interrupted removal leaves nothing that looks complete.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses to remove one; the others are removed.
    #[doc(alias = "max_to_keep")]
    #[doc(alias = "save_total_limit")]
    pub fn keep_newest(dir: &Path, count: usize) -> Result<()> {
        let whole = Checkpoints::find(dir)?.complete;
        let removals = whole.iter().rev().skip(count).map(|(_, path)| {
            let renamed = temporary_folder(path, OLD)?;
            fs::rename(path, &renamed).map_err(|e| io_error(path, "remove", &e))?;
            fs::remove_dir_all(&renamed).map_err(|e| io_error(&renamed, "remove", &e))
        });
        removals.fold(Ok(()), Result::and)
    }

    /// Removes the temporary folders of saves that have ended. Call this before this process saves there: a temporary
    /// folder with the id of this process then belongs to an earlier process with the same id, as happens in
    /// containers.
    ///
    /// # Errors
    /// As [`Checkpoints::keep_newest`].
    pub fn remove_stale(dir: &Path) -> Result<()> {
        let incomplete = Checkpoints::find(dir)?.incomplete;
        let has_ended = |path: &&PathBuf| {
            parse_temporary_name(&last_component(path)).is_some_and(|(_, id)| is_process_gone(id))
        };
        let stale = incomplete.iter().filter(has_ended);
        stale
            .map(|path| fs::remove_dir_all(path).map_err(|e| io_error(path, "remove", &e)))
            .fold(Ok(()), Result::and)
    }

    /// Yields folders with the name of a checkpoint that a save must not replace: those of another program, or
    /// partial copies.
    pub fn not_replaceable(&self) -> impl Iterator<Item = &Path> {
        let has_name = |path: &&PathBuf| parse_temporary_name(&last_component(path)).is_none();
        let stays = self.incomplete.iter().filter(has_name).filter(|path| is_replaceable(path).is_err());
        stays.map(PathBuf::as_path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::atomic::atomic_folder::AtomicFolder;
    use crate::checkpoint::atomic::disk::scratch::Scratch;
    use shardgrad_tensor::Kind;

    /// Creates a checkpoint whose state file has this text.
    fn make(dir: &Path, step: u64, text: &str) {
        let folder = AtomicFolder::create(&Checkpoints::path_of(dir, step)).unwrap();
        fs::write(folder.temporary_path().join(STATE_FILE), text).unwrap();
        folder.commit().unwrap();
    }

    fn read(dir: &Path, step: u64) -> Option<String> {
        fs::read_to_string(Checkpoints::path_of(dir, step).join(STATE_FILE)).ok()
    }

    #[test]
    fn folder_is_renamed_when_complete_and_replaces_only_checkpoints() {
        let scratch = Scratch::new();
        let dir = scratch.path("a/b");
        make(&dir, 3, "old");
        let folder = AtomicFolder::create(&Checkpoints::path_of(&dir, 3)).unwrap();
        fs::write(folder.temporary_path().join(STATE_FILE), "half").unwrap();
        assert_eq!(Checkpoints::find(&dir).unwrap().incomplete, [folder.temporary_path()]);
        drop(folder);
        assert_eq!((read(&dir, 3).unwrap(), fs::read_dir(&dir).unwrap().count()), ("old".to_string(), 1));
        make(&dir, 3, "new");
        assert_eq!((read(&dir, 3).unwrap(), fs::read_dir(&dir).unwrap().count()), ("new".to_string(), 1));
        let other = scratch.file("file", b"");
        assert!(AtomicFolder::create(&other).unwrap_err().message().contains("it is not a folder"));
        let error = AtomicFolder::create(&scratch.path("a")).unwrap_err();
        assert!(error.message().contains("other files than a checkpoint"), "{error}");
        let late = AtomicFolder::create(&scratch.path("late")).unwrap();
        fs::create_dir(scratch.path("late")).unwrap();
        scratch.file("late/x", b"mine");
        assert_eq!(late.commit().unwrap_err().kind(), Kind::Io);
        assert_eq!(scratch.names(), ["a", "file", "late"]);
    }

    #[test]
    fn save_killed_between_two_renames_is_recovered() {
        let scratch = Scratch::new();
        let dir = scratch.path("a");
        let (dead, alive) = (u32::MAX - 1, std::os::unix::process::parent_id());
        let place = Checkpoints::path_of(&dir, 3);
        let stop = |id: u32| {
            make(&dir, 3, "old");
            fs::rename(&place, dir.join(format!("checkpoint-3.old.tmp-{id}"))).unwrap();
            make(&dir, 3, "new");
            fs::rename(&place, dir.join(format!("checkpoint-3.tmp-{id}"))).unwrap();
        };
        stop(dead);
        assert!(Checkpoints::recover(&place).unwrap() && !Checkpoints::recover(&place).unwrap());
        assert_eq!((read(&dir, 3).unwrap(), fs::read_dir(&dir).unwrap().count()), ("new".to_string(), 1));
        // An existing checkpoint is not touched, whatever temporary folders there are, and other folders stay.
        fs::create_dir(dir.join(format!("checkpoint-3.tmp-{dead}"))).unwrap();
        fs::write(dir.join(format!("checkpoint-3.tmp-{dead}/{STATE_FILE}")), "later").unwrap();
        fs::create_dir(dir.join(format!("checkpoint-x.tmp-{dead}"))).unwrap();
        assert_eq!(
            (Checkpoints::recover_all(&dir).unwrap(), read(&dir, 3).unwrap()),
            (vec![], "new".to_string())
        );
        // A save that still runs, and an incomplete one.
        fs::remove_dir_all(&dir).unwrap();
        stop(alive);
        fs::create_dir(dir.join(format!("checkpoint-4.tmp-{dead}"))).unwrap();
        assert_eq!(Checkpoints::recover_all(&dir).unwrap(), Vec::<PathBuf>::new());
        fs::remove_dir_all(&dir).unwrap();
        stop(dead);
        assert_eq!(Checkpoints::recover_all(&dir).unwrap(), [place]);
        assert_eq!(Checkpoints::recover_all(&scratch.path("none")).unwrap(), Vec::<PathBuf>::new());
        assert!(!Checkpoints::recover(&scratch.path("none/x")).unwrap());
    }

    #[test]
    fn failed_removal_keeps_checkpoint_and_symlink_target_is_kept() {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        for step in 1..=4 {
            make(dir, step, "x");
        }
        fs::rename(Checkpoints::path_of(dir, 2), scratch.path("elsewhere")).unwrap();
        std::os::unix::fs::symlink(scratch.path("elsewhere"), Checkpoints::path_of(dir, 2)).unwrap();
        // Its name during removal is taken.
        let taken = format!("checkpoint-1.old.tmp-{}", std::process::id());
        fs::create_dir(dir.join(&taken)).unwrap();
        scratch.file(&format!("{taken}/x"), b"");
        let error = Checkpoints::keep_newest(dir, 2).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        let expected = format!("cannot remove {}: ", Checkpoints::path_of(dir, 1).display());
        assert!(error.message().starts_with(&expected), "{error}");
        assert_eq!(scratch.names(), ["checkpoint-1", &taken, "checkpoint-3", "checkpoint-4", "elsewhere"]);
        assert!(read(dir, 1).is_some() && scratch.path("elsewhere").join(STATE_FILE).exists());
        // A symlink is not replaced.
        std::os::unix::fs::symlink(scratch.path("elsewhere"), scratch.path("link")).unwrap();
        let error = AtomicFolder::create(&scratch.path("link")).unwrap_err();
        assert!(error.message().ends_with("it is not a folder, and saving does not replace it"), "{error}");
    }

    #[test]
    fn newest_checkpoints_are_kept_and_stale_temporaries_removed() {
        let scratch = Scratch::new();
        let dir = &scratch.path("");
        assert_eq!(Checkpoints::find(&scratch.path("none")).unwrap(), Checkpoints::default());
        for step in [5, 100, 20] {
            make(dir, step, "x");
        }
        let (dead, alive) = (u32::MAX, std::os::unix::process::parent_id());
        let incomplete = [format!("checkpoint-7.tmp-{alive}"), "checkpoint-30".to_string()];
        for name in incomplete.iter().chain(&[format!("checkpoint-7.tmp-{dead}"), "checkpoint-x".to_string()])
        {
            fs::create_dir(dir.join(name)).unwrap();
        }
        let found = Checkpoints::find(dir).unwrap();
        assert!(found.complete.iter().map(|(step, _)| *step).eq([5, 20, 100]), "{found:?}");
        assert_eq!(found.incomplete.len(), 3);
        fs::write(dir.join("checkpoint-30/config.json"), "of another program").unwrap();
        let found = Checkpoints::find(dir).unwrap();
        assert!(found.not_replaceable().eq([dir.join("checkpoint-30")]));
        let final_name = format!("checkpoint-8.tmp-{}", std::process::id());
        fs::create_dir(dir.join(final_name)).unwrap();
        Checkpoints::remove_stale(dir).unwrap();
        Checkpoints::keep_newest(dir, 2).unwrap();
        let names = ["checkpoint-100", "checkpoint-20", "checkpoint-30"].map(String::from);
        let names = names.into_iter().chain([incomplete[0].clone(), "checkpoint-x".to_string()]);
        assert!(scratch.names().into_iter().eq(names), "{:?}", scratch.names());
    }
}
