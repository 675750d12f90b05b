//! What a run tells while it lasts, and at its end.

use super::Job;
use crate::metrics::StepMetrics;
use crate::outputs::{Lines, cannot, remove};
use crate::tokenizer::Tokenizer;
use indicatif::{ProgressBar, ProgressStyle};
use shardgrad::autograd::pipeline::Schedule;
use shardgrad::nn::LanguageModel;
use shardgrad::nn::resume::Checkpoints;
use shardgrad::prelude::*;
use std::cell::RefCell;
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

/// The lists of a pipeline that were chosen by measured times.
const SCHEDULE: &str = "schedule.txt";

/// Writes down and shows a step.
pub(super) fn record(
    trainer: &Trainer<'_, LanguageModel>,
    job: &Job,
    progress: &Progress<'_>,
    entry: &StepMetrics,
) -> Result<()> {
    job.metrics().add(entry)?;
    if entry.step == job.first() as u64 + 1 {
        match trainer.schedule().filter(|_| job.measures) {
            Some(schedule) => tell_measured(trainer, schedule, job),
            None if job.lists_read => {}
            None => {
                let path = job.out.join(SCHEDULE);
                job.metrics().then(move || remove(&path));
            }
        }
    }
    progress.show(entry)
}

/// Says what was chosen by measured times, and keeps it, so that a run can be repeated.
fn tell_measured(trainer: &Trainer<'_, LanguageModel>, schedule: &Schedule, job: &Job) {
    if job.from.is_some() {
        eprintln!("resuming with another pipeline schedule: chosen anew, by times measured now");
    }
    let path = job.out.join(SCHEDULE);
    let (text, to) = (schedule.passes_only().to_text(), path.clone());
    job.metrics().then(move || std::fs::write(&to, text).map_err(|e| cannot("write", &to, &e)));
    if !job.json {
        let starts = trainer.stage_starts();
        let starts: Vec<&str> = starts.iter().skip(1).map(|(_, path)| &**path).collect();
        let starts = starts.join(", ");
        job.lines.say(format_args!("stages begin at {starts}; the lists are in {}", path.display()));
    }
}

/// What a person sees: a bar on a terminal, a line now and then elsewhere, JSON if asked for.
pub(super) struct Progress<'a> {
    out: &'a Lines,
    bar: Option<ProgressBar>,
    json: bool,
    shown: RefCell<Instant>,
    /// The first step and the last.
    steps: [u64; 2],
}

impl Progress<'_> {
    pub(super) fn new(job: &Job) -> Progress<'_> {
        let (steps, json) = ([job.first() as u64 + 1, job.recipe.steps as u64], job.json);
        let bar = (!json && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left");
            let bar =
                ProgressBar::new(steps[1]).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_position(steps[0] - 1);
            // The steps before took no time of this run.
            bar.reset_eta();
            bar
        });
        Progress { out: &job.lines, bar, json, shown: RefCell::new(Instant::now()), steps }
    }

    fn show(&self, entry: &StepMetrics) -> Result<()> {
        if self.json {
            let line = serde_json::to_string(entry).map_err(|e| Error::new(Kind::Io, e.to_string()))?;
            self.out.say(line);
            return Ok(());
        }
        let mut text = format!("loss {:.3}  {:.0} tokens/s", entry.loss, entry.tokens_per_s);
        if let (Some(true), Some(scale)) = (entry.skipped, entry.loss_scale) {
            text += &format!("  skipped at loss scale {scale}");
        }
        if let Some(held_out) = entry.val_loss {
            text += &format!("  held-out {held_out:.3}");
        }
        if let Some(bar) = &self.bar {
            let (bar, step, measured) = (bar.clone(), entry.step, entry.val_loss.is_some());
            self.out.then(move |say| {
                bar.set_position(step);
                bar.set_message(text.clone());
                if measured {
                    bar.suspend(|| say(&format!("step {step:>5}  {text}")));
                }
            });
            return Ok(());
        }
        let mut shown = self.shown.borrow_mut();
        let due = self.steps.contains(&entry.step) || shown.elapsed() > Duration::from_secs(5);
        if due || entry.val_loss.is_some() {
            *shown = Instant::now();
            self.out.say(format_args!("step {:>5}  {text}", entry.step));
        }
        Ok(())
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        // The last handle of a bar draws once more.
        if let Some(bar) = self.bar.take() {
            self.out.then(move |_| drop(bar));
        }
    }
}

/// What is there now, and what to do with it.
pub(super) fn tell(job: &Job, steps: &[StepMetrics]) {
    let (out, say) = (&job.out, |line: String| job.lines.say(line));
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else { return };
    say(format!("\nloss {:.3} -> {:.3} in {:.1} s", first.loss, last.loss, last.seconds));
    if let Some(held_out) = steps.iter().rev().find_map(|s| s.val_loss) {
        say(format!("held-out loss {held_out:.3} nats per {}", job.unit));
    }
    let checkpoint = job.checkpoints.as_ref().map(|_| Checkpoints::place(&out.join(""), last.step));
    let left = [
        (out.join("metrics.jsonl"), "every step"),
        (out.join("loss.svg"), "the loss as a picture"),
        (out.join("model"), "the model, as transformers reads it"),
    ];
    let left = left
        .into_iter()
        .chain(checkpoint.map(|path| (path, "what --resume goes on from, with more --steps")));
    for (path, what) in left {
        say(format!("  {:<28} {what}", path.display().to_string()));
    }
    if let Some(command) = sample(job, &out.join("model")) {
        say("sample from it:".to_string());
        say(format!("  {command}"));
    }
}

/// The command that continues a text with the model that was saved, if there is one.
fn sample(job: &Job, model: &Path) -> Option<String> {
    let reads = job.config.is_causal() && Tokenizer::of(Some(model), &job.config).is_ok();
    // It widens what is narrower, and rounds only if it is told to.
    let dtype = if job.save_dtype == DType::F64 { " --dtype f64" } else { "" };
    reads.then(|| {
        format!("cargo run --release -- generate --model {} --prompt \"fn \"{dtype}", model.display())
    })
}
