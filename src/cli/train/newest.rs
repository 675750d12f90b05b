//! The checkpoint that a run resumes from: the newest one that is sound.

use crate::cli::ranks::leads;
use shardgrad::nn::ModelConfig;
use shardgrad::nn::resume::{Checkpoint, Checkpoints, STATE_FILE};
use shardgrad::prelude::*;
use std::path::{Path, PathBuf};

/// A sound checkpoint, and those that were passed over for it.
#[derive(Debug)]
pub(super) struct Newest {
    pub(super) dir: PathBuf,
    /// The newer ones, which are damaged.
    pub(super) damaged: Vec<PathBuf>,
}

/// Reads a whole checkpoint and refuses one from which no run can resume.
///
/// # Errors
/// `Kind::Checkpoint` or `Kind::Io` naming the file, and the tensor, if that is damaged.
fn verify(dir: &Path) -> Result<()> {
    ModelConfig::read(dir)?;
    Checkpoint::open(dir)?.verify()
}

impl Newest {
    /// The checkpoint that the user named.
    ///
    /// # Errors
    /// As for the newest of a folder: it is the one to resume from, or none is.
    pub(super) fn named(dir: &Path) -> Result<Newest> {
        verify(dir)?;
        Ok(Newest { dir: dir.to_path_buf(), damaged: Vec::new() })
    }

    /// The newest sound checkpoint of a folder, `None` where the folder holds no checkpoint. Damaged ones that are newer, and what
    /// was not finished, are reported. If `is_exact`, nothing is passed over.
    ///
    /// # Errors
    /// `Kind::Checkpoint` if no checkpoint is sound, or, if `is_exact`, if the newest is damaged.
    pub(super) fn find(dir: &Path, is_exact: bool) -> Result<Option<Newest>> {
        let Checkpoints { whole, unfinished } = Checkpoints::find(dir)?;
        let newest = whole.last().map(|(step, _)| *step);
        for path in unfinished {
            let step = Checkpoints::step(&path);
            if is_exact && step.is_some_and(|step| newest.is_none_or(|newest| step > newest)) {
                let text = format!("{} is damaged: it has no {STATE_FILE}", path.display());
                return Err(refused(Error::new(Kind::Checkpoint, text)));
            }
            if leads() {
                eprintln!("passing over {}, which was not finished", path.display());
            }
        }
        let mut damaged: Vec<(PathBuf, Error)> = Vec::new();
        for (_, path) in whole.into_iter().rev() {
            match verify(&path) {
                Ok(()) => {
                    for (newer, why) in damaged.iter().filter(|_| leads()) {
                        let newer = newer.file_name().unwrap_or_default().to_string_lossy();
                        eprintln!("{newer} is damaged: {}; resuming from {}", why.message(), path.display());
                    }
                    let damaged = damaged.into_iter().map(|(path, _)| path).collect();
                    return Ok(Some(Newest { dir: path, damaged }));
                }
                Err(e) if is_exact => return Err(refused(e)),
                Err(e) if !matches!(e.kind(), Kind::Checkpoint | Kind::Io) => return Err(e),
                Err(e) => damaged.push((path, e)),
            }
        }
        if damaged.is_empty() {
            return Ok(None);
        }
        let text = format!("no checkpoint in {} is sound, all {} are damaged", dir.display(), damaged.len());
        let error = damaged.iter().fold(Error::new(Kind::Checkpoint, text), |error, (_, why)| {
            error.detail("damaged", why.message())
        });
        let help = "copy a checkpoint there again, or begin another run with --out DIR and without --resume";
        Err(error.detail("help", help))
    }
}

/// Adds what to do where --resume-exact refuses.
fn refused(error: Error) -> Error {
    error.detail("help", "--resume resumes from the newest checkpoint that is sound; --resume-exact does not")
}
