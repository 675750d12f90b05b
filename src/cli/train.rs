//! `train`: a language model on text or tokens, on any mesh.

mod progress;
mod checkpoints;
mod newest;
mod resume;
mod steps;
mod rescue;
mod outcome;
#[cfg(test)]
mod peak;

use checkpoints::{Keeping, leave};
use outcome::outcome;
use rescue::{Kept, keeping, save_kept};
use resume::Begin;
use steps::{Ended, take_steps};

use super::Failure;
use super::args::{TrainArgs, check_experts, check_tokens};
use super::consistency;
use super::explain::Outline;
use super::memory::check_training;
use super::ranks::{Ranks, Startup, has_launcher, leads, process};
use crate::data::{Corpus, Order, Sampler, Split, TokenFile, refuse_written};
use crate::interrupt::{Interrupt, StopReason};
use crate::metrics::{Earlier, Metrics};
use crate::outputs::{Companions, Lines, OutFolder, check_target, place, written};
use crate::plot;
use crate::trace::Trace;
use crate::train::{Ahead, Recipe};
use shardgrad::nn::resume::Checkpoints;
use shardgrad::nn::{Cast, LanguageModel, ModelConfig, Trainer};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The label of what is as it was before the run.
const KEPT: &str = "kept";

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
    /// What goes with the model.
    companions: Companions,
    /// Whether the model is trained in place: what goes with it is there.
    in_place: bool,
    checkpoints: Option<Keeping>,
    /// What a checkpoint notes of the run.
    notes: BTreeMap<String, String>,
    /// The checkpoint that the run goes on from.
    from: Option<resume::From>,
    /// The seconds that it took before.
    seconds: f64,
    /// The step after which the model was saved, once it is whole.
    saved: AtomicUsize,
    shard_bytes_max: u64,
    save_dtype: DType,
    cast: Cast,
    num_ranks: usize,
    json: bool,
    lines: Lines,
    interrupt: Interrupt,
    metrics: Mutex<Metrics>,
    /// Whether a rank has begun to save.
    saving: AtomicBool,
    /// The weights of a run whose world failed.
    kept: Kept,
    trace: Option<Trace>,
    /// Whether cuts or lists depend on times that are measured.
    measures: bool,
    /// Whether the lists of its passes were read from a file, which may be the one of an earlier run here.
    lists_read: bool,
}

impl Job {
    fn metrics(&self) -> MutexGuard<'_, Metrics> {
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many steps were taken before the first one of this run.
    fn first(&self) -> usize {
        self.from.as_ref().map_or(0, |from| from.step)
    }

    /// Whether all steps were taken before, and only the model is to be written.
    fn is_over(&self) -> bool {
        self.first() >= self.recipe.steps
    }

    /// Where the model is saved.
    fn model(&self) -> PathBuf {
        self.out.join("model")
    }

    /// Verifies the folder before a write. Where it was moved or removed, the run ends after a save.
    ///
    /// # Errors
    /// As [`OutFolder::verify`].
    fn verify_folder(&self, ended: &mut Ended) -> Result<()> {
        // Nothing is saved where nothing may be written.
        let moved = self.out.verify().inspect_err(|_| self.saving.store(true, Ordering::SeqCst))?;
        ended.failed = ended.failed.take().or(moved);
        Ok(())
    }

    /// An error after which an earlier model is there as before, if there was one.
    fn keeping(&self, e: Error) -> Error {
        let model = self.model();
        match model.exists() {
            true => e.detail(KEPT, format!("{} is as it was", model.display())),
            false => e,
        }
    }
}

