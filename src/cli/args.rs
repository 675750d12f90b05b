//! The command line as clap sees it: every option with its help, its default and its check.

pub(crate) mod nearest;
mod defaults;
mod files;
mod values;
mod axes;
mod pipeline;
mod plan;
mod checkpoints;
mod train;
mod generate;
mod tools;
pub(crate) mod echo;
mod compared;
pub(crate) mod config;

pub(crate) use checkpoints::CheckpointArgs;
pub(crate) use defaults::CHECK_EVERY;
pub(crate) use generate::{GenerateArgs, SamplingArgs};
pub(crate) use pipeline::PipelineArgs;
pub(crate) use plan::PlanArgs;
pub(crate) use tools::{BenchArgs, BenchChoice, DoctorArgs, InspectArgs, OpsArgs};
pub(crate) use train::TrainArgs;

use super::ranks::{Ranks, process};
use crate::data::{How, Split, Width, is_source};
pub(crate) use axes::check_experts;
use axes::{EVALUATION, GENERATION, TRAINING, check_axes};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use shardgrad::dist::{Mesh, World};
use shardgrad::kernels::{DType, Device, MatmulPrecision, open};
use shardgrad::nn::{Cast, ModelConfig, Precision};
use shardgrad::{Error, Kind, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Train and run a model on any mesh; the numbers do not depend on the mesh.
#[derive(Debug, Parser)]
#[command(name = "shardgrad", version, max_term_width = 100, disable_help_subcommand = true)]
#[command(
    after_help = "Exit codes: 0 done, 1 the run failed or was stopped with nothing saved, 2 misuse or bad input, 128 + N stopped by signal N (`train`: with its state saved)."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a language model, on text as bytes or on token numbers
    #[command(after_help = TRAIN_EXAMPLES)]
    Train(Box<TrainArgs>),
    /// Measure the mean next-token loss of a model
    Eval(Box<EvalArgs>),
    /// Continue a prompt; beyond the positions of the model, from the later half of them
    Generate(Box<GenerateArgs>),
    /// Show layouts, collectives and costs of one training step; nothing is computed
    Explain(Box<ExplainArgs>),
    /// Prove, time and draw a pipeline schedule
    Plan(PlanArgs),
    /// Show and verify what a model, checkpoint or run folder holds; exits with 1 if it is damaged
    Inspect(InspectArgs),
    /// Print the table of ops: signatures, dtypes, costs, layouts
    Ops(OpsArgs),
    /// Show what this machine has: cores, SIMD, memory, GPU libraries
    Doctor(DoctorArgs),
    /// Measure kernels, collectives, the tape and training steps, each after a check of its result
    Bench(BenchArgs),
}

const TRAIN_EXAMPLES: &str = "\
Examples:
  shardgrad train                                  a small model on the sources of this folder
  shardgrad train --data book.txt --mesh tp=2      the same numbers from two ranks
  shardgrad train --model DIR --tokens ids.safetensors --no-shuffle --lr-schedule constant
  shardgrad train --save-every 100 --resume        goes on from the newest checkpoint

Without --mesh, training runs on dp=2 where there are two cores, and rows for both.";

/// Which model: a folder, or a preset with fresh weights.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Folder with config.json and model.safetensors
    #[arg(long, value_name = "DIR", conflicts_with = "preset")]
    model: Option<PathBuf>,
    /// Shape with fresh weights: tiny, s, m, l, gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m, llama-tiny, llama-1b, llama-8b,
    /// llama-70b, mistral-7b, qwen2-0.5b, qwen3-0.6b, qwen3-8b, mixtral-tiny, mixtral-8x7b,
    /// qwen3-30b-a3b, bert-base, bert-large
    #[arg(long, value_name = "NAME", default_value = defaults::PRESET, value_parser = values::preset)]
    preset: String,
}

impl ModelArgs {
    /// The shape of the model.
    pub(crate) fn config(&self) -> Result<ModelConfig> {
        match &self.model {
            Some(dir) => config_of(dir),
            None => ModelConfig::preset(&self.preset)
                .ok_or_else(|| Error::new(Kind::Config, format!("there is no preset `{}`", self.preset))),
        }
    }

