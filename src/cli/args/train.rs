//! Options of `train`.

use super::{
    CheckpointArgs, DataArgs, DeterministicArgs, ModelArgs, ParallelismArgs, PipelineArgs, RunArgs,
    StoredArgs, defaults, seq, values,
};
use crate::cli::reproducibility::RunFacts;
use clap::{Args, ValueEnum};
use shardgrad::dist::Mesh;
use shardgrad::kernels::DType;
use shardgrad::nn::{CastRule, Deterministic, LrScheduler, ModelConfig, Precision};
use shardgrad::{Error, Kind, Result};
use std::path::PathBuf;

// The variants have no doc comments: clap would print them as help, over four lines.

/// Learning-rate decay after the warmup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LrDecay {
    Cosine,
    Constant,
}

impl LrDecay {
    /// Returns the name on the command line.
    fn name(self) -> &'static str {
        match self {
            LrDecay::Cosine => "cosine",
            LrDecay::Constant => "constant",
        }
    }
}

/// Options of `train`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TrainArgs {
    #[command(flatten)]
    pub(crate) source: DataArgs,
    /// Read sequences in file order instead of sampling them at random
    #[arg(long, help_heading = "Data")]
    pub(crate) no_shuffle: bool,
    #[command(flatten)]
    pub(crate) model: ModelArgs,
    /// Dropout probability [default: as in config.json; 0 for presets]
    #[arg(long, value_name = "P", help_heading = "Model", value_parser = values::below_one)]
    pub(crate) dropout: Option<f64>,
    /// Balance experts without a loss: after each step a bias of each expert's selection moves by RATE, as in DeepSeek-V3 (0.001)
    /// [default: as in config.json; no bias for presets]
    #[arg(long, value_name = "RATE", help_heading = "Model", value_parser = values::positive)]
    pub(crate) router_bias_update_rate: Option<f64>,
    #[command(flatten)]
    pub(crate) run: RunArgs,
    #[command(flatten)]
    stored: StoredArgs,
    #[command(flatten)]
    pub(crate) steps: StepsArgs,
    #[command(flatten)]
    pub(crate) parallelism: ParallelismArgs,
    #[command(flatten)]
    pub(crate) pipeline: PipelineArgs,
    #[command(flatten)]
    deterministic: DeterministicArgs,
    #[command(flatten)]
    pub(crate) optim: OptimArgs,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointArgs,
    /// Run folder for metrics.jsonl, TensorBoard event files, loss.svg, model/ and checkpoints; files of an earlier run are replaced, except checkpoints
    #[arg(long, value_name = "DIR", default_value = defaults::OUT, help_heading = "Output")]
    pub(crate) out: PathBuf,
    /// Maximum size of a safetensors file, as in 500MB or 5GB (max_shard_size); larger models are saved as several files and an index
    #[arg(
        long, value_name = "BYTES", default_value = defaults::SHARD_SIZE, help_heading = "Output",
        value_parser = values::bytes
    )]
    pub(crate) shard_size: values::Bytes,
    /// Dtype of the saved weights [default: --param-dtype]
    #[arg(long, value_name = "NAME", value_parser = super::dtypes(), help_heading = "Output")]
    pub(crate) save_dtype: Option<DType>,
    /// Evaluate the validation loss (last 10% of the text) every N steps and after the last; 0 disables it [default: 100; 0 with
    /// --tokens]
    #[arg(long, value_name = "N", help_heading = "Output", value_parser = values::count_or_none)]
    eval_every: Option<usize>,
    /// Check every N steps that weights, optimizer state and options agree across ranks; 0: only before the first step and before saving
    #[arg(long, value_name = "N", help_heading = "Output", value_parser = values::count_or_none, default_value = defaults::CHECK_EVERY)]
    pub(crate) check_every: usize,
    /// Write the hash of weights and optimizer state, the same on every mesh for equal bits, to metrics.jsonl every N steps and after the last [default: none]
    #[arg(long, value_name = "N", help_heading = "Output", value_parser = values::count)]
    pub(crate) state_hash: Option<usize>,
    /// Write a Chrome trace of the passes and transfers of each rank, for chrome://tracing or Perfetto
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) trace: Option<PathBuf>,
    /// Print one JSON object per step on stdout and nothing else
    #[arg(long, help_heading = "Output")]
    pub(crate) json: bool,
}

/// Training length and batch.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Steps")]
pub(crate) struct StepsArgs {
    /// Total number of optimizer steps, those of a resumed run included
    #[arg(long, value_name = "N", default_value = defaults::STEPS, value_parser = values::count)]
    pub(crate) steps: usize,
    /// Global batch size in sequences, over all data-parallel ranks and microbatches
    #[arg(long, value_name = "N", default_value = defaults::BATCH, value_parser = values::count)]
    pub(crate) batch: usize,
    /// Sequence length in tokens [default: the positions of the model, at most 128]
    #[arg(long, value_name = "N", value_parser = values::count)]
    pub(crate) seq: Option<usize>,
    /// Random seed of weight initialization, data order and dropout
    #[arg(long, value_name = "N", default_value = "0", value_parser = values::seed)]
    pub(crate) seed: u64,
}

