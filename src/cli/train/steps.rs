//! The training loop of one rank.

use super::checkpoint::save::save_periodic_checkpoint;
use super::progress::{Progress, record_step};
use super::{Job, save_final_state};
use crate::interrupt::StopReason;
use crate::metrics::{ExpertMetrics, StepMetrics};
use crate::train::{Evaluation, Prefetcher, RunFlags, mean_loss};
use shardgrad::nn::LanguageModel;
use shardgrad::prelude::*;
use std::time::Instant;

/// If steps take longer than this, ranks also agree on a stop after each step, not only in it: a launcher may kill 30 s after its signal, and
/// a step that has just started would have to finish first.
const LONG_STEP_SECONDS: f64 = 0.1;

/// How the training loop of a rank ended.
#[derive(Default)]
pub(super) struct StepsOutcome {
    /// Completed steps, those of before included; 0 if there is nothing to save.
    pub(super) steps: usize,
    /// Why the run was stopped, if it was.
    pub(super) stopped: Option<StopReason>,
    /// The error, on the rank that had it; the weights of the last step are valid nevertheless.
    pub(super) failed: Option<Error>,
    /// Whether a checkpoint could not be saved.
    pub(super) unsaved: bool,
    /// Whether the state of the last step is saved.
    pub(super) is_saved: bool,
}

impl StepsOutcome {
    /// The outcome of a run whose steps are all done.
    pub(super) fn all_done(job: &Job) -> StepsOutcome {
        StepsOutcome { steps: job.spec.num_steps_before(), ..StepsOutcome::default() }
    }

    /// Records why a checkpoint was not saved, if so.
    pub(super) fn record_failed_save(&mut self, error: Option<Error>) {
        self.unsaved |= error.is_some();
        self.failed = self.failed.take().or(error);
    }
}

/// Runs the steps of one rank. An error on one rank that leaves valid weights ends the run on all ranks, after the same step.
///
/// # Errors
/// Errors that end the world: a failed op, a lost rank, a first step that fails.
pub(super) fn run_steps(
    trainer: &mut Trainer<'_, LanguageModel>,
    prefetcher: &Prefetcher<'_>,
    is_rank_zero: bool,
    job: &Job,
) -> Result<StepsOutcome> {
    let train_config = &job.spec.train_config;
    let progress = is_rank_zero.then(|| Progress::new(job));
    let start = Instant::now();
    let mut outcome = StepsOutcome::default();
    let mut is_capture_failure_reported = job.spec.json || !is_rank_zero;
    let (first, mut step_seconds) = (job.spec.num_steps_before(), 0.0);
    for step in first..train_config.steps {
        if step == first || job.spec.check_every > 0 && step % job.spec.check_every == 0 {
            trainer.check_consistent()?;
        }
        let started = Instant::now();
        // Read one step ahead: if one rank failed to read within a step, the others would wait for it in a collective, and all
        // weights would be lost.
        if step + 1 < train_config.steps && outcome.failed.is_none() {
            outcome.failed = prefetcher.read(trainer.rank(), step as u64 + 1).err();
        }
        let own =
            RunFlags { stop: job.state.interrupt.reason(), failed: outcome.failed.is_some(), step_seconds };
        let report = match trainer.step_with(own.to_control()) {
            Err(e) if e.kind() == Kind::NotFinite && step > first => {
                outcome.failed = Some(with_lr_help(e));
                break;
            }
            report => report?,
        };
        step_seconds = started.elapsed().as_secs_f64();
        let agreed = agreed_flags(trainer, job, &report, step == first)?;
        // A new run stopped in its first step does not replace an earlier model by that of one step.
        if step == first && job.spec.start.from.is_none() && agreed.stop.is_some() {
            return Ok(StepsOutcome { stopped: agreed.stop, ..StepsOutcome::default() });
        }
        if let Some(trace) = &job.state.trace {
            trace.add(trainer.rank().world().index(), step as u64, &trainer.passes());
        }
        (outcome.steps, outcome.stopped) = (step + 1, agreed.stop);
        let mut is_over = agreed.stop.is_some() || agreed.failed;
        let mut entry = metrics_of_step(job, step as u64 + 1, &report, step_seconds, start);
        if !agreed.failed && job.spec.is_hashed(step + 1) {
            entry.state_hash = Some(trainer.state_hash()?);
        }
        if !agreed.failed && job.spec.is_evaluated(step + 1, is_over) {
            if is_rank_zero {
                outcome.failed = outcome.failed.or(job.state.metrics().begin_step(&entry).err());
            }
            (entry.val_loss, is_over) = evaluate(trainer, is_rank_zero, job, &mut outcome)?;
        }
        if let Some(why) = trainer.capture_refusal().filter(|_| !is_capture_failure_reported) {
            is_capture_failure_reported = true;
            job.state.lines.print_line(format_args!(
                "steps are not captured as a graph and run kernel by kernel: {}",
                why.message()
            ));
        }
        if let Some(progress) = &progress {
            let recorded = record_step(trainer, job, progress, &entry);
            outcome.failed = outcome.failed.or(recorded.err());
        }
        if !is_over && job.spec.is_checkpointed(step + 1) {
            job.state.verify_folder(&mut outcome)?;
            outcome.record_failed_save(save_periodic_checkpoint(trainer, job)?);
            is_over = outcome.unsaved;
        }
        if is_over {
            break;
        }
    }
    Ok(outcome)
}

