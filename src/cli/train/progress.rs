//! Progress output of a run, and its summary.

use super::Job;
use crate::metrics::StepMetrics;
use crate::outputs::{StdoutWriter, io_error, remove};
use crate::tokenizer::Tokenizer;
use indicatif::{ProgressBar, ProgressStyle};
use shardgrad::autograd::pipeline::Schedule;
use shardgrad::nn::LanguageModel;
use shardgrad::nn::checkpoint::Checkpoints;
use shardgrad::prelude::*;
use std::cell::RefCell;
use std::io::IsTerminal;
use std::path::Path;
use std::time::{Duration, Instant};

/// File of the schedule chosen by measured times.
const SCHEDULE: &str = "schedule.txt";

/// Records a step in the metrics and prints its progress.
pub(super) fn record_step(
    trainer: &Trainer<'_, LanguageModel>,
    job: &Job,
    progress: &Progress<'_>,
    entry: &StepMetrics,
) -> Result<()> {
    job.state.metrics().add(entry)?;
    if entry.step == job.spec.num_steps_before() as u64 + 1 {
        match trainer.pipeline_schedule().filter(|_| job.spec.uses_measured_times) {
            Some(schedule) => report_measured_schedule(trainer, schedule, job),
            None if job.spec.schedule_from_file => {}
            None => {
                let path = job.state.out.join(SCHEDULE);
                job.state.metrics().enqueue(move || remove(&path));
            }
        }
    }
    progress.show(entry)
}

/// Prints the stages and writes the schedule that were chosen by measured times, so that the run can be repeated.
fn report_measured_schedule(trainer: &Trainer<'_, LanguageModel>, schedule: &Schedule, job: &Job) {
    if job.spec.start.from.is_some() {
        eprintln!("resuming with another pipeline schedule, chosen by newly measured times");
    }
    let path = job.state.out.join(SCHEDULE);
    let (text, to) = (schedule.passes_only().to_text(), path.clone());
    job.state.metrics().enqueue(move || std::fs::write(&to, text).map_err(|e| io_error("write", &to, &e)));
    if !job.spec.json {
        let starts = trainer.stage_starts();
        let starts: Vec<&str> = starts.iter().skip(1).map(|(_, path)| &**path).collect();
        let starts = starts.join(", ");
        job.state.lines.print_line(format_args!(
            "pipeline stages start at {starts}; the schedule is in {}",
            path.display()
        ));
    }
}

/// Progress display: a bar on a terminal, else a line every few seconds; JSON with --json.
pub(super) struct Progress<'a> {
    out: &'a StdoutWriter,
    bar: Option<ProgressBar>,
    json: bool,
    shown: RefCell<Instant>,
    /// The first step and the last.
    steps: [u64; 2],
}

impl Progress<'_> {
    pub(super) fn new(job: &Job) -> Progress<'_> {
        let (steps, json) =
            ([job.spec.num_steps_before() as u64 + 1, job.spec.train_config.steps as u64], job.spec.json);
        let bar = (!json && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left");
            let bar =
                ProgressBar::new(steps[1]).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar.set_position(steps[0] - 1);
            // Steps before the resume took no time in this process.
            bar.reset_eta();
            bar
        });
        Progress { out: &job.state.lines, bar, json, shown: RefCell::new(Instant::now()), steps }
    }

    fn show(&self, entry: &StepMetrics) -> Result<()> {
        if self.json {
            let line = serde_json::to_string(entry).map_err(|e| Error::new(Kind::Io, e.to_string()))?;
            self.out.print_line(line);
            return Ok(());
        }
        let mut text = format!("loss {:.3}  {:.0} tokens/s", entry.loss, entry.tokens_per_s);
        if let (Some(true), Some(scale)) = (entry.skipped, entry.loss_scale) {
            text += &format!("  step skipped at loss scale {scale}");
        }
        if let Some(experts) = &entry.experts {
            text += &format!("  expert imbalance {:.2}", experts.expert_imbalance);
        }
        if let Some(held_out) = entry.val_loss {
            text += &format!("  validation loss {held_out:.3}");
        }
        if let Some(bar) = &self.bar {
            let (bar, step, measured) = (bar.clone(), entry.step, entry.val_loss.is_some());
            self.out.enqueue(move |print_line| {
                bar.set_position(step);
                bar.set_message(text.clone());
                if measured {
                    bar.suspend(|| print_line(&format!("step {step:>5}  {text}")));
                }
            });
            return Ok(());
        }
        let mut shown = self.shown.borrow_mut();
        let due = self.steps.contains(&entry.step) || shown.elapsed() > Duration::from_secs(5);
        if due || entry.val_loss.is_some() {
            *shown = Instant::now();
            self.out.print_line(format_args!("step {:>5}  {text}", entry.step));
        }
        Ok(())
    }
}

impl Drop for Progress<'_> {
    fn drop(&mut self) {
        // Dropping the last handle redraws the bar, so it happens in the writer thread.
        if let Some(bar) = self.bar.take() {
            self.out.enqueue(move |_| drop(bar));
        }
    }
}

/// Prints the final losses, the files of the run and a command to sample from the model.
pub(super) fn print_summary(job: &Job, steps: &[StepMetrics]) {
    let (out, print_line) = (&job.state.out, |line: String| job.state.lines.print_line(line));
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else { return };
    print_line(format!("\nloss {:.3} -> {:.3} in {:.1} s", first.loss, last.loss, last.seconds));
    if let Some(held_out) = steps.iter().rev().find_map(|s| s.val_loss) {
        print_line(format!("validation loss {held_out:.3} nats per {}", job.spec.data.unit));
    }
    let checkpoint =
        job.spec.saves.checkpoints.as_ref().map(|_| Checkpoints::path_of(&out.join(""), last.step));
    let left = [
        (out.join("metrics.jsonl"), "metrics of every step"),
        (out.join("loss.svg"), "loss plot"),
        (out.join("model"), "the model, in Hugging Face format"),
    ];
    let left =
        left.into_iter().chain(checkpoint.map(|path| (path, "checkpoint for --resume with more --steps")));
    for (path, what) in left {
        print_line(format!("  {:<28} {what}", path.display().to_string()));
    }
    if let Some(command) = generate_command(job, &out.join("model")) {
        print_line("sample from it:".to_string());
        print_line(format!("  {command}"));
    }
}

/// Returns a command that generates text with the saved model, if it can.
fn generate_command(job: &Job, model: &Path) -> Option<String> {
    let reads = job.spec.config.is_causal() && Tokenizer::for_model(Some(model), &job.spec.config).is_ok();
    // Narrower weights are widened on load; f64 weights would need --cast.
    let dtype = if job.spec.saves.dtype == DType::F64 { " --dtype f64" } else { "" };
    reads.then(|| {
        format!("cargo run --release -- generate --model {} --prompt \"fn \"{dtype}", model.display())
    })
}
