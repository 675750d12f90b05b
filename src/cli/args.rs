//! Command-line definition (clap): every option with its help text, default and validation.

pub(crate) mod nearest;
mod defaults;
mod values;
mod device_choice;
mod access;
mod axes;
mod pipeline;
mod parallelism;
mod plan;
mod checkpoints;
mod deterministic;
mod train;
mod generate;
mod tools;
pub(crate) mod truncate;
mod compared_options;
pub(crate) mod config;

pub(crate) use access::AccessArgs;
pub(crate) use checkpoints::CheckpointArgs;
pub(crate) use defaults::CHECK_EVERY;
pub(crate) use deterministic::DeterministicArgs;
pub(crate) use generate::{GenerateArgs, SamplingArgs};
pub(crate) use parallelism::ParallelismArgs;
pub(crate) use pipeline::PipelineArgs;
pub(crate) use plan::PlanArgs;
pub(crate) use tools::{BenchArgs, BenchChoice, DoctorArgs, InspectArgs, OpsArgs};
pub(crate) use train::TrainArgs;

use super::ranks::{Ranks, process};
use crate::data::{ReadOptions, Split, TokenWidth, is_source_file};
pub(crate) use axes::check_experts;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use device_choice::DeviceChoice;
use shardgrad::dist::{Mesh, World};
use shardgrad::kernels::{DType, MatmulPrecision, open};
use shardgrad::nn::{CastRule, ModelConfig, Precision};
use shardgrad::{Error, Kind, Result};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Train and run language models with data, tensor, pipeline, context and expert parallelism; results do not depend on the mesh.
#[derive(Debug, Parser)]
#[command(name = "shardgrad", version, max_term_width = 100, disable_help_subcommand = true)]
#[command(
    after_help = "Exit codes: 0 success; 1 the run failed, or was stopped before anything was saved; 2 invalid options or input; 128 + N stopped by signal N (`train`: after saving its state)."
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Train a language model on text or token ids
    #[command(after_help = TRAIN_EXAMPLES)]
    Train(Box<TrainArgs>),
    /// Evaluate a model: mean next-token loss and perplexity
    Eval(Box<EvalArgs>),
    /// Generate text from a prompt; when the context window is full, its older half is dropped
    Generate(Box<GenerateArgs>),
    /// Print layouts, collectives, memory and FLOPs of one training step without running it (dry run)
    Explain(Box<ExplainArgs>),
    /// Verify, simulate and draw a pipeline schedule
    Plan(PlanArgs),
    /// List and verify the contents of a model, checkpoint or run folder; exits with 1 if it is damaged
    Inspect(InspectArgs),
    /// Print the op table: signatures, dtypes, FLOPs, supported layouts
    Ops(OpsArgs),
    /// Print what this machine has: cores, SIMD, memory, GPU libraries
    Doctor(DoctorArgs),
    /// Benchmark kernels, collectives, the autograd tape and training steps; every result is checked first
    Bench(BenchArgs),
}

const TRAIN_EXAMPLES: &str = "\
Examples:
  shardgrad train                                  a small model on the source files of this folder
  shardgrad train --data book.txt --mesh tp=2      tensor parallelism over two ranks, same losses
  shardgrad train --model DIR --tokens ids.safetensors --no-shuffle --lr-schedule constant
  shardgrad train --save-every 100 --resume        checkpoints, and resumes from the newest one

Without --mesh, training uses data parallelism over two ranks (dp=2) on a CPU with two or more cores,
if each microbatch has at least two sequences.";

/// Model options: a folder, or a preset with newly initialized weights.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Hugging Face model folder with config.json and model.safetensors
    #[arg(long, value_name = "DIR", conflicts_with = "preset")]
    model: Option<PathBuf>,
    /// Model size with newly initialized weights: nano, tiny, s, m, l, gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m, llama-nano, llama-tiny,
    /// llama-1b, llama-8b, llama-70b, mistral-7b, qwen2-0.5b, qwen3-0.6b, qwen3-8b, mixtral-nano, mixtral-tiny, mixtral-8x7b,
    /// qwen3-30b-a3b, bert-base, bert-large
    #[arg(long, value_name = "NAME", default_value = defaults::PRESET, value_parser = values::preset)]
    preset: String,
}

impl ModelArgs {
    /// Returns the model configuration.
    pub(crate) fn config(&self) -> Result<ModelConfig> {
        match &self.model {
            Some(dir) => config_of(dir),
            None => ModelConfig::preset(&self.preset)
                .ok_or_else(|| Error::new(Kind::Config, format!("there is no preset `{}`", self.preset))),
        }
    }