/// Returns the flags that ranks agreed on in a step, or right after it. Collective.
fn agreed_flags(
    trainer: &Trainer<'_, LanguageModel>,
    job: &Job,
    report: &StepReport,
    is_first: bool,
) -> Result<RunFlags> {
    let num_ranks = trainer.rank().world().mesh().num_ranks();
    let mut agreed = RunFlags::from_sums(&report.control, num_ranks);
    if is_first || agreed.step_seconds > LONG_STEP_SECONDS {
        agreed.stop = agreed.stop.or(agreed_stop(trainer, job)?);
    }
    Ok(agreed)
}

/// Returns why the run must stop, if any rank has a reason. Collective.
fn agreed_stop(trainer: &Trainer<'_, LanguageModel>, job: &Job) -> Result<Option<StopReason>> {
    let own = RunFlags { stop: job.state.interrupt.reason(), ..RunFlags::default() };
    Ok(own.agreed(trainer.rank())?.stop)
}

/// Returns the metrics of a step, counted from 1.
fn metrics_of_step(job: &Job, step: u64, report: &StepReport, seconds: f64, start: Instant) -> StepMetrics {
    StepMetrics {
        step,
        loss: report.loss,
        grad_norm: report.grad_norm,
        lr: report.lr,
        tokens_per_s: (job.spec.train_config.batch * job.spec.train_config.seq) as f64 / seconds,
        seconds: job.spec.start.seconds + start.elapsed().as_secs_f64(),
        loss_scale: report.loss_scale,
        skipped: report.loss_scale.map(|_| report.skipped),
        experts: ExpertMetrics::of(report),
        state_hash: None,
        nccl: None,
        val_loss: None,
    }
}

/// Evaluates the validation loss. Returns it, if it was completed, and whether the run is over. Collective. The evaluation after the last step is
/// completed even if the run is stopped, but the state is saved first, because a launcher may soon kill the process.
fn evaluate(
    trainer: &Trainer<'_, LanguageModel>,
    is_rank_zero: bool,
    job: &Job,
    outcome: &mut StepsOutcome,
) -> Result<(Option<f64>, bool)> {
    let is_complete = outcome.steps == job.spec.train_config.steps;
    if outcome.stopped.is_none() {
        match held_out_loss(trainer, job, || job.state.interrupt.reason().is_some())? {
            Some(Evaluation::Loss(loss)) => return Ok((Some(loss), false)),
            None => return Ok((None, false)),
            Some(Evaluation::Abandoned(why)) => {
                outcome.failed = outcome.failed.take().or(why);
                outcome.stopped = agreed_stop(trainer, job)?;
            }
        }
    }
    if !is_complete || outcome.stopped.is_none() {
        return Ok((None, true));
    }
    *outcome = save_final_state(trainer, std::mem::take(outcome), is_rank_zero, job)?;
    match held_out_loss(trainer, job, || false)? {
        Some(Evaluation::Loss(loss)) => Ok((Some(loss), true)),
        Some(Evaluation::Abandoned(why)) => {
            outcome.failed = outcome.failed.take().or(why);
            Ok((None, true))
        }
        None => Ok((None, true)),
    }
}

/// Returns the mean loss over the validation windows, unless a rank must `stop`. Batches have the size of a microbatch, which fits in memory.
fn held_out_loss(
    trainer: &Trainer<'_, LanguageModel>,
    job: &Job,
    stop: impl Fn() -> bool,
) -> Result<Option<Evaluation>> {
    let Some(windows) = &job.spec.data.held_out else { return Ok(None) };
    let part = |x: &[Tensor]| trainer.partial_loss(x);
    let rows_max = job.spec.train_config.rows_of_pass();
    mean_loss(trainer.rank(), &job.spec.plan, windows, rows_max, stop, part).map(Some)
}

/// Adds help on the learning rate to the error of a step, unless it has help.
fn with_lr_help(e: Error) -> Error {
    if e.details().iter().any(|(label, _)| *label == "help") {
        return e;
    }
    e.detail("help", "use a smaller --lr, or more --warmup steps")
}