    /// The folder that the weights come from, if there is one.
    pub(crate) fn dir(&self) -> Option<&Path> {
        self.model.as_deref()
    }

    /// The preset, or the folder.
    pub(crate) fn name(&self) -> String {
        self.model.as_ref().map_or(self.preset.clone(), |dir| dir.display().to_string())
    }
}

/// The shape that a model folder tells.
///
/// # Errors
/// As [`ModelConfig::read`]; for the folder of a run, the model's is offered.
pub(crate) fn config_of(dir: &Path) -> Result<ModelConfig> {
    let model = dir.join("model");
    let holds = |dir: &Path| dir.join("config.json").is_file();
    ModelConfig::read(dir).map_err(|e| match !holds(dir) && holds(&model) {
        true => Error::new(e.kind(), e.message()).detail(
            "help",
            format!("did you mean `{}`? that is where the run left its model", model.display()),
        ),
        false => e,
    })
}

/// Refuses more tokens in a step than any training takes, whose memory could not be had.
///
/// # Errors
/// `Kind::Config` naming the limit.
pub(crate) fn check_tokens(batch: usize, seq: usize) -> Result<()> {
    if batch.checked_mul(seq).is_some_and(|n| n <= defaults::TOKENS_MAX) {
        return Ok(());
    }
    let most = defaults::TOKENS_MAX;
    let why = format!("--batch {batch} of {seq} tokens each is too much: a step takes at most {most} tokens");
    let help = match most / seq {
        0 => format!("use --seq {most} or less"),
        rows => format!("use --batch {rows} or less"),
    };
    Err(Error::new(Kind::Config, why).detail("help", help))
}

/// What to read.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Data")]
pub(crate) struct DataArgs {
    /// UTF-8 texts, folders of them, or .bin files of token numbers, one behind the other; tokens with which tokenizer.json
    /// would begin or end a text are left out [default: the Rust and Markdown sources of the working directory]
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with = "tokens")]
    pub(crate) data: Vec<PathBuf>,
    /// Numbers of .bin files, little endian [default: u16 for up to 65536 tokens, else u32]
    #[arg(long, value_name = "WIDTH", value_parser = widths(), conflicts_with = "tokens")]
    width: Option<Width>,
    /// Token between two texts [default: the end-of-text token of config.json, or a newline between texts read as bytes]
    #[arg(long, value_name = "TOKEN", conflicts_with = "tokens", value_parser = values::token)]
    end_of_text: Option<u32>,
    /// Safetensors file with `input_ids`, i64 [N, T+1]; for an encoder [N, T], with `labels`
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: Option<PathBuf>,
}

impl DataArgs {
    /// A file that stands there and is of the sources that are read where nothing is named.
    pub(crate) fn source<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        let is_read = self.inputs().next().is_none() && is_source(path) && path.exists();
        is_read.then_some(path)
    }

    /// The files and folders that are named.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &Path> {
        self.data.iter().chain(&self.tokens).map(PathBuf::as_path)
    }

    /// How documents are read for a model, and for the folder that it comes from; files that are needed meanwhile lie in
    /// `scratch`, and nothing is read of what is `written`.
    pub(crate) fn how<'a>(
        &self,
        model: Option<&'a Path>,
        config: &'a ModelConfig,
        scratch: Option<&'a Path>,
        written: &'a [PathBuf],
    ) -> Result<How<'a>> {
        if let Some(end) = self.end_of_text.filter(|id| *id as usize >= config.vocab_size()) {
            let why = format!("--end-of-text {end} is outside of the vocabulary 0..{}", config.vocab_size());
            return Err(Error::new(Kind::Config, why).detail("help", "give one of the tokens of the model"));
        }
        Ok(How { model, config, width: self.width, end: self.end_of_text, scratch, written })
    }
}

fn widths() -> impl TypedValueParser<Value = Width> {
    let named = |name: String| if name == "u16" { Width::U16 } else { Width::U32 };
    PossibleValuesParser::new(["u16", "u32"]).map(named)
}

