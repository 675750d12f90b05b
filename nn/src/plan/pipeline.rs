//! Pipeline parallelism: the layers of a model as stages over a mesh axis, and the schedule of their microbatches.

use super::Plan;
use shardgrad_autograd::pipeline::{Cut, Schedule};
use shardgrad_tensor::{Axis, Mesh};
use std::fmt;

/// Pipeline parallelism of a plan: the axis of the stages, the cut between stages, and the schedule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelinePlan {
    /// The mesh axis; its size is the number of pipeline ranks, each of which runs one or more stages.
    pub axis: String,
    /// Where the recorded program is cut into stages.
    pub cut: Cut,
    /// The schedule of forward and backward passes.
    pub schedule: PipelineSchedule,
}

/// The schedule of a pipeline: in which order its ranks run forward and backward passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PipelineSchedule {
    /// A schedule by name, one of [`NAMES`](shardgrad_autograd::pipeline::NAMES).
    Named(String),
    /// Action lists, one per rank, for the number of ranks of the axis and of microbatches of the trainer.
    Actions(Schedule),
}

impl Plan {
    /// Pipeline parallelism (PP): the layers as stages over an axis, cut so that the most expensive stage is as cheap as possible, in
    /// the 1F1B schedule. A [`Trainer`](crate::Trainer) runs the pipeline; on a mesh without the axis nothing changes.
    #[doc(alias = "PP")]
    #[doc(alias = "pipeline parallel")]
    #[doc(alias = "PipelineStage")]
    #[doc(alias = "GPipe")]
    #[doc(alias = "1F1B")]
    #[must_use]
    pub fn pipeline_parallel(axis: &str) -> Plan {
        let (cut, schedule) = (Cut::Balanced, PipelineSchedule::Named("1f1b".to_string()));
        Plan { pipeline: Some(PipelinePlan { axis: axis.to_string(), cut, schedule }), ..Plan::new() }
    }

    /// Returns the same plan with another cut of the pipeline into stages. Without a pipeline nothing changes.
    #[doc(alias = "SplitPoint")]
    #[must_use]
    pub fn pipeline_cut(mut self, cut: Cut) -> Plan {
        self.pipeline.iter_mut().for_each(|p| p.cut = cut.clone());
        self
    }

    /// Returns the same plan with another pipeline schedule, one of [`NAMES`](shardgrad_autograd::pipeline::NAMES). The searched
    /// schedules use times that a [`Trainer`](crate::Trainer) measures before its first step.
    #[doc(alias = "Schedule1F1B")]
    #[doc(alias = "ScheduleGPipe")]
    #[doc(alias = "ScheduleInterleaved1F1B")]
    #[doc(alias = "ScheduleInterleavedZeroBubble")]
    #[doc(alias = "ScheduleZBVZeroBubble")]
    #[must_use]
    pub fn pipeline_schedule(self, name: &str) -> Plan {
        self.with_schedule(PipelineSchedule::Named(name.to_string()))
    }

    /// Returns the same plan with a pipeline schedule given as action lists. Missing transfers and reductions are inserted, and the
    /// schedule is verified before the first step.
    #[must_use]
    pub fn pipeline_actions(self, lists: Schedule) -> Plan {
        self.with_schedule(PipelineSchedule::Actions(lists))
    }

    fn with_schedule(mut self, schedule: PipelineSchedule) -> Plan {
        self.pipeline.iter_mut().for_each(|p| p.schedule = schedule.clone());
        self
    }

    /// Returns the pipeline and its axis if the mesh has the axis with more than one rank.
    pub(crate) fn pipeline_on(&self, mesh: &Mesh) -> Option<(&PipelinePlan, Axis)> {
        let pipeline = self.pipeline.as_ref()?;
        let axis = mesh.axis(&pipeline.axis).filter(|a| mesh.size(*a) > 1)?;
        Some((pipeline, axis))
    }
}

impl fmt::Display for PipelinePlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match &self.schedule {
            PipelineSchedule::Named(name) => name,
            PipelineSchedule::Actions(lists) => &lists.name,
        };
        write!(f, "pipeline {} {name} {}", self.axis, self.cut)
    }
}
