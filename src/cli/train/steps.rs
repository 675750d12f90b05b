//! The steps of one rank, and what ends them.

use super::Job;
use super::checkpoints::leave_between;
use super::progress::{Progress, record};
use crate::metrics::StepMetrics;
use crate::train::{Ahead, Measured, mean_loss, word};
use shardgrad::nn::{LanguageModel, StepReport};
use shardgrad::prelude::*;
use shardgrad::tensor::control::world_sum;
use std::panic::Location;
use std::time::Instant;

/// How the steps of a rank ended.
#[derive(Default)]
pub(super) struct Ended {
    /// Steps that were taken and count; without one there is nothing to save.
    pub(super) steps: usize,
    /// Whether a signal came.
    pub(super) stopped: bool,
    /// What went wrong, on a rank that saw it; the weights of the last step were good all the same.
    pub(super) failed: Option<Error>,
    /// Whether that was a checkpoint which could not be written.
    pub(super) unsaved: bool,
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
    let first = job.first();
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
        let report = match trainer.step(&word(job.interrupt.requested(), ended.failed.is_some())) {
            Err(e) if e.kind() == Kind::NotFinite && step > first => {
                ended.failed = Some(with_cure(e));
                break;
            }
            report => report?,
        };
        let seconds = started.elapsed().as_secs_f64();
        if step == first && stopped_by_now(trainer, job)? {
            return Ok(Ended { stopped: true, ..Ended::default() });
        }
        if let Some(trace) = &job.trace {
            trace.add(trainer.rank().world().index(), report.step, &trainer.passes());
        }
        (ended.steps, ended.stopped) = (step + 1, report.control[0] > 0.0);
        let mut over = ended.stopped || report.control[1] > 0.0;
        let mut entry = entry_of(job, &report, seconds, began);
        let due = job.eval_every.is_some_and(|n| (step + 1) % n == 0 || step + 1 == recipe.steps);
        if due && !over && job.held_out.is_some() {
            if leads {
                ended.failed = ended.failed.or(job.metrics().begin(&entry).err());
            }
            (entry.val_loss, over) = measure(trainer, job, &mut ended)?;
        }
        if let Some(why) = trainer.not_captured().filter(|_| !is_told) {
            is_told = true;
            job.lines.say(format_args!("steps are run one launch after the other: {}", why.message()));
        }
        if let Some(progress) = &progress {
            let told = record(trainer, job, progress, &entry);
            ended.failed = ended.failed.or(told.err());
        }
        // At the end there is one more.
        if !over
            && step + 1 < recipe.steps
            && job.checkpoints.as_ref().is_some_and(|c| (step + 1) % c.every == 0)
        {
            ended.note(leave_between(trainer, job)?);
            over = ended.unsaved;
        }
        if over {
            break;
        }
    }
    Ok(ended)
}

/// Whether a signal has come to any rank. Every rank calls this together. Who stops a run before its first step is done does
/// not want the model of one step in the place of an earlier one.
fn stopped_by_now(trainer: &Trainer<'_, LanguageModel>, job: &Job) -> Result<bool> {
    let word = f64::from(u8::from(job.interrupt.requested()));
    Ok(world_sum(trainer.rank(), &[word], Location::caller())?[0] > 0.0)
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

/// The held-out loss, if it came to one, and whether the run is over. Every rank calls this together.
fn measure(
    trainer: &Trainer<'_, LanguageModel>,
    job: &Job,
    ended: &mut Ended,
) -> Result<(Option<f64>, bool)> {
    match held_out_loss(trainer, job)? {
        Some(Measured::Abandoned(why)) => {
            ended.stopped = true;
            ended.failed = ended.failed.take().or(why);
            Ok((None, true))
        }
        Some(Measured::Loss(loss)) => Ok((Some(loss), false)),
        None => Ok((None, false)),
    }
}

/// The mean loss of the held-out windows, unless a signal comes; as many rows at a time as a microbatch has, which there is
/// memory for.
fn held_out_loss(trainer: &Trainer<'_, LanguageModel>, job: &Job) -> Result<Option<Measured>> {
    let Some(windows) = &job.held_out else { return Ok(None) };
    let stop = || job.interrupt.requested();
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
