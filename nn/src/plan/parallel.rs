//! Data, tensor and expert parallelism as plans over one mesh axis.
//!
//! - **Data parallelism** shards the rows of a batch; every rank holds all parameters. One all-reduce of each gradient per step.
//! - **Tensor parallelism** shards linear layers by their outputs (column parallel), then by their inputs (row parallel). Such a
//!   pair of layers costs one all-reduce forward (of the partial sums of the second layer) and one backward (of the gradient of
//!   the input of the first). Shoeybi et al., "Megatron-LM", arXiv 1909.08053.
//! - **Expert parallelism** shards the experts of a layer; each rank of the axis also has its own rows, as under
//!   [`Plan::data_parallel`]. A mixture-of-experts layer gathers the rows of all ranks, each rank applies its experts, and the
//!   partial sums are reduced to the rows of each rank: three all-gathers (rows, expert indices, weights) and a reduce-scatter
//!   forward, an all-gather and two reduce-scatters backward. No shape depends on the routing. Lepikhin et al., "GShard", arXiv
//!   2006.16668; dispatch as `--moe-token-dispatcher-type allgather` of Megatron-LM.

use super::rule::Presence;
use super::{Plan, RuleTarget};

impl Plan {
    /// Data parallelism (DP, DDP): shards the rows of batches over an axis; every rank holds all parameters.
    ///
    /// Each gradient is all-reduced once per step, whatever the number of microbatches: a parameter is replicated once per tape,
    /// so the adjoint of the replication, an all-reduce, also runs once, even if an op on parameters alone comes before the first
    /// row.
    #[doc(alias = "DP")]
    #[doc(alias = "DDP")]
    #[doc(alias = "DistributedDataParallel")]
    #[doc(alias = "pmap")]
    #[must_use]
    pub fn data_parallel(axis: &str) -> Plan {
        let plan = Plan { batch: vec![(axis.to_string(), 0)], ..Plan::new() };
        plan.rule(RuleTarget::Compute, "*", &format!("{axis}~"), Presence::Optional)
    }
}

impl Plan {
    /// Tensor parallelism (TP) over an axis: the axis of the following [`Plan::column_parallel`] and [`Plan::row_parallel`].
    #[doc(alias = "TP")]
    #[doc(alias = "tensor_model_parallel")]
    #[must_use]
    pub fn tensor_parallel(axis: &str) -> Plan {
        Plan { tensor_axis: Some(axis.to_string()), ..Plan::new() }
    }

    /// Shards linear layers by their outputs: the weight `[in, out, ..]` on dim 1, the bias `[out, ..]` on dim 0.
    #[doc(alias = "ColwiseParallel")]
    #[doc(alias = "ColumnParallelLinear")]
    #[must_use]
    pub fn column_parallel(self, layer: &str) -> Plan {
        self.split_layer("column_parallel", layer, [("weight", 1), ("bias", 0)].as_slice())
    }

    /// Shards linear layers by their inputs: the weight `[in, ..]` on dim 0. The bias is added once, after the all-reduce.
    #[doc(alias = "RowwiseParallel")]
    #[doc(alias = "RowParallelLinear")]
    #[must_use]
    pub fn row_parallel(self, layer: &str) -> Plan {
        self.split_layer("row_parallel", layer, [("weight", 0)].as_slice())
    }

    fn split_layer(mut self, word: &str, layer: &str, parts: &[(&str, usize)]) -> Plan {
        let Some(axis) = self.tensor_axis.clone() else {
            self.errors.push(format!("{word} {layer}: begin the plan with Plan::tensor_parallel(axis)"));
            return self;
        };
        parts.iter().fold(self, |plan, (part, dim)| {
            plan.rule(
                RuleTarget::Store,
                &format!("{layer}.{part}"),
                &format!("{axis}@{dim}"),
                if *part == "bias" { Presence::Optional } else { Presence::Required },
            )
        })
    }
}

/// The parameters of experts, stored and used sharded.
const EXPERT_PARAMS: [&str; 3] = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"];

/// The activation points of a mixture of experts, and their placements.
const EXPERT_POINTS: [(&str, &str); 4] =
    [("experts.rows", "~"), ("experts.index", "="), ("experts.shares", "~"), ("experts.out", "@0")];

impl Plan {
    /// Expert parallelism (EP): shards the rows of batches and the experts of mixture-of-experts layers over an axis; every rank holds
    /// all other parameters. Experts may be sharded unevenly, also with ranks that have none.
    #[doc(alias = "EP")]
    #[doc(alias = "expert parallel")]
    #[doc(alias = "MoE")]
    #[doc(alias = "GShard")]
    #[must_use]
    pub fn expert_parallel(axis: &str) -> Plan {
        let split = format!("{axis}@0");
        let plan = EXPERT_PARAMS.iter().fold(Plan::data_parallel(axis), |plan, stack| {
            // A later rule wins: experts are used where they are stored.
            plan.rule(RuleTarget::Store, stack, &split, Presence::Optional).rule(
                RuleTarget::Compute,
                stack,
                &split,
                Presence::Optional,
            )
        });
        EXPERT_POINTS.iter().fold(plan, |plan, (point, placement)| {
            plan.rule(RuleTarget::Point, point, &format!("{axis}{placement}"), Presence::Optional)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_tensor::{DType, Mesh};

    #[test]
    fn column_and_row_parallel_layers_become_rules() {
        let plan = Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down");
        assert_eq!(plan.to_string(), "store up.weight tp@1\nstore up.bias tp@0\nstore down.weight tp@0\n");
        let error = Plan::new().column_parallel("up").check().unwrap_err();
        assert!(
            error.to_string().contains("column_parallel up: begin the plan with Plan::tensor_parallel(axis)"),
            "{error}"
        );
    }

    #[test]
    fn expert_parallelism_shards_rows_and_experts() {
        let plan = Plan::data_parallel("dp").and(Plan::expert_parallel("ep"));
        let layout = |mesh: &str| {
            let mesh = Mesh::parse(mesh).unwrap();
            plan.batch_layout(&mesh, DType::I64, &[8, 65]).unwrap().to_string()
        };
        assert_eq!(layout("dp=2,ep=2,tp=2"), "i64[8@dp@ep, 65]");
        assert_eq!(layout("ep=3"), "i64[8@ep, 65]");
        assert!(plan.check().is_ok());
        let text = plan.to_string();
        let [all, own] = ["compute * ep~", "compute experts.up_proj ep@0"].map(|rule| text.find(rule));
        assert!(all.is_some() && all < own, "{text}");
    }
}