/// Runs the command.
pub(super) fn run(args: &TrainArgs, startup: &Startup) -> Result<(), Failure> {
    args.check()?;
    check_eps(args)?;
    let mesh = args.mesh();
    let ranks = args.run.train_world(&mesh)?.started_by(startup);
    let Some(job) = prepare(args)? else { return Ok(consistency::check_all_are_done(&ranks)?) };
    let ranks = compare(ranks, &job)?;
    let text = format!(
        "{} on {mesh}, {} steps of {} x {} tokens, {}",
        args.model.name(),
        job.recipe.steps,
        job.recipe.batch,
        job.recipe.seq,
        job.recipe.precision
    );
    if !job.json && leads() && !job.is_over() {
        job.lines.say(format_args!("training {text}"));
        if let Some(from) = &job.from {
            job.lines.say(format_args!("going on after step {}, from {}", from.step, from.dir.display()));
        }
    }
    let steps: &Steps = if job.is_over() { &|_, _, _, job| Ok(Ended::over(job)) } else { &take_steps };
    let (stopped, failed) = launch(&ranks, &job, steps);
    let written = write_down(&job, &text);
    outcome(&job, stopped, failed.or(written.err()))
}

/// The ranks, which compare what they begin with and read when they are processes.
fn compare(ranks: Ranks, job: &Job) -> Result<Ranks> {
    if !ranks.are_processes() {
        return Ok(ranks);
    }
    let ranks = consistency::at_step(&ranks, job.from.as_ref().map(|from| (from.step, from.dir.as_path())))?;
    // Where a checkpoint holds the weights, those that the run began with are not read.
    let start = job.start.as_deref().filter(|_| job.from.is_none());
    consistency::of_inputs(&ranks, &job.config, start, Some(&job.rows))
}

/// The steps of one rank.
type Steps = dyn Fn(&mut Trainer<'_, LanguageModel>, &Ahead<'_>, bool, &Job) -> Result<Ended> + Sync;

/// Runs all ranks and saves what they trained, however that ends. Returns what stopped them, and what went wrong.
fn launch(ranks: &Ranks, job: &Job, steps: &Steps) -> (Option<StopReason>, Option<Error>) {
    match ranks.launch(|rank| train(rank, job, steps)) {
        Ok(mut ended) => (ended[0].stopped, ended.iter_mut().find_map(|one| one.failed.take())),
        Err(e) => (None, Some(save_kept(ranks, job, e))),
    }
}

/// Ends the files that tell of the steps, however these ended; all are tried, the first error is told. Without a step those
/// of an earlier run stay, but for the picture of one whose model was not written.
fn write_down(job: &Job, title: &str) -> Result<()> {
    let mut metrics = job.metrics();
    let ended = metrics.end();
    let moved = job.out.verify()?;
    let drawn = match metrics.steps() {
        steps if !leads() || steps.is_empty() || metrics.taken() == 0 && !job.is_over() => Ok(()),
        steps => plot::write_loss_plot(&job.out.join("loss.svg"), title, job.unit, steps),
    };
    let traced = job.trace.as_ref().map_or(Ok(()), |trace| trace.write(job.num_ranks));
    ended.and(moved.map_or(Ok(()), Err)).and(drawn).and(traced)
}

/// Refuses a divisor that may be zero, or always is infinite.
fn check_eps(args: &TrainArgs) -> Result<()> {
    let (eps, kept) = (args.optim.eps, args.precision().param_dtype.accumulator());
    let held = eps as f32;
    if kept != DType::F32 || held > 0.0 && held.is_finite() {
        return Ok(());
    }
    let why = format!("--eps {eps:e} is {held} in {kept}, in which the means of gradients are kept");
    let help = match held > 0.0 {
        false => format!("use --eps {:e} or more", f32::MIN_POSITIVE),
        true => format!("use --eps {:e} or less; 1e-8 is usual", f32::MAX),
    };
    Err(Error::new(Kind::Config, why).detail("help", help))
}

