//! Expert parallelism (EP): the ranks of an axis hold different experts and different rows of the batch.
//!
//! Rows reach the experts in one of two ways. With R rows of width d on the n ranks of the axis, and k experts for each row, a layer
//! moves to or from each rank, forward:
//!
//! - **Gathered**: (1 - 1/n) R (d + 2 k) numbers before the experts, since each rank gets the rows of all others with their expert
//!   indices and weights, and (1 - 1/n) R d after them, since partial sums are reduced to the rows of each rank. Three all-gathers and
//!   a reduce-scatter forward, an all-gather and two reduce-scatters backward. No shape depends on the routing. Lepikhin et al.,
//!   "GShard", arXiv 2006.16668; dispatch as `--moe-token-dispatcher-type allgather` of Megatron-LM.
//! - **Exchanged**: (1 - 1/n) R k d / n each way under balanced routing, since each row goes only to the ranks of its experts, once for
//!   each expert, and the number of pairs of each expert before. Three all-to-alls forward and three backward, which sends rows again
//!   rather than keep them. Local shapes inside of the op depend on the routing, so the host waits for the counts. No token is
//!   dropped. As `--moe-token-dispatcher-type alltoall` of Megatron-LM; Gale et al., "MegaBlocks", arXiv 2211.15841.
//!
//! Without a choice, each layer takes the way that moves fewer bytes forward and backward: gathering where n is below some 1.25 k.

use super::rule::Presence;
use super::{Plan, RuleTarget};

/// The parameters of experts, stored and used sharded.
const EXPERT_PARAMS: [&str; 3] = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"];

/// The activation points of a mixture of experts, and their placements where rows are gathered. Where pairs are exchanged, all of
/// them are sharded by rows.
const GATHERED_POINTS: [(&str, &str); 4] =
    [("experts.rows", "~"), ("experts.index", "="), ("experts.shares", "~"), ("experts.out", "@0")];

impl Plan {
    /// Expert parallelism (EP): shards the rows of batches and the experts of mixture-of-experts layers over an axis; every rank holds
    /// all other parameters. Experts may be sharded unevenly, also with ranks that have none.
    ///
    /// Rows are gathered to the experts, or token-expert pairs exchanged, whichever moves fewer bytes; [`Plan::gather_experts`] and
    /// [`Plan::exchange_experts`] choose.
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
        Plan { expert_axis: Some(axis.to_string()), ..plan }
    }

    /// Exchanges the token-expert pairs of [`Plan::expert_parallel`]: each row travels to the ranks of its experts and back (dropless
    /// all-to-all).
    #[doc(alias = "all_to_all")]
    #[doc(alias = "moe_token_dispatcher_type")]
    #[must_use]
    pub fn exchange_experts(self) -> Plan {
        self.expert_points("exchange_experts", |_| "@0")
    }

    /// Gathers the rows of all ranks to the experts of [`Plan::expert_parallel`].
    #[doc(alias = "all_gather")]
    #[must_use]
    pub fn gather_experts(self) -> Plan {
        self.expert_points("gather_experts", |gathered| gathered)
    }

    /// States the placements of the points of experts, from those where rows are gathered.
    fn expert_points(mut self, word: &str, placement: impl Fn(&'static str) -> &'static str) -> Plan {
        let Some(axis) = self.expert_axis.clone() else {
            self.errors.push(format!("{word}: begin the plan with Plan::expert_parallel(axis)"));
            return self;
        };
        GATHERED_POINTS.iter().fold(self, |plan, (point, gathered)| {
            let placement = format!("{axis}{}", placement(gathered));
            plan.rule(RuleTarget::Point, point, &placement, Presence::Optional)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use shardgrad_tensor::{DType, Mesh};

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
        assert!(!text.contains("point"), "each layer chooses: {text}");
    }

    #[test]
    fn rows_are_gathered_or_exchanged_as_stated() {
        let points = |plan: Plan| {
            let text = plan.to_string();
            text.lines().filter(|line| line.starts_with("point")).map(String::from).collect::<Vec<_>>()
        };
        let plan = || Plan::data_parallel("dp").and(Plan::expert_parallel("ep"));
        let exchanged =
            ["rows", "index", "shares", "out"].map(|point| format!("point experts.{point} ep@0 optional"));
        assert_eq!(points(plan().exchange_experts()), exchanged);
        assert_eq!(
            points(plan().gather_experts())[..2],
            ["point experts.rows ep~ optional", "point experts.index ep= optional"]
        );
        let error = Plan::data_parallel("dp").exchange_experts().check().unwrap_err().to_string();
        assert!(
            error.contains("exchange_experts: begin the plan with Plan::expert_parallel(axis)"),
            "{error}"
        );
    }
}
