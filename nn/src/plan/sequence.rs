//! Sequence parallelism (SP): between the products of a block, the tokens of tensor-parallel ranks are sharded.
//!
//! Under tensor parallelism alone, every rank holds the whole residual stream and computes the same norms and dropout. Here they are
//! sharded along tokens (dim 1): an all-gather before the column-parallel layers and a reduce-scatter after the row-parallel ones
//! take the place of the all-reduce, with the same bytes. Gathered inputs are not kept for the backward pass but gathered again
//! ([`Plan::regather`]), which adds an all-gather backward for each. Korthikanti et al., "Reducing Activation Recomputation in
//! Large Transformer Models", arXiv 2205.05198.

use super::rule::Presence;
use super::{Plan, RuleTarget};

/// Outputs of norms, which column-parallel layers read: all tokens.
const GATHERED: [&str; 6] = [
    "*.ln_1.out",
    "*.ln_2.out",
    "ln_f.out",
    "*.input_layernorm.out",
    "*.post_attention_layernorm.out",
    "model.norm.out",
];

/// Activations of the residual stream: tokens are sharded. Those of routed and shared experts are first added as partial sums.
const SHARDED: [&str; 6] =
    ["wte.out", "*.embed_tokens.out", "*.c_proj.out", "*.o_proj.out", "*.mlp.down_proj.out", "*.mlp.out"];

/// Parameters that every rank uses for its own tokens, so that each has a gradient of its own.
const REPLICATED: [&str; 7] = [
    "wpe.weight",
    "*.ln_1.*",
    "*.ln_2.*",
    "ln_f.*",
    "*layernorm.weight",
    "model.norm.weight",
    "*.c_proj.bias",
];

impl Plan {
    /// Sequence parallelism (SP) of GPT-2 and the Llama family over the axis of tensor parallelism: the residual stream, norms and
    /// dropout are sharded along tokens, and the gathered inputs of products are not kept for the backward pass.
    ///
    /// [`Model::new`](crate::Model::new) refuses a model without any activation of the residual stream under the names of these families:
    /// the plan would change nothing.
    #[doc(alias = "SP")]
    #[doc(alias = "SequenceParallel")]
    #[must_use]
    pub fn sequence_parallel(axis: &str) -> Plan {
        let rules = |plan: Plan, target, patterns: &[&str], placement: &str, presence: Presence| {
            patterns.iter().fold(plan, |plan, pattern| {
                plan.rule(target, pattern, &format!("{axis}{placement}"), presence.clone())
            })
        };
        let residual = Presence::one_of("residual stream");
        let plan = rules(Plan::new(), RuleTarget::Point, &SHARDED, "@1", residual);
        let plan = rules(plan, RuleTarget::Point, &GATHERED, "~", Presence::Optional);
        let plan = rules(plan, RuleTarget::Compute, &REPLICATED, "~", Presence::Optional);
        GATHERED.iter().fold(plan, |plan, point| plan.regather(point))
    }

    /// Does not keep the activations at points for the backward pass where the plan gathers them there: they are gathered again. Saves
    /// the memory of a gathered activation for each point, and costs an all-gather in the backward pass.
    #[must_use]
    pub fn regather(mut self, points: &str) -> Plan {
        self.regathered_points.push(points.to_string());
        self
    }
}
