//! The command line as clap sees it: every option with its help, its default and its check.

pub(crate) mod nearest;
mod values;

use clap::builder::{NonEmptyStringValueParser, PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand, ValueEnum};
use shardgrad::dist::{Mesh, World};
use shardgrad::kernels::DType;
use shardgrad::nn::{Gpt2Config, Schedule};
use shardgrad::{Error, Kind, Result};
use crate::data::Split;
use std::path::PathBuf;
use std::time::Duration;

/// What a command does when it is told nothing else: the first command of the README.
mod defaults {
    pub(super) const PRESET: &str = "tiny";
    pub(super) const OUT: &str = "runs/latest";
    pub(super) const MODEL: &str = "runs/latest/model";
    pub(super) const STEPS: &str = "300";
    pub(super) const BATCH: &str = "16";
    /// The longest sequence that is not asked for.
    pub(super) const SEQ_MAX: usize = 128;
    pub(super) const LR: &str = "0.001";
    /// `--min-lr` as a part of `--lr`.
    pub(super) const MIN_LR_PART: f64 = 0.1;
    /// `--warmup`: a tenth of the steps, at most so many.
    pub(super) const WARMUP_MAX: usize = 100;
    pub(super) const WEIGHT_DECAY: &str = "0.1";
    pub(super) const BETA1: &str = "0.9";
    pub(super) const BETA2: &str = "0.95";
    pub(super) const EPS: &str = "1e-8";
    pub(super) const GRAD_CLIP: &str = "1";
    pub(super) const EVAL_EVERY: usize = 50;
    pub(super) const EVAL_BATCH: &str = "16";
    pub(super) const TIMEOUT_SECONDS: &str = "60";
    pub(super) const NEW_TOKENS: &str = "200";
    pub(super) const TEMPERATURE: &str = "0.8";
    /// More ranks than this are not started as threads of one process.
    pub(super) const RANKS_MAX: usize = 256;
}

/// Train and run a model on any mesh; the numbers do not depend on the mesh.
#[derive(Debug, Parser)]
#[command(name = "shardgrad", version, max_term_width = 100, disable_help_subcommand = true)]
#[command(after_help = "Exit codes: 0 done, 1 the run failed, 2 misuse or bad input, 130 stopped by a signal.")]
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
    /// Continue a prompt
    Generate(Box<GenerateArgs>),
    /// Show layouts, collectives and costs of one training step; nothing is computed
    Explain(Box<ExplainArgs>),
}

const TRAIN_EXAMPLES: &str = "\
Examples:
  shardgrad train                                  a small model on the sources of this folder
  shardgrad train --data book.txt --mesh tp=2      the same numbers from two ranks
  shardgrad train --model DIR --tokens ids.safetensors --no-shuffle --lr-schedule constant";

/// Which model: a folder, or a preset with fresh weights.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Model")]
pub(crate) struct ModelArgs {
    /// Folder with config.json and model.safetensors
    #[arg(long, value_name = "DIR", conflicts_with = "preset")]
    model: Option<PathBuf>,
    /// Shape with fresh weights: tiny, s, m, l, gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m
    #[arg(long, value_name = "NAME", default_value = defaults::PRESET, value_parser = values::preset)]
    preset: String,
}

impl ModelArgs {
    /// The shape of the model.
    pub(crate) fn config(&self) -> Result<Gpt2Config> {
        match &self.model {
            Some(dir) => Gpt2Config::read(dir),
            None => Gpt2Config::preset(&self.preset)
                .ok_or_else(|| Error::new(Kind::Config, format!("there is no preset `{}`", self.preset))),
        }
    }

    /// The folder that the weights come from, if there is one.
    pub(crate) fn dir(&self) -> Option<&std::path::Path> {
        self.model.as_deref()
    }

    /// The preset, or the folder.
    pub(crate) fn name(&self) -> String {
        self.model.as_ref().map_or(self.preset.clone(), |dir| dir.display().to_string())
    }
}

/// What to read.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Data")]
pub(crate) struct DataArgs {
    /// UTF-8 text, read as bytes [default: the Rust and Markdown sources of the working directory]
    #[arg(long, value_name = "FILE", conflicts_with = "tokens")]
    pub(crate) data: Option<PathBuf>,
    /// Safetensors file with `input_ids`, i64 [N, T+1]
    #[arg(long, value_name = "FILE")]
    pub(crate) tokens: Option<PathBuf>,
}

