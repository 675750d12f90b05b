//! Data and tensor parallelism as plans over one mesh axis.
//!
//! - **Data parallelism** shards the rows of a batch; every rank holds all parameters. One all-reduce of each gradient per step.
//! - **Tensor parallelism** shards linear layers by their outputs (column parallel), then by their inputs (row parallel). Such a
//!   pair of layers costs one all-reduce forward (of the partial sums of the second layer) and one backward (of the gradient of
//!   the input of the first). Shoeybi et al., "Megatron-LM", arXiv 1909.08053.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn column_and_row_parallel_layers_become_rules() {
        let plan = Plan::tensor_parallel("tp").column_parallel("up").row_parallel("down");
        assert_eq!(
            plan.to_string(),
            "store up.weight tp@1\nstore up.bias tp@0 optional\nstore down.weight tp@0\n"
        );
        let error = Plan::new().column_parallel("up").check().unwrap_err();
        assert!(
            error.to_string().contains("column_parallel up: begin the plan with Plan::tensor_parallel(axis)"),
            "{error}"
        );
    }
}
