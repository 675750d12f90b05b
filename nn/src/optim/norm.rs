//! The norm of a whole gradient, every global element counted once on every mesh.

use crate::param::Param;
use shardgrad_autograd::Gradients;
use shardgrad_tensor::control::{local_sum_squares_once, world_sum};
use shardgrad_tensor::{Rank, Result};
use std::panic::Location;

/// The norm, and what else was summed over the world with it.
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    /// sqrt of the sum of squares over all elements of all gradients.
    pub grad_norm: f64,
    /// The caller's numbers, each summed over all ranks.
    pub control: Vec<f64>,
}

/// The global norm of the gradients of some parameters, in f64; one that several stages of a pipeline share counts once. The caller's numbers ride along: one all-reduce over
/// the whole mesh in all, so every rank calls this together, with as many numbers.
///
/// # Errors
/// What the collective reports.
#[track_caller]
pub fn grad_norm(rank: &Rank, params: &[Param], gradients: &Gradients, control: &[f64]) -> Result<Norm> {
    let mut word = Vec::with_capacity(1 + control.len());
    let counted = params.iter().filter(|p| p.counts_here()).filter_map(|p| gradients.get(&p.key()));
    word.push(local_sum_squares_once(rank, counted)?);
    word.extend_from_slice(control);
    let mut sums = world_sum(rank, &word, Location::caller())?;
    Ok(Norm { grad_norm: sums.remove(0).sqrt(), control: sums })
}
