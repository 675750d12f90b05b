//! `train`: trains a language model on text or token ids, on any mesh.

mod progress;
mod checkpoint;
mod steps;
mod outcome;
mod prepare;
#[cfg(test)]
mod memory_estimate;

use checkpoint::model_folder::Sidecars;
use checkpoint::rescue::{RescuedWeights, rescue_on_failure, save_rescued};
use checkpoint::resume;
use checkpoint::save::{CheckpointPolicy, save_checkpoint};
use outcome::report_outcome;
use prepare::{check_eps, prepare};
use steps::{StepsOutcome, run_steps};

use super::Failure;
use super::args::TrainArgs;
use super::consistency;
use super::explain::text_of_stage;
use super::ranks::{Ranks, Startup, is_rank_zero};
use crate::data::{Sampler, TokenOrder};
use crate::interrupt::{Interrupt, StopReason};
use crate::metrics::Metrics;
use crate::outputs::{OutFolder, StdoutWriter};
use crate::plot;
use crate::trace::Trace;
use crate::train::{Prefetcher, TrainConfig};
use shardgrad::nn::{CastRule, LanguageModel, ModelConfig, Trainer};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Error detail label for files that are unchanged.
const KEPT_LABEL: &str = "kept";

/// A run that all ranks share: what was asked for, and what is running. Created before the ranks start.
struct Job {
    spec: JobSpec,
    state: JobState,
}

/// What was asked for: options, inputs, and where the run starts. Immutable.
struct JobSpec {
    config: ModelConfig,
    plan: Plan,
    train_config: TrainConfig,
    data: Dataset,
    eval_every: Option<usize>,
    check_every: usize,
    state_hash_every: Option<usize>,
    start: Start,
    saves: SaveOptions,
    num_ranks: usize,
    json: bool,
    /// Whether the stage cut or the schedule depends on measured times.
    uses_measured_times: bool,
    /// Whether the schedule was read from a file, which may be the schedule.txt of this folder.
    schedule_from_file: bool,
}

/// The training and validation data.
struct Dataset {
    rows: Sampler,
    /// The validation split, if it is evaluated.
    held_out: Option<Sampler>,
    /// Unit of the loss: nats per `token` or `byte`.
    unit: &'static str,
    /// Description of the text, if the data is text.
    description: Option<String>,
}

impl Dataset {
    /// The same data with the tokens of each row in another order.
    fn with_token_order(self, order: TokenOrder) -> Dataset {
        let held_out = self.held_out.map(|rows| rows.with_token_order(order));
        Dataset { rows: self.rows.with_token_order(order), held_out, ..self }
    }
}

/// Where the run starts.
struct Start {
    /// The folder of the initial weights; `None` for random ones.
    weights: Option<PathBuf>,
    cast: CastRule,
    /// The checkpoint that the run resumes from.
    from: Option<resume::ResumePoint>,
    /// Seconds of the run before it was resumed.
    seconds: f64,
}

/// What is saved, and how.
struct SaveOptions {
    /// Tokenizer and other files that are copied with the model.
    sidecars: Sidecars,
    /// Whether the model folder is also the source; then its sidecar files are already there.
    in_place: bool,
    shard_bytes_max: u64,
    dtype: DType,
    checkpoints: Option<CheckpointPolicy>,
    /// Options and data fingerprint recorded in checkpoints.
    notes: BTreeMap<String, String>,
}

/// What is running: outputs, the request to stop, and what is saved.
struct JobState {
    out: OutFolder,
    lines: StdoutWriter,
    metrics: Mutex<Metrics>,
    trace: Option<Trace>,
    interrupt: Interrupt,
    /// Whether a rank has started to save.
    saving: AtomicBool,
    /// The step of the saved model; 0 before a save is complete.
    saved: AtomicUsize,
    /// The step of the last saved checkpoint.
    last_checkpoint: AtomicU64,
    /// Weights kept by the ranks of a failed world.
    rescued: RescuedWeights,
}

impl JobSpec {
    /// Returns the number of steps before the first one of this process.
    fn num_steps_before(&self) -> usize {
        self.start.from.as_ref().map_or(0, |from| from.step)
    }