    /// Returns the folder that the weights are loaded from, if any.
    pub(crate) fn dir(&self) -> Option<&Path> {
        self.model.as_deref()
    }

    /// Returns the preset name or the folder.
    pub(crate) fn name(&self) -> String {
        self.model.as_ref().map_or(self.preset.clone(), |dir| dir.display().to_string())
    }
}

/// Reads the model configuration of a folder.
///
/// # Errors
/// As [`ModelConfig::read`]; for a run folder the help names its `model` folder.
pub(crate) fn config_of(dir: &Path) -> Result<ModelConfig> {
    let model = dir.join("model");
    let holds = |dir: &Path| dir.join("config.json").is_file();
    ModelConfig::read(dir).map_err(|e| match !holds(dir) && holds(&model) {
        true => Error::new(e.kind(), e.message())
            .detail("help", format!("did you mean `{}`? a run saves its model there", model.display())),
        false => e,
    })
}

/// Rejects batches of more tokens than any training step uses; their memory could not be allocated.
///
/// # Errors
/// `Kind::Config` naming the limit.
pub(crate) fn check_tokens(batch: usize, seq: usize) -> Result<()> {
    if batch.checked_mul(seq).is_some_and(|n| n <= defaults::TOKENS_MAX) {
        return Ok(());
    }
    let most = defaults::TOKENS_MAX;
    let why = format!(
        "--batch {batch} with {seq} tokens per sequence is too large: a step has at most {most} tokens"
    );
    let help = match most / seq {
        0 => format!("use --seq {most} or less"),
        rows => format!("use --batch {rows} or less"),
    };
    Err(Error::new(Kind::Config, why).detail("help", help))
}

/// Data options.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Data")]
pub(crate) struct DataArgs {
    /// UTF-8 text files, folders of them, or .bin files of token ids, concatenated; no BOS or EOS tokens of tokenizer.json are
    /// added (see --end-of-text) [default: the Rust and Markdown files of the working directory]
    #[arg(long, value_name = "PATH", num_args = 1.., conflicts_with = "tokens")]
    pub(crate) data: Vec<PathBuf>,
    /// Integer type of token ids in .bin files, little endian [default: u16 for vocabularies up to 65536, else u32]
    #[arg(long, value_name = "WIDTH", value_parser = widths(), conflicts_with = "tokens")]
    width: Option<TokenWidth>,
    /// Token id inserted between two texts [default: eos_token_id of config.json; a newline if tokens are bytes]
    #[arg(long, value_name = "TOKEN", conflicts_with = "tokens", value_parser = values::token)]
    end_of_text: Option<u32>,
    /// Safetensors file with `input_ids`, i64 [N, T+1]; for encoders [N, T], with `labels` [N, T] (-100: ignored)
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: Option<PathBuf>,
}

impl DataArgs {
    /// Returns a path if it exists and is one of the source files that are read by default.
    pub(crate) fn source<'a>(&self, path: &'a Path) -> Option<&'a Path> {
        let is_read = self.inputs().next().is_none() && is_source_file(path) && path.exists();
        is_read.then_some(path)
    }

    /// Returns the input files and folders given on the command line.
    pub(crate) fn inputs(&self) -> impl Iterator<Item = &Path> {
        self.data.iter().chain(&self.tokens).map(PathBuf::as_path)
    }

    /// Returns how to read text for a model loaded from the folder `model`; temporary files go to `scratch`, and `output_paths`
    /// are not read.
    pub(crate) fn read_options<'a>(
        &self,
        model: Option<&'a Path>,
        config: &'a ModelConfig,
        scratch: Option<&'a Path>,
        output_paths: &'a [PathBuf],
    ) -> Result<ReadOptions<'a>> {
        if let Some(end) = self.end_of_text.filter(|id| *id as usize >= config.vocab_size()) {
            let why = format!("--end-of-text {end} is outside the vocabulary 0..{}", config.vocab_size());
            return Err(Error::new(Kind::Config, why).detail("help", "use a token id of the model"));
        }
        Ok(ReadOptions { model, config, width: self.width, end: self.end_of_text, scratch, output_paths })
    }
}

fn widths() -> impl TypedValueParser<Value = TokenWidth> {
    let named = |name: String| if name == "u16" { TokenWidth::U16 } else { TokenWidth::U32 };
    PossibleValuesParser::new(["u16", "u32"]).map(named)
}

