//! Temporary names: `NAME.tmp-PID` while a process writes NAME, `NAME.old.tmp-PID` while the process removes the
//! folder that had the name.

use super::disk::file_error;
use shardgrad_tensor::Result;
use std::path::{Path, PathBuf};

/// Separates the name of a file that is being written from the id of the process that writes it.
pub(crate) const TEMPORARY_MARK: &str = ".tmp-";

/// Parses the temporary name of a file into its final name and the process id.
pub(crate) fn parse_temporary_name(name: &str) -> Option<(&str, u32)> {
    let (name, id) = name.rsplit_once(TEMPORARY_MARK)?;
    let is_number = id.bytes().all(|b| b.is_ascii_digit());
    id.parse().ok().filter(|_| is_number).map(|id| (name, id))
}

/// Returns the path that a folder has while it is written or removed.
pub(crate) fn temporary_path(path: &Path, mark: &str) -> Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| file_error(path, "is not the name of a folder"))?;
    let mut name = name.to_os_string();
    name.push(format!("{mark}.tmp-{}", std::process::id()));
    Ok(path.with_file_name(name))
}

/// Returns the last component of a path.
pub(crate) fn last_component(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the parent folder of a path.
pub(crate) fn parent_folder(path: &Path) -> &Path {
    path.parent().filter(|above| !above.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Whether no process has this id, or this process has it. Without `/proc` every process counts as running.
pub(crate) fn is_process_gone(id: u32) -> bool {
    let processes = Path::new("/proc");
    let is_listed = |name: &str| processes.join(name).exists();
    id == std::process::id() || is_listed("self") && !is_listed(&id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_names_are_parsed() {
        assert_eq!(parse_temporary_name("model.safetensors.tmp-17"), Some(("model.safetensors", 17)));
        for other in
            ["model.safetensors", "m.tmp-", "m.tmp-x", "m.tmp-+1", "m.tmp-1.bak", "m.tmp-99999999999"]
        {
            assert_eq!(parse_temporary_name(other), None, "{other}");
        }
    }
}