    /// Returns whether all steps are done and only the model must be written.
    fn is_done(&self) -> bool {
        self.num_steps_before() >= self.train_config.steps
    }

    /// Returns whether validation is due after `steps` steps; a stop after the last step does not skip it.
    fn is_evaluated(&self, steps: usize, is_stopped: bool) -> bool {
        let is_last = steps == self.train_config.steps;
        let is_due = self.eval_every.is_some_and(|n| steps.is_multiple_of(n) || is_last);
        is_due && self.data.held_out.is_some() && (!is_stopped || is_last)
    }

    /// Returns whether the hash of weights and optimizer state is due after `steps` steps.
    fn is_hashed(&self, steps: usize) -> bool {
        self.state_hash_every.is_some_and(|n| steps.is_multiple_of(n) || steps == self.train_config.steps)
    }

    /// Returns whether a checkpoint is due after `steps` steps; the one after the last step is saved with the model.
    fn is_checkpointed(&self, steps: usize) -> bool {
        let is_due = self.saves.checkpoints.as_ref().is_some_and(|c| steps.is_multiple_of(c.every));
        is_due && steps < self.train_config.steps
    }
}

impl JobState {
    /// Returns the state before the first step of this process.
    fn new(
        out: OutFolder,
        lines: StdoutWriter,
        metrics: Metrics,
        trace: Option<Trace>,
        interrupt: Interrupt,
        first: usize,
    ) -> JobState {
        JobState {
            out,
            lines,
            metrics: Mutex::new(metrics),
            trace,
            interrupt,
            saving: AtomicBool::new(false),
            saved: AtomicUsize::new(0),
            last_checkpoint: AtomicU64::new(first as u64),
            rescued: RescuedWeights::default(),
        }
    }

    fn metrics(&self) -> MutexGuard<'_, Metrics> {
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the model folder.
    fn model(&self) -> PathBuf {
        self.out.join("model")
    }

    /// Verifies the run folder before a write. If it was moved or removed, the run ends after a save.
    ///
    /// # Errors
    /// As [`OutFolder::verify`].
    fn verify_folder(&self, outcome: &mut StepsOutcome) -> Result<()> {
        // No further save is attempted in a folder of another run.
        let moved = self.out.verify().inspect_err(|_| self.saving.store(true, Ordering::SeqCst))?;
        outcome.failed = outcome.failed.take().or(moved);
        Ok(())
    }

    /// Adds to an error that the earlier model, if any, is unchanged.
    fn with_unchanged_model(&self, e: Error) -> Error {
        let model = self.model();
        match model.exists() {
            true => e.detail(KEPT_LABEL, format!("{} is unchanged", model.display())),
            false => e,
        }
    }
}

/// Runs the command.
pub(super) fn run(args: &TrainArgs, startup: &Startup) -> Result<(), Failure> {
    args.check()?;
    check_eps(args)?;
    let mesh = args.mesh();
    let ranks = args.run.training_world(&mesh, &args.parallelism)?.started_by(startup);
    let ranks = if args.has_tree_sums() { ranks.with_tree_sums() } else { ranks };
    let Some(job) = prepare(args)? else { return Ok(consistency::check_all_are_done(&ranks)?) };
    let ranks = with_consistency_checks(ranks, &job)?;
    let text = format!(
        "{} on {mesh}, {} steps of {} x {} tokens, {}",
        args.model.name(),
        job.spec.train_config.steps,
        job.spec.train_config.batch,
        job.spec.train_config.seq,
        job.spec.train_config.precision
    );
    #[cfg(feature = "nccl")]
    let nccl = ranks.describe_nccl().inspect(|text| job.state.metrics().describe_nccl(text.clone()));
    if !job.spec.json && is_rank_zero() && !job.spec.is_done() {
        job.state.lines.print_line(format_args!("training {text}"));
        #[cfg(feature = "nccl")]
        if let Some(nccl) = &nccl {
            job.state.lines.print_line(format_args!("collectives over {nccl}"));
        }
        job.state.lines.print_line(format_args!("reproducibility, bit for bit"));
        for (level, what) in args.run_facts(ranks.are_processes()).levels() {
            job.state.lines.print_line(format_args!("  {level:<9} {what}"));
        }
        if let Some(from) = &job.spec.start.from {
            job.state.lines.print_line(format_args!(
                "resuming after step {}, from {}",
                from.step,
                from.dir.display()
            ));
        }
    }
    let steps: &Steps =
        if job.spec.is_done() { &|_, _, _, job| Ok(StepsOutcome::all_done(job)) } else { &run_steps };
    let (stopped, failed) = launch(&ranks, &job, steps);
    let finished = finish_outputs(&job, &text);
    report_outcome(&job, stopped, failed.or(finished.err()))
}

