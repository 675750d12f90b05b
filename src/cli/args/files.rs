//! Files that options name, and that are read whole: options, lists of a schedule.

use crate::outputs::cannot;
use shardgrad::{Error, Kind, Result};
use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

/// Reads a text of at most so many bytes from a plain file.
///
/// # Errors
/// `Kind::Io` if the system refuses; `Kind::Data` for a pipe, a device, a folder, and for more bytes.
pub(super) fn read_small(path: &Path, bytes_max: u64) -> Result<String> {
    let refuse = |why: String| Err(Error::new(Kind::Data, format!("{}: {why}", path.display())));
    let found = fs::metadata(path).map_err(|e| cannot("read", path, &e))?;
    if !found.is_file() {
        return refuse("is a folder, a pipe or a device, not a file".to_string());
    }
    let mut text = String::new();
    let file = File::open(path).map_err(|e| cannot("read", path, &e))?;
    file.take(bytes_max + 1).read_to_string(&mut text).map_err(|e| cannot("read", path, &e))?;
    if text.len() as u64 > bytes_max {
        return refuse(format!("has more than {bytes_max} bytes"));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;

    #[test]
    fn small_files_are_read_and_others_refused() {
        let dir = Scratch::new();
        assert_eq!(read_small(&dir.file("f", "four"), 4).unwrap(), "four");
        let told = |path: &Path| read_small(path, 3).unwrap_err().message().to_string();
        assert!(told(&dir.path("f")).ends_with("f: has more than 3 bytes"));
        assert!(told(Path::new("/dev/zero")).ends_with("is a folder, a pipe or a device, not a file"));
    }
}
