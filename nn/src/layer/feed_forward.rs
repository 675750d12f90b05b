//! Feed-forward part of a block: a dense MLP or a mixture of experts.

use super::gated_mlp::GatedMlp;
use super::mixture_of_experts::{MixtureOfExperts, Routing};
use crate::module::Module;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

/// The feed-forward part of a transformer block: a dense gated MLP, or a mixture of experts.
#[derive(Debug)]
pub enum FeedForward {
    /// One gated MLP for all tokens.
    Dense(Box<GatedMlp>),
    /// A mixture of experts.
    MixtureOfExperts(Box<MixtureOfExperts>),
}

impl FeedForward {
    /// The mixture of experts, if it is one.
    pub(crate) fn experts(&self) -> Option<&MixtureOfExperts> {
        match self {
            FeedForward::Dense(_) => None,
            FeedForward::MixtureOfExperts(experts) => Some(experts),
        }
    }

    /// Returns residual + y, and the routing if there are experts: `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// As [`GatedMlp::forward_with_residual`] and [`MixtureOfExperts::forward`].
    #[track_caller]
    #[must_use]
    pub fn forward_with_residual(&self, x: &Var, residual: &Var) -> (Var, Option<Routing>) {
        match self {
            FeedForward::Dense(mlp) => (mlp.forward_with_residual(x, residual), None),
            FeedForward::MixtureOfExperts(experts) => {
                let (y, routes) = experts.forward(x);
                (residual.add(&y), Some(routes))
            }
        }
    }
}

impl Module for FeedForward {
    fn children(&self, visit: &mut dyn FnMut(&str, &dyn Module)) {
        match self {
            FeedForward::Dense(mlp) => mlp.children(visit),
            FeedForward::MixtureOfExperts(experts) => experts.children(visit),
        }
    }
}
