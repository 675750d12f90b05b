//! Finding the newest undamaged checkpoint to resume from.

use crate::cli::ranks::is_rank_zero;
use shardgrad::nn::ModelConfig;
use shardgrad::nn::checkpoint::{Checkpoint, Checkpoints, STATE_FILE};
use shardgrad::prelude::*;
use std::path::{Path, PathBuf};

/// An undamaged checkpoint, and the damaged newer ones.
#[derive(Debug)]
pub(crate) struct SoundCheckpoint {
    pub(crate) dir: PathBuf,
    /// Newer checkpoints, which are damaged.
    pub(crate) damaged: Vec<PathBuf>,
}

/// Reads a whole checkpoint and verifies its checksums.
///
/// # Errors
/// `Kind::Checkpoint` or `Kind::Io` naming the file, and the damaged tensor.
fn verify(dir: &Path) -> Result<()> {
    ModelConfig::read(dir)?;
    Checkpoint::open(dir)?.verify()
}

impl SoundCheckpoint {
    /// Verifies the checkpoint given with `--resume DIR`.
    ///
    /// # Errors
    /// `Kind::Checkpoint` or `Kind::Io` if it is damaged; there is no fallback.
    pub(crate) fn named(dir: &Path) -> Result<SoundCheckpoint> {
        verify(dir)?;
        Ok(SoundCheckpoint { dir: dir.to_path_buf(), damaged: Vec::new() })
    }

    /// Finds the newest undamaged checkpoint of a folder; `None` if there is no checkpoint. Reports damaged newer ones and unfinished saves.
    /// If `is_exact`, the newest checkpoint must be undamaged.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if all checkpoints are damaged, or, if `is_exact`, the newest.
    pub(crate) fn find(dir: &Path, is_exact: bool) -> Result<Option<SoundCheckpoint>> {
        let Checkpoints { complete: whole, incomplete: unfinished } = Checkpoints::find(dir)?;
        let newest = whole.last().map(|(step, _)| *step);
        for path in unfinished {
            let step = Checkpoints::step_of(&path);
            if is_exact && step.is_some_and(|step| newest.is_none_or(|newest| step > newest)) {
                let text = format!("{} is damaged: it has no {STATE_FILE}", path.display());
                return Err(with_resume_help(Error::new(Kind::Checkpoint, text)));
            }
            if is_rank_zero() {
                eprintln!("skipping {}: the save was not finished", path.display());
            }
        }
        let mut damaged: Vec<(PathBuf, Error)> = Vec::new();
        for (_, path) in whole.into_iter().rev() {
            match verify(&path) {
                Ok(()) => {
                    for (newer, why) in damaged.iter().filter(|_| is_rank_zero()) {
                        let newer = newer.file_name().unwrap_or_default().to_string_lossy();
                        eprintln!("{newer} is damaged: {}; resuming from {}", why.message(), path.display());
                    }
                    let damaged = damaged.into_iter().map(|(path, _)| path).collect();
                    return Ok(Some(SoundCheckpoint { dir: path, damaged }));
                }
                Err(e) if is_exact => return Err(with_resume_help(e)),
                Err(e) if !matches!(e.kind(), Kind::Checkpoint | Kind::Io) => return Err(e),
                Err(e) => damaged.push((path, e)),
            }
        }
        if damaged.is_empty() {
            return Ok(None);
        }
        let text = format!("all {1} checkpoints in {0} are damaged", dir.display(), damaged.len());
        let error = damaged.iter().fold(Error::new(Kind::Checkpoint, text), |error, (_, why)| {
            error.detail("damaged", why.message())
        });
        let help = "restore a checkpoint from a copy, or start a new run with another --out DIR and without --resume";
        Err(error.detail("help", help))
    }
}

/// Adds the help to an error of --resume-exact.
fn with_resume_help(error: Error) -> Error {
    error.detail(
        "help",
        "use --resume instead of --resume-exact to resume from the newest undamaged checkpoint",
    )
}
