//! The steps of one rank, and what ends them.

use super::checkpoints::leave_between;
use super::progress::{Progress, record};
use super::{Job, end};
use crate::interrupt::StopReason;
use crate::metrics::StepMetrics;
use crate::train::{Ahead, ControlFlags, Measured, mean_loss};
use shardgrad::nn::{LanguageModel, StepReport};
use shardgrad::prelude::*;
use shardgrad::tensor::control::world_sum;
use std::panic::Location;
use std::time::Instant;

/// Ranks agree on a stop once more after each step, as well as before it, where steps take longer than this: a launcher that asks for
/// an end may kill within 30 s, and a step that was just begun would have to end first.
const LONG_STEP_SECONDS: f64 = 0.1;

/// How the steps of a rank ended.
#[derive(Default)]
pub(super) struct Ended {
    /// Steps that were taken and count; without one there is nothing to save.
    pub(super) steps: usize,
    /// Why the run was stopped, if it was.
    pub(super) stopped: Option<StopReason>,
    /// What went wrong, on a rank that saw it; the weights of the last step were good all the same.
    pub(super) failed: Option<Error>,
    /// Whether that was a checkpoint which could not be written.
    pub(super) unsaved: bool,
    /// Whether the state of the last step is saved.
    pub(super) is_saved: bool,
}

impl Ended {
    /// Of a run whose steps were all taken before.
    pub(super) fn over(job: &Job) -> Ended {
        Ended { steps: job.first(), ..Ended::default() }
    }

    /// Takes note of why there is no checkpoint, if so.
    pub(super) fn note(&mut self, refused: Option<Error>) {
        self.unsaved |= refused.is_some();
        self.failed = self.failed.take().or(refused);
    }
}

/// The steps of one rank. What goes wrong on one of them and leaves good weights ends the run on all, at the same step.
///
/// # Errors
/// What ends the world: an op that fails, a lost rank; a first step that fails leaves nothing to save besides.
pub(super) fn take_steps(
    trainer: &mut Trainer<'_, LanguageModel>,
    ahead: &Ahead<'_>,
    leads: bool,
    job: &Job,
) -> Result<Ended> {
    let recipe = &job.recipe;
    let progress = leads.then(|| Progress::new(job));
    let began = Instant::now();
    let mut ended = Ended::default();
    let mut is_told = job.json || !leads;
    let (first, mut step_seconds) = (job.first(), 0.0);
    for step in first..recipe.steps {
        if step == first || job.check_every > 0 && step % job.check_every == 0 {
            trainer.check_alike()?;
        }
        let started = Instant::now();
        // While there is a step to go before it: where one rank alone failed to read within a step, the others would wait
        // for it in vain, and the weights of all were lost.
        if step + 1 < recipe.steps && ended.failed.is_none() {
            ended.failed = ahead.read(trainer.rank(), step as u64 + 1).err();
        }
        let own = ControlFlags { stop: job.interrupt.reason(), failed: ended.failed.is_some(), step_seconds };
        let report = match trainer.step(&own.to_numbers()) {
            Err(e) if e.kind() == Kind::NotFinite && step > first => {
                ended.failed = Some(with_cure(e));
                break;
            }
            report => report?,
        };
        step_seconds = started.elapsed().as_secs_f64();
        let agreed = agreed_flags(trainer, job, &report)?;
        // Who stops a new run in its first step does not want the model of one step in the place of an earlier one.
        if step == first && job.from.is_none() && agreed.stop.is_some() {
            return Ok(Ended { stopped: agreed.stop, ..Ended::default() });
        }
        if let Some(trace) = &job.trace {
            trace.add(trainer.rank().world().index(), report.step, &trainer.passes());
        }
        (ended.steps, ended.stopped) = (step + 1, agreed.stop);
        let mut over = agreed.stop.is_some() || agreed.failed;
        let mut entry = entry_of(job, &report, step_seconds, began);
        if !agreed.failed && is_evaluated(job, step + 1, over) {
            if leads {
                ended.failed = ended.failed.or(job.metrics().begin(&entry).err());
            }
            (entry.val_loss, over) = measure(trainer, leads, job, &mut ended)?;
        }
        if let Some(why) = trainer.not_captured().filter(|_| !is_told) {
            is_told = true;
            job.lines.say(format_args!("steps are run one launch after the other: {}", why.message()));
        }
        if let Some(progress) = &progress {
            let told = record(trainer, job, progress, &entry);
            ended.failed = ended.failed.or(told.err());
        }
        if !over && is_checkpointed(job, step + 1) {
            job.verify_folder(&mut ended)?;
            ended.note(leave_between(trainer, job)?);
            over = ended.unsaved;
        }
        if over {
            break;
        }
    }
    Ok(ended)
}

