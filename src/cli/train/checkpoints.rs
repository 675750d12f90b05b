//! The checkpoints that a run leaves.

use super::{Job, check_finite};
use shardgrad::nn::LanguageModel;
use shardgrad::nn::resume::{self, Checkpoints, RunState};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Under which name a checkpoint notes how many of them stay.
pub(super) const KEEP: &str = "keep";

/// How often a run leaves a checkpoint, and how many stay.
#[derive(Debug)]
pub(super) struct Keeping {
    pub(super) every: usize,
    pub(super) keep: usize,
    /// The step of the last one that was left.
    pub(super) last: AtomicU64,
}

/// Leaves a checkpoint of the last step, if the run is to leave any. Every rank calls this together. What the disk refuses, or weights
/// that are not finite, is given back, on every rank alike: it ends the run, and the checkpoints of before stay.
///
/// # Errors
/// What the collectives report.
pub(super) fn leave(trainer: &Trainer<'_, LanguageModel>, job: &Job) -> Result<Option<Error>> {
    let Some(keeping) = &job.checkpoints else { return Ok(None) };
    let step = trainer.state().step;
    // What is there already is not put at risk. No rank gets through a save before all have asked.
    if keeping.last.load(Ordering::SeqCst) == step {
        return Ok(None);
    }
    match save(trainer, job) {
        Ok(()) => {
            keeping.last.store(step, Ordering::SeqCst);
            if trainer.rank().world().index() == 0 {
                let (out, keep) = (job.out.join(""), keeping.keep);
                job.metrics().then(move || {
                    // A run outlives a folder that cannot be removed.
                    Checkpoints::keep_newest(&out, keep).unwrap_or_else(|e| eprintln!("{}", e.message()));
                    Ok(())
                });
            }
            Ok(None)
        }
        Err(e) if matches!(e.kind(), Kind::Io | Kind::Checkpoint | Kind::NotFinite) => {
            Ok(Some(e.detail("kept", "the checkpoints of before stay")))
        }
        Err(e) => Err(e),
    }
}

/// Writes the checkpoint.
fn save(trainer: &Trainer<'_, LanguageModel>, job: &Job) -> Result<()> {
    let mut state = trainer.state();
    check_finite(trainer.model(), state.step as usize, "there is no checkpoint of it")?;
    if trainer.rank().world().index() == 0 {
        job.metrics().sync();
    }
    state.notes = notes(job, &state);
    let companions: Vec<_> = job.companions.all().collect();
    let dir = Checkpoints::place(&job.out.join(""), state.step);
    resume::save(&dir, trainer.model(), trainer.optim(), &state, &companions)
}

/// What is noted of the run, and of where it is.
fn notes(job: &Job, state: &RunState) -> BTreeMap<String, String> {
    let mut notes = job.notes.clone();
    let rows = state.step * job.recipe.batch as u64;
    notes.insert("tokens".to_string(), (rows * job.recipe.seq as u64).to_string());
    notes.insert("epoch".to_string(), format!("{:.4}", rows as f64 / job.rows.num_windows() as f64));
    notes.extend(job.checkpoints.iter().map(|keeping| (KEEP.to_string(), keeping.keep.to_string())));
    let held_out = job.metrics().steps().iter().rev().find_map(|entry| entry.val_loss);
    notes.extend(held_out.map(|loss| ("val-loss".to_string(), loss.to_string())));
    notes
}
