//! Data parallelism: the rows of a batch are split, parameters are not.

use super::Plan;

impl Plan {
    /// Rows of batches are split over an axis; every rank of it holds all parameters. Each gradient is reduced once a
    /// step, whatever the number of microbatches.
    #[must_use]
    pub fn data(axis: &str) -> Plan {
        Plan { batch: vec![axis.to_string()], ..Plan::new() }
    }
}
