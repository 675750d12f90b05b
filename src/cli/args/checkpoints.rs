//! Checkpoint options: when to save, how many to keep, what to resume from.

use super::values;
use clap::Args;
use std::path::{Path, PathBuf};

/// Default number of checkpoints to keep.
const KEEP: usize = 2;

/// Checkpoint options.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Checkpoints")]
pub(crate) struct CheckpointArgs {
    /// Save a checkpoint to OUT/checkpoint-STEP every N steps and at the end of the run [default: none]
    #[arg(long, value_name = "N", value_parser = values::count)]
    pub(crate) save_every: Option<usize>,
    /// Keep the N newest checkpoints and delete older ones; needs --save-every [default: as in the resumed run, else 2]
    #[arg(long, value_name = "N", value_parser = values::count)]
    keep: Option<usize>,
    /// Resume from the newest undamaged checkpoint of --out, or start from scratch if there is none; with DIR, from that checkpoint
    /// or the newest undamaged one in that run folder. Repeat the options of the run; if all --steps are done, nothing happens
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    resume: Option<Option<PathBuf>>,
    /// As --resume, but fail if the newest checkpoint is damaged instead of falling back to an older one
    #[arg(long)]
    resume_exact: bool,
}

impl CheckpointArgs {
    /// Returns how many checkpoints to keep; `before` is the number of the resumed run.
    pub(crate) fn keep(&self, before: Option<usize>) -> usize {
        self.keep.or(before).unwrap_or(KEEP)
    }

    /// Returns whether to resume, and the folder to resume from, if given.
    pub(crate) fn resume(&self) -> Option<Option<&Path>> {
        self.resume.as_ref().map(|named| named.as_deref()).or(self.resume_exact.then_some(None))
    }

    /// Returns whether a damaged newest checkpoint is an error.
    pub(crate) fn is_exact(&self) -> bool {
        self.resume_exact
    }

    /// Returns an error text for options that contradict each other.
    pub(super) fn fault(&self) -> Option<String> {
        let lost = self.keep.is_some() && self.save_every.is_none();
        lost.then(|| "--keep has no effect without --save-every".to_string())
    }
}
