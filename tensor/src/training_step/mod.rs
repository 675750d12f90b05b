//! What a training step does to tensors after forward and backward: [`StepArgs`] go in, a [`StepReport`] comes out.
//!
//! 1. Each rank sums the squares of its gradients ([`grad_norm`]), and one all-reduce over all ranks sums these, the losses
//!    and the [`ControlFlags`] ([`control`]).
//! 2. The overflow check decides whether the step is skipped, and computes the factor that unscales and clips the gradients
//!    ([`overflow_check`]).
//! 3. The optimizer's kernels update the stored shards in place ([`optimizer_step`]).
//!
//! The host reads the report after the last launch, so the whole step can be captured as a graph ([`graph_capture`]).
//! [`anomaly_report`] names the op that made the first number that is not finite; [`consistency`] compares ranks, and
//! [`copies`] the copies that an update uses. [`matrix_owners`] gathers whole matrices for optimizers that need them.

pub mod control;
mod control_flags;
pub mod anomaly_report;
pub mod grad_norm;
pub mod overflow_check;
pub mod optimizer_step;
pub mod graph_capture;
pub mod consistency;
pub mod copies;
pub mod matrix_owners;

pub use control_flags::ControlFlags;

use crate::tensor::Tensor;

/// What goes into an optimizer step besides the gradients. Every rank passes equal arguments, but its own losses and the
/// numbers of its own control flags.
#[derive(Clone, Debug)]
pub struct StepArgs {
    /// Learning rate, at least 0.
    pub lr: f64,
    /// Maximum gradient norm, above 0: larger gradients are scaled down to it. `None` does not clip.
    #[doc(alias = "max_norm")]
    #[doc(alias = "clip_grad_norm_")]
    pub clip: Option<f64>,
    /// Loss scale, by which all gradients are too large: norm, clipping and update use the gradients divided by it.
    #[doc(alias = "GradScaler")]
    pub loss_scale: Option<f64>,
    /// Losses of this rank: scalars whose sum over all ranks, divided by `loss_divisor`, is the loss of the report. They
    /// cost no further all-reduce.
    pub losses: Vec<Tensor>,
    /// The divisor of each loss, at least 1: the number of microbatches, if the losses are those of microbatches.
    pub loss_divisor: usize,
    /// Named numbers to sum over all ranks; the same names on every rank.
    pub control: ControlFlags,
    /// How many updates apart the copies of gradients and parameters are compared ([`copies`]): in the first update, in the
    /// one after so many, and so on; 0 for never. Equal on every rank.
    pub copies_checked_every: u64,
}

/// The default of [`StepArgs::copies_checked_every`].
pub const COPIES_CHECKED_EVERY: u64 = 100;

impl StepArgs {
    /// Returns arguments with a learning rate only: no clipping, no loss scale, no losses, no control flags; copies are
    /// compared in the first update and every 100.
    #[must_use]
    pub const fn new(lr: f64) -> StepArgs {
        StepArgs {
            lr,
            clip: None,
            loss_scale: None,
            losses: Vec::new(),
            loss_divisor: 1,
            control: ControlFlags::new(),
            copies_checked_every: COPIES_CHECKED_EVERY,
        }
    }

    /// Returns the factor by which all gradients are too large: the loss scale, or 1.
    #[must_use]
    pub fn loss_factor(&self) -> f64 {
        self.loss_scale.unwrap_or(1.0)
    }
}

/// What comes out of an optimizer step; equal on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// The loss: the sum of [`StepArgs::losses`] over all ranks, each divided by [`StepArgs::loss_divisor`]; 0 without any.
    pub loss: f64,
    /// Global gradient norm, divided by the loss scale, before clipping.
    #[doc(alias = "total_norm")]
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Loss scale of the step, if there was one.
    pub loss_scale: Option<f64>,
    /// The factor of the gradients in the update: unscaling and clipping.
    pub grad_scale: f64,
    /// Whether the update was skipped, and parameters are as before: the gradient norm, the loss or a control number is
    /// not finite.
    #[doc(alias = "found_inf")]
    pub skipped: bool,
    /// The control flags, each number summed over all ranks.
    pub control: ControlFlags,
}
