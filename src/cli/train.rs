//! `train`: a language model on text or tokens, on any mesh.

use super::args::{TrainArgs, check_tokens};
use crate::data::{Order, Sampler, Split, TokenFile, Vocabulary};
use crate::interrupt::Interrupt;
use crate::metrics::{Metrics, StepMetrics};
use crate::outputs::{Lines, OutFolder, check_target, copy_files};
use crate::plot;
use crate::tokenizer::TOKENIZER_FILE;
use crate::trace::Trace;
use crate::train::{Measured, Recipe, mean_loss};
use indicatif::{ProgressBar, ProgressStyle};
use shardgrad::nn::{Cast, LanguageModel, ModelConfig, Trainer};
use shardgrad::prelude::*;
use std::cell::RefCell;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Files of a model folder that training does not change.
const TOKENIZER_FILES: [&str; 6] = [
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
];

/// All that ranks share of a run; made before the first of them starts.
struct Job {
    config: ModelConfig,
    plan: Plan,
    recipe: Recipe,
    rows: Sampler,
    held_out: Option<Sampler>,
    /// What a loss is measured by.
    unit: &'static str,
    eval_every: Option<usize>,
    check_every: usize,
    start: Option<PathBuf>,
    out: OutFolder,
    shard_bytes_max: u64,
    save_dtype: DType,
    cast: Cast,
    json: bool,
    lines: Lines,
    interrupt: Interrupt,
    metrics: Mutex<Metrics>,
    trace: Option<Trace>,
    /// Whether cuts or lists depend on times that are measured.
    measures: bool,
}

/// How the run of a rank ended, with its model saved.
#[derive(Default)]
struct Ended {
    /// Steps that were taken.
    steps: usize,
    /// Whether a signal came.
    stopped: bool,
    /// What went wrong, on a rank that saw it; the weights of the last step were good all the same.
    failed: Option<Error>,
}

/// Runs the command.
pub(crate) fn run(args: &TrainArgs) -> Result<()> {
    args.check()?;
    let world = args.run.train_world()?;
    let mesh = args.run.train_mesh();
    let job = prepare(args)?;
    let text = format!(
        "{} on {mesh}, {} steps of {} x {} tokens, {}",
        args.model.name(),
        job.recipe.steps,
        job.recipe.batch,
        job.recipe.seq,
        job.recipe.precision
    );
    if !job.json {
        job.lines.say(format_args!("training {text}"));
    }
    let ended = world.launch(|rank| train(rank, &job));
    let traced = job.trace.as_ref().map_or(Ok(()), |trace| trace.write(mesh.num_ranks()));
    let mut ended = ended?;
    let metrics = job.metrics.lock().unwrap_or_else(PoisonError::into_inner);
    let drawn = plot::write_loss_plot(&job.out.join("loss.svg"), &text, metrics.steps());
    let Ended { steps, stopped, .. } = ended[0];
    let failed = ended.iter_mut().find_map(|one| one.failed.take());
    let saved = |e: Error| {
        let model = job.out.join("model");
        e.detail("saved", format!("the model after step {steps}, in {}", model.display()))
    };
    failed.map_or(Ok(()), Err).and(drawn).and(traced).map_err(saved)?;
    if !job.json {
        tell(&job, metrics.steps());
    }
    if stopped && steps < job.recipe.steps {
        let text = format!("stopped by a signal after step {steps}; the model is saved");
        return Err(Error::new(Kind::Interrupted, text));
    }
    Ok(())
}

/// Reads what there is to read and checks what can be checked, before any rank starts.
fn prepare(args: &TrainArgs) -> Result<Job> {
    let mut config = args.model.config()?;
    if let Some(p) = args.dropout {
        config = config.with_dropout(p);
    }
    let lines = Lines::default();
    let Rows { rows, held_out, unit } = rows(args, &config, &lines)?;
    let steps = &args.steps;
    let optim = &args.optim;
    let recipe = Recipe {
        steps: steps.steps,
        batch: steps.batch,
        seq: rows.seq(),
        microbatches: args.microbatches(),
        schedule: args.schedule(),
        optim: AdamW::new(optim.lr)
            .betas(optim.beta1, optim.beta2)
            .eps(optim.eps)
            .weight_decay(optim.weight_decay),
        clip: optim.clip(),
        seed: steps.seed,
        precision: args.precision(),
    };
    check_tokens(recipe.batch, recipe.seq)?;
    let out = OutFolder::open(&args.out)?;
    let metrics = out.join("metrics.jsonl");
    if let Some(trace) = &args.trace {
        let own = [metrics.clone(), out.join("loss.svg"), out.join("schedule.txt"), out.join("model")];
        let read = args.source.inputs().chain(args.source.source(trace)).chain(args.model.dir());
        check_target("--trace", trace, read.chain(own.iter().map(PathBuf::as_path)))?;
    }
    Ok(Job {
        plan: args.pipeline.plan(LanguageModel::plan(&config)),
        config,
        recipe,
        rows,
        held_out,
        unit,
        eval_every: args.eval_every(),
        check_every: args.check_every,
        start: args.model.dir().map(Path::to_path_buf),
        out,
        shard_bytes_max: args.shard_size.0,
        save_dtype: args.save_dtype.unwrap_or(args.precision().param_dtype),
        cast: args.run.cast(),
        json: args.json,
        lines,
        interrupt: Interrupt::install()?,
        metrics: Mutex::new(Metrics::new(&metrics)),
        trace: args.trace.as_deref().map(Trace::new),
        measures: args.pipeline.measures(),
    })
}

