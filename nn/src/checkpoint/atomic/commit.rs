//! Committing a save: replaces the files of the earlier model by those of the new one.
//!
//! While files are written they have temporary names, and the old model is complete. Then the files are renamed; the
//! file by which a reader finds the others comes last: the index, or the only file of weights. If that one rename is
//! all that changes what is read, the new model appears atomically. Otherwise (another config, files of the same
//! names) the file that makes the old model readable is removed first, so that a save that is killed in between
//! leaves a folder that is refused, and never a mix of two models.

use super::atomic_file::AtomicFile;
use super::disk::{entries_of, io_error, is_existing_file, sync_folder};
use super::sidecar::SidecarChanges;
use super::temporary_name::{is_process_gone, parse_temporary_name};
use crate::checkpoint::file_names::{INDEX_FILE, WEIGHTS_FILE, is_managed_name, is_shard};
use shardgrad_tensor::Result;
use std::fs;
use std::path::{Path, PathBuf};

/// Returns the names in a folder that are valid UTF-8, sorted; all names that saves use are.
fn file_names(dir: &Path) -> Result<Vec<String>> {
    let name = |path: PathBuf| path.file_name()?.to_str().map(str::to_string);
    let mut names: Vec<String> = entries_of(dir)?.into_iter().filter_map(name).collect();
    names.sort();
    Ok(names)
}

/// Checks a model folder that a save will replace, before there is anything to save.
///
/// # Errors
/// `Kind::Io` if something that is not a regular file (a symlink, a folder, a pipe, a device) has a name that saves
/// use, or if the folder cannot be read: what [`WeightsWriter`](crate::checkpoint::WeightsWriter) would refuse.
pub fn check_replaceable(dir: &Path) -> Result<()> {
    let names = file_names(dir)?;
    names
        .iter()
        .filter(|name| is_managed_name(name))
        .try_for_each(|name| is_existing_file(&dir.join(name)).map(drop))
}

/// Returns the temporary files of saves in a folder, by name and process id.
pub(crate) fn temporary_files_in(dir: &Path) -> Result<Vec<(String, u32)>> {
    temporary_files_where(dir, is_managed_name)
}

/// [`temporary_files_in`], for files whose final names satisfy a predicate.
fn temporary_files_where(dir: &Path, matches: impl Fn(&str) -> bool) -> Result<Vec<(String, u32)>> {
    let found = |name: String| {
        let (_, id) = parse_temporary_name(&name).filter(|(of, _)| matches(of))?;
        Some((name, id))
    };
    Ok(file_names(dir)?.into_iter().filter_map(found).collect())
}

/// Removes a file, if there is one.
fn remove(path: &Path) -> Result<bool> {
    let is_there = is_existing_file(path)?;
    if is_there {
        fs::remove_file(path).map_err(|e| io_error(path, "remove", &e))?;
    }
    Ok(is_there)
}

/// Removes the temporary files of saves that have ended: of weights, of the config, and of sidecar files of these
/// names.
pub(crate) fn remove_stale_temporaries(dir: &Path, sidecars: &[String]) -> Result<()> {
    let stale = temporary_files_where(dir, |name| {
        is_managed_name(name) || sidecars.iter().any(|sidecar| sidecar == name)
    })?;
    let stale = stale.into_iter().filter(|(name, id)| is_process_gone(*id) && dir.join(name).is_file());
    stale.into_iter().try_for_each(|(name, _)| remove(&dir.join(name)).map(drop))
}

/// Renames the synced files of a save into place: `parts`, which a reader finds by `last`, `config` if it differs
/// from that of the folder, and sidecar files. Sidecars to remove go after the old model is unreadable and before the
/// new one is readable. Then removes what earlier saves left: files of weights that are not of this save, the index
/// or the only file, and temporary files.
///
/// # Errors
/// As [`is_existing_file`], for every file that is replaced or removed, before anything changes; `Kind::Io` if the
/// system refuses. Once the old model can no longer be read, the files stay under their temporary names.
pub(crate) fn commit(
    dir: &Path,
    config: Option<AtomicFile>,
    sidecars: SidecarChanges,
    parts: Vec<AtomicFile>,
    last: AtomicFile,
) -> Result<()> {
    let mut needs_removal = config.is_some() || sidecars.changes();
    for part in &parts {
        needs_removal |= is_existing_file(&part.path)?;
    }
    let SidecarChanges { names: sidecar_names, new, removed: removed_sidecars } = sidecars;
    let mut files: Vec<AtomicFile> = config.into_iter().chain(new).chain(parts).collect();
    let name_of = |file: &AtomicFile| file.path.file_name().map(|name| name.to_string_lossy().into_owned());
    let new_names: Vec<String> = files.iter().chain([&last]).filter_map(name_of).collect();
    let paths = new_names.iter().map(String::as_str).chain([INDEX_FILE, WEIGHTS_FILE]);
    let mut paths = paths.map(|name| dir.join(name)).chain(removed_sidecars.iter().cloned());
    paths.try_for_each(|path| is_existing_file(&path).map(drop))?;
    files.push(last);
    if needs_removal {
        // A reader of a folder with both uses the only file: remove that last.
        for name in [INDEX_FILE, WEIGHTS_FILE] {
            if remove(&dir.join(name))? {
                files.iter_mut().for_each(AtomicFile::keep_temporary);
            }
        }
        // From here on the new files are the only copy of a model: keep them whatever happens.
        files.iter_mut().for_each(AtomicFile::keep_temporary);
        sync_folder(dir)?;
    }
    let removed = removed_sidecars.iter().try_for_each(|path| remove(path).map(drop));
    removed.and_then(|()| rename_all(dir, files)).map_err(|e| {
        let help = match needs_removal {
            true => format!("save again; until then the new files are in {}, some as *.tmp-*", dir.display()),
            false => "the old model is unchanged; save again".to_string(),
        };
        e.detail("help", help)
    })?;
    for name in file_names(dir)? {
        let is_of_weights = is_shard(&name) || [INDEX_FILE, WEIGHTS_FILE].contains(&name.as_str());
        if is_of_weights && !new_names.contains(&name) && dir.join(&name).is_file() {
            remove(&dir.join(&name))?;
        }
    }
    remove_stale_temporaries(dir, &sidecar_names)?;
    sync_folder(dir)
}

/// Renames files into place; the last one when the names of the others are on the disk.
fn rename_all(dir: &Path, mut files: Vec<AtomicFile>) -> Result<()> {
    let last = files.pop();
    files.into_iter().try_for_each(AtomicFile::rename_into_place)?;
    sync_folder(dir)?;
    last.map_or(Ok(()), AtomicFile::rename_into_place)?;
    sync_folder(dir)
}

#[cfg(test)]
mod tests {
    use super::super::disk::scratch::Scratch;
    use super::*;

    #[test]
    fn only_temporaries_of_dead_processes_are_removed() {
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
        remove_stale_temporaries(&dir.path(""), &["merges.txt".to_string()]).unwrap();
        let mut stale = vec![
            format!("config.json.tmp-{alive}"),
            "config.json.tmp-backup".to_string(),
            "model.safetensors.index.json.tmp-4294967294".to_string(),
            format!("other.tmp-{}", std::process::id()),
            format!("other.tmp-{dead}"),
        ];
        stale.sort();
        assert_eq!(dir.names(), stale);
    }
}