/// Adds start step and input hashes to the values that processes compare when they connect.
fn with_consistency_checks(ranks: Ranks, job: &Job) -> Result<Ranks> {
    if !ranks.are_processes() {
        return Ok(ranks);
    }
    let ranks = consistency::with_next_step_from(
        &ranks,
        job.spec.start.from.as_ref().map(|from| (from.step, from.dir.as_path())),
    )?;
    // Weights come from the checkpoint if there is one; the initial weights are not read then.
    let start = job.spec.start.weights.as_deref().filter(|_| job.spec.start.from.is_none());
    consistency::with_input_hashes(&ranks, &job.spec.config, start, Some(&job.spec.data.rows))
}

/// The training loop of one rank.
type Steps =
    dyn Fn(&mut Trainer<'_, LanguageModel>, &Prefetcher<'_>, bool, &Job) -> Result<StepsOutcome> + Sync;

/// Runs all ranks and saves the trained weights, also after a failure. Returns why the run was stopped, and its error.
fn launch(ranks: &Ranks, job: &Job, steps: &Steps) -> (Option<StopReason>, Option<Error>) {
    match ranks.launch(|rank| train(rank, job, steps)) {
        Ok(mut outcome) => (outcome[0].stopped, outcome.iter_mut().find_map(|one| one.failed.take())),
        Err(e) => (None, Some(save_rescued(ranks, job, e))),
    }
}

/// Finishes metrics, loss plot and trace; tries all and returns the first error. Without a new step the files of an earlier run stay,
/// except the plot of a run whose model was still to be written.
fn finish_outputs(job: &Job, title: &str) -> Result<()> {
    let mut metrics = job.state.metrics();
    let outcome = metrics.finish();
    let moved = job.state.out.verify()?;
    let drawn = match metrics.steps() {
        steps
            if !is_rank_zero() || steps.is_empty() || metrics.num_new_steps() == 0 && !job.spec.is_done() =>
        {
            Ok(())
        }
        steps => plot::write_loss_plot(&job.state.out.join("loss.svg"), title, job.spec.data.unit, steps),
    };
    let traced = job.state.trace.as_ref().map_or(Ok(()), |trace| trace.write(job.spec.num_ranks));
    outcome.and(moved.map_or(Ok(()), Err)).and(drawn).and(traced)
}

/// Trains on one rank, then saves the model, also if the steps ended early.
fn train(rank: &Rank, job: &Job, steps: &Steps) -> Result<StepsOutcome> {
    let train_config = &job.spec.train_config;
    let prefetcher = Prefetcher::new(train_config, &job.spec.plan, &job.spec.data.rows);
    let mut trainer = train_config.trainer(rank, LanguageModel::new(&job.spec.config), &prefetcher)?;
    match (&job.spec.start.from, &job.spec.start.weights) {
        (Some(from), _) => drop(super::collective_io(rank, || trainer.resume(&from.dir))?),
        (None, Some(dir)) => super::load(trainer.model(), dir, job.spec.start.cast)?,
        (None, None) => {}
    }
    let is_rank_zero = rank.index() == 0;
    if is_rank_zero && !job.spec.json && !job.spec.is_done() {
        print_gatherings(&trainer, job);
    }
    job.state.interrupt.begin_steps();
    rescue_on_failure(&mut trainer, job, |trainer| {
        let outcome = steps(trainer, &prefetcher, is_rank_zero, job)?;
        if outcome.steps == 0 { Ok(outcome) } else { save_final_state(trainer, outcome, is_rank_zero, job) }
    })
}

