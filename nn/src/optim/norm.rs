//! The norm of a whole gradient, every global element counted once on every mesh.

use crate::param::Param;
use shardgrad_autograd::Gradients;
use shardgrad_tensor::control::{local_sums_once, world_sum};
use shardgrad_tensor::{Rank, Result, Tensor};
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
    norm_and_loss(rank, params, (gradients, None), control)
}

/// The same with a loss, if there is one, whose sum over all ranks stands before the other numbers. The host waits for the work
/// of this rank once.
#[track_caller]
pub(crate) fn norm_and_loss(
    rank: &Rank,
    params: &[Param],
    (gradients, loss): (&Gradients, Option<&LossParts>),
    control: &[f64],
) -> Result<Norm> {
    let counted = params.iter().filter(|p| p.counts_here()).filter_map(|p| gradients.get(&p.key()));
    let (squares, parts) = local_sums_once(rank, counted, loss.map_or(&[], |loss| &loss.tensors))?;
    let mut word = vec![squares];
    word.extend(loss.map(|loss| parts.iter().fold(0.0, |sum, part| sum + part / loss.count as f64)));
    word.extend_from_slice(control);
    let mut sums = world_sum(rank, &word, Location::caller())?;
    Ok(Norm { grad_norm: sums.remove(0).sqrt(), control: sums })
}
