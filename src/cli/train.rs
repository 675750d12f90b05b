//! `train`: trains a language model on text or token ids, on any mesh.

mod progress;
mod checkpoint;
mod steps;
mod outcome;
#[cfg(test)]
mod memory_estimate;

use checkpoint::model_folder::{Sidecars, check_model_folder};
use checkpoint::rescue::{RescuedWeights, rescue_on_failure, save_rescued};
use checkpoint::resume::{self, StartPoint};
use checkpoint::save::{CheckpointPolicy, save_checkpoint};
use outcome::report_outcome;
use steps::{StepsOutcome, run_steps};

use super::Failure;
use super::args::{TrainArgs, check_experts, check_tokens};
use super::consistency;
use super::explain::StepSpec;
use super::memory::check_training;
use super::ranks::{Ranks, Startup, has_launcher, is_rank_zero, process};
use crate::data::{Corpus, RowOrder, Sampler, Split, TokenFile, refuse_written};
use crate::interrupt::{Interrupt, StopReason};
use crate::metrics::{Metrics, PreviousMetrics};
use crate::outputs::{OutFolder, StdoutWriter, check_target, output_paths, resolve_path};
use crate::plot;
use crate::trace::Trace;
use crate::train::{Prefetcher, TrainConfig};
use shardgrad::nn::checkpoint::Checkpoints;
use shardgrad::nn::{CastRule, LanguageModel, ModelConfig, Trainer};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Error detail label for files that are unchanged.
const KEPT_LABEL: &str = "kept";

/// The state of a run that all ranks share; created before the ranks start.
struct Job {
    config: ModelConfig,
    plan: Plan,
    train_config: TrainConfig,
    rows: Sampler,
    held_out: Option<Sampler>,
    /// Unit of the loss: nats per `token` or `byte`.
    unit: &'static str,
    eval_every: Option<usize>,
    check_every: usize,
    start: Option<PathBuf>,
    out: OutFolder,
    /// Tokenizer and other files that are copied with the model.
    sidecars: Sidecars,
    /// Whether the model folder is also the source; then its sidecar files are already there.
    in_place: bool,
    checkpoints: Option<CheckpointPolicy>,
    /// Options and data fingerprint recorded in checkpoints.
    notes: BTreeMap<String, String>,
    /// The checkpoint that the run resumes from.
    from: Option<resume::ResumePoint>,
    /// Seconds of the run before it was resumed.
    seconds: f64,
    /// The step of the saved model; 0 before a save is complete.
    saved: AtomicUsize,
    shard_bytes_max: u64,
    save_dtype: DType,
    cast: CastRule,
    num_ranks: usize,
    json: bool,
    lines: StdoutWriter,
    interrupt: Interrupt,
    metrics: Mutex<Metrics>,
    /// Whether a rank has started to save.
    saving: AtomicBool,
    /// Weights kept by the ranks of a failed world.
    rescued: RescuedWeights,
    trace: Option<Trace>,
    /// Whether the stage cut or the schedule depends on measured times.
    uses_measured_times: bool,
    /// Whether the schedule was read from a file, which may be the schedule.txt of this folder.
    schedule_from_file: bool,
}

impl Job {
    fn metrics(&self) -> MutexGuard<'_, Metrics> {
        self.metrics.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the number of steps before the first one of this process.
    fn num_steps_before(&self) -> usize {
        self.from.as_ref().map_or(0, |from| from.step)
    }

    /// Returns whether all steps are done and only the model must be written.
    fn is_done(&self) -> bool {
        self.num_steps_before() >= self.train_config.steps
    }

    /// Returns the model folder.
    fn model(&self) -> PathBuf {
        self.out.join("model")
    }

    /// Verifies the run folder before a write. If it was moved or removed, the run ends after a save.
    ///
    /// # Errors
    /// As [`OutFolder::verify`].
    fn verify_folder(&self, outcome: &mut StepsOutcome) -> Result<()> {
        // No further save is attempted in a folder of another run.
        let moved = self.out.verify().inspect_err(|_| self.saving.store(true, Ordering::SeqCst))?;
        outcome.failed = outcome.failed.take().or(moved);
        Ok(())
    }

