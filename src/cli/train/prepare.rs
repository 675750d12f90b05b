//! Preparation of a run: reads the inputs and validates them before any rank starts.

use super::checkpoint::model_folder::{Sidecars, check_model_folder};
use super::checkpoint::resume::{self, StartPoint};
use super::checkpoint::save::CheckpointPolicy;
use super::{Dataset, Job, JobSpec, JobState, SaveOptions, Start};
use crate::cli::args::{TrainArgs, check_experts, check_tokens};
use crate::cli::explain::StepSpec;
use crate::cli::memory::{check_training, rank_memory_bytes};
use crate::cli::ranks::{has_launcher, is_rank_zero, process};
use crate::data::{Corpus, RowOrder, Sampler, Split, TokenFile, TokenOrder, refuse_written};
use crate::interrupt::Interrupt;
use crate::metrics::{Metrics, PreviousMetrics};
use crate::outputs::{OutFolder, StdoutWriter, check_target, output_paths, resolve_path};
use crate::trace::Trace;
use crate::train::TrainConfig;
use shardgrad::nn::checkpoint::Checkpoints;
use shardgrad::nn::{LanguageModel, ModelConfig};
use shardgrad::prelude::*;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Rejects an `--eps` that is zero or infinite in the dtype of the optimizer state.
pub(super) fn check_eps(args: &TrainArgs) -> Result<()> {
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

/// Adds biases that balance the experts to the config.
fn with_router_bias(config: ModelConfig, rate: f64) -> Result<ModelConfig> {
    if config.has_experts() {
        return Ok(config.with_router_bias_update_rate(rate));
    }
    let why = "--router-bias-update-rate balances experts, and the model has none";
    Err(Error::new(Kind::Config, why).detail("help", "omit --router-bias-update-rate"))
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
        deterministic: args.promise(),
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
pub(super) fn prepare(args: &TrainArgs) -> Result<Option<Job>> {
    let mut config = args.model.config()?;
    if let Some(p) = args.dropout {
        config = config.with_dropout(p);
    }
    if let Some(rate) = args.router_bias_update_rate {
        config = with_router_bias(config, rate)?;
    }
    check_experts(&args.mesh(), &config)?;
    args.parallelism.check_family(&config)?;
    let (lines, interrupt) = (StdoutWriter::new(), Interrupt::install(has_launcher())?);
    let found = open_inputs(args, &config)?;
    let train_config = train_config(args, found.seq);
    let TrainConfig { batch, seq, microbatches, precision, deterministic, .. } = train_config;
    check_tokens(batch, seq)?;
    let plan = args.pipeline.plan(args.parallelism.plan(LanguageModel::plan(&config)));
    let token_order = TokenOrder::of_training(&config, &plan, &args.mesh()).on_host(args.run.is_on_host());
    let step = StepSpec {
        config: &config,
        plan: &plan,
        batch,
        seq,
        token_order,
        microbatches,
        precision,
        deterministic,
        rank_memory_bytes: rank_memory_bytes(&args.run, &args.mesh()),
    };
    check_training(&args.run, &args.mesh(), &args.model.name(), &step)?;
    let out = if is_rank_zero() { OutFolder::open(&args.out)? } else { OutFolder::of_rank_zero(&args.out) };
    let (sidecars, in_place) = sidecars(args, &out)?;
    check_trace(args)?;
    let data = read_dataset(args, &config, found)?.with_token_order(token_order);
    if let Some(corpus) = data.description.as_ref().filter(|_| !args.json && is_rank_zero()) {
        lines.print_line(format_args!("reading {corpus}"));
    }
    let uses_checkpoints = args.checkpoints.save_every.is_some() || args.checkpoints.resume().is_some();
    let notes = if uses_checkpoints { resume::notes(args, &data)? } else { BTreeMap::new() };
    let (from, earlier) = match resume::start_point(args, (&config, &notes), &out)? {
        StartPoint::Done => return Ok(None),
        StartPoint::FirstStep => (None, PreviousMetrics::default()),
        StartPoint::Checkpoint(from, earlier) => (Some(from), earlier),
    };
    if uses_checkpoints && is_rank_zero() {
        Checkpoints::remove_stale(&out.join(""))?;
    }
    let keep_before = from.as_ref().and_then(|from| from.keep);
    let checkpoints = args.checkpoints.save_every;
    let checkpoints =
        checkpoints.map(|every| CheckpointPolicy { every, keep: args.checkpoints.keep(keep_before) });
    let weights = args.model.dir().map(Path::to_path_buf);
    let spec = JobSpec {
        config,
        plan,
        train_config,
        data,
        eval_every: args.eval_every(),
        check_every: args.check_every,
        state_hash_every: args.state_hash,
        start: Start { weights, cast: args.run.cast(), from, seconds: earlier.seconds() },
        saves: SaveOptions {
            sidecars,
            in_place,
            shard_bytes_max: args.shard_size.0,
            dtype: args.save_dtype.unwrap_or(args.precision().param_dtype),
            checkpoints,
            notes,
        },
        num_ranks: args.mesh().num_ranks(),
        json: args.json,
        uses_measured_times: args.pipeline.uses_measured_times(),
        schedule_from_file: args.pipeline.schedule_file().is_some(),
    };
    let (metrics, trace) = (Metrics::new(&out, earlier), args.trace.as_deref().map(Trace::new));
    let state = JobState::new(out, lines, metrics, trace, interrupt, spec.num_steps_before());
    Ok(Some(Job { spec, state }))
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
        crate::cli::refuse_text_for_encoder(config)?;
        let options = args.source.read_options(args.model.dir(), config, Some(&args.out), &output_paths)?;
        if !args.source.data.is_empty() {
            Corpus::input_files(&args.source.data, &options)?;
        }
        return Ok(Inputs { seq, tokens: None, output_paths });
    };
    refuse_written(path, &output_paths)?;
    let file = crate::cli::token_rows(path, config)?;
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
            let corpus = Arc::new(crate::cli::open_corpus(&args.source.data, &options)?);
            unit = corpus.unit();
            description = Some(corpus.to_string());
            let held_out = || Sampler::of_text(corpus.clone(), Split::Val, seq, RowOrder::Sequential);
            let held_out = args.eval_every().map(|_| held_out()).transpose()?;
            (Sampler::of_text(corpus, Split::Train, seq, order)?, held_out)
        }
    };
    Ok(Dataset { rows, held_out, unit, description })
}
