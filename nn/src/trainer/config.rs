//! Configuration of a trainer.

use super::row_leaves::Deterministic;
use crate::module::precision::Precision;
use crate::optim::{LrScheduler, check_clip};
use shardgrad_tensor::training_step::COPIES_CHECKED_EVERY;
use shardgrad_tensor::{DType, Error, Kind, Result};

/// Configuration of a [`Trainer`](super::Trainer): besides model, data and optimizer, all that decides the numbers of a run.
#[doc(alias = "TrainingArguments")]
#[derive(Clone, Debug)]
pub struct TrainerConfig {
    /// Rows (samples) of the global batch.
    pub rows: usize,
    /// Number of microbatches into which the batch is cut (gradient accumulation steps); it must divide `rows`.
    #[doc(alias = "gradient accumulation")]
    #[doc(alias = "gradient_accumulation_steps")]
    pub microbatches: usize,
    /// Seed of the initial parameter values and of random ops such as dropout.
    pub seed: u64,
    /// Compute dtype. With f16 the loss is scaled ([`LossScale`](crate::LossScale)).
    #[doc(alias = "amp")]
    #[doc(alias = "mixed precision")]
    #[doc(alias = "autocast")]
    pub dtype: DType,
    /// Dtype of the stored parameters; `None` selects the accumulator dtype of `dtype`: f32 for bf16 and f16.
    pub param_dtype: Option<DType>,
    /// Learning-rate schedule; `None` uses the optimizer's constant rate.
    pub lr_scheduler: Option<LrScheduler>,
    /// Largest global gradient norm, above 0: larger gradients are scaled down to this norm. `None` does not clip.
    #[doc(alias = "max_grad_norm")]
    #[doc(alias = "clip_by_global_norm")]
    #[doc(alias = "clip_grad_norm_")]
    pub clip: Option<f64>,
    /// Which changes of a run leave its bits as they are.
    #[doc(alias = "use_deterministic_algorithms")]
    pub deterministic: Deterministic,
    /// How many updates apart the copies of gradients and parameters are compared ([`StepArgs`](shardgrad_tensor::StepArgs)); 0 for
    /// never.
    pub copies_checked_every: u64,
    /// The bytes of memory that a rank is assumed to have, by which a pipeline with stage 3 of ZeRO gathers parameters once per step or by
    /// microbatch ([`Plan::gathered_bytes_max`](crate::Plan::gathered_bytes_max)); no value of a run depends on it. `None` for what the
    /// device has left when the trainer is constructed, divided by the ranks that share it; in a dry run for any number.
    pub rank_memory_bytes: Option<u64>,
    /// Whether ranks compare, before the first step and again when other parameters are frozen, the order in which they issue the
    /// collectives and messages of a step, over all groups. An order that deadlocks is refused with the calls and their lines
    /// ([`Rank::check_issue_order`](shardgrad_tensor::Rank::check_issue_order)), before NCCL hangs in it. On by default; without effect on
    /// a mesh with one axis of several ranks and no pipeline, where ranks compare calls as they make them.
    ///
    /// The calls are those of the forward and backward passes, which run once more on the null back end, without memory and
    /// arithmetic: `load_batch` and the loss are called with a [dry twin](shardgrad_tensor::Rank::dry_twin) of the rank. Not proved are
    /// the calls of the update (one all-reduce over the world, then those of the optimizer) and of evaluations, and passes that cannot
    /// run so: a loss that reads values, or a model with hooks. Set it to false for a loss or a module that keeps tensors from one call
    /// for the next: those of the twin have no values.
    #[doc(alias = "NCCL deadlock")]
    pub proves_issue_order: bool,
    /// Whether the first step is captured as a graph and later steps replay the graph, with the same bits.
    ///
    /// Capture needs a world of one rank, no pipeline, and a device that supports graph capture;
    /// [`Trainer::capture_refusal`](super::Trainer::capture_refusal) reports why a trainer does not capture. A replayed step enqueues all work from
    /// forward to update at once, and the host waits once, at the end.
    ///
    /// - Values that change from step to step must come in through `load_batch`, as on a pipeline ([`Trainer::new`](super::Trainer::new)), or be
    ///   learning rates or control flags. The loss closure runs only while its pass is captured: what the closure
    ///   computes outside of ops, and tensors that the closure reads which are neither arguments nor parameters, keep
    ///   the values of that step.
    /// - The step is captured again when arguments, parameters or optimizer state are at other addresses, or when the
    ///   loss scale or the set of frozen parameters changes.
    /// - A loss that draws random numbers of the step, or reads from the device to the host, runs in each step
    ///   without a graph; so does an update that does ([`Optimizer::apply_update`](crate::optim::Optimizer::apply_update)).
    /// - A captured step keeps its memory until [`Trainer::partial_loss`](super::Trainer::partial_loss) is called. The next step overwrites the
    ///   losses and gradients of a captured step.
    #[doc(alias = "torch.cuda.graph")]
    #[doc(alias = "CUDA graph")]
    pub capture: bool,
}

impl TrainerConfig {
    /// Returns the defaults for a batch of `rows` rows: one microbatch, seed 0, f32, the optimizer's own learning
    /// rate, no clipping, no graph capture; copies are compared in the first update and every 100.
    #[must_use]
    pub fn new(rows: usize) -> TrainerConfig {
        let (dtype, param_dtype) = (DType::F32, None);
        let (lr_scheduler, clip, capture) = (None, None, false);
        let (deterministic, copies_checked_every) = (Deterministic::Run, COPIES_CHECKED_EVERY);
        TrainerConfig {
            rows,
            microbatches: 1,
            seed: 0,
            dtype,
            param_dtype,
            lr_scheduler,
            clip,
            deterministic,
            copies_checked_every,
            rank_memory_bytes: None,
            proves_issue_order: true,
            capture,
        }
    }

    /// Returns the compute dtype and the dtype of the stored parameters.
    #[must_use]
    pub fn precision(&self) -> Precision {
        let param_dtype = self.param_dtype.unwrap_or(Precision::mixed(self.dtype).param_dtype);
        Precision { dtype: self.dtype, param_dtype }
    }
}

/// Refuses a configuration that no trainer can run.
pub(super) fn check_config(config: &TrainerConfig) -> Result<()> {
    let TrainerConfig { rows, microbatches, clip, .. } = *config;
    check_clip(clip)?;
    if rows == 0 || microbatches == 0 || !rows.is_multiple_of(microbatches) {
        let text = format!("{microbatches} microbatches do not divide a batch of {rows} rows");
        let legal = (1..=rows.isqrt()).filter(|m| rows.is_multiple_of(*m)).flat_map(|m| [m, rows / m]);
        let nearest = legal.min_by_key(|m| (m.abs_diff(microbatches), *m)).unwrap_or(1);
        return Err(Error::new(Kind::Config, text).detail("help", format!("use {nearest} microbatches")));
    }
    Ok(())
}