    /// Adds to an error that the earlier model, if any, is unchanged.
    fn with_unchanged_model(&self, e: Error) -> Error {
        let model = self.model();
        match model.exists() {
            true => e.detail(KEPT_LABEL, format!("{} is unchanged", model.display())),
            false => e,
        }
    }
}

/// Runs the command.
pub(super) fn run(args: &TrainArgs, startup: &Startup) -> Result<(), Failure> {
    args.check()?;
    check_eps(args)?;
    let mesh = args.mesh();
    let ranks = args.run.training_world(&mesh)?.started_by(startup);
    let Some(job) = prepare(args)? else { return Ok(consistency::check_all_are_done(&ranks)?) };
    let ranks = with_consistency_checks(ranks, &job)?;
    let text = format!(
        "{} on {mesh}, {} steps of {} x {} tokens, {}",
        args.model.name(),
        job.train_config.steps,
        job.train_config.batch,
        job.train_config.seq,
        job.train_config.precision
    );
    if !job.json && is_rank_zero() && !job.is_done() {
        job.lines.print_line(format_args!("training {text}"));
        if let Some(from) = &job.from {
            job.lines.print_line(format_args!(
                "resuming after step {}, from {}",
                from.step,
                from.dir.display()
            ));
        }
    }
    let steps: &Steps =
        if job.is_done() { &|_, _, _, job| Ok(StepsOutcome::all_done(job)) } else { &run_steps };
    let (stopped, failed) = launch(&ranks, &job, steps);
    let finished = finish_outputs(&job, &text);
    report_outcome(&job, stopped, failed.or(finished.err()))
}

/// Adds start step and input hashes to the values that processes compare when they connect.
fn with_consistency_checks(ranks: Ranks, job: &Job) -> Result<Ranks> {
    if !ranks.are_processes() {
        return Ok(ranks);
    }
    let ranks = consistency::with_next_step_from(
        &ranks,
        job.from.as_ref().map(|from| (from.step, from.dir.as_path())),
    )?;
    // Weights come from the checkpoint if there is one; the initial weights are not read then.
    let start = job.start.as_deref().filter(|_| job.from.is_none());
    consistency::with_input_hashes(&ranks, &job.config, start, Some(&job.rows))
}

/// The training loop of one rank.
type Steps =
    dyn Fn(&mut Trainer<'_, LanguageModel>, &Prefetcher<'_>, bool, &Job) -> Result<StepsOutcome> + Sync;

/// Runs all ranks and saves the trained weights, also after a failure. Returns why the run was stopped, and its error.
fn launch(ranks: &Ranks, job: &Job, steps: &Steps) -> (Option<StopReason>, Option<Error>) {
    match ranks.launch(|rank| train(rank, job, steps)) {
        Ok(mut outcome) => (outcome[0].stopped, outcome.iter_mut().find_map(|one| one.failed.take())),
        Err(e) => (None, Some(save_rescued(ranks, job, e))),
    }
}

/// Finishes metrics, loss plot and trace; tries all and returns the first error. Without a new step the files of an earlier run stay,
/// except the plot of a run whose model was still to be written.
fn finish_outputs(job: &Job, title: &str) -> Result<()> {
    let mut metrics = job.metrics();
    let outcome = metrics.finish();
    let moved = job.out.verify()?;
    let drawn = match metrics.steps() {
        steps if !is_rank_zero() || steps.is_empty() || metrics.num_new_steps() == 0 && !job.is_done() => {
            Ok(())
        }
        steps => plot::write_loss_plot(&job.out.join("loss.svg"), title, job.unit, steps),
    };
    let traced = job.trace.as_ref().map_or(Ok(()), |trace| trace.write(job.num_ranks));
    outcome.and(moved.map_or(Ok(()), Err)).and(drawn).and(traced)
}

/// Rejects an `--eps` that is zero or infinite in the dtype of the optimizer state.
fn check_eps(args: &TrainArgs) -> Result<()> {
    let (eps, kept) = (args.optim.eps, args.precision().param_dtype.accumulator());
    let held = eps as f32;
    if kept != DType::F32 || held > 0.0 && held.is_finite() {
        return Ok(());
    }
    let why = format!("--eps {eps:e} is {held} in {kept}, the dtype of the optimizer state");
    let help = match held > 0.0 {
        false => format!("use --eps {:e} or more", f32::MIN_POSITIVE),
        true => format!("use --eps {:e} or less; 1e-8 is usual", f32::MAX),
    };
    Err(Error::new(Kind::Config, why).detail("help", help))
}

