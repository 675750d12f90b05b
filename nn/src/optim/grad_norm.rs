//! Global gradient norm: every global element counts once, on any mesh.

use crate::module::param::Param;
use shardgrad_autograd::Gradients;
use shardgrad_tensor::training_step::canonical_sum::SumTree;
use shardgrad_tensor::training_step::grad_norm::canonical_sum_squares;
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
fn counted_gradients<'a>(params: &'a [Param], gradients: &'a Gradients) -> impl Iterator<Item = &'a Tensor> {
    params.iter().filter(|p| p.is_primary_owner()).filter_map(|p| gradients.get(&p.key()))
}

/// The gradients of which a step takes the norm.
#[derive(Debug)]
pub(super) enum NormTerms {
    /// Gradients that count on this rank.
    InMeshOrder(Vec<Tensor>),
    /// All parameters by name, those of other ranks too, each with its shape and with its gradient where the gradient counts.
    Canonical(SumTree, Vec<(Vec<usize>, Option<Tensor>)>),
}

impl NormTerms {
    /// Returns the terms of the gradients of a step.
    pub(super) fn new(params: &[Param], gradients: &Gradients, norm_leaves: Option<usize>) -> NormTerms {
        let Some(num_leaves) = norm_leaves else {
            return NormTerms::InMeshOrder(counted_gradients(params, gradients).cloned().collect());
        };
        let mut params: Vec<&Param> = params.iter().collect();
        params.sort_by_key(|param| param.shared_name());
        let term = |param: &Param| {
            let gradient = gradients.get(&param.key()).filter(|_| param.is_primary_owner());
            (param.shape().to_vec(), gradient.cloned())
        };
        NormTerms::Canonical(SumTree::new(num_leaves), params.into_iter().map(term).collect())
    }

    /// Launches the norm and the overflow check of a step. Every rank calls this together.
    ///
    /// # Errors
    /// As [`OverflowCheck::check`] and [`canonical_sum_squares`].
    pub(super) fn check(
        &self,
        rank: &Rank,
        check: &mut OverflowCheck,
        site: &'static Location<'static>,
    ) -> Result<()> {
        match self {
            NormTerms::InMeshOrder(gradients) => check.check(gradients, site),
            NormTerms::Canonical(tree, terms) => {
                let terms = terms.iter().map(|(shape, gradient)| (shape.as_slice(), gradient.as_ref()));
                check.check_with_squares(canonical_sum_squares(rank, *tree, terms, site)?, site)
            }
        }
    }
}
