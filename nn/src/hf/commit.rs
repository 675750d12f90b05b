//! The files of a save, put in the place of those of an earlier one.
//!
//! While files are written they have other names, and the old model stays whole. Then they get their names, the one by which
//! a reader finds the others last: the index, or the only file of weights. Where that one rename is all that changes what is
//! read, the new model is there at once. Where it is not (another config, files of the same names), what makes the old
//! model readable goes first, so that a stop in between leaves a folder that is refused, and never half of each.

use super::companion::Beside;
use super::disk::{Pending, failed, is_taken, sync_folder, unfinished};
use super::fields::{CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE};
use shardgrad_tensor::Result;
use std::fs;
use std::path::Path;

/// The name of one of several files of weights, counted from 1.
pub(super) fn shard_name(i: usize, count: usize) -> String {
    format!("model-{i:05}-of-{count:05}.safetensors")
}

/// Whether [`shard_name`] gives this name.
fn is_shard(name: &str) -> bool {
    let numbers = name.strip_prefix("model-").and_then(|rest| rest.strip_suffix(".safetensors"));
    numbers.and_then(|numbers| numbers.split_once("-of-")).is_some_and(|(i, count)| {
        [i, count].iter().all(|n| n.len() >= 5 && n.bytes().all(|b| b.is_ascii_digit()))
    })
}

/// The names in a folder that text can hold; ours are among them.
fn names(dir: &Path) -> Result<Vec<String>> {
    let entries = fs::read_dir(dir).map_err(|e| failed(dir, "read", &e))?;
    let name = |entry: std::io::Result<fs::DirEntry>| {
        entry
            .map(|entry| entry.file_name().into_string().ok())
            .map_err(|e| failed(dir, "read", &e))
            .transpose()
    };
    let mut names = entries.filter_map(name).collect::<Result<Vec<_>>>()?;
    names.sort();
    Ok(names)
}

/// Whether a save may give a file this name, or remove what has it.
fn is_ours(name: &str) -> bool {
    [CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE].contains(&name) || is_shard(name)
}

/// Looks at a model folder that a save is to replace, before there is something to save.
///
/// # Errors
/// `Kind::Io` if something that is no file (a link, a folder, a pipe, a device) has a name that saves give, or if the folder
/// cannot be read: what [`WeightsWriter`](super::WeightsWriter) would refuse.
pub fn check_replaceable(dir: &Path) -> Result<()> {
    let names = names(dir)?;
    names.iter().filter(|name| is_ours(name)).try_for_each(|name| is_taken(&dir.join(name)).map(drop))
}

/// The files of a folder that saves were still writing, or giving their names, by name and number of the process.
pub(super) fn unfinished_in(dir: &Path) -> Result<Vec<(String, u32)>> {
    unfinished_of(dir, is_ours)
}

/// [`unfinished_in`], of the files whose names are to be like this.
fn unfinished_of(dir: &Path, is_meant: impl Fn(&str) -> bool) -> Result<Vec<(String, u32)>> {
    let found = |name: String| {
        let (_, id) = unfinished(&name).filter(|(of, _)| is_meant(of))?;
        Some((name, id))
    };
    Ok(names(dir)?.into_iter().filter_map(found).collect())
}

/// Whether no process of a number runs, or it is this one. Where there is no list of processes, nobody is taken for dead.
pub(super) fn is_gone(id: u32) -> bool {
    let processes = Path::new("/proc");
    let is_listed = |name: &str| processes.join(name).exists();
    id == std::process::id() || is_listed("self") && !is_listed(&id.to_string())
}

/// Removes a file, if there is one.
fn remove(path: &Path) -> Result<bool> {
    let is_there = is_taken(path)?;
    if is_there {
        fs::remove_file(path).map_err(|e| failed(path, "remove", &e))?;
    }
    Ok(is_there)
}

/// Removes what saves that have ended left unfinished, of weights and config and of the files of these names beside them.
pub(super) fn clear_unfinished(dir: &Path, beside: &[String]) -> Result<()> {
    let left = unfinished_of(dir, |name| is_ours(name) || beside.iter().any(|own| own == name))?;
    let left = left.into_iter().filter(|(name, id)| is_gone(*id) && dir.join(name).is_file());
    left.into_iter().try_for_each(|(name, _)| remove(&dir.join(name)).map(drop))
}