/// Execution options: mesh, device, threads, dtype.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Execution")]
pub(crate) struct RunArgs {
    /// Device mesh, as in dp=2,tp=2; axes: pp (pipeline), dp (data), fsdp (fully sharded data), ep (expert), cp (context), tp (tensor
    /// parallelism), each 1 if omitted
    #[arg(
        long, value_name = "AXES", default_value = "", hide_default_value = true,
        value_parser = values::mesh
    )]
    pub(crate) mesh: Mesh,
    /// CPU threads per rank [default: cores divided by ranks]
    #[arg(long, value_name = "N", value_parser = values::threads)]
    threads: Option<usize>,
    /// Pin each thread to its own core (CPU affinity); use on an otherwise idle machine
    #[arg(long)]
    pin: bool,
    /// Seconds a rank waits for another in a collective before the run fails
    #[arg(
        long, value_name = "SECONDS", default_value = defaults::TIMEOUT_SECONDS,
        value_parser = values::seconds
    )]
    timeout: Duration,
    /// Device: cpu, cuda:N (an NVIDIA GPU, shared by all ranks), or cuda (the first; for ranks that are processes, one each)
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = DeviceChoice::parse)]
    device: DeviceChoice,
    /// Compute dtype; bf16 and f16 are mixed precision (see --param-dtype), f16 with dynamic loss scaling
    #[arg(long, value_name = "NAME", default_value = "f32", value_parser = dtypes())]
    pub(crate) dtype: DType,
    /// Precision of f32 matmuls, as torch.set_float32_matmul_precision: lower levels may use bf16 or TF32 (see `doctor`)
    #[arg(long, value_name = "NAME", default_value = "highest", value_parser = matmul_precisions())]
    matmul_precision: MatmulPrecision,
    /// Memory limit per rank, as in 500MB or 5GB; a run that needs more is refused before it starts [default: the free memory of
    /// the machine]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes)]
    memory_limit: Option<values::Bytes>,
    /// Allow rounding of weights loaded from --model that the parameter dtype cannot represent exactly; without it they are refused
    #[arg(long)]
    cast: bool,
    #[command(flatten)]
    pub(crate) access: AccessArgs,
}

/// Storage precision of the parameters between steps.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Execution")]
pub(crate) struct StoredArgs {
    /// Dtype of the parameters (master weights), at least as wide as --dtype [default: f32 if --dtype is bf16 or f16, else --dtype]
    #[arg(long, value_name = "NAME", value_parser = dtypes())]
    param_dtype: Option<DType>,
}

impl StoredArgs {
    /// Returns the compute and parameter dtypes.
    pub(crate) fn precision(&self, dtype: DType) -> Precision {
        let mixed = Precision::mixed(dtype);
        Precision { param_dtype: self.param_dtype.unwrap_or(mixed.param_dtype), ..mixed }
    }

    /// Returns an error text if --param-dtype cannot hold --dtype.
    pub(crate) fn fault(&self, dtype: DType) -> Option<String> {
        let Precision { dtype, param_dtype } = self.precision(dtype);
        let fits = Precision { dtype, param_dtype }.check().is_ok();
        (!fits).then(|| {
            format!(
                "--param-dtype {param_dtype} cannot represent every value of --dtype {dtype}; use a wider one"
            )
        })
    }
}

impl RunArgs {
    /// Returns whether loaded weights may be rounded.
    pub(crate) fn cast(&self) -> CastRule {
        if self.cast { CastRule::Round } else { CastRule::Widen }
    }

    /// Returns the memory limit per rank in bytes, if given.
    pub(crate) fn memory_limit(&self) -> Option<u64> {
        self.memory_limit.map(|limit| limit.0)
    }

    /// Returns the threads per rank if `num_local_ranks` ranks share this machine.
    pub(crate) fn threads_per_rank(&self, num_local_ranks: usize) -> usize {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        self.threads.unwrap_or((cores / num_local_ranks.max(1)).max(1))
    }

    /// Returns whether the device is the CPU.
    pub(crate) fn is_on_host(&self) -> bool {
        self.device.is_cpu()
    }

