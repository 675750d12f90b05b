//! The checkpoints that a run leaves.

use super::{Job, check_finite};
use crate::cli::together;
use shardgrad::nn::LanguageModel;
use shardgrad::nn::resume::{self, Checkpoints, RunState};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// Under which name a checkpoint notes how many of them stay.
pub(super) const KEEP: &str = "keep";

/// Under which name a checkpoint notes whether the model of its step was saved beside it.
pub(super) const MODEL_SAVED: &str = "model-saved";

/// How often a run leaves a checkpoint, and how many stay.
#[derive(Debug)]
pub(super) struct Keeping {
    pub(super) every: usize,
    pub(super) keep: usize,
    /// The step of the last one that was left.
    pub(super) last: AtomicU64,
}

/// Leaves a checkpoint of the last step, if the run is to leave any. Every rank calls this together. What the disk refuses, or weights
/// that are not finite, is given back, on every rank alike; the checkpoints of before stay.
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

/// Leaves a checkpoint between two steps. One that cannot be written is a warning: training goes on, and the next one is tried.
/// Every rank calls this together; the result is the same on all.
///
/// # Errors
/// As [`leave`], which also says what is given back.
pub(super) fn leave_between(trainer: &Trainer<'_, LanguageModel>, job: &Job) -> Result<Option<Error>> {
    match (leave(trainer, job)?, &job.checkpoints) {
        (Some(refused), Some(keeping)) if refused.kind() == Kind::Io => {
            let step = trainer.state().step;
            let next = keeping.every.min(job.recipe.steps - step as usize);
            if trainer.rank().world().index() == 0 {
                let (why, steps) = (refused.message(), if next == 1 { "step" } else { "steps" });
                eprintln!(
                    "warning: checkpoint-{step} is not saved: {why}; training goes on, the next save is in {next} {steps}"
                );
            }
            Ok(None)
        }
        (refused, _) => Ok(refused),
    }
}

/// Writes the checkpoint.
fn save(trainer: &Trainer<'_, LanguageModel>, job: &Job) -> Result<()> {
    let mut state = trainer.state();
    check_finite(trainer.model(), state.step as usize, "there is no checkpoint of it")?;
    // No checkpoint is newer than the record of its steps, whatever is killed when.
    let world = trainer.rank().world();
    together(world, || {
        if world.index() == 0 {
            job.metrics().sync();
        }
        Ok(())
    })?;
    state.notes = notes(job, &state);
    let companions: Vec<_> = job.companions.all().collect();
    let dir = Checkpoints::place(&job.out.join(""), state.step);
    resume::save(&dir, trainer.model(), trainer.optim(), &state, &companions)
}

/// What is noted of the run, and of where it is.
fn notes(job: &Job, state: &RunState) -> BTreeMap<String, String> {
    let mut notes = job.notes.clone();
    let rows = state.step * job.recipe.batch as u64;
    let is_saved = job.saved.load(Ordering::SeqCst) as u64 == state.step;
    notes.insert(MODEL_SAVED.to_string(), is_saved.to_string());
    notes.insert("tokens".to_string(), (rows * job.recipe.seq as u64).to_string());
    notes.insert("epoch".to_string(), format!("{:.4}", rows as f64 / job.rows.num_windows() as f64));
    notes.extend(job.checkpoints.iter().map(|keeping| (KEEP.to_string(), keeping.keep.to_string())));
    let held_out = job.metrics().steps().iter().rev().find_map(|entry| entry.val_loss);
    notes.extend(held_out.map(|loss| ("val-loss".to_string(), loss.to_string())));
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::{Command, config};
    use crate::cli::train::{launch, prepare, take_steps};
    use crate::data::scratch::Scratch;
    use std::fs;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    /// Runs three steps with a checkpoint of each, of which one stays. The disk of the record is given something to do first.
    fn run(dir: &Scratch, mesh: &str, deed: impl Fn(&Job) + Sync + 'static) -> Option<Error> {
        let (data, out) = (dir.file("text", "The quick brown fox. ".repeat(60)), dir.path("out"));
        let given = ["--steps", "3", "--batch", "4", "--seq", "16", "--mesh", mesh, "--save-every", "1"];
        let named = ["shardgrad", "train", "--data", data.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let all = named.iter().chain(&given).chain(&["--keep", "1", "--eval-every", "0"]);
        let cli = config::parse(all.map(Into::into).collect()).unwrap();
        let Command::Train(args) = cli.command else { panic!("train") };
        let job = prepare(&args).unwrap().unwrap();
        let world = args.run.train_world(&args.mesh()).unwrap();
        let ended = launch(&world, &job, &move |trainer, ahead, leads, job| {
            if leads {
                deed(job);
            }
            take_steps(trainer, ahead, leads, job)
        });
        ended.1
    }

    #[test]
    fn no_checkpoint_is_newer_than_the_record_of_its_steps() {
        for mesh in ["dp=1", "dp=2"] {
            let (dir, early) = (Scratch::new(), Arc::new(AtomicBool::new(false)));
            let noted = Arc::clone(&early);
            let failed = run(&dir, mesh, move |job| {
                let (out, early) = (job.out.join(""), Arc::clone(&noted));
                job.metrics().then(move || {
                    std::thread::sleep(Duration::from_millis(400));
                    let found = Checkpoints::find(&out)?;
                    early.store(!found.whole.is_empty(), Ordering::SeqCst);
                    Ok(())
                });
            });
            assert!(failed.is_none(), "{failed:?}");
            assert!(
                !early.load(Ordering::SeqCst),
                "{mesh}: a checkpoint was there before any line of the record"
            );
        }
    }

    #[test]
    fn a_checkpoint_that_cannot_be_removed_stays_and_the_run_goes_on() {
        let dir = Scratch::new();
        // The name that the first is to have while it goes is taken.
        let taken = format!("checkpoint-1.old.tmp-{}", std::process::id());
        let failed = run(&dir, "dp=1", move |job| {
            fs::create_dir(job.out.join(&taken)).unwrap();
            fs::write(job.out.join(&taken).join("x"), "").unwrap();
        });
        assert!(failed.is_none(), "{failed:?}");
        let found = Checkpoints::find(&dir.path("out")).unwrap();
        assert!(found.whole.iter().map(|(step, _)| *step).eq([1, 3]), "{found:?}");
        assert!(dir.path("out/model/model.safetensors").exists());
    }
}