/// Where to run.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "BackendProvider")]
pub(crate) struct RunArgs {
    /// Ranks by axis, as in dp=2,tp=2; axes are pp, dp, ep, cp, tp, one rank each if left out
    #[arg(
        long, value_name = "AXES", default_value = "", hide_default_value = true,
        value_parser = values::mesh
    )]
    pub(crate) mesh: Mesh,
    /// Threads of each rank [default: cores divided by ranks]
    #[arg(long, value_name = "N", value_parser = values::threads)]
    threads: Option<usize>,
    /// Keep each thread of each rank on a core of its own: steadier where nothing else runs on them
    #[arg(long)]
    pin: bool,
    /// Seconds that a rank waits for another before the run fails
    #[arg(
        long, value_name = "SECONDS", default_value = defaults::TIMEOUT_SECONDS,
        value_parser = values::seconds
    )]
    timeout: Duration,
    /// Where tensors live: cpu, or cuda or cuda:N for an NVIDIA card, which all ranks share
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = values::device)]
    device: Device,
    /// Numbers that are computed with
    #[arg(long, value_name = "NAME", default_value = "f32", value_parser = dtypes())]
    pub(crate) dtype: DType,
    /// How exactly products of f32 are formed; `doctor` says of what
    #[arg(long, value_name = "NAME", default_value = "highest", value_parser = matmul_precisions())]
    matmul_precision: MatmulPrecision,
    /// Memory that each rank may take, as in 500MB or 5GB [default: what the machine has left, which a run must fit from the
    /// start]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes)]
    memory_limit: Option<values::Bytes>,
    /// Round weights that are read from a folder and are not exact in the dtype of the run; else they are refused
    #[arg(long)]
    cast: bool,
}

/// In what weights are kept between steps.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "BackendProvider")]
pub(crate) struct StoredArgs {
    /// Numbers of the stored weights, at least as wide [default: f32 if --dtype is bf16 or f16, else --dtype]
    #[arg(long, value_name = "NAME", value_parser = dtypes())]
    param_dtype: Option<DType>,
}

impl StoredArgs {
    /// With what is computed and what is stored.
    pub(crate) fn precision(&self, dtype: DType) -> Precision {
        let mixed = Precision::mixed(dtype);
        Precision { param_dtype: self.param_dtype.unwrap_or(mixed.param_dtype), ..mixed }
    }

    /// What is wrong with the two together.
    pub(crate) fn fault(&self, dtype: DType) -> Option<String> {
        let Precision { dtype, param_dtype } = self.precision(dtype);
        let fits = Precision { dtype, param_dtype }.check().is_ok();
        (!fits).then(|| format!("--param-dtype {param_dtype} does not hold every number of --dtype {dtype}"))
    }
}

impl RunArgs {
    /// What may become of weights that are read.
    pub(crate) fn cast(&self) -> Cast {
        if self.cast { Cast::Rounded } else { Cast::Widened }
    }

    /// Bytes that each rank may take, if that was asked for.
    pub(crate) fn memory_limit(&self) -> Option<u64> {
        self.memory_limit.map(|limit| limit.0)
    }