/// What decides the numbers of a run on rows of `seq` tokens.
fn recipe(args: &TrainArgs, seq: usize) -> Recipe {
    let steps = &args.steps;
    let optim = &args.optim;
    Recipe {
        steps: steps.steps,
        batch: steps.batch,
        seq,
        microbatches: args.microbatches(),
        schedule: args.schedule(),
        optim: AdamW::new(optim.lr)
            .betas(optim.beta1, optim.beta2)
            .eps(optim.eps)
            .weight_decay(optim.weight_decay),
        clip: optim.clip(),
        seed: steps.seed,
        precision: args.precision(),
        // A trace shows passes one by one.
        capture: args.run.is_alone_on_a_card(&args.mesh()) && args.trace.is_none(),
    }
}

/// Reads what there is to read and checks what can be checked, before any rank starts; first what takes no time, so that a slip
/// shows at once. Gives nothing where nothing is left to do.
fn prepare(args: &TrainArgs) -> Result<Option<Job>> {
    let mut config = args.model.config()?;
    if let Some(p) = args.dropout {
        config = config.with_dropout(p);
    }
    check_experts(&args.mesh(), &config)?;
    let (lines, interrupt) = (Lines::new(), Interrupt::install(has_launcher())?);
    let found = find(args, &config)?;
    let recipe = recipe(args, found.seq);
    let Recipe { batch, seq, microbatches, precision, .. } = recipe;
    check_tokens(batch, seq)?;
    let plan = args.pipeline.plan(LanguageModel::plan(&config));
    let step = Outline { config: &config, plan: &plan, batch, seq, microbatches, precision };
    check_training(&args.run, &args.mesh(), &args.model.name(), &step)?;
    let out = if leads() { OutFolder::open(&args.out)? } else { OutFolder::of_leader(&args.out) };
    let (companions, in_place) = companions(args, &out)?;
    check_trace(args)?;
    let rows = rows(args, &config, found)?;
    if let Some(corpus) = rows.told.as_ref().filter(|_| !args.json && leads()) {
        lines.say(format_args!("reading {corpus}"));
    }
    let goes_on = args.checkpoints.save_every.is_some() || args.checkpoints.resume().is_some();
    let notes = if goes_on { resume::notes(args, &rows)? } else { BTreeMap::new() };
    let (from, earlier) = match resume::begin(args, (&config, &notes), &out)? {
        Begin::Over => return Ok(None),
        Begin::Anew => (None, Earlier::default()),
        Begin::After(from, earlier) => (Some(from), earlier),
    };
    if goes_on && leads() {
        Checkpoints::clear(&out.join(""))?;
    }
    let Rows { rows, held_out, unit, .. } = rows;
    Ok(Some(Job {
        plan,
        in_place,
        checkpoints: args.checkpoints.save_every.map(|every| {
            let (first, kept) = from.as_ref().map_or((0, None), |from| (from.step, from.keep));
            Keeping { every, keep: args.checkpoints.keep(kept), last: AtomicU64::new(first as u64) }
        }),
        notes,
        from,
        seconds: earlier.seconds(),
        metrics: Mutex::new(Metrics::new(&out, earlier)),
        config,
        recipe,
        rows,
        held_out,
        unit,
        eval_every: args.eval_every(),
        check_every: args.check_every,
        start: args.model.dir().map(Path::to_path_buf),
        out,
        companions,
        saved: AtomicUsize::new(0),
        shard_bytes_max: args.shard_size.0,
        save_dtype: args.save_dtype.unwrap_or(args.precision().param_dtype),
        cast: args.run.cast(),
        num_ranks: args.mesh().num_ranks(),
        json: args.json,
        lines,
        interrupt,
        saving: AtomicBool::new(false),
        kept: Kept::default(),
        trace: args.trace.as_deref().map(Trace::new),
        measures: args.pipeline.measures(),
        lists_read: args.pipeline.lists().is_some(),
    }))
}

/// What goes with the model, and whether it is there already, since the model is trained in place.
fn companions(args: &TrainArgs, out: &OutFolder) -> Result<(Companions, bool)> {
    let in_place = args.model.dir().is_some_and(|dir| place(dir) == place(&out.join("model")));
    // Where the model is trained in place, they are needed for checkpoints only.
    let beside = args.model.dir().filter(|_| !in_place || args.checkpoints.save_every.is_some());
    let companions = Companions::open(beside)?;
    companions.all().filter(|_| !in_place && leads()).try_for_each(|file| file.check(&out.join("model")))?;
    Ok((companions, in_place))
}