/// Where to run.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Machine")]
pub(crate) struct RunArgs {
    /// Ranks by axis, as in dp=2,tp=2; axes are pp, dp, cp, tp, one rank each if left out
    #[arg(long, value_name = "AXES", default_value = "", hide_default_value = true, value_parser = values::mesh)]
    pub(crate) mesh: Mesh,
    /// Threads of each rank [default: cores divided by ranks]
    #[arg(long, value_name = "N", value_parser = values::count)]
    threads: Option<usize>,
    /// Seconds that a rank waits for another before the run fails
    #[arg(long, value_name = "SECONDS", default_value = defaults::TIMEOUT_SECONDS, value_parser = values::seconds)]
    timeout: Duration,
    /// Where tensors live
    #[arg(long, value_enum, default_value_t = Device::Cpu)]
    device: Device,
    /// Numbers of weights and activations
    #[arg(long, default_value = "f32", value_parser = dtypes())]
    pub(crate) dtype: DType,
}

impl RunArgs {
    /// The mesh of a training run: as asked for, else a rank for each of two cores.
    pub(crate) fn train_mesh(&self) -> Mesh {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        if self.mesh.num_axes() > 0 || cores < 2 {
            return self.mesh.clone();
        }
        Mesh::new(&[("dp", 2)]).unwrap_or_else(|_| self.mesh.clone())
    }

    /// The world of a training run.
    ///
    /// # Errors
    /// As [`RunArgs::world`].
    pub(crate) fn train_world(&self) -> Result<World> {
        RunArgs { mesh: self.train_mesh(), ..self.clone() }.world()
    }

    /// The world to launch.
    ///
    /// # Errors
    /// `Kind::Config` for more ranks than one process should have.
    pub(crate) fn world(&self) -> Result<World> {
        let num_ranks = self.mesh.num_ranks();
        if num_ranks > defaults::RANKS_MAX {
            let why = format!("--mesh asks for {num_ranks} ranks; one process runs at most {}", defaults::RANKS_MAX);
            return Err(Error::new(Kind::Config, why).detail("help", "`explain` takes any mesh and computes nothing"));
        }
        let world = match self.device {
            Device::Cpu => World::new(self.mesh.clone()).timeout(self.timeout),
        };
        Ok(self.threads.map_or(world.clone(), |n| world.threads(n)))
    }
}

/// Where tensors live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Device {
    /// Main memory; ranks are threads of this process.
    Cpu,
}

/// How the learning rate goes on after the warmup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LrSchedule {
    /// Falls along half a cosine from --lr to --min-lr at the last step
    Cosine,
    /// Stays at --lr
    Constant,
}

fn dtypes() -> impl TypedValueParser<Value = DType> {
    // The names are those of dtypes, so that the last default is never taken.
    PossibleValuesParser::new(["f32", "f64", "bf16"]).map(|name| DType::parse(&name).unwrap_or(DType::F32))
}

fn splits() -> impl TypedValueParser<Value = Split> {
    let named = |name: String| Split::EVERY.into_iter().find(|s| s.name() == name).unwrap_or(Split::Val);
    PossibleValuesParser::new(Split::EVERY.map(Split::name)).map(named)
}

/// The tokens of a row: as asked for, else what the model takes, at most `most`.
fn seq(asked: Option<usize>, config: &Gpt2Config, most: usize) -> Result<usize> {
    let limit = config.n_positions;
    match asked {
        Some(seq) if seq > limit => {
            let why = format!("--seq {seq} exceeds the {limit} positions of the model");
            Err(Error::new(Kind::Config, why).detail("help", format!("use --seq {limit} or less")))
        }
        Some(seq) => Ok(seq),
        None => Ok(limit.min(most)),
    }
}

/// Options of `train`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) source: DataArgs,
    /// Read windows, or rows of tokens, in file order and begin again at the end
    #[arg(long, help_heading = "Data")]
    pub(crate) no_shuffle: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Dropout probability in training [default: what config.json says; 0 for presets]
    #[arg(long, value_name = "P", help_heading = "Model", value_parser = values::below_one)]
    pub(crate) dropout: Option<f64>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    #[command(flatten)]
    pub(crate) steps: StepsArgs,
    #[command(flatten)]
    pub(crate) optim: OptimArgs,
    /// Folder for metrics.jsonl, loss.svg and model/; what is there is replaced
    #[arg(long, value_name = "DIR", default_value = defaults::OUT, help_heading = "Output")]
    pub(crate) out: PathBuf,
    /// Steps between measurements of the loss on the held-out tenth of the text; 0 for none [default: 50]
    #[arg(long, value_name = "N", help_heading = "Output", value_parser = values::count_or_none)]
    eval_every: Option<usize>,
    /// Print one JSON object a step and nothing else on stdout
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// How much to train.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Steps")]
pub(crate) struct StepsArgs {
    /// Updates of the weights
    #[arg(long, value_name = "N", default_value = defaults::STEPS, value_parser = values::count)]
    pub(crate) steps: usize,
    /// Sequences in the global batch
    #[arg(long, value_name = "N", default_value = defaults::BATCH, value_parser = values::count)]
    pub(crate) batch: usize,
    /// Tokens in a sequence [default: the positions of the model, at most 128]
    #[arg(long, value_name = "N", value_parser = values::count)]
    pub(crate) seq: Option<usize>,
    /// Equal parts that the batch is cut into, to save memory
    #[arg(long, value_name = "N", default_value = "1", value_parser = values::count)]
    pub(crate) microbatches: usize,
    /// Seed of weights, data order and dropout
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) seed: u64,
}

