//! The options of how a step is cut into pieces and stages.

use super::values;
use clap::Args;
use shardgrad::autograd::pipeline::{Cut, Schedule};
use shardgrad::prelude::*;

/// Options of pieces and stages.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Pipeline")]
pub(crate) struct PipelineArgs {
    /// Equal parts that the batch is cut into [default: 1; on pp=N at most 2N, as many as divide the batch]
    #[arg(long, value_name = "N", value_parser = values::count)]
    microbatches: Option<usize>,
    /// Order of passes over the axis pp: gpipe, 1f1b, interleaved-2, zb-h1, zb-h2, zb-v, v-half
    #[arg(long, value_name = "NAME", default_value = "1f1b", value_parser = values::schedule)]
    schedule: String,
    /// Where the model is cut: balanced, layers a stage as in 3,5, or where stages begin as in h.2,h.7
    #[arg(long, value_name = "CUTS", default_value = "balanced", value_parser = values::cut)]
    cut: Cut,
}

impl PipelineArgs {
    /// A plan with the pipeline that was asked for.
    pub(crate) fn plan(&self, plan: Plan) -> Plan {
        plan.schedule(&self.schedule).cut(self.cut.clone())
    }

    /// How many pieces a batch is cut into on a mesh.
    pub(crate) fn microbatches(&self, mesh: &Mesh, batch: usize) -> usize {
        let stages = mesh.axis("pp").map_or(1, |axis| mesh.size(axis));
        let most = if stages > 1 { 2 * stages } else { 1 };
        let runs = |m: usize| stages == 1 || Schedule::named(&self.schedule, stages, m).is_ok();
        let fits = |m: &usize| batch.is_multiple_of(*m) && runs(*m);
        self.microbatches.unwrap_or_else(|| (1..=most.min(batch)).rev().find(fits).unwrap_or(1))
    }

    /// What is wrong with it for a batch, if anything is.
    pub(crate) fn fault(&self, batch: usize) -> Option<String> {
        let count = self.microbatches.filter(|m| !batch.is_multiple_of(*m))?;
        Some(format!("--batch {batch} cannot be cut into {count} equal parts (--microbatches)"))
    }
}
