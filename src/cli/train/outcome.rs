//! What a run came to: its last lines, and its exit code.

use super::Job;
use super::progress::tell;
use crate::cli::Failure;
use crate::cli::ranks::leads;
use crate::interrupt::StopReason;
use shardgrad::prelude::*;
use std::sync::atomic::Ordering;

/// Reports what a run came to. A run that was stopped after its last step is complete.
pub(super) fn outcome(job: &Job, stopped: Option<StopReason>, failed: Option<Error>) -> Result<(), Failure> {
    let (saved, taken) = (job.saved.load(Ordering::SeqCst), job.metrics().taken());
    if let Some(e) = failed {
        let model = format!("the model after step {saved}, in {}", job.model().display());
        let e = if saved > 0 && leads() { e.detail("saved", model) } else { e };
        let e = match stopped.or(job.interrupt.reason()) {
            Some(reason) => e.detail("stopped by", reason.to_string()),
            None => e,
        };
        return Err(if taken > 0 { Failure::of_run(e) } else { e.into() });
    }
    if let Some(reason) = stopped.filter(|_| saved == 0) {
        // On other ranks it may be that the first one could not save.
        let when = if leads() { " before the first step" } else { "" };
        let error = Error::new(Kind::Interrupted, format!("stopped by {reason}{when}; nothing is saved"));
        return Err(Failure::of_run(job.keeping(error)));
    }
    if !job.json && leads() {
        tell(job, job.metrics().steps());
    }
    match stopped {
        _ if saved >= job.recipe.steps => Ok(()),
        Some(reason) => Err(Failure::stopped(saved_after(job, reason, saved), reason)),
        None => {
            let error = Error::new(Kind::PeerLost, "another rank ended the run");
            Err(Failure::of_run(error.detail("help", "see its message")))
        }
    }
}

/// For a run that was stopped, with its state saved after a step.
fn saved_after(job: &Job, reason: StopReason, step: usize) -> Error {
    let error = |saved: &str| {
        Error::new(Kind::Interrupted, format!("stopped by {reason} after step {step}; {saved} saved"))
    };
    match job.checkpoints {
        Some(_) => {
            error("the model and a checkpoint are").detail("help", "go on with the same options and --resume")
        }
        None => error("the model is"),
    }
}
