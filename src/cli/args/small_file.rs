//! Small input files that are read whole: option files and schedule files.

use crate::outputs::io_error;
use shardgrad::{Error, Kind, Result};
use std::fs::{self, File};
use std::io::Read as _;
use std::path::Path;

/// Reads a regular text file of at most `bytes_max` bytes.
///
/// # Errors
/// `Kind::Io` if the file cannot be read; `Kind::Data` for a pipe, a device, a folder, or a larger file.
pub(super) fn read_small(path: &Path, bytes_max: u64) -> Result<String> {
    let refuse = |why: String| Err(Error::new(Kind::Data, format!("{}: {why}", path.display())));
    let found = fs::metadata(path).map_err(|e| io_error("read", path, &e))?;
    if !found.is_file() {
        return refuse("is a folder, a pipe or a device, not a file".to_string());
    }
    let mut text = String::new();
    let file = File::open(path).map_err(|e| io_error("read", path, &e))?;
    file.take(bytes_max + 1).read_to_string(&mut text).map_err(|e| io_error("read", path, &e))?;
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
    fn read_small_refuses_long_and_special_files() {
        let dir = Scratch::new();
        assert_eq!(read_small(&dir.file("f", "four"), 4).unwrap(), "four");
        let error_text = |path: &Path| read_small(path, 3).unwrap_err().message().to_string();
        assert!(error_text(&dir.path("f")).ends_with("f: has more than 3 bytes"));
        assert!(error_text(Path::new("/dev/zero")).ends_with("is a folder, a pipe or a device, not a file"));
    }
}