/// Optimizer options.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Optimizer (AdamW)")]
pub(crate) struct OptimArgs {
    /// Peak learning rate, reached after --warmup
    #[arg(long, value_name = "RATE", default_value = defaults::LR, value_parser = values::positive)]
    pub(crate) lr: f64,
    /// Learning rate at the end of the cosine decay, one step after the last [default: 0.1 * --lr]
    #[arg(long, value_name = "RATE", value_parser = values::not_negative)]
    min_lr: Option<f64>,
    /// Learning-rate schedule after --warmup: decay along a cosine to --min-lr, or constant
    #[arg(long, value_name = "NAME", value_enum, default_value_t = LrDecay::Cosine)]
    lr_schedule: LrDecay,
    /// Steps of linear learning-rate warmup to --lr [default: 10% of --steps, at most 100; 0 with --lr-schedule constant]
    #[arg(long, value_name = "N", value_parser = values::count_or_none)]
    warmup: Option<usize>,
    /// Decoupled weight decay (AdamW), applied to parameters with two or more dims
    #[arg(
        long, value_name = "X", default_value = defaults::WEIGHT_DECAY,
        value_parser = values::not_negative
    )]
    pub(crate) weight_decay: f64,
    /// Decay rate of the first-moment estimate
    #[arg(long, value_name = "X", default_value = defaults::BETA1, value_parser = values::below_one)]
    pub(crate) beta1: f64,
    /// Decay rate of the second-moment estimate
    #[arg(long, value_name = "X", default_value = defaults::BETA2, value_parser = values::below_one)]
    pub(crate) beta2: f64,
    /// Term added to the denominator for numerical stability
    #[arg(long, value_name = "X", default_value = defaults::EPS, value_parser = values::positive)]
    pub(crate) eps: f64,
    /// Maximum global gradient norm (gradient clipping); 0 disables clipping
    #[arg(
        long, value_name = "NORM", default_value = defaults::GRAD_CLIP,
        value_parser = values::not_negative
    )]
    grad_clip: f64,
}

impl OptimArgs {
    /// Returns the maximum gradient norm, if gradients are clipped.
    pub(crate) fn clip(&self) -> Option<f64> {
        Some(self.grad_clip).filter(|clip| *clip > 0.0)
    }
}

impl TrainArgs {
    /// Returns the sequence length.
    ///
    /// # Errors
    /// `Kind::Config` if `--seq` exceeds the positions of the model.
    pub(crate) fn seq(&self, config: &ModelConfig) -> Result<usize> {
        seq(self.steps.seq, config, defaults::SEQ_MAX)
    }

    /// Returns the compute and parameter dtypes.
    pub(crate) fn precision(&self) -> Precision {
        self.stored.precision(self.run.dtype)
    }

    /// Returns the mesh of the run.
    pub(crate) fn mesh(&self) -> Mesh {
        // Without --mesh there are no stages, so the number of microbatches is that of --microbatches or 1.
        self.run.train_mesh(self.steps.batch / self.pipeline.microbatches(&Mesh::single(), self.steps.batch))
    }

    /// Returns the number of microbatches per step.
    pub(crate) fn microbatches(&self) -> usize {
        self.pipeline.microbatches(&self.mesh(), self.steps.batch)
    }

    /// Returns whether sums over NCCL have the bits of those over other transports.
    pub(crate) fn has_tree_sums(&self) -> bool {
        self.deterministic.has_tree_sums()
    }

    /// Returns what decides the levels of reproducibility of the run; `are_processes` states whether its ranks are.
    pub(crate) fn run_facts(&self, are_processes: bool) -> RunFacts {
        let is_on_host = self.run.is_on_host();
        RunFacts {
            deterministic: self.promise(),
            is_on_host,
            // One process calls no collective.
            is_over_nccl: are_processes
                && !is_on_host
                && cfg!(feature = "nccl")
                && self.mesh().num_ranks() > 1,
            has_tree_sums: self.has_tree_sums(),
            dtype: self.run.dtype,
            precision: self.run.matmul_precision,
        }
    }

    /// Returns which changes of the run leave its bits as they are.
    pub(crate) fn promise(&self) -> Deterministic {
        self.deterministic.promise(self.steps.batch)
    }

    /// Returns the warmup steps and, with decay, the final learning rate.
    fn warmup_and_min_lr(&self) -> (usize, Option<f64>) {
        let OptimArgs { lr, min_lr, lr_schedule, warmup, .. } = self.optim;
        match lr_schedule {
            LrDecay::Constant => (warmup.unwrap_or(0), None),
            LrDecay::Cosine => (
                warmup.unwrap_or(defaults::WARMUP_MAX.min(self.steps.steps / 10)),
                Some(min_lr.unwrap_or(lr * defaults::MIN_LR_PART)),
            ),
        }
    }