/// Builds the training configuration for rows of `seq` tokens.
fn train_config(args: &TrainArgs, seq: usize) -> TrainConfig {
    let steps = &args.steps;
    let optim = &args.optim;
    TrainConfig {
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
        // A trace needs the time of each pass.
        capture: args.run.is_single_rank_on_gpu(&args.mesh()) && args.trace.is_none(),
    }
}

/// Reads the inputs and validates the run before any rank starts, cheap checks first. Returns `None` if all steps are done.
fn prepare(args: &TrainArgs) -> Result<Option<Job>> {
    let mut config = args.model.config()?;
    if let Some(p) = args.dropout {
        config = config.with_dropout(p);
    }
    check_experts(&args.mesh(), &config)?;
    let (lines, interrupt) = (StdoutWriter::new(), Interrupt::install(has_launcher())?);
    let found = open_inputs(args, &config)?;
    let train_config = train_config(args, found.seq);
    let TrainConfig { batch, seq, microbatches, precision, .. } = train_config;
    check_tokens(batch, seq)?;
    let plan = args.pipeline.plan(LanguageModel::plan(&config));
    let step = StepSpec { config: &config, plan: &plan, batch, seq, microbatches, precision };
    check_training(&args.run, &args.mesh(), &args.model.name(), &step)?;
    let out = if is_rank_zero() { OutFolder::open(&args.out)? } else { OutFolder::of_rank_zero(&args.out) };
    let (sidecars, in_place) = sidecars(args, &out)?;
    check_trace(args)?;
    let rows = read_dataset(args, &config, found)?;
    if let Some(corpus) = rows.description.as_ref().filter(|_| !args.json && is_rank_zero()) {
        lines.print_line(format_args!("reading {corpus}"));
    }
    let uses_checkpoints = args.checkpoints.save_every.is_some() || args.checkpoints.resume().is_some();
    let notes = if uses_checkpoints { resume::notes(args, &rows)? } else { BTreeMap::new() };
    let (from, earlier) = match resume::start_point(args, (&config, &notes), &out)? {
        StartPoint::Done => return Ok(None),
        StartPoint::FirstStep => (None, PreviousMetrics::default()),
        StartPoint::Checkpoint(from, earlier) => (Some(from), earlier),
    };
    if uses_checkpoints && is_rank_zero() {
        Checkpoints::remove_stale(&out.join(""))?;
    }
    let Dataset { rows, held_out, unit, .. } = rows;
    Ok(Some(Job {
        plan,
        in_place,
        checkpoints: args.checkpoints.save_every.map(|every| {
            let (first, kept) = from.as_ref().map_or((0, None), |from| (from.step, from.keep));
            CheckpointPolicy { every, keep: args.checkpoints.keep(kept), last: AtomicU64::new(first as u64) }
        }),
        notes,
        from,
        seconds: earlier.seconds(),
        metrics: Mutex::new(Metrics::new(&out, earlier)),
        config,
        train_config,
        rows,
        held_out,
        unit,
        eval_every: args.eval_every(),
        check_every: args.check_every,
        start: args.model.dir().map(Path::to_path_buf),
        out,
        sidecars,
        saved: AtomicUsize::new(0),
        shard_bytes_max: args.shard_size.0,
        save_dtype: args.save_dtype.unwrap_or(args.precision().param_dtype),
        cast: args.run.cast(),
        num_ranks: args.mesh().num_ranks(),
        json: args.json,
        lines,
        interrupt,
        saving: AtomicBool::new(false),
        rescued: RescuedWeights::default(),
        trace: args.trace.as_deref().map(Trace::new),
        uses_measured_times: args.pipeline.uses_measured_times(),
        schedule_from_file: args.pipeline.schedule_file().is_some(),
    }))
}

