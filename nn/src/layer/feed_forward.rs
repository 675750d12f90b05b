//! The feed-forward half of a block, of one kind or the other.

use super::experts::{Experts, Routes};
use super::gated_mlp::GatedMlp;
use crate::module::Module;
use shardgrad_autograd::Var;
use shardgrad_tensor::Value;

/// One gated layer for all tokens, or experts of which each token passes some.
#[derive(Debug)]
pub enum FeedForward {
    /// One for all.
    Dense(Box<GatedMlp>),
    /// Some of many.
    Experts(Box<Experts>),
}

impl FeedForward {
    /// residual + y, and how tokens were spread over experts, if there are any: `[.., d]` to `[.., d]`.
    ///
    /// # Panics
    /// As the `forward` of either.
    #[track_caller]
    #[must_use]
    pub fn forward_onto(&self, x: &Var, residual: &Var) -> (Var, Option<Routes>) {
        match self {
            FeedForward::Dense(mlp) => (mlp.forward_onto(x, residual), None),
            FeedForward::Experts(experts) => {
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
            FeedForward::Experts(experts) => experts.children(visit),
        }
    }
}