/// Gives sealed files of a folder their names: those of `parts`, which a reader finds by `last`, and `config`, where it is
/// another one than the folder has, and those beside it; what is to go from there goes between the old model and the new one.
/// Then removes what earlier saves left there: files of weights that are not of this save, the index or the only file, and
/// what was never finished.
///
/// # Errors
/// As [`is_taken`], of any file that is replaced or removed, before anything is; `Kind::Io` if the system refuses. Files
/// stay under their other names where the old model can no longer be read.
pub(super) fn commit(
    dir: &Path,
    config: Option<Pending>,
    beside: Beside,
    parts: Vec<Pending>,
    last: Pending,
) -> Result<()> {
    let mut mixes = config.is_some() || beside.changes();
    for part in &parts {
        mixes |= is_taken(&part.path)?;
    }
    let Beside { names: companions, new, gone } = beside;
    let mut files: Vec<Pending> = config.into_iter().chain(new).chain(parts).collect();
    let name_of = |file: &Pending| file.path.file_name().map(|name| name.to_string_lossy().into_owned());
    let kept: Vec<String> = files.iter().chain([&last]).filter_map(name_of).collect();
    let places = kept.iter().map(String::as_str).chain([INDEX_FILE, WEIGHTS_FILE]);
    let mut places = places.map(|name| dir.join(name)).chain(gone.iter().cloned());
    places.try_for_each(|path| is_taken(&path).map(drop))?;
    files.push(last);
    if mixes {
        // A folder that has both is read by the only file: it goes last.
        for name in [INDEX_FILE, WEIGHTS_FILE] {
            if remove(&dir.join(name))? {
                files.iter_mut().for_each(Pending::keep);
            }
        }
        // From here on the new files are all that there is of a model, whether there was one or not.
        files.iter_mut().for_each(Pending::keep);
        sync_folder(dir)?;
    }
    let removed = gone.iter().try_for_each(|path| remove(path).map(drop));
    removed.and_then(|()| place(dir, files)).map_err(|e| {
        let help = match mixes {
            true => format!("save again; until then the new files lie in {}, some as *.tmp-*", dir.display()),
            false => "what was there is as it was; save again".to_string(),
        };
        e.detail("help", help)
    })?;
    for name in names(dir)? {
        let is_of_weights = is_shard(&name) || [INDEX_FILE, WEIGHTS_FILE].contains(&name.as_str());
        if is_of_weights && !kept.contains(&name) && dir.join(&name).is_file() {
            remove(&dir.join(&name))?;
        }
    }
    clear_unfinished(dir, &companions)?;
    sync_folder(dir)
}

/// Gives files their names; that of the last is given when those of the others are on the disk.
fn place(dir: &Path, mut files: Vec<Pending>) -> Result<()> {
    let last = files.pop();
    files.into_iter().try_for_each(Pending::place)?;
    sync_folder(dir)?;
    last.map_or(Ok(()), Pending::place)?;
    sync_folder(dir)
}

#[cfg(test)]
mod tests {
    use super::super::disk::scratch::Scratch;
    use super::*;

    #[test]
    fn names_of_parts() {
        assert!(is_shard(&shard_name(1, 4)) && is_shard(&shard_name(123_456, 234_567)));
        for other in [
            "model.safetensors",
            "model-1-of-4.safetensors",
            "model-00001-of-00004.bin",
            "model-00001-of-0000x.safetensors",
            "my-model-00001-of-00004.safetensors",
            "model-00001-of-00004.safetensors.index.json",
        ] {
            assert!(!is_shard(other), "{other}");
        }
    }

    #[test]
    fn only_what_dead_saves_left_is_cleared() {
        let dir = Scratch::new();
        let (dead, alive) = (u32::MAX, std::os::unix::process::parent_id());
        for name in
            ["config.json", "merges.txt", "model.safetensors", "model-00001-of-00002.safetensors", "other"]
        {
            dir.file(&format!("{name}.tmp-{dead}"), b"");
            dir.file(&format!("{name}.tmp-{}", std::process::id()), b"");
        }
        dir.file(&format!("config.json.tmp-{alive}"), b"");
        std::fs::create_dir(dir.path("model.safetensors.index.json.tmp-4294967294")).unwrap();
        dir.file("config.json.tmp-backup", b"");
        clear_unfinished(&dir.path(""), &["merges.txt".to_string()]).unwrap();
        let mut left = vec![
            format!("config.json.tmp-{alive}"),
            "config.json.tmp-backup".to_string(),
            "model.safetensors.index.json.tmp-4294967294".to_string(),
            format!("other.tmp-{}", std::process::id()),
            format!("other.tmp-{dead}"),
        ];
        left.sort();
        assert_eq!(dir.names(), left);
    }
}
