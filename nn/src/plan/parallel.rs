//! Data, tensor and context parallelism as plans over one mesh axis.
//!
//! - **Data parallelism** shards the rows of a batch; every rank holds all parameters. One all-reduce of each gradient per step.
//! - **Tensor parallelism** shards linear layers by their outputs (column parallel), then by their inputs (row parallel). Such a
//!   pair of layers costs one all-reduce forward (of the partial sums of the second layer) and one backward (of the gradient of
//!   the input of the first). Shoeybi et al., "Megatron-LM", arXiv 1909.08053.
//! - **Context parallelism** shards the tokens of a row; each rank attends with its own queries to the keys of all ranks. Keys
//!   and values are gathered before attention, so a block costs two all-gathers forward and two reduce-scatters backward; each
//!   gradient of a parameter is reduced once per step. Grattafiori et al., "The Llama 3 Herd of Models", arXiv 2407.21783,
//!   section 3.3.2.

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

/// Activation points and their placements: attention reads the keys and values of all tokens, and the mask of all tokens.
const CONTEXT_POINTS: [(&str, &str); 3] = [("keys", "~"), ("values", "~"), ("mask", "=")];

impl Plan {
    /// Context parallelism (CP): shards tokens, dim 1 of batches, over an axis. Queries and all per-token computation stay sharded.
    /// Every rank of the axis holds all parameters, as under [`Plan::data_parallel`].
    ///
    /// Attention written by hand needs [`ActivationPoint`](crate::ActivationPoint)s named `keys` and `values`, or an error is raised. Other
    /// ops that mix tokens raise an error too, with the layouts that they accept.
    #[doc(alias = "CP")]
    #[doc(alias = "context parallel")]
    #[doc(alias = "ring attention")]
    #[must_use]
    pub fn context_parallel(axis: &str) -> Plan {
        let plan = Plan { batch: vec![(axis.to_string(), 1)], ..Plan::new() };
        let plan = plan.rule(RuleTarget::Compute, "*", &format!("{axis}~"), Presence::Optional);
        // These rules are optional: a model may have no attention.
        CONTEXT_POINTS.iter().fold(plan, |plan, (point, placement)| {
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
            "batch dp@0\nbatch cp@1\ncompute * dp~ optional\ncompute * cp~ optional\npoint keys cp~ optional\npoint values cp~ optional\npoint mask cp= optional\n"
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
}