    /// Returns the learning-rate schedule.
    pub(crate) fn schedule(&self) -> LrScheduler {
        let (warmup_steps, min_lr_of_decay) = self.warmup_and_min_lr();
        let rates = LrScheduler::constant(self.optim.lr).warmup(warmup_steps);
        match min_lr_of_decay {
            Some(min) => rates.cosine(self.steps.steps, min),
            None => rates,
        }
    }

    /// Returns the options that decide the results of a run (besides model and data), as recorded in checkpoints: those that must be
    /// the same on resume, and those that may change on resume and are then reported.
    pub(crate) fn recorded_options(&self, seq: usize) -> [Vec<(&'static str, String)>; 2] {
        let StepsArgs { steps, batch, seed, .. } = self.steps;
        let OptimArgs { lr, lr_schedule, weight_decay, beta1, beta2, eps, grad_clip, .. } = self.optim;
        let Precision { dtype, param_dtype } = self.precision();
        let (warmup_steps, min_lr_of_decay) = self.warmup_and_min_lr();
        let mesh = self.mesh();
        let axes: Vec<String> = mesh.axes().map(|a| format!("{}={}", mesh.name(a), mesh.size(a))).collect();
        let fixed = vec![
            ("seed", seed.to_string()),
            ("batch", batch.to_string()),
            ("seq", seq.to_string()),
            ("no-shuffle", self.no_shuffle.to_string()),
            ("param-dtype", param_dtype.to_string()),
        ];
        let mut free = vec![
            ("steps", steps.to_string()),
            ("lr", lr.to_string()),
            ("lr-schedule", lr_schedule.name().to_string()),
            ("min-lr", min_lr_of_decay.map_or("none".to_string(), |min| min.to_string())),
            ("warmup", warmup_steps.to_string()),
            ("weight-decay", weight_decay.to_string()),
            ("beta1", beta1.to_string()),
            ("beta2", beta2.to_string()),
            ("eps", eps.to_string()),
            ("grad-clip", grad_clip.to_string()),
            ("dtype", dtype.to_string()),
            ("matmul-precision", self.run.matmul_precision.to_string()),
            ("device", self.run.device.to_string()),
            ("mesh", axes.join(",")),
            ("microbatches", self.microbatches().to_string()),
        ];
        free.extend(self.parallelism.zero().map(|stage| ("zero", stage.to_string())));
        free.extend(self.parallelism.plan_file().map(|file| ("plan", file.display().to_string())));
        [fixed, free]
    }

    /// Returns the interval of validation in steps, if it is enabled.
    pub(crate) fn eval_every(&self) -> Option<usize> {
        let default = if self.source.tokens.is_some() { 0 } else { defaults::EVAL_EVERY };
        Some(self.eval_every.unwrap_or(default)).filter(|n| *n > 0)
    }

    /// Checks options against each other and reports all contradictions at once.
    ///
    /// # Errors
    /// `Kind::Config` with one detail per contradiction.
    pub(crate) fn check(&self) -> Result<()> {
        let mut faults = Vec::new();
        let StepsArgs { steps, batch, .. } = self.steps;
        let OptimArgs { lr, min_lr, lr_schedule, warmup, .. } = self.optim;
        faults.extend(self.pipeline.faults(&self.run.mesh, batch));
        faults.extend(self.parallelism.fault(&self.mesh()));
        faults.extend(self.stored.fault(self.run.dtype));
        faults.extend(self.checkpoints.fault());
        faults.extend(self.deterministic.fault());
        if self.run.cast() == CastRule::Round && self.model.dir().is_none() {
            faults.push(
                "--cast applies to weights loaded with --model; a preset is newly initialized".to_string(),
            );
        }
        match min_lr {
            Some(_) if lr_schedule == LrDecay::Constant => {
                faults.push("--min-lr has no effect with --lr-schedule constant".to_string());
            }
            Some(min) if min > lr => faults.push(format!("--min-lr {min} exceeds --lr {lr}")),
            _ => {}
        }
        if let Some(warmup) = warmup.filter(|w| *w > steps) {
            faults.push(format!("--warmup {warmup} exceeds --steps {steps}"));
        }
        if self.source.tokens.is_some() && self.eval_every.is_some_and(|n| n > 0) {
            faults.push(
                "--eval-every needs text (--data); a file of --tokens has no validation split".to_string(),
            );
        }
        if faults.is_empty() {
            return Ok(());
        }
        let error = Error::new(Kind::Config, "some options contradict each other");
        Err(faults.into_iter().fold(error, |error, fault| error.detail("option", fault)))
    }
}
