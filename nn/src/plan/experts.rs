//! Expert parallelism: the experts of a layer are spread over ranks, each of which computes the tokens that pass its own.
//!
//! Ranks of the axis have rows of their own, as under [`Plan::data`]. At the experts of a layer they gather the rows of all, each adds
//! up what its experts give, and the sums are completed into the rows of each rank: three all-gathers (rows, numbers of experts,
//! weights) and a reduce-scatter forward, an all-gather and two reduce-scatters backward. What the experts of a rank get does not
//! decide on any shape. Lepikhin et al., "GShard", arXiv 2006.16668; gathered as by `--moe-token-dispatcher-type allgather` of
//! Megatron-LM.

use super::{Plan, Subject};

/// Parameters, and the state in which they are stored and computed with.
const STACKS: [&str; 3] = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"];

/// Points and the states in which activations pass them.
const POINTS: [(&str, &str); 4] =
    [("experts.rows", "~"), ("experts.index", "="), ("experts.shares", "~"), ("experts.out", "@0")];

impl Plan {
    /// Rows of batches are split over an axis, and so are the experts of layers that have some; all other parameters are whole on every
    /// rank, which computes with copies of its own. Experts are split as everything is: uneven, or with ranks that have none.
    #[must_use]
    pub fn experts(axis: &str) -> Plan {
        let split = format!("{axis}@0");
        let plan = STACKS.iter().fold(Plan::data(axis), |plan, stack| {
            // A later rule wins: they are computed with where they are stored.
            plan.rule(Subject::Store, stack, &split, true).rule(Subject::Compute, stack, &split, true)
        });
        POINTS.iter().fold(plan, |plan, (point, state)| {
            plan.rule(Subject::Point, point, &format!("{axis}{state}"), true)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_tensor::{DType, Mesh};

    #[test]
    fn rows_and_experts_are_split() {
        let plan = Plan::data("dp").and(Plan::experts("ep"));
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
