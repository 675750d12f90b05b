//! Global gradient norm: every global element counts once, on any mesh.

use crate::module::param::Param;
use shardgrad_autograd::Gradients;
use shardgrad_tensor::{OverflowCheck, Rank, Result, StepInputs, Tensor};
use std::panic::Location;

/// Global gradient norm, and the control numbers that were summed in the same all-reduce.
#[derive(Clone, Debug, PartialEq)]
pub struct GradNorm {
    /// Square root of the sum of squares over all elements of all gradients.
    pub grad_norm: f64,
    /// The caller's numbers, each summed over all ranks.
    pub control: Vec<f64>,
}

/// Scalars on this rank whose sum, divided by `count`, is this rank's partial loss.
#[derive(Clone, Debug)]
pub(crate) struct PartialLoss {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) count: usize,
}

/// Computes the global norm of the gradients of some parameters in f64. A parameter that several pipeline stages
/// share counts once. Sums the numbers of `control` over all ranks in the same all-reduce over the whole mesh: every
/// rank calls this together, with as many numbers.
///
/// # Errors
/// Errors of the collective.
#[doc(alias = "clip_grad_norm_")]
#[doc(alias = "get_total_norm")]
#[doc(alias = "global_norm")]
#[track_caller]
pub fn grad_norm(rank: &Rank, params: &[Param], gradients: &Gradients, control: &[f64]) -> Result<GradNorm> {
    let inputs = StepInputs { clip: None, loss_scale: 1.0, control: control.to_vec(), rates: Vec::new() };
    let mut step = OverflowCheck::new(rank, inputs, false)?;
    step.check(counted_gradients(params, gradients), (&[], 1), Location::caller())?;
    let outcome = step.read()?;
    Ok(GradNorm { grad_norm: outcome.grad_norm, control: outcome.sums })
}

/// Yields the gradients whose elements count on this rank.
pub(super) fn counted_gradients<'a>(
    params: &'a [Param],
    gradients: &'a Gradients,
) -> impl Iterator<Item = &'a Tensor> {
    params.iter().filter(|p| p.is_primary_owner()).filter_map(|p| gradients.get(&p.key()))
}
