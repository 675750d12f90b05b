//! Temporary names: `NAME.tmp-PID` while a process writes NAME, `NAME.old.tmp-PID` while the process removes the
//! folder that had the name.

use std::path::{Path, PathBuf};

/// Separates the name of a file or folder from the id of the process that writes it.
const TEMPORARY_MARK: &str = ".tmp-";

/// Parses the temporary name of a file into its final name and the process id.
pub(crate) fn parse_temporary_name(name: &str) -> Option<(&str, u32)> {
    let (name, id) = name.rsplit_once(TEMPORARY_MARK)?;
    let is_number = id.bytes().all(|b| b.is_ascii_digit());
    id.parse().ok().filter(|_| is_number).map(|id| (name, id))
}

/// Mark in the temporary name of a folder that is being removed.
pub(crate) const OLD: &str = ".old";

/// Returns the temporary path, in the same folder, of a file or folder that this process writes (no mark) or removes
/// ([`OLD`]); `None` for a path that does not end with a name.
pub(crate) fn temporary_path(path: &Path, mark: &str) -> Option<PathBuf> {
    let mut name = path.file_name()?.to_os_string();
    name.push(format!("{mark}{TEMPORARY_MARK}{}", std::process::id()));
    Some(path.with_file_name(name))
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
