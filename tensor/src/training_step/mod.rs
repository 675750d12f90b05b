//! What a training step does to tensors after forward and backward: [`StepArgs`] go in, a [`StepReport`] comes out.
//!
//! 1. Each rank sums the squares of its gradients ([`grad_norm`]), and one all-reduce over all ranks sums these, the losses,
//!    their counts, the [`ControlFlags`] ([`control`]) and the [`Auxiliary`] outputs.
//! 2. The overflow check decides whether the step is skipped, and computes the factor that divides the gradients by loss scale
//!    and count, and clips them ([`overflow_check`]).
//! 3. The optimizer's kernels update the stored shards in place ([`optimizer_step`]).
//!
//! The host reads the report after the last launch, so the whole step can be captured as a graph ([`graph_capture`]).
//! [`anomaly_report`] names the op that made the first number that is not finite; [`consistency`] compares ranks, and
//! [`copies`] the copies that an update uses. [`matrix_owners`] gathers whole matrices for optimizers that need them. [`state_hash`]
//! hashes weights and optimizer state, on any mesh alike; [`canonical_sum`] sums gradients over ranks with bits that do not depend on
//! their number.

pub mod control;
mod control_flags;
mod auxiliary;
pub mod anomaly_report;
pub mod grad_norm;
pub mod overflow_check;
pub mod optimizer_step;
pub mod graph_capture;
pub mod consistency;
pub mod copies;
pub mod matrix_owners;
pub mod state_hash;
pub mod canonical_sum;

pub use auxiliary::{Auxiliary, AuxiliaryDivisor, AuxiliaryVector};
pub use control_flags::ControlFlags;

use crate::tensor::Tensor;
use shardgrad_dist::{Error, Kind};
use std::panic::Location;

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
    /// Losses of this rank: scalars whose sum over all ranks, divided by `loss_divisor` and the count, is the loss of the
    /// report. They cost no further all-reduce.
    pub losses: Vec<Tensor>,
    /// The divisor of each loss, at least 1: the number of microbatches, if the losses are those of microbatches.
    pub loss_divisor: usize,
    /// Counts of this rank, if the losses are sums: scalars whose sum over all ranks divides loss and gradients, before norm and
    /// clipping. A count of 0 divides as 1. Every rank passes `Some`, or every rank `None`; a rank without scalars an empty list.
    #[doc(alias = "num_items_in_batch")]
    pub counts: Option<Vec<Tensor>>,
    /// Numbers to report with the loss; the same names on every rank.
    pub auxiliary: Vec<Auxiliary>,
    /// Vectors of numbers to report with the loss; the same names and lengths on every rank.
    pub auxiliary_vectors: Vec<AuxiliaryVector>,
    /// Named numbers to sum over all ranks; the same names on every rank.
    pub control: ControlFlags,
    /// How many updates apart the copies of gradients and parameters are compared ([`copies`]): in the first update, in the
    /// one after so many, and so on; 0 for never. Equal on every rank.
    pub copies_checked_every: u64,
    /// The leaves into which each dim of a gradient is cut, for a gradient norm whose bits do not depend on the mesh
    /// ([`canonical_sum_squares`](grad_norm::canonical_sum_squares)); `None` for a norm in the order of the ranks. Equal on every rank.
    pub norm_leaves: Option<usize>,
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
            counts: None,
            auxiliary: Vec::new(),
            auxiliary_vectors: Vec::new(),
            control: ControlFlags::new(),
            copies_checked_every: COPIES_CHECKED_EVERY,
            norm_leaves: None,
        }
    }

    /// Returns the factor of the loss in all gradients: the loss scale, or 1.
    #[must_use]
    pub fn loss_factor(&self) -> f64 {
        self.loss_scale.unwrap_or(1.0)
    }
}

/// What comes out of an optimizer step; equal on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct StepReport {
    /// The loss: the sum of [`StepArgs::losses`] over all ranks, each divided by [`StepArgs::loss_divisor`], divided by the count.
    /// Without any losses it is 0, or NaN in a training loop without a trainer: the loss of the model is unknown then.
    pub loss: f64,
    /// The sum of [`StepArgs::counts`] over all ranks, if there are counts.
    pub count: Option<f64>,
    /// Global gradient norm, divided by loss scale and count, before clipping.
    #[doc(alias = "total_norm")]
    pub grad_norm: f64,
    /// Learning rate of the step.
    pub lr: f64,
    /// Loss scale of the step, if there was one.
    pub loss_scale: Option<f64>,
    /// The factor of the gradients in the update: 1 over loss scale and count, and clipping.
    pub grad_scale: f64,
    /// Whether the update was skipped, and parameters are as before: the gradient norm, the loss or a control number is
    /// not finite.
    #[doc(alias = "found_inf")]
    pub skipped: bool,
    /// The control flags, each number summed over all ranks.
    pub control: ControlFlags,
    /// The auxiliary outputs with their names.
    pub auxiliary: Vec<(String, f64)>,
    /// The auxiliary vectors with their names.
    pub auxiliary_vectors: Vec<(String, Vec<f64>)>,
}

impl StepReport {
    /// Returns the auxiliary output of a name.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if no auxiliary output has the name.
    #[track_caller]
    #[must_use]
    pub fn auxiliary(&self, name: &str) -> f64 {
        let found = self.auxiliary.iter().find(|(known, _)| known == name);
        found.map_or_else(|| self.unknown(name).at(Location::caller()).raise(), |(_, value)| *value)
    }

    /// Returns the auxiliary vector of a name.
    ///
    /// # Panics
    /// Unwinds with `Kind::Config` if no auxiliary vector has the name.
    #[track_caller]
    #[must_use]
    pub fn auxiliary_vector(&self, name: &str) -> &[f64] {
        let found = self.auxiliary_vectors.iter().find(|(known, _)| known == name);
        found.map_or_else(|| self.unknown(name).at(Location::caller()).raise(), |(_, values)| values)
    }

    fn unknown(&self, name: &str) -> Error {
        let known = self.auxiliary.iter().map(|(name, _)| name.as_str());
        let known: Vec<&str> =
            known.chain(self.auxiliary_vectors.iter().map(|(name, _)| name.as_str())).collect();
        let text = format!("the step has no auxiliary output `{name}`");
        Error::new(Kind::Config, text)
            .detail("known", known.join(", "))
            .detail("help", "the loss states auxiliary outputs: Loss::mean(loss).also(name, value)")
    }
}
