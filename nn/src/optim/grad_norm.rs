//! Global gradient norm: every global element counts once, on any mesh.

use crate::module::param::Param;
use shardgrad_autograd::Gradients;
use shardgrad_tensor::{OverflowCheck, Rank, Result, StepArgs, Tensor};
use std::panic::Location;

/// Computes the global norm of the gradients of some parameters in f64: the square root of the sum of squares over all
/// elements of all gradients. A parameter that several pipeline stages share counts once. One all-reduce over the whole
/// mesh: every rank calls this together. A step reports the norm as well ([`StepReport`](shardgrad_tensor::StepReport)).
///
/// # Errors
/// Errors of the collective.
#[doc(alias = "clip_grad_norm_")]
#[doc(alias = "get_total_norm")]
#[doc(alias = "global_norm")]
#[track_caller]
pub fn grad_norm(rank: &Rank, params: &[Param], gradients: &Gradients) -> Result<f64> {
    let mut check = OverflowCheck::new(rank, StepArgs::new(0.0), Vec::new())?;
    check.check(counted_gradients(params, gradients), Location::caller())?;
    Ok(check.read()?.grad_norm)
}

/// Yields the gradients whose elements count on this rank.
pub(super) fn counted_gradients<'a>(
    params: &'a [Param],
    gradients: &'a Gradients,
) -> impl Iterator<Item = &'a Tensor> {
    params.iter().filter(|p| p.is_primary_owner()).filter_map(|p| gradients.get(&p.key()))
}
