//! The norm of a whole gradient, every global element counted once on every mesh.

use crate::param::Param;
use shardgrad_autograd::Gradients;
use shardgrad_tensor::{GatedStep, Rank, Result, StepTold, Tensor};
use std::panic::Location;

/// The norm, and what else was summed over the world with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    /// sqrt of the sum of squares over all elements of all gradients.
    pub grad_norm: f64,
    /// The caller's numbers, each summed over all ranks.
    pub control: Vec<f64>,
}

/// Scalars on this rank whose sum, divided by a count, is its part of a loss.
#[derive(Clone, Debug)]
pub(crate) struct LossParts {
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) count: usize,
}

/// The global norm of the gradients of some parameters, in f64; one that several stages of a pipeline share counts once. The
/// caller's numbers ride along: one all-reduce over the whole mesh in all, so every rank calls this together, with as many numbers.
///
/// # Errors
/// What the collective reports.
#[track_caller]
pub fn grad_norm(rank: &Rank, params: &[Param], gradients: &Gradients, control: &[f64]) -> Result<Norm> {
    let told = StepTold { clip: None, loss_scale: 1.0, control: control.to_vec(), rates: Vec::new() };
    let mut step = GatedStep::new(rank, told, false)?;
    step.find(counted(params, gradients), (&[], 1), Location::caller())?;
    let found = step.read()?;
    Ok(Norm { grad_norm: found.grad_norm, control: found.sums })
}

/// The gradients whose elements count on this rank.
pub(super) fn counted<'a>(params: &'a [Param], gradients: &'a Gradients) -> impl Iterator<Item = &'a Tensor> {
    params.iter().filter(|p| p.counts_here()).filter_map(|p| gradients.get(&p.key()))
}
