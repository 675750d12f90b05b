//! Pipeline parallelism: the layers of a model are spread over an axis.

use super::Plan;
use shardgrad_autograd::pipeline::{Cut, Schedule};
use shardgrad_tensor::{Axis, Mesh};
use std::fmt;

/// Which axis carries the stages of a model, where it is cut, and in which order passes run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pipeline {
    /// The mesh axis; its size is the number of places, on each of which a schedule puts one stage or more.
    pub axis: String,
    /// Where the recorded program is cut.
    pub cut: Cut,
    /// The order of passes.
    pub order: PassOrder,
}

/// In which order the ranks of a pipeline run their passes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PassOrder {
    /// A schedule by its name, one of [`NAMES`](shardgrad_autograd::pipeline::NAMES).
    Named(String),
    /// Lists of actions, for as many ranks as the axis has and as many microbatches as the trainer cuts a batch into.
    Lists(Schedule),
}

impl Plan {
    /// The layers are spread over an axis, cut where the costliest stage costs least, and run one forward pass, one
    /// backward pass in turn. A [`Trainer`](crate::Trainer) follows it; on a mesh without the axis nothing changes.
    #[must_use]
    pub fn pipeline(axis: &str) -> Plan {
        let (cut, order) = (Cut::Balanced, PassOrder::Named("1f1b".to_string()));
        Plan { pipeline: Some(Pipeline { axis: axis.to_string(), cut, order }), ..Plan::new() }
    }

    /// The same plan, whose pipeline is cut elsewhere. Without a pipeline nothing changes.
    #[must_use]
    pub fn cut(mut self, cut: Cut) -> Plan {
        self.pipeline.iter_mut().for_each(|p| p.cut = cut.clone());
        self
    }

    /// The same plan, whose pipeline runs another schedule, one of
    /// [`NAMES`](shardgrad_autograd::pipeline::NAMES). What is searched is searched for times that a [`Trainer`](crate::Trainer)
    /// measures before its first step.
    #[must_use]
    pub fn schedule(self, name: &str) -> Plan {
        self.order(PassOrder::Named(name.to_string()))
    }

    /// The same plan, whose pipeline follows lists of actions that the caller has made. Transfers and reductions that they
    /// do not spell are put in, and the whole is proved before the first step.
    #[must_use]
    pub fn schedule_lists(self, lists: Schedule) -> Plan {
        self.order(PassOrder::Lists(lists))
    }

    fn order(mut self, order: PassOrder) -> Plan {
        self.pipeline.iter_mut().for_each(|p| p.order = order.clone());
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
        let name = match &self.order {
            PassOrder::Named(name) => name,
            PassOrder::Lists(lists) => &lists.name,
        };
        write!(f, "pipeline {} {name} {:?}", self.axis, self.cut)
    }
}
