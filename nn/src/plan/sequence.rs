//! Sequence parallelism (SP): between the products of a block, the tokens of tensor-parallel ranks are sharded.
//!
//! Under tensor parallelism alone, every rank holds the whole residual stream and computes the same norms and dropout. Here they are
//! sharded along tokens (dim 1): an all-gather before the column-parallel layers and a reduce-scatter after the row-parallel ones
//! take the place of the all-reduce, with the same bytes. Gathered inputs are not kept for the backward pass but gathered again
//! ([`Plan::regather`]), which adds an all-gather backward for each. Korthikanti et al., "Reducing Activation Recomputation in
//! Large Transformer Models", arXiv 2205.05198.

use super::rule::{OPTIONAL, Presence};
use super::{Plan, RuleTarget};
use crate::module::name::{matches, nearest};
use shardgrad_tensor::{Error, Kind, Result};
use std::fmt;

/// Points whose gathered activations are gathered again in the backward pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RegatheredPoints {
    pattern: String,
    /// Whether a model may lack them.
    is_optional: bool,
}

impl fmt::Display for RegatheredPoints {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "regather {}", self.pattern)?;
        if self.is_optional { write!(f, " {OPTIONAL}") } else { Ok(()) }
    }
}

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
        GATHERED.iter().fold(plan, |plan, points| plan.regather_if_present(points))
    }

    /// Does not keep the activations at points for the backward pass where the plan gathers them there: they are gathered again. Saves
    /// the memory of a gathered activation for each point, and costs an all-gather in the backward pass. A model refuses a pattern
    /// that matches none of its points.
    #[must_use]
    pub fn regather(self, points: &str) -> Plan {
        self.with_regathered_points(points, false)
    }

    /// [`Plan::regather`] for points that a model may lack.
    pub(super) fn regather_if_present(self, points: &str) -> Plan {
        self.with_regathered_points(points, true)
    }

    fn with_regathered_points(mut self, points: &str, is_optional: bool) -> Plan {
        self.regathered_points.push(RegatheredPoints { pattern: points.to_string(), is_optional });
        self
    }

    /// Whether the activation at a point is gathered again in the backward pass.
    pub(crate) fn is_regathered(&self, point: &str) -> bool {
        self.regathered_points.iter().any(|points| matches(&points.pattern, point))
    }

    /// Rejects a pattern of [`Plan::regather`] that matches none of these points.
    pub(crate) fn check_regathered_points_matched(&self, points: &[&str]) -> Result<()> {
        let is_unmatched = |pattern: &str| !points.iter().any(|point| matches(pattern, point));
        let mut required = self.regathered_points.iter().filter(|points| !points.is_optional);
        let Some(unmatched) = required.find(|points| is_unmatched(&points.pattern)) else { return Ok(()) };
        let text = format!("`{unmatched}` of the plan matches no point of the model");
        let near = nearest(&unmatched.pattern, points.iter().copied());
        let near = if near.is_empty() { "the model has none".to_string() } else { near.join(", ") };
        let help = "state the path of an activation point, as in `h.*.ln_1.out`";
        Err(Error::new(Kind::Config, text).detail("nearest", near).detail("help", help))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regathered_points_are_points_of_the_model() {
        let points = ["h.0.ln_1.out", "h.0.attn.c_proj.out"];
        let check =
            |plan: &Plan| plan.check_regathered_points_matched(&points).map_err(|error| error.to_string());
        let sequence = Plan::sequence_parallel("tp");
        assert_eq!(check(&sequence), Ok(()), "norms of other families may be missing");
        assert_eq!(check(&sequence.clone().regather("h.*.ln_1.out")), Ok(()));
        for plan in [sequence.clone().regather("h.*.ln_1"), Plan::new().regather("h.*.ln_1.uot")] {
            let text = check(&plan).unwrap_err();
            assert!(text.contains(" of the plan matches no point of the model"), "{text}");
            assert!(text.contains("h.0.ln_1.out"), "{text}");
        }
    }
}