    /// Threads of each rank, where so many ranks share this machine.
    pub(crate) fn threads_of_a_rank(&self, num_here: usize) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.unwrap_or((cores / num_here.max(1)).max(1))
    }

    /// Whether tensors live in the memory of the processor.
    pub(crate) fn is_on_host(&self) -> bool {
        self.device == Device::Cpu
    }

    /// The mesh of a training run: as asked for, else a rank for each process, or, on the processor, for each of two cores, if
    /// microbatches have rows for both.
    pub(crate) fn train_mesh(&self, rows: usize) -> Mesh {
        if let (0, Ok(Some(process))) = (self.mesh.num_axes(), process()) {
            return Mesh::new(&[("dp", process.num_ranks())]).unwrap_or_else(|_| self.mesh.clone());
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if self.mesh.num_axes() > 0 || cores < 2 || rows < 2 || self.device != Device::Cpu {
            return self.mesh.clone();
        }
        Mesh::new(&[("dp", 2)]).unwrap_or_else(|_| self.mesh.clone())
    }

    /// Whether ranks on a mesh are one rank on a card.
    pub(crate) fn is_alone_on_a_card(&self, mesh: &Mesh) -> bool {
        self.device != Device::Cpu && mesh.num_ranks() == 1
    }

    /// The world of a training run on a mesh.
    ///
    /// # Errors
    /// As [`RunArgs::world`].
    pub(crate) fn train_world(&self, mesh: &Mesh) -> Result<Ranks> {
        check_axes(mesh, &TRAINING)?;
        RunArgs { mesh: mesh.clone(), ..self.clone() }.launched()
    }

    /// The world of a command without stages.
    ///
    /// # Errors
    /// `Kind::Config` for more ranks than one process should have; `Kind::Unsupported` for axes over which the command splits
    /// nothing, and for a device that this machine or this build does not have.
    pub(crate) fn world(&self) -> Result<Ranks> {
        check_axes(&self.mesh, &EVALUATION)?;
        self.launched()
    }

    /// The world of a command that reads a text token by token.
    ///
    /// # Errors
    /// As [`RunArgs::world`].
    pub(crate) fn reading_world(&self) -> Result<Ranks> {
        check_axes(&self.mesh, &GENERATION)?;
        self.launched()
    }

    /// The world to launch, whatever its axes.
    fn launched(&self) -> Result<Ranks> {
        let precision = self.matmul_precision;
        if precision != MatmulPrecision::default() && self.dtype == DType::F64 {
            let why =
                format!("--matmul-precision {precision} is about products of f32; --dtype f64 has none");
            return Err(Error::new(Kind::Config, why).detail("help", "leave out one of the two"));
        }
        let process = process()?;
        let num_ranks = if process.is_some() { 1 } else { self.mesh.num_ranks() };
        if num_ranks > defaults::RANKS_MAX {
            let why = format!(
                "--mesh asks for {num_ranks} ranks; one process runs at most {}",
                defaults::RANKS_MAX
            );
            return Err(
                Error::new(Kind::Config, why).detail("help", "`explain` takes any mesh and computes nothing")
            );
        }
        if let Some(threads) = self.threads.filter(|n| n * num_ranks > values::THREADS_MAX) {
            let why = format!(
                "--threads {threads} for each of {num_ranks} ranks; one process runs at most {} threads",
                values::THREADS_MAX
            );
            let help = format!("use --threads {} or less", values::THREADS_MAX / num_ranks);
            return Err(Error::new(Kind::Config, why).detail("help", help));
        }
        let world = World::new(self.mesh.clone()).timeout(self.timeout).on(open(self.device)?);
        let limit = self.memory_limit().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0);
        let world = world.matmul_precision(self.matmul_precision).memory_limit(limit);
        let world = if self.pin { world.pinned() } else { world };
        Ranks::new(self.threads.map_or(world.clone(), |n| world.threads(n)), &self.mesh, process)
    }
}

fn dtypes() -> impl TypedValueParser<Value = DType> {
    // The names are those of dtypes, so that the last default is never taken.
    PossibleValuesParser::new(["f32", "f64", "bf16", "f16"])
        .map(|name| DType::parse(&name).unwrap_or(DType::F32))
}

fn matmul_precisions() -> impl TypedValueParser<Value = MatmulPrecision> {
    PossibleValuesParser::new(MatmulPrecision::EVERY.map(MatmulPrecision::name))
        .map(|name| name.parse().unwrap_or_default())
}

fn splits() -> impl TypedValueParser<Value = Split> {
    let named = |name: String| Split::EVERY.into_iter().find(|s| s.name() == name).unwrap_or(Split::Val);
    PossibleValuesParser::new(Split::EVERY.map(Split::name)).map(named)
}

