//! Context parallelism: the tokens of a row sharded over a mesh axis, in three forms that differ in how queries meet the keys of
//! other ranks. Queries and all per-token computation stay sharded; each gradient of a parameter is reduced once per step.
//!
//! - **Gather**: keys and values are gathered before attention, so a block costs two all-gathers forward and two reduce-scatters
//!   backward, and every rank holds all keys. Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2.
//! - **Ring**: keys and values stay sharded and travel around the ranks while each rank attends to the chunk before; no rank holds
//!   more than two chunks of others ([`RingAttention`](shardgrad_tensor::ops::ring_attention::RingAttention)). Liu et al., "Ring
//!   Attention with Blockwise Transformers", arXiv 2310.01889.
//! - **Exchange**: an all-to-all of queries, keys and values from sharded tokens to sharded heads before attention, and one back
//!   after: four all-to-alls forward and four backward. Up to as many ranks as key heads share the work. Jacobs et al., "DeepSpeed
//!   Ulysses", arXiv 2309.14509.

use super::rule::{Presence, Rule};
use super::{Plan, RuleTarget};
use shardgrad_tensor::{Mesh, Placement};

/// Activation points and their placements: attention reads the keys and values of all tokens, and the masks of all tokens.
const GATHER_POINTS: [(&str, &str); 5] =
    [("keys", "~"), ("values", "~"), ("mask", "="), ("segments", "="), ("positions", "=")];

/// Keys and values stay sharded by tokens.
const RING_POINTS: [(&str, &str); 5] =
    [("keys", "@1"), ("values", "@1"), ("mask", "="), ("segments", "="), ("positions", "=")];

/// Queries, keys and values are sharded by heads, the outputs of the heads by tokens.
const EXCHANGE_POINTS: [(&str, &str); 7] = [
    ("queries", "@2"),
    ("keys", "@2"),
    ("values", "@2"),
    ("heads", "@1"),
    ("mask", "="),
    ("segments", "="),
    ("positions", "="),
];

impl Plan {
    /// Context parallelism (CP): shards tokens, dim 1 of batches, over an axis. Every rank of the axis holds all parameters, as under
    /// [`Plan::data_parallel`]. Keys and values are gathered; [`Plan::ring`] and [`Plan::exchange`] are the other forms.
    ///
    /// Attention written by hand needs [`ActivationPoint`](crate::ActivationPoint)s named `keys` and `values`, and for an exchange also
    /// `queries` and `heads`, or an error is raised. Other ops that mix tokens raise an error too, with the layouts that they accept.
    #[doc(alias = "CP")]
    #[doc(alias = "context parallel")]
    #[doc(alias = "cp_comm_type")]
    #[must_use]
    pub fn context_parallel(axis: &str) -> Plan {
        let plan =
            Plan { batch: vec![(axis.to_string(), 1)], context_axis: Some(axis.to_string()), ..Plan::new() };
        let plan = plan.rule(RuleTarget::Compute, "*", &format!("{axis}~"), Presence::Optional);
        plan.with_context_points("context_parallel", &GATHER_POINTS)
    }

    /// The same plan with context parallelism by ring: keys and values travel around the ranks of the axis and are never gathered.
    ///
    /// Attention that materializes its weights (dropout on them, a padding mask) refuses sharded keys.
    #[doc(alias = "ring attention")]
    #[doc(alias = "striped attention")]
    #[must_use]
    pub fn ring(self) -> Plan {
        self.with_context_points("ring", &RING_POINTS)
    }

    /// The same plan with context parallelism by exchange: an all-to-all shards heads instead of tokens during attention.
    #[doc(alias = "Ulysses")]
    #[doc(alias = "all-to-all")]
    #[must_use]
    pub fn exchange(self) -> Plan {
        self.with_context_points("exchange", &EXCHANGE_POINTS)
    }

    /// The number of ranks of a mesh over which causal attention may be unbalanced, because keys and values travel around them and the
    /// tokens of batches are sharded over them: 1 without [`Plan::ring`]. [`zigzag_order`](crate::zigzag_order) for so many shards balances.
    #[must_use]
    pub fn num_ring_shards(&self, mesh: &Mesh) -> usize {
        match self.token_axes(mesh).any(|axis| self.has_ring(mesh.name(axis))) {
            true => self.token_axes(mesh).map(|axis| mesh.size(axis)).product(),
            false => 1,
        }
    }

    /// Whether keys stay sharded by tokens over an axis, so that attention merges terms of several ranks.
    pub(crate) fn has_ring(&self, axis: &str) -> bool {
        let is_sharded = |rule: &Rule| rule.placement(None, 1) == Some(Placement::Shard(1));
        let of_keys =
            |rule: &&Rule| rule.target == RuleTarget::Point && rule.axis == axis && rule.pattern == "keys";
        self.rules.iter().rfind(of_keys).is_some_and(is_sharded)
    }

