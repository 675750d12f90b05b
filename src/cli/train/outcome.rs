//! The outcome of a run: summary, error and exit code.

use super::Job;
use super::progress::print_summary;
use crate::cli::Failure;
use crate::cli::ranks::is_rank_zero;
use crate::interrupt::StopReason;
use shardgrad::prelude::*;
use std::sync::atomic::Ordering;

/// Reports the outcome of a run. A run stopped after its last step is complete.
pub(super) fn report_outcome(
    job: &Job,
    stopped: Option<StopReason>,
    failed: Option<Error>,
) -> Result<(), Failure> {
    let (saved, taken) = (job.state.saved.load(Ordering::SeqCst), job.state.metrics().num_new_steps());
    if let Some(e) = failed {
        let model = format!("the model after step {saved}, in {}", job.state.model().display());
        let e = if saved > 0 && is_rank_zero() { e.detail("saved", model) } else { e };
        let e = match stopped.or(job.state.interrupt.reason()) {
            Some(reason) => e.detail("stopped by", reason.to_string()),
            None => e,
        };
        return Err(if taken > 0 { Failure::of_run(e) } else { e.into() });
    }
    if let Some(reason) = stopped.filter(|_| saved == 0) {
        // On other ranks a failed save of rank 0 may be the reason.
        let when = if is_rank_zero() { " before the first step" } else { "" };
        let error = Error::new(Kind::Interrupted, format!("stopped by {reason}{when}; nothing is saved"));
        return Err(Failure::of_run(job.state.with_unchanged_model(error)));
    }
    if !job.spec.json && is_rank_zero() {
        print_summary(job, job.state.metrics().steps());
    }
    match stopped {
        _ if saved >= job.spec.train_config.steps => Ok(()),
        Some(reason) => Err(Failure::stopped(saved_after(job, reason, saved), reason)),
        None => {
            let error = Error::new(Kind::PeerLost, "another rank ended the run");
            Err(Failure::of_run(error.detail("help", "see the error message of that rank")))
        }
    }
}

/// Returns the error of a run that was stopped and saved its state.
fn saved_after(job: &Job, reason: StopReason, step: usize) -> Error {
    let error = |saved: &str| {
        Error::new(Kind::Interrupted, format!("stopped by {reason} after step {step}; {saved} saved"))
    };
    match job.spec.saves.checkpoints {
        Some(_) => error("the model and a checkpoint are")
            .detail("help", "resume with the same options and --resume"),
        None => error("the model is"),
    }
}