/// The tokens of a row: as asked for, else what the model takes, at most `most`.
fn seq(asked: Option<usize>, config: &ModelConfig, most: usize) -> Result<usize> {
    let limit = config.positions();
    match asked {
        Some(seq) if seq > limit => {
            let why = format!("--seq {seq} exceeds the {limit} positions of the model");
            Err(Error::new(Kind::Config, why).detail("help", format!("use --seq {limit} or less")))
        }
        Some(seq) => Ok(seq),
        None => Ok(limit.min(most)),
    }
}

/// Options of `eval`.
#[derive(Args, Clone, Debug)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) source: DataArgs,
    /// Part of the text: all but the last tenth, the last tenth, everything
    #[arg(
        long, value_name = "NAME", default_value = "val", value_parser = splits(),
        conflicts_with = "tokens", help_heading = "Data"
    )]
    pub(crate) split: Split,
    /// Folder with config.json and model.safetensors
    #[arg(long, value_name = "DIR", default_value = defaults::MODEL, help_heading = "Model")]
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Sequences that are computed at a time
    #[arg(
        long, value_name = "N", default_value = defaults::EVAL_BATCH, value_parser = values::count,
        help_heading = "Data"
    )]
    pub(crate) batch: usize,
    /// Tokens in a sequence [default: the positions of the model, at most 128]
    #[arg(long, value_name = "N", value_parser = values::count, help_heading = "Data")]
    pub(crate) seq: Option<usize>,
    /// Write `logits`, f32 [B, T, V], of the first --batch rows to this safetensors file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) logits: Option<PathBuf>,
    /// Print one JSON object and nothing else on stdout
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

impl EvalArgs {
    /// The tokens of a sequence.
    ///
    /// # Errors
    /// `Kind::Config` for more than the model has positions.
    pub(crate) fn seq(&self, config: &ModelConfig) -> Result<usize> {
        seq(self.seq, config, defaults::SEQ_MAX)
    }
}

/// Options of `explain`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Ranks by axis, as in dp=2,tp=2; axes are pp, dp, ep, cp, tp, one rank each if left out
    #[arg(
        long, value_name = "AXES", default_value = "", hide_default_value = true,
        value_parser = values::mesh, help_heading = "BackendProvider"
    )]
    pub(crate) mesh: Mesh,
    /// Sequences in the global batch
    #[arg(
        long, value_name = "N", default_value = defaults::BATCH, value_parser = values::count,
        help_heading = "Step"
    )]
    pub(crate) batch: usize,
    /// Tokens in a sequence [default: the positions of the model, 1024 at most]
    #[arg(long, value_name = "N", value_parser = values::count, help_heading = "Step")]
    pub(crate) seq: Option<usize>,
    #[command(flatten)]
    pub(crate) pipeline: PipelineArgs,
    /// Numbers that are computed with
    #[arg(
        long, value_name = "NAME", default_value = "f32", value_parser = dtypes(),
        help_heading = "BackendProvider"
    )]
    pub(crate) dtype: DType,
    #[command(flatten)]
    pub(crate) stored: StoredArgs,
    /// Print one JSON object a line
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

impl ExplainArgs {
    /// The tokens of a sequence.
    ///
    /// # Errors
    /// `Kind::Config` for more than the model has positions.
    pub(crate) fn seq(&self, config: &ModelConfig) -> Result<usize> {
        seq(self.seq, config, defaults::EXPLAINED_SEQ_MAX)
    }

    /// The mesh of the step.
    ///
    /// # Errors
    /// `Kind::Unsupported` for axes that no plan splits anything over; `Kind::Config` for more ranks than can be told of.
    pub(crate) fn mesh(&self) -> Result<&Mesh> {
        check_axes(&self.mesh, &TRAINING)?;
        let (num_ranks, most) = (self.mesh.num_ranks(), defaults::EXPLAINED_MAX);
        if num_ranks > most {
            let why = format!("--mesh asks for {num_ranks} ranks; at most {most} are explained");
            return Err(Error::new(Kind::Config, why).detail("help", "use fewer"));
        }
        Ok(&self.mesh)
    }
}

#[cfg(test)]
mod tests;