    /// Replaces the rules of the points of attention over the context axis.
    fn with_context_points(mut self, word: &str, points: &[(&str, &str)]) -> Plan {
        let Some(axis) = self.context_axis.clone() else {
            self.errors.push(format!("{word}: begin the plan with Plan::context_parallel(axis)"));
            return self;
        };
        let is_context = |pattern: &str| EXCHANGE_POINTS.iter().any(|(point, _)| *point == pattern);
        self.rules.retain(|rule| {
            rule.target != RuleTarget::Point || rule.axis != axis || !is_context(&rule.pattern)
        });
        // These rules are optional: a model may have no attention.
        points.iter().fold(self, |plan, (point, placement)| {
            plan.rule(RuleTarget::Point, point, &format!("{axis}{placement}"), Presence::Optional)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_tensor::DType;

    #[test]
    fn context_parallelism_shards_tokens_besides_rows() {
        let plan = Plan::data_parallel("dp").and(Plan::context_parallel("cp"));
        let layout = |mesh: &str, shape: &[usize]| {
            let mesh = Mesh::parse(mesh).unwrap();
            plan.batch_layout(&mesh, DType::I64, shape).unwrap().to_string()
        };
        assert_eq!(layout("dp=2,cp=3,tp=2", &[8, 65]), "i64[8@dp, 65@cp]");
        assert_eq!(layout("cp=4", &[8, 3]), "i64[8, 3@cp]", "more ranks than tokens");
        assert_eq!(layout("dp=2,cp=2", &[8]), "i64[8@dp]", "a batch without tokens is sharded by rows");
        assert_eq!(layout("tp=2", &[8, 65]), "i64[8, 65]");
        assert_eq!(
            plan.to_string(),
            "batch dp@0\nbatch cp@1\ncompute * dp~ optional\ncompute * cp~ optional\npoint keys cp~ optional\npoint values cp~ optional\npoint mask cp= optional\npoint segments cp= optional\npoint positions cp= optional\n"
        );
    }

    #[test]
    fn one_axis_cannot_shard_rows_and_tokens() {
        let plan =
            Plan::data_parallel("dp").and(Plan::context_parallel("cp")).and(Plan::context_parallel("dp"));
        let error = plan.check().unwrap_err().to_string();
        assert!(error.contains("batch dp@1: the axis already shards dim 0 of batches"), "{error}");
        assert!(Plan::context_parallel("cp").and(Plan::context_parallel("cp")).check().is_ok());
    }

    #[test]
    fn ring_and_exchange_replace_the_points_of_the_context_axis() {
        let points = |plan: &Plan| -> Vec<String> {
            let text = plan.to_string();
            text.lines()
                .filter_map(|line| line.strip_prefix("point ")?.split(" optional").next())
                .map(str::to_string)
                .collect()
        };
        let masks = ["mask cp=", "segments cp=", "positions cp="];
        let plan = Plan::data_parallel("dp").and(Plan::context_parallel("cp"));
        assert_eq!(points(&plan.clone().ring()), [&["keys cp@1", "values cp@1"][..], &masks].concat());
        let exchange = ["queries cp@2", "keys cp@2", "values cp@2", "heads cp@1"];
        assert_eq!(points(&plan.clone().exchange()), [&exchange[..], &masks].concat());
        assert_eq!(plan.clone().exchange().ring(), plan.clone().ring(), "the last form counts");
        let has_ring = |plan: Plan| plan.has_ring("cp");
        assert!(has_ring(plan.clone().exchange().ring()) && !has_ring(plan.clone().exchange()));
        assert!(!has_ring(plan.clone()) && !plan.clone().ring().has_ring("dp"));
        let num_shards = |plan: &Plan, mesh: &str| plan.num_ring_shards(&Mesh::parse(mesh).unwrap());
        assert_eq!(num_shards(&plan.clone().ring(), "dp=2,cp=3"), 3);
        assert_eq!([num_shards(&plan, "cp=3"), num_shards(&plan.clone().ring(), "dp=2")], [1, 1]);
        let own = plan.clone().point("keys", "tp@2").ring();
        assert!(points(&own).contains(&"keys tp@2".to_string()), "rules of other axes stay: {own}");
        assert!(Plan::gpt2().ring().check().is_ok() && Plan::llama_moe().exchange().check().is_ok());
        let error = Plan::new().ring().check().unwrap_err();
        assert!(
            error.to_string().contains("ring: begin the plan with Plan::context_parallel(axis)"),
            "{error}"
        );
    }
}