/// Refuses to write what ranks do over something that is read, or written otherwise.
fn check_trace(args: &TrainArgs) -> Result<()> {
    let Some(trace) = &args.trace else { return Ok(()) };
    if process()?.is_some() {
        let why = "--trace shows all ranks on one clock, which processes do not have";
        return Err(Error::new(Kind::Unsupported, why).detail("help", "trace ranks that are threads"));
    }
    let own = written(&args.out);
    let read = args.source.inputs().chain(args.source.source(trace)).chain(args.model.dir());
    let read = read.chain(args.pipeline.lists());
    check_target("--trace", trace, read.chain(own.iter().map(PathBuf::as_path)))
}

/// What is trained on.
struct Rows {
    rows: Sampler,
    /// By what losses are measured, if they are.
    held_out: Option<Sampler>,
    /// What a loss is measured by.
    unit: &'static str,
    /// What is read, if it is text.
    told: Option<String>,
}

/// What there is to read, as far as names and headers tell.
struct Found {
    /// The tokens of a row.
    seq: usize,
    /// Rows of tokens, where they are not made of texts.
    tokens: Option<TokenFile>,
    /// What the run replaces, links followed.
    written: Vec<PathBuf>,
}

/// Looks for what there is to read.
fn find(args: &TrainArgs, config: &ModelConfig) -> Result<Found> {
    let seq = args.seq(config)?;
    let written: Vec<PathBuf> = written(&args.out).iter().map(|own| place(own)).collect();
    let Some(path) = &args.source.tokens else {
        super::refuse_texts(config)?;
        let how = args.source.how(args.model.dir(), config, Some(&args.out), &written)?;
        if !args.source.data.is_empty() {
            Corpus::find(&args.source.data, &how)?;
        }
        return Ok(Found { seq, tokens: None, written });
    };
    refuse_written(path, &written)?;
    let file = super::token_rows(path, config)?;
    if args.steps.seq.is_some() {
        file.require_seq(seq)?;
    }
    Ok(Found { seq: file.seq(), tokens: Some(file), written })
}

/// Reads what was found.
fn rows(args: &TrainArgs, config: &ModelConfig, Found { seq, tokens, written }: Found) -> Result<Rows> {
    let steps = &args.steps;
    let order = if args.no_shuffle { Order::InFileOrder } else { Order::Shuffled { seed: steps.seed } };
    let (mut unit, mut told) = ("token", None);
    let (rows, held_out) = match tokens {
        Some(file) => (Sampler::of_tokens(Arc::new(file.checked()?), order), None),
        None => {
            let how = args.source.how(args.model.dir(), config, Some(&args.out), &written)?;
            let corpus = Arc::new(super::documents(&args.source.data, &how)?);
            unit = corpus.unit();
            told = Some(corpus.to_string());
            let held_out = || Sampler::of_text(corpus.clone(), Split::Val, seq, Order::InFileOrder);
            let held_out = args.eval_every().map(|_| held_out()).transpose()?;
            (Sampler::of_text(corpus, Split::Train, seq, order)?, held_out)
        }
    };
    Ok(Rows { rows, held_out, unit, told })
}

/// One rank's run: its steps, then the model, whatever ended them and left a world to save it in.
fn train(rank: &Rank, job: &Job, steps: &Steps) -> Result<Ended> {
    let recipe = &job.recipe;
    let ahead = Ahead::new(recipe, &job.plan, &job.rows);
    let mut trainer = recipe.trainer(rank, LanguageModel::new(&job.config), &ahead)?;
    match (&job.from, &job.start) {
        (Some(from), _) => drop(super::together(rank, || trainer.resume(&from.dir))?),
        (None, Some(dir)) => super::load(trainer.model(), dir, job.cast)?,
        (None, None) => {}
    }
    let leads = rank.index() == 0;
    job.interrupt.begin_steps();
    keeping(&mut trainer, job, |trainer| {
        let ended = steps(trainer, &ahead, leads, job)?;
        if ended.steps == 0 { Ok(ended) } else { end(trainer, ended, leads, job) }
    })
}