/// How to update.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Optimizer (AdamW)")]
pub(crate) struct OptimArgs {
    /// Learning rate after the warmup
    #[arg(long, value_name = "RATE", default_value = defaults::LR, value_parser = values::positive)]
    pub(crate) lr: f64,
    /// Learning rate at the last step [default: a tenth of --lr]
    #[arg(long, value_name = "RATE", value_parser = values::not_negative)]
    min_lr: Option<f64>,
    /// How the learning rate goes on after the warmup
    #[arg(long, value_enum, default_value_t = LrSchedule::Cosine)]
    lr_schedule: LrSchedule,
    /// Steps of linear rise to --lr [default: a tenth of --steps, at most 100; 0 if constant]
    #[arg(long, value_name = "N", value_parser = values::count_or_none)]
    warmup: Option<usize>,
    /// Pull towards zero of weights with two or more dims, as a part of the learning rate
    #[arg(long, value_name = "X", default_value = defaults::WEIGHT_DECAY, value_parser = values::not_negative)]
    pub(crate) weight_decay: f64,
    /// Memory of the mean of gradients
    #[arg(long, value_name = "X", default_value = defaults::BETA1, value_parser = values::below_one)]
    pub(crate) beta1: f64,
    /// Memory of the mean of squared gradients
    #[arg(long, value_name = "X", default_value = defaults::BETA2, value_parser = values::below_one)]
    pub(crate) beta2: f64,
    /// Added to the root of the mean of squared gradients
    #[arg(long, value_name = "X", default_value = defaults::EPS, value_parser = values::positive)]
    pub(crate) eps: f64,
    /// Largest norm of the whole gradient, which is scaled down to it; 0 for no limit
    #[arg(long, value_name = "NORM", default_value = defaults::GRAD_CLIP, value_parser = values::not_negative)]
    grad_clip: f64,
}

impl OptimArgs {
    /// The bound of the gradient norm, if there is one.
    pub(crate) fn clip(&self) -> Option<f64> {
        Some(self.grad_clip).filter(|clip| *clip > 0.0)
    }
}

impl TrainArgs {
    /// The tokens of a sequence.
    ///
    /// # Errors
    /// `Kind::Config` for more than the model has positions.
    pub(crate) fn seq(&self, config: &Gpt2Config) -> Result<usize> {
        seq(self.steps.seq, config, defaults::SEQ_MAX)
    }

    /// The learning rate of each step.
    pub(crate) fn schedule(&self) -> Schedule {
        let (steps, optim) = (self.steps.steps, &self.optim);
        let rise = Schedule::constant(optim.lr);
        match optim.lr_schedule {
            LrSchedule::Constant => rise.warmup(optim.warmup.unwrap_or(0)),
            LrSchedule::Cosine => rise
                .warmup(optim.warmup.unwrap_or(defaults::WARMUP_MAX.min(steps / 10)))
                .cosine(steps, optim.min_lr.unwrap_or(optim.lr * defaults::MIN_LR_PART)),
        }
    }

    /// How many steps lie between two measurements of the held-out loss, if it is measured.
    pub(crate) fn eval_every(&self) -> Option<usize> {
        let default = if self.source.tokens.is_some() { 0 } else { defaults::EVAL_EVERY };
        Some(self.eval_every.unwrap_or(default)).filter(|n| *n > 0)
    }

    /// Checks what no single option can tell; all that is wrong is told at once.
    ///
    /// # Errors
    /// `Kind::Config` with one detail a fault.
    pub(crate) fn check(&self) -> Result<()> {
        let mut faults = Vec::new();
        let StepsArgs { steps, batch, microbatches, .. } = self.steps;
        let OptimArgs { lr, min_lr, lr_schedule, warmup, .. } = self.optim;
        if batch % microbatches != 0 {
            faults.push(format!("--batch {batch} cannot be cut into {microbatches} equal parts (--microbatches)"));
        }
        match min_lr {
            Some(_) if lr_schedule == LrSchedule::Constant => {
                faults.push("--min-lr has no meaning with --lr-schedule constant".to_string());
            }
            Some(min) if min > lr => faults.push(format!("--min-lr {min} exceeds --lr {lr}")),
            _ => {}
        }
        if let Some(warmup) = warmup.filter(|w| *w > steps) {
            faults.push(format!("--warmup {warmup} exceeds --steps {steps}"));
        }
        if self.source.tokens.is_some() && self.eval_every.is_some_and(|n| n > 0) {
            faults.push("--eval-every needs a text; a file of --tokens has no held-out part".to_string());
        }
        if faults.is_empty() {
            return Ok(());
        }
        let error = Error::new(Kind::Config, "the options contradict each other");
        Err(faults.into_iter().fold(error, |error, fault| error.detail("option", fault)))
    }
}

