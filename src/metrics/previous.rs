//! Metrics of the steps before a resumed checkpoint.

use super::StepMetrics;
use crate::outputs::io_error;
use shardgrad::Result;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Metrics of the steps up to a checkpoint, and their lines as in the file.
#[derive(Debug, Default)]
pub(crate) struct PreviousMetrics {
    pub(super) lines: Vec<u8>,
    pub(super) steps: Vec<StepMetrics>,
    /// The folder of the run, with its event files.
    pub(super) folder: PathBuf,
    num_dropped: usize,
}

impl PreviousMetrics {
    /// Reads the metrics of the first `step` steps from a file. Invalid lines and later steps are dropped; a missing file is empty.
    ///
    /// # Errors
    /// `Kind::Io` naming the file if it cannot be read.
    pub(crate) fn read(path: &Path, step: u64) -> Result<PreviousMetrics> {
        let bytes = match fs::read(path) {
            Err(e) if e.kind() == ErrorKind::NotFound => Vec::new(),
            read => read.map_err(|e| io_error("read", path, &e))?,
        };
        let folder = path.parent().unwrap_or(Path::new("")).to_path_buf();
        let mut earlier = PreviousMetrics { folder, ..PreviousMetrics::default() };
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let Ok(entry) = serde_json::from_slice::<StepMetrics>(line) else { continue };
            if entry.step <= step && earlier.last().is_none_or(|last| last < entry.step) {
                earlier.lines.extend(line.strip_suffix(b"\n").unwrap_or(line));
                earlier.lines.push(b'\n');
                earlier.steps.push(entry);
            }
        }
        let lines = bytes.split_inclusive(|byte| *byte == b'\n').count();
        earlier.num_dropped = lines - earlier.steps.len();
        Ok(earlier)
    }

    /// Returns the last known step.
    fn last(&self) -> Option<u64> {
        self.steps.last().map(|entry| entry.step)
    }

    /// Returns the number of known steps.
    pub(crate) fn count(&self) -> u64 {
        self.steps.len() as u64
    }

    /// Returns the number of dropped lines.
    pub(crate) fn num_dropped(&self) -> usize {
        self.num_dropped
    }

    /// Returns the seconds of the run so far.
    pub(crate) fn seconds(&self) -> f64 {
        self.steps.last().map_or(0.0, |last| last.seconds)
    }
}
