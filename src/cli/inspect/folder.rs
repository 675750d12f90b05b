//! Reading and verifying the contents of a folder.

use serde_json::Value;
use shardgrad::nn::ModelConfig;
use shardgrad::nn::checkpoint::{
    CONFIG_FILE, Checkpoint, Checkpoints, INDEX_FILE, OPTIMIZER_FILE, RunState, STATE_FILE, TensorFile,
    WEIGHTS_FILE, Weights, read_text,
};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Maximum size of a config.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// Kind of folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FolderKind {
    Model,
    Checkpoint,
    Run,
}

impl FolderKind {
    pub(super) fn name(self) -> &'static str {
        match self {
            FolderKind::Model => "model",
            FolderKind::Checkpoint => "checkpoint",
            FolderKind::Run => "run",
        }
    }
}

/// Result of verifying the checksum of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checksum {
    Verified,
    /// The file has no checksum.
    Absent,
    Damaged,
}

impl Checksum {
    pub(super) fn name(self) -> &'static str {
        match self {
            Checksum::Verified => "verified",
            Checksum::Absent => "absent",
            Checksum::Damaged => "damaged",
        }
    }
}

/// A tensor of a file.
#[derive(Clone, Debug)]
pub(super) struct TensorEntry {
    pub(super) name: String,
    pub(super) file: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: u64,
    pub(super) checksum: Checksum,
}

/// The run state of a checkpoint.
#[derive(Debug)]
pub(super) struct RunEntry {
    pub(super) step: u64,
    pub(super) optimizer: String,
    pub(super) num_steps: u64,
    /// The notes of the checkpoint: options and progress.
    pub(super) options: BTreeMap<String, String>,
}

/// The contents of a folder.
#[derive(Debug)]
pub(super) struct FolderReport {
    pub(super) path: PathBuf,
    pub(super) kind: FolderKind,
    pub(super) config: Option<Value>,
    pub(super) run: Option<RunEntry>,
    /// File names and sizes.
    pub(super) files: Vec<(String, u64)>,
    pub(super) tensors: Vec<TensorEntry>,
    /// Errors found in the folder.
    pub(super) damage: Vec<String>,
    /// The model and checkpoints of a run.
    pub(super) parts: Vec<FolderReport>,
}

/// Reads a folder and verifies all of its tensors.
///
/// # Errors
/// `Kind::Checkpoint` for a path that is not a model, checkpoint or run folder; `Kind::Io` if the folder cannot be listed. Damage is
/// in the report, not an error.
pub(super) fn inspect(dir: &Path) -> Result<FolderReport> {
    let refuse = |why: &str| {
        let help = "name a model folder, a checkpoint folder or a run folder (its --out)";
        Error::new(Kind::Checkpoint, format!("{} {why}", dir.display())).detail("help", help)
    };
    if !dir.is_dir() {
        return Err(refuse(if dir.exists() { "is not a folder" } else { "does not exist" }));
    }
    let has = |name: &str| dir.join(name).symlink_metadata().is_ok();
    if [STATE_FILE, OPTIMIZER_FILE].into_iter().any(has) {
        return FolderReport::read(dir, FolderKind::Checkpoint);
    }
    if [CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE].into_iter().any(has) {
        return FolderReport::read(dir, FolderKind::Model);
    }
    let model = Some(dir.join("model")).filter(|model| model.is_dir());
    let Checkpoints { complete: whole, incomplete: unfinished } = Checkpoints::find(dir)?;
    let unfinished = unfinished.into_iter().filter_map(|path| Some((Checkpoints::step_of(&path)?, path)));
    let mut checkpoints: Vec<(u64, PathBuf)> = whole.into_iter().chain(unfinished).collect();
    checkpoints.sort();
    if model.is_none() && checkpoints.is_empty() {
        return Err(refuse("is not a model, checkpoint or run folder"));
    }
    let mut report = FolderReport::new(dir, FolderKind::Run)?;
    let checkpoints = checkpoints.into_iter().map(|(_, path)| (path, FolderKind::Checkpoint));
    let parts = model.into_iter().map(|path| (path, FolderKind::Model)).chain(checkpoints);
    report.parts = parts.map(|(path, kind)| FolderReport::read(&path, kind)).collect::<Result<_>>()?;
    Ok(report)
}