/// What is trained on.
struct Rows {
    rows: Sampler,
    held_out: Option<Sampler>,
    /// What a loss is measured by.
    unit: &'static str,
}

/// Opens what there is to read.
fn rows(args: &TrainArgs, config: &ModelConfig, lines: &Lines) -> Result<Rows> {
    let seq = args.seq(config)?;
    let steps = &args.steps;
    let order = if args.no_shuffle { Order::InFileOrder } else { Order::Shuffled { seed: steps.seed } };
    let mut unit = "token";
    let (rows, held_out) = match &args.source.tokens {
        Some(path) => {
            let file = TokenFile::open(path, &Vocabulary::new(config))?;
            if steps.seq.is_some() {
                file.require_seq(seq)?;
            }
            (Sampler::of_tokens(Arc::new(file), order), None)
        }
        None => {
            super::refuse_texts(config)?;
            let how = args.source.how(args.model.dir(), config, Some(&args.out))?;
            let corpus = Arc::new(super::documents(&args.source.data, &how)?);
            unit = corpus.unit();
            if !args.json {
                lines.say(format_args!("reading {corpus}"));
            }
            let held_out = Sampler::of_text(corpus.clone(), Split::Val, seq, Order::InFileOrder)?;
            (Sampler::of_text(corpus, Split::Train, seq, order)?, Some(held_out))
        }
    };
    Ok(Rows { rows, held_out, unit })
}

/// One rank's run: its steps, then the model, whatever ended them.
fn train(rank: &Rank, job: &Job) -> Result<Ended> {
    let recipe = &job.recipe;
    let mut trainer = recipe.trainer(rank, LanguageModel::new(&job.config), &job.plan, &job.rows)?;
    if let Some(dir) = &job.start {
        super::load(trainer.model(), dir, job.cast)?;
    }
    let leads = rank.index() == 0;
    let mut ended = take_steps(&mut trainer, leads, job)?;
    job.interrupt.hold();
    if leads && job.interrupt.requested() {
        eprintln!("stopping: step {} of {} is done; saving the model", ended.steps, recipe.steps);
    }
    match save(&trainer, leads, job) {
        Ok(()) => Ok(ended),
        Err(e) => Err(match ended.failed.take() {
            Some(first) => first.detail("not saved", e.message()),
            None => e,
        }),
    }
}

/// Saves the model. Every rank calls this together.
fn save(trainer: &Trainer<'_, LanguageModel>, leads: bool, job: &Job) -> Result<()> {
    let out = job.out.join("model");
    trainer.model().save_as(&out, job.shard_bytes_max, job.save_dtype)?;
    match &job.start {
        Some(from) if leads => copy_files(&TOKENIZER_FILES, from, &out),
        _ => Ok(()),
    }
}

/// The steps of one rank. What goes wrong on one of them and leaves good weights ends the run on all, at the same step.
///
/// # Errors
/// What leaves nothing to save: a first step that fails, an op, a lost rank.
fn take_steps(trainer: &mut Trainer<'_, LanguageModel>, leads: bool, job: &Job) -> Result<Ended> {
    let recipe = &job.recipe;
    let progress = leads.then(|| Progress::new(job));
    let began = Instant::now();
    let mut ended = Ended::default();
    for step in 0..recipe.steps {
        if step == 0 || job.check_every > 0 && step % job.check_every == 0 {
            trainer.check_alike()?;
        }
        let started = Instant::now();
        if leads && ended.failed.is_none() {
            ended.failed = read_ahead(job, step + 1).err();
        }
        let word = [job.interrupt.requested(), ended.failed.is_some()].map(|b| f64::from(u8::from(b)));
        let report = match trainer.step(&word) {
            Err(e) if e.kind() == Kind::NotFinite && step > 0 => {
                ended.failed = Some(with_cure(e));
                break;
            }
            report => report?,
        };
        let seconds = started.elapsed().as_secs_f64();
        if let Some(trace) = &job.trace {
            trace.add(trainer.rank().world().index(), report.step, &trainer.passes());
        }
        (ended.steps, ended.stopped) = (step + 1, report.control[0] > 0.0);
        let mut over = ended.stopped || report.control[1] > 0.0;
        let due = job.eval_every.is_some_and(|n| (step + 1) % n == 0 || step + 1 == recipe.steps);
        let mut val_loss = None;
        if let (Some(windows), true) = (&job.held_out, due && !over) {
            match held_out_loss(trainer, windows, job)? {
                Measured::Loss(loss) => val_loss = Some(loss),
                Measured::Abandoned(why) => {
                    (ended.stopped, over) = (true, true);
                    ended.failed = ended.failed.or(why);
                }
            }
        }
        if let Some(progress) = &progress {
            let entry = StepMetrics {
                step: step as u64 + 1,
                loss: report.loss,
                grad_norm: report.grad_norm,
                lr: report.lr,
                tokens_per_s: (recipe.batch * recipe.seq) as f64 / seconds,
                seconds: began.elapsed().as_secs_f64(),
                loss_scale: report.loss_scale,
                skipped: report.loss_scale.map(|_| report.skipped),
                val_loss,
            };
            let told = record(trainer, job, progress, &entry);
            ended.failed = ended.failed.or(told.err());
        }
        if over {
            break;
        }
    }
    Ok(ended)
}