/// Options of `eval`.
#[derive(Args, Clone, Debug)]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) source: DataArgs,
    /// Part of the text: all but the last tenth, the last tenth, everything
    #[arg(long, default_value = "val", value_parser = splits(), conflicts_with = "tokens", help_heading = "Data")]
    pub(crate) split: Split,
    /// Folder with config.json and model.safetensors
    #[arg(long, value_name = "DIR", default_value = defaults::MODEL, help_heading = "Model")]
    pub(crate) model: PathBuf,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Sequences that are computed at a time
    #[arg(long, value_name = "N", default_value = defaults::EVAL_BATCH, value_parser = values::count)]
    pub(crate) batch: usize,
    /// Tokens in a sequence [default: the positions of the model, at most 128]
    #[arg(long, value_name = "N", value_parser = values::count)]
    pub(crate) seq: Option<usize>,
    /// Write `logits`, f32 [B, T, V], of the first --batch rows to this safetensors file
    #[arg(long, value_name = "FILE")]
    pub(crate) logits: Option<PathBuf>,
    /// Print one JSON object and nothing else on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

impl EvalArgs {
    /// The tokens of a sequence.
    ///
    /// # Errors
    /// `Kind::Config` for more than the model has positions.
    pub(crate) fn seq(&self, config: &Gpt2Config) -> Result<usize> {
        seq(self.seq, config, defaults::SEQ_MAX)
    }
}

/// Options of `generate`.
#[derive(Args, Clone, Debug)]
pub(crate) struct GenerateArgs {
    /// Folder with config.json and model.safetensors
    #[arg(long, value_name = "DIR", default_value = defaults::MODEL, help_heading = "Model")]
    pub(crate) model: PathBuf,
    /// Text to continue, read as bytes
    #[arg(long, value_name = "TEXT", value_parser = NonEmptyStringValueParser::new())]
    pub(crate) prompt: String,
    /// Tokens to add
    #[arg(long, value_name = "N", default_value = defaults::NEW_TOKENS, value_parser = values::count)]
    pub(crate) tokens: usize,
    #[command(flatten)]
    pub(crate) sampling: SamplingArgs,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    /// Print one JSON object and nothing else on stdout
    #[arg(long)]
    pub(crate) json: bool,
}

/// How the next token is chosen.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Choice of tokens")]
pub(crate) struct SamplingArgs {
    /// Below 1 likely tokens become likelier, above 1 less so
    #[arg(long, value_name = "X", default_value = defaults::TEMPERATURE, value_parser = values::positive)]
    pub(crate) temperature: f64,
    /// Choose among the K likeliest tokens only
    #[arg(long, value_name = "K", value_parser = values::count)]
    pub(crate) top_k: Option<usize>,
    /// Choose among the likeliest tokens that together have this probability
    #[arg(long, value_name = "P", value_parser = values::fraction)]
    pub(crate) top_p: Option<f64>,
    /// Always take the likeliest token
    #[arg(long, conflicts_with_all = ["temperature", "top_k", "top_p", "seed"])]
    pub(crate) greedy: bool,
    /// Seed of the choices
    #[arg(long, value_name = "N", default_value = "0")]
    pub(crate) seed: u64,
}

/// Options of `explain`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Ranks by axis, as in dp=2,tp=2; axes are pp, dp, cp, tp, one rank each if left out
    #[arg(long, value_name = "AXES", default_value = "", hide_default_value = true, value_parser = values::mesh)]
    pub(crate) mesh: Mesh,
    /// Sequences in the global batch
    #[arg(long, value_name = "N", default_value = defaults::BATCH, value_parser = values::count)]
    pub(crate) batch: usize,
    /// Tokens in a sequence [default: the positions of the model]
    #[arg(long, value_name = "N", value_parser = values::count)]
    pub(crate) seq: Option<usize>,
    /// Numbers of weights and activations
    #[arg(long, default_value = "f32", value_parser = dtypes())]
    pub(crate) dtype: DType,
    /// Print one JSON object a line
    #[arg(long)]
    pub(crate) json: bool,
}

#[cfg(test)]
mod tests;
