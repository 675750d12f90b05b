//! Saving the checkpoints of a run.

use crate::cli::collective_io;
use crate::cli::train::{Job, check_finite};
use shardgrad::nn::LanguageModel;
use shardgrad::nn::checkpoint::{self, Checkpoints, RunState};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

/// Key in the notes of a checkpoint: the number of checkpoints to keep.
pub(crate) const KEEP: &str = "keep";

/// Key in the notes of a checkpoint: whether the model of the same step was saved.
pub(crate) const MODEL_SAVED: &str = "model-saved";

/// When to save checkpoints, and how many to keep.
#[derive(Debug)]
pub(crate) struct CheckpointPolicy {
    pub(crate) every: usize,
    pub(crate) keep: usize,
}

/// Saves a checkpoint of the last step, if checkpoints are enabled. Collective. I/O errors and non-finite weights are returned as `Some`, equal
/// on every rank; earlier checkpoints stay.
///
/// # Errors
/// What the collectives report.
pub(crate) fn save_checkpoint(trainer: &Trainer<'_, LanguageModel>, job: &Job) -> Result<Option<Error>> {
    let Some(policy) = &job.spec.saves.checkpoints else { return Ok(None) };
    let step = trainer.state().step;
    // An existing checkpoint of this step is not overwritten. No rank completes a save before all have compared.
    if job.state.last_checkpoint.load(Ordering::SeqCst) == step {
        return Ok(None);
    }
    match save(trainer, job) {
        Ok(()) => {
            job.state.last_checkpoint.store(step, Ordering::SeqCst);
            if trainer.rank().world().index() == 0 {
                let (out, keep) = (job.state.out.join(""), policy.keep);
                job.state.metrics().enqueue(move || {
                    // A folder that cannot be removed does not end the run.
                    Checkpoints::keep_newest(&out, keep).unwrap_or_else(|e| eprintln!("{}", e.message()));
                    Ok(())
                });
            }
            Ok(None)
        }
        Err(e) if matches!(e.kind(), Kind::Io | Kind::Checkpoint | Kind::NotFinite) => {
            Ok(Some(e.detail("kept", "earlier checkpoints are unchanged")))
        }
        Err(e) => Err(e),
    }
}

/// Saves a checkpoint between two steps. An I/O error is only a warning: training continues, and the next checkpoint is tried. Collective;
/// the result is equal on all ranks.
///
/// # Errors
/// As [`save_checkpoint`], as is the returned `Some`.
pub(crate) fn save_periodic_checkpoint(
    trainer: &Trainer<'_, LanguageModel>,
    job: &Job,
) -> Result<Option<Error>> {
    match (save_checkpoint(trainer, job)?, &job.spec.saves.checkpoints) {
        (Some(refused), Some(policy)) if refused.kind() == Kind::Io => {
            let step = trainer.state().step;
            let next = policy.every.min(job.spec.train_config.steps - step as usize);
            if trainer.rank().world().index() == 0 {
                let (why, steps) = (refused.message(), if next == 1 { "step" } else { "steps" });
                eprintln!(
                    "warning: checkpoint-{step} was not saved: {why}; training continues, the next checkpoint is in {next} {steps}"
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
    check_finite(trainer.model(), state.step as usize, "no checkpoint is saved")?;
    // The metrics are on disk before the checkpoint, whenever the process is killed.
    let world = trainer.rank().world();
    collective_io(world, || {
        if world.index() == 0 {
            job.state.metrics().sync();
        }
        Ok(())
    })?;
    state.notes = notes(job, &state);
    let sidecars: Vec<_> = job.spec.saves.sidecars.all().collect();
    let dir = Checkpoints::path_of(&job.state.out.join(""), state.step);
    checkpoint::save(&dir, trainer.model(), trainer.optim(), &state, &sidecars)
}

/// Returns the notes of a checkpoint: the options of the run, and its progress.
fn notes(job: &Job, state: &RunState) -> BTreeMap<String, String> {
    let mut notes = job.spec.saves.notes.clone();
    let rows = state.step * job.spec.train_config.batch as u64;
    let is_saved = job.state.saved.load(Ordering::SeqCst) as u64 == state.step;
    notes.insert(MODEL_SAVED.to_string(), is_saved.to_string());
    notes.insert("tokens".to_string(), (rows * job.spec.train_config.seq as u64).to_string());
    notes
        .insert("epoch".to_string(), format!("{:.4}", rows as f64 / job.spec.data.rows.num_windows() as f64));
    notes.extend(job.spec.saves.checkpoints.iter().map(|policy| (KEEP.to_string(), policy.keep.to_string())));
    let held_out = job.state.metrics().steps().iter().rev().find_map(|entry| entry.val_loss);
    notes.extend(held_out.map(|loss| ("val-loss".to_string(), loss.to_string())));
    notes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::args::{Command, config};
    use crate::cli::train::{launch, prepare, run_steps};
    use crate::data::scratch::Scratch;
    use std::fs;
    use std::sync::Arc;
    use std::sync::atomic::AtomicBool;
    use std::time::Duration;

    /// Runs three steps with a checkpoint of each, keeping one. `task` runs first on rank 0.
    fn run(dir: &Scratch, mesh: &str, task: impl Fn(&Job) + Sync + 'static) -> Option<Error> {
        let (data, out) = (dir.file("text", "The quick brown fox. ".repeat(60)), dir.path("out"));
        let given = ["--steps", "3", "--batch", "4", "--seq", "16", "--mesh", mesh, "--save-every", "1"];
        let named = ["shardgrad", "train", "--data", data.to_str().unwrap(), "--out", out.to_str().unwrap()];
        let all = named.iter().chain(&given).chain(&["--keep", "1", "--eval-every", "0"]);
        let cli = config::parse(all.map(Into::into).collect()).unwrap();
        let Command::Train(args) = cli.command else { panic!("train") };
        let job = prepare(&args).unwrap().unwrap();
        let world = args.run.training_world(&args.mesh(), &args.parallelism).unwrap();
        let outcome = launch(&world, &job, &move |trainer, prefetcher, is_rank_zero, job| {
            if is_rank_zero {
                task(job);
            }
            run_steps(trainer, prefetcher, is_rank_zero, job)
        });
        outcome.1
    }

    #[test]
    fn metrics_are_synced_before_the_checkpoint() {
        for mesh in ["dp=1", "dp=2"] {
            let (dir, early) = (Scratch::new(), Arc::new(AtomicBool::new(false)));
            let noted = Arc::clone(&early);
            let failed = run(&dir, mesh, move |job| {
                let (out, early) = (job.state.out.join(""), Arc::clone(&noted));
                job.state.metrics().enqueue(move || {
                    std::thread::sleep(Duration::from_millis(400));
                    let found = Checkpoints::find(&out)?;
                    early.store(!found.complete.is_empty(), Ordering::SeqCst);
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
    fn run_continues_when_an_old_checkpoint_cannot_be_removed() {
        let dir = Scratch::new();
        // The temporary name under which the first checkpoint is deleted is taken.
        let taken = format!("checkpoint-1.old.tmp-{}", std::process::id());
        let failed = run(&dir, "dp=1", move |job| {
            fs::create_dir(job.state.out.join(&taken)).unwrap();
            fs::write(job.state.out.join(&taken).join("x"), "").unwrap();
        });
        assert!(failed.is_none(), "{failed:?}");
        let found = Checkpoints::find(&dir.path("out")).unwrap();
        assert!(found.complete.iter().map(|(step, _)| *step).eq([1, 3]), "{found:?}");
        assert!(dir.path("out/model/model.safetensors").exists());
    }
}