/// Sees to it that the rows of a step can be read, while there is a step to go before it: where one rank alone fails to
/// read, the others wait for it in vain, and the weights of all are lost.
fn read_ahead(job: &Job, step: usize) -> Result<()> {
    let Recipe { steps, batch, .. } = job.recipe;
    if step < steps {
        job.rows.batch(Sampler::step(step as u64, batch as u64))?;
    }
    Ok(())
}

/// The mean loss of the held-out windows, unless a signal comes. Every rank calls this together.
fn held_out_loss(trainer: &Trainer<'_, LanguageModel>, windows: &Sampler, job: &Job) -> Result<Measured> {
    let stop = || job.interrupt.requested();
    let part = |x: &[Tensor]| trainer.loss_part(x);
    mean_loss(trainer.rank(), &job.plan, windows, job.recipe.batch, stop, part)
}

/// Writes down and shows a step.
fn record(
    trainer: &Trainer<'_, LanguageModel>,
    job: &Job,
    progress: &Progress<'_>,
    entry: &StepMetrics,
) -> Result<()> {
    job.metrics.lock().unwrap_or_else(PoisonError::into_inner).add(entry)?;
    if entry.step == 1 && job.measures {
        tell_measured(trainer, job)?;
    }
    progress.show(entry)
}

/// An error of a step that followed good ones, with what to do about it.
fn with_cure(e: Error) -> Error {
    if e.details().iter().any(|(label, _)| *label == "help") {
        return e;
    }
    e.detail("help", "a smaller --lr, or more steps of --warmup, is the usual cure")
}

/// Says what was chosen by measured times, and keeps it, so that a run can be repeated.
fn tell_measured(trainer: &Trainer<'_, LanguageModel>, job: &Job) -> Result<()> {
    let Some(schedule) = trainer.schedule() else { return Ok(()) };
    let path = job.out.join("schedule.txt");
    std::fs::write(&path, schedule.passes_only().to_text())
        .map_err(|e| Error::new(Kind::Io, format!("cannot write {}: {e}", path.display())))?;
    if !job.json {
        let starts = trainer.stage_starts();
        let starts: Vec<&str> = starts.iter().skip(1).map(|(_, path)| &**path).collect();
        let starts = starts.join(", ");
        job.lines.say(format_args!("stages begin at {starts}; the lists are in {}", path.display()));
    }
    Ok(())
}

/// What a person sees: a bar on a terminal, a line now and then elsewhere, JSON if asked for.
struct Progress<'a> {
    out: &'a Lines,
    bar: Option<ProgressBar>,
    json: bool,
    shown: RefCell<Instant>,
    steps: usize,
}

impl Progress<'_> {
    fn new(job: &Job) -> Progress<'_> {
        let (steps, json) = (job.recipe.steps, job.json);
        let bar = (!json && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left");
            ProgressBar::new(steps as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
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
            bar.set_position(entry.step);
            bar.set_message(text.clone());
            if entry.val_loss.is_some() {
                bar.suspend(|| self.out.say(format_args!("step {:>5}  {text}", entry.step)));
            }
            return Ok(());
        }
        let mut shown = self.shown.borrow_mut();
        let due =
            entry.step == 1 || entry.step == self.steps as u64 || shown.elapsed() > Duration::from_secs(5);
        if due || entry.val_loss.is_some() {
            *shown = Instant::now();
            self.out.say(format_args!("step {:>5}  {text}", entry.step));
        }
        Ok(())
    }
}

/// What is there now, and what to do with it.
fn tell(job: &Job, steps: &[StepMetrics]) {
    let (out, say) = (&job.out, |line: String| job.lines.say(line));
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else { return };
    say(format!("\nloss {:.3} -> {:.3} in {:.1} s", first.loss, last.loss, last.seconds));
    if let Some(held_out) = steps.iter().rev().find_map(|s| s.val_loss) {
        say(format!("held-out loss {held_out:.3} nats per {}", job.unit));
    }
    let model = out.join("model").display().to_string();
    for (path, what) in [
        (out.join("metrics.jsonl").display().to_string(), "every step"),
        (out.join("loss.svg").display().to_string(), "the loss as a picture"),
        (model.clone(), "the model, as transformers reads it"),
    ] {
        say(format!("  {path:<28} {what}"));
    }
    say("sample from it:".to_string());
    say(format!("  cargo run --release -- generate --model {model} --prompt \"fn \""));
}
