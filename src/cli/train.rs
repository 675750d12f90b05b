//! `train`: a language model on text or tokens, on any mesh.

use super::args::TrainArgs;
use crate::data::{Order, Sampler, Split, TokenFile, Vocabulary};
use crate::interrupt::Interrupt;
use crate::metrics::{self, MetricsWriter, StepMetrics};
use crate::plot;
use crate::tokenizer::TOKENIZER_FILE;
use crate::trace::Trace;
use crate::train::{Recipe, mean_loss};
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
    out: PathBuf,
    shard_bytes_max: u64,
    save_dtype: DType,
    cast: Cast,
    json: bool,
    interrupt: Interrupt,
    metrics: Mutex<MetricsWriter>,
    trace: Option<Trace>,
    /// Whether cuts or lists depend on times that are measured.
    measures: bool,
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
        println!("training {text}");
    }
    let ended = world.launch(|rank| train(rank, &job));
    if let Some(trace) = &job.trace {
        trace.write(mesh.num_ranks())?;
    }
    let ended = ended?;
    let steps = metrics::read(&job.out.join("metrics.jsonl"))?;
    plot::write_loss_plot(&job.out.join("loss.svg"), &text, &steps)?;
    let stopped = ended.into_iter().any(|early| early);
    if !job.json {
        tell(&job, &steps);
    }
    if stopped {
        let text = format!("stopped by a signal after step {}; the model is saved", steps.len());
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
    let seq = args.seq(&config)?;
    let steps = &args.steps;
    let order = if args.no_shuffle { Order::InFileOrder } else { Order::Shuffled { seed: steps.seed } };
    let mut unit = "token";
    let (rows, held_out) = match &args.source.tokens {
        Some(path) => {
            let file = TokenFile::open(path, &Vocabulary::new(&config))?;
            if steps.seq.is_some() {
                file.require_seq(seq)?;
            }
            (Sampler::of_tokens(Arc::new(file), order), None)
        }
        None => {
            super::refuse_texts(&config)?;
            let how = args.source.how(args.model.dir(), &config, Some(&args.out))?;
            let corpus = Arc::new(super::documents(&args.source.data, &how)?);
            unit = corpus.unit();
            if !args.json {
                println!("reading {corpus}");
            }
            let held_out = Sampler::of_text(corpus.clone(), Split::Val, seq, Order::InFileOrder)?;
            (Sampler::of_text(corpus, Split::Train, seq, order)?, Some(held_out))
        }
    };
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
    let metrics = Mutex::new(MetricsWriter::create(&args.out.join("metrics.jsonl"))?);
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
        out: args.out.clone(),
        shard_bytes_max: args.shard_size,
        save_dtype: args.save_dtype.unwrap_or(args.precision().param_dtype),
        cast: args.run.cast(),
        json: args.json,
        interrupt: Interrupt::install()?,
        metrics,
        trace: args.trace.as_deref().map(Trace::new),
        measures: args.pipeline.measures(),
    })
}

/// One rank's run; says whether it was stopped before its last step.
fn train(rank: &Rank, job: &Job) -> Result<bool> {
    let recipe = &job.recipe;
    let mut trainer = recipe.trainer(rank, LanguageModel::new(&job.config), &job.plan, &job.rows)?;
    if let Some(dir) = &job.start {
        super::load(trainer.model(), dir, job.cast)?;
    }
    if job.measures && rank.index() == 0 {
        tell_measured(&trainer, job)?;
    }
    let progress = (rank.index() == 0).then(|| Progress::new(recipe.steps, job.json));
    let began = Instant::now();
    let mut stopped = false;
    for step in 0..recipe.steps {
        if step == 0 || job.check_every > 0 && step % job.check_every == 0 {
            trainer.check_alike()?;
        }
        let started = Instant::now();
        let report = trainer.step(&[f64::from(u8::from(job.interrupt.requested()))])?;
        let seconds = started.elapsed().as_secs_f64();
        if let Some(trace) = &job.trace {
            trace.add(rank.index(), report.step, &trainer.passes());
        }
        stopped = report.control[0] > 0.0;
        let last = step + 1 == recipe.steps || stopped;
        let due = job.eval_every.is_some_and(|n| (step + 1) % n == 0 || last);
        let val_loss = match &job.held_out {
            Some(windows) if due => {
                let part = |x: &[Tensor]| trainer.loss_part(x);
                Some(mean_loss(trainer.rank(), &job.plan, windows, recipe.batch, part)?)
            }
            _ => None,
        };
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
            job.metrics.lock().unwrap_or_else(PoisonError::into_inner).write(&entry)?;
            progress.show(&entry)?;
        }
        if stopped {
            break;
        }
    }
    let out = job.out.join("model");
    trainer.model().save_as(&out, job.shard_bytes_max, job.save_dtype)?;
    if let (Some(from), 0) = (&job.start, rank.world().index()) {
        keep_tokenizer(from, &out)?;
    }
    Ok(stopped)
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
        println!("stages begin at {}; the lists are in {}", starts.join(", "), path.display());
    }
    Ok(())
}

/// Copies what tells the tokens of a model from the folder that it came from.
fn keep_tokenizer(from: &Path, to: &Path) -> Result<()> {
    for name in TOKENIZER_FILES {
        match std::fs::copy(from.join(name), to.join(name)) {
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::new(Kind::Io, format!("cannot copy {name} to {}: {e}", to.display())));
            }
            _ => {}
        }
    }
    Ok(())
}

/// What a person sees: a bar on a terminal, a line now and then elsewhere, JSON if asked for.
struct Progress {
    bar: Option<ProgressBar>,
    json: bool,
    lines: RefCell<Instant>,
    steps: usize,
}

impl Progress {
    fn new(steps: usize, json: bool) -> Progress {
        let bar = (!json && std::io::stderr().is_terminal()).then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len}  {msg}  {eta} left");
            ProgressBar::new(steps as u64).with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
        });
        Progress { bar, json, lines: RefCell::new(Instant::now()), steps }
    }

    fn show(&self, entry: &StepMetrics) -> Result<()> {
        if self.json {
            let line = serde_json::to_string(entry).map_err(|e| Error::new(Kind::Io, e.to_string()))?;
            println!("{line}");
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
                bar.suspend(|| println!("step {:>5}  {text}", entry.step));
            }
            return Ok(());
        }
        let mut shown = self.lines.borrow_mut();
        let due =
            entry.step == 1 || entry.step == self.steps as u64 || shown.elapsed() > Duration::from_secs(5);
        if due || entry.val_loss.is_some() {
            *shown = Instant::now();
            println!("step {:>5}  {text}", entry.step);
        }
        Ok(())
    }
}

/// What is there now, and what to do with it.
fn tell(job: &Job, steps: &[StepMetrics]) {
    let out = &job.out;
    let (Some(first), Some(last)) = (steps.first(), steps.last()) else { return };
    println!("\nloss {:.3} -> {:.3} in {:.1} s", first.loss, last.loss, last.seconds);
    if let Some(held_out) = steps.iter().rev().find_map(|s| s.val_loss) {
        println!("held-out loss {held_out:.3} nats per {}", job.unit);
    }
    println!("  {:<28} every step", out.join("metrics.jsonl").display());
    println!("  {:<28} the loss as a picture", out.join("loss.svg").display());
    println!("  {:<28} the model, as transformers reads it", out.join("model").display());
    println!(
        "sample from it:\n  cargo run --release -- generate --model {} --prompt \"fn \"",
        out.join("model").display()
    );
}
