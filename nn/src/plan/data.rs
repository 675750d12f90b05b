//! Data parallelism: the rows of a batch are split, parameters are not.

use super::{Plan, Subject};

impl Plan {
    /// Rows of batches are split over an axis; every rank of it holds all parameters and computes with copies of its own.
    /// Each gradient is reduced once a step, whatever the number of microbatches: the copies are made once a tape, so
    /// their adjoint, an all-reduce, runs once too, even where an op of parameters alone comes before the first row.
    #[must_use]
    pub fn data(axis: &str) -> Plan {
        let plan = Plan { batch: vec![(axis.to_string(), 0)], ..Plan::new() };
        plan.rule(Subject::Compute, "*", &format!("{axis}~"), true)
    }
}
