//! The options of how a step is cut into pieces and stages.

use super::values::{self, Order};
use clap::Args;
use shardgrad::autograd::pipeline::{Cut, Schedule, held_max};
use shardgrad::nn::plan::PassOrder;
use shardgrad::prelude::*;
use std::path::Path;

/// Options of pieces and stages.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Pipeline")]
pub(crate) struct PipelineArgs {
    /// Equal parts that the batch is cut into [default: 1; on pp=N at most 2N, as many as divide the batch and leave each rank
    /// of dp as many rows]
    #[arg(long, value_name = "N", value_parser = values::count)]
    microbatches: Option<usize>,
    /// Order of passes over the axis pp: gpipe, 1f1b, interleaved-2, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v, searched
    /// (searched-6 to hold 6 microbatches at most), or a file with lists [default: 1f1b]
    #[arg(long, value_name = "NAME|FILE", value_parser = values::schedule)]
    schedule: Option<Order>,
    /// Where the model is cut: balanced, measured, layers a stage as in 3,5, or where stages begin as in h.2,h.7
    /// [default: balanced]
    #[arg(long, value_name = "CUTS", value_parser = values::cut)]
    cut: Option<Cut>,
}

impl PipelineArgs {
    /// A plan with the pipeline that was asked for.
    pub(crate) fn plan(&self, plan: Plan) -> Plan {
        let plan = plan.cut(self.cut.clone().unwrap_or(Cut::Balanced));
        match self.order() {
            PassOrder::Named(name) => plan.schedule(&name),
            PassOrder::Lists(lists) => plan.schedule_lists(lists),
        }
    }

    /// The order of passes: as asked for, or 1F1B.
    fn order(&self) -> PassOrder {
        let asked = self.schedule.as_ref().map(|order| order.passes.clone());
        asked.unwrap_or_else(|| PassOrder::Named("1f1b".to_string()))
    }

    /// Whether cuts or lists depend on times that are measured.
    pub(crate) fn measures(&self) -> bool {
        let searched = matches!(self.order(), PassOrder::Named(name) if held_max(&name, 1).is_some());
        searched || self.cut == Some(Cut::Measured)
    }

    /// The file that the order of passes was read from, if it was.
    pub(crate) fn lists(&self) -> Option<&Path> {
        self.schedule.as_ref()?.file.as_deref()
    }

    /// How many pieces a batch is cut into on a mesh: as asked for, else as many as a pipeline has use for, of which each data
    /// rank has equally many rows, or one at least, if that can be.
    pub(crate) fn microbatches(&self, mesh: &Mesh, batch: usize) -> usize {
        let [stages, dp, ep] =
            ["pp", "dp", "ep"].map(|name| mesh.axis(name).map_or(1, |axis| mesh.size(axis)));
        let shares = dp * ep;
        let most = if stages > 1 { 2 * stages } else { 1 };
        let order = self.order();
        let runs = |m: usize| match &order {
            _ if stages == 1 => true,
            PassOrder::Named(name) => held_max(name, 1).is_some() || Schedule::named(name, stages, m).is_ok(),
            PassOrder::Lists(lists) => lists.num_microbatches == m,
        };
        let told = match &order {
            PassOrder::Lists(lists) if stages > 1 => Some(lists.num_microbatches),
            _ => None,
        };
        let fit = || (1..=most.min(batch)).rev().filter(|m| batch.is_multiple_of(*m) && runs(*m));
        let found = || {
            let even = fit().find(|m| (batch / m).is_multiple_of(shares));
            even.or_else(|| fit().find(|m| batch / m >= shares)).or_else(|| fit().next()).unwrap_or(1)
        };
        self.microbatches.or(told).unwrap_or_else(found)
    }

    /// What is wrong with it for a batch on a mesh.
    pub(crate) fn faults(&self, mesh: &Mesh, batch: usize) -> Vec<String> {
        let uneven = self.microbatches.filter(|m| !batch.is_multiple_of(*m));
        let uneven = uneven
            .map(|count| format!("--batch {batch} cannot be cut into {count} equal parts (--microbatches)"));
        let given = [("--schedule", self.schedule.is_some()), ("--cut", self.cut.is_some())];
        let idle = given.into_iter().filter(|(_, given)| *given && mesh.axis("pp").is_none());
        let idle = idle.map(|(name, _)| {
            format!("{name} is about a pipeline, and the mesh has none; add pp=2 to --mesh, or leave it out")
        });
        uneven.into_iter().chain(idle).collect()
    }
}