/// The flags on which ranks agreed in a step, or right after it. Every rank calls this together.
fn agreed_flags(
    trainer: &Trainer<'_, LanguageModel>,
    job: &Job,
    report: &StepReport,
) -> Result<ControlFlags> {
    let num_ranks = trainer.rank().world().mesh().num_ranks();
    let mut agreed = ControlFlags::from_sums(&report.control, num_ranks);
    if report.step == job.first() as u64 || agreed.step_seconds > LONG_STEP_SECONDS {
        agreed.stop = agreed.stop.or(agreed_stop(trainer, job)?);
    }
    Ok(agreed)
}

/// Whether the held-out loss is due after so many steps. What stops a run after its last step comes too late.
fn is_evaluated(job: &Job, steps: usize, is_stopped: bool) -> bool {
    let is_last = steps == job.recipe.steps;
    let is_due = job.eval_every.is_some_and(|n| steps.is_multiple_of(n) || is_last);
    is_due && job.held_out.is_some() && (!is_stopped || is_last)
}

/// Whether a checkpoint is due after so many steps; the one after the last step is saved with the model.
fn is_checkpointed(job: &Job, steps: usize) -> bool {
    let is_due = job.checkpoints.as_ref().is_some_and(|c| steps.is_multiple_of(c.every));
    is_due && steps < job.recipe.steps
}

/// Why the run is to stop, if any rank has a reason by now. Every rank calls this together.
fn agreed_stop(trainer: &Trainer<'_, LanguageModel>, job: &Job) -> Result<Option<StopReason>> {
    let own = ControlFlags { stop: job.interrupt.reason(), ..ControlFlags::default() };
    let sums = world_sum(trainer.rank(), &own.to_numbers(), Location::caller())?;
    Ok(ControlFlags::from_sums(&sums, 1).stop)
}

/// What is written down of a step.
fn entry_of(job: &Job, report: &StepReport, seconds: f64, began: Instant) -> StepMetrics {
    StepMetrics {
        step: report.step + 1,
        loss: report.loss,
        grad_norm: report.grad_norm,
        lr: report.lr,
        tokens_per_s: (job.recipe.batch * job.recipe.seq) as f64 / seconds,
        seconds: job.seconds + began.elapsed().as_secs_f64(),
        loss_scale: report.loss_scale,
        skipped: report.loss_scale.map(|_| report.skipped),
        val_loss: None,
    }
}

/// The held-out loss, if it came to one, and whether the run is over. Every rank calls this together. A measurement after the last
/// step is finished whatever stops the run, but the state is saved first: whoever asks for an end may not wait for long.
fn measure(
    trainer: &Trainer<'_, LanguageModel>,
    leads: bool,
    job: &Job,
    ended: &mut Ended,
) -> Result<(Option<f64>, bool)> {
    let is_complete = ended.steps == job.recipe.steps;
    if ended.stopped.is_none() {
        match held_out_loss(trainer, job, || job.interrupt.reason().is_some())? {
            Some(Measured::Loss(loss)) => return Ok((Some(loss), false)),
            None => return Ok((None, false)),
            Some(Measured::Abandoned(why)) => {
                ended.failed = ended.failed.take().or(why);
                ended.stopped = agreed_stop(trainer, job)?;
            }
        }
    }
    if !is_complete || ended.stopped.is_none() {
        return Ok((None, true));
    }
    *ended = end(trainer, std::mem::take(ended), leads, job)?;
    match held_out_loss(trainer, job, || false)? {
        Some(Measured::Loss(loss)) => Ok((Some(loss), true)),
        Some(Measured::Abandoned(why)) => {
            ended.failed = ended.failed.take().or(why);
            Ok((None, true))
        }
        None => Ok((None, true)),
    }
}

/// The mean loss of the held-out windows, unless a rank is to `stop`; as many rows at a time as a microbatch has, which there is
/// memory for.
fn held_out_loss(
    trainer: &Trainer<'_, LanguageModel>,
    job: &Job,
    stop: impl Fn() -> bool,
) -> Result<Option<Measured>> {
    let Some(windows) = &job.held_out else { return Ok(None) };
    let part = |x: &[Tensor]| trainer.loss_part(x);
    let rows_max = job.recipe.batch / job.recipe.microbatches;
    mean_loss(trainer.rank(), &job.plan, windows, rows_max, stop, part).map(Some)
}

/// An error of a step that followed good ones, with what to do about it.
fn with_cure(e: Error) -> Error {
    if e.details().iter().any(|(label, _)| *label == "help") {
        return e;
    }
    e.detail("help", "a smaller --lr, or more steps of --warmup, is the usual cure")
}