/// Saves the model of a run whose steps have ended, unless that is done, and leaves a checkpoint, unless it was that which ended it.
/// Every rank calls this together.
fn end(trainer: &Trainer<'_, LanguageModel>, mut ended: Ended, leads: bool, job: &Job) -> Result<Ended> {
    if ended.is_saved {
        return Ok(ended);
    }
    job.saving.store(true, Ordering::SeqCst);
    job.verify_folder(&mut ended)?;
    if let Some(reason) = ended.stopped.or(job.interrupt.reason()).filter(|_| leads) {
        let (done, all) = (ended.steps, job.recipe.steps);
        let so = if reason == StopReason::Interrupt { "; a second SIGINT ends the run without" } else { "" };
        job.lines.then(move |_| eprintln!("{reason}: step {done} of {all} is done; saving the model{so}"));
    }
    match save(trainer.model(), ended.steps, job) {
        Ok(refused) => ended.failed = ended.failed.or(refused),
        Err(e) => {
            if matches!(e.kind(), Kind::Io | Kind::Checkpoint) && !ended.unsaved {
                // Another folder, which may well be written.
                leave(trainer, job)?;
            }
            return match ended.failed.take() {
                Some(first) => Err(not_saved(first, &e)),
                // What the disk refused is told by the first rank, which knows more of what went before.
                None if e.kind() == Kind::Io && !leads => Ok(ended),
                None => Err(e),
            };
        }
    }
    if !ended.unsaved {
        ended.note(leave(trainer, job)?);
    }
    ended.is_saved = true;
    job.interrupt.set_saved(ended.steps);
    Ok(ended)
}

/// What ended a run, and why its model was not saved besides.
fn not_saved(first: Error, why: &Error) -> Error {
    let kept = why.details().iter().filter(|(label, _)| *label == KEPT);
    kept.fold(first.detail("not saved", why.message()), |told, (label, text)| told.detail(label, text))
}

/// Refuses weights that are not finite. Every rank calls this together.
fn check_finite(model: &Model<LanguageModel>, steps: usize, so: &str) -> Result<()> {
    let odd = model.not_finite()?;
    let Some(first) = odd.first() else { return Ok(()) };
    let (odd, all) = (odd.len(), model.params().len());
    let text = format!("after step {steps} {odd} of {all} tensors are not finite, `{first}` first; {so}");
    let help = "a smaller --lr, or more steps of --warmup, is the usual cure";
    Err(Error::new(Kind::NotFinite, text).detail("help", help))
}

/// Saves the model, if it is one. Every rank calls this together. Where a finite weight is infinite in the dtype that was asked
/// for, weights are saved as they are stored, and the refusal is given back.
fn save(model: &Model<LanguageModel>, steps: usize, job: &Job) -> Result<Option<Error>> {
    let out = job.model();
    check_finite(model, steps, "the model is not saved").map_err(|e| match e.kind() {
        Kind::NotFinite => job.keeping(e),
        _ => e,
    })?;
    let companions: Vec<_> = job.companions.all().filter(|_| !job.in_place).collect();
    let save = |dtype| model.save_beside(&out, job.shard_bytes_max, dtype, &companions);
    let refused = match save(job.save_dtype) {
        Err(e) if e.kind() == Kind::NotFinite => {
            let stored = model.precision().param_dtype;
            save(stored)?;
            Some(e.detail("instead", format!("the weights are saved in {stored}")))
        }
        done => done.map(|()| None)?,
    };
    job.saved.store(steps, Ordering::SeqCst);
    Ok(refused)
}