/// Checks the model folder, and opens the sidecar files of the source model; returns whether the model is trained in place.
fn sidecars(args: &TrainArgs, out: &OutFolder) -> Result<(Sidecars, bool)> {
    if is_rank_zero() {
        check_model_folder(&out.join("model"))?;
    }
    let in_place = args.model.dir().is_some_and(|dir| resolve_path(dir) == resolve_path(&out.join("model")));
    // In place, sidecar files are needed for checkpoints only.
    let sidecar_dir = args.model.dir().filter(|_| !in_place || args.checkpoints.save_every.is_some());
    let sidecars = Sidecars::open(sidecar_dir)?;
    sidecars
        .all()
        .filter(|_| !in_place && is_rank_zero())
        .try_for_each(|file| file.check(&out.join("model")))?;
    Ok((sidecars, in_place))
}

/// Rejects a `--trace` file that is an input or another output of the run.
fn check_trace(args: &TrainArgs) -> Result<()> {
    let Some(trace) = &args.trace else { return Ok(()) };
    if process()?.is_some() {
        let why = "--trace needs one clock for all ranks; ranks as processes have none";
        return Err(Error::new(Kind::Unsupported, why)
            .detail("help", "start one process without a launcher, so that ranks are threads"));
    }
    let own = output_paths(&args.out);
    let read = args.source.inputs().chain(args.source.source(trace)).chain(args.model.dir());
    let read = read.chain(args.pipeline.schedule_file());
    check_target("--trace", trace, read.chain(own.iter().map(PathBuf::as_path)))
}

/// The training and validation data.
struct Dataset {
    rows: Sampler,
    /// The validation split, if it is evaluated.
    held_out: Option<Sampler>,
    /// Unit of the loss: nats per `token` or `byte`.
    unit: &'static str,
    /// Description of the text, if the data is text.
    description: Option<String>,
}

/// Inputs of which only names and headers have been read.
struct Inputs {
    /// Sequence length.
    seq: usize,
    /// The file of `--tokens`, if given.
    tokens: Option<TokenFile>,
    /// Paths that the run writes, links resolved.
    output_paths: Vec<PathBuf>,
}

/// Locates the inputs and reads their headers.
fn open_inputs(args: &TrainArgs, config: &ModelConfig) -> Result<Inputs> {
    let seq = args.seq(config)?;
    let output_paths: Vec<PathBuf> = output_paths(&args.out).iter().map(|own| resolve_path(own)).collect();
    let Some(path) = &args.source.tokens else {
        super::refuse_text_for_encoder(config)?;
        let options = args.source.read_options(args.model.dir(), config, Some(&args.out), &output_paths)?;
        if !args.source.data.is_empty() {
            Corpus::input_files(&args.source.data, &options)?;
        }
        return Ok(Inputs { seq, tokens: None, output_paths });
    };
    refuse_written(path, &output_paths)?;
    let file = super::token_rows(path, config)?;
    if args.steps.seq.is_some() {
        file.check_seq(seq)?;
    }
    Ok(Inputs { seq: file.seq(), tokens: Some(file), output_paths })
}

/// Reads and checks the data.
fn read_dataset(
    args: &TrainArgs,
    config: &ModelConfig,
    Inputs { seq, tokens, output_paths }: Inputs,
) -> Result<Dataset> {
    let steps = &args.steps;
    let order = if args.no_shuffle { RowOrder::Sequential } else { RowOrder::Shuffled { seed: steps.seed } };
    let (mut unit, mut description) = ("token", None);
    let (rows, held_out) = match tokens {
        Some(file) => (Sampler::of_tokens(Arc::new(file.checked()?), order), None),
        None => {
            let options =
                args.source.read_options(args.model.dir(), config, Some(&args.out), &output_paths)?;
            let corpus = Arc::new(super::open_corpus(&args.source.data, &options)?);
            unit = corpus.unit();
            description = Some(corpus.to_string());
            let held_out = || Sampler::of_text(corpus.clone(), Split::Val, seq, RowOrder::Sequential);
            let held_out = args.eval_every().map(|_| held_out()).transpose()?;
            (Sampler::of_text(corpus, Split::Train, seq, order)?, held_out)
        }
    };
    Ok(Dataset { rows, held_out, unit, description })
}