    /// Returns the mesh of a training run: `--mesh`; else dp over the launched processes; else dp=2 on a CPU with two cores if a
    /// microbatch has at least two rows.
    pub(crate) fn train_mesh(&self, rows: usize) -> Mesh {
        if let (0, Ok(Some(process))) = (self.mesh.num_axes(), process()) {
            return Mesh::new(&[("dp", process.num_ranks())]).unwrap_or_else(|_| self.mesh.clone());
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if self.mesh.num_axes() > 0 || cores < 2 || rows < 2 || !self.device.is_cpu() {
            return self.mesh.clone();
        }
        Mesh::new(&[("dp", 2)]).unwrap_or_else(|_| self.mesh.clone())
    }

    /// Returns whether the run has a single rank on a GPU.
    pub(crate) fn is_single_rank_on_gpu(&self, mesh: &Mesh) -> bool {
        !self.device.is_cpu() && mesh.num_ranks() == 1
    }

    /// Returns the ranks of a training run on a mesh.
    ///
    /// # Errors
    /// As [`RunArgs::inference_world`].
    pub(crate) fn training_world(&self, mesh: &Mesh, styles: &ParallelismArgs) -> Result<Ranks> {
        RunArgs { mesh: mesh.clone(), ..self.clone() }.inference_world(styles)
    }

    /// Returns the ranks of a command that evaluates a model or generates with it.
    ///
    /// # Errors
    /// `Kind::Config` for too many ranks in one process; `Kind::Mesh` for unknown mesh axes; `Kind::Unsupported` for a device that this
    /// machine or build does not have.
    pub(crate) fn inference_world(&self, styles: &ParallelismArgs) -> Result<Ranks> {
        styles.check_axes(&self.mesh)?;
        self.ranks()
    }

    /// Returns the ranks to launch, without checking the axes.
    fn ranks(&self) -> Result<Ranks> {
        let precision = self.matmul_precision;
        if precision != MatmulPrecision::default() && self.dtype == DType::F64 {
            let why = format!("--matmul-precision {precision} applies to f32 matmuls; --dtype f64 has none");
            return Err(Error::new(Kind::Config, why).detail("help", "omit one of the two options"));
        }
        let process = process()?;
        let num_ranks = if process.is_some() { 1 } else { self.mesh.num_ranks() };
        if num_ranks > defaults::RANKS_MAX {
            let why =
                format!("--mesh has {num_ranks} ranks; one process runs at most {}", defaults::RANKS_MAX);
            return Err(
                Error::new(Kind::Config, why).detail("help", "use a smaller mesh or several processes; `explain` accepts larger meshes because it runs nothing")
            );
        }
        if let Some(threads) = self.threads.filter(|n| n * num_ranks > values::THREADS_MAX) {
            let why = format!(
                "--threads {threads} for each of {num_ranks} ranks is too many; one process runs at most {} threads",
                values::THREADS_MAX
            );
            let help = format!("use --threads {} or less", values::THREADS_MAX / num_ranks);
            return Err(Error::new(Kind::Config, why).detail("help", help));
        }
        let device = open(self.device.of_process(process.as_ref())?)?;
        let world = World::new(self.mesh.clone()).timeout(self.timeout).on_device(device);
        let limit = self.memory_limit().and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or(0);
        let world = world.matmul_precision(self.matmul_precision).memory_limit(limit);
        let world = if self.pin { world.pin_threads() } else { world };
        let world = if self.device.is_numbered() { world.share_gpu() } else { world };
        Ranks::new(self.threads.map_or(world.clone(), |n| world.threads(n)), &self.mesh, process)
    }
}

fn dtypes() -> impl TypedValueParser<Value = DType> {
    // The parser accepts names of dtypes only, so `unwrap_or` is never reached.
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

/// Returns the sequence length: as given, else the positions of the model, at most `most`.
fn seq(asked: Option<usize>, config: &ModelConfig, most: usize) -> Result<usize> {
    let limit = config.max_positions();
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
    /// Split to evaluate: train (the first 90% of the tokens), val (the last 10%), all
    #[arg(
        long, value_name = "NAME", default_value = "val", value_parser = splits(),
        conflicts_with = "tokens", help_heading = "Data"
    )]
    pub(crate) split: Split,
    /// Hugging Face model folder with config.json and model.safetensors
    #[arg(long, value_name = "DIR", default_value = defaults::MODEL, help_heading = "Model")]
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    #[command(flatten)]
    pub(crate) parallelism: ParallelismArgs,
    /// Sequences per batch; the result does not depend on it
    #[arg(
        long, value_name = "N", default_value = defaults::EVAL_BATCH, value_parser = values::count,
        help_heading = "Data"
    )]
    pub(crate) batch: usize,
    /// Sequence length in tokens [default: the positions of the model, at most 128]
    #[arg(long, value_name = "N", value_parser = values::count, help_heading = "Data")]
    pub(crate) seq: Option<usize>,
    /// Write the `logits` of the first --batch sequences, f32 [B, T, V], to a safetensors file
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) logits: Option<PathBuf>,
    /// Print one JSON object on stdout and nothing else
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

