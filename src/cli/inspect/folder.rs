//! The contents of a folder, read and verified.

use serde_json::Value;
use shardgrad::nn::ModelConfig;
use shardgrad::nn::hf::folder::INDEX_FILE;
use shardgrad::nn::hf::{CONFIG_FILE, TensorFile, WEIGHTS_FILE, Weights, read_text};
use shardgrad::nn::resume::{Checkpoint, Checkpoints, OPTIMIZER_FILE, STATE_FILE};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// No config is longer than this.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

/// What kind of folder it is.
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

/// What came of the checksum of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Checksum {
    Verified,
    /// The file has none.
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
pub(super) struct Entry {
    pub(super) name: String,
    pub(super) file: String,
    pub(super) dtype: DType,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: u64,
    pub(super) checksum: Checksum,
}

/// Where a run stood at a checkpoint.
#[derive(Debug)]
pub(super) struct RunEntry {
    pub(super) step: u64,
    pub(super) optimizer: String,
    pub(super) num_steps: u64,
    /// The options of the run, and what else the checkpoint notes.
    pub(super) options: BTreeMap<String, String>,
}

/// The contents of a folder.
#[derive(Debug)]
pub(super) struct Report {
    pub(super) path: PathBuf,
    pub(super) kind: FolderKind,
    pub(super) config: Option<Value>,
    pub(super) run: Option<RunEntry>,
    /// The files by name, with their bytes.
    pub(super) files: Vec<(String, u64)>,
    pub(super) tensors: Vec<Entry>,
    /// What is wrong with the folder.
    pub(super) damage: Vec<String>,
    /// Of a run, its model and its checkpoints.
    pub(super) parts: Vec<Report>,
}

/// Reads a folder and verifies all of its tensors.
///
/// # Errors
/// `Kind::Checkpoint` for a path that is no folder of a model, a checkpoint or a run; `Kind::Io` if the system refuses to list
/// the folder. Damage is no error: the report names it.
pub(super) fn inspect(dir: &Path) -> Result<Report> {
    let refuse = |why: &str| {
        let help = "name the folder of a model, a checkpoint, or of a run (its --out)";
        Error::new(Kind::Checkpoint, format!("{} {why}", dir.display())).detail("help", help)
    };
    if !dir.is_dir() {
        return Err(refuse(if dir.exists() { "is no folder" } else { "does not exist" }));
    }
    let has = |name: &str| dir.join(name).symlink_metadata().is_ok();
    if [STATE_FILE, OPTIMIZER_FILE].into_iter().any(has) {
        return Report::read(dir, FolderKind::Checkpoint);
    }
    if [CONFIG_FILE, WEIGHTS_FILE, INDEX_FILE].into_iter().any(has) {
        return Report::read(dir, FolderKind::Model);
    }
    let model = Some(dir.join("model")).filter(|model| model.is_dir());
    let Checkpoints { whole, unfinished } = Checkpoints::find(dir)?;
    let unfinished = unfinished.into_iter().filter_map(|path| Some((Checkpoints::step(&path)?, path)));
    let mut checkpoints: Vec<(u64, PathBuf)> = whole.into_iter().chain(unfinished).collect();
    checkpoints.sort();
    if model.is_none() && checkpoints.is_empty() {
        return Err(refuse("holds no model, no checkpoint and no run"));
    }
    let mut report = Report::new(dir, FolderKind::Run)?;
    let checkpoints = checkpoints.into_iter().map(|(_, path)| (path, FolderKind::Checkpoint));
    let parts = model.into_iter().map(|path| (path, FolderKind::Model)).chain(checkpoints);
    report.parts = parts.map(|(path, kind)| Report::read(&path, kind)).collect::<Result<_>>()?;
    Ok(report)
}

impl Report {
    /// The damage of the folder and of its parts.
    pub(super) fn all_damage(&self) -> Box<dyn Iterator<Item = &str> + '_> {
        Box::new(self.damage.iter().map(String::as_str).chain(self.parts.iter().flat_map(Report::all_damage)))
    }

    /// The files of a folder, of which nothing is read yet.
    fn new(dir: &Path, kind: FolderKind) -> Result<Report> {
        let failed = |e: std::io::Error| Error::new(Kind::Io, format!("cannot read {}: {e}", dir.display()));
        let mut files = Vec::new();
        for entry in fs::read_dir(dir).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            // A link counts as what it leads to.
            let found = fs::metadata(entry.path()).ok().filter(fs::Metadata::is_file);
            files.extend(found.map(|found| (entry.file_name().to_string_lossy().into_owned(), found.len())));
        }
        files.sort();
        let (path, tensors, damage, parts) = (dir.to_path_buf(), Vec::new(), Vec::new(), Vec::new());
        Ok(Report { path, kind, config: None, run: None, files, tensors, damage, parts })
    }

    /// Reads and verifies a model or a checkpoint.
    fn read(dir: &Path, kind: FolderKind) -> Result<Report> {
        let mut report = Report::new(dir, kind)?;
        // Weights may be saved without a config.
        if dir.join(CONFIG_FILE).symlink_metadata().is_ok() {
            let text = read_text(dir, CONFIG_FILE, CONFIG_BYTES_MAX);
            report.config = text.ok().and_then(|text| serde_json::from_str(&text).ok());
            report.note(ModelConfig::read(dir));
        }
        let opened = match kind {
            FolderKind::Checkpoint => report.note(Checkpoint::open(dir)),
            _ => None,
        };
        match opened {
            Some(Checkpoint { state, optimizer, num_steps, weights, optimizer_file }) => {
                report.verify(weights.files());
                report.verify([&optimizer_file]);
                let options = state.notes;
                report.run = Some(RunEntry { step: state.step, optimizer, num_steps, options });
            }
            None => {
                if let Some(weights) = report.note(Weights::open(dir)) {
                    report.verify(weights.files());
                }
                if kind == FolderKind::Checkpoint
                    && let Some(file) = report.note(TensorFile::open_within(dir, OPTIMIZER_FILE))
                {
                    report.verify([&file]);
                }
            }
        }
        Ok(report)
    }

    /// Notes an error as damage, once.
    fn note<T>(&mut self, found: Result<T>) -> Option<T> {
        found
            .map_err(|e| {
                let fault = e.message().to_string();
                if !self.damage.contains(&fault) {
                    self.damage.push(fault);
                }
            })
            .ok()
    }

    /// Verifies the tensors of files.
    fn verify<'a>(&mut self, files: impl IntoIterator<Item = &'a TensorFile>) {
        for file in files {
            let name = file.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
            for tensor in file.tensors() {
                let checksum = match self.note(file.verify(&tensor.name)) {
                    Some(true) => Checksum::Verified,
                    Some(false) => Checksum::Absent,
                    None => Checksum::Damaged,
                };
                self.tensors.push(Entry {
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