/// Prints how often the pipeline ranks gather parameters, and why.
fn print_gatherings(trainer: &Trainer<'_, LanguageModel>, job: &Job) {
    for stage in trainer.stage_gatherings() {
        let (rank, why) = (stage.pipeline_rank, text_of_stage(stage));
        let when = if stage.by_microbatch { "by each microbatch" } else { "once per step" };
        job.state.lines.print_line(format_args!("pipeline rank {rank} gathers its parameters {when}: {why}"));
    }
}

/// Saves the model at the end of a run, unless that is done, and a checkpoint, unless a failed checkpoint ended the run. Collective.
fn save_final_state(
    trainer: &Trainer<'_, LanguageModel>,
    mut outcome: StepsOutcome,
    is_rank_zero: bool,
    job: &Job,
) -> Result<StepsOutcome> {
    if outcome.is_saved {
        return Ok(outcome);
    }
    job.state.saving.store(true, Ordering::SeqCst);
    job.state.verify_folder(&mut outcome)?;
    if let Some(reason) = outcome.stopped.or(job.state.interrupt.reason()).filter(|_| is_rank_zero) {
        let (done, all) = (outcome.steps, job.spec.train_config.steps);
        let consequence = if reason == StopReason::Interrupt {
            "; a second SIGINT ends the run without saving"
        } else {
            ""
        };
        job.state.lines.enqueue(move |_| {
            eprintln!("{reason}: step {done} of {all} is done; saving the model{consequence}")
        });
    }
    match save(trainer.model(), outcome.steps, job) {
        Ok(refused) => outcome.failed = outcome.failed.or(refused),
        Err(e) => {
            if matches!(e.kind(), Kind::Io | Kind::Checkpoint) && !outcome.unsaved {
                // The checkpoint goes to another folder, which may be writable.
                save_checkpoint(trainer, job)?;
            }
            return match outcome.failed.take() {
                Some(first) => Err(not_saved(first, &e)),
                // Rank 0 reports I/O errors.
                None if e.kind() == Kind::Io && !is_rank_zero => Ok(outcome),
                None => Err(e),
            };
        }
    }
    if !outcome.unsaved {
        outcome.record_failed_save(save_checkpoint(trainer, job)?);
    }
    outcome.is_saved = true;
    job.state.interrupt.set_saved(outcome.steps);
    Ok(outcome)
}

/// Adds to the error of a run why its model was not saved.
fn not_saved(first: Error, why: &Error) -> Error {
    let kept = why.details().iter().filter(|(label, _)| *label == KEPT_LABEL);
    kept.fold(first.detail("not saved", why.message()), |error, (label, text)| error.detail(label, text))
}

/// Rejects non-finite weights. Collective.
fn check_finite(model: &Model<LanguageModel>, steps: usize, consequence: &str) -> Result<()> {
    let non_finite = model.non_finite_params()?;
    let Some(first) = non_finite.first() else { return Ok(()) };
    let (non_finite, all) = (non_finite.len(), model.params().len());
    let text = format!(
        "after step {steps} {non_finite} of {all} parameters are not finite, first `{first}`; {consequence}"
    );
    let help = "use a smaller --lr, or more --warmup steps";
    Err(Error::new(Kind::NotFinite, text).detail("help", help))
}

/// Saves the model if its weights are finite. Collective. If a weight overflows in --save-dtype, the weights are saved in the parameter
/// dtype, and the error is returned as `Some`.
fn save(model: &Model<LanguageModel>, steps: usize, job: &Job) -> Result<Option<Error>> {
    let out = job.state.model();
    check_finite(model, steps, "the model is not saved").map_err(|e| match e.kind() {
        Kind::NotFinite => job.state.with_unchanged_model(e),
        _ => e,
    })?;
    let sidecars: Vec<_> = job.spec.saves.sidecars.all().filter(|_| !job.spec.saves.in_place).collect();
    let save = |dtype| model.save_with_sidecars(&out, job.spec.saves.shard_bytes_max, dtype, &sidecars);
    let refused = match save(job.spec.saves.dtype) {
        Err(e) if e.kind() == Kind::NotFinite => {
            let stored = model.precision().param_dtype;
            save(stored)?;
            Some(e.detail("instead", format!("the weights are saved in {stored}")))
        }
        done => done.map(|()| None)?,
    };
    job.state.saved.store(steps, Ordering::SeqCst);
    Ok(refused)
}
