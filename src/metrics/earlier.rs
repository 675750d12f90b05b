//! The record of a run up to a checkpoint, from which it goes on.

use super::StepMetrics;
use crate::outputs::cannot;
use shardgrad::Result;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// The steps of a run before a checkpoint, and their lines as they stand in its file.
#[derive(Debug, Default)]
pub(crate) struct Earlier {
    pub(super) lines: Vec<u8>,
    pub(super) steps: Vec<StepMetrics>,
    left_out: usize,
}

impl Earlier {
    /// Reads the lines of the first `step` steps of a file; what is no line of a step, or of a later one, is left out. Where there is
    /// no file, there are none.
    ///
    /// # Errors
    /// `Kind::Io` naming the file if the system refuses.
    pub(crate) fn read(path: &Path, step: u64) -> Result<Earlier> {
        let bytes = match fs::read(path) {
            Err(e) if e.kind() == ErrorKind::NotFound => Vec::new(),
            read => read.map_err(|e| cannot("read", path, &e))?,
        };
        let mut earlier = Earlier::default();
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            let Ok(entry) = serde_json::from_slice::<StepMetrics>(line) else { continue };
            if entry.step <= step && earlier.last().is_none_or(|last| last < entry.step) {
                earlier.lines.extend(line.strip_suffix(b"\n").unwrap_or(line));
                earlier.lines.push(b'\n');
                earlier.steps.push(entry);
            }
        }
        let lines = bytes.split_inclusive(|byte| *byte == b'\n').count();
        earlier.left_out = lines - earlier.steps.len();
        Ok(earlier)
    }

    /// The last step that is known.
    fn last(&self) -> Option<u64> {
        self.steps.last().map(|entry| entry.step)
    }

    /// How many steps are known.
    pub(crate) fn count(&self) -> u64 {
        self.steps.len() as u64
    }

    /// How many lines of the file were left out.
    pub(crate) fn left_out(&self) -> usize {
        self.left_out
    }

    /// Seconds that the run took.
    pub(crate) fn seconds(&self) -> f64 {
        self.steps.last().map_or(0.0, |last| last.seconds)
    }
}