/// Trains on one rank, then saves the model, also if the steps ended early.
fn train(rank: &Rank, job: &Job, steps: &Steps) -> Result<StepsOutcome> {
    let train_config = &job.train_config;
    let prefetcher = Prefetcher::new(train_config, &job.plan, &job.rows);
    let mut trainer = train_config.trainer(rank, LanguageModel::new(&job.config), &prefetcher)?;
    match (&job.from, &job.start) {
        (Some(from), _) => drop(super::collective_io(rank, || trainer.resume(&from.dir))?),
        (None, Some(dir)) => super::load(trainer.model(), dir, job.cast)?,
        (None, None) => {}
    }
    let is_rank_zero = rank.index() == 0;
    job.interrupt.begin_steps();
    rescue_on_failure(&mut trainer, job, |trainer| {
        let outcome = steps(trainer, &prefetcher, is_rank_zero, job)?;
        if outcome.steps == 0 { Ok(outcome) } else { save_final_state(trainer, outcome, is_rank_zero, job) }
    })
}

/// Saves the model at the end of a run, unless that is done, and a checkpoint, unless a failed checkpoint ended the run. Collective.
fn save_final_state(
    trainer: &Trainer<'_, LanguageModel>,
    mut outcome: StepsOutcome,
    is_rank_zero: bool,
    job: &Job,
) -> Result<StepsOutcome> {
    if outcome.is_saved {
        return Ok(outcome);
    }
    job.saving.store(true, Ordering::SeqCst);
    job.verify_folder(&mut outcome)?;
    if let Some(reason) = outcome.stopped.or(job.interrupt.reason()).filter(|_| is_rank_zero) {
        let (done, all) = (outcome.steps, job.train_config.steps);
        let consequence = if reason == StopReason::Interrupt {
            "; a second SIGINT ends the run without saving"
        } else {
            ""
        };
        job.lines.enqueue(move |_| {
            eprintln!("{reason}: step {done} of {all} is done; saving the model{consequence}")
        });
    }
    match save(trainer.model(), outcome.steps, job) {
        Ok(refused) => outcome.failed = outcome.failed.or(refused),
        Err(e) => {
            if matches!(e.kind(), Kind::Io | Kind::Checkpoint) && !outcome.unsaved {
                // The checkpoint goes to another folder, which may be writable.
                save_checkpoint(trainer, job)?;
            }
            return match outcome.failed.take() {
                Some(first) => Err(not_saved(first, &e)),
                // Rank 0 reports I/O errors.
                None if e.kind() == Kind::Io && !is_rank_zero => Ok(outcome),
                None => Err(e),
            };
        }
    }
    if !outcome.unsaved {
        outcome.record_failed_save(save_checkpoint(trainer, job)?);
    }
    outcome.is_saved = true;
    job.interrupt.set_saved(outcome.steps);
    Ok(outcome)
}

/// Adds to the error of a run why its model was not saved.
fn not_saved(first: Error, why: &Error) -> Error {
    let kept = why.details().iter().filter(|(label, _)| *label == KEPT_LABEL);
    kept.fold(first.detail("not saved", why.message()), |error, (label, text)| error.detail(label, text))
}

/// Rejects non-finite weights. Collective.
fn check_finite(model: &Model<LanguageModel>, steps: usize, consequence: &str) -> Result<()> {
    let non_finite = model.non_finite_params()?;
    let Some(first) = non_finite.first() else { return Ok(()) };
    let (non_finite, all) = (non_finite.len(), model.params().len());
    let text = format!(
        "after step {steps} {non_finite} of {all} parameters are not finite, first `{first}`; {consequence}"
    );
    let help = "use a smaller --lr, or more --warmup steps";
    Err(Error::new(Kind::NotFinite, text).detail("help", help))
}

/// Saves the model if its weights are finite. Collective. If a weight overflows in --save-dtype, the weights are saved in the parameter
/// dtype, and the error is returned as `Some`.
fn save(model: &Model<LanguageModel>, steps: usize, job: &Job) -> Result<Option<Error>> {
    let out = job.model();
    check_finite(model, steps, "the model is not saved").map_err(|e| match e.kind() {
        Kind::NotFinite => job.with_unchanged_model(e),
        _ => e,
    })?;
    let sidecars: Vec<_> = job.sidecars.all().filter(|_| !job.in_place).collect();
    let save = |dtype| model.save_with_sidecars(&out, job.shard_bytes_max, dtype, &sidecars);
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
