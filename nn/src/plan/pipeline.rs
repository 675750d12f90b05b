//! Pipeline parallelism: the layers of a model are spread over an axis.

use super::Plan;
use shardgrad_autograd::pipeline::Cut;
use shardgrad_tensor::{Axis, Mesh};
use std::fmt;

/// Which axis carries the stages of a model, where it is cut, and in which order passes run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// The mesh axis; its size is the number of places, on each of which a schedule puts one stage or more.
    pub axis: String,
    /// Where the recorded program is cut.
    pub cut: Cut,
    /// The name of the schedule.
    pub schedule: String,
}

impl Plan {
    /// The layers are spread over an axis, cut where the costliest stage costs least, and run one forward pass, one
    /// backward pass in turn. A [`Trainer`](crate::Trainer) follows it; on a mesh without the axis nothing changes.
    #[must_use]
    pub fn pipeline(axis: &str) -> Plan {
        let (cut, schedule) = (Cut::Balanced, "1f1b".to_string());
        Plan { pipeline: Some(Pipeline { axis: axis.to_string(), cut, schedule }), ..Plan::new() }
    }

    /// The same plan, whose pipeline is cut elsewhere. Without a pipeline nothing changes.
    #[must_use]
    pub fn cut(mut self, cut: Cut) -> Plan {
        self.pipeline.iter_mut().for_each(|p| p.cut = cut.clone());
        self
    }

    /// The same plan, whose pipeline runs another schedule, one of
    /// [`NAMES`](shardgrad_autograd::pipeline::NAMES).
    #[must_use]
    pub fn schedule(mut self, name: &str) -> Plan {
        self.pipeline.iter_mut().for_each(|p| p.schedule = name.to_string());
        self
    }

    /// The pipeline and its axis, if the mesh has one with more than one stage.
    pub(crate) fn pipeline_on(&self, mesh: &Mesh) -> Option<(&Pipeline, Axis)> {
        let pipeline = self.pipeline.as_ref()?;
        let axis = mesh.axis(&pipeline.axis).filter(|a| mesh.size(*a) > 1)?;
        Some((pipeline, axis))
    }
}

impl fmt::Display for Pipeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pipeline {} {} {:?}", self.axis, self.schedule, self.cut)
    }
}