impl EvalArgs {
    /// Returns the sequence length.
    ///
    /// # Errors
    /// `Kind::Config` if `--seq` exceeds the positions of the model.
    pub(crate) fn seq(&self, config: &ModelConfig) -> Result<usize> {
        seq(self.seq, config, defaults::SEQ_MAX)
    }
}

/// Options of `explain`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Device mesh, as in dp=2,tp=2; axes: pp (pipeline), dp (data), fsdp (fully sharded data), ep (expert), cp (context), tp (tensor
    /// parallelism), each 1 if omitted
    #[arg(
        long, value_name = "AXES", default_value = "", hide_default_value = true,
        value_parser = values::mesh, help_heading = "Execution"
    )]
    pub(crate) mesh: Mesh,
    /// Global batch size in sequences, over all data-parallel ranks and microbatches
    #[arg(
        long, value_name = "N", default_value = defaults::BATCH, value_parser = values::count,
        help_heading = "Training step"
    )]
    pub(crate) batch: usize,
    /// Sequence length in tokens [default: the positions of the model, at most 1024]
    #[arg(long, value_name = "N", value_parser = values::count, help_heading = "Training step")]
    pub(crate) seq: Option<usize>,
    #[command(flatten)]
    pub(crate) parallelism: ParallelismArgs,
    #[command(flatten)]
    pub(crate) pipeline: PipelineArgs,
    #[command(flatten)]
    pub(crate) deterministic: DeterministicArgs,
    /// Compute dtype; bf16 and f16 are mixed precision (see --param-dtype)
    #[arg(
        long, value_name = "NAME", default_value = "f32", value_parser = dtypes(),
        help_heading = "Execution"
    )]
    pub(crate) dtype: DType,
    #[command(flatten)]
    pub(crate) stored: StoredArgs,
    /// Memory of a rank, as in 16GB, by which a pipeline with ZeRO stage 3 gathers parameters once per step or by microbatch
    /// [default: as much as the step needs]
    #[arg(long, value_name = "BYTES", value_parser = values::bytes, help_heading = "Execution")]
    memory_limit: Option<values::Bytes>,
    /// Compare the step under two plans: files, or `family` for the plan of the model's family
    #[arg(
        long, num_args = 2, value_names = ["PLAN1", "PLAN2"], value_parser = values::plan_choice,
        conflicts_with_all = ["plan", "zero", "sequence_parallel", "context", "experts"], help_heading = "Output"
    )]
    diff: Option<Vec<values::PlanChoice>>,
    /// Print the plan as text, for --plan, and nothing else
    #[arg(long, conflicts_with_all = ["json", "diff"], help_heading = "Output")]
    pub(crate) show_plan: bool,
    /// Print one JSON object per line
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

impl ExplainArgs {
    /// Returns the memory that a rank is assumed to have, if given.
    pub(crate) fn memory_limit(&self) -> Option<u64> {
        self.memory_limit.map(|limit| limit.0)
    }

    /// Returns the plans that `--diff` compares.
    pub(crate) fn compared_plans(&self) -> Option<&[values::PlanChoice; 2]> {
        self.diff.as_deref()?.try_into().ok()
    }

    /// Returns the sequence length.
    ///
    /// # Errors
    /// `Kind::Config` if `--seq` exceeds the positions of the model.
    pub(crate) fn seq(&self, config: &ModelConfig) -> Result<usize> {
        seq(self.seq, config, defaults::EXPLAINED_SEQ_MAX)
    }

    /// Returns the mesh of the step.
    ///
    /// # Errors
    /// `Kind::Mesh` for axes that no plan shards over; `Kind::Config` for too many ranks.
    pub(crate) fn mesh(&self) -> Result<&Mesh> {
        self.parallelism.check_axes(&self.mesh)?;
        let (num_ranks, most) = (self.mesh.num_ranks(), defaults::EXPLAINED_MAX);
        if num_ranks > most {
            let why = format!("--mesh has {num_ranks} ranks; `explain` supports at most {most}");
            return Err(Error::new(Kind::Config, why).detail("help", "use a smaller mesh"));
        }
        Ok(&self.mesh)
    }
}

#[cfg(test)]
mod tests;
