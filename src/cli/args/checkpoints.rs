//! The options of going on: which checkpoints a run leaves, and from which one it goes on.

use super::values;
use clap::Args;
use std::path::{Path, PathBuf};

/// How many checkpoints are kept.
const KEEP: usize = 2;

/// Options of checkpoints.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Checkpoints")]
pub(crate) struct CheckpointArgs {
    /// Steps between checkpoints, OUT/checkpoint-STEP, from which --resume goes on; one more where the run ends [default: none]
    #[arg(long, value_name = "N", value_parser = values::count)]
    pub(crate) save_every: Option<usize>,
    /// Newest checkpoints that stay [default: as many as the run from which --resume goes on kept, else 2]
    #[arg(long, value_name = "N", value_parser = values::count)]
    keep: Option<usize>,
    /// Resume from the newest sound checkpoint of --out, or begin where there is none yet; with DIR, from that checkpoint or the
    /// newest sound one of that folder; the other options are those of that run, and where its steps are done nothing is
    #[arg(long, value_name = "DIR", num_args = 0..=1)]
    resume: Option<Option<PathBuf>>,
    /// Resume as --resume does, but refuse if the newest checkpoint is damaged, instead of resuming from an older one
    #[arg(long)]
    resume_exact: bool,
}

impl CheckpointArgs {
    /// How many checkpoints stay, where a run that goes on kept so many.
    pub(crate) fn keep(&self, before: Option<usize>) -> usize {
        self.keep.or(before).unwrap_or(KEEP)
    }

    /// Whether the run is to go on, and from which folder, if one is named.
    pub(crate) fn resume(&self) -> Option<Option<&Path>> {
        self.resume.as_ref().map(|named| named.as_deref()).or(self.resume_exact.then_some(None))
    }

    /// Whether a damaged newest checkpoint is an error.
    pub(crate) fn is_exact(&self) -> bool {
        self.resume_exact
    }

    /// What is wrong.
    pub(super) fn fault(&self) -> Option<String> {
        let lost = self.keep.is_some() && self.save_every.is_none();
        lost.then(|| "--keep has no meaning without --save-every".to_string())
    }
}