impl FolderReport {
    /// Returns the errors of the folder and of its parts.
    pub(super) fn all_damage(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(
            self.damage
                .iter()
                .map(String::as_str)
                .chain(self.parts.iter().flat_map(FolderReport::all_damage)),
        )
    }

    /// Lists the files of a folder without reading them.
    fn new(dir: &Path, kind: FolderKind) -> Result<FolderReport> {
        let failed = |e: std::io::Error| Error::new(Kind::Io, format!("cannot read {}: {e}", dir.display()));
        let mut files = Vec::new();
        for entry in fs::read_dir(dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // Links are followed.
            let found = fs::metadata(entry.path()).ok().filter(fs::Metadata::is_file);
            files.extend(found.map(|found| (entry.file_name().to_string_lossy().into_owned(), found.len())));
        }
        files.sort();
        let (path, tensors, damage, parts) = (dir.to_path_buf(), Vec::new(), Vec::new(), Vec::new());
        Ok(FolderReport { path, kind, config: None, run: None, files, tensors, damage, parts })
    }

    /// Reads and verifies a model or a checkpoint.
    fn read(dir: &Path, kind: FolderKind) -> Result<FolderReport> {
        let mut report = FolderReport::new(dir, kind)?;
        // A folder of weights may have no config.
        if dir.join(CONFIG_FILE).symlink_metadata().is_ok() {
            let text = read_text(dir, CONFIG_FILE, CONFIG_BYTES_MAX);
            report.config = text.ok().and_then(|text| serde_json::from_str(&text).ok());
            report.collect_damage(ModelConfig::read(dir));
        }
        let opened = match kind {
            FolderKind::Checkpoint => report.collect_damage(Checkpoint::open(dir)),
            _ => None,
        };
        match opened {
            Some(found) => {
                report.verify(found.weights.files());
                report.verify([&found.optimizer_file]);
                let (optimizer, num_steps) = (found.optimizer().to_string(), found.num_steps());
                let RunState { step, notes: options, .. } = found.state;
                report.run = Some(RunEntry { step, optimizer, num_steps, options });
            }
            None => {
                if let Some(weights) = report.collect_damage(Weights::open(dir)) {
                    report.verify(weights.files());
                }
                if kind == FolderKind::Checkpoint
                    && let Some(file) = report.collect_damage(TensorFile::open_within(dir, OPTIMIZER_FILE))
                {
                    report.verify([&file]);
                }
            }
        }
        Ok(report)
    }

    /// Records an error as damage, without duplicates.
    fn collect_damage<T>(&mut self, found: Result<T>) -> Option<T> {
        found
            .map_err(|e| {
                let fault = e.message().to_string();
                if !self.damage.contains(&fault) {
                    self.damage.push(fault);
                }
            })
            .ok()
    }

    /// Verifies the checksums of all tensors of some files.
    fn verify<'a>(&mut self, files: impl IntoIterator<Item = &'a TensorFile>) {
        for file in files {
            let name = file.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
            for tensor in file.tensors() {
                let checksum = match self.collect_damage(file.verify(&tensor.name)) {
                    Some(true) => Checksum::Verified,
                    Some(false) => Checksum::Absent,
                    None => Checksum::Damaged,
                };
                self.tensors.push(TensorEntry {
                    name: tensor.name.clone(),
                    file: name.clone(),
                    dtype: tensor.dtype,
                    shape: tensor.shape.clone(),
                    bytes: tensor.bytes.end - tensor.bytes.start,
                    checksum,
                });
            }
        }
    }
}
