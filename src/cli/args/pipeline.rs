//! Microbatch and pipeline options.

use super::values::{self, ScheduleArg};
use clap::Args;
use shardgrad::autograd::pipeline::{Cut, Schedule, in_flight_max};
use shardgrad::nn::plan::PipelineSchedule;
use shardgrad::prelude::*;
use std::path::Path;

/// Microbatch and pipeline options.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Microbatches and pipeline")]
pub(crate) struct PipelineArgs {
    /// Microbatches per step (gradient accumulation); must divide --batch [default: 1; with pp=N up to 2N, such that every dp
    /// rank has equally many sequences]
    #[arg(long, value_name = "N", value_parser = values::count)]
    microbatches: Option<usize>,
    /// Pipeline schedule: gpipe, 1f1b, interleaved-2, zb-h1, zb-h2, zb-v, v-half, v-min, dualpipe-v, searched (list scheduling from
    /// measured times; searched-6: at most 6 microbatches in memory), or a file written by `plan --save`; needs pp in --mesh
    /// [default: 1f1b]
    #[arg(long, value_name = "NAME|FILE", value_parser = values::schedule)]
    schedule: Option<ScheduleArg>,
    /// How layers are partitioned into pipeline stages: balanced (by estimated cost), measured (by measured times), layers per stage
    /// as in 3,5, or the first module of each later stage as in h.2,h.7; needs pp in --mesh [default: balanced]
    #[arg(long, value_name = "CUTS", value_parser = values::cut)]
    cut: Option<Cut>,
}

impl PipelineArgs {
    /// Adds the stage cut and the schedule to a plan, where they are given.
    pub(crate) fn plan(&self, plan: Plan) -> Plan {
        let plan = self.cut.clone().into_iter().fold(plan, Plan::pipeline_cut);
        match self.schedule.as_ref().map(|order| order.passes.clone()) {
            Some(PipelineSchedule::Named(name)) => plan.pipeline_schedule(&name),
            Some(PipelineSchedule::Actions(lists)) => plan.pipeline_actions(lists),
            None => plan,
        }
    }

    /// Returns the schedule: as given, else 1F1B.
    fn pass_order(&self) -> PipelineSchedule {
        let given = self.schedule.as_ref().map(|order| order.passes.clone());
        given.unwrap_or_else(|| PipelineSchedule::Named("1f1b".to_string()))
    }

    /// Returns whether the stage cut or the schedule depends on measured times.
    pub(crate) fn uses_measured_times(&self) -> bool {
        let searched =
            matches!(self.pass_order(), PipelineSchedule::Named(name) if in_flight_max(&name, 1).is_some());
        searched || self.cut == Some(Cut::Measured)
    }

    /// Returns the file that the schedule was read from, if any.
    pub(crate) fn schedule_file(&self) -> Option<&Path> {
        self.schedule.as_ref()?.file.as_deref()
    }

    /// Returns the number of microbatches on a mesh: as given; else that of the schedule file; else the largest divisor of the batch
    /// up to twice the stages that gives each data rank equally many rows, or at least one.
    pub(crate) fn microbatches(&self, mesh: &Mesh, batch: usize) -> usize {
        let [stages, dp, fsdp, ep] =
            ["pp", "dp", "fsdp", "ep"].map(|name| mesh.axis(name).map_or(1, |axis| mesh.size(axis)));
        let shares = dp * fsdp * ep;
        let most = if stages > 1 { 2 * stages } else { 1 };
        let order = self.pass_order();
        let runs = |m: usize| match &order {
            _ if stages == 1 => true,
            PipelineSchedule::Named(name) => {
                in_flight_max(name, 1).is_some() || Schedule::named(name, stages, m).is_ok()
            }
            PipelineSchedule::Actions(lists) => lists.num_microbatches == m,
        };
        let of_file = match &order {
            PipelineSchedule::Actions(lists) if stages > 1 => Some(lists.num_microbatches),
            _ => None,
        };
        let fit = || (1..=most.min(batch)).rev().filter(|m| batch.is_multiple_of(*m) && runs(*m));
        let found = || {
            let even = fit().find(|m| (batch / m).is_multiple_of(shares));
            even.or_else(|| fit().find(|m| batch / m >= shares)).or_else(|| fit().next()).unwrap_or(1)
        };
        self.microbatches.or(of_file).unwrap_or_else(found)
    }

    /// Returns error texts for options that do not fit the batch or the mesh.
    pub(crate) fn faults(&self, mesh: &Mesh, batch: usize) -> Vec<String> {
        let uneven = self.microbatches.filter(|m| !batch.is_multiple_of(*m));
        let uneven =
            uneven.map(|count| format!("--batch {batch} is not divisible by --microbatches {count}"));
        let given = [("--schedule", self.schedule.is_some()), ("--cut", self.cut.is_some())];
        let idle = given.into_iter().filter(|(_, given)| *given && mesh.axis("pp").is_none());
        let idle = idle.map(|(name, _)| {
            format!(
                "{name} needs a pipeline, and the mesh has no pp axis; add pp=2 to --mesh, or omit {name}"
            )
        });
        uneven.into_iter().chain(idle).collect()
    }
}
