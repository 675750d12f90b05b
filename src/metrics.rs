//! The record of a run: `metrics.jsonl`, one JSON object a step.

use serde::{Deserialize, Serialize};
use shardgrad::{Error, Kind, Result};
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

/// What one step did. In the file, a number that is not finite is `null`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct StepMetrics {
    /// The step, counted from 1: how many batches were read.
    pub(crate) step: u64,
    /// The mean next-token cross-entropy of the global batch, in nats, before the update.
    #[serde(deserialize_with = "null_is_nan")]
    pub(crate) loss: f64,
    /// The norm of the whole gradient before clipping.
    #[serde(deserialize_with = "null_is_nan")]
    pub(crate) grad_norm: f64,
    /// The learning rate of the update.
    pub(crate) lr: f64,
    /// Tokens of the global batch over the time of this step.
    pub(crate) tokens_per_s: f64,
    /// Seconds since the run began.
    pub(crate) seconds: f64,
    /// In f16: what the loss was multiplied by before its backward pass.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) loss_scale: Option<f64>,
    /// In f16: whether the update was left out, since a gradient of the scaled loss was not finite.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) skipped: Option<bool>,
    /// The mean loss over all windows of the held-out split after this step, where it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) val_loss: Option<f64>,
}

fn null_is_nan<'de, D: serde::Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::<f64>::deserialize(from)?.unwrap_or(f64::NAN))
}

/// Appends a line a step. Each line goes to the system at once, so a run that is killed leaves whole lines,
/// but for the last one at most.
#[derive(Debug)]
pub(crate) struct MetricsWriter {
    path: PathBuf,
    file: File,
}

impl MetricsWriter {
    /// Begins a record, replacing an older one; makes the folder if need be.
    ///
    /// # Errors
    /// `Kind::Io` naming the file and the reason, so that a folder that cannot be written shows before the
    /// first step.
    pub(crate) fn create(path: &Path) -> Result<MetricsWriter> {
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
        folder.map_or(Ok(()), fs::create_dir_all).map_err(|e| failed("write", path, &e))?;
        let file = File::create(path).map_err(|e| failed("write", path, &e))?;
        Ok(MetricsWriter { path: path.to_path_buf(), file })
    }

    /// Writes one step.
    ///
    /// # Errors
    /// `Kind::Io` if the system refuses (a full disk).
    pub(crate) fn write(&mut self, step: &StepMetrics) -> Result<()> {
        let mut line = serde_json::to_vec(step).map_err(|e| failed("write", &self.path, &e.into()))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(|e| failed("write", &self.path, &e))
    }
}

/// Reads a record back. A last line without an end is what a killed run leaves; it is passed over.
///
/// # Errors
/// `Kind::Io` if the system refuses; `Kind::Data` naming the line that is no step.
pub(crate) fn read(path: &Path) -> Result<Vec<StepMetrics>> {
    let text = fs::read_to_string(path).map_err(|e| failed("read", path, &e))?;
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let parse = |(i, line): (usize, &str)| {
        serde_json::from_str(line).map_err(|e| {
            Error::new(Kind::Data, format!("{}: line {} is no step: {e}", path.display(), i + 1))
        })
    };
    whole.lines().enumerate().map(parse).collect()
}

fn failed(doing: &str, path: &Path, e: &std::io::Error) -> Error {
    Error::new(Kind::Io, format!("cannot {doing} {}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::scratch::Scratch;

    fn step(step: u64, val_loss: Option<f64>) -> StepMetrics {
        let loss = 5.5 / step as f64;
        let (loss_scale, skipped) = (val_loss.map(|_| 32_768.0), val_loss.map(|_| false));
        StepMetrics {
            step,
            loss,
            grad_norm: 0.125,
            lr: 3e-4,
            tokens_per_s: 1e4,
            seconds: 0.5,
            loss_scale,
            skipped,
            val_loss,
        }
    }

    #[test]
    fn lines_are_whole_at_once_and_read_back() {
        let dir = Scratch::new();
        let path = dir.path("new/out/metrics.jsonl");
        let mut writer = MetricsWriter::create(&path).unwrap();
        writer.write(&step(1, None)).unwrap();
        assert_eq!(
            fs::read_to_string(&path).unwrap(),
            "{\"step\":1,\"loss\":5.5,\"grad_norm\":0.125,\"lr\":0.0003,\"tokens_per_s\":10000.0,\"seconds\":0.5}\n"
        );
        writer.write(&step(2, Some(2.5))).unwrap();
        assert_eq!(read(&path).unwrap(), [step(1, None), step(2, Some(2.5))]);
        assert_eq!(read(&dir.file("empty", "")).unwrap(), []);
    }

    #[test]
    fn numbers_that_are_not_finite_survive() {
        let dir = Scratch::new();
        let path = dir.path("m");
        let mut writer = MetricsWriter::create(&path).unwrap();
        writer.write(&StepMetrics { loss: f64::NAN, grad_norm: f64::INFINITY, ..step(1, None) }).unwrap();
        assert!(fs::read_to_string(&path).unwrap().contains("\"loss\":null,\"grad_norm\":null"));
        assert!(read(&path).unwrap()[0].loss.is_nan());
    }

    #[test]
    fn a_cut_last_line_is_passed_over_and_a_bad_one_is_named() {
        let dir = Scratch::new();
        let line = serde_json::to_string(&step(1, None)).unwrap();
        for cut in 0..=line.len() {
            let path = dir.file("m", format!("{line}\n{}", &line[..cut]));
            assert_eq!(read(&path).unwrap().len(), 1);
        }
        let error = read(&dir.file("m", format!("{line}\n{{}}\n{line}\n"))).unwrap_err();
        assert_eq!(error.kind(), Kind::Data);
        assert!(error.message().contains("m: line 2 is no step: missing field `step`"), "{error}");
        assert_eq!(read(&dir.path("absent")).unwrap_err().kind(), Kind::Io);
    }

    #[test]
    fn a_full_disk_and_a_bad_folder_are_errors() {
        let mut full = MetricsWriter::create(Path::new("/dev/full")).unwrap();
        let error = full.write(&step(1, None)).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(error.message().starts_with("cannot write /dev/full: No space left"), "{error}");
        let dir = Scratch::new();
        let file = dir.file("file", "");
        let error = MetricsWriter::create(&file.join("metrics.jsonl")).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(MetricsWriter::create(&dir.path("")).is_err());
    }
}
