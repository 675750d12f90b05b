//! The options of `train`.

use super::{CheckpointArgs, DataArgs, ModelArgs, PipelineArgs, RunArgs, StoredArgs, defaults, seq, values};
use clap::{Args, ValueEnum};
use shardgrad::dist::Mesh;
use shardgrad::kernels::DType;
use shardgrad::nn::{Cast, ModelConfig, Precision, Schedule};
use shardgrad::{Error, Kind, Result};
use std::path::PathBuf;

// Variants bear no doc comment: clap would take it for help and print each option over four lines.

/// How the learning rate goes on after the warmup.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LrSchedule {
    Cosine,
    Constant,
}

impl LrSchedule {
    /// The word for it on the command line.
    fn name(self) -> &'static str {
        match self {
            LrSchedule::Cosine => "cosine",
            LrSchedule::Constant => "constant",
        }
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
    stored: StoredArgs,
    #[command(flatten)]
    pub(crate) steps: StepsArgs,
    #[command(flatten)]
    pub(crate) pipeline: PipelineArgs,
    #[command(flatten)]
    pub(crate) optim: OptimArgs,
    #[command(flatten)]
    pub(crate) checkpoints: CheckpointArgs,
    /// Folder for metrics.jsonl, loss.svg, model/ and checkpoints; what is there is replaced, but no checkpoint
    #[arg(long, value_name = "DIR", default_value = defaults::OUT, help_heading = "Output")]
    pub(crate) out: PathBuf,
    /// Largest file of weights, as in 500MB or 5GB; a model of more has several and an index
    #[arg(
        long, value_name = "BYTES", default_value = defaults::SHARD_SIZE, help_heading = "Output",
        value_parser = values::bytes
    )]
    pub(crate) shard_size: values::Bytes,
    /// Numbers of the saved weights [default: those of the stored ones]
    #[arg(long, value_name = "NAME", value_parser = super::dtypes(), help_heading = "Output")]
    pub(crate) save_dtype: Option<DType>,
    /// Steps between measurements of the loss on the held-out tenth of the text; 0 for none [default: 100]
    #[arg(long, value_name = "N", help_heading = "Output", value_parser = values::count_or_none)]
    eval_every: Option<usize>,
    /// Steps between comparisons of what the ranks hold and were told; 0 for none but those at the start and before saving
    #[arg(long, value_name = "N", help_heading = "Output", value_parser = values::count_or_none, default_value = defaults::CHECK_EVERY)]
    pub(crate) check_every: usize,
    /// Write what each rank did and when, for chrome://tracing or Perfetto
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub(crate) trace: Option<PathBuf>,
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
    /// Seed of weights, data order and dropout
    #[arg(long, value_name = "N", default_value = "0", value_parser = values::seed)]
    pub(crate) seed: u64,
}

/// How to update.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Optimizer (AdamW)")]
pub(crate) struct OptimArgs {
    /// Learning rate after the warmup
    #[arg(long, value_name = "RATE", default_value = defaults::LR, value_parser = values::positive)]
    pub(crate) lr: f64,
    /// Learning rate where the fall would end, in the step after the last [default: a tenth of --lr]
    #[arg(long, value_name = "RATE", value_parser = values::not_negative)]
    min_lr: Option<f64>,
    /// After the warmup the rate falls along half a cosine towards --min-lr, or stays
    #[arg(long, value_name = "NAME", value_enum, default_value_t = LrSchedule::Cosine)]
    lr_schedule: LrSchedule,
    /// Steps of linear rise to --lr [default: a tenth of --steps, at most 100; 0 if constant]
    #[arg(long, value_name = "N", value_parser = values::count_or_none)]
    warmup: Option<usize>,
    /// Pull towards zero of weights with two or more dims, as a part of the learning rate
    #[arg(
        long, value_name = "X", default_value = defaults::WEIGHT_DECAY,
        value_parser = values::not_negative
    )]
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
    #[arg(
        long, value_name = "NORM", default_value = defaults::GRAD_CLIP,
        value_parser = values::not_negative
    )]
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
    pub(crate) fn seq(&self, config: &ModelConfig) -> Result<usize> {
        seq(self.steps.seq, config, defaults::SEQ_MAX)
    }

    /// With what is computed and what is stored.
    pub(crate) fn precision(&self) -> Precision {
        self.stored.precision(self.run.dtype)
    }

    /// The mesh of the run.
    pub(crate) fn mesh(&self) -> Mesh {
        // Where no mesh is asked for there are no stages, and so no pieces but those that are asked for.
        self.run.train_mesh(self.steps.batch / self.pipeline.microbatches(&Mesh::single(), self.steps.batch))
    }

    /// How many pieces the batch is cut into.
    pub(crate) fn microbatches(&self) -> usize {
        self.pipeline.microbatches(&self.mesh(), self.steps.batch)
    }

    /// The steps of the rise of the learning rate, and, where it falls after them, the rate at the end.
    fn rise_and_fall(&self) -> (usize, Option<f64>) {
        let OptimArgs { lr, min_lr, lr_schedule, warmup, .. } = self.optim;
        match lr_schedule {
            LrSchedule::Constant => (warmup.unwrap_or(0), None),
            LrSchedule::Cosine => (
                warmup.unwrap_or(defaults::WARMUP_MAX.min(self.steps.steps / 10)),
                Some(min_lr.unwrap_or(lr * defaults::MIN_LR_PART)),
            ),
        }
    }

    /// The learning rate of each step.
    pub(crate) fn schedule(&self) -> Schedule {
        let (rise, fall) = self.rise_and_fall();
        let rates = Schedule::constant(self.optim.lr).warmup(rise);
        match fall {
            Some(min) => rates.cosine(self.steps.steps, min),
            None => rates,
        }
    }

    /// The options that decide the numbers of a run, model and data apart: those that make it another run, and those that people
    /// change on purpose when it goes on.
    pub(crate) fn told(&self, seq: usize) -> [Vec<(&'static str, String)>; 2] {
        let StepsArgs { steps, batch, seed, .. } = self.steps;
        let OptimArgs { lr, lr_schedule, weight_decay, beta1, beta2, eps, grad_clip, .. } = self.optim;
        let Precision { dtype, param_dtype } = self.precision();
        let (rise, fall) = self.rise_and_fall();
        let mesh = self.mesh();
        let axes: Vec<String> = mesh.axes().map(|a| format!("{}={}", mesh.name(a), mesh.size(a))).collect();
        let fixed = vec![
            ("seed", seed.to_string()),
            ("batch", batch.to_string()),
            ("seq", seq.to_string()),
            ("no-shuffle", self.no_shuffle.to_string()),
            ("param-dtype", param_dtype.to_string()),
        ];
        let free = vec![
            ("steps", steps.to_string()),
            ("lr", lr.to_string()),
            ("lr-schedule", lr_schedule.name().to_string()),
            ("min-lr", fall.map_or("none".to_string(), |min| min.to_string())),
            ("warmup", rise.to_string()),
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
        [fixed, free]
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
        let StepsArgs { steps, batch, .. } = self.steps;
        let OptimArgs { lr, min_lr, lr_schedule, warmup, .. } = self.optim;
        faults.extend(self.pipeline.faults(&self.run.mesh, batch));
        faults.extend(self.stored.fault(self.run.dtype));
        faults.extend(self.checkpoints.fault());
        if self.run.cast() == Cast::Rounded && self.model.dir().is_none() {
            faults.push(
                "--cast is about weights of a folder (--model); those of a preset are fresh".to_string(),
            );
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
