//! Consistency check of the trainers of all ranks.

use super::{Trainer, TrainerConfig};
use crate::checkpoint::check_parameters;
use crate::module::Module;
use shardgrad_tensor::Result;
use shardgrad_tensor::training_step::consistency::{check_consistent, check_replicas};
use std::panic::Location;

impl<M: Module> Trainer<'_, M> {
    /// Verifies that all ranks agree: on configuration, optimizer, step, loss scale, number and layouts of the
    /// arguments of the loss; bit for bit on the copies of parameters and of the arguments of the next step; and on
    /// the parameter names of a stage.
    ///
    /// Call it on every rank at the start and at intervals: the collectives of a step do not compare what tensors
    /// contain. It costs three small collectives, and one more if stages share a parameter.
    ///
    /// # Errors
    /// `Kind::Diverged` on every rank, naming what differs; errors of `load_batch` and of the collectives.
    #[track_caller]
    pub fn check_consistent(&self) -> Result<()> {
        let site = Location::caller();
        let arguments = self.load_microbatch(0)?;
        let layouts: Vec<String> = arguments.iter().map(|t| t.layout().to_string()).collect();
        // Memory may differ between ranks.
        let config = TrainerConfig { rank_memory_bytes: None, ..self.config.clone() };
        let values = [
            ("settings", format!("{config:?}")),
            ("optimizer", self.optim.describe()),
            ("step", self.step.to_string()),
            ("loss scale", format!("{:?}", self.loss_scale)),
            ("arguments of the loss", format!("{}, {}", layouts.len(), layouts.join(", "))),
        ];
        check_consistent(self.rank(), &values, site)?;
        check_parameters(&self.model, site)?;
        let names: Vec<String> = (0..arguments.len()).map(|i| format!("argument {i} of the loss")).collect();
        let arguments: Vec<_> = names.iter().map(String::as_str).zip(&arguments).collect();
        check_replicas(self.rank(), &arguments, site)
    }
}
