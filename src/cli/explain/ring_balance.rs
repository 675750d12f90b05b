//! The order of tokens over the ranks of a ring, and how evenly the ranks share causal attention.

use super::StepSpec;
use crate::data::TokenOrder;
use serde_json::{Value, json};
use shardgrad::dist::Mesh;

/// How evenly the ranks of a ring share causal attention.
pub(super) struct RingBalance {
    order: TokenOrder,
    /// The causal scores of a row that each rank computes, in this order and in that of the row.
    scores: Vec<u64>,
    scores_in_order: Vec<u64>,
}

impl RingBalance {
    /// Returns the balance of a step; `None` where no ring shards the tokens of a causal model.
    pub(super) fn of(spec: &StepSpec<'_>, mesh: &Mesh) -> Option<RingBalance> {
        let num_shards = spec.plan.num_ring_shards(mesh);
        let of_order = |order: TokenOrder| order.scores_per_shard(spec.seq, num_shards);
        (num_shards > 1 && spec.config.is_causal()).then(|| RingBalance {
            order: spec.token_order,
            scores: of_order(spec.token_order),
            scores_in_order: of_order(TokenOrder::Sequential),
        })
    }

    /// Describes order and balance.
    pub(super) fn text(&self) -> String {
        let num_ranks = self.scores.len();
        let [here, in_order] = [&self.scores, &self.scores_in_order].map(|scores| over_mean(scores));
        match self.order {
            TokenOrder::Sequential => format!(
                "tokens are in the order of the row, which dropout masks follow: the busiest of {num_ranks} ranks of the ring computes {here:.2} times the mean number of causal scores"
            ),
            TokenOrder::Zigzag { .. } => format!(
                "tokens are in zigzag order, each of {num_ranks} ranks of the ring with a chunk from the head and one from the tail of a row: the busiest computes {here:.2} times the mean number of causal scores, {in_order:.2} times in the order of the row, which GPUs keep"
            ),
        }
    }

    /// The JSON object of [`RingBalance::text`].
    pub(super) fn as_json(&self) -> Value {
        let order = if self.order == TokenOrder::Sequential { "sequential" } else { "zigzag" };
        json!({"kind": "ring", "token_order": order, "causal_scores": self.scores})
    }
}

/// The largest of some numbers over their mean.
fn over_mean(numbers: &[u64]) -> f64 {
    let (largest, sum) = (numbers.iter().max().copied().unwrap_or(0), numbers.iter().sum::<u64>());
    largest as f64 * numbers.len() as f64 / sum.max(1) as f64
}
